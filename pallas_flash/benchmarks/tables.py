"""A table, and how it is written."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import NamedTuple


class Table(NamedTuple):
    title: str
    header: list[str]
    rows: list[list[str]]


def markdown(made: Table) -> str:
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in (made.header, *made.rows))
    lines = [f"| {' | '.join(row)} |" for row in escaped]
    return "\n".join([lines[0], f"|{'---|' * len(made.header)}", *lines[1:]])


def as_html(made: Table) -> str:
    def line(cells: Iterable[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    body = "\n".join(line(row, "td") for row in made.rows)
    return f"<table>\n{line(made.header, 'th')}\n{body}\n</table>"
