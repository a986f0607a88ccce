"""The kernels whose tiles are tuned, and what is tried for each."""

from __future__ import annotations

from typing import Any

from pallas_flash import dispatch
from pallas_flash.kernels import sm90
from pallas_flash.spec import AttentionSpec, Operands
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
)
