"""Every executed shape is one that warm-up compiled, for odd budgets, mixed loads and long prompts."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.caches import new_cache
from tests.checkpoints import checkpoint, greedy_oracle
from tests.serving.engine import BACKENDS, generate, prompt, running_llm, statistics
from vllm_neuron.engine.compiler import CompileForbiddenError


def executed(llm: Any) -> set[str]:
    return {name for name, count in statistics(llm)["executions"].items() if count}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("buckets", [None, [128, 317]], ids=["automatic", "listed"])
def test_real_budget_that_is_no_power_of_two(backend: str, buckets: list[int] | None) -> None:
    path = checkpoint("llama")
    neuron_config = {} if buckets is None else {"num_batched_tokens_buckets": buckets}
    args = {"max_num_batched_tokens": 317, "max_num_seqs": 2, "additional_config": {"neuron_config": neuron_config}}
    with running_llm(path, backend, **args) as llm:
        for length in (1, 127, 128, 129, 316, 317):
            ids = prompt(length, seed=length)
            assert generate(llm, [ids], 4) == [greedy_oracle(path, ids, 4)], length
        counters = statistics(llm)
        assert counters["compiles_after_warmup"] == 0
        assert counters["compiled"] + counters["cached"] == len(counters["seconds"])


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_strict_mode_serves_a_mixed_load_and_names_a_missing_graph(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    path = checkpoint("llama")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(new_cache(tmp_path)))
    args = {
        "max_model_len": 512,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "additional_config": {"neuron_config": {"num_seqs_buckets": [2, 8], "decode_context_length_buckets": [256]}},
    }
    with running_llm(path, backend, **args) as llm:
        filled = statistics(llm)
        assert filled["compiled"] == len(filled["seconds"])
    monkeypatch.setenv("VLLM_NEURON_DISABLE_WARMUP_COMPILE", "1")
    with running_llm(path, backend, **args) as llm:
        counters = statistics(llm)
        assert (counters["compiled"], counters["cached"]) == (0, len(counters["seconds"]))
        kinds = [
            {"temperature": 0.0},
            {"temperature": 0.9, "top_p": 0.8, "seed": 1},
            {"temperature": 0.7, "logprobs": 3},
            {"temperature": 0.0, "prompt_logprobs": 2},
            {"temperature": 0.5, "structured_outputs": StructuredOutputsParams(regex="[0-9]{3}")},
        ]
        lengths = [1 + (37 * i) % 500 for i in range(100)]
        params = [SamplingParams(max_tokens=1 + i % 11, **kinds[i % len(kinds)]) for i in range(len(lengths))]
        prompts = [{"prompt_token_ids": prompt(n, seed=n)} for n in lengths]
        for output, wanted in zip(llm.generate(prompts, params, use_tqdm=False), params, strict=True):
            assert 1 <= len(output.outputs[0].token_ids) <= wanted.max_tokens
        assert statistics(llm)["compiles_after_warmup"] == 0
        assert {"decode_b8_ctx256", "decode_b8_ctx512", "prompt_logits_t128"} <= executed(llm)
    entries = sorted(p.parent for p in tmp_path.rglob("manifest.json"))
    removed = next(p for p in entries if "decode_b8_ctx256" in (p / "manifest.json").read_text())
    shutil.rmtree(removed)
    with pytest.raises(CompileForbiddenError) as refused, running_llm(path, backend, **args):
        pass
    assert "decode_b8_ctx256" in str(refused.value) and "VLLM_NEURON_DISABLE_WARMUP_COMPILE" in str(refused.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_decode_context_buckets_do_not_change_tokens(backend: str) -> None:
    path = checkpoint("llama")
    ids = [prompt(n, seed=n) for n in (100, 120, 250)]
    buckets = {"neuron_config": {"num_seqs_buckets": [4], "decode_context_length_buckets": [128, 256]}}
    with running_llm(path, backend, additional_config=buckets) as llm:
        assert generate(llm, ids, 40) == [greedy_oracle(path, i, 40) for i in ids]
        # Alone, the short one moves from the smallest context to the next as it passes 128 tokens.
        assert generate(llm, ids[:1], 40) == [greedy_oracle(path, ids[0], 40)]
        assert {"decode_b4_ctx128", "decode_b4_ctx256", "decode_b4_ctx1024"} <= executed(llm)
