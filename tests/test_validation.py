"""Every wrong argument is refused by name, with what came and what is wanted; every name works under tracing."""

from __future__ import annotations

import inspect
import itertools
import reprlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_flash
from pallas_flash import explain, explain_decode, flash_attention, masks, reference_attention
from pallas_flash.distributed import to_zigzag
from pallas_flash.flax import attention_fn, make_attention_fn

Q = jnp.zeros((2, 5, 6, 8))
K = jnp.zeros((2, 7, 3, 8))
V = jnp.zeros((2, 7, 3, 4))

nan, inf = float("nan"), float("inf")

# What looks like an array to Python, or is one to NumPy alone.
Struct = jax.ShapeDtypeStruct
NO_ARRAYS = (np.float32, Struct((2, 7, 3, 8), jnp.float32), np.ma.zeros((2, 7, 3, 8), np.float32))
FOREIGN = (*NO_ARRAYS, np.zeros((2, 7, 3, 8), ">f4"), np.zeros((2, 7, 3, 8), np.longdouble))
NO_INTEGERS = (np.int32, Struct((2,), jnp.int32), np.ma.zeros(2, np.int32), 2**70, [2**63, -1])
SMALLEST = (np.int64(-(2**63)), np.int32(-(2**31)))  # whose abs() is negative

# argument: values that are wrong beside Q, K, V.
WRONG: dict[str, list[Any]] = {
    "query": [
        [[1.0], [2.0, 3.0]], jnp.zeros((2, 5, 6, 8), jnp.int32), jnp.zeros((6, 8)), "q", None,
        jnp.zeros((2, 5, 6, 8), jnp.complex64), *FOREIGN,
    ],
    "key": [jnp.zeros((2, 7, 3, 9)), jnp.zeros((3, 7, 3, 8)), jnp.zeros((7, 3, 8)), jnp.zeros((2, 7, 3, 8), bool),
            *FOREIGN],
    "value": [jnp.zeros((2, 8, 3, 4)), jnp.zeros((2, 7, 6, 4)), jnp.zeros((2, 7, 3)), jnp.zeros((2, 7, 3, 4), np.int8),
              *FOREIGN],
    "bias": [
        np.ones((5, 7), bool), np.ones((5, 7), np.int32), np.ones((5, 6), np.float32),
        np.ones((3, 1, 5, 7), np.float32), "b", *FOREIGN,
    ],
    "mask": [
        np.ones((5, 7), np.int32), np.ones((5, 7), np.float32), np.where(np.eye(5, 7), 0, -inf), np.ones((7, 5), bool),
        np.ones((2, 3, 5, 7), bool), np.ones((2, 2, 6, 5, 7), bool), 1, lambda b, h, i, j: i >= j,
        np.bool_, Struct((5, 7), bool), np.ma.ones((5, 7), bool),
    ],
    "scale": [
        nan, inf, 1e39, np.float64(-1e300), 10**400, -(10**400), "1", True, np.ones(3, np.float32), jnp.int32(1), 1j,
        *FOREIGN,
    ],
    "is_causal": [1, None, "yes", np.ones(2, bool), np.bool_],
    "query_seq_lengths": [
        np.ones(3, np.int32), np.ones(2, np.float32), np.ones((2, 1), np.int32), "5", 2.0, *NO_INTEGERS,
    ],
    "key_value_seq_lengths": [
        [[1], [2, 3]], np.ones(3, np.int32), np.ones(2, np.float32), np.ones(2, bool), [1.5, 2.5], *NO_INTEGERS,
    ],
    "local_window_size": [-2, (-2, 0), (0, -3), (1, 2, 3), 1.5, (0.5, 1), "wide", True, (True, False), (),
                          *SMALLEST, (0, SMALLEST[0]), np.int32],
    "query_offset": [1.5, np.ones(3, np.int32), np.ones(2, np.float32), None, True, 2**31, 2**70, *SMALLEST,
                     *NO_INTEGERS[:3]],
    "segment_ids": [
        np.ones(7, np.int32), np.ones((2, 7), np.int32), np.ones((2, 7), np.float32), np.ones((2, 3, 7), np.int32),
        (np.ones((2, 5), np.int32),), (np.ones((2, 7), np.int32), np.ones((2, 5), np.int32)), (None, None),
        (np.ones((2, 5), np.int32), np.ones((2, 7))), (np.ones((2, 5), np.int32), None), "ids",
        [[1, 2], [3]], *NO_INTEGERS, (np.ones((2, 5), np.int32), np.int32), (np.ones((2, 5), np.int32), [[1], [2, 3]]),
    ],
    "logits_soft_cap": [0.0, 0, -5.0, inf, nan, 1e39, 10**400, "5", True, np.ones(2), np.float32],
    "sinks": [np.ones(3, np.float32), np.ones(6, np.int32), np.ones((1, 6), np.float32), 1.0, "s", *FOREIGN],
    "score_mod": [3, lambda s: s, lambda s, b, h, i, j: (s, s), lambda s, b, h, i, j: s > 0,
                  lambda s, b, h, i, j: jnp.ones(3) * s, lambda s, b, h, i, j: s.astype(jnp.bfloat16),
                  lambda s, b, h, i, j: "s", lambda s, b, h, i, j: None, lambda s, b, h, i, j: (s,),
                  lambda s, b, h, i, j: np.float32, np.float32],
    "dropout_rate": [-0.1, nan, 1.0, 1.5, 10**400, "0.1", True, None, np.ones(2), np.float32],
    "precision": ["most", 7, ("high",) * 3, object(), np.float32],
    "deterministic": [None, 1, "no"],
    "return_residual": [None, 1, "no"],
    "return_max_logit": [None, 0, "no"],
    "implementation": ["cudnn", "", 3, "XLA", ("xla",), np.array(["xla", "xla"]), np.array(["xla"]), np.str_],
}  # fmt: skip

CASES = [(name, i) for name, values in WRONG.items() for i in range(len(values))]


@pytest.mark.case("B21", "D15", "F05", "K10")
@pytest.mark.parametrize(("name", "number"), CASES)
def test_wrong_arguments_are_refused_by_name(name: str, number: int) -> None:
    arguments = {"query": Q, "key": K, "value": V, "dropout_key": jax.random.key(0)} | {name: WRONG[name][number]}
    for implementation in (None, "reference"):
        with pytest.raises(ValueError, match=name) as caught:
            flash_attention(**{"implementation": implementation} | arguments)
    assert_says(str(caught.value), name, WRONG[name][number])


def assert_says(message: str, name: str, value: Any) -> None:
    """A message names the argument, says what it must be, and what came: a value, or dtype and shape of an array."""
    assert name in message and " must " in message, message
    if callable(value):
        return  # what it returns, or why it cannot be called
    parts = value if isinstance(value, tuple) else ()
    assert any(said(each) in message for each in (value, *parts)), message  # of a pair, the one that is wrong


def said(value: Any) -> str:
    is_array = isinstance(value, np.ndarray | jax.Array | Struct)
    return f"{value.dtype}{list(value.shape)}" if is_array else reprlib.repr(value)


# Other public functions: calls that are wrong, the argument that their message names, and what came.
WRONG_CALLS: dict[str, tuple[Callable[[], Any], str, str]] = {
    "a window below -1": (lambda: masks.sliding_window(-2, 0), "left", "-2"),
    "a fractional window": (lambda: masks.sliding_window(0, 1.5), "right", "1.5"),
    "a bool as a window": (lambda: masks.sliding_window(True), "left", "True"),
    "an empty chunk": (lambda: masks.chunked(0), "size", "0"),
    "a fractional chunk": (lambda: masks.chunked(2.0), "size", "2.0"),
    "a fractional prefix": (lambda: masks.prefix_lm(1.5), "length", "1.5"),
    "no prefix": (lambda: masks.prefix_lm(None), "length", "None"),
    "fractional lengths": (lambda: masks.lengths(np.ones(2)), "query", "float64[2]"),
    "lengths as text": (lambda: masks.lengths(key_value="3"), "key_value", "'3'"),
    "fractional ids": (lambda: masks.segments(np.zeros((1, 3))), "query", "float64[1, 3]"),
    "ids as bools": (lambda: masks.segments(np.zeros((1, 3), int), np.zeros((1, 3), bool)), "key_value", "bool[1, 3]"),
    "a predicate of numbers": (lambda: masks.predicate(lambda b, h, i, j: i - j), "masks.predicate", "int32[]"),
    "a predicate of text": (lambda: masks.predicate(lambda b, h, i, j: "x"), "masks.predicate", "'x'"),
    "a predicate of None": (lambda: masks.predicate(lambda b, h, i, j: None), "masks.predicate", "None"),
    "a predicate of a tuple": (lambda: masks.predicate(lambda b, h, i, j: (i == j,)), "masks.predicate", "bool[]"),
    "a class as a prefix": (lambda: masks.prefix_lm(np.int32), "length", "numpy.int32"),
    "a struct of floats": (lambda: masks.lengths(Struct((2,), jnp.float32)), "query", "float32[2]"),
    "a prefix beyond 64 bits": (lambda: masks.prefix_lm(2**70), "length must be within 64 bits", str(2**70)),
    "a struct in a mask": (
        lambda: flash_attention(Q, K, V, mask=masks.prefix_lm(Struct((2,), jnp.int32))),
        "masks.prefix_lm: length", "int32[2]",
    ),
    "structs in a mask": (
        lambda: flash_attention(Q, K, V, mask=masks.segments(*(Struct((2, n), jnp.int32) for n in (5, 7)))),
        "masks.segments: ids", "int32[2, 5]",
    ),
    "an array as a name for explain": (
        lambda: explain(Q, K, V, implementation=np.array(["xla"])), "implementation", "<U3[1]",
    ),
    "an array as a name for explain_decode": (
        lambda: explain_decode(Q, Q, Q, 3, implementation=np.array(["xla"])), "implementation", "<U3[1]",
    ),
    "no predicate": (lambda: masks.predicate(3), "masks.predicate", "3"),
    "explain": (lambda: explain(Q, K, V, logits_soft_cap=0.0), "logits_soft_cap", "0.0"),
    "a name for explain": (lambda: explain(Q, K, V, implementation="fast"), "implementation", "'fast'"),
    "the reference": (lambda: reference_attention(Q, K, V, scale="x"), "scale", "'x'"),
    "an option of Flax's": (lambda: make_attention_fn(mask=None), "mask", "set by the Flax module"),
    "an option that is none": (lambda: make_attention_fn(windows=3), "windows", "not an argument"),
    "dropout without a key": (
        lambda: attention_fn(Q, Q, Q, dropout_rate=0.5, broadcast_dropout=False), "dropout_rng", "0.5",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_other_public_functions_refuse_by_name(name: str) -> None:
    call, argument, came = WRONG_CALLS[name]
    with pytest.raises(ValueError) as caught:
        call()
    assert argument in str(caught.value) and came in str(caught.value)


def test_arrays_on_different_devices_are_refused() -> None:
    here, there = (jax.device_put(jnp.ones((1, 3, 1, 4)), device) for device in jax.devices()[:2])
    with pytest.raises(
        ValueError, match=r"query, key, value must be on the same devices, not query on .*0.* key on .*1"
    ):
        flash_attention(here, there, there)


def test_every_argument_has_wrong_values() -> None:
    assert set(inspect.signature(flash_attention).parameters) == set(WRONG) | {"dropout_key"}


@pytest.mark.case("F05")
def test_dropout_needs_a_key() -> None:
    two = jax.random.split(jax.random.key(0), 2)
    strange = (np.uint32, Struct((2,), jnp.uint32), np.ma.zeros(2, np.uint32), np.zeros(2, ">u4"))
    for key in (None, 3, "key", two, np.zeros(2, np.float32), np.zeros((2, 2), np.uint32), *strange):
        with pytest.raises(ValueError, match="dropout_key"):
            flash_attention(Q, K, V, dropout_rate=0.1, dropout_key=key)
    with pytest.raises(ValueError, match="dropout_rate"):
        jax.jit(lambda rate: flash_attention(Q, K, V, dropout_rate=rate, dropout_key=jax.random.key(0)))(0.1)


@pytest.mark.case("D11")
def test_no_mixture_of_dtypes() -> None:
    """Refused at the call, naming all three (D11)."""
    dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
    for a, b, c in itertools.product(dtypes, repeat=3):
        if not a == b == c:
            with pytest.raises(ValueError, match=f"query.*key.*value.*{a.dtype}.*{b.dtype}.*{c.dtype}"):
                flash_attention(Q.astype(a), K.astype(b), V.astype(c))
        else:
            assert flash_attention(Q.astype(a), K.astype(b), V.astype(c)).dtype == a


@pytest.mark.case("E11")
def test_head_counts() -> None:
    for heads, kv_heads in ((3, 0), (3, 2), (2, 3)):
        with pytest.raises(ValueError, match=f"N={heads}.*K={kv_heads}"):
            flash_attention(jnp.zeros((1, 5, heads, 4)), *[jnp.zeros((1, 5, kv_heads, 4))] * 2)


def test_a_head_dim_of_zero_needs_a_scale() -> None:
    with pytest.raises(ValueError, match="scale"):
        flash_attention(jnp.zeros((1, 5, 1, 0)), jnp.zeros((1, 5, 1, 0)), jnp.zeros((1, 5, 1, 4)))


def test_masks_that_do_not_fit_are_refused_by_name() -> None:
    wrong = {
        "masks.segments: ids": masks.segments(np.zeros((2, 6), np.int32)),
        "masks.lengths: key_value": masks.lengths(key_value=np.zeros(3, np.int32)),
        "masks.lengths: query": masks.lengths(np.zeros((2, 2), np.int32)),
        "masks.prefix_lm: length": masks.prefix_lm([1, 2, 3]),
    }
    for name, mask in wrong.items():
        with pytest.raises(ValueError, match=name):
            flash_attention(Q, K, V, mask=mask)


def test_messages_say_what_came_and_what_is_wanted() -> None:
    with pytest.raises(ValueError, match=r"mask must be a bool array.*int32\[5, 7\]"):
        flash_attention(Q, K, V, mask=np.ones((5, 7), np.int32))
    with pytest.raises(ValueError, match=r"bias must be broadcastable to.*\[2, 6, 5, 7\].*float32\[4, 7\]"):
        flash_attention(Q, K, V, bias=np.ones((4, 7), np.float32))
    with pytest.raises(ValueError, match="xla"):
        flash_attention(Q, K, V, implementation="triton")


def test_numpy_and_weakly_typed_inputs() -> None:
    q, k, v = (np.random.default_rng(0).normal(size=x.shape).astype(np.float32) for x in (Q, K, V))
    want = flash_attention(*map(jnp.asarray, (q, k, v)))
    np.testing.assert_array_equal(flash_attention(q, k, v), want)
    scalars = {
        "scale": np.float32(0.3), "local_window_size": np.int64(3), "query_offset": np.int32(2), "is_causal": np.True_,
        "logits_soft_cap": np.float32(2), "query_seq_lengths": 4, "key_value_seq_lengths": [3, 7],
    }  # fmt: skip
    plain = scalars | {"scale": 0.3, "local_window_size": 3, "query_offset": 2, "logits_soft_cap": 2.0}
    np.testing.assert_allclose(flash_attention(q, k, v, **scalars), flash_attention(q, k, v, **plain), rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_integers_of_any_kind() -> None:
    """Big-endian ones, and NumPy's in which a sum or a product of sizes does not fit."""
    lengths, ids = [3, 7], np.arange(14).reshape(2, 7) % 3
    big_endian = lambda x: np.asarray(x, ">i8")  # noqa: E731
    native: dict[str, Any] = {"key_value_seq_lengths": lengths, "query_offset": [1, 2]}
    big: dict[str, Any] = {name: big_endian(x) for name, x in native.items()}
    native["segment_ids"] = (ids[:, :5], ids)
    big["segment_ids"] = tuple(map(big_endian, native["segment_ids"]))
    want = flash_attention(Q + 1, K, V + 1, mask=masks.prefix_lm(lengths), **native)
    got = flash_attention(Q + 1, K, V + 1, mask=masks.prefix_lm(np.asarray(lengths, ">i2")), **big)
    np.testing.assert_array_equal(got, want)
    x = np.arange(256)
    np.testing.assert_array_equal(to_zigzag(x, np.int8(64), axis=0), to_zigzag(x, 64, axis=0))
    flash_attention(Q, K, V, local_window_size=(np.uint8(255), np.int64(2**62)))


@pytest.mark.filterwarnings("error")
def test_small_numpy_numbers_are_numbers() -> None:
    half = {"scale": np.float16(0.5), "logits_soft_cap": np.float16(2), "dropout_rate": np.float16(0)}
    jax.eval_shape(lambda q: flash_attention(q, K, V, **half), Q)


@pytest.mark.case("K11")
def test_the_signature_is_a_superset_of_jax() -> None:
    """The positional order and every keyword of jax.nn.dot_product_attention, defaults included (K11)."""
    ours, theirs = (inspect.signature(f).parameters for f in (flash_attention, jax.nn.dot_product_attention))
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default


@pytest.mark.case("K01")
def test_heads_first_tensors_are_warned_of() -> None:
    x = jnp.zeros((1, 8, 256, 16))
    with pytest.warns(UserWarning, match=r"\[\*B, T, N, H\]"):
        jax.eval_shape(flash_attention, x, x, x)


@pytest.mark.case("G15")
def test_traced_arguments_are_never_looked_at() -> None:
    """All arrays as tracers, under jit, eval_shape, vmap and scan (G15)."""
    arrays = {
        "scale": jnp.float32(0.5), "sinks": jnp.zeros(6), "query_seq_lengths": jnp.array([3, 5]),
        "key_value_seq_lengths": jnp.array([7, 2]), "query_offset": jnp.array([0, 3]), "bias": jnp.zeros((5, 7)),
        "mask": jnp.ones((5, 7), bool), "segment_ids": (jnp.zeros((2, 5), jnp.int32), jnp.zeros((2, 7), jnp.int32)),
    }  # fmt: skip
    attend = lambda arrays: flash_attention(Q, K, V, is_causal=True, local_window_size=(3, 1), **arrays)  # noqa: E731
    assert jax.jit(attend)(arrays).shape == jax.eval_shape(attend, arrays).shape == (2, 5, 6, 4)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
    assert jax.vmap(attend)(stacked).shape == jax.lax.scan(lambda c, a: (c, attend(a)), 0, stacked)[1].shape


@pytest.mark.case("K05")
def test_explain_names_every_implementation() -> None:
    for name in (None, "xla", "reference"):
        explanation = explain(Q, K, V, is_causal=True, implementation=name)
        assert {verdict.name for verdict in explanation.verdicts} >= {"xla", "reference"}
        assert all(verdict.reason for verdict in explanation.verdicts)
        assert explanation.chosen is not None
        assert all(verdict.name in str(explanation) for verdict in explanation.verdicts)
        if name is not None:
            assert explanation.chosen == name
    with pytest.raises(ValueError, match="bias"):
        explain(Q, K, V, bias=np.ones((5, 7), bool))
    with pytest.raises(TypeError, match=r"explain\(\) got an unexpected keyword argument 'causal'"):
        explain(Q, K, V, causal=True)


def test_explain_takes_structs() -> None:
    q, k, v, lengths = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (Q, K, V, jnp.zeros(2, int)))
    structs = explain(q, k, v, key_value_seq_lengths=lengths, local_window_size=(3, 0), score_mod=lambda s, *_: s)
    assert structs == explain(Q, K, V, key_value_seq_lengths=jnp.zeros(2, int), local_window_size=(3, 0))
    assert explain_decode(q, k, v, lengths).chosen == "xla"
    mask = masks.lengths(lengths, lengths) & masks.prefix_lm(lengths)
    assert explain(q, k, v, mask=mask).chosen == "xla"
    with pytest.raises(ValueError, match="key must be"):
        explain(q, jax.ShapeDtypeStruct((2, 7, 3, 9), jnp.float32), v)


def test_public_names() -> None:
    assert set(pallas_flash.__all__) >= {"flash_attention", "reference_attention", "explain", "masks"}
    np.testing.assert_array_equal(reference_attention(Q, K, V + 1), jnp.ones((2, 5, 6, 4)))
