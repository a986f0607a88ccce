"""Generation with a key-value cache: one pass over the prompts by flash_attention, then a token a step by flash_decode;
compiled once for all lengths."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from models.transformer import Transformer, require_in_vocabulary
from pallas_flash import Cache
from pallas_flash.checks import require, require_key
from pallas_flash.spec import array_of

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Sampling(NamedTuple):
    """How a token is drawn; None switches a part off, and temperature None means the most likely token."""

    temperature: jax.Array | float | None
    top_k: jax.Array | int | None
    top_p: jax.Array | float | None


def generate(
    model: Transformer,
    prompts: jax.Array | np.ndarray,
    prompt_lengths: jax.Array | np.ndarray,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: jax.Array | None = None,
    eos_id: int | None = None,
) -> jax.Array:
    """Continue each prompt by `max_new_tokens` tokens.

    prompts: int [B, T], padded on the right; prompt_lengths: int [B], each in 1 … T. Temperature 0 takes the most
    likely token; otherwise tokens are drawn with `key` from the `top_k` most likely ones, and of these from the
    smallest set whose probability reaches `top_p`. A row ends with its first `eos_id`, which fills the rest of it.
    Returns the new tokens alone, int32 [B, max_new_tokens]. Runs outside of jit; what it compiles depends on the
    shapes, on `max_new_tokens` and on which options are set, not on their values.

    Raises ValueError for arguments out of range.

        tokens = generate(model, prompts, lengths, max_new_tokens=32)
        tokens = generate(model, prompts, lengths, max_new_tokens=32, temperature=0.8, top_p=0.95, key=key)
    """
    prompts, lengths = _concrete("prompts", prompts), _concrete("prompt_lengths", prompt_lengths)
    vocab_size = model.config.vocab_size
    _check_prompts(prompts, lengths, vocab_size)
    sampling = _checked_sampling(temperature, top_k, top_p, vocab_size)
    if sampling.temperature is None:
        key = None
    else:
        require_key("key", key, f"one JAX random key to draw tokens at {temperature=}")
    max_new_tokens = _integer("max_new_tokens", max_new_tokens, "an integer, at least 1")
    require(max_new_tokens >= 1, "max_new_tokens", max_new_tokens, "an integer, at least 1")
    if eos_id is not None:
        wanted = f"None or an integer in 0 … {vocab_size - 1}"
        eos_id = _integer("eos_id", eos_id, wanted)
        require(0 <= eos_id < vocab_size, "eos_id", eos_id, wanted)
    prompts, lengths = prompts.astype(np.int32), lengths.astype(np.int32)
    return _generate(model, prompts, lengths, key, sampling, eos_id, max_new_tokens=max_new_tokens)


class _Loop(NamedTuple):
    """What changes from step to step."""

    step: jax.Array  # how many tokens have been drawn
    tokens: jax.Array  # int32 [B, max_new_tokens]
    done: jax.Array  # bool [B]
    logits: jax.Array  # float32 [B, vocab_size], of the token to draw next
    caches: list[Cache]


@functools.partial(jax.jit, static_argnames="max_new_tokens")
def _generate(
    model: Transformer,
    prompts: jax.Array,
    lengths: jax.Array,
    key: jax.Array | None,
    sampling: Sampling,
    eos_id: jax.Array | int | None,
    *,
    max_new_tokens: int,
) -> jax.Array:
    batch, prompt_len = prompts.shape

    def draw(loop: _Loop) -> _Loop:
        step_key = None if key is None else jax.random.fold_in(key, loop.step)
        token = sample(loop.logits, step_key, sampling)
        done = loop.done
        if eos_id is not None:
            token = jnp.where(done, eos_id, token)
            done = done | (token == eos_id)
        tokens = jax.lax.dynamic_update_slice_in_dim(loop.tokens, token[:, None], loop.step, axis=1)
        return loop._replace(step=loop.step + 1, tokens=tokens, done=done)

    def advance(loop: _Loop) -> _Loop:
        last = jax.lax.dynamic_slice_in_dim(loop.tokens, loop.step - 1, 1, axis=1)
        one = jnp.ones_like(lengths)
        logits, caches = model.extend(last, loop.caches, offset=lengths + loop.step - 1, lengths=one)
        return draw(loop._replace(logits=logits, caches=caches))

    # The last token that is drawn is never fed back, so the caches need no room for it.
    caches = model.empty_caches(batch, prompt_len + max_new_tokens - 1)
    logits, caches = model.extend(prompts, caches, offset=0, lengths=lengths)
    tokens = jnp.full((batch, max_new_tokens), 0 if eos_id is None else eos_id, jnp.int32)
    loop = draw(_Loop(jnp.int32(0), tokens, jnp.zeros(batch, bool), logits, caches))
    loop = jax.lax.while_loop(lambda loop: (loop.step < max_new_tokens) & ~loop.done.all(), advance, loop)
    return loop.tokens


def sample(logits: jax.Array, key: jax.Array | None, sampling: Sampling) -> jax.Array:
    """Draw one token a row: float32 [B, vocab_size] -> int32 [B]. A key is needed unless the temperature is None."""
    if sampling.temperature is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The largest becomes 0: at a low temperature several would overflow to infinity, and be alike.
    logits = (logits - logits.max(axis=-1, keepdims=True)) / sampling.temperature
    descending = -jnp.sort(-logits, axis=-1)
    if sampling.top_k is not None:
        rank = jnp.arange(logits.shape[-1])
        descending = jnp.where(rank < sampling.top_k, descending, -jnp.inf)
    if sampling.top_p is not None:
        probabilities = jax.nn.softmax(descending)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # 0 for the most likely token, which always stays
        descending = jnp.where(before < sampling.top_p, descending, -jnp.inf)
    if sampling.top_k is not None or sampling.top_p is not None:
        smallest_kept = jnp.min(jnp.where(jnp.isfinite(descending), descending, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= smallest_kept, logits, -jnp.inf)
    assert key is not None
    return jax.random.categorical(key, logits).astype(jnp.int32)


def _concrete(name: str, value: Any) -> np.ndarray:
    """As NumPy's array: what is checked are values."""
    if isinstance(value, Tracer):
        raise ValueError(f"{name} must not be traced: generate runs outside of jit, and compiles by itself")
    return np.asarray(array_of(name, value, "integers"))


def _integer(name: str, value: Any, wanted: str) -> int:
    array = _concrete(name, value)
    require(array.shape == () and np.issubdtype(array.dtype, np.integer), name, value, wanted)
    return int(array)


def _number(name: str, value: Any, wanted: str) -> float:
    array = _concrete(name, value)
    real = np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)
    require(array.shape == () and real, name, value, wanted)
    return float(array)


def _check_prompts(prompts: np.ndarray, lengths: np.ndarray, vocab_size: int) -> None:
    for name, array, rank in (("prompts", prompts, 2), ("prompt_lengths", lengths, 1)):
        if array.ndim != rank or not np.issubdtype(array.dtype, np.integer):
            raise ValueError(f"{name} must be integers with {rank} axes, not {array.dtype}{list(array.shape)}")
    if len(lengths) != len(prompts):
        raise ValueError(
            f"prompt_lengths must have an entry for each of the {len(prompts)} prompts, not {len(lengths)}"
        )
    if lengths.size and not (lengths.min() >= 1 and lengths.max() <= prompts.shape[1]):
        raise ValueError(f"prompt_lengths must be in 1 … {prompts.shape[1]}, not {lengths}")
    require_in_vocabulary("prompts", prompts, lengths, vocab_size)


def _checked_sampling(temperature: Any, top_k: Any, top_p: Any, vocab_size: int) -> Sampling:
    wanted = f"0, or a number from {_SMALLEST:.2g} to {_LARGEST:.2g}"
    number = _number("temperature", temperature, wanted)
    require(number == 0 or _SMALLEST <= number <= _LARGEST, "temperature", temperature, wanted)
    if top_k is not None:
        k = _integer("top_k", top_k, "None or an integer, at least 1")
        require(k >= 1, "top_k", top_k, "None or an integer, at least 1")
        top_k = min(k, vocab_size)
    if top_p is not None:
        p = _number("top_p", top_p, "None or a number above 0 and at most 1")
        require(0 < p <= 1, "top_p", top_p, "None or a number above 0 and at most 1")
        top_p = p
    if number > 0:
        return Sampling(number, top_k, top_p)
    if not (top_k is None and top_p is None):
        raise ValueError(f"temperature must be above 0 for {top_k=} and {top_p=} to matter")
    return Sampling(None, None, None)
