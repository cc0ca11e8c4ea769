"""The tables in docs/migration.md: every rule of the mapping, and the guide's features with what is held of each.

python -m tests.migration.test_document      writes the tables anew
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.migration.features import FEATURES, Feature, refusals
from vllm_neuron.migration.rules import FIELDS, FLAGS, SAMPLING, VARIABLES, VISION, Rule

DOCUMENT = Path(__file__).parents[2] / "docs" / "migration.md"
MARK = "<!-- {}: written by tests/migration/test_document.py -->\n"
END = "<!-- end of {} -->\n"


def table(columns: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def feature_rows() -> Iterator[tuple[str, ...]]:
    for feature in FEATURES:
        yield feature.name, feature.here, feature.old, "not yet" if feature.refused else "holds"


def rule_rows(rules: Mapping[str, Rule], flags: bool = False) -> Iterator[tuple[str, ...]]:
    """Rows of rules; those that have everything but the name in common share one."""
    shared: dict[tuple[str, str, str], list[str]] = {}
    for rule in rules.values():
        name = f"--{rule.old.replace('_', '-')}" if flags else rule.old
        shared.setdefault((str(rule.verdict), rule.new, rule.reason), []).append(f"`{name}`")
    for (verdict, new, reason), names in shared.items():
        yield ", ".join(names), verdict, f"`{new}`" if new else "", reason


COLUMNS = ("Old", "What becomes of it", "New", "Why")
TABLES = {
    "feature table": lambda: table(("Feature", "The guide says", "Gone from launches", "Here"), feature_rows()),
    "flag table": lambda: table(COLUMNS, rule_rows(FLAGS, flags=True)),
    "variable table": lambda: table(COLUMNS, rule_rows(VARIABLES)),
    "field table": lambda: table(COLUMNS, rule_rows(FIELDS)),
    "sampling table": lambda: table(COLUMNS, rule_rows(SAMPLING)),
    "vision table": lambda: table(COLUMNS, rule_rows(VISION)),
}


def place(text: str, name: str) -> tuple[int, int]:
    """Where a table stands in the document."""
    return text.index(MARK.format(name)) + len(MARK.format(name)), text.index(END.format(name))


@pytest.mark.parametrize("name", TABLES)
def test_the_document_shows_the_table(name: str) -> None:
    text = DOCUMENT.read_text()
    start, end = place(text, name)
    assert text[start:end] == TABLES[name](), "python -m tests.migration.test_document"


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_what_the_guide_says_holds_or_is_refused_by_name(feature: Feature) -> None:
    """A feature that is no longer refused needs something here that shows that it holds."""
    assert (feature.refused is None) != (feature.holds is None)
    if feature.refused is not None:
        text, ask = feature.refused
        assert any(line.startswith(text) for line in ask())
    elif feature.holds is not None:
        assert feature.holds()


@pytest.mark.parametrize("method", ["draft_model", "ngram", "medusa", "eagle"])
def test_other_speculative_decoding_than_eagle3_is_refused(method: str) -> None:
    (line,) = refusals(speculative_method=method)
    assert "Unsupported speculative decoding method" in line and "eagle3" in line


if __name__ == "__main__":
    text = DOCUMENT.read_text()
    for name, make in TABLES.items():
        start, end = place(text, name)
        text = text[:start] + make() + text[end:]
    DOCUMENT.write_text(text)
