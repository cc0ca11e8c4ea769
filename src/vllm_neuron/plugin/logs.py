"""Where this package's log lines go."""

import logging
import sys

FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"
DATE_FORMAT = "%m-%d %H:%M:%S"


def configure_logging(level: str = "INFO") -> None:
    """Let the package's logger print at ``level``, with vLLM's layout. Handlers that others have set up are kept."""
    logger = logging.getLogger("vllm_neuron")
    logger.setLevel(level)
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, DATE_FORMAT))
    logger.addHandler(handler)
    # Some library that is imported later gives the root logger a handler, which would print every line again.
    logger.propagate = False
