"""The decoder-only transformer: embedding, blocks of attention and MLP, logits."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from models.attention import Attention, Rows, empty_cache
from models.config import TransformerConfig
from models.layers import SwiGLU, rms_norm, sharding
from pallas_flash import Cache
from pallas_flash.autodiff import CHECKPOINT_NAMES
from pallas_flash.checks import checked_array, require
from pallas_flash.spec import array_of


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TransformerConfig, layer: int, *, rngs: nnx.Rngs):
        self.attention_norm = rms_norm(config, rngs=rngs)
        self.attention = Attention(config, config.window(layer), rngs=rngs)
        self.mlp_norm = rms_norm(config, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array, rows: Rows, cache: Cache | None = None) -> tuple[jax.Array, Cache | None]:
        attended, cache = self.attention(self.attention_norm(x), rows, cache)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


# The backward pass recomputes a block from its input, but the attention's output and softmax statistics are kept: they
# are small (O(T)), and its forward pass is the part that is dear to run again (O(T^2)).
@functools.partial(nnx.remat, policy=jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES))
def remat_block(block: Block, x: jax.Array, lengths: jax.Array | None, segment_ids: jax.Array | None) -> jax.Array:
    return block(x, Rows(lengths=lengths, segment_ids=segment_ids))[0]


def checked_tokens(tokens: Any, lengths: Any, config: TransformerConfig) -> jax.Array:
    """int [B, T], of which the first `lengths` [B] of each row, or all, are in the vocabulary, as far as is known."""
    wanted = "integers [B, T]"
    array = array_of("tokens", tokens, wanted)  # not yet cast by JAX
    checked = checked_array("tokens", tokens, jnp.integer, wanted)
    require(checked.ndim == 2, "tokens", tokens, wanted)
    selects = lengths is None
    if not selects:  # in zigzag order, which are the first ones is not seen here
        selects = config.context_parallel is None and _is_known(lengths) and np.shape(lengths) == array.shape[:1]
    if selects and _is_known(array):
        require_in_vocabulary("tokens", np.asarray(array), lengths, config.vocab_size)
    return checked


def _is_known(value: Any) -> bool:
    """Whether the values are there, and in this process."""
    return not isinstance(value, Tracer) and getattr(value, "is_fully_addressable", True)


def require_in_vocabulary(name: str, tokens: np.ndarray, lengths: Any, vocab_size: int) -> None:
    """ValueError unless the first `lengths` tokens of each row, or all, are in 0 … vocab_size - 1."""
    real = tokens if lengths is None else tokens[np.arange(tokens.shape[1]) < np.asarray(lengths)[:, None]]
    if real.size and not (real.min() >= 0 and real.max() < vocab_size):
        raise ValueError(f"{name} must be in 0 … {vocab_size - 1}, not {real.min()} … {real.max()}")


class Transformer(nnx.Module):
    """A causal language model with float32 parameters that computes in `config.compute_dtype`.

    model = Transformer(PRESETS["tiny"], rngs=nnx.Rngs(0))
    logits = model(tokens)  # int32 [B, T] -> float32 [B, T, vocab_size]
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(
            nnx.Embed,
            config.vocab_size,
            config.hidden_dim,
            dtype=config.compute_dtype,
            embedding_metadata=sharding(2, embed_axis=1),
        )
        self.embedding = embed(rngs=rngs)
        self.blocks = nnx.List([Block(config, layer, rngs=rngs) for layer in range(config.num_layers)])
        self.final_norm = rms_norm(config, rngs=rngs)
        self.unembedding = None if config.tie_embeddings else embed(rngs=rngs)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, lengths: jax.Array | None = None
    ) -> jax.Array:
        """Logits of the next token at every position.

        tokens: int [B, T]; segment_ids: int [B, T], tokens of different segments do not see each other; lengths:
        int [B], only the first ones of each row are real (what the others give is not meant to be used).
        Returns float32 [B, T, vocab_size].

        Raises ValueError for tokens that are not in 0 … vocab_size - 1, where their values are known. Under jit they
        are not: there a token beyond the vocabulary makes NaN of the logits that it has a part in, and -1 is the last.
        """
        x = self._embed(tokens, lengths)
        for block in self.blocks:
            if self.config.remat:
                x = remat_block(block, x, lengths, segment_ids)
            else:
                x, _ = block(x, Rows(lengths=lengths, segment_ids=segment_ids))
        return self._logits(x)

    def extend(
        self, tokens: jax.Array, caches: list[Cache], *, offset: int | jax.Array, lengths: jax.Array
    ) -> tuple[jax.Array, list[Cache]]:
        """Append tokens to sequences whose first `offset` tokens are in the caches, one a layer.

        tokens: int [B, T], of which the first `lengths` [B] of each row are real (at least one).
        Returns the logits after the last real token, float32 [B, vocab_size], and the caches. Raises as a call does.
        """
        x = self._embed(tokens, lengths)
        rows, extended = Rows(offset=offset, lengths=lengths), []
        for block, cache in zip(self.blocks, caches, strict=True):
            x, cache = block(x, rows, cache)
            extended.append(cast(Cache, cache))
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return self._logits(last)[:, 0], extended

    def empty_caches(self, batch: int, capacity: int) -> list[Cache]:
        """A cache for each layer that holds `capacity` positions."""
        return [empty_cache(self.config, batch, capacity) for _ in self.blocks]

    def num_parameters(self) -> int:
        """How many weights there are; tied embeddings count once."""
        return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))

    def _embed(self, tokens: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
        tokens = checked_tokens(tokens, lengths, self.config)
        # Rows of the table have length about 1, which suits the logits; the residual stream wants entries of size 1.
        return self.embedding(tokens) * math.sqrt(self.config.hidden_dim)

    def _logits(self, x: jax.Array) -> jax.Array:
        table = (self.unembedding or self.embedding).embedding[...].astype(x.dtype)
        return jnp.einsum("bth,vh->btv", self.final_norm(x), table, preferred_element_type=jnp.float32)
