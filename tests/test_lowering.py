"""Every kernel, in every configuration of the tables, lowers for CUDA on a machine without a GPU.

Lowering finds dtype mismatches, layouts that do not fit, TMA's rules and shared memory that overflows.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import elementwise, flash_attention, masks
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sm90.config import MAX_SHARED_BYTES, ForwardConfig
from pallas_flash.spec import AttentionSpec, Operands
from pallas_flash.tuning import cache

ROOT = Path(__file__).parent.parent
CAUSAL = masks.Band(None, 0)
TABLE = cache.entries("sm90_forward")


def operands_of(dims, q_len=1024, kv_len=1024, heads=(8, 2), dtype=jnp.bfloat16, **more):
    array = jax.ShapeDtypeStruct
    q = array((2, q_len, heads[0], dims[0]), dtype)
    k, v = array((2, kv_len, heads[1], dims[0]), dtype), array((2, kv_len, heads[1], dims[1]), dtype)
    return Operands(q, k, v, **more)


def lower(spec: AttentionSpec, operands: Operands, config: ForwardConfig | None = None) -> str:
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    assert sm90.unsupported(spec, operands) is None
    leaves, tree = jax.tree.flatten(operands)
    call = lambda *leaves: sm90.forward(spec, jax.tree.unflatten(tree, leaves), config=config)  # noqa: E731
    return jax.jit(call).trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("entry", TABLE, ids=lambda e: "-".join(map(str, e["case"].values())))
def test_every_tuned_config_lowers(entry):
    dtype = jnp.float16 if entry["config"] == TABLE[0]["config"] else jnp.bfloat16  # the tiles do not depend on it
    case, config = cache.Case(**entry["case"]), ForwardConfig(**entry["config"])
    spec = AttentionSpec(0.1, (CAUSAL,) if case.mask == "causal" else ())
    assert config.shared_bytes(case.head_dim, case.value_head_dim, 2, hides_values=bool(spec.mask)) <= MAX_SHARED_BYTES
    assert "mosaic_gpu" in lower(spec, operands_of(case[:2], dtype=dtype), config)


SHAPE = jax.ShapeDtypeStruct
IDS = SHAPE((2, 1024), jnp.int32)
LENGTHS = SHAPE((2,), jnp.int32)
SLOPES, DISTANCES = np.ones(8, np.float32), jnp.ones((8, 9), jnp.bfloat16)
FLAGS, SCALAR = jnp.ones((2, 1024), bool), jnp.ones(())
SCORE = {"score": np.float32, **elementwise.PLACE}


def traced(name, function) -> Any:
    """A score_mod, or a predicate, and the shapes of what it captured."""
    arguments, result = (SCORE, np.float32) if name == "score_mod" else (elementwise.PLACE, np.bool_)
    program, captured = elementwise.trace(name, function, arguments, result)
    return program, tuple(SHAPE(x.shape, x.dtype) for x in captured)


def score_mod(function, mask=()):
    program, captured = traced("score_mod", function)
    return AttentionSpec(0.1, mask, score_mod=program), operands_of((128, 128), score_mod=captured)


def predicate(function):
    program, captured = traced("masks.predicate", function)
    return AttentionSpec(0.1, (CAUSAL, masks.Predicate(program))), operands_of((64, 64), mask=((), captured))


def biased(*shape, dtype=jnp.float32, **more):
    return AttentionSpec(0.1, **more), operands_of((128, 128), bias=SHAPE(shape, dtype))


@jax.jit
def inner(x):
    x = x + DISTANCES[0, 3].astype(x.dtype) * SCALAR
    return jnp.where(x > 0, jnp.tanh(x / 30) * 30, x**2 - jnp.abs(x) + jnp.exp(-x) / jnp.sqrt(1 + x * x) + 2.0**x)


FEATURES = {
    "key lengths": (
        AttentionSpec(0.1, (masks.QueryLengths(), CAUSAL, masks.KeyValueLengths())),
        operands_of((128, 128), 1000, 1023, mask=((LENGTHS,), (), (LENGTHS,))),
    ),
    "segments": (
        AttentionSpec(0.1, (masks.Segments(), CAUSAL), return_max_logit=True),
        operands_of((256, 256), mask=((IDS, IDS), ()), sinks=SHAPE((8,), jnp.float32)),
    ),
    "dense masks": (
        AttentionSpec(0.1, (masks.Dense(), masks.Dense()), q_offset=None),
        operands_of(
            (64, 64), mask=((SHAPE((1, 1, 1024, 1024), bool),), (SHAPE((2, 8, 1, 1024), bool),)), q_offset=LENGTHS
        ),
    ),
    "bias of each pair": biased(2, 8, 1024, 1024),
    "bias of each query": biased(2, 1, 1024, 1, dtype=jnp.bfloat16, soft_cap=5.0),
    "bias of each key": biased(1, 8, 1, 1024, dtype=jnp.float16, mask=(CAUSAL,)),
    "bias of each head": biased(1, 8, 1, 1),
    "dropout": (
        AttentionSpec(0.1, (CAUSAL,), dropout_rate=0.5),
        operands_of((128, 128), dropout_key=SHAPE((2,), jnp.uint32)),
    ),
    "slopes": score_mod(lambda s, b, h, q, k: s + jnp.asarray(SLOPES)[h] * (k - q), (CAUSAL,)),
    "a table of distances": score_mod(
        lambda s, b, h, q, k: s * DISTANCES[h, jnp.clip(q - k, -4, 4) + 4].astype(s.dtype)
    ),
    "a nested jit": score_mod(
        lambda s, b, h, q, k: inner(s) + jnp.minimum(q // 3, k % 5) * DISTANCES[2, b].astype(s.dtype)
    ),
    "a constant": score_mod(lambda s, b, h, q, k: jnp.float32(2)),
    "a predicate": predicate(lambda b, h, q, k: (FLAGS[b, k] & ~(q == k)) ^ (h.astype(jnp.float32) > 3)),
    "odd sizes": (AttentionSpec(0.1, (CAUSAL,)), operands_of((72, 40), 77, 133)),
    "one query": (AttentionSpec(0.1), operands_of((128, 128), 1, 1)),
    "window": (AttentionSpec(0.1, (masks.Band(100, 0),)), operands_of((128, 128))),
    "soft cap, sinks": (
        AttentionSpec(0.1, (CAUSAL,), soft_cap=30.0),
        operands_of((128, 128), sinks=jax.ShapeDtypeStruct((8,), jnp.float32)),
    ),
    "traced scale and offsets": (
        AttentionSpec(None, (CAUSAL,), q_offset=None),
        operands_of(
            (64, 64),
            scale=jax.ShapeDtypeStruct((), jnp.float32),
            q_offset=jax.ShapeDtypeStruct((2,), jnp.int32),
        ),
    ),
    "chunks, prefix, query lengths": (
        AttentionSpec(0.1, (masks.Chunked(64), masks.PrefixLM(), masks.QueryLengths())),
        operands_of((64, 64), mask=((), *((jax.ShapeDtypeStruct((2,), jnp.int32),),) * 2)),
    ),
    "different head dims": (AttentionSpec(0.1), operands_of((256, 64))),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_every_feature_lowers(feature):
    lower(*FEATURES[feature])


@pytest.mark.parametrize("way", ["vmap", "scan", "shard_map", "x64"])
def test_it_lowers_inside(way):
    """What users wrap around a call."""
    spec = AttentionSpec(None, (CAUSAL,), q_offset=None, soft_cap=30.0)
    call = lambda *arrays: sm90.forward(spec, Operands(*arrays[:3], scale=arrays[3], mask=((),), q_offset=arrays[4]))  # noqa: E731
    operands = operands_of((64, 64))
    array = jax.ShapeDtypeStruct
    arrays = [*operands[:3], array((), jnp.float32), array((2,), jnp.int32)]
    if way in ("vmap", "scan"):
        arrays = [array((3, *x.shape), x.dtype) for x in arrays]
    if way == "vmap":
        call = jax.vmap(call)
    elif way == "scan":
        one = call
        call = lambda *arrays: jax.lax.scan(lambda carry, xs: (carry, one(*xs)), 0, arrays)  # noqa: E731
    elif way == "shard_map":
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        data, every = jax.P("data"), jax.P()
        call = jax.shard_map(call, mesh=mesh, in_specs=(data, data, data, every, data), out_specs=data)
    with jax.enable_x64(way == "x64"):
        assert "mosaic_gpu" in jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_functions_lower_inside_shard_map():
    """There the arrays that they capture are marked as varying over the mesh."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    data = jax.P("data")

    def call(q, k, v, slopes, ids):
        same = masks.predicate(lambda b, h, i, j: ids[b, i] == ids[b, j])
        score_mod = lambda s, b, h, i, j: s + slopes[h] * jnp.where(j > i, 1.0, 2.0)  # noqa: E731
        return flash_attention(q, k, v, mask=same, score_mod=score_mod, implementation="sm90")

    call = jax.shard_map(call, mesh=mesh, in_specs=(data, data, data, jax.P(), data), out_specs=data)
    arrays = (*operands_of((64, 64))[:3], SHAPE((8,), jnp.float32), IDS)
    assert "mosaic_gpu" in jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_batch_times_heads_may_pass_the_limits_of_a_cuda_grid():
    array = jax.ShapeDtypeStruct
    q = array((70_000, 8, 1, 64), jnp.bfloat16)
    lower(AttentionSpec(0.1), Operands(q, q, q))


def test_what_it_cannot_do_it_refuses():
    operands = operands_of((64, 64))
    spec = AttentionSpec(0.1)
    assert sm90.unsupported(spec, operands) is None
    refused = [
        (spec, operands_of((64, 64), dtype=jnp.float32)),
        (spec, operands_of((264, 64))),
        (spec, operands._replace(bias=SHAPE((1, 1, 1, 1024), np.float64))),
        (
            dataclasses.replace(spec, mask=(masks.Segments(),)),
            operands._replace(mask=((SHAPE((2, 1024), np.int64),) * 2,)),
        ),
        (dataclasses.replace(spec, precision="highest"), operands),
        (spec, operands_of((64, 64), q_len=2**28)),
    ]
    for refused_spec, refused_operands in refused:
        assert sm90.unsupported(refused_spec, refused_operands)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda s, b, h, q, k: jax.lax.erf_inv(s), "the operation erf_inv"),
        (lambda s, b, h, q, k: jnp.exp(s.astype(jnp.bfloat16)).astype(s.dtype), "the operation exp of bfloat16"),
        (lambda s, b, h, q, k: s % 2, "the operation rem of float32"),
        (lambda s, b, h, q, k: s + jnp.sum(jnp.asarray(SLOPES)), "the operation reduce_sum on an array"),
        (lambda s, b, h, q, k: s + jnp.take(jnp.asarray(SLOPES), k), "the operation broadcast_in_dim on an array"),
    ],
)
def test_what_a_function_does_it_refuses_by_name(function, problem):
    spec, operands = score_mod(function)
    assert sm90.unsupported(spec, operands) == f"score_mod uses {problem}, which the kernel cannot compute"


@pytest.mark.parametrize(
    "wrong", [{"block_q": 128}, {"block_kv": 20}, {"compute_wgs": 4}, {"num_stages": 1}, {"rescale_threshold": 20.0}]
)
def test_a_config_names_what_is_wrong(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ForwardConfig(**wrong)


@pytest.mark.parametrize("table", ["sm90_forward", "sm90_backward"])
def test_the_table_says_what_was_measured(table):
    """The time of a measured entry stands in the results that it names."""
    measured = [entry["measured"] for entry in cache.entries(table) if entry["measured"]]
    assert measured
    for each in measured:
        content = json.loads((ROOT / each["results"]).read_text())
        rows = [row for row in content["rows"] if (row["workload"], row["pass"]) == (each["workload"], each["pass"])]
        assert [row["ms"]["median"] for row in rows if row["implementation"] == "sm90"] == [each["ms"]]
        assert (content["environment"]["device"], content["environment"]["jax"]) == (each["device"], each["jax"])


def test_importing_the_package_does_not_import_pallas():
    program = (
        "import sys, pallas_flash.kernels.sm90; print([n for n in sys.modules if n.startswith('jax.experimental')])"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "jax.experimental.pallas" not in run.stdout and "mosaic" not in run.stdout
