"""Errors about a model that cannot be served. Both are ValueErrors, raised before any weight is read."""


class UnsupportedArchitectureError(ValueError):
    """No model of this name here; the message lists those there are."""


class UnsupportedModelError(ValueError):
    """The architecture is known, but its configuration asks for something that is not there."""
