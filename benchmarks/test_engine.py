"""Whole batches through vLLM's engine on both routes in CPU mode, without an API server.

    python -m pytest benchmarks/test_engine.py --benchmark-columns=min,median,rounds

The model has the sizes of SmolLM2-135M in bfloat16 and random weights. Prompts of 128 tokens and 32 new tokens at batch
1, 8 and 32; a prompt of 900 tokens and one new one; and 16 requests with prompts of 20 to 300 tokens and answers of 8
to 40, so that prefill and decode take turns.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import BUCKETS, engine, prompt
from steps import SIZES
from transformers import LlamaConfig

Batch = list[tuple[int, int]]
"""Prompt tokens and new tokens of each request."""
BATCHES: dict[str, Batch] = {
    "decode-1": [(128, 32)],
    "decode-8": [(128, 32)] * 8,
    "decode-32": [(128, 32)] * 32,
    "prefill-900": [(900, 1)],
    "mixed": [(20 + 37 * i % 281, 8 + 11 * i % 33) for i in range(16)],
}


@pytest.fixture(scope="module", params=["neuron_native", "vllm_neuron"], ids=["native", "xla"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp("model")
    LlamaConfig(**vars(SIZES)).save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_NEURON_CPU_MODE", "1")
        patch.setenv("VLLM_NEURON_BACKEND", request.param)
        with engine(
            str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
            additional_config=BUCKETS,
        ) as made:
            yield made


@pytest.mark.parametrize("name", BATCHES)
def test_batch(benchmark: Any, llm: Any, name: str) -> None:
    from vllm import SamplingParams

    batch = BATCHES[name]
    prompts = [{"prompt_token_ids": prompt(row, tokens)} for row, (tokens, _) in enumerate(batch)]
    sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in batch]
    outputs = benchmark.pedantic(
        lambda: llm.generate(prompts, sampling, use_tqdm=False), rounds=5 if len(batch) == 1 else 3, warmup_rounds=1
    )
    assert [len(output.outputs[0].token_ids) for output in outputs] == [n for _, n in batch]
    benchmark.extra_info["tokens"] = sum(n for _, n in batch)
