"""The Hopper backward pass: which calls it takes, with which tiles. Importing this module does not import Pallas."""

from __future__ import annotations

from typing import Any

from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.spec import AttentionSpec, Cotangents, Gradients, Operands, Residuals


def backward(
    spec: AttentionSpec,
    operands: Operands,
    residuals: Residuals,
    cotangents: Cotangents,
    *,
    config: BackwardConfig | None = None,
    interpret: Any = None,
) -> Gradients:
    """config: other tiles than the tuned ones. interpret: `plgpu.InterpretGPUParams`, to run on a CPU, interpreted."""
    from pallas_flash.kernels.sm90.backward_kernel import run  # Pallas loads when it is needed

    config = config or BackwardConfig()
    return run(spec, operands, residuals, cotangents, config, interpret=interpret)
