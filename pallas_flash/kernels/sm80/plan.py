"""What the portable forward kernel works with: its operands, buffers and static facts."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import junk, memory, softmax, static_facts
from pallas_flash.kernels.barriers import Meeting, NamedMeeting
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sm80.config import ForwardConfig
from pallas_flash.kernels.sm80.instructions import Instructions
from pallas_flash.kernels.tile_scores import ScoreArrays, ScoreOperands
from pallas_flash.spec import AttentionSpec, Residuals, Shapes

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
    out: Ref | None  # [warpgroups, block_q, Hv]; None: takes the place of q, or of v
    junk: junk.Junk | None  # of v; None: nothing in a block of values is hidden
    meeting: Meeting | NamedMeeting | None  # of two warpgroups

    def of_warpgroup(self, wg: Any) -> Buffers:
        """With its queries and outputs alone."""
        return self._replace(q=self.q.at[wg], out=None if self.out is None else self.out.at[wg])


class State(NamedTuple):
    """Between two key blocks. Each of the four threads that share a row has the maximum and the sum of its own
    elements: until the row is done they exchange nothing but a new shift (kernels/row_parts.py)."""

    out: jax.Array  # O, not yet normalised
    m: jax.Array  # [block_q], maxima in the kernel's units
    shift: jax.Array  # [block_q], as in softmax.RowStatistics
    l: jax.Array  # noqa: E741  [block_q], sums of exp(logits - shift)


class Work(NamedTuple):
    """What a warpgroup works on."""

    item: WorkItem
    q_base: jax.Array
    q_offset: Any
    scores: ScoreOperands


class Worker(NamedTuple):
    """A warpgroup with its work, and everything that it works with."""

    plan: Plan
    inputs: Inputs
    outputs: Residuals
    buffers: Buffers
    work: Work


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes  # with padded head dims
    dtype: Any
    config: ForwardConfig
    instructions: Instructions
    has_bias: bool

    @property
    def any_logits(self) -> bool:
        """Whether logits may be as large as float32 goes."""
        return self.has_bias or self.spec.score_mod is not None

    some_masked = property(static_facts.some_masked)
    kv_len_if_cut = property(static_facts.kv_len_if_cut)

    def hides_values(self, *, masked: bool) -> bool:
        """Whether a block, masked or not, may have rows of v that some queries must not read: a bias may be -inf
        anywhere. Rows behind the end are zeros."""
        return self.has_bias or (masked and bool(self.spec.mask))

    @property
    def raw_scores(self) -> bool:
        return softmax.takes_raw_scores(self.spec, any_logits=self.any_logits)

    @property
    def units(self) -> softmax.Units:
        return softmax.units_of(self.spec, any_logits=self.any_logits)


def buffers(plan: Plan, *, interpreted: bool) -> Buffers:
    """Of a CTA."""
    shapes, config = plan.shapes, plan.config
    head_dims = shapes.head_dim, shapes.value_head_dim
    wgs, hides = config.warpgroups, plan.hides_values(masked=True)
    assert not hides or wgs == 1, "forward_fits() refuses it"
    of_queries = lambda dim: memory.matrix((wgs, config.block_q, dim), plan.dtype)  # noqa: E731
    of_keys = lambda dim: memory.matrix((config.num_stages, config.block_kv, dim), plan.dtype)  # noqa: E731
    meeting = Meeting(plgpu.Barrier(num_arrivals=wgs)) if interpreted else NamedMeeting(wgs, fenced=False)
    return Buffers(
        q=of_queries(shapes.head_dim),
        k=of_keys(shapes.head_dim),
        v=of_keys(shapes.value_head_dim),
        out=of_queries(shapes.value_head_dim) if config.out_has_own_buffer(head_dims) else None,
        junk=_junk(config) if hides else None,
        meeting=meeting if wgs > 1 else None,
    )


def _junk(config: ForwardConfig) -> junk.Junk:
    """Nothing is suspected here: the tiles that hide something are looked through at once."""
    return junk.scratch(config.num_stages, config.block_kv, 1, config.block_q)._replace(suspects=None)
