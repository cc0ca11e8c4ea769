"""Makes vLLM accept the architectures that other packages bring for this plugin."""

from vllm_neuron.models.external import external_architectures

KIND_OF_MODEL = "vllm.model_executor.models.llama:LlamaForCausalLM"
"""vLLM asks a model's class only what kind of model it is; ours are decoders that generate text, like this one. It is
never made: the worker builds the model that the package gives."""


def register_external_models() -> None:
    """Name each of them to vLLM's model registry, unless vLLM knows it. Imports none of their packages."""
    names = external_architectures().keys()
    if not names:
        return
    from vllm.model_executor.models import ModelRegistry

    for name in names - ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, KIND_OF_MODEL)
