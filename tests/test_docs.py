"""The documents tell the truth: their Python runs and prints what they say, their links lead somewhere."""

from __future__ import annotations

import doctest
import importlib
import json
import re
from pathlib import Path

import pytest

from demo import report, run_folder
from scripts import support_table
from tests.test_architecture import LAYERS, prefix

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)[^)]*\)")


def python_blocks(text: str) -> list[str]:
    return [body for language, body in FENCE.findall(text) if language == "python"]


def run(blocks: list[str], name: str) -> list[str]:
    """Run blocks one after another in one namespace; returns the failures of their `>>>` examples."""
    namespace: dict[str, object] = {"__name__": name}
    failures: list[str] = []
    for block in blocks:
        if ">>>" in block:
            example = doctest.DocTestParser().get_doctest(block, namespace, name, name, 0)
            # clear_globs=False: the next block goes on with the names of this one.
            runner = doctest.DocTestRunner(verbose=False)
            runner.run(example, out=failures.append, clear_globs=False)
            namespace.update(example.globs)
        else:
            exec(compile(block, name, "exec"), namespace)
    return failures


@pytest.mark.usefixtures("fully_optimised")
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_examples_run(path):
    blocks = python_blocks(path.read_text())
    # The README promises that each of its blocks runs by itself; the explanations go on from block to block.
    sessions = [[block] for block in blocks] if path.name == "README.md" else [blocks]
    failures = [failure for session in sessions for failure in run(session, path.name)]
    assert not failures, "".join(failures)


@pytest.mark.parametrize("name", ["cache", "combine", "decode", "rotary"])
def test_examples_of_docstrings_run(name):
    results = doctest.testmod(importlib.import_module(f"pallas_flash.{name}"))
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    assert [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()] == []


def test_worked_example_is_in_the_docs():
    text = (ROOT / "docs" / "how_it_works.md").read_text()
    assert "m = 2  l = 1.3679\nm = 3  l = 1.5853\nm = 3  l = 2.4150\n" in text
    assert len(python_blocks(text)) >= 6


def test_readme_begins_with_the_two_commands():
    blocks = FENCE.findall((ROOT / "README.md").read_text())
    commands = [line.split("#")[0].strip() for line in blocks[0][1].splitlines()]
    assert commands == ["make demo", "make test"]


def test_support_table_is_current():
    readme = (ROOT / "README.md").read_text()
    assert readme == support_table.with_tables(readme), "run `make readme`"


def test_a_stale_support_table_is_found():
    readme = (ROOT / "README.md").read_text()
    stale = readme.replace("| `sinks` with their gradient | yes |", "| `sinks` with their gradient | no |")
    assert stale != readme == support_table.with_tables(stale)


def layout_paths() -> list[str]:
    (layout,) = (body for language, body in FENCE.findall((ROOT / "README.md").read_text()) if language == "text")
    return [word for line in layout.splitlines() for word in re.split(r" {3,}", line)[0].split()]


def test_layout_map_names_what_there_is():
    paths = layout_paths()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    modules = {f"pallas_flash/{path.name}" for path in (ROOT / "pallas_flash").glob("*.py")}
    assert modules - set(paths) == set()


def test_layout_map_is_in_the_order_of_the_layers():
    modules = [path.removesuffix("/").removesuffix(".py").replace("/", ".") for path in layout_paths()]
    entries = [entry for entry in map(prefix, modules) if entry is not None]
    layers = [LAYERS[entry] for entry in entries]
    assert len(layers) > 10
    assert layers == sorted(layers, reverse=True)


def check_demo_report(folder: Path) -> None:
    """Its page says what its numbers give, and shows the figures that are there."""
    found = json.loads((folder / "results.json").read_text())
    drawn = [name for stem in run_folder.FIGURES if (folder / (name := f"{stem}{run_folder.DRAWING}")).exists()]
    assert (folder / "report.md").read_text() == report.page(found, drawn), "run `make demo-report`"


def test_the_report_of_the_demo_is_current():
    folder = ROOT / "docs" / "demo"
    if folder.exists():  # it takes a GPU to make it
        check_demo_report(folder)


def test_a_wrong_number_is_found():
    text = "```python\n>>> x = 1\n\n```\n\n```python\n>>> x + 1\n3\n\n```\n"
    (failure,) = run(python_blocks(text), "wrong.md")
    assert "Expected:\n    3\nGot:\n    2" in failure


def test_a_broken_link_is_found():
    assert LINK.findall("[a](nowhere.md) [b](https://example.org/x.md) [c](#section) [d](docs/a.md#b)") == [
        "nowhere.md",
        "docs/a.md",
    ]
