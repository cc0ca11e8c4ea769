"""vLLM's scheduler and our model runner around a model whose answer depends on every token it finds in its KV cache.

The "model" keeps token ids where a real one keeps keys and values, in the same blocks and slots. Its next token is a
hash of all it reads, so one wrong block, position or token anywhere shows in the answer; `answer` is the oracle. With
several KV groups it reads each group's part of the context in turn: all of it, or as much as the group's window shows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.checkpoints import VOCAB_SIZE, checkpoint
from vllm_neuron.engine.executor import SubmittedStep
from vllm_neuron.engine.inputs import NOT_FED, Row, RowSampling
from vllm_neuron.engine.queue import DeviceQueue
from vllm_neuron.kv_cache.blocks import first_visible
from vllm_neuron.models.model import StepOutputs
from vllm_neuron.plugin.model_runner import NeuronModelRunner
from vllm_neuron.plugin.scheduler import NeuronScheduler
from vllm_neuron.sampling import ALLOW_ALL, SamplingInputs, mask_words, sample

BLOCK_SIZE = 8
HIDDEN = 4
Windows = tuple[int | None, ...]
"""Per KV group how many tokens it looks back on; None is all."""


def make_config(**args: Any) -> VllmConfig:
    """A VllmConfig of the tiny Llama, as vLLM's front end makes it."""
    defaults = {"model": str(checkpoint("llama")), "dtype": "float32", "max_model_len": 64, "max_num_seqs": 4}
    return EngineArgs(
        **{**defaults, "max_num_batched_tokens": 16, "block_size": BLOCK_SIZE, "async_scheduling": False, **args}
    ).create_engine_config()


def scores(context: Sequence[int]) -> np.ndarray:
    """Logits [V] that stand for a context; no two contexts have the same."""
    return np.random.default_rng([len(context), *context]).standard_normal(VOCAB_SIZE).astype(np.float32)


def answer(prompt: Sequence[int], count: int, windows: Windows = (None,)) -> list[int]:
    """What greedy decoding appends to the prompt."""
    tokens = list(prompt)
    for _ in range(count):
        seen = [token for window in windows for token in tokens[first_visible(len(tokens) - 1, window) :]]
        tokens.append(int(scores(seen).argmax()))
    return tokens[len(prompt) :]


def embedded(prompt: Sequence[int]) -> torch.Tensor:
    """Embeddings [n, H] that the "model" reads as these numbers, which need not be token ids."""
    embeddings = torch.zeros(len(prompt), HIDDEN)
    embeddings[:, 0] = torch.tensor(prompt)
    return embeddings


class CachingExecutor:
    """In place of `GraphExecutor`; remembers the steps."""

    def __init__(self, num_blocks: int, windows: Windows) -> None:
        self._windows = windows
        self._cache = np.full(num_blocks * BLOCK_SIZE, -1)
        self.steps: list[tuple[str, int]] = []
        self.sampled: list[RowSampling] = []

    def run_prefill(self, row: Row) -> StepOutputs:
        self.steps.append(("prefill", len(row.token_ids)))
        logits = self._run(row)
        hidden = torch.zeros(len(row.token_ids), HIDDEN)
        for index in range(len(row.token_ids)):
            hidden[index, 0] = row.start + index
        return StepOutputs(logits[: int(row.wants_logits)], hidden)

    def run_decode(self, rows: Sequence[Row]) -> StepOutputs:
        self.steps.append(("decode", len(rows)))
        return StepOutputs(torch.cat([self._run(row) for row in rows]), torch.zeros(len(rows), HIDDEN))

    def submit_prefill(self, row: Row, *, logprobs: bool) -> SubmittedStep:
        self.steps.append(("prefill", len(row.token_ids)))
        return self._sample([row], None)

    def submit_decode(
        self, rows: Sequence[Row], after: SubmittedStep | None = None, *, logprobs: bool
    ) -> SubmittedStep:
        self.steps.append(("decode", len(rows)))
        return self._sample(rows, after)

    def _sample(self, rows: Sequence[Row], after: SubmittedStep | None) -> SubmittedStep:
        fed = [
            row
            if row.fed_from == NOT_FED or after is None
            else row._replace(token_ids=after.sampled.result().token_ids[row.fed_from : row.fed_from + 1].numpy())
            for row in rows
        ]
        self.sampled += [row.sampling for row in rows]
        temperature, top_k, top_p, uniforms, masks = zip(*(row.sampling for row in rows), strict=True)
        words = [np.full(mask_words(VOCAB_SIZE), ALLOW_ALL, np.int32) if mask is None else mask for mask in masks]
        inputs = SamplingInputs(
            torch.tensor(temperature),
            torch.tensor(top_k, dtype=torch.int32),
            torch.tensor(top_p),
            torch.tensor(uniforms),
            torch.from_numpy(np.stack(words)),
        )
        logits = torch.cat([self._run(row) for row in fed])
        return SubmittedStep(len(rows), DeviceQueue(False).submit(lambda: sample(logits, inputs, VOCAB_SIZE)))

    def _run(self, row: Row) -> torch.Tensor:
        contents = row.token_ids.copy()
        if row.embeddings is not None:
            contents[: len(row.embeddings)] = row.embeddings[:, 0].numpy()
        seen: list[int] = []
        for window, block_ids in zip(self._windows, row.block_ids, strict=True):
            first = first_visible(row.start, window)
            positions = np.arange(first, row.end)
            slots = block_ids[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
            assert slots.min() >= BLOCK_SIZE, "the null block is never written to, nor read"
            self._cache[slots[row.start - first :]] = contents
            seen += self._cache[slots[first_visible(row.end - 1, window) - first :]].tolist()
        return torch.from_numpy(scores(seen))[None]


@dataclass
class Trace:
    """What happened: per step its kind, and how many requests were decoding when it was made."""

    kinds: list[str] = field(default_factory=list)
    decoding: list[int] = field(default_factory=list)
    first_tokens: list[str] = field(default_factory=list)
    preemptions: int = 0


class Simulation:
    """An engine without processes.

    Args:
        config: vLLM's configuration.
        num_blocks: NB, blocks of the KV cache.
        windows: the KV groups.
    """

    scheduler_class: type[NeuronScheduler] = NeuronScheduler
    executor_class: type[CachingExecutor] = CachingExecutor

    def __init__(self, config: VllmConfig, num_blocks: int, windows: Windows = (None,)) -> None:
        config.cache_config.num_gpu_blocks = num_blocks
        groups = [KVCacheGroupSpec([f"layer {index}"], _spec(window)) for index, window in enumerate(windows)]
        kv_config = KVCacheConfig(num_blocks, [], groups)
        self.scheduler = self.scheduler_class(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.executor = self.executor_class(num_blocks, windows)
        model: Any = SimpleNamespace(vocab_size=VOCAB_SIZE)
        executor: Any = self.executor
        self.runner = NeuronModelRunner(config, executor, model, len(windows))
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_fn)
        self._num_blocks = num_blocks
        self.trace = Trace()
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, str] = {}

    def add(self, req_id: str, prompt: Sequence[int] | torch.Tensor, max_tokens: int, **sampling: Any) -> Request:
        """Queue a request; greedy unless told otherwise. A tensor is the embeddings of its prompt (`embedded`)."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **sampling})
        embeds = prompt if isinstance(prompt, torch.Tensor) else None
        ids = list(prompt) if embeds is None else None
        request = Request(req_id, ids, params, None, None, prompt_embeds=embeds, block_hasher=self._hasher)
        if params.structured_outputs is not None:
            self.scheduler.structured_output_manager.grammar_init(request)
        self.tokens[req_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, req_id: str) -> None:
        """What a client that goes away causes."""
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """One step of the engine, with all that must hold of every step."""
        decoding = self._decoding()
        output = self.scheduler.schedule()
        assert output.total_num_scheduled_tokens or not decoding, "an empty step while requests could go on"
        self.trace.preemptions += len(output.preempted_req_ids or ())
        result = self.runner.execute_model(output)
        if result is None:
            result = self.runner.sample_tokens(self.scheduler.get_grammar_bitmask(output))
            self.trace.kinds.append(self.executor.steps[-1][0])
            self.trace.decoding.append(decoding)
        self._take(output, result)
        return output, result

    def _take(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Hand the tokens of a step to the scheduler, and note them."""
        self._check(output, result)
        for outputs in self.scheduler.update_from_output(output, result).values():
            for item in outputs.outputs:
                if item.finish_reason is not None:
                    self.endings[item.request_id] = str(item.finish_reason)
                if item.new_token_ids and not self.tokens[item.request_id]:
                    self.trace.first_tokens.append(item.request_id)
                self.tokens[item.request_id] += item.new_token_ids

    @property
    def is_busy(self) -> bool:
        """Whether there is anything left to do."""
        return self.scheduler.has_requests()

    def run(self, limit: int = 2000) -> None:
        """Steps until nothing is left."""
        for _ in range(limit):
            if not self.is_busy:
                self._check_end()
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.scheduler.requests}")

    def longest_prefill_run(self) -> int:
        """Most prefill steps in a row while requests were decoding."""
        longest = current = 0
        for kind, decoding in zip(self.trace.kinds, self.trace.decoding, strict=True):
            current = current + 1 if kind == "prefill" and decoding else 0
            longest = max(longest, current)
        return longest

    def _decoding(self) -> int:
        return sum(r.num_computed_tokens == r.num_tokens - 1 >= r.num_prompt_tokens for r in self.scheduler.running)

    def _check(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        scheduled = output.num_scheduled_tokens
        assert set(result.req_ids) == set(scheduled)
        assert sum(scheduled.values()) <= self.scheduler.scheduler_config.max_num_batched_tokens
        if self.trace.kinds and scheduled and self.trace.kinds[-1] == "decode":
            assert set(scheduled.values()) == {1}
        assert len(self.scheduler.running) <= self.scheduler.max_num_running_reqs
        assert self.scheduler.max_num_running_reqs == self.scheduler.scheduler_config.max_num_seqs

    def _check_end(self) -> None:
        assert not self.scheduler.requests and not self.scheduler.running and not self.scheduler.waiting
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self._num_blocks - 1, "a block has leaked"
        self.step()
        assert not len(self.runner.states), "the runner keeps a request that is gone"


def _spec(window: int | None) -> FullAttentionSpec | SlidingWindowSpec:
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return FullAttentionSpec(**sizes) if window is None else SlidingWindowSpec(**sizes, sliding_window=window)


def prompts(lengths: Sequence[int], seed: int = 0) -> Iterator[list[int]]:
    """Random prompts of these lengths."""
    rng = np.random.default_rng(seed)
    for length in lengths:
        yield rng.integers(3, VOCAB_SIZE, length).tolist()
