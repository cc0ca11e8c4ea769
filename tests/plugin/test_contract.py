"""The names and signatures of vLLM that this package overrides or relies on, so that another vLLM fails here first."""

import inspect
from collections.abc import Callable

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms.interface import Platform
from vllm.v1.core.sched.output import CachedRequestData, GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.worker_base import WorkerBase

from tests.plugin.simulation import make_config
from vllm_neuron.plugin.hooks import HOOKS
from vllm_neuron.plugin.platform import NeuronPlatform
from vllm_neuron.plugin.scheduler import NeuronScheduler
from vllm_neuron.plugin.worker import NeuronWorker


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def overridden(ours: type, theirs: type) -> list[str]:
    """Public methods of both; cls and self are bound alike, so only functions and class methods count."""
    return [n for n in vars(ours) if not n.startswith("_") and callable(getattr(ours, n)) and hasattr(theirs, n)]


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [
        (ours, theirs, name)
        for ours, theirs in ((NeuronPlatform, Platform), (NeuronWorker, WorkerBase), (NeuronScheduler, Scheduler))
        for name in overridden(ours, theirs)
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_overrides_have_vllms_parameters(ours: type, theirs: type, name: str) -> None:
    assert parameters(getattr(ours, name)) == parameters(getattr(theirs, name))


def test_nothing_abstract_of_the_worker_is_left() -> None:
    required = {name for name, value in vars(WorkerBase).items() if inspect.isfunction(value)}
    optional = {"__init__", "apply_model", "get_cache_block_size_bytes", "get_model", "get_model_inspection",
                "reset_mm_cache"}  # fmt: skip
    assert required - optional <= set(vars(NeuronWorker))


def test_the_hook_that_notes_open_limits() -> None:
    function = EngineArgs._set_default_max_num_seqs_and_batched_tokens_args
    assert parameters(inspect.unwrap(function)) == ["usage_context", "model_config"]
    assert EngineArgs.max_num_seqs is None and EngineArgs.max_num_batched_tokens is None


def _assigned(owner: type) -> set[str]:
    """Names that a class's constructor assigns to self."""
    parts = inspect.getsource(owner.__init__).split("self.")[1:]
    return {part.split(" ")[0].split(":")[0].split("(")[0] for part in parts}


def test_attributes_of_the_scheduler_and_its_requests() -> None:
    limits = {"running", "waiting", "max_num_running_reqs", "max_num_scheduled_tokens"}
    assert limits | {"use_v2_model_runner", "prev_step_scheduled_req_ids"} <= _assigned(Scheduler)
    assert {"num_computed_tokens", "num_prompt_tokens"} <= _assigned(Request) and isinstance(
        Request.num_tokens, property
    )


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (NewRequestData, {"req_id", "prompt_token_ids", "prefill_token_ids", "block_ids", "num_computed_tokens"}),
        (CachedRequestData, {"req_ids", "resumed_req_ids", "all_token_ids", "new_block_ids", "num_computed_tokens"}),
        (SchedulerOutput, {"num_scheduled_tokens", "finished_req_ids", "preempted_req_ids", "free_encoder_mm_hashes"}),
        (SchedulerOutput, {"has_structured_output_requests", "pending_structured_output_tokens"}),
        (GrammarOutput, {"structured_output_request_ids", "grammar_bitmask"}),
        (ModelRunnerOutput, {"req_ids", "req_id_to_index", "sampled_token_ids", "logprobs", "prompt_logprobs_dict"}),
    ],
    ids=lambda value: getattr(value, "__name__", "fields"),
)
def test_fields_of_the_step_protocol(owner: type, names: set[str]) -> None:
    assert names <= set(owner.__dataclass_fields__)  # type: ignore[attr-defined]


def test_signatures_of_what_brings_masks_to_the_worker() -> None:
    """Case STO-3: the grammar's masks are asked for between a step's two halves, and handed to the second."""
    assert parameters(Scheduler.schedule) == []
    assert parameters(Scheduler.get_grammar_bitmask) == ["scheduler_output"]
    assert parameters(WorkerBase.sample_tokens) == ["grammar_output"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(owner, name) for owner, names in HOOKS for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_vllm_without_a_hook_is_refused_at_start(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case STO-3: an error at start, not free text."""
    fields = getattr(owner, "__dataclass_fields__", None)
    if fields is None:
        monkeypatch.delattr(owner, name)
    else:
        monkeypatch.delitem(fields, name)
    with pytest.raises(RuntimeError, match=rf"lacks {owner.__name__}\.{name}, .*structured outputs"):
        make_config()


def test_attributes_of_the_input_batch() -> None:
    assert {"token_ids_cpu", "num_tokens_no_spec", "num_computed_tokens_cpu", "block_table"} <= _assigned(InputBatch)
    for name in ("add_request", "remove_request", "condense", "refresh_metadata"):
        assert callable(getattr(InputBatch, name))
