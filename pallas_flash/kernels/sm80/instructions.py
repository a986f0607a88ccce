"""What a warpgroup of these kernels does through instructions of its own, and the same for Pallas' interpreter.

Under the interpreter the kernels differ in nothing else.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import additions, cp_async, elements, mma, row_parts
from pallas_flash.kernels.tma import Rows

Ref = Any


class Instructions(elements.Elements, Protocol):
    def uniform(self, scalar: jax.Array) -> jax.Array:
        """See `elements.uniform`."""
        ...

    def product(self, a: Any, b: Ref, acc: jax.Array | None = None, *, transposed: bool = False) -> jax.Array:
        """See `mma.product`."""
        ...

    def product_by_columns(self, a: Ref, b: Ref) -> jax.Array:
        """See `mma.product_by_columns`."""
        ...

    def keep(self, tile: jax.Array, buffer: Ref) -> None:
        """See `mma.store`."""

    def thread_maxima(self, tile: jax.Array) -> jax.Array:
        """See `row_parts`, and likewise the next three."""
        ...

    def thread_sums(self, tile: jax.Array) -> jax.Array: ...

    def row_maxima(self, parts: jax.Array) -> jax.Array: ...

    def row_sums(self, parts: jax.Array) -> jax.Array: ...

    def load(self, source: Ref, rows: Rows, buffer: Ref) -> None:
        """See `cp_async.load`, and likewise the next four."""

    def load_rows(self, source: Ref, start: Any, buffer: Ref) -> None: ...

    def commit_copies(self) -> None: ...

    def wait_for_copies(self, pending: int) -> None: ...

    def store(self, buffer: Ref, target: Ref, rows: Rows) -> None: ...

    def store_rows(self, target: Ref, start: Any, value: jax.Array) -> None:
        """See `additions.store_rows`."""


class Compiled:
    uniform = staticmethod(elements.uniform)
    product = staticmethod(mma.product)
    product_by_columns = staticmethod(mma.product_by_columns)
    keep = staticmethod(mma.store)
    thread_maxima = staticmethod(row_parts.thread_maxima)
    thread_sums = staticmethod(row_parts.thread_sums)
    row_maxima = staticmethod(row_parts.row_maxima)
    row_sums = staticmethod(row_parts.row_sums)
    load = staticmethod(cp_async.load)
    load_rows = staticmethod(cp_async.load_rows)
    commit_copies = staticmethod(cp_async.commit)
    wait_for_copies = staticmethod(cp_async.wait_for)
    store = staticmethod(cp_async.store)
    store_rows = staticmethod(additions.store_rows)
    any = staticmethod(elements.any_of_warp)
    gather = staticmethod(elements.gather)
    take = staticmethod(elements.take)
    add = staticmethod(additions.add)
    commit = staticmethod(cp_async.meet)


class Interpreted:
    """Nothing runs in the background, and arrays have whole tiles."""

    any = staticmethod(jnp.any)
    gather = staticmethod(elements.interpreted_gather)
    take = staticmethod(elements.interpreted_take)
    add = staticmethod(elements.interpreted_add)
    commit = staticmethod(plgpu.commit_smem)

    def uniform(self, scalar: jax.Array) -> jax.Array:
        return scalar

    def product(self, a: Any, b: Ref, acc: jax.Array | None = None, *, transposed: bool = False) -> jax.Array:
        left = a if isinstance(a, jax.Array) else a[...]
        right = b[...].T if transposed else b[...]
        result = jnp.dot(left, right, preferred_element_type=jnp.float32)
        return result if acc is None else acc + result

    def product_by_columns(self, a: Ref, b: Ref) -> jax.Array:
        left = jnp.concatenate([a[part].T for part in range(a.shape[0])])
        return jnp.dot(left, b[...], preferred_element_type=jnp.float32)

    def keep(self, tile: jax.Array, buffer: Ref) -> None:
        buffer[...] = tile

    def thread_maxima(self, tile: jax.Array) -> jax.Array:
        return tile.max(axis=1)

    def thread_sums(self, tile: jax.Array) -> jax.Array:
        return tile.sum(axis=1)

    def row_maxima(self, parts: jax.Array) -> jax.Array:
        return parts

    def row_sums(self, parts: jax.Array) -> jax.Array:
        return parts

    def load(self, source: Ref, rows: Rows, buffer: Ref) -> None:
        buffer[...] = source[rows.batch, pl.ds(rows.start, rows.size), rows.head]

    def load_rows(self, source: Ref, start: Any, buffer: Ref) -> None:
        buffer[...] = source[pl.ds(start, buffer.shape[0])]

    def commit_copies(self) -> None:
        pass

    def wait_for_copies(self, pending: int) -> None:
        pass

    def store(self, buffer: Ref, target: Ref, rows: Rows) -> None:
        target[rows.batch, pl.ds(rows.start, rows.size), rows.head] = buffer[...]

    def store_rows(self, target: Ref, start: Any, value: jax.Array) -> None:
        target[pl.ds(start, value.shape[0])] = value
