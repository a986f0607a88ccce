"""What a decoding call is: its static facts (`DecodeSpec`) and its arrays (`DecodeOperands`)."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, Protocol

from pallas_flash.combine import Partial
from pallas_flash.spec import Array, Shapes


class DecodeOperands(NamedTuple):
    """Every array of a call; what is absent is None (or an empty tuple).

    Query row i of a sequence stands at position kv_length - q_length + i, and attends to the keys j of its window with
    j <= position and j < kv_length. Whatever stands behind the lengths, in unused pages and in their scales reaches
    nothing. A row with no key gives out 0 and lse -inf (with sinks: the sink).
    """

    q: Array  # [B, T, N, H], the new tokens
    k: Array  # [B, S, K, H], the cache, or pages [P, page_size, K, H]; in q's dtype, int8 or float8_e4m3fn
    v: Array  # [B, S, K, Hv], or pages [P, page_size, K, Hv]; in k's dtype
    kv_lengths: Array  # int32 [B], the new tokens included; any value: implementations clamp to [0, capacity]
    page_table: Array | None = None  # int32 [B, max_pages]; entries from ceil(length / page_size) on hold anything,
    #                                  those before may be out of range, too: implementations clamp to [0, P - 1]
    q_lengths: Array | None = None  # int32 [B] within [0, T]; None: T. Rows from there on: the caller overwrites them
    k_scale: Array | None = None  # float32 [B, S | 1, K], or [P, page_size | 1, K]: by token, or by sequence or page
    v_scale: Array | None = None  # likewise
    sinks: Array | None = None  # [N], one logit a head in the denominator; counted once, not once a split
    scale: Array | None = None  # float32 []; None where the scale is static (DecodeSpec.scale)
    score_mod: tuple[Array, ...] = ()  # arrays that score_mod captured

    @property
    def shapes(self) -> Shapes:
        """kv_len is the capacity of one sequence."""
        batch, q_len, num_q_heads, head_dim = self.q.shape
        _, rows, num_kv_heads, value_head_dim = self.v.shape
        capacity = rows if self.page_table is None else rows * self.page_table.shape[1]
        return Shapes(batch, q_len, capacity, num_q_heads, num_kv_heads, head_dim, value_head_dim)


@dataclasses.dataclass(frozen=True)
class DecodeSpec:
    """The static facts of a call besides the shapes of its operands.

    logits = soft_cap(score_mod(scale * q.k)).
    """

    scale: float | None  # None: operands.scale
    window: int | None = None  # keys from position - window on; None: no bound
    soft_cap: float | None = None
    score_mod: Any = None  # elementwise.Elementwise | None


class DecodeImplementation(Protocol):
    """A way of computing it: a module with these names."""

    NAME: str

    def unsupported(self, spec: DecodeSpec, operands: DecodeOperands) -> str | None:
        """Why this call cannot be computed here, in words; None if it can. Looks at shapes and dtypes only."""
        ...

    def decode(self, spec: DecodeSpec, operands: DecodeOperands) -> Partial:
        """out [B, T, N, Hv] in q's dtype and lse [B, T, N] in float32 (float64 for float64), over all keys."""
        ...
