"""What the Hopper forward kernel works with: its operands, buffers, barriers and static facts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import junk, matmul, memory, softmax, static_facts
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sm90.config import ForwardConfig
from pallas_flash.kernels.tile_scores import ScoreArrays, ScoreOperands
from pallas_flash.spec import AttentionSpec, Shapes

Ref = Any


class Inputs(NamedTuple):
    """In device memory; what is absent is None."""

    work: Ref
    q: Ref
    k: Ref
    v: Ref
    sinks: Ref | None  # [N]
    scores: ScoreArrays


class Buffers(NamedTuple):
    q: Ref  # [warpgroups, block_q, H]
    k: Ref  # [stages, block_kv, H]
    v: Ref  # [stages, block_kv, Hv]
    out: Ref | None  # [warpgroups, block_q, Hv]; None: shares q
    m: Ref  # [warpgroups, block_q]
    l: Ref  # noqa: E741
    junk: junk.Junk | None  # of v; None: nothing in a block of values is hidden
    acc: Ref | None  # accumulators, which only the interpreter needs in memory


class Barriers(NamedTuple):
    q: bar.Handshake
    k: bar.Handshake
    v: bar.Handshake
    v_landed: Ref | None  # a block of values that is still to be cleaned is there
    inspected: Ref | None  # all outputs have been looked at for NaN and Inf
    turns: bar.Turns | bar.NamedTurns | None


class State(NamedTuple):
    """Of one warpgroup between two key blocks; O's accumulator stands apart."""

    stats: softmax.RowStatistics
    p: jax.Array  # P of the last block, not yet multiplied with V


class Work(NamedTuple):
    """A work item as one compute warpgroup sees it."""

    wg: jax.Array
    item: WorkItem
    q_base: jax.Array
    count: jax.Array  # key blocks of the items before
    sink: jax.Array | None
    q_offset: Any
    scores: ScoreOperands


class Worker(NamedTuple):
    """One compute warpgroup with its work, and everything that it works with."""

    plan: Plan
    buffers: Buffers
    barriers: Barriers
    work: Work
    acc: Ref  # O, not yet normalised


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes
    dtype: Any
    config: ForwardConfig
    tensor_cores: matmul.TensorCores
    has_bias: bool
    cleans: bool = False  # in the second pass over the work, which follows if NaN or Inf came out of the first

    def slot(self, count: jax.Array) -> jax.Array:
        """Where the key block of this number stands among the buffers."""
        return lax.rem(count, jnp.int32(self.config.num_stages))

    @property
    def any_logits(self) -> bool:
        """Whether logits may be as large as float32 goes."""
        return self.has_bias or self.spec.score_mod is not None

    some_masked = property(static_facts.some_masked)
    kv_len_if_cut = property(static_facts.kv_len_if_cut)

    @property
    def hides_values(self) -> bool:
        """Whether a block may have rows of v that some queries must not read. Rows behind the end are zeros."""
        return self.has_bias or bool(self.spec.mask)

    @property
    def hides_values_anywhere(self) -> bool:
        """Whether that may be so in a block without masked elements too: a bias may be -inf in any."""
        return self.has_bias

    @property
    def raw_scores(self) -> bool:
        return softmax.takes_raw_scores(self.spec, any_logits=self.any_logits)

    @property
    def units(self) -> softmax.Units:
        return softmax.units_of(self.spec, any_logits=self.any_logits)


def buffers(plan: Plan) -> Buffers:
    shapes, config = plan.shapes, plan.config
    wgs, block_q, block_kv = config.compute_wgs, config.block_q, config.block_kv
    matrix = functools.partial(memory.matrix, dtype=plan.dtype)
    return Buffers(
        q=matrix((wgs, block_q, shapes.head_dim)),
        k=matrix((config.num_stages, block_kv, shapes.head_dim)),
        v=matrix((config.num_stages, block_kv, shapes.value_head_dim), contract_rows=True),
        out=matrix((wgs, block_q, shapes.value_head_dim)) if config.out_has_own_buffer else None,
        m=memory.rows((wgs, block_q)),
        l=memory.rows((wgs, block_q)),
        junk=junk.scratch(config.num_stages, block_kv, wgs, block_q) if plan.hides_values else None,
        acc=plan.tensor_cores.scratch((wgs, block_q, shapes.value_head_dim)),
    )


def barriers(plan: Plan) -> Barriers:
    config = plan.config
    wgs = config.compute_wgs
    return Barriers(
        q=bar.handshake(wgs, 1),
        k=bar.handshake(config.num_stages, wgs),
        v=bar.handshake(config.num_stages, wgs),
        v_landed=plgpu.Barrier(num_barriers=config.num_stages) if plan.hides_values else None,
        inspected=plgpu.Barrier(num_arrivals=wgs) if plan.hides_values else None,
        turns=plan.tensor_cores.turns(wgs) if config.take_turns and wgs > 1 else None,
    )
