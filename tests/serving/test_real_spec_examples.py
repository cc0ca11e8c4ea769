"""The configuration reference's examples, on a tiny model and one device: they start, or say what they still lack."""

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import checkpoint, embedding_rows, greedy_oracle
from tests.models.fp8 import greedy_with_fp8_cache, write_checkpoint_with_kv_scales
from tests.serving.engine import BACKENDS, generate, prompt, running_llm, statistics

COMPLETE_EXAMPLE: dict[str, Any] = {
    "max_model_len": 4096,
    "max_num_seqs": 8,
    "tensor_parallel_size": 1,
    "block_size": 128,
    "kv_cache_dtype": "fp8",
    "enable_prompt_embeds": True,
    "additional_config": {
        "neuron_config": {
            "num_seqs_buckets": [1, 2, 4, 8],
            "kv_segment_size_buckets": [2048],
            "num_batched_tokens_buckets": [2048],
            "on_device_sampling_config": {"all_greedy": True},
        }
    },
}
UNSET = {"max_num_batched_tokens": None, "max_num_seqs": None, "block_size": None}


def test_real_overview_example_starts() -> None:
    """On one route: which graphs there are does not depend on it."""
    path = checkpoint("llama")
    example = {
        **UNSET,
        "max_model_len": 4096,
        "num_gpu_blocks_override": 140,
        "additional_config": {
            "neuron_config": {
                "num_batched_tokens_buckets": [128, 256, 512, 1024, 2048, 4096],
                "num_seqs_buckets": [1, 2, 4, 8],
            }
        },
    }
    ids = prompt(1500, seed=1)
    with running_llm(path, "neuron_native", **example) as llm:
        assert generate(llm, [ids], 4) == [greedy_oracle(path, ids, 4)]
        names = set(statistics(llm)["seconds"])
    assert {f"prefill_t{t}_ctx4096" for t in (128, 256, 512, 1024, 2048, 4096)} <= names
    assert {f"decode_b{b}_ctx4096" for b in (1, 2, 4, 8)} <= names


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_complete_example_starts(backend: str, tmp_path: Path) -> None:
    from vllm import SamplingParams

    # The weights are those of the shared checkpoint; transformers itself would not load one with scales.
    path = write_checkpoint_with_kv_scales(tmp_path / "model")
    example = {**UNSET, **COMPLETE_EXAMPLE, "num_gpu_blocks_override": 70}
    ids = prompt(2500, seed=2)
    expected = greedy_with_fp8_cache(path, ids, 4)
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with running_llm(path, backend, **example) as llm:
        assert generate(llm, [ids], 4) == [expected]
        (output,) = llm.generate([{"prompt_embeds": embedding_rows(checkpoint("llama"), ids)}], greedy, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected
        assert "prefill_t2048_ctx4096_embeds_greedy" in statistics(llm)["seconds"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("additional_config", {"neuron_config": {"quantization": "mxfp4"}}),
        ("additional_config", {"neuron_config": {}, "mm_language_model_only": True}),
    ],
)
def test_real_single_option_examples_say_what_is_missing(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match="not supported yet"), running_llm(checkpoint("llama"), "", **{option: value}):
        pass
