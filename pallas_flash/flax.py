"""Flash attention as the `attention_fn` of Flax's attention modules, NNX and Linen.

    nnx.MultiHeadAttention(..., attention_fn=attention_fn)
    linen.MultiHeadDotProductAttention(..., attention_fn=make_attention_fn(local_window_size=(255, 0)))

Every keyword that the modules pass is honoured or refused by name. What differs from their own attention: a query that
may attend to nothing gives 0 instead of the mean of all values, the softmax is always in float32, `precision=None`
means float32 accuracy for float32 inputs on every device, and dropout draws other random numbers.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

try:
    from flax.nnx.nn.dtypes import promote_dtype as default_promote_dtype
except ModuleNotFoundError as error:
    raise ModuleNotFoundError('pallas_flash.flax needs Flax: from a checkout: pip install ".[flax]"') from error

from pallas_flash.api import explain, flash_attention
from pallas_flash.masks import Mask
from pallas_flash.spec import array_of

# Arguments of flash_attention that a module sets itself or that would change what it gets back.
_SET_BY_MODULE = ("query", "key", "value", "bias", "mask", "is_causal", "dropout_rate", "dropout_key", "precision")
_CHANGE_RESULT = ("return_residual", "return_max_logit")
# Options that can be checked before there is a query.
_OF_ANY_SHAPE = ("scale", "local_window_size", "logits_soft_cap", "deterministic", "implementation")


# The parameters are spelled out because Linen looks at the signature and drops, without a word, what is not in it.
def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | Mask | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    *,
    promote_dtype: Callable[..., Any] = default_promote_dtype,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Any] | None = None,
    qk_attn_weights_einsum: Callable[..., Any] | None = None,
    attn_weights_value_einsum: Callable[..., Any] | None = None,
    input_positions: jax.Array | None = None,
    options: Mapping[str, Any] | None = None,
) -> jax.Array:
    """`flash_attention` under the signature of `nnx.dot_product_attention` and `linen.dot_product_attention`.

    query: [*B, T, N, H]; key, value: [*B, S, K, H]; bias, mask: broadcastable to [*B, N, T, S]. A mask is bool, or
    numbers of which 0 means "not allowed", as Flax's own helpers make them, or a `pallas_flash.masks.Mask`.
    `deterministic` switches dropout off, as everywhere in Flax. `options`: further arguments of `flash_attention` (see
    `make_attention_fn`).

    Raises NotImplementedError for what flash attention cannot do: `module` (its weights never exist, so they cannot be
    sown), replaced products (`einsum_dot_general`, `qk_attn_weights_einsum`, `attn_weights_value_einsum`),
    `input_positions` (there is no rotary embedding in here), and dropout with `broadcast_dropout`. ValueError for
    dropout without `dropout_rng`.

        layer = linen.MultiHeadDotProductAttention(8, attention_fn=attention_fn)
    """
    _refuse(
        module=(module, "the attention weights are never formed, so sow_weights must be False"),
        einsum_dot_general=(einsum_dot_general, "the products are part of the operator"),
        qk_attn_weights_einsum=(qk_attn_weights_einsum, "the products are part of the operator"),
        attn_weights_value_einsum=(attn_weights_value_einsum, "the products are part of the operator"),
        input_positions=(input_positions, "positions are for rotary embeddings; rotate query and key beforehand"),
    )
    del force_fp32_for_softmax  # Honoured always: the softmax is in float32 whatever the inputs are.
    if deterministic or dropout_rate == 0:
        dropout_rate, dropout_rng = 0.0, None
    elif broadcast_dropout:
        raise NotImplementedError(
            "broadcast_dropout=True (one dropout mask for all batch entries and heads) cannot be honoured by flash"
            " attention: give the module broadcast_dropout=False"
        )
    elif dropout_rng is None:
        raise ValueError(f"dropout_rng must be given for {dropout_rate=} unless deterministic=True")
    if mask is not None and not isinstance(mask, Mask):
        mask = array_of("mask", mask, "a bool array or a pallas_flash.masks.Mask").astype(bool)
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    return flash_attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_key=dropout_rng,
        precision=precision,
        **(options or {}),
    )


def make_attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """An `attention_fn` with fixed arguments of `flash_attention`, such as `implementation`, `local_window_size`,
    `logits_soft_cap`, `scale`, `segment_ids` or `sinks`.

    Here `deterministic` is that of `flash_attention` (gradients that are equal to the bit).
    Raises ValueError for names that it does not have, that the module sets itself, or that would change the result, and
    for values that are wrong in every call.

        layer = nnx.MultiHeadAttention(8, 512, attention_fn=make_attention_fn(implementation="xla"), rngs=nnx.Rngs(0))
    """
    for name in options:
        if name not in inspect.signature(flash_attention).parameters:
            raise ValueError(f"{name} is not an argument of flash_attention")
        if name in _SET_BY_MODULE:
            raise ValueError(f"{name} is set by the Flax module, so it must not be an option of its attention_fn")
        if name in _CHANGE_RESULT:
            raise ValueError(f"{name} must not be an option: a Flax module takes the attention's output alone")
    x = jax.ShapeDtypeStruct((1, 1, 1), np.float32)
    explain(x, x, x, **{name: value for name, value in options.items() if name in _OF_ANY_SHAPE})
    return functools.partial(attention_fn, options=options)


def _refuse(**arguments: tuple[Any, str]) -> None:
    for name, (value, reason) in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} cannot be honoured by flash attention: {reason}")
