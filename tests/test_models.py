"""The transformer: what each part computes, what each option changes, and what it costs."""

from __future__ import annotations

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import Attention, Rows
from models.config import PRESETS, TransformerConfig
from models.layers import rotary
from models.transformer import Transformer
from pallas_flash import Cache
from pallas_flash.spec import described

SMALL = TransformerConfig(
    vocab_size=32,
    num_layers=2,
    hidden_dim=32,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=48,
    compute_dtype="float32",
)
ALL_OPTIONS = {"windows": (5, None), "logits_soft_cap": 2.0, "use_sinks": True}


def make(**changes) -> Transformer:
    """A small model whose sinks are away from 0, where they start."""
    model = Transformer(dataclasses.replace(SMALL, **changes), rngs=nnx.Rngs(0))
    for i, block in enumerate(model.blocks):
        if block.attention.sinks is not None:
            block.attention.sinks[...] = jax.random.normal(jax.random.key(i), block.attention.sinks.shape)
    return model


def random_tokens(batch: int = 2, length: int = 19, seed: int = 0) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (batch, length), 0, SMALL.vocab_size)


@jax.jit
def logits_of(model: Transformer, tokens: jax.Array, segment_ids=None, lengths=None) -> jax.Array:
    return model(tokens, segment_ids, lengths)


@jax.jit
def extend(model: Transformer, tokens, caches, offset, lengths) -> tuple[jax.Array, list[Cache]]:
    return model.extend(tokens, caches, offset=offset, lengths=lengths)


@jax.jit
def loss_and_gradients(model: Transformer, tokens: jax.Array) -> tuple[jax.Array, Transformer]:
    def loss(model: Transformer) -> jax.Array:
        log_probs = jax.nn.log_softmax(model(tokens)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1))

    return jax.value_and_grad(loss)(model)


def assert_trees_close(actual, expected, *, relative: float) -> None:
    """Each leaf within `relative` of its own largest entry."""
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        error, size = np.abs(a - b).max(), np.abs(b).max()
        assert size > 0 and error <= relative * size, f"{jax.tree_util.keystr(path)}: {error} of {size}"


def test_rotary_is_the_rotation_of_the_paper():
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 6)).astype(np.float32)
    positions = np.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 1000]])
    angles = positions[:, :, None, None] * 100.0 ** (-np.arange(3) / 3)
    rotated = (x[..., :3] + 1j * x[..., 3:]) * np.exp(1j * angles)
    expected = np.concatenate([rotated.real, rotated.imag], axis=-1)
    np.testing.assert_allclose(rotary(jnp.asarray(x), jnp.asarray(positions), 100.0), expected, atol=2e-4)


def test_rotary_scores_depend_on_distances_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    scores = [
        jnp.sum(rotary(q, jnp.array([p + 5]), 1e4) * rotary(k, jnp.array([p]), 1e4), axis=-1) for p in (0, 3, 100)
    ]
    np.testing.assert_allclose(scores[1:], [scores[0]] * 2, rtol=1e-4)


def test_rotary_of_bfloat16_is_rounded_once():
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 16), jnp.bfloat16)
    positions = 4000 + jnp.arange(8)
    expected = rotary(x.astype(jnp.float32), positions, 1e4).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotary(x, positions, 1e4), expected)


def test_attention_equals_the_formula():
    config = dataclasses.replace(SMALL, windows=(4,), logits_soft_cap=1.5, use_sinks=True)
    layer = Attention(config, 4, rngs=nnx.Rngs(0))
    layer.sinks[...] = jnp.linspace(-1, 1, config.num_q_heads)
    x = jax.random.normal(jax.random.key(1), (2, 9, config.hidden_dim))
    positions = jnp.arange(9)
    q, k = (rotary(p(x), positions, config.rope_theta) for p in (layer.query, layer.key))
    k, v = (jnp.repeat(a, 2, axis=2) for a in (k, layer.value(x)))
    scores = 1.5 * jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, k) / 8**0.5 / 1.5)
    distance = positions[:, None] - positions
    scores = jnp.where((distance >= 0) & (distance < 4), scores, -jnp.inf)
    weights = jnp.exp(scores) / (jnp.exp(scores).sum(-1, keepdims=True) + jnp.exp(layer.sinks[...])[:, None, None])
    expected = layer.out(jnp.einsum("bnts,bsnh->btnh", weights, v))
    np.testing.assert_allclose(jax.jit(lambda layer, x: layer(x, Rows(), None)[0])(layer, x), expected, atol=1e-5)


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all_options"])
def test_implementations_agree(options):
    tokens = random_tokens()
    loss, gradients = loss_and_gradients(make(attention=None, **options), tokens)
    expected_loss, expected = loss_and_gradients(make(attention="reference", **options), tokens)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert_trees_close(gradients, expected, relative=1e-4)


@pytest.mark.parametrize("option", ["windows", "logits_soft_cap", "use_sinks"])
def test_every_option_changes_the_result(option):
    tokens = random_tokens()
    assert np.abs(logits_of(make(**{option: ALL_OPTIONS[option]}), tokens) - logits_of(make(), tokens)).max() > 1e-3


@pytest.mark.case("H14")
def test_no_token_sees_later_ones():
    model, tokens = make(**ALL_OPTIONS), random_tokens()
    changed = tokens.at[:, 11].add(1) % SMALL.vocab_size
    difference = np.abs(logits_of(model, tokens) - logits_of(model, changed)).max(axis=(0, 2))
    assert (difference[:11] == 0).all() and (difference[11:] > 0).all()


def test_a_window_of_w_reaches_w_tokens_the_own_one_included():
    model, tokens = make(num_layers=1, windows=(4,)), random_tokens()
    changed = tokens.at[:, 7].add(1) % SMALL.vocab_size
    difference = np.abs(logits_of(model, tokens) - logits_of(model, changed)).max(axis=(0, 2))
    assert np.flatnonzero(difference).tolist() == [7, 8, 9, 10]


def test_packed_segments_equal_separate_rows():
    model, tokens = make(**ALL_OPTIONS), random_tokens()
    segment_ids = jnp.broadcast_to(jnp.where(jnp.arange(19) < 8, 1, 2), tokens.shape)
    packed = logits_of(model, tokens, segment_ids)
    second = jnp.roll(tokens, -8, axis=1)  # nothing that follows it reaches it
    np.testing.assert_allclose(packed[:, :8], logits_of(model, tokens)[:, :8], atol=1e-4)
    np.testing.assert_allclose(packed[:, 8:], logits_of(model, second)[:, :11], atol=1e-4)
    assert np.abs(packed - logits_of(model, tokens))[:, 8:].max() > 1e-2


def test_padded_rows_equal_short_rows():
    model, tokens = make(**ALL_OPTIONS), random_tokens()
    padded = logits_of(model, tokens, None, jnp.array([19, 6]))
    other = logits_of(model, tokens.at[1, 6:].set(0), None, jnp.array([19, 6]))
    expected = logits_of(model, tokens)
    np.testing.assert_allclose(padded[0], expected[0], atol=1e-4)
    np.testing.assert_allclose(padded[1, :6], expected[1, :6], atol=1e-4)
    np.testing.assert_array_equal(other[:, :6], padded[:, :6])
    assert np.isfinite(padded).all()


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    tokens = random_tokens()
    model = make(compute_dtype="bfloat16", **ALL_OPTIONS)
    logits = logits_of(model, tokens)
    error = np.abs(logits - logits_of(make(**ALL_OPTIONS), tokens)).max()
    assert logits.dtype == jnp.float32 and 1e-4 < error < 0.2
    hidden = jax.eval_shape(lambda model: model.blocks[0](model._embed(tokens), Rows())[0], model)
    assert hidden.dtype == jnp.bfloat16
    for leaf in jax.tree.leaves((model, jax.eval_shape(loss_and_gradients, model, tokens)[1])):
        assert leaf.dtype == jnp.float32


def test_remat_changes_no_gradient():
    tokens = random_tokens()
    loss, gradients = loss_and_gradients(make(remat=True, **ALL_OPTIONS), tokens)
    expected_loss, expected = loss_and_gradients(make(**ALL_OPTIONS), tokens)
    np.testing.assert_array_equal(loss, expected_loss)
    assert_trees_close(gradients, expected, relative=1e-5)


def test_remat_keeps_what_attention_saves_and_nothing_else_of_a_block(capsys):
    tokens, width = random_tokens(), SMALL.hidden_dim
    residuals = {}
    for layers in (1, 3):
        model = make(remat=True, num_layers=layers)
        jax.ad_checkpoint.print_saved_residuals(lambda model: model(tokens).sum(), model)
        lines = [line for line in capsys.readouterr().out.splitlines() if "from the argument" not in line]
        residuals[layers] = Counter(line.split(" from ")[0] for line in lines)
    of_two_blocks = residuals[3] - residuals[1]
    kept = sorted(name.split(" ")[0] for name in of_two_blocks.elements())
    assert kept == sorted(2 * ["f32[2,19,4,8]", "f32[2,4,19]", "f32[2,4,19]", f"f32[2,19,{width}]"])


@pytest.mark.case("G08")
@pytest.mark.parametrize("remat", [False, True])
def test_the_forward_pass_of_attention_runs_once(remat):
    tokens, model = random_tokens(), make(remat=remat, num_layers=1)
    program = jax.jit(jax.grad(lambda model: model(tokens).sum())).lower(model).as_text()
    assert program.count("call @forward") == 1 and program.count("call @backward") == 1


@pytest.mark.case("H12", "H14")
def test_extending_ragged_caches_in_pieces_equals_one_pass():
    model, tokens = make(**ALL_OPTIONS), random_tokens(length=19)
    caches, offset = model.empty_caches(batch=2, capacity=16), jnp.zeros(2, jnp.int32)
    expected = logits_of(model, tokens)
    for lengths in ([4, 1], [4, 3], [1, 4], [3, 4]):
        positions = offset[:, None] + jnp.arange(4)
        piece = jnp.take_along_axis(tokens, positions, axis=1, mode="clip")
        logits, caches = extend(model, piece, caches, offset, jnp.array(lengths))
        offset += jnp.array(lengths)
        np.testing.assert_allclose(logits, expected[jnp.arange(2), offset - 1], atol=1e-4)
    assert offset.tolist() == [12, 12]


@pytest.mark.parametrize("name, parameters", [("tiny", 90_432), ("125m", 123_587_328), ("1b", 1_076_168_704)])
def test_presets_have_their_sizes(name, parameters):
    model = nnx.eval_shape(lambda: Transformer(PRESETS[name], rngs=nnx.Rngs(0)))
    assert model.num_parameters() == parameters


@pytest.mark.parametrize("windows", [None, (3, None), (100,)])
def test_flops_count_every_product(windows):
    config, seq_len = dataclasses.replace(SMALL, windows=windows, tie_embeddings=False), 11
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    weights = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)) if leaf.ndim > 1)
    weights -= config.vocab_size * config.hidden_dim  # looked up, not multiplied
    pairs = sum(
        min(i + 1, config.window(layer) or seq_len) for layer in range(config.num_layers) for i in range(seq_len)
    )
    forward = 2 * weights * seq_len + 4 * pairs * config.num_q_heads * config.head_dim
    assert config.flops_per_token(seq_len) == pytest.approx(3 * forward / seq_len)


SIZE, RANGE, BOOL = "an integer, at least 1", "a number above 0, within the range of float32", "a bool"
NO_SIZES = (0, -1, 1.5, "a", None, True)
WINDOWS = "None or a tuple of at least one, each None or an integer, at least 1"
REFUSED = {  # what each field wants, and what is not that
    **dict.fromkeys(("vocab_size", "num_layers", "hidden_dim", "num_q_heads", "num_kv_heads"), (SIZE, NO_SIZES)),
    **dict.fromkeys(("head_dim", "mlp_dim"), (SIZE, NO_SIZES)),
    **{name: (RANGE, (0, -1, 1e-50, 1e40, float("nan"), "a", None, True)) for name in ("rope_theta", "norm_eps")},
    **dict.fromkeys(("use_sinks", "tie_embeddings", "remat"), (BOOL, (1, "yes", None))),
    "windows": (WINDOWS, ((), (4, 0), [4], 4, (2.5,), (True,), "44")),
    "logits_soft_cap": ("None or a", (0, -1.0, float("inf"), "a", True)),
    "compute_dtype": ("one of ('bfloat16', 'float32')", ("float16", None, jnp.float32, 32)),
    "attention": ("one of (None, 'sm90', 'sm80', 'xla', 'reference', 'cudnn')", ("foo", "", 1)),
    "decode": ("one of (None, 'sm90', 'xla')", ("foo", "cudnn", 1)),
    "context_parallel": ("None or the names of two mesh axes", ("ab", ("a",), ("a", "a"), ("a", ["b"]), ["a", "b"])),
}


def test_every_field_is_refused_by_name_with_its_value():
    assert list(REFUSED) and set(REFUSED) == {field.name for field in dataclasses.fields(TransformerConfig)}
    for name, (wanted, values) in REFUSED.items():
        for value in values:
            with pytest.raises(ValueError) as refusal:
                dataclasses.replace(SMALL, **{name: value})
            message = str(refusal.value)
            assert message.startswith(f"{name} must be {wanted}"), message
            assert message.endswith(f", not {described(value)}"), message


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_q_heads": 3}, "num_q_heads must be a multiple of num_kv_heads=2, not 3"),
        ({"head_dim": 7}, "head_dim must be even, for the rotary embedding, not 7"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


def test_numpys_sizes_are_sizes():
    dataclasses.replace(SMALL, num_layers=np.int64(2), windows=(np.int32(4), None), norm_eps=np.float32(1e-5))


@pytest.mark.parametrize(
    "tokens, message",
    [
        (np.zeros(3, int), r"tokens must be integers \[B, T\], not int64\[3\]"),
        (np.zeros((2, 3, 1), int), r"tokens must be integers \[B, T\], not int64\[2, 3, 1\]"),
        (np.zeros((2, 3)), r"tokens must be integers \[B, T\], not float64\[2, 3\]"),
        (np.zeros((2, 3), bool), r"tokens must be integers \[B, T\], not bool\[2, 3\]"),
        ("text", r"tokens must be integers \[B, T\], not 'text'"),
        ([[1], [2, 3]], r"tokens must be integers \[B, T\]"),
        (jnp.array([[0, 32]]), "tokens must be in 0 … 31, not 0 … 32"),
        (np.array([[0, -1]]), "tokens must be in 0 … 31, not -1 … 0"),
        (np.array([[2**32]]), "tokens must be in 0 … 31, not 4294967296 … 4294967296"),
    ],
)
def test_tokens_that_are_none_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        make(num_layers=1)(tokens)


def test_tokens_that_are_not_real_may_be_anything():
    model, tokens = make(num_layers=1), random_tokens(length=4).at[0, 3].set(99)
    for lengths in (jnp.array([3, 4]), np.array([3, 4])):
        assert np.isfinite(model(tokens, lengths=lengths)[0, :3]).all()
    with pytest.raises(ValueError, match="tokens must be in 0"):
        model(tokens, lengths=jnp.array([4, 4]))
    assert np.isnan(logits_of(model, tokens)[0, 3]).all(), "under jit nobody can look at them"


@pytest.mark.parametrize(
    ("changes", "arguments", "named"),
    [
        ({"logits_soft_cap": 5.0}, {}, "logits_soft_cap"),
        ({"use_sinks": True}, {}, "sinks"),
        ({}, {"segment_ids": jnp.zeros((2, 19), int)}, "segment_ids"),
        ({}, {"lengths": jnp.array([3, 12])}, "key_value_seq_lengths, query_seq_lengths"),
    ],
)
def test_cudnn_takes_whole_sequences_only(changes, arguments, named):
    with pytest.raises(NotImplementedError, match=f"'cudnn' takes whole sequences, without {named}"):
        make(attention="cudnn", **changes)(random_tokens(), **arguments)
