"""The platform is chosen once per process, so it is chosen here, before a test asks vLLM's own sampler."""

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("VLLM_NEURON_CPU_MODE", "1")
    import vllm.platforms

    assert vllm.platforms.current_platform.is_out_of_tree()
