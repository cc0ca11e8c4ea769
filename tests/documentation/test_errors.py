"""Each error of the configuration reference and the migration guide has a section, which the error names."""

from pathlib import Path

import pytest

from tests.documentation.tables import DOCS
from tests.test_documentation import headings

SECTIONS = (
    ("request-exceeds-largest-bucket", "engine/graphs.py"),
    ("compilation-during-inference", "engine/executor.py"),
    ("only-support-greedy-sampling", "plugin/admission.py"),
    ("hbm-allocation-errors-during-load-or-compilation", "engine/hbm.py"),
    ("kv-cache-budget-below-minimum-threshold", "kv_cache/budget.py"),
    ("async-scheduling-not-engaging", "config/capabilities.py"),
    ("out-of-memory-at-startup", ""),
    ("slower-than-before-a-migration", ""),
    ("do-not-set-the-quantization-flag-to-neuron_quant", "config/capabilities.py"),
    ("mm_language_model_only-and-mm_encoder_only-exclude-each-other", "config/capabilities.py"),
    ("vllm-neuron-cannot-be-used", "__init__.py"),
    ("the-compile-route-does-not-work-here", "plugin/routes.py"),
)
"""Section of docs/troubleshooting.md, and the module that names it; "" where nothing of ours raises the error."""

SOURCES = DOCS.parent / "src" / "vllm_neuron"


@pytest.mark.parametrize(("section", "module"), SECTIONS)
def test_an_error_has_a_section_and_names_it(section: str, module: str) -> None:
    assert section in headings(DOCS / "troubleshooting.md")
    if module:
        assert f"docs/troubleshooting.md#{section}" in source(SOURCES / module)


def source(path: Path) -> str:
    """A module's text with strings that are broken over lines put together."""
    return path.read_text().replace('"\n            "', "")


@pytest.mark.parametrize(
    "text",
    ["NCC_EOOM002", "Maximum peak HBM usage", "nrt_load_util", "nrt_tensor_allocate status=4", "Allocation Failure",
     "batch composition changed"],
)  # fmt: skip
def test_texts_of_the_log_can_be_found(text: str) -> None:
    assert text in (DOCS / "troubleshooting.md").read_text()
