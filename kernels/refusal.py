"""How a kernel says that it does not take what it is given, so that the next in line is asked."""


class RefusedError(ValueError):
    """A kernel does not take these arguments; the text is the argument and the rule."""
