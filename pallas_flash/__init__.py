"""Exact, IO-aware attention for JAX on NVIDIA GPUs."""

from pallas_flash import masks
from pallas_flash.api import explain, flash_attention, reference_attention
from pallas_flash.cache import Cache, append_to_cache, append_to_pages, quantise
from pallas_flash.combine import combine
from pallas_flash.decode import explain_decode, flash_decode, paged_flash_decode
from pallas_flash.rotary import Rotary, apply_rotary

__all__ = [
    "Cache",
    "Rotary",
    "append_to_cache",
    "append_to_pages",
    "apply_rotary",
    "combine",
    "explain",
    "explain_decode",
    "flash_attention",
    "flash_decode",
    "masks",
    "paged_flash_decode",
    "quantise",
    "reference_attention",
]
