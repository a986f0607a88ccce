"""Attention and decoding on arrays that are sharded over batch and heads: right, and local on each device."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention, flash_decode, paged_flash_decode
from pallas_flash.splits import spec_of
from tests.conftest import inputs
from tests.sharding import collectives, mesh_of

SIZES, AXES = (2, 4), ("x", "y")
SPLIT = P("x", None, "y")
BATCH_ONLY = P("x")


class Case(NamedTuple):
    """What is sharded how, which operands there are, and the collectives that this should cost."""

    heads: tuple[int, int] = (8, 4)
    query: P = SPLIT
    key: P = SPLIT
    shared: tuple[str, ...] = ()  # operands that all devices have whole
    options: tuple[str, ...] = ()
    costs: frozenset[str] = frozenset()


CASES = {
    "heads and batch": Case(options=("lengths", "sinks of each head")),
    "shared operands": Case(shared=("bias", "scale", "slopes"), options=("dropout",), costs=frozenset({"all-reduce"})),
    "one key head for all": Case(heads=(8, 1), key=BATCH_ONLY, costs=frozenset({"all-reduce"})),
    "some query heads of a key head": Case(heads=(8, 2), key=BATCH_ONLY, costs=frozenset({"all-reduce"})),
    "batch over both": Case(query=P(("x", "y")), key=P(("x", "y"))),
}


@pytest.fixture
def gspmd() -> Iterator[None]:
    jax.config.update("jax_use_shardy_partitioner", False)
    jax.clear_caches()
    yield
    jax.config.update("jax_use_shardy_partitioner", True)
    jax.clear_caches()


def arrays_of(case: Case) -> tuple[dict[str, Any], dict[str, P]]:
    call = inputs(batch=8, heads=case.heads, dims=(8, 6))
    rng = np.random.default_rng(1)
    shapes = {"bias": (1, 1, 5, 7), "scale": (), "slopes": case.heads[:1]}
    arrays = {name: jnp.asarray(call[name]) for name in "qkv"}
    arrays |= {name: jnp.asarray(rng.normal(size=shapes[name]), jnp.float32) for name in case.shared}
    specs = {"q": case.query, "k": case.key, "v": case.key} | dict.fromkeys(case.shared, P())
    if "sinks of each head" in case.options:
        # Its gradient is a sum over the batch, so that is one of what devices share.
        arrays["sinks"], specs["sinks"] = jnp.asarray(rng.normal(size=case.heads[:1]), jnp.float32), P("y")
    return arrays, specs


def attend(arrays: dict[str, Any], options: tuple[str, ...]) -> Any:
    q, k, v = (arrays[name] for name in "qkv")
    more: dict[str, Any] = {name: arrays[name] for name in ("bias", "sinks", "scale") if name in arrays}
    if "slopes" in arrays:
        more["score_mod"] = lambda s, b, h, i, j: s + arrays["slopes"][h] * (j - i) + 0.1 * b * j
    if "dropout" in options:
        more |= {"dropout_rate": 0.3, "dropout_key": jax.random.key(2)}
    if "lengths" in options:
        more["key_value_seq_lengths"] = jnp.array([7, 2, 5, 1, 7, 7, 3, 0])
    return flash_attention(q, k, v, is_causal=True, **more, implementation="xla")


def both(arrays: dict[str, Any], dout: Any, options: tuple[str, ...]) -> Any:
    out, pullback = jax.vjp(lambda arrays: attend(arrays, options), arrays)
    return out, pullback(dout)[0]


def check(case: Case, kind: Any) -> None:
    arrays, specs = arrays_of(case)
    dout = jnp.asarray(np.random.default_rng(2).normal(size=(8, 5, case.heads[0], 6)), jnp.float32)
    want = both(arrays, dout, case.options)
    mesh = mesh_of(SIZES, AXES, kind)
    placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
    arguments = placed, jax.device_put(dout, NamedSharding(mesh, case.query))
    program = jax.jit(both, static_argnums=2).lower(*arguments, case.options).compile()
    out, gradients = program(*arguments)
    for x, y in zip(jax.tree.leaves((out, gradients)), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)
    costs = case.costs | ({"all-reduce"} if "sinks" in arrays else set())
    assert collectives(program).keys() == costs
    assert out.sharding.is_equivalent_to(arguments[1].sharding, 4)
    for name in "qkv":
        assert gradients[name].sharding.is_equivalent_to(placed[name].sharding, 4)


@pytest.mark.parametrize("name", CASES)
def test_automatic_axes(name: str) -> None:
    check(CASES[name], AxisType.Auto)


@pytest.mark.parametrize("name", ["shared operands", "some query heads of a key head"])
def test_explicit_axes(name: str) -> None:
    check(CASES[name], AxisType.Explicit)


def test_gspmd(gspmd: None) -> None:
    check(CASES["shared operands"], AxisType.Auto)


def placed_rows(kind: Any) -> Any:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 2, 4)), jnp.float32)
    return x, jax.device_put(x, NamedSharding(mesh_of((4,), ("x",), kind), P(None, "x")))


def test_sharded_sequences_are_gathered_by_automatic_axes() -> None:
    x, placed = placed_rows(AxisType.Auto)
    function = jax.jit(lambda x: flash_attention(x, x, x, is_causal=True))
    assert "all-gather" in collectives(function.lower(placed).compile())
    np.testing.assert_allclose(function(placed), function(x), rtol=1e-5, atol=1e-6)


def test_sharded_sequences_are_refused_by_explicit_axes() -> None:
    _, placed = placed_rows(AxisType.Explicit)
    with pytest.raises(ValueError, match=r"the query axis of f(loat)?32\[2,8@x,2,4\] is split over 'x', not None"):
        flash_attention(placed, placed, placed)


def test_vmap_over_a_sharded_axis() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 2, 4)), jnp.float32)
    placed = jax.device_put(x, NamedSharding(mesh_of((4,), ("x",)), P("x")))
    function = jax.jit(jax.vmap(lambda x: flash_attention(x, x, x, is_causal=True)))
    assert collectives(function.lower(placed).compile()) == {}
    np.testing.assert_allclose(function(placed), function(x), rtol=1e-5, atol=1e-6)


DECODING = {"batch": BATCH_ONLY, "heads": P(None, None, "y"), "batch and heads": SPLIT, "pages": P(None, None, "y")}


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("vmapped", [False, True], ids=["", "vmap"])
def test_decoding(name: str, vmapped: bool) -> None:
    """The rule of the kernels is that of `xla`: were it left to the partitioner, it would gather what kernels read."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 8, n, heads, 4)), jnp.float32) for n, heads in ((2, 8), (7, 4), (7, 4)))
    lengths = jnp.array([7, 2, 5, 1, 7, 6, 3, 0])
    score_mod = lambda s, b, h, i, j: s + 0.1 * (b + h + 1) * (j - i)  # noqa: E731
    table = {"page_table": jnp.arange(8)[::-1, None]} if name == "pages" else {}

    def decode(q: Any, k: Any, v: Any) -> Any:
        function = paged_flash_decode if table else flash_decode
        options: Any = {"score_mod": score_mod, "return_residual": True, "implementation": "xla"}
        return function(q, k, v, **table, kv_lengths=lengths, **options)

    function = jax.vmap(decode) if vmapped else decode
    arrays = (q, k, v) if vmapped else (q[0], k[0], v[0])
    spec = P(None, *DECODING[name]) if vmapped else DECODING[name]
    placed = [jax.device_put(x, NamedSharding(mesh_of(SIZES, AXES), spec)) for x in arrays]
    program = jax.jit(function).lower(*placed).compile()
    assert collectives(program) == {}
    assert "custom_partitioning" in str(jax.make_jaxpr(function)(*placed))
    results = program(*placed)
    for x, y in zip(results, function(*arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    assert results[0].sharding.is_equivalent_to(placed[0].sharding, results[0].ndim)


@pytest.mark.parametrize("partitioner", ["Shardy", "GSPMD"])
@pytest.mark.parametrize("name", ["attention", "decode"])
def test_projections_over_more_devices_than_key_heads(name: str, partitioner: str, request: Any) -> None:
    """The columns of a projection reach the call as heads split over a part of a mesh axis, head dims over the rest."""
    if partitioner == "GSPMD":
        request.getfixturevalue("gspmd")
    rng = np.random.default_rng(0)
    x, wq, wk = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 3, 16), (16, 8 * 4), (16, 4 * 4)))

    def attend(x: Any, wq: Any, wk: Any) -> Any:
        q, k = (x @ wq).reshape(2, 3, 8, 4), (x @ wk).reshape(2, 3, 4, 4)
        return flash_attention(q, k, k) if name == "attention" else flash_decode(q, k, k, jnp.array([3, 2]))

    mesh = mesh_of((8,), ("x",))
    columns = P(None, "x")
    placed = [jax.device_put(y, NamedSharding(mesh, spec)) for y, spec in ((x, P()), (wq, columns), (wk, columns))]
    got = jax.jit(attend)(*placed)
    np.testing.assert_allclose(got, attend(x, wq, wk), rtol=1e-4, atol=1e-5)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, P(None, None, "x")), 4)


@pytest.mark.parametrize("query", [P("x"), P(None, None, ("x", "y")), P("y", None, "x")])
@pytest.mark.parametrize("cache", [P("y"), P(None, None, "x"), P("x")])
def test_the_larger_array_stays(query: P, cache: P) -> None:
    """New tokens go where their cache is, and the cache nowhere."""
    mesh = mesh_of(SIZES, AXES)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(8, n, heads, 4)), jnp.float32) for n, heads in ((1, 8), (64, 2)))
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in ((q, query), (k, cache))]
    program = jax.jit(lambda q, k: flash_decode(q, k, k, jnp.int32(50))).lower(*placed).compile()
    np.testing.assert_allclose(program(*placed), flash_decode(q, k, k, jnp.int32(50)), rtol=1e-5, atol=1e-6)
    moved = re.findall(r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)\(", program.as_text())
    sizes = [math.prod(map(int, shape.split(","))) for shape in moved]
    assert all(size <= q.size for size in sizes), moved


@pytest.mark.parametrize("function", [flash_attention, functools.partial(flash_decode, kv_lengths=jnp.int32(5))])
def test_kernels_refuse_devices_that_are_no_gpus(function: Any) -> None:
    x = jnp.ones((8, 1, 8, 64), jnp.bfloat16)
    placed = jax.device_put(x, NamedSharding(mesh_of((8,), ("x",)), P("x")))
    with pytest.raises(NotImplementedError, match="'sm90' runs on NVIDIA GPUs only"):
        function(placed, placed, placed, implementation="sm90")


def test_shardings_are_read_from_what_devices_hold() -> None:
    mesh = mesh_of((2, 1, 4), ("x", "y", "z"))
    entries = [None, "x", "z", ("x", "z"), ("z", "x")]
    for first, second in itertools.product(entries, repeat=2):
        if set(first or ()) & set(second or ()):
            continue
        spec = P(first, None, second)
        got = spec_of(NamedSharding(mesh, spec), mesh, 3)
        assert NamedSharding(mesh, got).is_equivalent_to(NamedSharding(mesh, spec), 3), (got, spec)
    assert spec_of(None, mesh, 2) == P()
    # Over a part of "z": heads in halves, head dims in halves of those.
    devices = mesh.devices.reshape(2, 2, 2)
    halves = jax.sharding.Mesh(devices, ("x", "z1", "z2"))
    assert spec_of(NamedSharding(halves, P("z1", "z2", "x")), mesh, 3) == P(None, None, ("x",))


def test_kernels_lower_on_explicit_axes() -> None:
    """Each device runs the kernel on its own part, positions of its own batch elements and heads included."""
    mesh = jax.sharding.AbstractMesh(SIZES, AXES, (AxisType.Explicit,) * 2)
    shape = jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16, sharding=NamedSharding(mesh, SPLIT))

    def loss(x: Any) -> Any:
        options: Any = {"dropout_rate": 0.1, "dropout_key": jax.random.key(0), "implementation": "sm90"}
        return flash_attention(x, x, x, is_causal=True, **options).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(shape).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu") >= 2
    assert "tensor<2x128x2x64xbf16>" in text


def equations(jaxpr: Any, name: str) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == name:
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner, name)


TABLE = jnp.arange(4)[::-1, None]
ON_SM90 = {
    "attention": lambda q, k: flash_attention(q, k, k, is_causal=True, implementation="sm90"),
    "decode": lambda q, k: flash_decode(q[:, :1], k, k, jnp.arange(4), implementation="sm90"),
    "decode pages": lambda q, k: paged_flash_decode(q[:, :1], k, k, TABLE, jnp.arange(4), implementation="sm90"),
}


@pytest.mark.parametrize("name", ON_SM90)
def test_kernels_lower_in_the_partitioning_rule(name: str) -> None:
    """What the partitioner would compile for each GPU, of a forward and a backward pass."""
    loss = lambda q, k: ON_SM90[name](q, k).astype(jnp.float32).sum()  # noqa: E731
    function = jax.grad(loss, (0, 1)) if name == "attention" else loss
    whole = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((4, 128, 8, 64), jnp.bfloat16)] * 2)
    passes = list(equations(whole.jaxpr, "custom_partitioning"))
    assert len(passes) == (2 if name == "attention" else 1)
    heads_alone = P(None, None, "y")
    for equation in passes:
        specs = [SPLIT if len(variable.aval.shape) == 4 else P() for variable in equation.invars]
        if name == "decode pages":
            specs[1:3] = heads_alone, heads_alone
        text = program_of_a_part(equation, specs)
        assert "mosaic_gpu" in text
        assert f"tensor<2x{128 if name == 'attention' else 1}x2x64xbf16>" in text
        assert f"tensor<{4 if name == 'decode pages' else 2}x128x2x64xbf16>" in text


def program_of_a_part(equation: Any, specs: list[P]) -> str:
    from jax._src import core, sharding_impls
    from jax._src.interpreters import mlir

    mesh = mesh_of(SIZES, AXES)
    shapes = [
        jax.ShapeDtypeStruct(variable.aval.shape, variable.aval.dtype, sharding=NamedSharding(mesh, spec))
        for variable, spec in zip(equation.invars, specs, strict=True)
    ]
    in_tree = equation.params["in_tree"]
    _, function, _, shardings = equation.params["partition"](mesh, in_tree.unflatten(shapes), None)
    local = [
        jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        for x, sharding in zip(shapes, in_tree.flatten_up_to(shardings), strict=True)
    ]
    axes = list(mesh.shape.items())
    jaxpr = jax.make_jaxpr(function, axis_env=axes)(*in_tree.unflatten(local))
    context = sharding_impls.SPMDAxisContext(mesh, frozenset(AXES))
    with core.extend_axis_env_nd(axes):
        options: Any = {"platforms": ("cuda",), "backend": None, "axis_context": context}
        return str(mlir.build_mlir_module_helper(jaxpr, name="shard", **options))
