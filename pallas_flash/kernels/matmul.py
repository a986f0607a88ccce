"""Matrix products of one warpgroup on Hopper's tensor cores (wgmma), and their stand-in for Pallas' interpreter.

What the interpreter cannot run stands here and in elements.py, so that under the interpreter the kernels differ in
nothing else.
A product runs in the background: `start` issues it, `load` and `wait` wait until at most `pending` are in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import additions, barriers, elements, scatter, wgmma

Ref = Any


class TensorCores(elements.Elements, Protocol):
    def turns(self, wgs: int) -> Any:
        """What the kernel must allocate for so many warpgroups to take turns: `barriers.Turns` or its like."""

    def meeting(self, wgs: int) -> Any:
        """What the kernel must allocate for so many warpgroups to wait for each other: `barriers.Meeting` or its
        like."""

    def publish(self) -> None:
        """What each thread wrote to shared memory is there for tensor cores and TMA, once it arrives at a barrier."""

    def scratch(self, shape: tuple[int, ...]) -> Any:
        """What the kernel must allocate for accumulators of this shape, one a warpgroup; None: nothing."""

    def accumulator(self, body: Callable[[Ref], Any], shape: tuple[int, int], scratch: Ref | None) -> Any:
        """Run `body` on a float32 accumulator of zeros. `scratch` is this warpgroup's part of `self.scratch`."""

    def start(self, acc: Ref, a: Any, b: Ref) -> None:
        """acc += a @ b in the background; `a` in shared memory or in registers, `b` in shared memory."""

    def issue(self, a: Ref, b: Ref) -> Any:
        """a @ b.T of two matrices in shared memory, in the background: `landed` has the result."""

    def landed(self, product: Any, *, pending: int) -> jax.Array: ...

    def load(self, acc: Ref, *, pending: int) -> jax.Array: ...

    def store(self, acc: Ref, value: jax.Array) -> None: ...

    def wait(self, pending: int) -> None: ...

    def scatter(self, target: Ref, rows: jax.Array, value: jax.Array) -> None:
        """target[rows] = value in device memory, for a tile or for one value a row; a row below 0 goes nowhere.
        Columns of the tile beyond the target's, a multiple of 8, go nowhere either."""
        ...


class Wgmma:
    """The real thing."""

    def turns(self, wgs: int) -> barriers.NamedTurns:
        return barriers.NamedTurns(wgs)

    def meeting(self, wgs: int) -> barriers.NamedMeeting:
        return barriers.NamedMeeting(wgs)

    def scratch(self, shape: tuple[int, ...]) -> None:
        return None

    def accumulator(self, body: Callable[[Ref], Any], shape: tuple[int, int], scratch: None) -> Any:
        return pl.run_scoped(body, plgpu.ACC(shape, jnp.float32))

    def start(self, acc: Ref, a: Any, b: Ref) -> None:
        plgpu.wgmma(acc, a, b)

    def issue(self, a: Ref, b: Ref) -> jax.Array:
        return wgmma.issue(a, b)

    def landed(self, product: jax.Array, *, pending: int) -> jax.Array:
        return wgmma.landed(product, pending=pending)

    def load(self, acc: Ref, *, pending: int) -> jax.Array:
        return plgpu.layout_cast(plgpu.wgmma_accumulator_load(acc, wait_n=pending), plgpu.Layout.WGMMA)

    def store(self, acc: Ref, value: jax.Array) -> None:
        acc[...] = value

    def wait(self, pending: int) -> None:
        plgpu.wgmma_wait(pending)

    publish = staticmethod(barriers.fence)
    any = staticmethod(elements.any_of_warp)
    gather = staticmethod(elements.gather)
    take = staticmethod(elements.take)
    add = staticmethod(additions.add)
    scatter = staticmethod(scatter.scatter)
    commit = staticmethod(plgpu.commit_smem)


class Interpreted:
    """The same in plain JAX: accumulators live in shared memory and nothing runs in the background."""

    def turns(self, wgs: int) -> barriers.Turns:
        return barriers.Turns(plgpu.Barrier(num_barriers=wgs))

    def meeting(self, wgs: int) -> barriers.Meeting:
        return barriers.Meeting(plgpu.Barrier(num_arrivals=wgs))

    def scratch(self, shape: tuple[int, ...]) -> Any:
        return plgpu.SMEM(shape, jnp.float32)

    def accumulator(self, body: Callable[[Ref], Any], shape: tuple[int, int], scratch: Ref) -> Any:
        self.store(scratch, jnp.zeros(shape, jnp.float32))
        return body(scratch)

    def start(self, acc: Ref, a: Any, b: Ref) -> None:
        lhs = a if isinstance(a, jax.Array) else a[...]
        self.store(acc, acc[...] + jnp.dot(lhs, b[...], preferred_element_type=jnp.float32))

    def issue(self, a: Ref, b: Ref) -> jax.Array:
        product = jnp.dot(a[...], b[...].T, preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the tensor cores read as TMA writes do: no fence between them
        return product

    def landed(self, product: jax.Array, *, pending: int) -> jax.Array:
        return product

    def load(self, acc: Ref, *, pending: int) -> jax.Array:
        return acc[...]

    def store(self, acc: Ref, value: jax.Array) -> None:
        acc[...] = value
        plgpu.commit_smem()

    def wait(self, pending: int) -> None:
        pass

    publish = staticmethod(plgpu.commit_smem)
    any = staticmethod(jnp.any)
    gather = staticmethod(elements.interpreted_gather)
    take = staticmethod(elements.interpreted_take)
    add = staticmethod(elements.interpreted_add)
    scatter = staticmethod(scatter.interpreted_scatter)
    commit = staticmethod(plgpu.commit_smem)
