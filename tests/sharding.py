"""What the tests on several devices share: meshes, and the collectives of a compiled program."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def mesh_of(sizes: tuple[int, ...], names: tuple[str, ...], kind: Any = AxisType.Auto) -> Mesh:
    """Over the first devices."""
    count = 1
    for size in sizes:
        count *= size
    return jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=jax.devices()[:count])


def collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How many instructions of each kind the program has; one may move several arrays."""
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    return dict(collections.Counter(found))
