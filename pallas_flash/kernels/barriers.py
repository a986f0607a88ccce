"""Barriers by role: how the warpgroup that copies and those that compute hand buffers, and the tensor cores, around."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, nvvm

Ref = Any


class Handshake(NamedTuple):
    """For each slot of a buffer: `produced` when the copy into it has landed, `consumed` when its readers are done."""

    produced: Ref
    consumed: Ref


def handshake(slots: int, readers: int) -> Handshake:
    """What the kernel allocates for a buffer of `slots` with `readers` warpgroups reading each slot."""
    return Handshake(
        produced=plgpu.Barrier(num_barriers=slots),
        consumed=plgpu.Barrier(num_barriers=slots, num_arrivals=readers),
    )


def release_all(buffer: Handshake, slots: int) -> None:
    """Say that every slot is free, which it is at the start: then the producer always waits, the first time too."""
    for slot in range(slots):
        plgpu.barrier_arrive(buffer.consumed.at[slot])


def await_all(buffer: Handshake, slots: int) -> None:
    """The producer's last act, as each barrier needs as many waits as completions."""
    for slot in range(slots):
        plgpu.barrier_wait(buffer.consumed.at[slot])


class Turns(NamedTuple):
    """Warpgroups take turns at the tensor cores, so that one multiplies while the others are in their softmax
    (FlashAttention-3, section 3.1). One barrier a warpgroup."""

    barriers: Ref

    def open(self, wg: Any) -> None:
        """The last one lets the first one go."""
        pl.when(wg == self.barriers.shape[0] - 1)(lambda: self.pass_on(wg))

    def wait(self, wg: Any) -> None:
        plgpu.barrier_wait(self.barriers.at[wg])

    def pass_on(self, wg: Any) -> None:
        plgpu.barrier_arrive(self.barriers.at[lax.rem(jnp.int32(wg) + 1, jnp.int32(self.barriers.shape[0]))])

    def close(self, wg: Any) -> None:
        """The first one takes back the turn that nobody needs any more."""
        pl.when(wg == 0)(lambda: self.wait(wg))


@jax.tree_util.register_static  # allocates nothing
@dataclasses.dataclass(frozen=True)
class NamedTurns:
    """The same by the hardware's named barriers, which the interpreter does not have: half a percent faster."""

    wgs: int

    def open(self, wg: Any) -> None:
        pl.when(wg == self.wgs - 1)(lambda: self.pass_on(wg))

    def wait(self, wg: Any) -> None:
        _named_barrier("sync", FIRST_TURN_BARRIER + jnp.int32(wg), TURN_WGS)

    def pass_on(self, wg: Any) -> None:
        _named_barrier("arrive", FIRST_TURN_BARRIER + lax.rem(jnp.int32(wg) + 1, jnp.int32(self.wgs)), TURN_WGS)

    def close(self, wg: Any) -> None:
        pl.when(wg == 0)(lambda: self.wait(wg))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoTurns:
    """Nobody waits for anybody."""

    def open(self, wg: Any) -> None: ...
    def wait(self, wg: Any) -> None: ...
    def pass_on(self, wg: Any) -> None: ...
    def close(self, wg: Any) -> None: ...


TURN_WGS = 2  # the one that waits and the one that passes the turn on


class Exchange(NamedTuple):
    """Warpgroups show each other what they write to shared memory: each `show`s, and goes on; and before it reads, it
    waits until all did. Between two `show`s of a warpgroup it must `wait`."""

    barrier: Ref

    def show(self, publish: Callable[[], None]) -> None:
        """publish: makes own writes visible to the tensor cores."""
        publish()
        plgpu.barrier_arrive(self.barrier)

    def wait(self) -> None:
        plgpu.barrier_wait(self.barrier)


def exchange(wgs: int) -> Exchange:
    """What the kernel must allocate for so many warpgroups."""
    return Exchange(plgpu.Barrier(num_arrivals=wgs))


class Meeting(NamedTuple):
    """Warpgroups wait for each other; then each sees what the others wrote to shared memory, and so do the tensor
    cores and TMA."""

    barrier: Ref

    def hold(self) -> None:
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NamedMeeting:
    """The same by a named barrier, which also does what `commit_smem` needs two barriers of each warpgroup for: 2 to
    5 % of the backward pass. fenced: for the tensor cores and TMA, too, which is for GPUs since Hopper."""

    wgs: int
    fenced: bool = True

    def hold(self) -> None:
        if self.fenced:
            fence()
        _named_barrier("sync", MEETING_BARRIER, self.wgs)


# Of 16; Mosaic takes them from 0 on, one a warpgroup.
MEETING_BARRIER = 7
FIRST_TURN_BARRIER = 8
WARPGROUP = 128  # threads


def _named_barrier(operation: str, barrier: Any, wgs: int) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()),))
    def emit(_: Any, barrier: Any) -> None:
        text = f"bar.{operation} $0, {wgs * WARPGROUP};"
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [barrier.registers.item()], text, "r", has_side_effects=True)

    emit(jnp.int32(barrier))  # pyright: ignore[reportCallIssue]  (the decorator passes the context)


@plgpu.inline_mgpu()
def _fence_of_context(_: Any) -> None:
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def fence() -> None:
    """What this thread wrote to shared memory the tensor cores and TMA may read, once a barrier says so."""
    _fence_of_context()  # pyright: ignore[reportCallIssue]
