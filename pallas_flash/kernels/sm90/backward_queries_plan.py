"""What the Hopper kernel for dQ alone works with: its operands, buffers, barriers and static facts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax

from pallas_flash.kernels import barriers as bar
from pallas_flash.kernels import matmul, memory, static_facts
from pallas_flash.kernels.backward_rows import Rows
from pallas_flash.kernels.schedule import WorkItem
from pallas_flash.kernels.sm90.backward_queries_config import QueriesConfig
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
    dscale: Ref | None  # float32 [B, N, T rounded up], zero at first: the sums of q * dq along each row, without scale
    dbias: Ref | None  # float32, zero at first: as `TileScores.add_bias_gradient` wants it


class Buffers(NamedTuple):
    q: Ref  # [warpgroups, block_q, H]; at the end dQ
    dout: Ref  # [warpgroups, block_q, Hv]
    k: Ref  # [key_stages, block_kv, H]
    v: Ref  # [value_stages, block_kv, Hv]
    acc: Ref | None  # accumulators, which only the interpreter needs in memory


class Barriers(NamedTuple):
    q: bar.Handshake
    dout: bar.Handshake
    k: bar.Handshake
    v: bar.Handshake


class Refs(NamedTuple):
    inputs: Inputs
    dq: Ref
    buffers: Buffers
    barriers: Barriers


class Work(NamedTuple):
    """A work item as one compute warpgroup sees it."""

    wg: int
    item: WorkItem
    q_base: jax.Array
    count: jax.Array  # key blocks of the items before
    rows: Rows  # of its queries, in registers
    q_offset: Any
    scores: ScoreOperands


class Worker(NamedTuple):
    """One compute warpgroup with its work, and everything that it works with."""

    plan: Plan
    refs: Refs
    work: Work
    acc: Ref  # dQ, still without the scale


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec
    shapes: Shapes
    dtype: Any
    config: QueriesConfig
    tensor_cores: matmul.TensorCores
    any_logits: bool  # a bias or a score_mod may make them as large as float32 goes

    some_masked = property(static_facts.some_masked)
    kv_len_if_cut = property(static_facts.kv_len_if_cut)
    scaled_only = property(static_facts.scaled_only)
    derivative = property(static_facts.derivative)


def buffers(plan: Plan) -> Buffers:
    shapes, config = plan.shapes, plan.config
    wgs, block_q, block_kv = config.compute_wgs, config.block_q, config.block_kv
    matrix = functools.partial(memory.matrix, dtype=plan.dtype)
    return Buffers(
        q=matrix((wgs, block_q, shapes.head_dim)),
        dout=matrix((wgs, block_q, shapes.value_head_dim)),
        k=matrix((config.key_stages, block_kv, shapes.head_dim)),
        v=matrix((config.value_stages, block_kv, shapes.value_head_dim)),
        acc=plan.tensor_cores.scratch((wgs, block_q, shapes.head_dim)),
    )


def barriers(plan: Plan) -> Barriers:
    config = plan.config
    wgs = config.compute_wgs
    return Barriers(
        q=bar.handshake(wgs, 1),
        dout=bar.handshake(wgs, 1),
        k=bar.handshake(config.key_stages, wgs),
        v=bar.handshake(config.value_stages, wgs),
    )
