"""Gradients where other operators lost them: biases, sinks, lse, captured tables, groups of heads, integer operands,
and cotangents in unusual forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention
from tests import oracles
from tests.conftest import check, cotangents_of, evaluate, inputs, judge, op_by_op


@pytest.mark.case("C05", "C06")
@pytest.mark.parametrize("heads", [(1, 1), (6, 2), (4, 1), (4, 4), (8, 2), (12, 2)])
def test_groups_of_heads(implementation: str, heads: tuple[int, int]) -> None:
    """dk and dv sum over the query heads of a group; Hv below, at and above H."""
    for value_dim in (3, 6, 12):
        check(inputs(heads=heads, dims=(6, value_dim)), implementation, jit=False)


@pytest.mark.case("C05")
def test_grouped_heads_equal_repeated_ones(implementation: str) -> None:
    call = inputs(heads=(6, 2))
    group = lambda x: jnp.repeat(x, 3, axis=2)  # noqa: E731
    dout, dlse = cotangents_of(call)
    grouped = evaluate(call, implementation, dout, dlse, jit=False)
    repeated = evaluate(call | {n: group(call[n]) for n in "kv"}, implementation, dout, dlse, jit=False)
    np.testing.assert_allclose(grouped.out, repeated.out, rtol=1e-5, atol=1e-6)
    for name in "kv":
        summed = repeated.gradients[name].reshape(2, 7, 2, 3, -1).sum(3)
        np.testing.assert_allclose(grouped.gradients[name], summed, rtol=1e-4, atol=1e-5)


@pytest.mark.case("C08", "E03")
@pytest.mark.parametrize("q_len, kv_len", [(4, 8), (8, 4), (100, 130), (1, 200), (200, 1), (150, 151)])
def test_bottom_right_causal(implementation: str, q_len: int, kv_len: int) -> None:
    """Forward and backward agree on where the diagonal lies (C08)."""
    call = inputs(q_len=q_len, kv_len=kv_len, heads=(4, 2), dtype=jnp.bfloat16)
    check(call | {"is_causal": True, "query_offset": kv_len - q_len}, implementation)


@pytest.mark.case("C01")
def test_rows_of_dbias_sum_to_zero(implementation: str) -> None:
    call = inputs()
    call["bias"] = np.random.default_rng(0).normal(size=(2, 6, 5, 7)).astype(np.float32)
    dout, dlse = cotangents_of(call)
    dbias = evaluate(call, implementation, dout, jit=False).gradients["bias"]
    np.testing.assert_allclose(dbias.sum(-1), 0, atol=1e-5)
    assert np.abs(dbias).max() > 0.05
    with_lse = evaluate(call, implementation, dout, dlse, jit=False).gradients["bias"]
    np.testing.assert_allclose(with_lse.sum(-1), dlse.transpose(0, 2, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.case("C01")
def test_a_table_of_relative_positions_learns(implementation: str) -> None:
    """The gradient reaches a bucket table through a gather into the bias, and through one captured by score_mod."""
    call, rng = inputs(), np.random.default_rng(1)
    table = jnp.asarray(rng.normal(size=(12, 6)), jnp.float32)
    buckets = np.arange(7) - np.arange(5)[:, None] + 4

    def attend(**options: Any) -> Any:
        return flash_attention(call["q"], call["k"], call["v"], implementation=implementation, **options)

    def through_bias(table: Any) -> Any:
        return jnp.sum(jnp.sin(attend(bias=table[buckets].transpose(2, 0, 1))))

    def through_score_mod(table: Any) -> Any:
        return jnp.sum(jnp.sin(attend(score_mod=lambda s, b, h, i, j: s + table[j - i + 4, h])))

    want = jax.grad(through_bias)(table)
    assert np.abs(want[:11]).min() > 0
    np.testing.assert_allclose(jax.grad(through_score_mod)(table), want, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(through_score_mod))(table), want, rtol=1e-4, atol=1e-6)
    direction = jnp.asarray(rng.normal(size=table.shape), jnp.float32)
    numeric = (through_bias(table + 1e-2 * direction) - through_bias(table - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(want, direction), numeric, rtol=1e-2)


@pytest.mark.case("C12", "C13")
def test_sinks(implementation: str) -> None:
    """float32 sinks beside bfloat16 inputs with grouped heads, a window and rows without a key (C12, C13)."""
    sinks = np.random.default_rng(2).normal(size=6).astype(np.float32)
    call = inputs(q_len=12, kv_len=7, dtype=jnp.bfloat16) | {"sinks": sinks, "window": (2, 0)}
    outputs = check(call, implementation, jit=False)
    assert (np.asarray(outputs.lse)[:, 9:] == sinks).all()
    nothing = inputs(kv_len=0) | {"sinks": sinks}
    _, dlse = cotangents_of(nothing)
    outputs = check(nothing, implementation, jit=False)
    np.testing.assert_allclose(outputs.gradients["sinks"], dlse.sum((0, 1)), rtol=1e-5)


@pytest.mark.case("C15")
def test_losses_on_lse_alone(implementation: str) -> None:
    call = inputs() | {"sinks": np.linspace(-1, 1, 6, dtype=np.float32), "soft_cap": 3.0}
    dout = np.zeros((2, 5, 6, 6), np.float32)
    for power in (1, 2):
        lse = oracles.attention(**call).lse
        dlse = (power * lse ** (power - 1)).astype(np.float32)
        outputs = evaluate(call, implementation, dout, dlse, jit=False)
        judge(outputs, call, dout, dlse)
        assert (np.asarray(outputs.gradients["v"]) == 0).all()
        assert np.abs(outputs.gradients["q"]).max() > 1e-2


@pytest.mark.case("I04", "C15")
def test_chunks_of_keys_merge_by_lse(implementation: str) -> None:
    """Value and gradient of attention over 4 chunks of keys, merged by lse, equal those of the whole."""
    call = inputs(kv_len=12)
    q, k, v = (jnp.asarray(call[n]) for n in "qkv")
    options: Any = {"is_causal": True, "implementation": implementation, "return_residual": True}

    def merged(q: Any, k: Any, v: Any) -> Any:
        parts = [
            flash_attention(q, k[:, i : i + 3], v[:, i : i + 3], **options, query_offset=7 - i) for i in (0, 3, 6, 9)
        ]
        out, lse = (jnp.stack(x) for x in zip(*parts, strict=True))
        total = jax.nn.logsumexp(lse, axis=0)
        return jnp.sum(out * jnp.exp(lse - total)[..., None], axis=0), total

    whole = lambda q, k, v: flash_attention(q, k, v, **options, query_offset=7)  # noqa: E731
    cotangents = tuple(map(jnp.asarray, cotangents_of(call)))
    with op_by_op(implementation):
        got, pull_got = jax.vjp(merged, q, k, v)
        want, pull_want = jax.vjp(whole, q, k, v)
        results = zip((*got, *pull_got(cotangents)), (*want, *pull_want(cotangents)), strict=True)
    for a, b in results:
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.case("C11")
def test_the_soft_cap_has_its_slope(implementation: str) -> None:
    """Scores of up to 168 under a cap of 30, beside a mask and a bias; a cap of 1 (C11)."""
    call = inputs(q_len=33, kv_len=35, dims=(16, 8))
    call |= {"q": call["q"] * 6, "k": call["k"] * 6, "is_causal": True, "scale": 1.0}
    call["bias"] = np.random.default_rng(3).normal(size=(6, 33, 35)).astype(np.float32)
    for cap in (30.0, 1.0):
        check(call | {"soft_cap": cap}, implementation)
    one = {"q": np.float32([[[[120]]]]), "k": np.float32([[[[1]], [[0]]]]), "v": np.float32([[[[1]], [[0]]]])}
    outputs = check(one | {"soft_cap": 30.0, "scale": 1.0}, implementation, jit=False)
    p = 1 / (1 + np.exp(-30 * np.tanh(4)))
    _, dlse = cotangents_of(one)
    dout, _ = cotangents_of(one)
    slope = 1 - np.tanh(4) ** 2
    want = slope * (p * dlse.item() + p * (1 - p) * dout.item())
    np.testing.assert_allclose(outputs.gradients["q"].item(), want, rtol=1e-3)


@pytest.mark.case("C09")
def test_masked_pairs_have_no_weight_in_the_backward(implementation: str) -> None:
    """v and dout large on masked pairs: the recomputed weights there are exactly 0 (C09)."""
    call = inputs(q_len=90, kv_len=90, heads=(1, 1), dims=(16, 16), batch=1) | {"window": (5, 0)}
    call["k"][:, 40:] *= 30
    call["v"][:, 40:] *= 1e4
    dout = np.zeros((1, 90, 1, 16), np.float32)
    dout[:, :40] = 1
    outputs = evaluate(call, implementation, dout, jit=False)
    judge(outputs, call, dout)
    for name in "qkv":
        assert (np.asarray(outputs.gradients[name])[:, 40:] == 0).all()


@pytest.mark.case("A17")
def test_keys_that_no_query_reads_get_zero(implementation: str) -> None:
    call = inputs(q_len=9, kv_len=30, batch=1, heads=(2, 1)) | {"is_causal": True}
    gradients = check(call, implementation, jit=False).gradients
    for name in "kv":
        assert (np.asarray(gradients[name])[:, 9:] == 0).all()
        assert (np.asarray(gradients[name])[:, :9] != 0).any()


@pytest.mark.case("A14")
def test_zero_cotangents_give_zeros(implementation: str) -> None:
    call = inputs(q_len=20, kv_len=21) | {"is_causal": True, "sinks": np.ones(6, np.float32), "scale": np.float32(0.5)}
    call["bias"] = np.where(np.tri(20, 21, dtype=bool), 0, np.finfo(np.float16).min).astype(np.float16)
    gradients = evaluate(call, implementation, np.zeros((2, 20, 6, 6), np.float32), jit=False).gradients
    for gradient in gradients.values():
        assert (np.asarray(gradient) == 0).all()


@pytest.mark.case("C17")
def test_integer_operands_take_no_part(implementation: str) -> None:
    """Traced lengths, ids and offsets; ids computed from a float; has_aux; inside scan and remat (C17)."""
    call = inputs(q_len=7)

    def loss(q: Any, lengths: Any, ids: Any, offset: Any) -> Any:
        out = flash_attention(
            q, call["k"], call["v"], key_value_seq_lengths=lengths, query_offset=offset, is_causal=True,
            segment_ids=(q[:, :, 0, 0] > 0).astype(jnp.int32) + ids, implementation=implementation,
        )  # fmt: skip
        return jnp.sum(out**2), out

    arguments = jnp.array([5, 7]), jnp.zeros((2, 7), jnp.int32), jnp.array([0, 2])
    (_, _), want = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.asarray(call["q"]), *arguments)
    remat, _ = jax.grad(jax.checkpoint(loss), has_aux=True)(jnp.asarray(call["q"]), *arguments)
    np.testing.assert_allclose(remat, want, rtol=1e-5, atol=1e-6)

    def scanned(q: Any) -> Any:
        step = lambda total, x: (total + loss(q, *x)[0], None)  # noqa: E731
        return jax.lax.scan(step, 0.0, jax.tree.map(lambda x: x[None], arguments))[0]

    np.testing.assert_allclose(jax.grad(scanned)(jnp.asarray(call["q"])), want, rtol=1e-5, atol=1e-6)
    assert np.abs(want).max() > 1e-2


@pytest.mark.case("C16")
def test_transposed_and_broadcast_operands(implementation: str) -> None:
    """q a transpose, k and v slices of a packed projection, the cotangent a broadcast scalar (C16)."""
    rng = np.random.default_rng(4)
    packed = jnp.asarray(rng.normal(size=(2, 7, 3, 4, 5)), jnp.float32)
    heads_first = jnp.asarray(rng.normal(size=(2, 4, 7, 5)), jnp.float32)
    attend = lambda q, k, v: flash_attention(q, k, v, is_causal=True, implementation=implementation)  # noqa: E731
    views = jax.jit(jax.grad(lambda q, p: attend(q.transpose(0, 2, 1, 3), p[:, :, 1], p[:, :, 2]).sum(), (0, 1)))
    dq, dpacked = views(heads_first, packed)
    copies = (np.asarray(heads_first).transpose(0, 2, 1, 3).copy(), packed[:, :, 1].copy(), packed[:, :, 2].copy())
    want = oracles.gradients(*copies, is_causal=True, dout=np.ones((2, 7, 4, 5)))
    np.testing.assert_allclose(dq.transpose(0, 2, 1, 3), want["q"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dpacked[:, :, 1], want["k"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dpacked[:, :, 2], want["v"], rtol=1e-4, atol=1e-5)


def test_max_logit_has_no_gradient(implementation: str) -> None:
    call = inputs()
    loss = lambda q: flash_attention(  # noqa: E731
        q, call["k"], call["v"], return_max_logit=True, implementation=implementation
    )[-1].sum()
    assert (np.asarray(jax.grad(loss)(jnp.asarray(call["q"]))) == 0).all()


@pytest.mark.case("C03")
def test_gradients_have_their_inputs_dtypes(implementation: str) -> None:
    for dtype, other in ((jnp.bfloat16, np.float32), (np.float16, np.float32), (np.float32, jnp.bfloat16)):
        call, rng = inputs(dtype=dtype), np.random.default_rng(5)
        call["bias"], call["sinks"] = rng.normal(size=(6, 5, 1)).astype(other), rng.normal(size=6).astype(other)
        check(call | {"scale": np.float32(0.4)}, implementation, jit=False)


HIDING: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "lengths, one of them 0": {"is_causal": True, "key_value_seq_lengths": jnp.array([5, 0])},
    "segments": {"is_causal": True, "segment_ids": jnp.array([[0, 0, 1, 1, 1, 2], [0] * 6])},
    "a head with no pair": {"is_causal": True, "mask": jnp.ones((1, 4, 1, 1), bool).at[:, 2].set(False)},
    "no pair at all": {"is_causal": True, "key_value_seq_lengths": jnp.array([0, 0])},
}


@pytest.mark.parametrize("way", HIDING)
def test_poles_and_junk_that_the_mask_hides(implementation, way):
    """Gradients that are sums over all pairs: of what score_mod captures, and of the scale."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 6, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    hidden = {"lengths, one of them 0": 5, "no pair at all": 0}.get(way, 6)  # keys from here on are nobody's
    table = jnp.asarray(rng.normal(size=6), jnp.float32)

    def gradients(junk: float, distance: Callable[[jax.Array], jax.Array]) -> Any:
        def loss(slope, scale, table):
            values = jnp.where(jnp.arange(6) < hidden, table, junk)
            mod = lambda s, b, h, i, j: s - slope * jnp.log(distance(i - j).astype(jnp.float32)) * values[j]  # noqa: E731
            call = {**HIDING[way], "scale": scale, "score_mod": mod, "implementation": implementation}
            return jnp.sum(flash_attention(q, k, v, **call) ** 2)

        with op_by_op(implementation):
            return jax.grad(loss, (0, 1, 2))(0.3, 0.5, table)

    want = gradients(0.0, lambda x: jnp.maximum(x + 1, 1))
    assert all(np.isfinite(x).all() for x in want)
    got = gradients(np.nan, lambda x: x + 1)  # log(0) for the next key, NaN for those behind it
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)
