"""What the Hopper backward kernel works with: its operands, buffers, barriers and static facts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import matmul, memory
from pallas_flash.kernels.sm90.backward_config import BLOCK_KV, COMPUTE_WGS, TILE_KV, BackwardConfig
from pallas_flash.kernels.sm90.backward_schedule import WorkItem
from pallas_flash.spec import AttentionSpec, Shapes

Ref = Any


class Inputs(NamedTuple):
    """In device memory; what is absent is None."""

    work: Ref
    q: Ref
    k: Ref
    v: Ref
    dout: Ref
    lse_log2: Ref  # [B, N, T rounded up]; +inf in a row with no key and behind the last one: its weights are 0
    delta: Ref  # as lse_log2; 0 there
    scale: Ref | None  # [1]
    q_offset: Ref | None  # [B]
    mask: tuple[tuple[Ref, ...], ...]  # of parts that have one int32 a batch element
    dq: Ref  # float32 [B, T, N, H], zero at first: the only one that is written


class Outputs(NamedTuple):
    dk: Ref  # [B, S, K, H]
    dv: Ref  # [B, S, K, Hv]


class Buffers(NamedTuple):
    k: Ref  # [1, 128, H]; at the end dK
    v: Ref  # [1, 128, Hv]; at the end dV
    q: Ref  # [stages, block_q, H]
    dout: Ref  # [stages, block_q, Hv]
    lse_log2: Ref  # [stages, block_q]
    delta: Ref
    ds: Ref  # [2, 128, block_q]
    dq: Ref  # [warpgroups, rows, columns], float32
    accumulators: Accumulators


class Accumulators(NamedTuple):
    """[warpgroups, rows, columns], which only the interpreter needs in memory."""

    scores: Ref | None
    dp: Ref | None
    dq: Ref | None
    dk: Ref | None
    dv: Ref | None

    def of(self, wg: int) -> Accumulators:
        return Accumulators(*(None if x is None else x.at[wg] for x in self))


class Barriers(NamedTuple):
    k: bar.Handshake
    v: bar.Handshake
    q: bar.Handshake  # with lse_log2
    dout: bar.Handshake  # with delta
    meeting: Ref  # of the compute warpgroups


class Refs(NamedTuple):
    inputs: Inputs
    outputs: Outputs
    buffers: Buffers
    barriers: Barriers


class Work(NamedTuple):
    """A work item as one compute warpgroup sees it."""

    wg: int
    item: WorkItem
    scale: Any
    q_offset: Any
    mask: tuple[tuple[jax.Array, ...], ...]


class Block(NamedTuple):
    """A block of queries of one head, which some key tile meets."""

    head: jax.Array
    q_base: jax.Array
    slot: jax.Array  # of the buffers for queries
    ds_slot: jax.Array
    zero: jax.Array  # 0, which the compiler does not know
    masked: bool
    drain: bool  # whether the tensor cores must be done with it at its end


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes
    dtype: Any
    config: BackwardConfig
    tensor_cores: matmul.TensorCores
    interpreted: bool

    @property
    def some_masked(self) -> bool:
        return bool(self.spec.mask) or self.shapes.kv_len % TILE_KV != 0

    @property
    def dq_slices(self) -> int:
        """Of the buffer for dQ. The interpreter adds nothing up: each key tile has a slice of its own there."""
        return -(-self.shapes.kv_len // TILE_KV) if self.interpreted else 1


class Rows(NamedTuple):
    """What the backward pass needs of each query row beside q and dout, float32 [B, N, T rounded up]."""

    lse_log2: jax.Array
    delta: jax.Array


def buffers(plan: Plan) -> Buffers:
    shapes, config = plan.shapes, plan.config
    matrix = functools.partial(memory.matrix, dtype=plan.dtype)
    stages, block_q = config.num_stages, config.block_q
    scratch = lambda shape: plan.tensor_cores.scratch((COMPUTE_WGS, *shape))  # noqa: E731
    dq_part = config.dq_part(shapes.head_dim)
    return Buffers(
        k=matrix((1, TILE_KV, shapes.head_dim)),
        v=matrix((1, TILE_KV, shapes.value_head_dim)),
        q=matrix((stages, block_q, shapes.head_dim)),
        dout=matrix((stages, block_q, shapes.value_head_dim)),
        lse_log2=memory.rows((stages, block_q)),
        delta=memory.rows((stages, block_q)),
        ds=matrix((2, TILE_KV, block_q)),
        dq=memory.matrix((COMPUTE_WGS, *dq_part), jnp.float32),
        accumulators=Accumulators(
            scores=scratch((BLOCK_KV, block_q)),
            dp=scratch((BLOCK_KV, block_q)),
            dq=scratch(dq_part),
            dk=scratch((BLOCK_KV, shapes.head_dim)),
            dv=scratch((BLOCK_KV, shapes.value_head_dim)),
        ),
    )


def barriers(plan: Plan) -> Barriers:
    stages = plan.config.num_stages
    return Barriers(
        k=bar.handshake(1, COMPUTE_WGS),
        v=bar.handshake(1, COMPUTE_WGS),
        q=_handshake_of_two_copies(stages),
        dout=_handshake_of_two_copies(stages),
        meeting=plgpu.Barrier(num_arrivals=COMPUTE_WGS),
    )


def _handshake_of_two_copies(slots: int) -> bar.Handshake:
    return bar.Handshake(
        produced=plgpu.Barrier(num_barriers=slots, num_arrivals=2),
        consumed=plgpu.Barrier(num_barriers=slots, num_arrivals=COMPUTE_WGS),
    )
