"""The demo model in bfloat16: as likely text as transformers finds it, on both routes."""

import math
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.serving.engine import BACKENDS, running_llm

REAL_TEXT = Path(__file__).parents[2] / "LICENSE"
TOKENS = 1000


@cache
def reference_perplexity(path: Path, ids: tuple[int, ...]) -> float:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, :-1].float()
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:])).item())


@pytest.mark.parametrize("backend", BACKENDS)
def test_real_perplexity_within_half_a_percent_of_transformers(demo_model: Path, backend: str) -> None:
    from vllm import SamplingParams

    args = {
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 256,
        "num_gpu_blocks_override": 40,
        "additional_config": {"neuron_config": {"num_batched_tokens_buckets": [256]}},
    }
    with running_llm(demo_model, backend, **args) as llm:
        ids = llm.get_tokenizer()(REAL_TEXT.read_text())["input_ids"][:TOKENS]
        assert len(ids) == TOKENS
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    losses = [-output.prompt_logprobs[i][ids[i]].logprob for i in range(1, TOKENS)]
    perplexity = math.exp(sum(losses) / len(losses))
    assert perplexity == pytest.approx(reference_perplexity(demo_model, tuple(ids)), rel=0.005)
