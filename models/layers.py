"""The parts of a block beside attention: normalisation, position, MLP."""

from __future__ import annotations

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
) -> nnx.LinearGeneral:
    """A projection without bias, float32 parameters, over as many trailing axes as `in_features` names."""
    axes = len(in_features) if isinstance(in_features, tuple) else 1
    return nnx.LinearGeneral(
        in_features,
        out_features,
        axis=tuple(range(-axes, 0)),
        use_bias=False,
        kernel_init=nnx.initializers.variance_scaling(init_scale, "fan_in", "truncated_normal"),
        dtype=config.compute_dtype,
        rngs=rngs,
    )


def residual_linear(
    config: TransformerConfig, in_features: int | tuple[int, ...], *, rngs: nnx.Rngs
) -> nnx.LinearGeneral:
    """A projection back into the residual stream: smaller at the start, so that the sum over 2 * num_layers of them has
    the size of one."""
    return linear(config, in_features, config.hidden_dim, rngs=rngs, init_scale=1 / (2 * config.num_layers))


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.gate = linear(config, config.hidden_dim, config.mlp_dim, rngs=rngs)
        self.up = linear(config, config.hidden_dim, config.mlp_dim, rngs=rngs)
        self.down = residual_linear(config, config.mlp_dim, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.silu(self.gate(x)) * self.up(x))
