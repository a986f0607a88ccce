"""Exact, IO-aware attention for JAX on NVIDIA GPUs."""

from pallas_flash import masks
from pallas_flash.api import explain, flash_attention, reference_attention
from pallas_flash.combine import combine

__all__ = ["combine", "explain", "flash_attention", "masks", "reference_attention"]
