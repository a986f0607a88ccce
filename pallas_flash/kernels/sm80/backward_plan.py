"""What the portable backward kernels work with: their operands, static facts, and how blocks are copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import backward_schedule as schedule
from pallas_flash.kernels import static_facts, tile_scores
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_schedule import WorkItem
from pallas_flash.kernels.sm80.config import KeysConfig, QueriesConfig
from pallas_flash.kernels.sm80.instructions import Instructions
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.kernels.tile_scores import ScoreArrays, ScoreOperands
from pallas_flash.spec import AttentionSpec, Operands, Shapes

Ref = Any


class Inputs(NamedTuple):
    """In device memory; what is absent is None."""

    work: Ref
    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    rows: Rows
    scores: ScoreArrays
    dscale: Ref | None  # float32 [B, N, T rounded up], zero at first: the sums of q * dq along each row, without scale
    dbias: Ref | None  # float32, zero at first: as `TileScores.add_bias_gradient` wants it
    dq: Ref | None  # float32 [slices, B, T rounded up, N, H], zero at first, without scale: `KeysConfig.fused`


class Arrays(NamedTuple):
    """The first of `Inputs`."""

    work: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    rows: Rows


def inputs(spec: AttentionSpec, operands: Operands, arrays: Arrays, **sums: Any) -> Inputs:
    """sums: the last three of `Inputs`, as far as they are wanted."""
    absent = {"dscale": None, "dbias": None, "dq": None}
    return Inputs(*arrays, tile_scores.score_arrays(spec, operands), **absent | sums)


class Work(NamedTuple):
    """What a CTA works on."""

    item: Any  # schedule.WorkItem, or backward_schedule.WorkItem
    q_base: jax.Array | None  # of its tile, if that is one of queries
    q_offset: Any
    scores: ScoreOperands


def work_of(plan: Plan, inputs: Inputs, item: Any, q_base: jax.Array | None = None) -> Work:
    q_offset = inputs.scores.q_offset_of(plan.spec, item.batch)
    return Work(item, q_base, q_offset, inputs.scores.of(plan.spec, item.batch))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes  # with padded head dims
    dtype: Any
    config: QueriesConfig | KeysConfig
    instructions: Instructions
    any_logits: bool  # a bias or a score_mod may make them as large as float32 goes

    some_masked = property(static_facts.some_masked)
    kv_len_if_cut = property(static_facts.kv_len_if_cut)
    scaled_only = property(static_facts.scaled_only)
    derivative = property(static_facts.derivative)


@dataclasses.dataclass(frozen=True)
class KeysPlan(Plan):
    config: KeysConfig


class Sums(NamedTuple):
    """In device memory, or of a CTA; None: another run makes it."""

    dk: Any
    dv: Any


class Block(NamedTuple):
    """Of queries of one head."""

    head: jax.Array
    step: jax.Array
    masked: bool


class Steps(NamedTuple):
    """Of a walk over queries."""

    copy: Callable[[jax.Array, jax.Array], None]  # start copying the block of a head and a step, if there is one
    add: Callable[[Block, Sums], Sums]
    meet: Callable[[], None]  # of all threads that read the blocks


def walk(plan: KeysPlan, item: WorkItem, steps: Steps, sums: Sums) -> Sums:
    """Over the item's query blocks of each head: the masked ones, then the unmasked ones."""

    def walk_head(head: jax.Array, sums: Sums) -> Sums:
        steps.copy(head, jnp.int32(0))
        masked_steps = jnp.int32(0)
        add = lambda masked: lambda i, sums: steps.add(Block(head, i, masked), sums)  # noqa: E731
        if plan.some_masked:
            masked_steps = schedule.masked_steps(item)
            sums = lax.fori_loop(0, masked_steps, add(True), sums)
        sums = lax.fori_loop(masked_steps, item.q_end - item.q_start, add(False), sums)
        steps.meet()  # the last block has been read
        return sums

    heads = plan.shapes.q_heads_per_kv_head
    if heads == 1:
        return walk_head(item.kv_head, sums)
    first = item.kv_head * heads
    return lax.fori_loop(first, first + heads, walk_head, sums)


def zeros(plan: KeysPlan, columns: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((plan.config.block_kv, columns), jnp.float32), plgpu.Layout.WGMMA)


def scaled(plan: KeysPlan, work: Work, sums: Sums) -> Sums:
    """With the scale and the dropout's factor."""
    dk, dv = sums
    factor = 1 / (1 - plan.spec.dropout_rate)
    return Sums(None if dk is None else dk * work.scores.scale, dv if dv is None or factor == 1 else dv * factor)


def add_dq(plan: KeysPlan, inputs: Inputs, work: Work, block: Block, dq: jax.Array, column: Any = 0) -> None:
    """What a block of queries gets from this CTA's keys, from this column on."""
    q_base = schedule.query_block(work.item, block.step) * plan.config.block_q
    own = 0 if inputs.dq.shape[0] == 1 else work.item.ki
    plan.instructions.add(inputs.dq.at[own, work.item.batch, :, block.head], (q_base, jnp.int32(column)), dq)


def spread(columns: Ref, tile: jax.Array) -> jax.Array:
    """One value a column, for every row of the tile."""
    values = plgpu.load(columns, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return lax.broadcast_in_dim(values, tile.shape, (1,))


def tile_index(plan: KeysPlan, work: Work, block: Block, part: Any) -> TileIndex:
    columns = plan.config.columns
    return TileIndex(
        shape=(plan.config.block_kv, columns),
        batch=work.item.batch,
        head=block.head,
        q_base=schedule.query_block(work.item, block.step) * plan.config.block_q + part * columns,
        kv_base=work.item.ki * plan.config.block_kv,
        q_offset=work.q_offset,
        transposed=True,
    )


def with_next(
    plan: Plan, copy: Callable[[jax.Array], None], step: jax.Array, body: Callable[[], Any], meet: Any = None
) -> Any:
    """Run `body` on the block of a step once it is there; `copy` starts copying one, or none behind the last. With two
    stages the next one is copied beside it, with one stage after it. meet: where not one warpgroup alone reads it."""
    meet = meet or plan.instructions.commit
    plan.instructions.wait_for_copies(0)
    meet()  # and all warps are done with the block before
    if plan.config.num_stages == 2:
        copy(step + 1)
        return body()
    result = body()
    meet()
    copy(step + 1)
    return result
