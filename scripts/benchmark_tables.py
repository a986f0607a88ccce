"""The tables of measurements in the documents, made from the JSON files of runs.

    python -m scripts.benchmark_tables           say which documents are not current
    python -m scripts.benchmark_tables --write   put the tables into the documents

A document names a table (`pallas_flash.benchmarks.report`), a pass, a pattern of workloads and a file, as seen from the
document, in the first of two comments, and what stands between the two is made:

    <!-- benchmarks: begin ratios of forward for fa3-* in results/h200.json (make readme) -->
    <!-- benchmarks: end -->

The table `ring`, of `forward+backward` for `*`, is that of a file of `pallas_flash.benchmarks.ring`. Several files,
joined by "+", are read as one: each workload as the file has it in which most of it was measured.

Below each table stand its files, with links to what `commands of * for * in *` makes: for each file of the document
on what device, at which commit and by which command it was measured.

Nothing is measured, so any machine gives the same text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pallas_flash.benchmarks import environment, report, results, ring

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SECTION = re.compile(
    r"(?P<begin><!-- benchmarks: begin (?P<table>\S+) of (?P<passed>\S+) for (?P<workloads>\S+) in (?P<file>\S+) "
    r"\(make readme\) -->)"
    r".*?(?P<end><!-- benchmarks: end -->)",
    re.DOTALL,
)
MARK = "<!-- benchmarks: begin"
COMMANDS = "commands"


def with_tables(text: str, folder: Path) -> str:
    """A document's text, its folder's files giving the tables. ValueError for a comment that is not as above."""
    if text.count(MARK) != len(SECTION.findall(text)):
        raise ValueError(f"a comment {MARK} … is not of the form that this script's description has")
    names = dict.fromkeys(name for section in SECTION.finditer(text) for name in _files(section))
    files = {name: results.read(folder / name) for name in names}

    def filled(section: re.Match[str]) -> str:
        if section["table"] == COMMANDS:
            body = "\n\n".join(_command(name, content) for name, content in files.items())
        else:
            own = _files(section)
            body = f"{_table(section, [files[name] for name in own])}\n\nFrom {', '.join(map(_link, own))}."
        return f"{section['begin']}\n\n{body}\n\n{section['end']}"

    return SECTION.sub(filled, text)


def _files(section: re.Match[str]) -> list[str]:
    return [] if section["table"] == COMMANDS else section["file"].split("+")


def _table(section: re.Match[str], contents: list[dict[str, Any]]) -> str:
    if section["table"] == ring.KIND:
        (content,) = contents
        return report.markdown(ring.table(content))
    made = report.table(section["table"], report.together(contents), section["passed"], section["workloads"])
    return report.markdown(made)


def _link(name: str) -> str:
    """To the heading that `_command` makes, by the name that a renderer of Markdown gives it."""
    heading = Path(name).name
    return f"[{heading}](#{heading.lower().replace('.', '')})"


def _command(name: str, content: dict[str, Any]) -> str:
    where = content["environment"]
    ringed = content["kind"] == ring.KIND
    said = f"{environment.summary(where)}. Command: `{where['command']}`" if ringed else report.setting(content)
    return f"### [{Path(name).name}]({name})\n\n{said}"


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
