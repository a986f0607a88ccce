"""The attention_fn inside Flax's modules, against the modules' own attention with the same parameters."""

from __future__ import annotations

import inspect

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_flash import masks
from pallas_flash.flax import attention_fn, make_attention_fn

BATCH, LENGTH, FEATURES, HEADS = 2, 11, 24, 4
MODULES = pytest.mark.parametrize("library", ["nnx", "linen"])


def random(*shape: int, seed: int = 0, dtype=jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def random_mask(*shape: int) -> jax.Array:
    """Bool, with the diagonal allowed: an empty row gives 0 here and a mean there."""
    return jax.random.bernoulli(jax.random.key(9), 0.5, shape) | jnp.eye(*shape[-2:], dtype=bool)


class Layer:
    """One attention layer of either library, as a function of parameters and inputs."""

    def __init__(self, library: str, attention=None, **options):
        if attention is not None:
            options["attention_fn"] = attention
        self.library = library
        if library == "nnx":
            module = nnx.MultiHeadAttention(HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **options)
            self.graphdef, self.params, self.rest = nnx.split(module, nnx.Param, ...)
        else:
            self.module = linen.MultiHeadDotProductAttention(HEADS, **options)
            self.params = self.module.init(jax.random.key(0), random(1, 2, FEATURES), deterministic=True)

    def __call__(self, params, x: jax.Array, dropout_seed: int | None = None, **options) -> jax.Array:
        if self.library == "nnx":
            if dropout_seed is not None:
                options["rngs"] = nnx.Rngs(dropout_seed)
            return nnx.merge(self.graphdef, params, self.rest)(x, **options)
        rngs = None if dropout_seed is None else {"dropout": jax.random.key(dropout_seed)}
        return self.module.apply(params, x, rngs=rngs, **options)


def out_and_gradients(function, *args) -> tuple:
    """The output, and the gradients of all arguments for a random cotangent."""

    @jax.jit
    def run(*args):
        out, vjp = jax.vjp(function, *args)
        return out, *vjp(random(*out.shape, seed=1, dtype=out.dtype))

    return run(*args)


def assert_same(library: str, *, relative: float = 1e-5, x: jax.Array | None = None, call=None, **options) -> None:
    """Output and gradients, of parameters and inputs, equal those of the module's own attention."""
    x = random(BATCH, LENGTH, FEATURES) if x is None else x
    results = []
    for attention in (attention_fn, None):
        layer = Layer(library, attention, **options)
        results.append(out_and_gradients(lambda p, x, layer=layer: layer(p, x, **(call or {})), layer.params, x))
    largest = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(results[1]))
    for actual, expected in zip(jax.tree.leaves(results[0]), jax.tree.leaves(results[1]), strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        # The bias of the keys moves all logits of a row alike: its gradient is rounding alone, hence a common scale.
        np.testing.assert_allclose(
            np.asarray(actual, np.float32), np.asarray(expected, np.float32), rtol=0, atol=relative * largest
        )


@MODULES
def test_plain(library):
    assert_same(library)


@MODULES
@pytest.mark.parametrize("shape", [(BATCH, HEADS), (1, HEADS), (BATCH, 1)])
def test_mask(library, shape):
    assert_same(library, call={"mask": random_mask(*shape, LENGTH, LENGTH)})


@MODULES
def test_masks_of_flax_helpers_are_float32(library):
    make_causal_mask = {"nnx": nnx.make_causal_mask, "linen": linen.make_causal_mask}[library]
    assert_same(library, call={"mask": make_causal_mask(jnp.ones((BATCH, LENGTH)))})


@MODULES
def test_mask_as_data(library):
    x, layer = random(BATCH, LENGTH, FEATURES), Layer(library, attention_fn)
    expected = layer(layer.params, x, mask=nnx.make_causal_mask(x[..., 0]))
    np.testing.assert_allclose(layer(layer.params, x, mask=masks.causal()), expected, atol=1e-6)


def test_is_causal_alone_and_with_a_mask():
    assert_same("nnx", call={"is_causal": True})
    assert_same("nnx", call={"is_causal": True, "mask": random_mask(BATCH, HEADS, LENGTH, LENGTH)})


@MODULES
def test_leading_batch_dimensions(library):
    x = random(2, 3, 5, FEATURES)
    assert_same(library, x=x, call={"mask": random_mask(2, 3, 1, 5, 5)})
    assert_same(library, x=x[0, 0])


def test_grouped_query_heads():
    assert_same("nnx", num_kv_heads=2, call={"is_causal": True})


@MODULES
def test_dtype(library):
    assert_same(library, dtype=jnp.bfloat16, relative=0.02)
    half = Layer(library, attention_fn, dtype=jnp.bfloat16)
    full = Layer(library, attention_fn)
    x = random(BATCH, LENGTH, FEATURES)
    difference = np.abs(half(half.params, x).astype(jnp.float32) - full(full.params, x)).max()
    assert half(half.params, x).dtype == jnp.bfloat16 and 1e-4 < difference < 0.1


@MODULES
def test_normalized_queries_and_keys(library):
    assert_same(library, normalize_qk=True)


@MODULES
def test_precision_reaches_the_products(library):
    x = random(BATCH, LENGTH, FEATURES)
    layer = Layer(library, attention_fn, precision="default")  # not what float32 gets by itself
    program = str(jax.make_jaxpr(layer)(layer.params, x))
    assert program.count("Precision.DEFAULT, Precision.DEFAULT") >= 6  # four projections, scores, output


def test_softmax_in_float32_is_what_happens_anyway():
    assert_same("linen", force_fp32_for_softmax=True)


@MODULES
def test_bias(library):
    own = {"nnx": nnx.dot_product_attention, "linen": linen.dot_product_attention}[library]
    q, k, v = (random(BATCH, n, HEADS, 8, seed=n) for n in (7, LENGTH, LENGTH))
    mask = jax.random.bernoulli(jax.random.key(0), 0.7, (BATCH, 1, 7, LENGTH)).at[..., 0].set(True)
    for shape in ((BATCH, HEADS, 7, LENGTH), (BATCH, 1, 1, LENGTH)):
        results = [
            out_and_gradients(lambda *args, function=function: function(*args, mask), q, k, v, random(*shape, seed=5))
            for function in (attention_fn, own)
        ]
        for actual, expected in zip(*results, strict=True):
            np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_promote_dtype_is_called():
    q = random(1, 3, 2, 8)
    promote = lambda arrays, dtype: tuple(a.astype(jnp.float16) for a in arrays)  # noqa: E731
    out_dtype = lambda key, **options: jax.eval_shape(lambda: attention_fn(q, key, q, **options)).dtype  # noqa: E731
    assert out_dtype(q, promote_dtype=promote) == jnp.float16
    assert out_dtype(q.astype(jnp.bfloat16)) == jnp.float32
    assert out_dtype(q, dtype=jnp.bfloat16) == jnp.bfloat16


def decode_nnx(attention, x: jax.Array, **options) -> jax.Array:
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=True, rngs=nnx.Rngs(0), **options, **({"attention_fn": attention} if attention else {})
    )
    layer.init_cache(x.shape)
    step = nnx.jit(lambda layer, x: layer(x, is_causal=True))
    return jnp.concatenate([step(layer, x[:, i : i + 1]) for i in range(x.shape[1])], axis=1)


def decode_linen(attention, x: jax.Array) -> jax.Array:
    layer = linen.MultiHeadDotProductAttention(HEADS, decode=True, **({"attention_fn": attention} if attention else {}))
    variables = layer.init(jax.random.key(0), x)
    step = jax.jit(lambda variables, x: layer.apply(variables, x, mutable=["cache"]))
    cache, rows = variables["cache"], []
    for i in range(x.shape[1]):
        row, changed = step({"params": variables["params"], "cache": cache}, x[:, i : i + 1])
        cache = changed["cache"]
        rows.append(row)
    return jnp.concatenate(rows, axis=1)


@pytest.mark.case("B03")
@pytest.mark.parametrize("decode", [decode_nnx, decode_linen])
def test_decoding_with_the_cache_of_the_module(decode):
    x = random(BATCH, 6, FEATURES)
    rows = decode(attention_fn, x)
    np.testing.assert_allclose(rows, decode(None, x), atol=1e-5)
    library = "nnx" if decode is decode_nnx else "linen"
    full = Layer(library, attention_fn)
    np.testing.assert_allclose(rows, full(full.params, x, mask=nnx.make_causal_mask(x[..., 0])), atol=1e-5)


def test_decoding_with_grouped_query_heads():
    x = random(BATCH, 5, FEATURES)
    np.testing.assert_allclose(
        decode_nnx(attention_fn, x, num_kv_heads=2), decode_nnx(None, x, num_kv_heads=2), atol=1e-5
    )


@MODULES
def test_dropout_is_applied_unless_deterministic(library):
    x = random(BATCH, LENGTH, FEATURES)
    layer = Layer(library, attention_fn, dropout_rate=0.5, broadcast_dropout=False)
    plain = Layer(library, attention_fn)
    without = plain(plain.params, x)
    drop = lambda seed: layer(layer.params, x, seed, deterministic=False)  # noqa: E731
    np.testing.assert_array_equal(layer(layer.params, x, deterministic=True), without)
    np.testing.assert_array_equal(drop(0), drop(0))
    assert np.abs(drop(0) - without).max() > 0.01 and np.abs(drop(0) - drop(1)).max() > 0.01


def test_dropout_has_its_rate_and_keeps_the_mean():
    rate, keys = 0.3, 64
    q, v = jnp.zeros((4, keys, 2, keys)), jnp.broadcast_to(jnp.eye(keys)[:, None], (4, keys, 2, keys))
    weights = attention_fn(q, q, v, dropout_rng=jax.random.key(0), dropout_rate=rate, broadcast_dropout=False)
    kept = np.asarray(weights) > 0
    np.testing.assert_allclose(np.asarray(weights)[kept] * keys, 1 / (1 - rate), rtol=1e-4)
    assert abs(kept.mean() - (1 - rate)) < 5 * (rate * (1 - rate) / kept.size) ** 0.5
    assert (kept[0] != kept[1]).any() and (kept[:, :, 0] != kept[:, :, 1]).any()


@MODULES
def test_dropout_shared_by_batch_and_heads_is_refused(library):
    layer = Layer(library, attention_fn, dropout_rate=0.5)
    x = random(BATCH, LENGTH, FEATURES)
    with pytest.raises(NotImplementedError, match="broadcast_dropout=False"):
        layer(layer.params, x, 0, deterministic=False)
    layer(layer.params, x, deterministic=True)


@MODULES
def test_sowing_the_weights_is_refused(library):
    layer = Layer(library, attention_fn)
    with pytest.raises(NotImplementedError, match="sow_weights must be False"):
        layer(layer.params, random(BATCH, LENGTH, FEATURES), sow_weights=True)


def test_replaced_products_are_refused_in_linen():
    einsum = {"qk_attn_weights_einsum_cls": lambda: jnp.einsum, "attn_weights_value_einsum_cls": lambda: jnp.einsum}
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        Layer("linen", attention_fn, **einsum)


@pytest.mark.parametrize(
    "name", ["module", "einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum", "input_positions"]
)
def test_what_cannot_be_done_is_refused_by_name(name):
    q = random(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=name):
        attention_fn(q, q, q, **{name: object()})


def test_dropout_without_a_key_is_refused():
    q = random(1, 3, 2, 8)
    with pytest.raises(ValueError, match="dropout_rng"):
        attention_fn(q, q, q, dropout_rate=0.5, broadcast_dropout=False)


@pytest.mark.parametrize("own", [nnx.dot_product_attention, linen.dot_product_attention])
def test_every_keyword_of_flax_is_known(own):
    assert set(inspect.signature(own).parameters) <= set(inspect.signature(attention_fn).parameters)
    # Up to `module` they come in the order of Flax; behind it the two libraries differ.
    names, ours = (list(inspect.signature(function).parameters) for function in (own, attention_fn))
    shared = names.index("module") + 1
    assert ours[:shared] == names[:shared]


@MODULES
def test_options_of_the_factory_are_honoured(library):
    windowed = Layer(library, make_attention_fn(local_window_size=(2, 0), implementation="xla"))
    own = Layer(library)
    x, rows = random(BATCH, LENGTH, FEATURES), jnp.arange(LENGTH)
    distance = rows[:, None] - rows
    mask = ((distance >= 0) & (distance <= 2))[None, None]
    np.testing.assert_allclose(windowed(windowed.params, x), own(own.params, x, mask=mask), atol=1e-5)


@pytest.mark.parametrize(
    "name", ["no_such", "mask", "bias", "is_causal", "dropout_rate", "dropout_key", "precision", "return_residual"]
)
def test_options_that_make_no_sense_are_refused(name):
    with pytest.raises(ValueError, match=name):
        make_attention_fn(**{name: None})


@pytest.mark.parametrize(
    "option", [{"scale": "x"}, {"local_window_size": -2}, {"logits_soft_cap": 0}, {"implementation": "fast"}]
)
def test_options_are_checked_when_the_function_is_made(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        make_attention_fn(**option)


def test_a_mask_may_be_a_list():
    x = jnp.ones((1, 2, 1, 4))
    mask = [[True, False], [True, True]]
    np.testing.assert_array_equal(attention_fn(x, x, x, mask=mask), attention_fn(x, x, x, mask=jnp.array(mask)))
    with pytest.raises(ValueError, match="mask must be"):
        attention_fn(x, x, x, mask=[[True], [True, False]])
