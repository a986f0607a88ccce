"""The dropout mask: a hash of (key, batch, head, query position, key position), the same in every implementation, for
any tile sizes, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_flash.spec import Array, AttentionSpec, Index

GOLDEN = np.uint32(0x9E3779B9)


def mix(x: Array) -> Array:
    """A bijection of uint32 in which every input bit flips every output bit with probability close to one half (the
    constants of Chris Wellons' `lowbias32`)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def keep(key: tuple[Array, Array], index: Index, rate: float) -> Array:
    """Which pairs of a tile survive. key: two uint32 scalars. Only the last `mix` is computed for each pair."""
    places = (index.batch, index.head, index.q_pos, index.kv_pos)
    batch, head, q_pos, kv_pos = (jnp.asarray(x).astype(jnp.uint32) for x in places)
    row = mix(mix(mix(key[0] ^ batch) ^ key[1] ^ (head * GOLDEN)) ^ q_pos)
    bits = mix(row ^ (kv_pos * GOLDEN))
    return bits >= np.uint32(min(round(rate * 2**32), 2**32 - 1))


def scale_kept(spec: AttentionSpec, key: Array | None, index: Index, values: Array) -> Array:
    """values / (1 - rate) where kept, 0 elsewhere; unchanged without dropout."""
    if key is None:
        return values
    return jnp.where(keep((key[0], key[1]), index, spec.dropout_rate), values / (1 - spec.dropout_rate), 0)


def key_words(key: Array) -> Array:
    """Two uint32 words from a JAX random key, typed or raw, of any kind."""
    return jax.random.bits(key, (2,), jnp.uint32)
