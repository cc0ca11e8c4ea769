"""Tables in documents are what the code says today."""

import pytest

from tests.documentation.configuration import EXAMPLES
from tests.documentation.generate import TABLES, generated
from tests.documentation.support import missing_tests
from tests.documentation.tables import DOCS, replaced, table


@pytest.mark.parametrize("document", sorted({document for document, _ in TABLES}))
def test_documents_show_what_the_code_says(document: str) -> None:
    assert (DOCS / document).read_text() == generated(document), "python -m tests.documentation.generate"


def test_tests_of_the_support_matrix_are_there() -> None:
    assert not missing_tests()


def test_every_option_has_an_example() -> None:
    for group, examples in EXAMPLES.items():
        assert examples.keys() == group.model_fields.keys()


def test_a_table_without_its_place_is_an_error() -> None:
    with pytest.raises(ValueError, match="not found"):
        replaced("no marks", "some table", "")


def test_cells_may_hold_a_bar() -> None:
    assert table(("a", "b"), [("x|y", "z")]) == "| a | b |\n| --- | --- |\n| x\\|y | z |\n"
