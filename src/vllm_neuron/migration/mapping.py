"""From an old launch to a new one, by the rules."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from vllm_neuron import envs
from vllm_neuron.config.legacy import VLLM_PARAMETERS
from vllm_neuron.migration.arguments import as_json, serve_command
from vllm_neuron.migration.draft import Draft
from vllm_neuron.migration.launch import CALLS, Expression, Launch, Option, Row, Verdict
from vllm_neuron.migration.rules import FIELDS, FLAGS, SAMPLING, VARIABLES, VISION, Rule
from vllm_neuron.migration.rules.nested import SAMPLING_GROUP, sampling
from vllm_neuron.migration.rules.transforms import repeats
from vllm_neuron.migration.values import read_mapping, with_underscores

OVERRIDES = "override_neuron_config"
ADDITIONAL = "additional_config"
TEXT_GROUPS = ("text_config", "text_neuron_config")
VISION_GROUPS = ("vision_config", "vision_neuron_config")
UNREADABLE = "Its settings cannot be read here. Give them to `vllm-neuron migrate` as JSON of their own."
LATE = "Its value is only known when the launch runs."
_LONGEST_VALUE = 60


def map_launch(old: Launch, keep_tuning: bool = False) -> tuple[Launch, list[Row]]:
    """The new launch and what became of every setting of the old one.

    Args:
        old: the launch.
        keep_tuning: keep --block-size and --num-gpu-blocks-override.
    """
    draft = Draft(old, keep_tuning)
    _program(draft)
    groups = _neuron_groups(draft)
    draft.fields = {name: value for group in groups for name, value in _flat(group).items()}
    for name, value in old.environment.items():
        _variable(draft, name, value)
    for option in old.options.values():
        if option.name not in (OVERRIDES, ADDITIONAL):
            _option(draft, option)
    for group in groups:
        _fields(draft, group)
    _assemble(draft)
    return Launch(serve_command(old.program), draft.options, draft.environment), draft.rows


def _program(draft: Draft) -> None:
    program = draft.old.program
    new = serve_command(program)
    if new == program:
        return
    if "openai" in program:
        draft.add("program", program, Verdict.RENAMED, new, "The same server.")
    else:
        text = "That was the demonstration server with /generate; vllm serve speaks OpenAI's protocol."
        draft.add("program", program, Verdict.DECIDE, new, text)


def _apply(draft: Draft, rule: Rule, place: str, shown: str, value: Any) -> None:
    if isinstance(value, Expression) and rule.apply is not None and not rule.takes_expressions:
        draft.add(place, shown, Verdict.DECIDE, rule.new, f"{LATE} {rule.reason}")
        return
    outcome = rule.apply(draft, value) if rule.apply else None
    verdict = outcome.verdict if outcome else rule.verdict
    new = (outcome.new if outcome else "") or (rule.new if verdict == rule.verdict else "")
    draft.add(place, shown, verdict, new, (outcome.reason if outcome else "") or rule.reason)


def _variable(draft: Draft, name: str, value: str) -> None:
    rule = VARIABLES.get(name)
    if rule is not None:
        _apply(draft, rule, "variable", f"{name}={_short(value)}", value)
        return
    draft.environment[name] = value
    ours = name.startswith(("VLLM_NEURON_", "NEURON_LIBTORCH_"))
    if ours and not envs.is_known(name):
        text = f"The plugin has no such variable. Did you mean {envs.closest(name)}?"
        draft.add("variable", f"{name}={_short(value)}", Verdict.DECIDE, name, text)
    elif ours or name in envs.VARIABLES:
        draft.add("variable", f"{name}={_short(value)}", Verdict.KEPT, name, "A variable of this plugin.")
    elif name.startswith(("NEURON_", "VLLM_")):
        draft.add("variable", f"{name}={_short(value)}", Verdict.KEPT, name, "Not a setting of the plugin.")


def _option(draft: Draft, option: Option) -> None:
    rule = FLAGS.get(option.name)
    shown = _shown(draft, option)
    if option.value is None:
        draft.add("flag", shown, Verdict.DROPPED, "", "None is the default.")
        return
    if rule is None:
        draft.keep(option.name)
        is_argument = option.name == "model" and draft.old.program not in ("", *CALLS)
        new = "the argument of vllm serve" if is_argument else option.flag
        draft.add("flag", shown, Verdict.KEPT, new, "An option of vLLM.")
    elif not option.known and rule.apply is not None:
        draft.keep(option.name)
        draft.add("flag", shown, Verdict.DECIDE, option.flag, f"{LATE} {rule.reason}")
    else:
        _apply(draft, rule, "flag", shown, option.value)


def _shown(draft: Draft, option: Option) -> str:
    """An option as the source writes it, in short."""
    if draft.old.program in CALLS:
        return f"{option.name}={_short(option.value)}"
    return option.flag if isinstance(option.value, bool) else f"{option.flag} {_short(option.value)}"


def _neuron_groups(draft: Draft) -> list[dict[str, Any]]:
    """Old NeuronConfigs of the launch, wherever they stand; what else is in additional_config goes over."""
    groups = []
    for name in (OVERRIDES, ADDITIONAL):
        option = draft.old.options.get(name)
        if option is None:
            continue
        values = _read(draft, option)
        if values is None:
            continue
        flag = option.flag
        if name == OVERRIDES:
            groups.append(values)
            _container(draft, flag, values)
            continue
        for key, value in values.items():
            if key == OVERRIDES and isinstance(value, dict):
                groups.append(value)
                _container(draft, f"{flag} {key}", value)
            elif key == "neuron_config" and isinstance(value, dict):
                groups.append(value)
            elif key == "encoder_neuron_config" and isinstance(value, dict):
                draft.encoder |= value
                draft.add(ADDITIONAL, key, Verdict.KEPT, key, "An option of this plugin.")
            elif key in VISION_GROUPS:
                groups.append({key: value})
            elif key in (OVERRIDES, "neuron_config", "encoder_neuron_config"):
                draft.add(ADDITIONAL, f"{key}: {_short(value)}", Verdict.DECIDE, "--additional-config", UNREADABLE)
            else:
                draft.additional[key] = value
                draft.add(ADDITIONAL, f"{key}: {_short(value)}", Verdict.KEPT, key, "Not a setting of NxD Inference.")
    return groups


def _container(draft: Draft, old: str, values: Mapping[str, Any]) -> None:
    if values:
        draft.add("flag", old, Verdict.RENAMED, "--additional-config neuron_config", "Settings are nested there now.")
    else:
        draft.add("flag", old, Verdict.DROPPED, "", "It is empty.")


def _read(draft: Draft, option: Option) -> dict[str, Any] | None:
    """A dictionary of settings, or None, after a row that says so, if it cannot be read."""
    if isinstance(option.value, dict):
        return with_underscores(option.value)
    found = None if isinstance(option.value, bool) else read_mapping(_text(option.value))
    if found is None:
        draft.add("flag", option.flag, Verdict.DECIDE, "--additional-config", UNREADABLE)
        return None
    values, exact = found
    if not exact:
        text = "It is not JSON as it stands (quotes that the shell takes away, Python's True, a comma too many)."
        draft.add("flag", option.flag, Verdict.RENAMED, "--additional-config", f"{text} This is how it was read.")
    return with_underscores(values)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _flat(group: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with those of the text model's group among them."""
    inner = {
        key: value for name in TEXT_GROUPS if isinstance(group.get(name), dict) for key, value in group[name].items()
    }
    outer = {key: value for key, value in group.items() if key not in TEXT_GROUPS or not isinstance(value, dict)}
    return {**outer, **inner}


def _fields(draft: Draft, group: Mapping[str, Any]) -> None:
    for name, value in _flat(group).items():
        shown = f"{name}: {_short(value)}"
        if name == SAMPLING_GROUP:
            _sampling(draft, value)
        elif name in VISION_GROUPS and isinstance(value, dict):
            _vision(draft, value)
        elif name in (*TEXT_GROUPS, *VISION_GROUPS):
            draft.add("neuron config", shown, Verdict.DECIDE, "", UNREADABLE)
        elif name in FIELDS:
            _apply(draft, FIELDS[name], "neuron config", shown, value)
        elif name in VLLM_PARAMETERS:
            rule = Rule(name, Verdict.DROPPED, "", "An option of vLLM, which is set besides.", value, repeats(name))
            _apply(draft, rule, "neuron config", shown, value)
        else:
            draft.add("neuron config", shown, Verdict.DECIDE, "", _unknown(name, FIELDS))


def _unknown(name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f" Did you mean {close[0]}?" if close else " Remove it if it only made things faster."
    return f"No public documentation of NxD Inference names it.{hint}"


def _sampling(draft: Draft, value: Any) -> None:
    if value is None:
        draft.add("neuron config", SAMPLING_GROUP, Verdict.DROPPED, "", "Sampling on the CPU is the default.")
        return
    if not isinstance(value, dict):
        draft.add("neuron config", f"{SAMPLING_GROUP}: {_short(value)}", Verdict.DECIDE, SAMPLING_GROUP, UNREADABLE)
        return
    sampling(draft)
    where = f"neuron_config.{SAMPLING_GROUP}"
    text = "It turns sampling on the device on; without it the CPU samples."
    draft.add("neuron config", f"{SAMPLING_GROUP}: {_short(value)}", Verdict.KEPT, where, text)
    for name, item in value.items():
        if name in SAMPLING:
            _apply(draft, SAMPLING[name], "sampling", f"{name}: {_short(item)}", item)
        else:
            draft.add("sampling", f"{name}: {_short(item)}", Verdict.DECIDE, "", _unknown(name, SAMPLING))


def _vision(draft: Draft, group: Mapping[str, Any]) -> None:
    for name, value in group.items():
        shown = f"{name}: {_short(value)}"
        rule = VISION.get(name) or FIELDS.get(name)
        if rule is None or (name not in VISION and rule.verdict is not Verdict.DROPPED):
            draft.add("vision", shown, Verdict.DECIDE, "", _unknown(name, VISION) if rule is None else rule.reason)
        else:
            rule = rule if name in VISION else replace(rule, apply=None)
            _apply(draft, rule, "vision", shown, value)


def _assemble(draft: Draft) -> None:
    config: dict[str, Any] = dict(draft.additional)
    if draft.neuron:
        config["neuron_config"] = draft.neuron
    if draft.encoder:
        config["encoder_neuron_config"] = draft.encoder
    unread = draft.old.options.get(ADDITIONAL)
    if config:
        draft.set(ADDITIONAL, config)
    elif unread is not None and not unread.known:
        draft.keep(ADDITIONAL)


def _short(value: Any) -> str:
    text = as_json(value) if isinstance(value, dict | list) else _text(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
