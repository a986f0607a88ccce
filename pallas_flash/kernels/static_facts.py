"""What follows from a kernel's plan alone; the plans have these as properties."""

from __future__ import annotations

from typing import Protocol

from pallas_flash.spec import AttentionSpec, Shapes


class _Tiles(Protocol):
    @property
    def block_kv(self) -> int: ...


class _Plan(Protocol):
    """What all plans have."""

    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def shapes(self) -> Shapes: ...
    @property
    def config(self) -> _Tiles: ...
    @property
    def any_logits(self) -> bool: ...  # a bias or a score_mod may make them as large as float32 goes


def kv_len_if_cut(plan: _Plan) -> int | None:
    """The number of keys, if the last block of them is not full."""
    return plan.shapes.kv_len if plan.shapes.kv_len % plan.config.block_kv else None


def some_masked(plan: _Plan) -> bool:
    return bool(plan.spec.mask) or kv_len_if_cut(plan) is not None


def scaled_only(plan: _Plan) -> bool:
    """Whether nothing but a factor stands between q.k and the logits."""
    return not plan.any_logits and plan.spec.soft_cap is None


def derivative(plan: _Plan) -> bool:
    """Whether the logits have another derivative by scale * q.k than 1."""
    return plan.spec.soft_cap is not None or plan.spec.score_mod is not None
