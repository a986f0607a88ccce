"""What the portable backward kernels work with: their operands, static facts, and how blocks are copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_flash.kernels import tile_scores
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.sm80.config import KeysConfig, QueriesConfig
from pallas_flash.kernels.sm80.instructions import Instructions
from pallas_flash.kernels.tile_scores import ScoreOperands
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
    scale: Ref | None  # [1]
    q_offset: Ref | None  # [B]
    score_mod: tuple[Ref, ...]  # these as in spec.Operands
    bias: Ref | None
    mask: tuple[tuple[Ref, ...], ...]
    dropout_key: Ref | None
    kv_offset: Ref | None
    origin: Ref | None
    dscale: Ref | None  # float32 [B, N, T rounded up], zero at first: the sums of q * dq along each row, without scale
    dbias: Ref | None  # float32, zero at first: as `TileScores.add_bias_gradient` wants it


class Arrays(NamedTuple):
    """The first of `Inputs`."""

    work: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    rows: Rows


def inputs(spec: AttentionSpec, operands: Operands, arrays: Arrays, *, dscale: Any = None, dbias: Any = None) -> Inputs:
    scale = None if operands.scale is None else operands.scale.reshape(1).astype(jnp.float32)
    return Inputs(*arrays, scale, *tile_scores.score_arrays(spec, operands), dscale, dbias)


class Work(NamedTuple):
    """What a CTA works on."""

    item: Any  # schedule.WorkItem, or backward_schedule.WorkItem
    q_base: jax.Array | None  # of its tile, if that is one of queries
    q_offset: Any
    scores: ScoreOperands


def work_of(plan: Plan, inputs: Inputs, item: Any, q_base: jax.Array | None = None) -> Work:
    q_offset = plan.spec.q_offset if inputs.q_offset is None else inputs.q_offset[item.batch]
    return Work(item, q_base, q_offset, tile_scores.score_operands(plan.spec, inputs, item.batch))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes  # with padded head dims
    dtype: Any
    config: QueriesConfig | KeysConfig
    instructions: Instructions
    any_logits: bool  # a bias or a score_mod may make them as large as float32 goes

    @property
    def some_masked(self) -> bool:
        return bool(self.spec.mask) or self.kv_len_if_cut is not None

    @property
    def kv_len_if_cut(self) -> int | None:
        """The number of keys, if the last block is not full."""
        return self.shapes.kv_len if self.shapes.kv_len % self.config.block_kv else None

    @property
    def scaled_only(self) -> bool:
        """Whether nothing but a factor stands between q.k and the logits."""
        return not self.any_logits and self.spec.soft_cap is None

    @property
    def derivative(self) -> bool:
        """Whether the logits have another derivative by scale * q.k than 1."""
        return self.spec.soft_cap is not None or self.spec.score_mod is not None


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
