"""The kernels whose tiles are tuned, and what is tried for each."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import dispatch
from pallas_flash.kernels import sm80, sm90
from pallas_flash.kernels.sm80 import backward_pass as portable_backward
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.spec import AttentionSpec, Cotangents, Operands
from pallas_flash.tuning.search import Kernel


def obstacle(kernel: Kernel) -> str | None:
    """Why a kernel cannot be tuned here."""
    capability = dispatch.compute_capability()
    if capability is None:
        return "JAX sees no NVIDIA GPU"
    name = kernel.table.split("_")[0]
    return next(dispatch.device_obstacle(entry, capability) for entry in dispatch.TABLE if entry.name == name)


def _forward(config: Any, spec: AttentionSpec, operands: Operands) -> Any:
    return lambda operands: sm90.forward(spec, operands, config=config).residuals


def _start_backward(spec: AttentionSpec, operands: Operands) -> Any:
    return backward_pass.tuned_config(spec, operands, sm90.mask_class(spec, operands))


def _backward(config: Any, spec: AttentionSpec, operands: Operands) -> Any:
    """The gradients alone: the forward pass runs once, outside. Its output stands for the output's cotangent."""
    residuals = jax.jit(lambda operands: sm90.forward(spec, operands).residuals)(operands)
    cotangents = Cotangents(residuals.out, jnp.zeros_like(residuals.m))
    return lambda operands: backward_pass.backward(spec, operands, residuals, cotangents, config=config)


def _portable_forward(config: Any, spec: AttentionSpec, operands: Operands) -> Any:
    return lambda operands: sm80.forward(spec, operands, config=config).residuals


def _start_portable_backward(part: str) -> Any:
    """The tiles of one of the two kernels of a call: the field of `Configs` of this name."""

    def start(spec: AttentionSpec, operands: Operands) -> Any:
        configs = portable_backward.tuned_configs(spec, operands)
        return None if configs is None else getattr(configs, part)

    return start


def _portable_backward(part: str) -> Any:
    """All gradients, with these tiles of one kernel and those in use of the other."""

    def run(config: Any, spec: AttentionSpec, operands: Operands) -> Any:
        residuals = jax.jit(lambda operands: sm80.forward(spec, operands).residuals)(operands)
        cotangents = Cotangents(residuals.out, jnp.zeros_like(residuals.m))
        tuned = portable_backward.tuned_configs(spec, operands)
        assert tuned is not None, "the tiles in use are where a search starts"
        configs = tuned._replace(**{part: config})
        if part == "queries":  # which runs only where its sums are not those of the other kernel
            configs = configs._replace(keys=dataclasses.replace(tuned.keys, fused=False))
        return lambda operands: portable_backward.backward(spec, operands, residuals, cotangents, configs=configs)

    return run


TUNED = (
    Kernel(
        table="sm90_forward",
        choices={
            "block_kv": (64, 80, 96, 112, 128, 144, 160, 176),
            "compute_wgs": (2, 3),
            "rescale_threshold": (0.0, 8.0),
            "take_turns": (True, False),
            "own_bodies": (False, True),
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
            "late_dq": (False, True),
            "take_turns": (False, True),
            "own_outputs": (False, True),
        },
        start=_start_backward,
        fits=backward_pass.fits,
        run=_backward,
    ),
    Kernel(
        table="sm80_forward",
        choices={
            "block_q": (64, 128),
            "block_kv": (32, 64, 96, 128),
            "num_stages": (1, 2, 3),
            "q_in_registers": (False, True),
            "warpgroups": (1, 2),
            "rescale_threshold": (0.0, 8.0),
            "head_group": (2, 4, 8, 16),
        },
        start=sm80.forward_config,
        fits=sm80.forward_fits,
        run=_portable_forward,
    ),
    Kernel(
        table="sm80_backward_queries",
        choices={
            "block_q": (64, 128),
            "block_kv": (32, 64, 96, 128),
            "num_stages": (1, 2),
            "head_group": (1, 4, 8),
        },
        start=_start_portable_backward("queries"),
        fits=lambda config, _, operands: portable_backward.fits(config, operands),
        run=_portable_backward("queries"),
    ),
    Kernel(
        table="sm80_backward_keys",
        choices={
            "block_q": (32, 64, 96, 128),
            "block_kv": (64, 128),
            "part_q": (None, 32, 64),
            "fused": (False, True),
            "warpgroups": (1, 2),
            "num_stages": (1, 2),
            "head_group": (1, 4, 8),
        },
        start=_start_portable_backward("keys"),
        fits=lambda config, _, operands: portable_backward.fits(config, operands),
        run=_portable_backward("keys"),
    ),
)
