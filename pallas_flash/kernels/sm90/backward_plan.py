"""What the Hopper backward kernel works with: its operands, buffers, barriers and static facts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import matmul, memory, static_facts
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.backward_schedule import WorkItem
from pallas_flash.kernels.sm90.backward_config import BLOCK, COMPUTE_WGS, BackwardConfig
from pallas_flash.kernels.tile_scores import ScoreArrays, ScoreOperands
from pallas_flash.spec import AttentionSpec, Shapes

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
    dq: (
        Ref | None
    )  # float32 [B, T, N, H], zero at first: one of the two that are written; None: another kernel makes it
    dbias: Ref | None  # float32 [B, N, S rounded up], zero at first: the other, the sums over queries


class Outputs(NamedTuple):
    dk: Ref  # [B, S, K, H]
    dv: Ref  # [B, S, K, Hv]


class Buffers(NamedTuple):
    k: Ref  # [1, block_kv, H]; at the end dK
    v: Ref  # [1, block_kv, Hv]; at the end dV
    q: Ref  # [num_stages, block_q, H]
    dout: Ref  # [dout_stages, block_q, Hv]
    rows: Rows  # [stages, block_q]
    ds: Ref  # [2 or 1, block_kv, block_q]
    dq: Ref | None  # [warpgroups, rows, columns], float32
    p: Ref | None  # [2, block_kv, block_q], where the warpgroups share the keys
    slopes: Ref | None  # likewise [block_kv, block_q], P before dropout times the derivative of the logits
    dk: Ref | None  # [1, block_kv, H], if not in the place of K or dS
    dv: Ref | None  # [1, block_kv, Hv], if not in the place of V
    accumulators: Accumulators


class Accumulators(NamedTuple):
    """[warpgroups, rows, columns], which only the interpreter needs in memory."""

    scores: Ref | None
    dp: Ref | None
    dq: tuple[Ref | None, ...]
    dk: Ref | None
    dv: Ref | None

    def of(self, wg: int) -> Accumulators:
        return jax.tree.map(lambda ref: ref.at[wg], self, is_leaf=lambda x: x is not None and not isinstance(x, tuple))


class Barriers(NamedTuple):
    k: bar.Handshake
    v: bar.Handshake
    q: bar.Handshake  # with lse_log2 and m
    dout: bar.Handshake  # with delta
    meeting: bar.Meeting | bar.NamedMeeting  # of the compute warpgroups
    ds: bar.Exchange | None  # between them, where dQ is late
    turns: bar.Turns | bar.NamedTurns | bar.NoTurns


class Refs(NamedTuple):
    inputs: Inputs
    outputs: Outputs
    buffers: Buffers
    barriers: Barriers


class Work(NamedTuple):
    """A work item as one compute warpgroup sees it."""

    item: WorkItem
    q_offset: Any
    scores: ScoreOperands


class Worker(NamedTuple):
    """One compute warpgroup with its work, and everything that it works with."""

    plan: Plan
    refs: Refs
    wg: int
    work: Work
    dk: Ref  # accumulators
    dv: Ref

    @property
    def accumulators(self) -> Accumulators:
        return self.refs.buffers.accumulators.of(self.wg)


class Block(NamedTuple):
    """A block of queries of one head, which some key tile meets."""

    head: jax.Array
    q_base: jax.Array
    parity: Any  # of the steps, 0 or 1
    q_slot: Any  # of the buffers
    dout_slot: Any
    zero: jax.Array  # 0, which the compiler does not know
    masked: bool
    before: jax.Array | None = None  # where the block of the step before begins, if dQ is late
    first: jax.Array | None = None  # whether there was none

    def at(self, buffer: Ref, slot: Any, *rest: Any) -> Ref:
        """The buffer's part at a slot. The compiler must not know a slot that is the same in every step, or else it
        holds the many addresses of the wgmma operands in it in registers throughout the loop."""
        return buffer.at[(slot + self.zero if isinstance(slot, int) else slot, *rest)]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes
    dtype: Any
    config: BackwardConfig
    tensor_cores: matmul.TensorCores
    interpreted: bool
    any_logits: bool  # a bias or a score_mod may make them as large as float32 goes
    sums_dq: bool = True

    some_masked = property(static_facts.some_masked)
    kv_len_if_cut = property(static_facts.kv_len_if_cut)
    scaled_only = property(static_facts.scaled_only)
    derivative = property(static_facts.derivative)

    @property
    def late_dq(self) -> bool:
        return self.config.late_dq and self.sums_dq

    @property
    def takes_turns(self) -> bool:
        return self.config.take_turns and self.late_dq

    @property
    def slopes(self) -> bool:
        """Whether the warpgroup that makes dS needs another matrix than the one that multiplies dO."""
        return self.config.shares_keys and self.config.needs_slopes(
            self.dtype, derivative=self.derivative, dropout=self.spec.dropout_rate > 0
        )

    @property
    def slopes_dtype(self) -> Any:
        """P is at most 1: float16 rounds it less than bfloat16 does."""
        return self.dtype if self.derivative else jnp.float16

    @property
    def dq_slices(self) -> int:
        """Of the buffer for dQ. The interpreter adds nothing up: each key tile has a slice of its own there."""
        return -(-self.shapes.kv_len // self.config.block_kv) if self.interpreted else 1


def buffers(plan: Plan) -> Buffers:
    shapes, config = plan.shapes, plan.config
    matrix = functools.partial(memory.matrix, dtype=plan.dtype)
    parted = functools.partial(matrix, column_parts=COMPUTE_WGS if config.shares_keys else 1)
    block_q, block_kv = config.block_q, config.block_kv
    # A product wants both matrices in the same swizzle: dS as Q and K, P as dO.
    parts = lambda columns: 2 if config.shares_keys and config.sum_columns(columns) % 64 else 1  # noqa: E731
    tiles = lambda count, columns: matrix((count, block_kv, block_q), column_parts=parts(columns))  # noqa: E731
    scratch = lambda columns: plan.tensor_cores.scratch((COMPUTE_WGS, BLOCK, columns))  # noqa: E731
    columns = config.dq_columns(shapes.head_dim)
    return Buffers(
        k=parted((1, block_kv, shapes.head_dim)),
        v=parted((1, block_kv, shapes.value_head_dim)),
        q=parted((config.num_stages, block_q, shapes.head_dim)),
        dout=parted((config.dout_stages, block_q, shapes.value_head_dim)),
        rows=Rows(
            memory.rows((config.num_stages, block_q)),
            memory.rows((config.dout_stages, block_q)),
            memory.rows((config.num_stages, block_q)) if plan.any_logits else None,
        ),
        ds=tiles(1 if config.shares_keys else 2, shapes.head_dim),
        dq=memory.matrix((COMPUTE_WGS, BLOCK, columns), jnp.float32) if plan.sums_dq else None,
        p=tiles(2, shapes.value_head_dim) if config.shares_keys else None,
        slopes=memory.matrix((block_kv, block_q), plan.slopes_dtype) if plan.slopes else None,
        dk=matrix((1, block_kv, shapes.head_dim)) if config.own_outputs and not config.dk_in_ds else None,
        dv=matrix((1, block_kv, shapes.value_head_dim)) if config.own_outputs else None,
        accumulators=Accumulators(
            scores=scratch(block_q),
            dp=scratch(block_q),
            dq=tuple(scratch(columns) for _ in config.dq_chunks(0, shapes.head_dim)),
            dk=scratch(config.sum_columns(shapes.head_dim)),
            dv=scratch(config.sum_columns(shapes.value_head_dim)),
        ),
    )


def barriers(plan: Plan) -> Barriers:
    config = plan.config
    return Barriers(
        k=bar.handshake(1, COMPUTE_WGS),
        v=bar.handshake(1, COMPUTE_WGS),
        q=_handshake_of_copies(config.num_stages, 3 if plan.any_logits else 2),
        dout=_handshake_of_copies(config.dout_stages, 2),
        meeting=plan.tensor_cores.meeting(COMPUTE_WGS),
        ds=bar.exchange(COMPUTE_WGS) if plan.late_dq else None,
        turns=plan.tensor_cores.turns(COMPUTE_WGS) if plan.takes_turns else bar.NoTurns(),
    )


def _handshake_of_copies(slots: int, copies: int) -> bar.Handshake:
    return bar.Handshake(
        produced=plgpu.Barrier(num_barriers=slots, num_arrivals=copies),
        consumed=plgpu.Barrier(num_barriers=slots, num_arrivals=COMPUTE_WGS),
    )
