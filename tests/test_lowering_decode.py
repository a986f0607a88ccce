"""The Hopper decoding kernels lower for CUDA on a machine without a GPU: every tuned config, every feature."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import elementwise, flash_decode
from pallas_flash.decode_spec import DecodeOperands, DecodeSpec
from pallas_flash.kernels.sm90 import decode
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES
from pallas_flash.kernels.sm90.decode_config import DecodeConfig, padded_head_dims
from pallas_flash.tuning import cache

SHAPE = jax.ShapeDtypeStruct
FP8 = jnp.float8_e4m3fn
TABLE = cache.entries("sm90_decode")
SPEC = DecodeSpec(0.1)


def operands_of(
    head_dims=(128, 128), *, batch=2, q_len=1, kv_len=4096, heads=(8, 2), dtype=jnp.bfloat16, cache=None, pages=None,
    scales=None, **more,
) -> DecodeOperands:  # fmt: skip
    """pages: their size. scales: True for each token, False for each sequence or page."""
    rows = (batch, kv_len) if pages is None else (1000, pages)
    if pages:
        more["page_table"] = SHAPE((batch, kv_len // pages), jnp.int32)
    if scales is not None:
        more["k_scale"] = more["v_scale"] = SHAPE((rows[0], rows[1] if scales else 1, heads[1]), jnp.float32)
    k, v = (SHAPE((*rows, heads[1], dim), cache or dtype) for dim in head_dims)
    return DecodeOperands(
        SHAPE((batch, q_len, heads[0], head_dims[0]), dtype), k, v, SHAPE((batch,), jnp.int32), **more
    )


def lower(spec: DecodeSpec, operands: DecodeOperands, **options: Any) -> str:
    assert decode.unsupported(spec, operands) is None
    leaves, tree = jax.tree.flatten(operands)
    call = lambda *leaves: decode.decode(spec, jax.tree.unflatten(tree, leaves), **options)  # noqa: E731
    return jax.jit(call).trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> int:
    return text.count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.parametrize("entry", TABLE, ids=lambda e: "-".join(map(str, e["case"].values())))
def test_every_tuned_config_lowers(entry):
    case, config = cache.Case(**entry["case"]), DecodeConfig(**entry["config"])
    cached: Any = {"cache": jnp.dtype(case.dtype), "scales": True} if case.dtype != "bfloat16" else {}
    operands = operands_of(case[:2], q_len=16 if "many" in case.mask else 1, **cached)
    padded = padded_head_dims(operands.shapes, operands.k.dtype)
    assert config.shared_bytes(padded, operands.q.dtype, operands.k.dtype) <= MAX_SHARED_BYTES
    assert decode.decode_config(operands) == config
    assert kernels(lower(SPEC, operands, config=config, splits=1)) == 1


@pytest.mark.parametrize("q_len", [1, 500])
def test_tiles_of_16_bits_do_not_depend_on_the_number_of_queries(q_len):
    assert decode.decode_config(operands_of(q_len=q_len)) == decode.decode_config(operands_of(dtype=jnp.float16))


def score_mod(function) -> tuple[Any, tuple[Any, ...]]:
    program, captured = elementwise.trace("score_mod", function, {"score": np.float32, **elementwise.PLACE}, np.float32)
    return program, tuple(SHAPE(x.shape, x.dtype) for x in captured)


SLOPES = np.ones(8, np.float32)
ALIBI, CAPTURED = score_mod(lambda s, b, h, q, k: s + jnp.asarray(SLOPES)[h] * (k - q) + b)
FEATURES = {
    "head dims that are no multiple of 16, a length that is none of 8": (SPEC, operands_of((72, 40), kv_len=4093)),
    "multi-query, float16": (SPEC, operands_of(heads=(64, 1), dtype=jnp.float16)),
    "new tokens, a window, sinks, a soft cap, a traced scale": (
        DecodeSpec(None, window=1000, soft_cap=30.0),
        operands_of(q_len=16, sinks=SHAPE((8,), jnp.bfloat16), scale=SHAPE((), jnp.float32)),
    ),
    "score_mod, query lengths": (
        DecodeSpec(0.1, score_mod=ALIBI),
        operands_of(q_len=3, q_lengths=SHAPE((2,), jnp.int32), score_mod=CAPTURED),
    ),
    "chunked prefill from pages of 24": (SPEC, operands_of(q_len=500, kv_len=2400, pages=24)),
    "pages of 32, head dims that are no multiple of 16": (SPEC, operands_of((72, 40), pages=32)),
    "pages of 256": (SPEC, operands_of(pages=256)),
    "int8, a scale for each sequence, float16": (
        SPEC, operands_of(cache=jnp.int8, scales=False, dtype=jnp.float16),
    ),
    "float8": (SPEC, operands_of(cache=FP8, kv_len=1001)),
    "float8 in pages of 64, a scale for each token": (SPEC, operands_of(cache=FP8, scales=True, pages=64)),
    "int8 in pages of 16, a scale for each": (SPEC, operands_of((64, 64), cache=jnp.int8, scales=False, pages=16)),
}  # fmt: skip


@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_lowers(name):
    assert kernels(lower(*FEATURES[name])) == 2


def test_what_fits_one_split_takes_one_launch():
    assert kernels(lower(SPEC, operands_of(kv_len=256))) == 1
    assert kernels(lower(dataclasses.replace(SPEC, window=200), operands_of(sinks=SHAPE((8,), jnp.float32)))) == 1


def test_under_vmap_and_inside_shard_map():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = jax.P("data")
    leaves, tree = jax.tree.flatten(operands_of())
    call = lambda *leaves: decode.decode(SPEC, jax.tree.unflatten(tree, leaves))  # noqa: E731
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(data,) * len(leaves), out_specs=data)
    mapped = lambda *leaves: jax.vmap(call, in_axes=(0, None, None, 0))(*leaves)  # noqa: E731
    stacked = [SHAPE((3, *x.shape), x.dtype) if i in (0, 3) else x for i, x in enumerate(leaves)]
    for function, arguments in ((sharded, leaves), (mapped, stacked)):
        assert kernels(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()) == 2


def test_the_operator_reaches_the_kernel():
    q, k, v, lengths = jax.tree.leaves(operands_of())
    call = lambda *tensors: flash_decode(*tensors, implementation="sm90")  # noqa: E731
    assert kernels(jax.jit(call).trace(q, k, v, lengths).lower(lowering_platforms=("cuda",)).as_text()) == 2


@pytest.mark.parametrize(
    ("operands", "reason"),
    [
        (operands_of(dtype=jnp.float32), "not float32"),
        (operands_of((264, 64)), "a head dim of 264"),
        (operands_of((20, 64)), "a cache of bfloat16 with a head dim of 20, no multiple of 8"),
        (
            operands_of((72, 64), cache=jnp.int8, scales=True),
            "a cache of int8 with a head dim of 72,",
        ),
        (operands_of(pages=20), "pages of 20 tokens, no multiple of 8"),
        (operands_of(kv_len=0), "an empty operand"),
        (operands_of(batch=2**29), "batch \\* heads \\* tokens"),
        (operands_of(score_mod=(SHAPE((3,), np.float64),)), "score_mod has an array of float64"),
    ],
)
def test_what_it_cannot_do_it_refuses(operands, reason):
    with pytest.raises(AssertionError, match=reason):
        problem = decode.unsupported(SPEC, operands)
        assert problem is None, problem


def test_it_refuses_functions_by_name():
    spec = dataclasses.replace(SPEC, score_mod=score_mod(lambda s, *place: jnp.sin(s))[0])
    assert (
        decode.unsupported(spec, operands_of()) == "score_mod uses the operation sin, which the kernel cannot compute"
    )


@pytest.mark.parametrize(
    "wrong", [{"block_kv": 32}, {"k_stages": 0}, {"num_sms": 0}, {"keys_per_split": 1}, {"min_keys_per_split": 63}]
)
def test_a_config_names_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DecodeConfig(**wrong)


@pytest.mark.parametrize(
    ("keys", "tiles", "rows", "splits"),
    [
        (4096, 8, 4, 16), (32768, 8, 4, 33), (131072, 8, 4, 33), (4096, 512, 4, 1), (131072, 512, 4, 36), (64, 8, 4, 1),
        (131072, 64, 4, 33), (131072, 1, 8, 264), (131072, 1024, 8192, 1),
    ],
)  # fmt: skip
def test_splits_fill_the_gpu_and_stay_of_some_length(keys, tiles, rows, splits):
    assert DecodeConfig().splits(keys, tiles, rows, 2) == splits
