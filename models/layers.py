"""The parts of a block beside attention: normalisation, position, MLP."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from models.config import TransformerConfig
from pallas_flash import Rotary, apply_rotary


def rms_norm(config: TransformerConfig, *, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """x / rms(x) * weight over the hidden axis (https://arxiv.org/abs/1910.07467), in float32 inside."""
    return nnx.RMSNorm(config.hidden_dim, epsilon=config.norm_eps, dtype=config.compute_dtype, rngs=rngs)


def rotary(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Rotate each pair (x[i], x[i + H/2]) by the angle position * theta^(-2i/H) (https://arxiv.org/abs/2104.09864).

    x: [B, T, N, H]; positions: int [T] or [B, T]. The scores of rotated queries and keys depend on distances alone.
    """
    return apply_rotary(x, positions, Rotary(theta))


def linear(
    config: TransformerConfig,
    in_features: int | tuple[int, ...],
    out_features: int | tuple[int, ...],
    *,
    rngs: nnx.Rngs,
    init_scale: float = 1.0,
    embed_axis: int = 0,
) -> nnx.LinearGeneral:
    """A projection without bias, float32 parameters, over as many trailing axes as `in_features` names.

    embed_axis: which axis of the weight is the width of the residual stream, for `sharding`.
    """
    axes, out_axes = (len(x) if isinstance(x, tuple) else 1 for x in (in_features, out_features))
    return nnx.LinearGeneral(
        in_features,
        out_features,
        axis=tuple(range(-axes, 0)),
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(init_scale, "fan_in", "truncated_normal"),
        dtype=config.compute_dtype,
        kernel_metadata=sharding(axes + out_axes, embed_axis),
        rngs=rngs,
    )


def sharding(ndim: int, embed_axis: int) -> dict[str, Any]:
    """The sharding metadata of a weight: its axis along the residual stream is named "embed". What that is on a mesh is
    for the one who places the parameters to say (`nnx.get_partition_spec`); here nothing is placed."""
    names = [None] * ndim
    names[embed_axis] = "embed"
    return {"out_sharding": tuple(names), "eager_sharding": False}


def residual_linear(
    config: TransformerConfig, in_features: int | tuple[int, ...], *, rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    """A projection back into the residual stream: smaller at the start, so that the sum over 2 * num_layers of them has
    the size of one."""
    scale = 1 / (2 * config.num_layers)
    return linear(config, in_features, config.hidden_dim, rngs=rngs, init_scale=scale, embed_axis=-1)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config, config.hidden_dim, config.mlp_dim, rngs=rngs)
        self.up = linear(config, config.hidden_dim, config.mlp_dim, rngs=rngs)
        self.down = residual_linear(config, config.mlp_dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))
