"""The scores of one tile in registers, with queries as rows and with keys as rows, against `scores.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash import dropout, elementwise, masks, scores
from pallas_flash.kernels import matmul
from pallas_flash.kernels.tile_mask import TileIndex
from pallas_flash.kernels.tile_scores import ScoreOperands, TileScores
from pallas_flash.masks import Slice
from pallas_flash.spec import AttentionSpec, Operands

ROWS, BATCH, HEAD = 64, 1, 1
Q_LEN, KV_LEN = 100, 120  # the tile of rows and keys from 64 on hangs over both ends
rng = np.random.default_rng(0)
TABLE = jnp.asarray(rng.normal(size=(2, 9)), jnp.float32)
IDS = [jnp.asarray(rng.integers(0, 2, (2, n)), jnp.int32) for n in (Q_LEN, KV_LEN)]


def modified(score, batch, head, q_pos, kv_pos):
    return score + TABLE[head, jnp.clip(q_pos - kv_pos, -4, 4) + 4] * q_pos


def some(batch, head, q_pos, kv_pos):
    return (q_pos * 3 + kv_pos) % 5 != batch


def spec_and_operands(bias_shape: tuple[int, ...]) -> tuple[AttentionSpec, Operands]:
    arguments = {"score": np.float32, **elementwise.PLACE}
    score_mod, captured = elementwise.trace("score_mod", modified, arguments, np.float32)
    predicate = masks.predicate(some)
    mask = (masks.Band(50, 30), masks.Segments(), masks.Dense(), *predicate.parts)
    spec = AttentionSpec(0.5, mask, q_offset=3, soft_cap=4.0, score_mod=score_mod, dropout_rate=0.4)
    bias = rng.normal(size=bias_shape)
    bias.reshape(-1)[3::7] = -np.inf
    operands = Operands(
        *(jnp.zeros((2, n, 2, 8)) for n in (Q_LEN, KV_LEN, KV_LEN)),
        bias=jnp.asarray(bias, jnp.float32),
        score_mod=captured,
        mask=((), tuple(IDS), (jnp.asarray(rng.random((2, 1, Q_LEN, KV_LEN)) < 0.9),), *predicate.arrays),
        dropout_key=jnp.array([3, 4], jnp.uint32),
    )
    return spec, operands


def tile_kernel(spec: AttentionSpec, operands: Operands, transposed: bool, interpret: bool):
    """Raw scores [64, 64] -> masked logits and kept ones, in a kernel of one warpgroup."""
    tensor_cores = matmul.Interpreted() if interpret else matmul.Wgmma()

    def body(refs, raw, logits, kept):
        key = refs.dropout_key
        inputs = ScoreOperands(spec.scale, refs.score_mod, refs.bias, refs.mask, (key[0], key[1]))
        base, place = jnp.int32(ROWS), (jnp.int32(BATCH), jnp.int32(HEAD))
        index = TileIndex((ROWS, ROWS), *place, base, base, spec.q_offset, transposed)
        tile = TileScores(spec, inputs, index, tensor_cores)
        loaded = plgpu.layout_cast(plgpu.load(raw, optimized=False), plgpu.Layout.WGMMA)
        logits[...] = tile.masked(tile.logits(loaded), KV_LEN)
        kept[...] = tile.kept(jnp.full((ROWS, ROWS), 1.0))

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32),) * 2,
        num_threads=1,
        thread_name="wg",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    return lambda operands, raw: kernel(operands, raw)


def wanted(spec: AttentionSpec, operands: Operands, raw: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same from `scores.py`: [queries, keys] of the part of the tile that exists."""
    rows, keys = Slice(0, Q_LEN), Slice(0, KV_LEN)
    tile = scores.tile_of(spec, operands, rows, keys)
    everywhere = jnp.zeros((Q_LEN, KV_LEN)).at[ROWS:, ROWS:].set(raw)[None, None]
    logits = scores.logits(spec, everywhere, scores.score_inputs(operands, rows, keys), tile)
    kept = dropout.keep(tuple(operands.dropout_key), tile.index, spec.dropout_rate)
    return tuple(jnp.broadcast_to(x, (2, 2, Q_LEN, KV_LEN))[BATCH, HEAD, ROWS:, ROWS:] for x in (logits, kept))


@pytest.mark.parametrize("bias_shape", [(2, 2, Q_LEN, KV_LEN), (1, 2, Q_LEN, 1), (2, 1, 1, KV_LEN), (1, 1, 1, 1)])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_tile_of_either_orientation(transposed, bias_shape):
    spec, operands = spec_and_operands(bias_shape)
    raw = jnp.asarray(rng.normal(size=(Q_LEN - ROWS, KV_LEN - ROWS)), jnp.float32)
    padded = jnp.pad(raw, [(0, ROWS - n) for n in raw.shape])
    turn = jnp.transpose if transposed else lambda x: x
    got = tile_kernel(spec, operands, transposed, interpret=True)(operands, turn(padded))
    got = [turn(x)[: raw.shape[0], : raw.shape[1]] for x in got]
    want = wanted(spec, operands, raw)
    assert np.isfinite(want[0]).any() and np.any(np.asarray(got[0]) != np.roll(got[0], 1, 0))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1], want[1])

    lowered = jax.jit(tile_kernel(spec, operands, transposed, interpret=False)).trace(operands, turn(padded))
    assert "mosaic_gpu" in lowered.lower(lowering_platforms=("cuda",)).as_text()
