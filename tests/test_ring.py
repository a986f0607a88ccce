"""Ring and Ulysses attention on CPU devices: equal to one device, in forward and gradients, with the collectives that
they should have."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention, masks
from pallas_flash.distributed import from_zigzag, local_positions, plan, ring_attention, to_zigzag, ulysses_attention
from pallas_flash.distributed.order import Order
from pallas_flash.spec import AttentionSpec, Shapes
from tests.conftest import KEY_SEED, Call, Outputs, cotangents_of, dropout_keep, inputs, judge, keywords
from tests.sharding import collectives, mesh_of

ROWS = P(None, "x")
FLOATS = ("q", "k", "v", "sinks", "scale")


class Spread:
    """A call on several devices."""

    def __init__(
        self,
        attend: Any,
        devices: int,
        order: str = "contiguous",
        check_vma: bool = True,
        heads_at_once: int | None = None,
    ):
        self.mesh, self.devices, self.check_vma = mesh_of((devices,), ("x",)), devices, check_vma
        self.attend = functools.partial(attend, axis_name="x")
        self.in_order = self.back = lambda x: x
        if attend is ring_attention:
            self.attend = functools.partial(self.attend, order=order, heads_at_once=heads_at_once)
        if order == "zigzag":
            self.in_order, self.back = (functools.partial(f, devices=devices) for f in (to_zigzag, from_zigzag))

    def run(self, call: Call, dout: Any, dlse: Any) -> tuple[Outputs, dict[str, int]]:
        """Forward and backward; and the program's collectives, with how often an array is sent to a neighbour, where a
        loop's body counts once."""
        floats = {name: jnp.asarray(call[name]) for name in FLOATS if call.get(name) is not None}
        floats |= {name: self.in_order(floats[name]) for name in "qkv"}
        ids = call.get("segment_ids")
        others = {} if ids is None else {"segment_ids": jax.tree.map(self.in_order, ids)}
        static = keywords({name: x for name, x in call.items() if name not in (*floats, *others)})
        if call.get("rate"):
            static["dropout_key"] = jax.random.key(KEY_SEED)
        specs = {name: ROWS if name in "qkv" else P() for name in floats}

        def local(floats: Any, others: Any) -> Any:
            arrays = floats | others
            tensors = [arrays.pop(name) for name in "qkv"]
            return self.attend(*tensors, **static, **arrays, return_residual=True)

        in_specs = (specs, dict.fromkeys(others, ROWS))
        whole = jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=ROWS, check_vma=self.check_vma)

        def both(floats: Any, others: Any, cotangents: Any) -> Any:
            results, pullback = jax.vjp(lambda floats: whole(floats, others), floats)
            return results, pullback(cotangents)[0]

        arguments = floats, others, tuple(map(self.in_order, (dout, dlse)))
        lowered = jax.jit(both).lower(*arguments)
        program = lowered.compile()
        (out, lse), gradients = program(*arguments)
        gradients |= {name: self.back(gradients[name]) for name in "qkv"}
        sends = lowered.as_text().count("stablehlo.collective_permute")
        return Outputs(self.back(out), self.back(lse), None, gradients), collectives(program) | {"sends": sends}

    def check(self, call: Call) -> dict[str, int]:
        dout, dlse = cotangents_of(call)
        outputs, found = self.run(call, jnp.asarray(dout), jnp.asarray(dlse))
        judge(outputs, call, dout, dlse)
        return found


rng = np.random.default_rng(5)
IDS = np.sort(rng.integers(0, 3, (2, 32)), axis=1)
SINKS = rng.normal(size=4).astype(np.float32)
DROPOUT = {"rate": 0.4, "keep": dropout_keep((2, 4, 32, 32), 0.4)}
EVERYTHING = {
    "sinks": SINKS, "scale": np.float32(0.4), "soft_cap": 3.0, "segment_ids": IDS, "is_causal": True, **DROPOUT,
    "q_lengths": np.array([30, 11]), "kv_lengths": np.array([27, 9]),
}  # fmt: skip
ALIBI = (lambda s, b, h, i, j: s + 0.1 * (h + b) * (j - i), lambda s, b, h, i, j: np.ones_like(s))
PLACES = {
    "score_mod": ALIBI, "predicate": lambda b, h, i, j: (i + j + h) % 3 != 0, "chunk": 12, "prefix": np.array([5, 30]),
    "query_offset": np.array([3, -2]),
}  # fmt: skip
RINGS: dict[str, tuple[Any, Call]] = {
    "zigzag, everything": ((4, "zigzag"), EVERYTHING),
    "zigzag, everything in two groups of heads": ((2, "zigzag", False, 1), EVERYTHING),
    "zigzag, causal": ((2, "zigzag"), {"is_causal": True, "segment_ids": IDS, "q_lengths": np.array([30, 11])}),
    "zigzag, all pairs": ((2, "zigzag"), {"kv_lengths": np.array([27, 9]), "kv_len": 64}),
    "bfloat16": ((2,), {"is_causal": True, "sinks": SINKS, "dtype": jnp.bfloat16}),
    "causal, 8 devices, unchecked": ((8, "contiguous", False), {"is_causal": True}),
    "window both ways": ((4,), {"window": (5, 3)}),
    "by position": ((2,), PLACES),
    "by position in two groups of heads": ((2, "contiguous", True, 1), PLACES),
    "more keys than queries": ((2,), {"is_causal": True, "query_offset": 32, "kv_len": 64}),
}


# Forward k and v, backward again, and dk and dv home. Over more than one hop: k and v once before the loop and once in
# it, dk and dv once in it and once behind it. In zigzag order dk and dv are two arrays each, unless one call made them
# for all keys, and segment ids go along.
SENDS = {
    "zigzag, everything": 2 * (3 + 3) + 4 * 3,
    "zigzag, everything in two groups of heads": 3 + 3 + 4,
    "zigzag, causal": 3 + 3 + 4,
    "zigzag, all pairs": 2 + 2 + 2,
    "bfloat16": 2 + 2 + 2,
    "causal, 8 devices, unchecked": 2 * (2 + 2) + 2 * 3,
    "window both ways": 2 * (2 + 2 + 2),
    "by position": 2 + 2 + 2,
    "by position in two groups of heads": 2 + 2 + 2,
    "more keys than queries": 2 + 2 + 2,
}


@pytest.mark.parametrize("name", RINGS)
def test_ring_equals_one_device(name: str) -> None:
    spread, call = RINGS[name]
    call = dict(call)
    shape = {"q_len": 32, "kv_len": call.pop("kv_len", 32), "dtype": call.pop("dtype", np.float32)}
    call = inputs(heads=(4, 2), dims=(8, 6), **shape) | call
    found = Spread(ring_attention, *spread).check(call)
    assert found.pop("sends") == SENDS[name]
    assert found.keys() <= {"collective-permute", "all-reduce"}, found
    assert ("all-reduce" in found) == ("sinks" in call), found


ULYSSES: dict[str, tuple[int, tuple[int, int], Call]] = {
    "grouped heads, everything": (2, (4, 2), EVERYTHING),
    "fewer key heads than devices": (4, (4, 2), {"is_causal": True}),
    "by position": (4, (4, 1), {key: x for key, x in PLACES.items() if key != "prefix"} | DROPOUT),
}


@pytest.mark.parametrize("name", ULYSSES)
def test_ulysses_equals_one_device(name: str) -> None:
    devices, heads, call = ULYSSES[name]
    call = inputs(q_len=32, kv_len=32, heads=heads, dims=(8, 6)) | call
    if name == "by position":
        call["keep"] = dropout_keep((2, 4, 32, 32), 0.4, call["query_offset"])
    found = Spread(ulysses_attention, devices).check(call)
    assert found["all-to-all"] >= 4
    assert "collective-permute" not in found
    assert ("all-gather" in found) == ("segment_ids" in call), found


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_sinks_of_rows_without_a_key(attend: Any) -> None:
    """A sink of -inf is none: such a row, and NaN in its cotangents, has no part in the sinks' gradient."""
    call = inputs(q_len=8, kv_len=8, heads=(2, 2), dims=(4, 4))
    q, k, v = (jnp.asarray(call[name]) for name in "qkv")
    causal = functools.partial(attend, axis_name="x", is_causal=True, query_offset=-3, return_residual=True)
    run = lambda sinks: jax.shard_map(  # noqa: E731
        lambda q, k, v, sinks: causal(q, k, v, sinks=sinks),
        mesh=mesh_of((2,), ("x",)),
        in_specs=(ROWS, ROWS, ROWS, P()),
        out_specs=ROWS,
    )(q, k, v, sinks)
    one = lambda sinks: flash_attention(  # noqa: E731
        q, k, v, sinks=sinks, is_causal=True, query_offset=-3, return_residual=True
    )
    dead = jnp.arange(8) < 3

    def gradient(run: Any, no_key: float) -> Any:
        (out, lse), pullback = jax.vjp(run, jnp.array([-jnp.inf, 0.5]))
        dlse = jnp.ones_like(lse).at[..., 0].set(jnp.where(dead, no_key, 1.0))
        return pullback((jnp.where(dead[:, None, None], no_key, jnp.ones_like(out)), dlse))[0]

    want = gradient(one, 1.0)
    assert want[0] == 0 and jnp.isfinite(want).all()
    np.testing.assert_allclose(jax.jit(lambda: gradient(run, 1.0))(), want, rtol=1e-5)
    np.testing.assert_array_equal(jax.jit(lambda: gradient(run, jnp.nan))()[0], 0)


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention, flash_attention])
def test_forward_mode_is_refused_by_name(attend: Any) -> None:
    x = jnp.ones((1, 4, 2, 4))
    attend = attend if attend is flash_attention else functools.partial(attend, axis_name="x")
    tangent = lambda x: jax.jvp(lambda x: attend(x, x, x), (x,), (x,))[1]  # noqa: E731
    run = jax.shard_map(tangent, mesh=mesh_of((2,), ("x",)), in_specs=ROWS, out_specs=ROWS)
    with pytest.raises(NotImplementedError, match="implementation='xla' has no forward-mode derivative"):
        run(x)


@pytest.mark.parametrize(("check_vma", "heads_at_once"), [(True, None), (True, 1), (False, 1)])
def test_gradients_of_what_a_score_mod_captures(check_vma: bool, heads_at_once: int | None) -> None:
    """Where shard_map checks, they are summed over the devices inside the backward pass: none may skip it."""
    call = inputs(q_len=16, kv_len=16, heads=(4, 2), dims=(4, 4))
    q, k, v = (jnp.asarray(call[name]) for name in "qkv")
    dout = jnp.asarray(cotangents_of(call)[0][..., :4])
    slopes, table = jnp.array([0.1, -0.3, 0.2, 0.05]), jnp.asarray(rng.normal(size=16), jnp.float32)

    def loss(attend: Any, q: Any, k: Any, v: Any, captured: Any, dout: Any) -> Any:
        slopes, table = captured
        return (
            attend(q, k, v, is_causal=True, score_mod=lambda s, b, h, i, j: s + slopes[h] * (i - j) + table[j]) * dout
        )

    spread = Spread(ring_attention, 2, heads_at_once=heads_at_once)
    specs = (ROWS, ROWS, ROWS, P(), ROWS)
    ring = jax.shard_map(
        functools.partial(loss, spread.attend), mesh=spread.mesh, in_specs=specs, out_specs=ROWS, check_vma=check_vma
    )
    one = functools.partial(loss, functools.partial(flash_attention, implementation="xla"))
    gradient = lambda f: jax.jit(jax.grad(lambda *x: f(*x).sum(), argnums=(0, 1, 2, 3)))  # noqa: E731
    *tensors, captured = gradient(ring)(*map(spread.in_order, (q, k, v)), (slopes, table), spread.in_order(dout))
    got = (*map(spread.back, tensors), captured)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(gradient(one)(q, k, v, (slopes, table), dout)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# The plan --------------------------------------------------------------------------------------------------------


def plan_of(order: str, devices: int, *mask: masks.Part) -> plan.Plan:
    return plan.make(AttentionSpec(1.0, mask=mask), Order(order, devices), Shapes(1, 16, 16, 2, 2, 8, 8))


def test_zigzag_balances_a_causal_mask() -> None:
    """Pairs of chunks that each device computes in each step: a constant, half of all."""
    order = Order("zigzag", 8)
    chunks = plan.chunks_of(AttentionSpec(1.0, mask=(masks.Band(None, 0),)), order, Shapes(1, 16, 16, 2, 2, 8, 8))
    for shift in range(1, 8):
        counts = [chunks.needed[np.ix_(order.chunks_of(d), order.chunks_of((d - shift) % 8))].sum() for d in range(8)]
        assert counts == [2] * 8


def test_a_window_stops_the_ring() -> None:
    causal, narrow, both = masks.Band(None, 0), masks.Band(16, 0), masks.Band(20, 20)
    assert [plan_of("contiguous", 8, mask).forward[0] for mask in (causal, narrow, both)] == [7, 1, 2]
    assert [plan_of("contiguous", 8, mask).backward[0] for mask in (causal, narrow, both)] == [0, 0, 2]
    assert plan_of("contiguous", 8, masks.Band(0, 0)).forward == (0, ())


def test_order_of_tokens() -> None:
    x = jnp.arange(48).reshape(2, 24)
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 3), 3), x)
    mesh = mesh_of((3,), ("x",))
    positions = jax.shard_map(lambda: local_positions(8, "x", "zigzag"), mesh=mesh, in_specs=(), out_specs=P("x"))()
    np.testing.assert_array_equal(positions, to_zigzag(jnp.arange(24), 3, axis=0))
    with pytest.raises(ValueError, match=r"2 \* 5 devices long, not 24"):
        to_zigzag(x, 5)
    np.testing.assert_array_equal(to_zigzag(x.tolist(), 3), to_zigzag(x, 3))
    for function in (to_zigzag, from_zigzag):
        for devices in (0, -2, 2.0, True):
            with pytest.raises(ValueError, match="devices must be an integer, at least 1"):
                function(x, devices)
        with pytest.raises(ValueError, match=r"axis must be an axis of array int32\[2, 24\], not 2"):
            function(x, 3, axis=2)
    with pytest.raises(ValueError, match=r"axis_name must be an axis .* local_positions"):
        local_positions(8, "x")
    with pytest.raises(ValueError, match="local_len must be"):
        local_positions(2.5, "x")


REFUSED: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "bias": (ring_attention, {"bias": jnp.zeros((1, 1))}, NotImplementedError, "ring_attention takes no bias"),
    "mask": (ulysses_attention, {"mask": jnp.ones((1, 1), bool)}, NotImplementedError, "takes no mask as an array"),
    "max_logit": (
        ring_attention,
        {"return_max_logit": True},
        NotImplementedError,
        "takes no return_max_logit: the largest logit of a head would have to be gathered",
    ),
    "an array as a name": (
        ring_attention,
        {"implementation": np.array(["xla"])},
        ValueError,
        "implementation must be None or one of",
    ),
    "unknown": (ring_attention, {"causal": True}, TypeError, "unexpected keyword argument 'causal'"),
    "order": (ring_attention, {"order": "spiral"}, ValueError, "order must be one of contiguous, zigzag, not 'spiral'"),
    "axis": (ring_attention, {"axis_name": "y"}, ValueError, "axis_name must be an axis of the mesh"),
    "reference": (ring_attention, {"implementation": "reference"}, NotImplementedError, "no backward pass of its own"),
    "heads": (
        ulysses_attention,
        {},
        ValueError,
        "N=3 query heads and K=3 key heads cannot be divided over the 2",
    ),
    "heads at once": (
        ring_attention,
        {"heads_at_once": 2},
        ValueError,
        "heads_at_once must be None or an integer, at least 1, that divides the 3 key heads, not 2",
    ),
    "heads at once in 8 bits": (ring_attention, {"heads_at_once": np.int8(-128)}, ValueError, "heads_at_once must be"),
    "no heads at once": (ring_attention, {"heads_at_once": 0}, ValueError, "heads_at_once must be"),
    "heads at once in words": (ring_attention, {"heads_at_once": "all"}, ValueError, "heads_at_once must be"),
    "odd rows": (
        ring_attention,
        {"order": "zigzag"},
        ValueError,
        "even number of rows a device in zigzag order",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    attend, arguments, error, message = REFUSED[name]
    x = jnp.ones((1, 10, 3, 4))
    function = functools.partial(attend, **{"axis_name": "x", **arguments})
    spread = jax.shard_map(lambda x: function(x, x, x), mesh=mesh_of((2,), ("x",)), in_specs=ROWS, out_specs=ROWS)
    with pytest.raises(error, match=message.replace("*", r"\*")):
        jax.eval_shape(spread, x)


WRONG: dict[str, list[Any]] = {
    "sinks": [np.ones(3, np.float32), np.ones(8, np.float32), 0.0, "x"],
    "segment_ids": [np.ones((1, 16), np.int32), [1, 2, 3], np.ones((1, 8)), [[1, 2], [3]]],
    "return_residual": [2, None],
    "return_max_logit": [None],
    "query_seq_lengths": [[1, 2, 3]],
    "scale": ["x", 1e39],
    "axis_name": [3, None],
    "query": [[[1.0], [2.0, 3.0]]],
}


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
@pytest.mark.parametrize("name", WRONG)
def test_arguments_are_checked_in_the_shapes_that_were_given(attend: Any, name: str) -> None:
    """With the messages of flash_attention on a device's own rows."""
    x = jnp.ones((1, 8, 4, 4))
    for value in WRONG[name]:
        given = {"axis_name": "x", "query": x, "key": x, "value": x, name: value}
        run = jax.shard_map(lambda given=given: attend(**given), mesh=mesh_of((2,), ("x",)), in_specs=(), out_specs=P())
        with pytest.raises(ValueError, match=name) as caught:
            jax.eval_shape(run)
        if name != "axis_name":
            del given["axis_name"]
            with pytest.raises(ValueError) as wanted:
                flash_attention(**given)
            assert str(caught.value) == str(wanted.value)


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
def test_array_likes_and_arguments_that_ask_for_nothing(attend: Any) -> None:
    x = np.random.default_rng(0).normal(size=(1, 8, 4, 4)).astype(np.float32)
    nothing = {"bias": None, "mask": None, "return_max_logit": False, "segment_ids": [[0] * 8]}
    for given in (x, x.tolist()):
        run = jax.shard_map(
            lambda given=given: attend(given, given, given, axis_name="x", **nothing),
            mesh=mesh_of((2,), ("x",)),
            in_specs=(),
            out_specs=ROWS,
        )
        np.testing.assert_allclose(jax.jit(run)()[:, :8], flash_attention(x, x, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attend", [ring_attention, ulysses_attention])
@pytest.mark.parametrize(("q_len", "kv_len", "heads"), [(0, 4, 2), (4, 0, 2), (4, 4, 0)])
def test_shards_without_rows_or_heads(attend: Any, q_len: int, kv_len: int, heads: int) -> None:
    """Zeros, and gradients of zero, without a warning."""
    q, kv = jnp.ones((1, 2 * q_len, heads, 4)), jnp.ones((1, 2 * kv_len, heads, 4))
    run = jax.shard_map(
        functools.partial(attend, axis_name="x", is_causal=True, return_residual=True),
        mesh=mesh_of((2,), ("x",)),
        in_specs=ROWS,
        out_specs=ROWS,
    )
    out, lse = jax.jit(run)(q, kv, kv)
    assert out.shape == q.shape and not out.any()
    assert lse.shape == q.shape[:-1] and (lse == -np.inf).all()
    gradients = jax.jit(jax.grad(lambda *x: run(*x)[0].sum(), (0, 1, 2)))(q, kv, kv)
    assert not any(jnp.any(gradient) for gradient in gradients)


@pytest.mark.parametrize(
    ("attend", "arguments", "conditions"),
    [
        (ring_attention, {}, True),
        (ring_attention, {"order": "zigzag", "heads_at_once": 2}, False),
        (ulysses_attention, {}, False),
    ],
)
def test_kernels_lower(attend: Any, arguments: dict[str, Any], conditions: bool) -> None:
    """In the steps of a ring too, some of them under a condition, some in a loop."""
    mesh = jax.sharding.AbstractMesh((4,), ("x",), (AxisType.Auto,))
    shape = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16, sharding=NamedSharding(mesh, ROWS))
    function = functools.partial(attend, axis_name="x", is_causal=True, implementation="sm90", **arguments)
    whole = jax.shard_map(lambda x: function(x, x, x), mesh=mesh, in_specs=ROWS, out_specs=ROWS)
    gradient = jax.jit(jax.grad(lambda x: whole(x).astype(jnp.float32).sum()))
    text = gradient.trace(shape).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert ("stablehlo.case" in text) == conditions
