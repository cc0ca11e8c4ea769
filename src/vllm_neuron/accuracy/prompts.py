"""Prompts to compare models with, where the user brings none."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
    "Water boils at one hundred degrees Celsius because",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\nI am writing to",
    "The three laws of thermodynamics say that energy",
    "SELECT name, COUNT(*) FROM orders",
)
"""Prose, code, numbers and a letter: what follows them is neither all certain nor all open."""
