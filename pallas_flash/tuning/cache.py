"""Looks up tuned tiles. A table is a JSON list of entries: a case, its config, and the measurement that chose it.

A table that the user's own machine measured, in `user_folder()`, comes before the one shipped with the package.
"""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any, NamedTuple

TABLES = pathlib.Path(__file__).parent / "tables"


class Case(NamedTuple):
    """What tiles depend on."""

    head_dim: int
    value_head_dim: int
    dtype: str
    mask: str  # "full" | "causal" | "general"


def user_folder() -> pathlib.Path:
    return pathlib.Path.home() / ".cache" / "pallas_flash" / "tuning"


@functools.lru_cache(maxsize=16)
def entries(table: str) -> tuple[dict[str, Any], ...]:
    """The user's entries, then those of the package."""
    files = [folder / f"{table}.json" for folder in (user_folder(), TABLES)]
    return tuple(entry for file in files if file.is_file() for entry in json.loads(file.read_text()))


def nearest(table: str, case: Case) -> list[dict[str, Any]]:
    """All configs of a table, the best fitting first: same mask, head dims no smaller than asked and as close as can
    be, same dtype. Configs for larger head dims hold smaller ones too."""

    def distance(entry: dict[str, Any]) -> tuple[bool, int, bool, bool]:
        have = Case(**entry["case"])
        gaps = have.head_dim - case.head_dim, have.value_head_dim - case.value_head_dim
        return min(gaps) < 0, sum(abs(gap) for gap in gaps), have.mask != case.mask, have.dtype != case.dtype

    return [entry["config"] for entry in sorted(entries(table), key=distance)]
