"""Our kernels with tiles other than the tuned ones, as implementations beside the rest: what the size of a tile costs
in time and in bytes of device memory."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

from pallas_flash import autodiff, validation
from pallas_flash.benchmarks.cases import Packing, Workload
from pallas_flash.benchmarks.peers import Attend, Peer
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.spec import Array, AttentionSpec, Cotangents, Forward, Gradients, Operands, Residuals

# Queries times keys. A forward warpgroup has 64 queries; each CTA holds one tile of queries, or (backward) of keys.
TILES = {
    "forward": tuple(itertools.product((64, 128, 192), (64, 96, 128, 160, 192, 256))),
    "backward": ((64, 64), (64, 128), (128, 128)),
}


@dataclasses.dataclass(frozen=True)
class Tiled:
    """`sm90` with one tile forced in one pass, an `Implementation`."""

    passed: str
    tile: tuple[int, int]  # queries, keys

    @property
    def NAME(self) -> str:
        return "sm90 {} {} x {}".format(self.passed, *self.tile)

    def unsupported(self, spec: AttentionSpec, operands: Operands) -> str | None:
        if (reason := sm90.unsupported(spec, operands)) is not None:
            return reason
        if self.passed == "forward":
            fits = sm90.forward_fits(self._forward_config(spec, operands), spec, operands)
        else:
            fits = backward_pass.fits(self._backward_config(spec, operands), spec, operands)
        return None if fits else "this tile needs more shared memory or registers than there are"

    def _forward_config(self, spec: AttentionSpec, operands: Operands) -> Any:
        tuned = sm90.forward_config(spec, operands)
        assert tuned is not None, "sm90 supports the call"
        tile_q, block_kv = self.tile
        return dataclasses.replace(tuned, compute_wgs=tile_q // tuned.block_q, block_kv=block_kv, num_stages=2)

    def _backward_config(self, spec: AttentionSpec, operands: Operands) -> Any:
        tuned = backward_pass.tuned_config(spec, operands, sm90.mask_class(spec, operands))
        assert tuned is not None, "sm90 has tiles for the head dims of the workloads"
        block_q, block_kv = self.tile
        if self.tile != (tuned.block_q, tuned.block_kv):  # what the tuned one does beside its tile may not fit others
            tuned = dataclasses.replace(tuned, own_outputs=False, late_dq=False, take_turns=False)
        return dataclasses.replace(tuned, block_q=block_q, block_kv=block_kv)

    def forward(self, spec: AttentionSpec, operands: Operands) -> Forward:
        config = self._forward_config(spec, operands) if self.passed == "forward" else None
        return sm90.forward(spec, operands, config=config)

    def backward(
        self, spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents
    ) -> Gradients:
        if self.passed == "forward":
            return sm90.backward(spec, operands, residuals, cotangents)
        config = self._backward_config(spec, operands)
        return backward_pass.backward(spec, operands, residuals, cotangents, config=config)


def peers(passed: str) -> tuple[Peer, ...]:
    """One implementation for each tile of a pass."""
    tiled = (Tiled(passed, tile) for tile in TILES[passed])
    return tuple(Peer(each.NAME, partial(_attend, each), tile=each.tile) for each in tiled)


def _attend(implementation: Tiled, workload: Workload) -> Attend:
    choice = autodiff.Choice(implementation, implementation)

    def attend(q: Array, k: Array, v: Array, packing: Packing | None) -> Array:
        call = validation.canonicalise(
            validation.Arguments(
                q, k, v, is_causal=workload.is_causal, local_window_size=workload.local_window_size,
                segment_ids=None if packing is None else packing.segment_ids, logits_soft_cap=workload.soft_cap,
            )
        )  # fmt: skip
        if (reason := implementation.unsupported(call.spec, call.operands)) is not None:
            raise NotImplementedError(reason)
        return autodiff.attention(choice, call.spec, call.operands).out

    return attend
