"""The table of docs/reliability.md, made from the tests: how many cases of each kind are settled, and where.

python -m scripts.reliability_table           print it
python -m scripts.reliability_table --write   put it into docs/reliability.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.cases.catalogue import CASES, KINDS, NOT_HERE
from tests.cases.test_catalogue import TESTS, by_case

DOCUMENT = Path(__file__).parent.parent / "docs" / "reliability.md"
BEGIN, END = "<!-- cases: begin (make readme) -->", "<!-- cases: end -->"
GPU_ONLY = re.compile(r"^pytestmark = .*pytest\.mark\.gpu", re.MULTILINE)


def needs_gpu(test: str) -> bool:
    """Whether a `file::test` is in a file of tests that run on a GPU alone."""
    return GPU_ONLY.search((TESTS / test.split("::")[0]).read_text()) is not None


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def table() -> str:
    tests = by_case()
    anywhere = {name for name, found in tests.items() if not all(map(needs_gpu, found))}
    header = row("kind", "cases", "settled on a CPU", "on a GPU alone", "not here yet", "tests")
    lines = [header, row("---", *["---:"] * 5)]
    for letter, kind in {**KINDS, "": "all"}.items():
        names = [name for name in CASES if name.startswith(letter)]
        settled = len(anywhere.intersection(names))
        missing = len(set(NOT_HERE).intersection(names))
        count = len({test for name in names for test in tests.get(name, [])})
        lines.append(
            row(f"{letter} {kind}".strip(), len(names), settled, len(names) - settled - missing, missing, count)
        )
    return "\n".join(lines)


def with_table(document: str) -> str:
    """The document's text with the table between its two markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert len(pattern.findall(document)) == 1, f"{DOCUMENT} must hold the markers {BEGIN} and {END} once"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", document)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
    else:
        print(table())
