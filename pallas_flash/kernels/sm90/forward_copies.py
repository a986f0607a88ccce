"""The warpgroup of the Hopper forward kernel that copies queries, keys and values to shared memory (TMA)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import junk, memory, schedule, tma
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sm90.plan import Barriers, Buffers, Inputs, Plan, Ref

CopyBlock = Callable[[jax.Array], None]  # of a step


def copy_warpgroup(plan: Plan, inputs: Inputs, buffers: Buffers, barriers: Barriers) -> None:
    config = plan.config
    cta = lax.axis_index("cta")
    items = schedule.load_count(inputs.work, cta)
    first = schedule.load_item(inputs.work, cta, jnp.int32(0))

    def copy_tile(index: jax.Array, carry: tuple[WorkItem, jax.Array]) -> tuple[WorkItem, jax.Array]:
        item, count = carry
        following = schedule.load_item(inputs.work, cta, jnp.minimum(index + 1, items - 1))
        kv_head = lax.div(item.head, jnp.int32(plan.shapes.q_heads_per_kv_head))

        def copy_block(source: Ref, buffer: Ref, handshake: bar.Handshake, step: jax.Array) -> None:
            slot = plan.slot(count + step)
            rows = tma.Rows(item.batch, schedule.key_block(item, step) * config.block_kv, kv_head, config.block_kv)
            plgpu.barrier_wait(handshake.consumed.at[slot])
            tma.load(source, rows, buffer, handshake.produced, slot, contract_rows=buffer is buffers.v)

        def clean_v(step: jax.Array) -> None:
            _clean(plan, buffers, barriers, plan.slot(count + step))

        copy_k = functools.partial(copy_block, inputs.k, buffers.k, barriers.k)
        copy_v = functools.partial(copy_block, inputs.v, buffers.v, barriers.v)
        # The first keys do not wait for the last tile's queries to be done with.
        copy_k(jnp.int32(0))
        for wg in range(config.compute_wgs):
            start = item.qi * config.tile_q + wg * config.block_q
            plgpu.barrier_wait(barriers.q.consumed.at[wg])
            tma.load(
                inputs.q, tma.Rows(item.batch, start, item.head, config.block_q), buffers.q, barriers.q.produced, wg
            )
        steps = item.kv_end - item.kv_start

        if plan.cleans:
            to_clean = steps if plan.hides_values_anywhere else schedule.first_unmasked(item)
            land_v = functools.partial(copy_block, inputs.v, buffers.v, barriers.v._replace(produced=barriers.v_landed))
            _copy_and_clean(steps, to_clean, (copy_k, copy_v), (land_v, clean_v))
        else:

            @pl.loop(1, steps)
            def _(step: jax.Array) -> None:
                copy_k(step)
                copy_v(step - 1)

            copy_v(steps - 1)
        return following, count + steps

    lax.fori_loop(0, items, copy_tile, (first, jnp.int32(0)))
    bar.await_all(barriers.q, config.compute_wgs)
    bar.await_all(barriers.k, config.num_stages)
    bar.await_all(barriers.v, config.num_stages)


def _copy_and_clean(
    steps: jax.Array, to_clean: jax.Array, copies: tuple[CopyBlock, CopyBlock], cleaning: tuple[CopyBlock, CopyBlock]
) -> None:
    """The keys behind the first block and the values of all; those of the first `to_clean` steps land early, as the
    compute warpgroups get them only when they are clean."""
    copy_k, copy_v = copies
    land_v, clean_v = cleaning
    copy_next_k = lambda step: pl.when(step + 1 < steps)(lambda: copy_k(step + 1))  # noqa: E731
    copy_next_k(jnp.int32(0))
    land_v(jnp.int32(0))

    @pl.loop(1, to_clean)
    def _(step: jax.Array) -> None:
        land_v(step)
        clean_v(step - 1)
        copy_next_k(step)

    clean_v(to_clean - 1)

    @pl.loop(to_clean, steps)
    def _(step: jax.Array) -> None:
        copy_next_k(step)
        copy_v(step)


def _clean(plan: Plan, buffers: Buffers, barriers: Barriers, slot: jax.Array) -> None:
    """Wait for a block of values, and hand it on without NaN and Inf."""
    columns = memory.tile_columns(buffers.v.shape, plan.dtype, contract_rows=True)
    plgpu.barrier_wait(barriers.v_landed.at[slot])
    junk.clean(buffers.v.at[slot], columns, buffers.junk, slot, plan.tensor_cores)
    plgpu.barrier_arrive(barriers.v.produced.at[slot])
