"""Errors about a model that cannot be served. All are ValueErrors, raised before any weight is read."""


class UnsupportedArchitectureError(ValueError):
    """No model of this name here; the message lists those there are."""


class UnsupportedModelError(ValueError):
    """The architecture is known, but its configuration asks for something that is not there."""


class ModelPackageError(ValueError):
    """A package offers this architecture by entry point, but what it offers cannot be used."""
