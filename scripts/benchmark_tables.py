"""The tables of measurements in the documents, made from the JSON files of runs.

    python -m scripts.benchmark_tables           say which documents are not current
    python -m scripts.benchmark_tables --write   put the tables into the documents

A document names a table (`pallas_flash.benchmarks.report.TABLES`, or `setting`), a pass, a pattern of workloads and a
file, as seen from the document, in the first of two comments, and what stands between the two is made:

    <!-- benchmarks: begin ratios of forward for fa3-* in results/h200.json (make readme) -->
    <!-- benchmarks: end -->

The table `ring`, of `forward+backward` for `*`, is that of a file of `pallas_flash.benchmarks.ring`.

Several files, joined by "+", are read as one: each workload as the file has it in which most of it was measured.

Nothing is measured, so any machine gives the same text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from pallas_flash.benchmarks import report, results, ring

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SECTION = re.compile(
    r"(?P<begin><!-- benchmarks: begin (?P<table>\S+) of (?P<passed>\S+) for (?P<workloads>\S+) in (?P<file>\S+) "
    r"\(make readme\) -->)"
    r".*?(?P<end><!-- benchmarks: end -->)",
    re.DOTALL,
)
MARK = "<!-- benchmarks: begin"


def with_tables(text: str, folder: Path) -> str:
    """A document's text, its folder's files giving the tables. ValueError for a comment that is not as above."""

    def filled(section: re.Match[str]) -> str:
        contents = [results.read(folder / name) for name in section["file"].split("+")]
        if section["table"] == ring.KIND:
            (content,) = contents
            body = report.markdown(ring.table(content))
        elif section["table"] == "setting":
            body = report.setting(report.together(contents))
        else:
            made = report.table(section["table"], report.together(contents), section["passed"], section["workloads"])
            body = report.markdown(made)
        return f"{section['begin']}\n\n{body}\n\n{section['end']}"

    if text.count(MARK) != len(SECTION.findall(text)):
        raise ValueError(f"a comment {MARK} … is not of the form that this script's description has")
    return SECTION.sub(filled, text)


def stale() -> list[Path]:
    return [path for path in DOCUMENTS if (text := path.read_text()) != with_tables(text, path.parent)]


if __name__ == "__main__":
    found = stale()
    for path in found:
        print(path.relative_to(ROOT))
    if sys.argv[1:] == ["--write"]:
        for path in found:
            path.write_text(with_tables(path.read_text(), path.parent))
    elif found:
        sys.exit("not current: run `make readme`")
