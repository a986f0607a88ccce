"""The backward kernels lower for CUDA, in every configuration of the tables and with every feature, without a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import elementwise, flash_attention, masks
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.kernels.sm90.backward_queries_config import QueriesConfig
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES
from pallas_flash.spec import AttentionSpec, Cotangents, Operands, Residuals
from pallas_flash.tuning import cache
from tests.test_lowering import operands_of

CAUSAL = masks.Band(None, 0)
TABLE = cache.entries("sm90_backward")
QUERIES_TABLE = cache.entries("sm90_backward_queries")
array = jax.ShapeDtypeStruct
OWN_KERNEL = "flash_attention_backward_queries_sm90"


def arguments(operands: Operands) -> tuple[Operands, Residuals, Cotangents]:
    batch, q_len, _, num_q_heads, _, _, value_head_dim = operands.shapes
    out = array((batch, q_len, num_q_heads, value_head_dim), operands.q.dtype)
    rows = array((batch, num_q_heads, q_len), jnp.float32)
    return operands, Residuals(out, rows, rows), Cotangents(out, rows)


def lower(spec: AttentionSpec, operands: Operands, config: BackwardConfig | None = None, **more: Any) -> str:
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    leaves, tree = jax.tree.flatten(arguments(operands))
    backward = sm90.backward if config is None else lambda *args: backward_pass.backward(*args, config=config, **more)
    call = lambda *leaves: backward(spec, *jax.tree.unflatten(tree, leaves))  # noqa: E731
    return jax.jit(call).trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("entry", TABLE, ids=lambda e: "-".join(map(str, e["case"].values())))
def test_every_tuned_config_lowers(entry):
    dtype = jnp.float16 if entry["config"] == TABLE[0]["config"] else jnp.bfloat16  # the tiles do not depend on it
    case, config = cache.Case(**entry["case"]), BackwardConfig(**entry["config"])
    dims = case.head_dim, case.value_head_dim
    spec = AttentionSpec(
        0.1, () if case.mask == "full" else (CAUSAL,), soft_cap=9.0 if case.mask == "general" else None
    )
    assert config.fits(*dims)
    assert config.shared_bytes(config.padded(*dims), 2, slopes=True, maximum=False) <= MAX_SHARED_BYTES
    assert "mosaic_gpu" in lower(spec, operands_of(dims, dtype=dtype), config)


@pytest.mark.parametrize("entry", QUERIES_TABLE, ids=lambda e: "-".join(map(str, e["case"].values())))
def test_every_tuned_config_of_the_kernel_for_dq_lowers(entry):
    case, config = cache.Case(**entry["case"]), QueriesConfig(**entry["config"])
    dims = case.head_dim, case.value_head_dim
    spec = AttentionSpec(0.1, () if case.mask == "full" else (CAUSAL,), deterministic=True)
    assert config.fits(case.head_dim) and config.shared_bytes(dims, 2) <= MAX_SHARED_BYTES
    of_keys = backward_pass.tuned_config(spec, operands_of(dims), case.mask)
    assert OWN_KERNEL in lower(spec, operands_of(dims), of_keys, queries_config=config)


def score_mod(function):
    return elementwise.trace("score_mod", function, {"score": np.float32, **elementwise.PLACE}, np.float32)


CAP, _ = score_mod(lambda s, b, h, q, k: 5 * jnp.tanh(s / 5) - (q - k) * 0.1)
STRIPES = masks.predicate(lambda b, h, q, k: (q + k) % 3 != 0).parts
KEY = array((2,), jnp.uint32)
INTS = (array((2,), jnp.int32),)

FEATURES = {
    "odd sizes": (AttentionSpec(0.1, (CAUSAL,)), operands_of((72, 40), 77, 133)),
    "one query": (AttentionSpec(0.1), operands_of((128, 128), 1, 1)),
    "window, different head dims": (AttentionSpec(0.1, (masks.Band(100, 0),)), operands_of((192, 128))),
    "soft cap, sinks": (
        AttentionSpec(0.1, (CAUSAL,), soft_cap=30.0),
        operands_of((128, 128), sinks=array((8,), jnp.float32)),
    ),
    "traced scale and offsets": (
        AttentionSpec(None, (CAUSAL,), q_offset=None),
        operands_of((64, 64), scale=array((), jnp.float32), q_offset=INTS[0]),
    ),
    "chunks, prefix, lengths": (
        AttentionSpec(0.1, (masks.Chunked(64), masks.PrefixLM(), masks.QueryLengths(), masks.KeyValueLengths())),
        operands_of((64, 64), mask=((), INTS, INTS, INTS)),
    ),
    "segments, dropout, score_mod": (
        AttentionSpec(0.1, (masks.Segments(),), score_mod=CAP, dropout_rate=0.1),
        operands_of((64, 64), mask=((array((2, 1024), jnp.int32),) * 2,), dropout_key=KEY),
    ),
    "a predicate, a dense mask, score_mod, 256": (
        AttentionSpec(0.1, (*STRIPES, masks.Dense()), score_mod=CAP),
        operands_of((256, 256), mask=((), (array((1, 1, 1024, 1024), jnp.bool_),))),
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_lowers(feature):
    spec, operands = FEATURES[feature]
    assert backward_pass.obstacle(spec, operands, sm90.mask_class(spec, operands)) is None
    assert "mosaic_gpu" in lower(spec, operands)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", ["vmap", "scan", "shard_map", "x64"])
def test_it_lowers_inside(way, deterministic):
    """What users wrap around a call."""
    spec = AttentionSpec(None, (CAUSAL,), q_offset=None, soft_cap=30.0, deterministic=deterministic)
    operands = operands_of((64, 64), scale=array((), jnp.float32), q_offset=INTS[0], mask=((),))
    leaves, tree = jax.tree.flatten(arguments(operands))
    call = lambda *leaves: sm90.backward(spec, *jax.tree.unflatten(tree, leaves))  # noqa: E731
    one, several = call, [array((3, *x.shape), x.dtype) for x in leaves]
    if way == "vmap":
        call, leaves = jax.vmap(one), several
    elif way == "scan":
        call, leaves = (lambda *xs: jax.lax.scan(lambda carry, x: (carry, one(*x)), 0, xs)), several
    elif way == "shard_map":
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = tuple(jax.P("data") if leaf.ndim else jax.P() for leaf in leaves)
        out = jax.tree.map(lambda x: jax.P("data") if x.ndim else jax.P(), jax.eval_shape(one, *leaves))
        call = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    with jax.enable_x64(way == "x64"):
        assert "mosaic_gpu" in jax.jit(call).trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()


BIASES = {
    "of queries and keys": ((2, 8, 1024, 1024), (64, 64)),
    "of queries and keys, that heads share": ((1, 1, 1024, 1024), (256, 256)),
    "of queries": ((1, 8, 1024, 1), (128, 128)),
    "of keys": ((2, 1, 1, 1024), (128, 128)),
    "of keys, shared keys": ((1, 8, 1, 1024), (192, 128)),
    "of heads": ((1, 8, 1, 1), (64, 64)),
}


@pytest.mark.parametrize("bias", BIASES)
def test_the_gradient_of_a_bias_lowers(bias):
    shape, dims = BIASES[bias]
    spec, operands = AttentionSpec(None, (CAUSAL,)), operands_of(dims, bias=array(shape, jnp.float32))
    operands = operands._replace(scale=array((), jnp.float32))
    assert backward_pass.obstacle(spec, operands, "causal") is None
    program = lower(spec, operands)
    assert OWN_KERNEL in program
    assert ("8x1024x1024xf32" in program) == (shape == (2, 8, 1024, 1024))  # no temporary larger than the bias


def test_what_the_kernels_cannot_do_goes_another_way():
    operands, spec = operands_of((64, 64)), AttentionSpec(0.1)
    deterministic = dataclasses.replace(spec, deterministic=True)
    shared, of_keys = (array((2, 1, n, 1024), jnp.float32) for n in (1024, 1))
    others = [
        (deterministic, operands._replace(bias=shared)),
        (dataclasses.replace(spec, soft_cap=5.0), operands_of((256, 256), bias=of_keys)),
        (dataclasses.replace(spec, score_mod=CAP), operands._replace(score_mod=(array((8,), jnp.float32),))),
    ]
    for possible in ((spec, operands), (deterministic, operands), (deterministic, operands._replace(bias=of_keys))):
        assert backward_pass.obstacle(*possible, "full") is None
    for other_spec, other_operands in others:
        assert backward_pass.obstacle(other_spec, other_operands, "full")
    assert "mosaic_gpu" not in lower(*others[0])


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_q": 128},
        {"block_kv": 96},
        {"compute_wgs": 4},
        {"value_stages": 3},
        {"head_group": 0},
        {"num_ctas": 0},
    ],
)
def test_a_config_for_dq_names_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QueriesConfig(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_q": 32},
        {"block_kv": 256},
        {"block_q": 128, "block_kv": 64},
        {"num_stages": 3},
        {"dout_stages": 3},
        {"head_group": 0},
        {"num_ctas": 0},
        {"late_dq": True, "block_kv": 64},
        {"own_outputs": True, "block_kv": 64},
        {"take_turns": True},
        {"take_turns": True, "late_dq": True, "num_stages": 1},
    ],
)
def test_a_config_names_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        BackwardConfig(**wrong)


def test_second_derivatives_are_refused_by_name():
    q = jnp.ones((1, 64, 2, 64), jnp.bfloat16)
    attend = lambda q: flash_attention(q, q, q, implementation="sm90").astype(jnp.float32).sum()  # noqa: E731
    slope = lambda q: (jax.grad(attend)(q).astype(jnp.float32) ** 2).sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match=r"second derivatives.*implementation='xla'"):
        jax.make_jaxpr(jax.grad(slope))(q)


def gradient(**options):
    attend = lambda q: flash_attention(q, q, q, implementation="sm90", **options).astype(jnp.float32).sum()  # noqa: E731
    return jax.grad(attend)


@pytest.mark.parametrize("shape", [(3, 1, 130, 1, 64), (3, 1, 128, 1, 40), (3, 1, 1, 1, 64)])
def test_vmap_of_shapes_that_are_copied_row_by_row(shape):
    jax.jit(jax.vmap(gradient())).trace(array(shape, jnp.bfloat16)).lower(lowering_platforms=("cuda",))


def test_what_differs_from_device_to_device_is_typed_so():
    """With shard_map's own checks: a result that differs may not leave as if it were replicated."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    q = array((2, 128, 2, 64), jnp.bfloat16)
    mapped = lambda f, out: jax.jit(jax.shard_map(f, mesh=mesh, in_specs=jax.P("data"), out_specs=out))  # noqa: E731
    mapped(gradient(), jax.P("data")).trace(q).lower(lowering_platforms=("cuda",))
    attend = lambda q: flash_attention(q, q, q, implementation="sm90")  # noqa: E731
    with pytest.raises(ValueError, match="data"):
        mapped(attend, jax.P()).trace(q)


COUNT = jnp.arange(128)
SCORE_MODS = {
    "where": lambda s, b, h, i, j: jnp.where(i >= j, s, -jnp.inf),
    "clip": lambda s, b, h, i, j: jnp.clip(s, -3.0, 3.0),
    "silu": lambda s, b, h, i, j: jax.nn.silu(s),
    "captured integers": lambda s, b, h, i, j: s * COUNT[j],
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_gradients_of_score_mods_with_functions_under_jit(name):
    q = array((1, 128, 1, 64), jnp.bfloat16)
    jax.jit(gradient(score_mod=SCORE_MODS[name])).trace(q).lower(lowering_platforms=("cuda",))


def test_an_array_made_inside_a_score_mod_is_refused_by_name():
    q = array((1, 128, 1, 64), jnp.bfloat16)
    inside = gradient(score_mod=lambda s, b, h, i, j: s * jnp.arange(128)[j])
    with pytest.raises(NotImplementedError, match="iota on an array"):
        jax.jit(inside).trace(q)


@pytest.mark.parametrize("kernels", ["sm90", "sm80"])
@pytest.mark.parametrize("name", ["clip", "captured integers", "captured floats"])
def test_gradients_of_score_mods_inside_shard_map(name, kernels):
    """Where values have types that say along which axes they differ, constants and what was captured do not."""
    slopes = jnp.ones(2)
    score_mod = SCORE_MODS.get(name, lambda s, b, h, i, j: s + slopes[h] * 0.01 * (j - i))
    attend = lambda q: flash_attention(q, q, q, implementation=kernels, score_mod=score_mod)  # noqa: E731
    loss = lambda q: attend(q).astype(jnp.float32).sum()  # noqa: E731
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data")))
    mapped.trace(array((2, 128, 2, 64), jnp.bfloat16)).lower(lowering_platforms=("cuda",))
