"""Fields of groups inside the old NeuronConfig: on-device sampling, and the vision encoder."""

from typing import Any

from vllm_neuron.migration.draft import Draft
from vllm_neuron.migration.launch import Verdict
from vllm_neuron.migration.rules.rule import Outcome, Rule, dropped, table, undecided
from vllm_neuron.migration.values import is_on, whole_number

SAMPLING_GROUP = "on_device_sampling_config"
_DEFAULT = "A default of the server, for requests that leave it unset."


def sampling(draft: Draft) -> dict[str, Any]:
    """`on_device_sampling_config` of the new launch, made when first asked for."""
    group: dict[str, Any] = draft.neuron.setdefault(SAMPLING_GROUP, {})
    return group


def _default_of(name: str) -> Any:
    def apply(draft: Draft, value: Any) -> Outcome | None:
        sampling(draft)[name] = value
        return None

    return apply


def _limit_of_top_k(draft: Draft, value: Any) -> Outcome | None:
    group = draft.fields.get(SAMPLING_GROUP)
    if isinstance(group, dict) and group.get("top_k") is not None:
        return Outcome(Verdict.DROPPED, "", "top_k is set besides.")
    if whole_number(value) == 256:
        return Outcome(Verdict.DROPPED, "", "256 candidates are the most anyway.")
    sampling(draft)["top_k"] = value
    return None


def _do_sample(draft: Draft, value: Any) -> Outcome | None:
    group = draft.fields.get(SAMPLING_GROUP)
    if is_on(value) or (isinstance(group, dict) and is_on(group.get("dynamic"))):
        return None
    sampling(draft)["all_greedy"] = True
    text = "Only greedy answers, as before; a request that asks for sampling is refused now, not answered greedily."
    return Outcome(Verdict.RENAMED, "on_device_sampling_config.all_greedy", text)


SAMPLING = table(
    *dropped("Every request brings its own sampling parameters.", dynamic=True),
    Rule("do_sample", Verdict.DROPPED, "", "Every request says so by its temperature. false becomes all_greedy, "
         "unless dynamic is on.", True, _do_sample),
    *dropped("There is no such choice.", deterministic=False),
    Rule("temperature", Verdict.KEPT, "on_device_sampling_config.temperature", _DEFAULT, 0.6,
         _default_of("temperature"), True),
    Rule("top_p", Verdict.KEPT, "on_device_sampling_config.top_p", _DEFAULT, 0.95, _default_of("top_p"), True),
    Rule("top_k", Verdict.KEPT, "on_device_sampling_config.top_k", _DEFAULT, 20, _default_of("top_k"), True),
    Rule("global_topk", Verdict.RENAMED, "on_device_sampling_config.top_k",
         "It limited every request; top_k is the default of those that leave it unset.", 64, _limit_of_top_k, True),
    Rule("all_greedy", Verdict.KEPT, "on_device_sampling_config.all_greedy", "An option of this plugin.", True,
         _default_of("all_greedy"), True),
)  # fmt: skip
"""Fields of `on_device_sampling_config`."""


def _encoder_degree(name: str) -> Any:
    def apply(draft: Draft, value: Any) -> Outcome | None:
        if whole_number(value) == 1:
            return Outcome(Verdict.DROPPED, "", "1 is the default.")
        draft.encoder[name] = value
        return None

    return apply


def _encoder_option(name: str) -> Any:
    def apply(draft: Draft, value: Any) -> Outcome | None:
        draft.encoder[name] = value
        return None

    return apply


VISION = table(
    Rule("tp_degree", Verdict.RENAMED, "encoder_neuron_config.tp_size", "The encoder has a group of its own.", 16,
         _encoder_degree("tp_size"), True),
    Rule("dp_degree", Verdict.RENAMED, "encoder_neuron_config.dp_size", "The encoder has a group of its own.", 4,
         _encoder_degree("dp_size"), True),
    *(Rule(old, Verdict.RENAMED, f"encoder_neuron_config.{new}", "The name of an earlier release.", example,
           _encoder_option(new), True) for old, new, example in (
        ("num_vision_tokens_buckets", "num_encoder_input_buckets", [2048]),
        ("vision_attention_block_size", "encoder_attention_block_size", 2048),
        ("max_vision_seq_len", "max_encoder_seq_len", 8192))),
    *undecided("encoder_attention_block_size must hold the largest image; it may be another number than before.",
               ve_block_size=4096),
    *undecided("num_encoder_input_buckets counts in the encoder's own unit, which is another than before. Leave it out "
               "for automatic buckets.", buckets=[1, 5]),
    *dropped("Buckets of the encoder follow from the limits of the server.", seq_len=8192, batch_size=1,
             max_context_length=8192, enable_bucketing=True),
    *dropped("The encoder follows the text model and the number of devices.", torch_dtype="float16", world_size=64,
             cp_degree=1, is_continuous_batching=True),
)  # fmt: skip
"""Fields of the vision encoder's group. Fields of the text model's table that are dropped there are dropped here."""
