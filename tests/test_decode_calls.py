"""flash_decode and paged_flash_decode as functions: quantised caches, transformations, refusals, the table."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import explain_decode, flash_decode, paged_flash_decode
from tests.decoding import LAYOUTS, Call, Sizes, apply, decode, pages_of, quantised, random_call

nan, inf = float("nan"), float("inf")
Q, K, V = jnp.zeros((2, 5, 6, 8)), jnp.zeros((2, 7, 3, 8)), jnp.zeros((2, 7, 3, 4))
LENGTHS, TABLE = jnp.array([7, 3]), jnp.zeros((2, 3), jnp.int32)
INT8 = {
    "key": K.astype(jnp.int8),
    "value": V.astype(jnp.int8),
    "k_scale": jnp.ones((2, 7, 3)),
    "v_scale": jnp.ones((2, 7, 3)),
}

# argument: values that are wrong beside the arrays above; for both functions (pages: K and V are 2 pages of 7 rows).
WRONG: dict[str, list[Any]] = {
    "query": [jnp.zeros((2, 5, 6, 8), jnp.int8), jnp.zeros((6, 8)), "q", None, jnp.zeros((2, 5, 6, 8), jnp.complex64)],
    "key": [jnp.zeros((2, 7, 3, 9)), jnp.zeros((7, 3, 8)), K.astype(jnp.bfloat16), K.astype(jnp.int16), None,
            K.astype(jnp.float8_e5m2), K.astype(bool), np.zeros(K.shape, ">f4"), np.float32],
    "value": [jnp.zeros((2, 8, 3, 4)), jnp.zeros((2, 7, 6, 4)), jnp.zeros((2, 7, 3)), V.astype(jnp.int8), "v"],
    "kv_lengths": [None, np.ones(3, np.int32), np.ones(2, np.float32), np.ones((2, 1), np.int32), "5", 2.0, True,
                   np.int32, jax.ShapeDtypeStruct((2,), jnp.int32), np.ma.zeros(2, np.int32), 2**70],
    "page_table": [None, np.ones((3, 3), np.int32), np.ones(2, np.int32), np.ones((2, 3), np.float32), "t"],
    "query_lengths": [np.ones(3, np.int32), np.ones(2, np.float32), "5", [1.5, 2.5]],
    "scale": [nan, inf, 1e39, 10**400, "1", True, np.ones(3, np.float32), jnp.int32(1), 1j],
    "local_window_size": [-2, (-2, 0), (0, -3), (1, 2, 3), 1.5, "wide", True, ()],
    "logits_soft_cap": [0.0, -5.0, inf, nan, "5", True, np.ones(2)],
    "sinks": [np.ones(3, np.float32), np.ones(6, np.int32), np.ones((1, 6), np.float32), 1.0, "s"],
    "score_mod": [3, lambda s: s, lambda s, b, h, i, j: s > 0, lambda s, b, h, i, j: jnp.ones(3) * s],
    "k_scale": [jnp.ones((2, 7, 3)), 1.0],
    "v_scale": [jnp.ones((2, 7, 3)), "v"],
    "return_residual": [None, 1, "no"],
    "implementation": ["cudnn", "", 3, "XLA", "reference", np.array(["xla", "xla"]), np.array(["xla"])],
}  # fmt: skip
CASES = [(name, i) for name, values in WRONG.items() for i in range(len(values))]


def call_with(function: Any, **changes: Any) -> Any:
    arguments: Call = {"query": Q, "key": K, "value": V, "kv_lengths": LENGTHS, "page_table": TABLE} | changes
    if function is flash_decode:
        del arguments["page_table"]
    tensors = [arguments.pop(name) for name in ("query", "key", "value")]
    return function(*tensors, **arguments)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_wrong_arguments_are_refused_by_name(name: str, number: int) -> None:
    functions = {flash_decode: "cache", paged_flash_decode: "pages"}
    for function, suffix in functions.items():
        if name == "page_table" and function is flash_decode:
            continue
        said = f"{name}_{suffix}" if name in ("key", "value") else name
        with pytest.raises(ValueError, match=said):
            call_with(function, **{name: WRONG[name][number]})


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scale", [None, jnp.ones((2, 7)), jnp.ones((2, 2, 3)), jnp.ones((2, 7, 3), jnp.bfloat16), 1.0])
def test_wrong_scales_of_a_quantised_cache_are_refused(name: str, scale: Any) -> None:
    for function in (flash_decode, paged_flash_decode):
        with pytest.raises(ValueError, match=name):
            call_with(function, **INT8 | {name: scale})


def test_every_argument_has_wrong_values() -> None:
    names = set(inspect.signature(flash_decode).parameters) | set(inspect.signature(paged_flash_decode).parameters)
    assert {name.removesuffix("_cache").removesuffix("_pages") for name in names} == set(WRONG)


def test_refusals_that_need_two_arguments() -> None:
    with pytest.raises(ValueError, match=r"query must be at most 16 new tokens.*float32\[2, 17, 6, 8\]"):
        call_with(flash_decode, query=jnp.zeros((2, 17, 6, 8)))
    with pytest.raises(ValueError, match=r"N=6.*K=4"):
        call_with(flash_decode, key=jnp.zeros((2, 7, 4, 8)), value=jnp.zeros((2, 7, 4, 4)))
    with pytest.raises(ValueError, match="scale"):
        call_with(flash_decode, query=jnp.zeros((2, 5, 6, 0)), key=jnp.zeros((2, 7, 3, 0)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantised_caches_equal_what_they_stand_for(dtype: Any, layout: str) -> None:
    """One factor a token, or one a sequence; NaN in the scales behind every length."""
    for per in ("token", "sequence"):
        stored, meant = quantised(random_call(), dtype, per)
        want = decode(meant)
        if layout == "pages" and per == "sequence":  # one factor a page: spread the sequences' own over their pages
            stored = stored | {n: np.repeat(stored[n], 40, 1) for n in ("k_scale", "v_scale")}
            paged = pages_of(stored)
            got = decode(paged | {n: paged[n][:, :1] for n in ("k_scale", "v_scale")})
        else:
            got = decode(pages_of(stored) if layout == "pages" else stored)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(x, y, atol=2e-5)


def test_float8_without_scales() -> None:
    call = random_call(Sizes(q_len=1))
    float8 = {name: call[name].astype(jnp.float8_e4m3fn) for name in ("key", "value")}
    meant = {name: x.astype(np.float32) for name, x in float8.items()}
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
        decode(call | float8),
        decode(call | meant),
    )


def test_a_16_bit_query_on_an_int8_cache_keeps_its_accuracy() -> None:
    stored, meant = quantised(random_call(Sizes(q_len=1), dtype=jnp.bfloat16), jnp.int8, "token")
    out, _ = decode(stored)
    want, _ = decode(meant | {"query": meant["query"].astype(np.float32)})
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(np.float32), want, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_under_jit_scan_and_vmap(layout: str) -> None:
    """All arrays as tracers; vmap over everything and over the query alone equals a loop (G01, G15)."""
    call = random_call(
        scale=np.float32(0.3), sinks=np.ones(6, np.float32), query_lengths=np.array([3, 1, 2, 3], np.int32)
    )
    call = pages_of(call) if layout == "pages" else call
    want, _ = decode(call)
    arrays = {name: jnp.asarray(value) for name, value in call.items()}
    np.testing.assert_allclose(jax.jit(apply)(arrays), want, atol=1e-6)
    query_alone = jax.vmap(lambda query: apply(arrays | {"query": query}))(arrays["query"][None])
    np.testing.assert_allclose(query_alone[0], want, atol=1e-6)
    other = arrays | {"kv_lengths": jnp.array([1, 9, 3, 0])}
    both = jax.tree.map(lambda *x: jnp.stack(x), arrays, other)
    each = jnp.stack([apply(arrays), apply(other)])
    for got in (jax.vmap(apply)(both), jax.lax.scan(lambda c, x: (c, apply(x)), 0, both)[1]):
        np.testing.assert_allclose(got, each, atol=1e-6)


@pytest.mark.parametrize("layout, check_vma", [("cache", True), ("pages", True), ("pages", False)])
def test_shard_map_over_heads(layout: str, check_vma: bool) -> None:
    """Tensor-parallel decoding: each device its key heads, and (cache) its sequences; lengths that differ."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    call = random_call()
    call = pages_of(call) if layout == "pages" else call
    heads, rows = P(None, None, "x"), P("x")
    arrays = [jnp.asarray(x) for x in call.values()]
    attend = lambda *arrays: apply(dict(zip(call, arrays, strict=True)), local_window_size=9)  # noqa: E731
    want = attend(*arrays)
    by_head = jax.shard_map(
        attend, mesh=mesh, in_specs=(heads,) * 3 + (P(),) * (len(call) - 3), out_specs=heads, check_vma=check_vma
    )
    np.testing.assert_allclose(jax.jit(by_head)(*arrays), want, atol=1e-6)
    pool = P() if layout == "pages" else rows
    by_row = jax.shard_map(
        attend, mesh=mesh, in_specs=(rows, pool, pool) + (rows,) * (len(call) - 3), out_specs=rows, check_vma=check_vma
    )
    np.testing.assert_allclose(jax.jit(by_row)(*arrays), want, atol=1e-6)
    placed = jax.device_put(arrays[0], NamedSharding(mesh, heads))
    np.testing.assert_allclose(jax.jit(attend)(placed, *arrays[1:]), want, atol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_lowers_and_exports_for_other_platforms(platform: str) -> None:
    call = {name: jnp.asarray(x) for name, x in pages_of(random_call()).items()}
    function = jax.jit(lambda call: call_with(paged_flash_decode, **call))
    assert jax.export.export(function, platforms=[platform])(call).platforms == (platform,)


def test_lowers_the_hopper_kernels_without_a_gpu() -> None:
    """Named, they lower for CUDA on any machine; on one without they are refused when they run."""
    pages, scale = jnp.zeros((9, 16, 2, 64), jnp.int8), jnp.ones((9, 16, 2))
    call: Call = {"query": jnp.zeros((2, 4, 8, 64), jnp.bfloat16), "key": pages, "value": pages, "page_table": TABLE}
    call |= {"kv_lengths": LENGTHS, "query_lengths": LENGTHS, "k_scale": scale, "v_scale": scale}
    lowered = jax.jit(lambda call: apply(call, "sm90")).trace(call).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu") > 0
    with pytest.raises(NotImplementedError, match=r"sm90.*runs on NVIDIA GPUs only"):
        apply(call, "sm90")
    with pytest.raises(NotImplementedError, match=r"sm90.*cannot compute this call: it computes in"):
        apply({"query": Q, "key": K, "value": V, "kv_lengths": LENGTHS}, "sm90")


def test_derivatives_are_refused_by_name() -> None:
    loss = lambda q: flash_decode(q, K, V, LENGTHS).sum()  # noqa: E731
    for differentiate in (jax.grad(loss), jax.jit(jax.grad(loss)), lambda q: jax.jvp(loss, (q,), (q,))):
        with pytest.raises(NotImplementedError, match=r"flash_decode.*no derivative.*flash_attention"):
            differentiate(Q)
    with pytest.raises(NotImplementedError, match="no derivative"):
        jax.grad(lambda s: call_with(paged_flash_decode, scale=s).sum())(1.0)
    assert jax.grad(lambda x: (x * flash_decode(Q, K, V, LENGTHS)).sum())(1.0) == 0


def test_explain_decode() -> None:
    for name in (None, "xla"):
        for options in ({}, {"page_table": TABLE}):
            explanation = explain_decode(Q, K, V, LENGTHS, **options, implementation=name)
            assert explanation.chosen == "xla" and all(verdict.reason for verdict in explanation.verdicts)
    with pytest.raises(ValueError, match="kv_lengths"):
        explain_decode(Q, K, V, 1.5)
    with pytest.raises(ValueError, match="implementation"):
        explain_decode(Q, K, V, LENGTHS, implementation="cudnn")
    with pytest.raises(TypeError, match=r"explain_decode\(\) got an unexpected keyword argument 'foo'"):
        explain_decode(Q, K, V, LENGTHS, foo=1)
