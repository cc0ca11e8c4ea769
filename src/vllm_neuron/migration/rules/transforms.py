"""Values of the old NeuronConfig that have to be changed on their way."""

from typing import Any

from vllm_neuron.config.options import CONTEXT_ALIGNMENT
from vllm_neuron.migration.draft import Draft
from vllm_neuron.migration.launch import Option, Verdict
from vllm_neuron.migration.rules.rule import Apply, Outcome
from vllm_neuron.migration.values import is_on, numbers, whole_number

WEIGHT_DTYPES = ("int8", "fp8", "f8e4m3")
"""What quantization_dtype may be."""


def repeats(name: str) -> Apply:
    """For a field that says what one of vLLM's options says: dropped if that is set to the same, else moved there."""

    def apply(draft: Draft, value: Any) -> Outcome | None:
        flag = Option(name, value).flag
        present = draft.options.get(name)
        if present is None:
            draft.set(name, value)
            return Outcome(Verdict.RENAMED, flag, f"{flag} was not set.")
        number = whole_number(value)
        same = present.value == value or (number is not None and draft.number(name) == number)
        if same or not present.known:
            return Outcome(Verdict.DROPPED, flag)
        return Outcome(Verdict.DECIDE, flag, f"It contradicts {flag}, which is {present.value} and stays.")

    return apply


def dtype(draft: Draft, value: Any) -> Outcome | None:
    """Dropped if --dtype says the same, else moved there."""
    name = str(value).removeprefix("torch.")
    present = draft.options.get("dtype")
    if present is None:
        draft.set("dtype", name)
        return Outcome(Verdict.RENAMED, "--dtype")
    if str(present.value).removeprefix("torch.") == name:
        return Outcome(Verdict.DROPPED, "--dtype", "Repeats --dtype.")
    return Outcome(Verdict.DECIDE, "--dtype", f"It contradicts --dtype, which is {present.value} and stays.")


def longest_prompt(draft: Draft, value: Any) -> Outcome | None:
    """A limit of prompts that is below that of sequences has no counterpart."""
    length, limit = whole_number(value), draft.number("max_model_len")
    if limit is None or (length is not None and length > limit):
        text = "--max-model-len limits prompt and answer together, and it is not set or smaller."
        return Outcome(Verdict.DECIDE, "--max-model-len", text)
    return None


def prompt_buckets(draft: Draft, value: Any) -> Outcome | None:
    """Prefill sizes, ascending and each once. The largest stays what it is, so the validator can say if it fits."""
    sizes = numbers(value)
    if not sizes:
        return Outcome(Verdict.DECIDE, "", "It is not a list of numbers that is known here.")
    draft.neuron["num_batched_tokens_buckets"] = sorted(set(sizes))
    return None


def context_buckets(draft: Draft, value: Any) -> Outcome | None:
    """Decode context lengths: multiples of 128 below max_model_len, which is the last one by itself."""
    sizes = numbers(value)
    if not sizes:
        return Outcome(Verdict.DECIDE, "", "It is not a list of numbers that is known here.")
    limit = draft.number("max_model_len")
    aligned = sorted({-(-size // CONTEXT_ALIGNMENT) * CONTEXT_ALIGNMENT for size in sizes})
    kept = [size for size in aligned if limit is None or size < limit]
    if not kept:
        return Outcome(Verdict.DROPPED, "", "max_model_len is the last bucket by itself, and no other is below it.")
    draft.neuron["decode_context_length_buckets"] = kept
    if kept != sorted(set(sizes)):
        reason = f"Rounded up to multiples of {CONTEXT_ALIGNMENT}, without those that max_model_len covers by itself."
        return Outcome(Verdict.RENAMED, "", reason)
    return None


def bucketing(draft: Draft, value: Any) -> Outcome | None:
    """Off meant one graph per phase: one bucket per list says that."""
    if is_on(value):
        return None
    length, requests = draft.number("max_model_len"), draft.number("max_num_seqs")
    if length is None or requests is None:
        text = "Off meant one graph per phase: list --max-model-len and --max-num-seqs as the only buckets."
        return Outcome(Verdict.DECIDE, "neuron_config.num_batched_tokens_buckets", text)
    draft.neuron.setdefault("num_batched_tokens_buckets", [length])
    draft.neuron.setdefault("num_seqs_buckets", [requests])
    text = "Off meant one graph per phase: one bucket per list says that."
    return Outcome(Verdict.RENAMED, "neuron_config.num_batched_tokens_buckets, num_seqs_buckets", text)


def prefix_caching(draft: Draft, value: Any) -> Outcome | None:
    """On by default; off becomes vLLM's flag unless the launch itself says something."""
    if is_on(value) or "enable_prefix_caching" in draft.old.options:
        return None
    draft.set("enable_prefix_caching", False)
    return Outcome(Verdict.RENAMED, "--no-enable-prefix-caching")


def async_mode(draft: Draft, value: Any) -> Outcome | None:
    """On by default; off becomes vLLM's flag."""
    if is_on(value):
        return None
    draft.set("async_scheduling", False)
    return Outcome(Verdict.RENAMED, "--no-async-scheduling")


def expert_parallel(draft: Draft, value: Any) -> Outcome | None:
    """A degree above 1 turns expert parallelism on; the degree itself follows from tensor and data parallelism."""
    if whole_number(value) == 1:
        return Outcome(Verdict.DROPPED, "", "1 is no expert parallelism, which is the default.")
    draft.set("enable_expert_parallel", True)
    return None


def unless_one(draft: Draft, value: Any) -> Outcome | None:
    """Degrees without counterpart matter only above 1."""
    return Outcome(Verdict.DROPPED, "", "1 is no parallelism.") if whole_number(value) == 1 else None


def _weight_dtype(draft: Draft) -> str:
    """Name of the dtype that quantized weights have; int8 was the default."""
    name = str(draft.fields.get("quantization_dtype") or "int8").removeprefix("torch.")
    return {"float8_e4m3fn": "f8e4m3", "float8_e4m3": "f8e4m3"}.get(name, name)


def _no_such_dtype(name: str) -> Outcome | None:
    if name in WEIGHT_DTYPES:
        return None
    return Outcome(Verdict.UNSUPPORTED, "", f"{name} is not among {', '.join(WEIGHT_DTYPES)}.")


def quantized(draft: Draft, value: Any) -> Outcome | None:
    """Needs a dtype here."""
    if not is_on(value):
        return Outcome(Verdict.DROPPED, "", "Off is the default.")
    name = _weight_dtype(draft)
    if name in WEIGHT_DTYPES:
        draft.neuron |= {"quantized": True, "quantization_dtype": name}
    return _no_such_dtype(name)


def quantization_dtype(draft: Draft, value: Any) -> Outcome | None:
    """Only means something together with quantized, which writes it."""
    if not is_on(draft.fields.get("quantized")):
        return Outcome(Verdict.DROPPED, "", "It means nothing without quantized.")
    return _no_such_dtype(_weight_dtype(draft))


def kv_cache_quant(draft: Draft, value: Any) -> Outcome | None:
    """A switch that became a dtype."""
    if not is_on(value):
        return Outcome(Verdict.DROPPED, "", "Off is the default.")
    draft.set("kv_cache_dtype", "fp8")
    return None


def logical_cores(draft: Draft, value: Any) -> Outcome | None:
    """2 is what Trn2 and Trn3 do by themselves."""
    return Outcome(Verdict.DROPPED, "", "2 is the default of the hardware.") if whole_number(value) == 2 else None


def cast_type(draft: Draft, value: Any) -> Outcome | None:
    """Parameters are cast to the dtype of the model."""
    return Outcome(Verdict.DROPPED, "", "That is what --dtype does.") if value == "config" else None


def keep_field(name: str) -> Apply:
    """For names that neuron_config still has."""

    def apply(draft: Draft, value: Any) -> Outcome | None:
        draft.neuron[name] = value
        return None

    return apply
