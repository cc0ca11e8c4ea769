"""What requests may ask of on-device sampling, and the values of what they leave unset.

Whatever a graph cannot do is refused before it reaches a batch: a parameter that is accepted is honoured.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.exceptions import VLLMValidationError

from vllm_neuron.config import Fault, OnDeviceSamplingConfig, ResolvedConfig
from vllm_neuron.config.options import MAX_CANDIDATES
from vllm_neuron.sampling import GREEDY_BELOW, MAX_LOGPROBS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

OPTION = "on_device_sampling_config"

_NEUTRAL: Mapping[str, Any] = {
    "seed": None,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": None,
    "min_tokens": 0,
    "prompt_logprobs": None,
}
"""Parameters of vLLM that on-device sampling does not have, and the values at which they do nothing."""

_UNDOABLE_DEFAULTS = ("repetition_penalty", "min_p")
"""Those of them that a model's generation_config may set for every request."""


@dataclass(frozen=True)
class Admission:
    """Decides about each request of one server.

    Attributes:
        config: the server's on-device sampling.
        model_defaults: sampling parameters of the model's own generation_config.
    """

    config: OnDeviceSamplingConfig
    model_defaults: Mapping[str, Any] = field(default_factory=dict)

    def check(self, params: "SamplingParams") -> None:
        """Refuse what the graphs cannot do.

        Raises:
            VLLMValidationError: names the parameter and the remedy; vLLM answers it with HTTP 400, also to streams.
        """
        if self.config.all_greedy and params.temperature >= GREEDY_BELOW:
            self._check_greedy(params)
        for refusal in self._refusals(params):
            raise VLLMValidationError(
                f"On-device sampling does not support {refusal.name}={refusal.value!r}: {refusal.rule}. Leave "
                f"{refusal.name} out, or start the server without {OPTION} to sample on the CPU.",
                parameter=refusal.name,
                value=refusal.value,
            )
        if params.temperature >= GREEDY_BELOW and params.top_k <= 0 and not self.config.all_greedy:
            _log_once(
                "A request samples without top_k. It and all such requests choose among the %d most likely tokens: "
                "on-device sampling looks at no more.",
                MAX_CANDIDATES,
                level=logging.INFO,
            )

    def _refusals(self, params: "SamplingParams") -> Iterator["_Refusal"]:
        for name, neutral in _NEUTRAL.items():
            value = getattr(params, name)
            if value != neutral and not (neutral is None and value in ([], {})):
                yield _Refusal(name, value, "it has no such parameter")
        if params.top_k > MAX_CANDIDATES:
            yield _Refusal("top_k", params.top_k, f"it chooses among {MAX_CANDIDATES} candidates at most")
        logprobs = params.logprobs
        if logprobs is None:
            return
        if self.config.all_greedy:
            yield _Refusal("logprobs", logprobs, "all_greedy compiles graphs that return nothing but tokens")
        elif not 0 <= logprobs <= MAX_LOGPROBS:
            yield _Refusal("logprobs", logprobs, f"its graphs return {MAX_LOGPROBS} at most")
        elif params.allowed_token_ids:
            yield _Refusal("logprobs", logprobs, "with allowed_token_ids they would be those of the allowed tokens")

    def _check_greedy(self, params: "SamplingParams") -> None:
        """Where graphs are argmax-only, let a request pass that asks only for what the model's own defaults ask."""
        defaults = self.model_defaults
        asked = {"temperature": params.temperature}
        asked |= {"top_p": params.top_p} if params.top_p != 1.0 else {}
        asked |= {"top_k": params.top_k} if params.top_k > 0 else {}
        asked |= {"n": params.n} if params.n > 1 else {}
        others = {name: value for name, value in asked.items() if defaults.get(name) != value}
        if not others:
            _log_once(
                "A request has the sampling parameters of the model's generation_config (%s). all_greedy is set, so it "
                "and all such requests get the most likely token instead.",
                asked,
            )
            return
        name, value = next(iter(others.items()))
        raise VLLMValidationError(
            f"Only support greedy sampling: the request asks for {name}={value}, and {OPTION}.all_greedy has compiled "
            f"argmax-only graphs. Set temperature to 0, or start the server without all_greedy, or without {OPTION}. "
            "See docs/troubleshooting.md#only-support-greedy-sampling.",
            parameter=name,
            value=value,
        )


class _Refusal(NamedTuple):
    name: str
    value: Any
    rule: str


_logged: set[str] = set()


def _log_once(text: str, *args: Any, level: int = logging.WARNING) -> None:
    if text not in _logged:
        _logged.add(text)
        logger.log(level, text, *args)


def model_defaults(model: "ModelConfig") -> dict[str, Any]:
    """Sampling parameters that the model's generation_config sets; none with --generation-config vllm."""
    return {} if model.generation_config == "vllm" else model.try_get_generation_config()


def server_defaults(config: OnDeviceSamplingConfig, otherwise: Mapping[str, Any]) -> dict[str, Any]:
    """Values of parameters that requests leave unset.

    Args:
        config: the server's on-device sampling.
        otherwise: the values that these take the place of.
    """
    named = ("temperature", "top_k", "top_p")
    defaults = {name: value for name in named if (value := getattr(config, name)) is not None}
    if config.all_greedy:
        defaults = {"temperature": 0.0}
    undoable = {
        name: otherwise[name] for name in _UNDOABLE_DEFAULTS if otherwise.get(name) not in (None, _NEUTRAL[name])
    }
    if "top_k" not in defaults and (otherwise.get("top_k") or 0) > MAX_CANDIDATES:
        undoable["top_k"] = otherwise["top_k"]
    for name, value in undoable.items():
        neutral = _NEUTRAL.get(name, MAX_CANDIDATES)
        defaults[name] = neutral
        logger.warning(
            "The model's generation_config sets %s=%s for every request, which on-device sampling does not support: "
            "requests that leave it unset get %s. Remove %s to sample on the CPU, as the model's authors mean it.",
            name,
            value,
            neutral,
            OPTION,
        )
    return defaults


def unsupported_with_sampling(vllm_config: "VllmConfig", resolved: ResolvedConfig) -> Iterator[Fault]:
    """Faults of vLLM's own options that on-device sampling cannot do."""
    if resolved.on_device_sampling is None:
        return
    model, remedy = vllm_config.model_config, f"Leave it out, or remove {OPTION} to sample on the CPU."
    if model.logprobs_mode != "raw_logprobs":
        yield Fault("logprobs_mode", model.logprobs_mode, "on-device sampling returns raw_logprobs only", remedy)
    if model.logits_processors:
        names = ", ".join(map(str, model.logits_processors))
        yield Fault("logits_processors", names, "on-device sampling runs no logits processors", remedy)
    defaults = server_defaults(resolved.on_device_sampling, {})
    for name, value in model.override_generation_config.items():
        option = f"override_generation_config.{name}"
        if name in defaults and defaults[name] != value:
            yield Fault(option, value, f"{OPTION} sets {name} to {defaults[name]}", "Set it in one of the two only.")
        elif name in _UNDOABLE_DEFAULTS and value not in (None, _NEUTRAL[name]):
            yield Fault(option, value, f"on-device sampling has no {name}", remedy)
        elif name == "top_k" and value is not None and value > MAX_CANDIDATES:
            yield Fault(option, value, f"on-device sampling chooses among {MAX_CANDIDATES} candidates at most", remedy)
