"""Every NVIDIA GPU since Ampere (compute capability 8.0): mma.sync, cp.async, one or two warpgroups a CTA.

Nothing here needs a newer GPU, and all of it runs on newer ones. Gradients come from one kernel, which adds dQ up in
device memory, where the tiles say so (`KeysConfig.fused`). With deterministic=True or a bias, or too little shared
memory, they come from two, one for dQ and one for dK and dV: each sum has a fixed order, so that they are bit-equal on
repeats, but for the gradient of a bias that heads or batch elements share. They come from `xla` where
`backward_pass.obstacle` says why: mainly with a score_mod that captures floating arrays.

Features, and what is refused, are those of sm90. Tiles that a mask hides as a whole are never read. NaN and Inf in
values that are hidden within a tile reach no query: see kernels/junk.py.

Importing this module does not import Pallas; `forward` does.
"""

from __future__ import annotations

import functools
from typing import Any

from pallas_flash import xla
from pallas_flash.kernels import support
from pallas_flash.kernels.sizes import padded_head_dims
from pallas_flash.kernels.sm80 import backward_pass
from pallas_flash.kernels.sm80.config import CLEANED_ROWS, COLUMN_UNIT, ForwardConfig, max_shared_bytes
from pallas_flash.spec import AttentionSpec, Cotangents, Forward, Gradients, Operands, Residuals
from pallas_flash.tuning import cache

NAME = "sm80"


def unsupported(spec: AttentionSpec, operands: Operands) -> str | None:
    if (reason := support.refused(spec, operands)) is not None:
        return reason
    if forward_config(spec, operands) is None:
        shapes = operands.shapes
        return f"no tiles for head dims {shapes.head_dim} and {shapes.value_head_dim}"
    return None


def forward(
    spec: AttentionSpec, operands: Operands, *, config: ForwardConfig | None = None, interpret: Any = None
) -> Forward:
    """config: other tiles than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm80.forward_kernel import run  # Pallas loads when it is needed

    config = config or forward_config(spec, operands)
    assert config is not None, "unsupported() refuses what has no tiles"
    found = run(spec, support.differentiated_once(operands, NAME), config, interpret=interpret)
    return support.varying(found, operands)


def backward(spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents) -> Gradients:
    """By the kernels; what they cannot compute, as `xla` does."""
    operands, residuals, cotangents = support.differentiated_once((operands, residuals, cotangents), NAME)
    if backward_pass.obstacle(spec, operands) is not None:
        return xla.backward(spec, operands, residuals, cotangents)
    configs = backward_pass.tuned_configs(spec, operands)
    assert configs is not None, "obstacle() names what has no tiles"
    call = functools.partial(backward_pass.backward, configs=configs)
    return support.varying(call(spec, operands, residuals, cotangents), operands)


def forward_config(spec: AttentionSpec, operands: Operands) -> ForwardConfig | None:
    """The tuned entry of the nearest case that fits the GPU that JAX sees; without one, the smallest GPU."""
    shapes, kind = operands.shapes, support.mask_class(spec, operands)
    case = cache.Case(shapes.head_dim, shapes.value_head_dim, operands.q.dtype.name, kind)
    configs = (ForwardConfig(**entry) for entry in cache.nearest("sm80_forward", case))
    return next((config for config in configs if forward_fits(config, spec, operands)), None)


def forward_fits(config: ForwardConfig, spec: AttentionSpec, operands: Operands) -> bool:
    """Whether the kernel can run a call with these tiles, and has queries for all of its warpgroups."""
    hides = bool(spec.mask) or operands.bias is not None
    dims = padded_head_dims(operands.shapes, COLUMN_UNIT)
    needed = config.shared_bytes(dims, operands.q.dtype.itemsize, hides_values=hides)
    cleanable = not hides or (config.block_kv >= CLEANED_ROWS and config.warpgroups == 1)
    busy = config.warpgroups == 1 or operands.shapes.q_len > config.block_q
    return cleanable and busy and needed <= max_shared_bytes(support.compute_capability())
