"""vLLM platform plugin for AWS Neuron (Trainium 2 and 3)."""

__version__ = "0.16.0.1"


def register() -> str | None:
    """What vLLM calls to ask for a platform, in every process.

    Returns:
        The class to use, or None when nothing asks for this platform: one INFO line says why it stays out.

    Raises:
        SystemExit: this platform is asked for but cannot be used; one ERROR line has the cause and the remedy. vLLM
            swallows every Exception here and would go on with another platform.
    """
    import logging

    try:
        from vllm_neuron.plugin.activation import activate

        return activate()
    except Exception as error:
        cause = " ".join(f"{error}".split()) or "no reason given"
        logging.getLogger(__name__).error(
            "vllm-neuron cannot be used: %s: %s (docs/troubleshooting.md#vllm-neuron-cannot-be-used)",
            type(error).__name__,
            cause,
        )
        raise SystemExit(1) from error
