"""What the Hopper decoding kernel works with: its operands, buffers, barriers and static facts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import masks
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels import junk, matmul, memory, softmax, warp_products
from pallas_flash.kernels.sm90.decode_config import MERGED_COLUMNS, ROWS, THREADS, WARP_ROWS, DecodeConfig, copy_rows
from pallas_flash.kernels.tile_mask import GroupedIndex, WarpIndex
from pallas_flash.kernels.tile_scores import ScoreOperands, TileScores
from pallas_flash.spec import LOG2E, AttentionSpec, Shapes

Ref = Any


class Inputs(NamedTuple):
    """In device memory; what is absent is None."""

    q: Ref  # [B * K, rows, 1, H]: row t * group + g
    k: Ref
    v: Ref
    kv_lengths: Ref
    page_table: Ref | None
    q_lengths: Ref | None
    k_scale: Ref | None
    v_scale: Ref | None
    sinks: Ref | None
    scale: Ref | None  # [1]
    score_mod: tuple[Ref, ...]


class Outputs(NamedTuple):
    """Rows are (batch, token, query head). Without splits they are the result; else one of each for each split."""

    out: Ref  # [splits?, B * T * N, Hv]
    lse: Ref  # [splits?, B * T * N]


class Buffers(NamedTuple):
    """In shared memory."""

    q: Ref  # [1, ROWS, H]
    k: Ref  # [k_stages, block_kv, H], as in the cache
    v: Ref  # [v_stages, block_kv, Hv]
    k_converted: Ref | None  # [1, block_kv, H] in q's dtype; None: the cache is in 16 bits
    v_converted: Ref | None  # likewise of v, in weights_dtype
    merged: Ref | None  # [2 * ROWS, MERGED_COLUMNS]: results of the warps; None: the CTA works on the same keys
    merged_rows: Ref | None  # [2 * ROWS], likewise
    scales: Ref | None  # [2, THREADS]: of a block of keys, and of one of values; None: the cache has none
    junk: junk.Junk | None  # of a block of values; None: values in 8-bit integers have none
    acc: Ref | None  # only for the interpreter


class Barriers(NamedTuple):
    """Each completes when what was copied there has landed."""

    q: Ref
    k: Ref
    v: Ref


class Blocks(NamedTuple):
    """A range of key blocks, [start, end); [full_start, full_end) of them need no mask."""

    start: Any
    end: Any
    full_start: Any
    full_end: Any

    @property
    def steps(self) -> Any:
        return self.end - self.start

    @property
    def masked_steps(self) -> Any:
        return self.steps - (self.full_end - self.full_start)

    def of_step(self, step: Any) -> Any:
        """Rotated: first those behind the unmasked ones, then those before them, then the unmasked ones."""
        block = step + self.full_end
        return jnp.where(block < self.end, block, block - self.steps)


class Work(NamedTuple):
    """What one CTA does."""

    batch: jax.Array
    kv_head: jax.Array
    qi: jax.Array  # tile of query rows
    split: jax.Array
    length: jax.Array  # keys of the sequence
    q_offset: jax.Array  # position of token 0
    blocks: Blocks
    scores: ScoreOperands


class Worker(NamedTuple):
    """A CTA with its work, and everything that it works with."""

    plan: Plan
    inputs: Inputs
    buffers: Buffers
    barriers: Barriers
    work: Work


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a kernel."""

    spec: AttentionSpec  # of the same call as attention; its offsets are traced
    shapes: Shapes  # head dims as the buffers hold them
    value_head_dim: int  # of the output
    dtype: Any
    cache_dtype: Any
    page_size: int | None
    pages: int  # how many there are
    splits: int
    config: DecodeConfig
    tensor_cores: matmul.TensorCores
    warp_products: warp_products.Products

    @property
    def by_warps(self) -> bool:
        return self.config.works_by_warps(self.rows, self.dtype, self.cache_dtype)

    @property
    def rows(self) -> int:
        return self.shapes.q_len * self.shapes.q_heads_per_kv_head

    @property
    def q_rows(self) -> int:
        """Of the buffer."""
        return WARP_ROWS if self.by_warps else ROWS

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // ROWS)

    @property
    def copy_rows(self) -> int:
        return copy_rows(self.page_size, self.config.block_kv)

    @property
    def copies(self) -> int:
        """Of a block."""
        return self.config.block_kv // self.copy_rows

    @property
    def converts(self) -> bool:
        return self.cache_dtype != self.dtype

    @property
    def weights_dtype(self) -> Any:
        """Of P and of the values it is multiplied with. Scales in float16 would leave nothing of small ones."""
        return jnp.bfloat16 if self.converts else self.dtype

    @property
    def has_junk(self) -> bool:
        return self.cache_dtype != jnp.int8 and not self.by_warps

    @property
    def queries_are_alike(self) -> bool:
        """Whether all queries of a key head take part with the same keys."""
        return self.shapes.q_len == 1 and self.spec.score_mod is None

    @property
    def raw_scores(self) -> bool:
        """Whether the softmax works on q.k itself, with the scale folded into its exponent."""
        spec = self.spec
        return spec.scale is not None and spec.scale > 0 and spec.soft_cap is None and spec.score_mod is None

    @property
    def units(self) -> softmax.Units:
        """Of the row maxima."""
        if self.spec.score_mod is not None:
            return softmax.Units(1.0, LOG2E)
        return softmax.Units(self.spec.scale * LOG2E if self.raw_scores else LOG2E)

    def must_rescale(self, ahead: jax.Array) -> jax.Array:
        return self.tensor_cores.any(ahead > self.config.rescale_threshold)

    def walk(self, length: Any, q_offset: Any, qi: Any) -> Blocks:
        """All key blocks of a tile of query rows, from scalars."""
        block, group = self.config.block_kv, self.shapes.q_heads_per_kv_head
        first = q_offset + lax.div(qi * ROWS, jnp.int32(group))
        last = q_offset + lax.div(qi * ROWS + (ROWS - 1), jnp.int32(group))
        full_end, end = (jnp.maximum(jnp.minimum(position + 1, length), 0) for position in (first, last))
        start, full_start = jnp.int32(0), jnp.int32(0)
        if (window := self.spec.mask[0].left) is not None:
            start, full_start = (jnp.maximum(position - window, 0) for position in (first, last))
        start, end = lax.div(start, jnp.int32(block)), _blocks_up(end, block)
        full_start = jnp.minimum(_blocks_up(full_start, block), end)
        full_end = jnp.maximum(lax.div(full_end, jnp.int32(block)), full_start)
        return Blocks(jnp.minimum(start, end), end, full_start, full_end)

    def share(self, walk: Blocks) -> Any:
        """Blocks of a split, but for the last one that has any."""
        return jnp.maximum(_blocks_up(walk.steps, self.splits), self.config.min_blocks)

    def used_splits(self, walk: Blocks) -> Any:
        """How many have blocks: those come first. At least one counts as used."""
        share = self.share(walk)
        return jnp.maximum(lax.div(walk.steps + (share - 1), share), 1)

    def split_blocks(self, walk: Blocks, split: Any) -> Blocks:
        start = jnp.minimum(walk.start + split * self.share(walk), walk.end)
        end = jnp.minimum(start + self.share(walk), walk.end)
        inside = lambda block: jnp.minimum(jnp.maximum(block, start), end)  # noqa: E731
        return Blocks(start, end, inside(walk.full_start), inside(walk.full_end))

    def tile(self, work: Work, step: Any) -> TileScores:
        shapes, keys = self.shapes, self.config.block_kv
        index = (WarpIndex if self.by_warps else GroupedIndex)(
            shape=(ROWS, keys // warp_products.WARPS if self.by_warps else keys),
            batch=work.batch,
            first_head=work.kv_head * shapes.q_heads_per_kv_head,
            group=shapes.q_heads_per_kv_head,
            tokens=shapes.q_len,
            row_base=work.qi * ROWS,
            kv_base=work.blocks.of_step(step) * keys,
            q_offset=work.q_offset,
        )
        return TileScores(self.spec, work.scores, index, self.tensor_cores)


def _blocks_up(keys: Any, block: int) -> Any:
    return lax.div(keys + (block - 1), jnp.int32(block))


def as_attention(spec: DecodeSpec) -> AttentionSpec:
    band = masks.Band(spec.window, 0)
    return AttentionSpec(spec.scale, (band,), q_offset=None, soft_cap=spec.soft_cap, score_mod=spec.score_mod)


def buffers(plan: Plan) -> Buffers:
    shapes, config = plan.shapes, plan.config
    converted = plan.converts and not plan.by_warps
    blocks = lambda count, dim: (count, config.block_kv, dim)  # noqa: E731
    here = functools.partial(memory.matrix, dtype=plan.dtype)
    cached = functools.partial(memory.matrix, dtype=plan.cache_dtype)
    k, v = blocks(config.k_stages, shapes.head_dim), blocks(config.v_stages, shapes.value_head_dim)
    converted_v = memory.matrix(blocks(1, shapes.value_head_dim), plan.weights_dtype, contract_rows=True)
    return Buffers(
        q=here((1, plan.q_rows, shapes.head_dim)),
        k=cached(k),
        v=cached(v, contract_rows=not plan.converts),
        k_converted=here(blocks(1, shapes.head_dim)) if converted else None,
        v_converted=converted_v if converted else None,
        merged=plgpu.SMEM((2 * ROWS, MERGED_COLUMNS), jnp.float32) if plan.by_warps else None,
        merged_rows=plgpu.SMEM((2 * ROWS,), jnp.float32) if plan.by_warps else None,
        scales=plgpu.SMEM((2, THREADS), jnp.float32) if converted else None,
        junk=junk.scratch(1, config.block_kv, 1, ROWS) if plan.has_junk else None,
        acc=None if plan.by_warps else plan.tensor_cores.scratch((ROWS, shapes.value_head_dim)),
    )


def barriers(plan: Plan) -> Barriers:
    stages = functools.partial(plgpu.Barrier, num_arrivals=plan.copies)
    return Barriers(
        q=plgpu.Barrier(num_barriers=1),
        k=stages(num_barriers=plan.config.k_stages),
        v=stages(num_barriers=plan.config.v_stages),
    )


def length_of(plan: Plan, inputs: Inputs, batch: Any) -> tuple[Any, Any]:
    """(keys of a sequence, position of its token 0)."""
    length = jnp.minimum(jnp.maximum(inputs.kv_lengths[batch], 0), plan.shapes.kv_len)
    new = plan.shapes.q_len if inputs.q_lengths is None else inputs.q_lengths[batch]
    return length, length - new


def inputs_of(plan: Plan, operands: DecodeOperands, score_mod: tuple[jax.Array, ...]) -> Inputs:
    """The arrays as the kernel reads them. For one token this moves nothing."""
    shapes = plan.shapes
    q = operands.q.reshape(shapes.batch, shapes.q_len, shapes.num_kv_heads, -1, operands.q.shape[-1])
    q = q.swapaxes(1, 2).reshape(shapes.batch * shapes.num_kv_heads, plan.rows, 1, -1)
    float32 = lambda x: None if x is None else x.astype(jnp.float32)  # noqa: E731
    scale = None if operands.scale is None else float32(operands.scale.reshape(1))
    return Inputs(
        q, operands.k, operands.v, operands.kv_lengths, operands.page_table, operands.q_lengths, operands.k_scale,
        operands.v_scale, float32(operands.sinks), scale, score_mod,
    )  # fmt: skip
