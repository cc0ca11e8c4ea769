"""The platform is chosen once per process, so it is chosen here, before a test module imports vLLM."""

import logging
from collections.abc import Iterator

import pytest

with pytest.MonkeyPatch.context() as patch:
    patch.setenv("VLLM_NEURON_CPU_MODE", "1")
    import vllm.platforms

    assert vllm.platforms.current_platform.is_out_of_tree()
    # Where pytest has no handler yet, the platform gives the package one of its own and keeps lines from caplog.
    logging.getLogger("vllm_neuron").propagate = True


@pytest.fixture(autouse=True)
def _cpu_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("VLLM_NEURON_CPU_MODE", "1")
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.delenv("VLLM_NEURON_BACKEND", raising=False)
    yield
