"""Rows without keys, junk behind boundaries, extreme numbers, precision, dropout, and sizes of zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention
from tests import oracles
from tests.conftest import KEY_SEED, Call, check, cotangents_of, dropout_keep, evaluate, inputs, judge, small_tiles


def dead_rows() -> dict[str, Call]:
    """Ways in which row 2 of batch 0 (T = 5, S = 7) can lose all its keys; others may lose theirs too."""
    mask = np.ones((2, 1, 5, 7), bool)
    mask[0, :, 2] = False
    bias = np.where(mask, 0.5, -np.inf).astype(np.float32)
    return {
        "mask": {"mask": mask},
        "bias": {"bias": bias},
        "one head": {"mask": (np.arange(6) != 1)[:, None, None]},
        "causal and lengths": {"is_causal": True, "query_offset": np.array([-3, 0]), "kv_lengths": np.array([5, 7])},
        "window and segments": {
            "window": (0, 0),
            "segment_ids": (np.array([[0, 0, 1, 0, 0], [0] * 5]), np.zeros((2, 7), np.int32)),
        },
        "query lengths": {"q_lengths": np.array([2, 5])},
        "empty cache": {"kv_lengths": np.array([0, 3])},
    }


@pytest.mark.case("A01", "A15")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("way", dead_rows())
def test_rows_without_keys(implementation: str, way: str, dtype: Any) -> None:
    """out 0, lse -inf, dq 0; all else finite and as without them, whether or not lse is returned (A01, A02)."""
    call = inputs(dtype=dtype) | dead_rows()[way]
    outputs = check(call, implementation, jit=False)
    dead = ~oracles.intermediates(oracles.Arguments(**call)).live.any(-1).transpose(0, 2, 1)
    assert dead.any()
    for array in (outputs.out, outputs.gradients["q"]):
        assert (np.asarray(array)[dead] == 0).all()
    assert (np.asarray(outputs.lse)[dead] == -np.inf).all()
    alone = evaluate(call, implementation, jit=False, return_residual=True).out
    np.testing.assert_array_equal(alone, outputs.out)


@pytest.mark.case("A02", "I03")
def test_the_answer_does_not_depend_on_what_is_returned(implementation: str) -> None:
    call = inputs() | dead_rows()["one head"] | {"bias": np.ones((5, 7), np.float32)}

    def results(**options: Any) -> Any:
        attend = lambda q: flash_attention(  # noqa: E731
            q, call["k"], call["v"], mask=call["mask"], bias=call["bias"], implementation=implementation, **options
        )
        first = lambda q: jax.tree.leaves(attend(q))[0]  # noqa: E731
        return attend(call["q"]), jax.grad(lambda q: first(q).sum())(jnp.asarray(call["q"]))

    (out, lse, max_logit), gradient = results(return_residual=True, return_max_logit=True)
    assert max_logit.shape == (2, 6) and (max_logit[:, 1] == -np.inf).all()
    for other, same in (
        (results(), (out,)),
        (results(return_residual=True), (out, lse)),
        (results(return_max_logit=True), (out, max_logit)),
    ):
        for a, b in zip(jax.tree.leaves(other[0]), same, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(other[1], gradient)


JUNK = (np.nan, np.inf, -np.inf)


@pytest.mark.case("A09", "A16")
@pytest.mark.parametrize("junk", JUNK)
def test_junk_behind_lengths(implementation: str, junk: float) -> None:
    """Bitwise the result with zeros there; in q, k, v, bias and dout (A09, A11, A16)."""
    clean = inputs(q_len=20, kv_len=21, dtype=jnp.bfloat16)
    clean |= {"q_lengths": np.array([9, 20]), "kv_lengths": np.array([0, 13]), "sinks": np.zeros(6, np.float32)}
    clean["bias"] = np.random.default_rng(0).normal(size=(2, 1, 20, 21)).astype(np.float32)
    q_behind = (np.arange(20) >= clean["q_lengths"][:, None])[..., None, None]
    kv_behind = (np.arange(21) >= clean["kv_lengths"][:, None])[..., None, None]
    fill = lambda x, where, value: np.where(where, value, x.astype(np.float32)).astype(x.dtype)  # noqa: E731
    dout, dlse = cotangents_of(clean)

    def run(value: float) -> Any:
        call = clean | {"q": fill(clean["q"], q_behind, value)}
        call |= {name: fill(clean[name], kv_behind, value) for name in "kv"}
        call["bias"] = fill(clean["bias"], kv_behind[:, None, None, :, 0, 0] | q_behind[:, None, :, :, 0], value)
        return call, evaluate(call, implementation, fill(dout, q_behind, value), dlse)

    (_, want), (call, got) = run(0.0), run(junk)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    judge(got, call, fill(dout, q_behind, 0), dlse)
    for name, behind in (("q", q_behind), ("k", kv_behind), ("v", kv_behind)):
        gradient = np.asarray(got.gradients[name])
        assert (gradient[np.broadcast_to(behind, gradient.shape)] == 0).all()


@pytest.mark.case("A11")
@pytest.mark.parametrize("how", ["causal", "mask", "segments", "bias"])
def test_junk_in_masked_keys(implementation: str, how: str) -> None:
    """NaN in the last key reaches the rows that read it and no other, forward and backward (A11)."""
    call = inputs(q_len=6, kv_len=6, heads=(2, 1))
    may_read = np.tri(6, dtype=bool)
    extra: dict[str, Call] = {
        "causal": {"is_causal": True},
        "mask": {"mask": may_read},
        "segments": {"segment_ids": np.array([[0, 0, 0, 0, 0, 1]] * 2)},
        "bias": {"bias": np.where(may_read, 0, -np.inf).astype(np.float32)},
    }
    call |= extra[how]
    for name in "kv":
        call[name][:, 5] = np.nan
    dout, dlse = cotangents_of(call)
    dout[:, 5], dlse[:, 5] = 0, 0
    outputs = evaluate(call, implementation, dout, dlse, jit=False)
    want = oracles.attention(**call)
    assert np.isnan(np.asarray(outputs.out)[:, 5]).all()
    np.testing.assert_allclose(np.asarray(outputs.out)[:, :5], want.out[:, :5], rtol=1e-5, atol=1e-6)
    gradients = oracles.gradients(**call, dout=dout, dlse=dlse)
    np.testing.assert_allclose(outputs.gradients["q"][:, :5], gradients["q"][:, :5], rtol=1e-4, atol=1e-5)


def test_junk_in_masked_places_of_a_bias(implementation: str) -> None:
    call = inputs()
    mask = np.random.default_rng(1).random((2, 6, 5, 7)) < 0.6
    clean = np.random.default_rng(2).normal(size=mask.shape).astype(np.float32)
    want = check(call | {"mask": mask, "bias": clean}, implementation, jit=False)
    dout, dlse = cotangents_of(call)
    for junk in JUNK:
        bias = np.where(mask, clean, junk).astype(np.float32)
        got = evaluate(call | {"mask": mask, "bias": bias}, implementation, dout, dlse, jit=False)
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_junk_that_is_read_shows(implementation: str) -> None:
    """The companion: NaN in what takes part is not washed away."""
    for name in "qkv":
        call = inputs(batch=1, heads=(1, 1))
        call[name][0, 1] = np.nan
        assert np.isnan(np.asarray(evaluate(call, implementation, jit=False).out)).any()


@pytest.mark.case("A04", "A12")
def test_the_lowest_finite_bias_is_not_a_mask(implementation: str) -> None:
    """A row of finfo.min is the mean of v; a block of keys of it has no weight; twice it is -inf: no key (A04, A12)."""
    call = inputs(kv_len=21, dims=(8, 8))
    for dtype in (np.float32, jnp.bfloat16):
        lowest = jnp.finfo(dtype).min
        bias = np.zeros((5, 21), dtype)
        bias[2], bias[3, 9:] = lowest, lowest
        dout, _ = cotangents_of(call)
        outputs = evaluate(call | {"bias": bias}, implementation, dout, jit=False)
        mean = np.repeat(call["v"].mean(1), 2, axis=1)
        np.testing.assert_allclose(outputs.out[:, 2], mean, rtol=1e-5, atol=1e-6)
        first_keys = oracles.attention(**call, kv_lengths=9).out
        np.testing.assert_allclose(outputs.out[:, 3], first_keys[:, 3], rtol=1e-5, atol=1e-6)
        assert all(np.isfinite(np.asarray(g, np.float32)).all() for g in outputs.gradients.values())
    half = inputs(dtype=np.float16)
    with np.errstate(over="ignore"):
        twice = np.zeros((2, 1, 5, 7), np.float16) + np.finfo(np.float16).min * np.float16(2)
    twice[1] = 0
    assert (np.asarray(check(half | {"bias": twice}, implementation, jit=False).out)[0] == 0).all()


@pytest.mark.case("D01")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_huge_logits(implementation: str, dtype: Any) -> None:
    """One key and equal keys of 133120 and 1e15 (D01): the mean of v, whatever max and product round to."""
    for size in (133120.0, 1e15):
        for kv_len in (1, 3):
            q = np.full((1, 1, 1, 64), size).astype(dtype)
            kv = np.full((1, kv_len, 1, 64), size).astype(dtype)
            out, lse = flash_attention(q, kv, kv, return_residual=True, implementation=implementation)
            np.testing.assert_allclose(out.astype(np.float32), q.astype(np.float32), rtol=float(jnp.finfo(dtype).eps))
            np.testing.assert_allclose(lse, np.float64(q[0, 0, 0, 0]) ** 2 * 8, rtol=1e-6)


@pytest.mark.case("D02")
def test_scores_beyond_float16(implementation: str) -> None:
    """Raw scores of 8e6 and a dout of 1e3 in float16 (D02)."""
    q = np.full((1, 1, 1, 128), 256, np.float16)
    k = np.stack([q[0], q[0] - 1], 1)
    v = np.stack([np.ones((1, 1, 8)), -np.ones((1, 1, 8))], 1).astype(np.float16)
    out = flash_attention(q, k, v, implementation=implementation)
    np.testing.assert_array_equal(out[0, 0, 0], v[0, 0, 0])
    call = inputs(dtype=np.float16)
    dout, _ = cotangents_of(call)
    dout = (dout * 1e3).astype(np.float16)
    judge(evaluate(call, implementation, dout, jit=False), call, dout)


@pytest.mark.case("D04")
@pytest.mark.parametrize("scale", [0.0, 1e-30, -0.7, np.float32(0.0), np.float32(1e-30)])
def test_unusual_scales(implementation: str, scale: Any) -> None:
    """Static and traced, beside causality, a mask, a bias of -inf and dead rows; the traced has a gradient (D04)."""
    rng = np.random.default_rng(3)
    bias = np.where(rng.random((5, 7)) < 0.3, -np.inf, 0).astype(np.float32)
    bias[3] = -np.inf
    call = inputs() | {"is_causal": True, "mask": rng.random((5, 7)) < 0.8, "bias": bias, "scale": scale}
    outputs = check(call, implementation, jit=False)
    assert ("scale" in outputs.gradients) == isinstance(scale, np.float32)
    if scale == 0:
        assert (np.asarray(outputs.gradients["q"]) == 0).all() and (np.asarray(outputs.gradients["k"]) == 0).all()


@pytest.mark.case("D12", "D05")
@pytest.mark.parametrize("head_dim", [1, 63, 72, 96])
def test_the_default_scale_is_by_the_true_head_dim(implementation: str, head_dim: int) -> None:
    call = inputs(dims=(head_dim, 5), heads=(2, 1))
    bias = 3 * np.random.default_rng(4).normal(size=(5, 7)).astype(np.float32)
    for scale in (None, 1.0, 0.05):
        check(call | {"bias": bias, "sinks": np.float32([1, -1]), "scale": scale}, implementation, jit=False)


@pytest.mark.case("D13")
def test_small_soft_caps_leave_masked_keys_dead(implementation: str) -> None:
    """A cap of 0.5 on a mask would leave the future half of the weight (D13)."""
    for cap in (1.0, 0.5):
        for kv_len in (8, 257):
            call = inputs(q_len=8, kv_len=kv_len, dims=(8, 8)) | {"is_causal": True, "soft_cap": cap}
            outputs = check(call, implementation, jit=False)
            np.testing.assert_array_equal(outputs.out[:, 0], np.repeat(call["v"][:, 0], 2, axis=1))


@pytest.mark.case("D16")
def test_soft_cap_comes_before_the_bias(implementation: str) -> None:
    call = inputs(q_len=8, kv_len=8) | {"soft_cap": 5.0}
    bias = np.linspace(-16, 16, 64, dtype=np.float32).reshape(8, 8)
    with_bias = check(call | {"bias": bias}, implementation, jit=False)
    assert np.abs(with_bias.lse).max() > 10  # a bias inside the cap could not get there


@pytest.mark.case("H04")
def test_extreme_sinks(implementation: str) -> None:
    call = inputs()
    for value in (1e4, -1e4, 20.0):
        check(call | {"sinks": np.full(6, value, np.float32), "window": (1, 0)}, implementation, jit=False)
    call["k"] *= 200
    check(call | {"sinks": np.full(6, 20, np.float32)}, implementation, jit=False)


@pytest.mark.case("F01", "F02")
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_dropout(implementation: str, rate: float) -> None:
    """The rate kept, the scale 1 / (1 - rate) forward and backward, one mask for both (F01, F02)."""
    keep = dropout_keep((2, 6, 40, 50), rate, implementation=implementation)
    np.testing.assert_array_equal(keep, dropout_keep((2, 6, 40, 50), rate))
    sigma = (rate * (1 - rate) / keep.size) ** 0.5
    assert abs(keep.mean() - (1 - rate)) < 4 * sigma
    for axes in ((0, 1, 2), (0, 1, 3), (1, 2, 3), (0, 2, 3)):  # no row, key, batch or head is out of line
        means = keep.mean(axes)
        assert np.abs(means - (1 - rate)).max() < 5 * sigma * means.size**0.5
    call = inputs(q_len=40, kv_len=50) | {"rate": rate, "keep": keep, "is_causal": True, "query_offset": 0}
    outputs = check(call, implementation)
    undropped = {name: call[name] for name in ("q", "k", "v", "is_causal")}
    np.testing.assert_allclose(outputs.lse, evaluate(undropped, implementation).lse, rtol=1e-6)


@pytest.mark.case("F01")
def test_the_dropout_mask_depends_on_nothing_but_its_place(implementation: str) -> None:
    """Key, batch, head, query and key give the bit: not the lengths, not the tiles, not the other arguments."""
    whole = dropout_keep((2, 6, 40, 50), 0.5)
    part = dropout_keep((1, 2, 17, 33), 0.5, implementation=implementation)
    np.testing.assert_array_equal(part, whole[:1, :2, :17, :33])
    if implementation == "xla":
        with small_tiles():
            np.testing.assert_array_equal(dropout_keep((2, 6, 40, 50), 0.5, implementation="xla"), whole)
    for axis in range(4):  # neighbours are not alike
        first, second = np.take(whole, 0, axis), np.take(whole, 1, axis)
        assert 0.4 < (first == second).mean() < 0.6


@pytest.mark.case("F04", "F05")
def test_dropout_under_jit_and_keys(implementation: str) -> None:
    """A traced key; old and new keys; another key is another mask; a dead row stays 0 (F04, F05)."""
    call = inputs(q_len=12, kv_len=13)

    @jax.jit
    def attend(key: Any) -> Any:
        options: Any = {"dropout_rate": 0.5, "is_causal": True, "query_offset": -1, "return_residual": True}
        options |= {"dropout_key": key, "implementation": implementation}
        return flash_attention(call["q"], call["k"], call["v"], **options)

    out, lse = attend(jax.random.key(3))
    assert (out[:, 0] == 0).all() and (lse[:, 0] == -np.inf).all() and np.isfinite(out).all()
    np.testing.assert_array_equal(attend(jax.random.key(3))[0], out)
    np.testing.assert_array_equal(attend(jax.random.PRNGKey(3))[0], out)
    assert (attend(jax.random.key(4))[0] != out).any()
    batched = jax.vmap(attend)(jax.random.split(jax.random.key(5), 2))[0]
    assert (batched[0] != batched[1]).any()


@pytest.mark.case("E11")
@pytest.mark.parametrize("empty", ["batch", "q_len", "kv_len", "N = K", "H", "Hv"])
def test_sizes_of_zero(implementation: str, empty: str) -> None:
    """E11: an empty result, or what no keys and no features mean."""
    sizes: Call = {"N = K": {"heads": (0, 0)}, "H": {"dims": (0, 6)}, "Hv": {"dims": (8, 0)}}.get(empty, {empty: 0})
    call = inputs(**sizes) | {"scale": 0.5}
    outputs = check(call, implementation, jit=False)
    if empty == "kv_len":
        assert (np.asarray(outputs.out) == 0).all() and (np.asarray(outputs.lse) == -np.inf).all()
    if empty == "H":
        np.testing.assert_allclose(outputs.out[:, 0], np.repeat(call["v"].mean(1), 2, axis=1), rtol=1e-5, atol=1e-6)


@pytest.mark.case("G03")
def test_batch_dimensions(implementation: str) -> None:
    """None, two and three of them, with bias, mask, lengths and ids to match (G03)."""
    for lead in ((), (2, 3), (1, 2, 2)):
        batch = int(np.prod(lead))
        call = inputs(batch=batch)
        rng = np.random.default_rng(6)
        rest: Call = {
            "bias": rng.normal(size=(batch, 1, 5, 7)).astype(np.float32), "mask": rng.random((batch, 6, 5, 1)) < 0.8,
            "kv_lengths": rng.integers(1, 8, batch), "q_lengths": rng.integers(1, 6, batch),
            "query_offset": rng.integers(0, 3, batch),
            "segment_ids": (rng.integers(0, 2, (batch, 5)), rng.integers(0, 2, (batch, 7))),
        }  # fmt: skip
        reshape = lambda x, lead=lead: np.reshape(x, (*lead, *x.shape[1:]))  # noqa: E731
        dout, dlse = cotangents_of(call)
        shaped = jax.tree.map(reshape, call | rest)
        outputs = evaluate(shaped, implementation, reshape(dout), reshape(dlse), jit=False)
        assert outputs.out.shape == (*lead, 5, 6, 6) and outputs.lse.shape == (*lead, 5, 6)
        flat = jax.tree.map(lambda x, lead=lead: np.reshape(x, (-1, *x.shape[len(lead) :])), outputs)
        judge(flat, call | rest, dout, dlse)
    part = evaluate(inputs(), implementation, jit=False, bias=np.ones((1, 1, 1, 5, 7), np.float32))
    assert part.out.shape == (2, 5, 6, 6)


@pytest.mark.usefixtures("fully_optimised")
def test_float32_accuracy_of_xla() -> None:
    """T = S = 2048, H = 64: below 1e-6 from float64."""
    rng = np.random.default_rng(7)
    call = {name: rng.normal(size=(1, 2048, 1, 64)).astype(np.float32) for name in "qkv"}
    out = jax.jit(lambda q, k, v: flash_attention(q, k, v, implementation="xla"))(call["q"], call["k"], call["v"])
    assert oracles.error(out, oracles.attention(**call).out)[1] < 1e-6
    rough = {name: value.astype(jnp.bfloat16).astype(np.float32) for name, value in call.items()}
    assert oracles.error(oracles.attention(**rough).out, oracles.attention(**call).out)[1] > 1e-5


@pytest.mark.case("D09")
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_long_rows(implementation: str, dtype: Any) -> None:
    """Several tiles of the real size, forward and backward, within the budget; the same bits twice."""
    call = inputs(batch=1, q_len=600, kv_len=1100, heads=(2, 1), dims=(64, 32), dtype=dtype) | {"is_causal": True}
    call |= {"query_offset": 500, "window": (400, 0)}
    first, second = check(call, implementation), check(call, implementation)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_companions_of_the_budget(implementation: str) -> None:
    """What the budget must refuse: zeros, a shifted tile, a dropped mask, a wrong scale, lse in base 2."""
    call = inputs(q_len=33, kv_len=40, dtype=jnp.bfloat16) | {"is_causal": True, "bias": np.ones((33, 40), np.float32)}
    dout, dlse = cotangents_of(call)
    right = evaluate(call, implementation, dout, dlse)
    judge(right, call, dout, dlse)
    without_mask = {name: value for name, value in call.items() if name != "is_causal"}
    wrong = [
        right._replace(out=right.out * 0),
        right._replace(out=jnp.roll(right.out, 16, axis=1)),
        right._replace(lse=right.lse / np.log(2)),
        evaluate(without_mask, implementation, dout, dlse),
        evaluate(call | {"scale": 0.3}, implementation, dout, dlse),
    ]
    for name, gradient in right.gradients.items():
        for change in (lambda x: x * 0, lambda x: jnp.roll(x, 8, axis=-2 if x.ndim == 2 else 1), lambda x: x * 1.05):
            wrong.append(right._replace(gradients=right.gradients | {name: change(gradient).astype(gradient.dtype)}))
    for outputs in wrong:
        with pytest.raises(AssertionError):
            judge(outputs, call, dout, dlse)


@pytest.mark.case("D08")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_x64_mode(implementation: str, dtype: Any) -> None:
    """Under x64, float32 gives the bits it always gives, with int64 lengths too; float64 gives float64 (D08)."""
    call = inputs(q_len=20, kv_len=21, dtype=dtype) | {"is_causal": True, "kv_lengths": np.array([9, 21])}
    call |= {"sinks": np.ones(6, dtype), "bias": np.ones((20, 1), dtype), "rate": 0.4}
    dout, dlse = cotangents_of(call)
    options: Any = {"dropout_key": jax.random.PRNGKey(KEY_SEED)}
    usual = evaluate(call, implementation, dout, dlse, **options)
    with jax.enable_x64(True):
        outputs = jax.tree.map(np.asarray, evaluate(call, implementation, dout, dlse, **options))
    if dtype == np.float32:
        jax.tree.map(np.testing.assert_array_equal, outputs, jax.tree.map(np.asarray, usual))
    else:
        judge(outputs, call | {"keep": dropout_keep((2, 6, 20, 21), 0.4)}, dout, dlse)
