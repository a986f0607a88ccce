"""The kernels whose tiles are tuned, and what is tried for each."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import dispatch
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.spec import AttentionSpec, Cotangents, Operands
from pallas_flash.tuning.search import Kernel


def obstacle() -> str | None:
    """Why nothing can be tuned here."""
    capability = dispatch.compute_capability()
    if capability is None:
        return "JAX sees no NVIDIA GPU"
    if capability[0] != 9:
        return f"no kernel here has tiles to choose on compute capability {capability[0]}.{capability[1]}"
    return None


def _forward(config: Any, spec: AttentionSpec, operands: Operands) -> Any:
    return lambda operands: sm90.forward(spec, operands, config=config).residuals


def _start_backward(spec: AttentionSpec, operands: Operands) -> Any:
    return backward_pass.tuned_config(spec, operands, sm90.mask_class(spec, operands))


def _backward(config: Any, spec: AttentionSpec, operands: Operands) -> Any:
    """The gradients alone: the forward pass runs once, outside. Its output stands for the output's cotangent."""
    residuals = jax.jit(lambda operands: sm90.forward(spec, operands).residuals)(operands)
    cotangents = Cotangents(residuals.out, jnp.zeros_like(residuals.m))
    return lambda operands: backward_pass.backward(spec, operands, residuals, cotangents, config=config)


TUNED = (
    Kernel(
        table="sm90_forward",
        choices={
            "block_kv": (64, 80, 96, 112, 128, 144, 160, 176),
            "compute_wgs": (2, 3),
            "rescale_threshold": (0.0, 8.0),
            "take_turns": (True, False),
            "out_has_own_buffer": (True, False),
            "head_group": (2, 4, 8, 16),
            "num_stages": (2, 3),
        },
        start=sm90.forward_config,
        fits=sm90.forward_fits,
        run=_forward,
    ),
    Kernel(
        table="sm90_backward",
        choices={
            "block_q": (64, 128),
            "block_kv": (64, 128),
            "num_ctas": (None, 132),
            "head_group": (1, 2, 4, 8, 16),
            "num_stages": (1, 2),
            "dout_stages": (1, 2),
        },
        start=_start_backward,
        fits=backward_pass.fits,
        run=_backward,
    ),
)
