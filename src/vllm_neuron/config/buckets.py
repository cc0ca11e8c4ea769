"""Bucket lists: the automatic ones, and the rules that tie the user's to vLLM's limits."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from vllm_neuron.config.blocks import request_blocks
from vllm_neuron.config.faults import Fault
from vllm_neuron.config.options import NeuronConfig
from vllm_neuron.config.parsing import NEURON
from vllm_neuron.config.resolved import Notice
from vllm_neuron.config.settings import ServingSettings

DEFAULT_BLOCK_SIZE = 32
SMALLEST_TOKEN_BUCKET = 128

TOKENS = f"{NEURON}.num_batched_tokens_buckets"
SEQS = f"{NEURON}.num_seqs_buckets"
SEGMENTS = f"{NEURON}.kv_segment_size_buckets"
CONTEXTS = f"{NEURON}.decode_context_length_buckets"


@dataclass
class BucketPlan:
    """Limits and bucket lists that agree with each other, unless there are faults.

    Attributes:
        max_num_batched_tokens: most tokens of a prefill step; the last of `tokens`.
        max_num_seqs: most requests that run at once; the last of `seqs`.
        tokens: prefill token counts, ascending.
        seqs: decode batch sizes, ascending.
        contexts: decode context lengths in tokens, ascending, ending with max_model_len.
        segment: tokens per segment, or None.
        block_size: tokens per KV block.
        faults: what is wrong.
        notices: which limits were changed.
    """

    max_num_batched_tokens: int
    max_num_seqs: int
    tokens: tuple[int, ...] = ()
    seqs: tuple[int, ...] = ()
    contexts: tuple[int, ...] = ()
    segment: int | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    faults: list[Fault] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def powers_of_two(first: int, limit: int) -> tuple[int, ...]:
    """``first``, twice that, and so on strictly below ``limit``, then ``limit`` itself. Both are at least 1."""
    values = []
    while first < limit:
        values.append(first)
        first *= 2
    return (*values, limit)


def plan_buckets(settings: ServingSettings, options: NeuronConfig, faulty: Collection[str]) -> BucketPlan:
    """All bucket lists of a configuration. Options named in ``faulty`` are already reported; nothing derives from them.

    vLLM's own limits are changed only where the user left them open: max_num_batched_tokens becomes the largest listed
    bucket or segment, max_num_seqs the largest listed batch size.
    """
    plan = BucketPlan(min(settings.max_num_batched_tokens, settings.max_model_len), settings.max_num_seqs)
    tokens_known = _plan_tokens(plan, settings, options) and not {TOKENS, SEGMENTS} & set(faulty)
    seqs_known = _plan_seqs(plan, settings, options) and SEQS not in faulty
    if tokens_known and seqs_known:
        _fit_seqs_into_step(plan, settings, options)
    plan.tokens = options.num_batched_tokens_buckets or powers_of_two(
        plan.segment or SMALLEST_TOKEN_BUCKET, plan.max_num_batched_tokens
    )
    plan.seqs = options.num_seqs_buckets or powers_of_two(1, plan.max_num_seqs)
    _plan_contexts(plan, settings, options)
    _plan_blocks(plan, settings)
    if tokens_known:
        _check_splitting(plan, settings)
    return plan


def _plan_tokens(plan: BucketPlan, settings: ServingSettings, options: NeuronConfig) -> bool:
    """Set the step's token limit and the segment. False if that is not possible."""
    listed = options.num_batched_tokens_buckets
    segments = options.kv_segment_size_buckets
    limit = settings.max_model_len
    plan.segment = segments[0] if segments else None
    if plan.segment and listed and listed != segments:
        rule = f"must equal kv_segment_size_buckets={list(segments or ())}, because a segment is one prefill step"
        plan.faults.append(Fault(TOKENS, list(listed), rule, f"Set it to {list(segments or ())} or leave it out."))
        return False
    option, largest = (SEGMENTS, plan.segment) if plan.segment else (TOKENS, listed[-1] if listed else None)
    if largest is None:
        return True
    if largest > limit:
        value = list(segments or listed or ())
        rule = f"a graph of {largest} tokens could never be used with max_model_len={limit}"
        plan.faults.append(Fault(option, value, rule, _too_long_remedy(option, largest, limit)))
        return False
    if settings.max_num_batched_tokens_set:
        if largest != plan.max_num_batched_tokens:
            plan.faults.append(_token_limit_fault(plan, settings, option, largest, list(segments or listed or ())))
            return False
        return True
    if largest != plan.max_num_batched_tokens:
        plan.notices.append(_changed("max_num_batched_tokens", settings.max_num_batched_tokens, largest, option))
    plan.max_num_batched_tokens = largest
    return True


def _too_long_remedy(option: str, largest: int, limit: int) -> str:
    raise_limit = f"set max_model_len to {largest} or more"
    if option == SEGMENTS:
        return f"Leave it out, choose a size of at most {limit}, or {raise_limit}."
    return f"End the list with {limit}, or {raise_limit}."


def _token_limit_fault(
    plan: BucketPlan, settings: ServingSettings, option: str, largest: int, value: list[int]
) -> Fault:
    effective = plan.max_num_batched_tokens
    rule = f"the largest value must equal max_num_batched_tokens={effective}"
    if settings.max_num_batched_tokens > settings.max_model_len:
        rule += f" (max_num_batched_tokens={settings.max_num_batched_tokens} is limited by max_model_len)"
    first = f"Choose size {effective}" if option == SEGMENTS else f"End the list with {effective}"
    remedy = f"{first}, or set max_num_batched_tokens to {largest}, or leave that out."
    return Fault(option, value, rule, remedy)


def _plan_seqs(plan: BucketPlan, settings: ServingSettings, options: NeuronConfig) -> bool:
    """Set the limit of running requests. False if that is not possible."""
    listed = options.num_seqs_buckets
    if not listed or listed[-1] == settings.max_num_seqs:
        return True
    largest = listed[-1]
    if settings.max_num_seqs_set:
        rule = f"the largest value must equal max_num_seqs={settings.max_num_seqs}"
        remedy = f"End the list with {settings.max_num_seqs}, or set max_num_seqs to {largest}, or leave that out."
        plan.faults.append(Fault(SEQS, list(listed), rule, remedy))
        return False
    plan.notices.append(_changed("max_num_seqs", settings.max_num_seqs, largest, SEQS))
    plan.max_num_seqs = largest
    return True


def _fit_seqs_into_step(plan: BucketPlan, settings: ServingSettings, options: NeuronConfig) -> None:
    """A decode step takes a token of each request, and vLLM's scheduler grants no more tokens than a step may have."""
    tokens = plan.max_num_batched_tokens
    if plan.max_num_seqs <= tokens:
        return
    if settings.max_num_seqs_set or options.num_seqs_buckets:
        option, value = (SEQS, list(options.num_seqs_buckets)) if options.num_seqs_buckets else (
            "max_num_seqs", settings.max_num_seqs)  # fmt: skip
        rule = f"a decode step takes one token of each request, and a step may have {tokens} tokens"
        remedy = (
            f"Lower max_num_seqs to {tokens} or less, or raise whichever of max_num_batched_tokens, max_model_len and "
            "the largest token bucket sets that limit."
        )
        plan.faults.append(Fault(option, value, rule, remedy))
        return
    text = f"max_num_seqs was not set and is changed from {plan.max_num_seqs} to {tokens}, the most tokens of a step."
    plan.notices.append(Notice(logging.INFO, text))
    plan.max_num_seqs = tokens


def _plan_contexts(plan: BucketPlan, settings: ServingSettings, options: NeuronConfig) -> None:
    listed = options.decode_context_length_buckets or ()
    plan.contexts = (*listed, settings.max_model_len)
    if listed and listed[-1] >= settings.max_model_len:
        rule = f"every value must be less than max_model_len={settings.max_model_len}, which is the last bucket anyway"
        remedy = "Leave out the values that are not, or leave out the option."
        plan.faults.append(Fault(CONTEXTS, list(listed), rule, remedy))


def _plan_blocks(plan: BucketPlan, settings: ServingSettings) -> None:
    size = DEFAULT_BLOCK_SIZE if settings.block_size is None else settings.block_size
    plan.block_size = size
    if size < 1:
        plan.faults.append(Fault("block_size", size, "must be at least 1", "Correct it or leave it out."))
        return
    if plan.segment and plan.segment % size:
        rule = f"must divide the segment size {plan.segment} of kv_segment_size_buckets"
        plan.faults.append(Fault("block_size", size, rule, "Use a power of two, such as 32 or 128, or leave it out."))
    override = settings.num_gpu_blocks_override
    minimum = request_blocks(settings.kv_windows, settings.max_model_len, plan.max_num_batched_tokens, size) + 1
    if override is not None and override < minimum:
        rule = (
            f"must be at least {minimum}: a request of max_model_len={settings.max_model_len} tokens takes "
            f"{minimum - 1} blocks of {size} tokens, and block 0 is reserved for padding"
        )
        plan.faults.append(Fault("num_gpu_blocks_override", override, rule, f"Set {minimum} or more, or leave it out."))


def _check_splitting(plan: BucketPlan, settings: ServingSettings) -> None:
    """Without chunked prefill a prompt longer than a step would wait for ever."""
    if settings.enable_chunked_prefill or plan.max_num_batched_tokens >= settings.max_model_len:
        return
    rule = (
        f"prompts longer than {plan.max_num_batched_tokens} tokens must be split over steps, and max_model_len="
        f"{settings.max_model_len} allows them"
    )
    remedy = f"Leave out --no-enable-chunked-prefill, or set max_num_batched_tokens to {settings.max_model_len}."
    plan.faults.append(Fault("enable_chunked_prefill", False, rule, remedy))


def _changed(name: str, old: int, new: int, option: str) -> Notice:
    text = f"{name} was not set and is changed from {old} to {new}, the largest value of {option}."
    return Notice(logging.INFO, text)
