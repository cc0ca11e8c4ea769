"""NKI_SIMULATOR=1 in the real engine: the kernels run in the simulator, and the tokens are those of the torch twins."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import BACKENDS, generate, prompt, running_llm
from vllm_neuron.kernels.simulator import frontend

SMALL: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 128,
    "num_gpu_blocks_override": 24,
    "additional_config": {"neuron_config": {"num_batched_tokens_buckets": [128], "num_seqs_buckets": [2]}},
}
PROMPTS = [prompt(20, seed=1), prompt(150, seed=2)]
"""The second is split, so that its last tokens look back on KV of an earlier step."""


def tokens(path: Path, backend: str, variable: str) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variable, "1")
        with running_llm(path, backend, **SMALL) as llm:
            return generate(llm, PROMPTS, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_model_generates_the_tokens_of_the_twins(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = checkpoint("llama"), set()
    run = frontend.run

    def noted(function: Any, *arguments: Any, **options: Any) -> Any:
        ran.add(function.__name__.removesuffix("_kernel"))
        return run(function, *arguments, **options)

    monkeypatch.setattr(frontend, "run", noted)
    simulated = tokens(path, backend, "NKI_SIMULATOR")
    layer = {"rms_norm", "add_rms_norm", "rope", "kv_write", "paged_decode_attention", "paged_prefill_attention"}
    assert ran == layer, "nothing fell back in silence"
    ran.clear()
    assert simulated == tokens(path, backend, "VLLM_NEURON_DISABLE_NKI_KERNELS")
    assert simulated == [greedy_oracle(path, p, 6) for p in PROMPTS]
    assert not ran
