"""vLLM platform plugin for AWS Neuron (Trainium 2 and 3)."""

__version__ = "0.16.0.1"
