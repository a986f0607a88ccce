"""What the portable backward kernels work with: their operands, static facts, and how blocks are copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_flash.kernels import static_facts, tile_scores
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.sm80.config import KeysConfig, QueriesConfig
from pallas_flash.kernels.sm80.instructions import Instructions
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


def with_next(plan: Plan, copy: Callable[[jax.Array], None], step: jax.Array, body: Callable[[], Any]) -> Any:
    """Run `body` on the block of a step once it is there; `copy` starts copying one, or none behind the last. With two
    stages the next one is copied beside it, with one stage after it."""
    instructions = plan.instructions
    instructions.wait_for_copies(0)
    instructions.commit()  # and all warps are done with the block before
    if plan.config.num_stages == 2:
        copy(step + 1)
        return body()
    result = body()
    instructions.commit()
    copy(step + 1)
    return result
