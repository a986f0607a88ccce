"""Causal self-attention with rotary positions and grouped query heads, over fresh tokens or over a key-value cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from models.config import CUDNN, TransformerConfig
from models.layers import linear, residual_linear, rotary
from pallas_flash import Cache, append_to_cache, flash_attention, flash_decode
from pallas_flash.decode_validation import MAX_NEW_TOKENS
from pallas_flash.distributed import ring_attention, to_zigzag


class Rows(NamedTuple):
    """What is known about the rows of tokens [B, T] that a model is called with."""

    offset: int | jax.Array = 0  # position of the first token, one for all rows or int [B]
    lengths: jax.Array | None = None  # int [B]: how many of the T tokens are real; the padding is on the right
    segment_ids: jax.Array | None = None  # int [B, T]: tokens see only tokens of their own segment

    def positions(self, num_tokens: int) -> jax.Array:
        """int [T], or [B, T] where each row has its own offset."""
        return jnp.asarray(self.offset)[..., None] + jnp.arange(num_tokens)

    def cached_lengths(self, num_tokens: int) -> jax.Array:
        """How many positions of each row a cache holds with these tokens: int [B], or one for all rows."""
        return jnp.asarray(self.offset + (num_tokens if self.lengths is None else self.lengths))


def empty_cache(config: TransformerConfig, batch: int, capacity: int) -> Cache:
    """The keys and values of one layer, allocated once: [B, capacity, K, H]; row j holds position j."""
    shape = (batch, capacity, config.num_kv_heads, config.head_dim)
    return Cache(jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype))


class Attention(nnx.Module):
    """softmax(q k^T) v with `num_q_heads / num_kv_heads` query heads to each head of keys and values."""

    def __init__(self, config: TransformerConfig, window: int | None, *, rngs: nnx.Rngs):
        self.config = config
        self.window = window
        q_heads, kv_heads = (config.num_q_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
        self.query = linear(config, config.hidden_dim, q_heads, rngs=rngs)
        self.key = linear(config, config.hidden_dim, kv_heads, rngs=rngs)
        self.value = linear(config, config.hidden_dim, kv_heads, rngs=rngs)
        self.out = residual_linear(config, q_heads, rngs=rngs)
        # One logit a head that takes part in the denominator only: a place for attention that goes nowhere.
        self.sinks = nnx.Param(jnp.zeros(config.num_q_heads)) if config.use_sinks else None

    def __call__(self, x: jax.Array, rows: Rows, cache: Cache | None) -> tuple[jax.Array, Cache | None]:
        """x: [B, T, hidden_dim]. With a cache, the tokens also attend to what it holds before `rows.offset`."""
        devices = 1 if cache is not None else ring_devices(self.config)
        positions = rows.positions(x.shape[1])
        if devices > 1:
            positions = to_zigzag(positions, devices, axis=-1)
        query = rotary(self.query(x), positions, self.config.rope_theta)
        key = rotary(self.key(x), positions, self.config.rope_theta)
        value = self.value(x)
        if cache is None:
            return self.out(self._attend(query, key, value, rows, devices)), None
        lengths = rows.cached_lengths(x.shape[1])
        cache = append_to_cache(cache, key, value, lengths, query_lengths=rows.lengths)
        if isinstance(rows.offset, int) and rows.offset == 0:  # the cache holds nothing else
            out = self._attend(query, key, value, rows)
        elif x.shape[1] <= MAX_NEW_TOKENS:
            out = self._decode(query, cache, lengths, rows)
        else:
            out = self._attend(query, cache.key, cache.value, rows)
        return self.out(out), cache

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, rows: Rows, devices: int = 1) -> jax.Array:
        static = {"is_causal": True, "implementation": self.config.attention, **self._options()}
        arrays = {
            "query_offset": rows.offset,
            "query_seq_lengths": rows.lengths,
            "key_value_seq_lengths": None if rows.lengths is None else rows.offset + rows.lengths,
            "segment_ids": rows.segment_ids,
            "sinks": self._sinks(),
        }
        if self.config.attention == CUDNN:
            return attend_by_cudnn(self.config, static, arrays, query, key, value)
        if devices > 1:
            return attend_in_ring(self.config, static, arrays, query, key, value)
        return flash_attention(query, key, value, **static, **arrays)

    def _decode(self, query: jax.Array, cache: Cache, lengths: jax.Array, rows: Rows) -> jax.Array:
        return flash_decode(
            query,
            cache.key,
            cache.value,
            lengths,
            query_lengths=rows.lengths,
            sinks=self._sinks(),
            implementation=self.config.decode,
            **self._options(),
        )

    def _sinks(self) -> jax.Array | None:
        return None if self.sinks is None else self.sinks[...]

    def _options(self) -> dict[str, Any]:
        return {
            "local_window_size": None if self.window is None else (self.window - 1, 0),
            "logits_soft_cap": self.config.logits_soft_cap,
        }


def attend_by_cudnn(
    config: TransformerConfig, static: dict[str, Any], arrays: dict[str, Any], *tensors: jax.Array
) -> jax.Array:
    """Whole sequences by `jax.nn`; NotImplementedError for what only `flash_attention` is given here."""
    options = {name: value for name, value in (static | arrays).items() if value is not None}
    offset = options.pop("query_offset")
    refused = sorted(options.keys() - {"is_causal", "implementation", "local_window_size"})
    refused += ["query_offset"] if not (isinstance(offset, int) and offset == 0) else []
    refused += ["context_parallel"] if ring_devices(config) > 1 else []
    if refused:
        raise NotImplementedError(f"attention={CUDNN!r} takes whole sequences, without {', '.join(refused)}")
    return jax.nn.dot_product_attention(*tensors, **options)


def ring_devices(config: TransformerConfig) -> int:
    """How many devices share a sequence, on the mesh in use."""
    mesh = jax.sharding.get_abstract_mesh()
    axis = config.context_parallel and config.context_parallel[1]
    return mesh.shape[axis] if axis in mesh.axis_names else 1


def attend_in_ring(
    config: TransformerConfig, static: dict[str, Any], arrays: dict[str, Any], *tensors: jax.Array
) -> jax.Array:
    """Sequences that are sharded over a mesh axis, in zigzag order."""
    batch, context = config.context_parallel or ("", "")
    rows, lengths = PartitionSpec(batch, context), PartitionSpec(batch)
    specs = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "segment_ids": rows}
    offset = arrays.pop("query_offset")  # without a cache a number
    arrays = {name: array for name, array in arrays.items() if array is not None}

    def attend(tensors: Any, arrays: Any) -> jax.Array:
        return ring_attention(*tensors, axis_name=context, order="zigzag", query_offset=offset, **static, **arrays)

    in_specs = (rows, {name: specs.get(name, PartitionSpec()) for name in arrays})
    return jax.shard_map(attend, in_specs=in_specs, out_specs=rows)(tensors, arrays)
