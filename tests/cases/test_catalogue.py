"""Every case has a test, or a reason why it has none; no test claims a case that there is not."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from tests.cases.catalogue import CASES, NOT_HERE

TESTS = Path(__file__).parent.parent


def settled(source: str) -> dict[str, list[str]]:
    """The cases that the tests of a source claim, each with the names of these tests."""
    found = defaultdict(list)
    for node in ast.walk(ast.parse(source)):
        for decorator in getattr(node, "decorator_list", []):
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in ("case", "pytest.mark.case"):
                for argument in decorator.args:
                    found[ast.literal_eval(argument)].append(node.name)
    return dict(found)


def by_case() -> dict[str, list[str]]:
    """`file::test` of each case."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, tests in settled(path.read_text()).items():
            found[name] += [f"{path.relative_to(TESTS)}::{test}" for test in tests]
    return dict(found)


def test_every_case_has_a_test_or_a_reason() -> None:
    found = by_case()
    assert set(found) | set(NOT_HERE) == set(CASES)
    assert not set(found) & set(NOT_HERE)


def test_the_count_reads_decorators() -> None:
    source = '@case("A01", "B02")\ndef test_one(): ...\n@pytest.mark.case("A01")\ndef test_two(): ...\ncase("C01")'
    assert settled(source) == {"A01": ["test_one", "test_two"], "B02": ["test_one"]}


def test_the_documents_table_is_up_to_date() -> None:
    from scripts import reliability_table  # which counts with this module

    document = (TESTS.parent / "docs" / "reliability.md").read_text()
    assert reliability_table.with_table(document) == document, "make readme"
