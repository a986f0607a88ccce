"""What is compared: our implementations, and those of others where they are installed. None of them is required.

`attend(workload)` returns a function of (q, k, v, packing), or raises NotImplementedError with the reason why this
implementation cannot compute the workload, or ImportError.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from pallas_flash import dispatch, flash_attention
from pallas_flash.benchmarks import torch_sdpa
from pallas_flash.benchmarks.cases import Packing, Workload
from pallas_flash.spec import Array

Attend = Callable[[Array, Array, Array, Packing | None], Array]


@dataclasses.dataclass(frozen=True)
class Peer:
    """attend: None for PyTorch, which has a process of its own. backward_alone: its backward pass can be a program of
    its own, which takes what the forward pass saved. Plain autodiff saves so much that as a program of its own it would
    be another program: there, backward = (forward + backward) - forward. tile: queries and keys of the tile that is
    forced, where one is (tiles.py)."""

    name: str
    attend: Callable[[Workload], Attend] | None
    backward_alone: bool = True
    tile: tuple[int, int] | None = None


def all_peers() -> tuple[Peer, ...]:
    ours = (Peer(name, partial(_ours, name), name != "reference") for name in dispatch.names())
    return (
        *ours,
        Peer("jax.nn-xla", partial(_jax_nn, "xla"), backward_alone=False),
        Peer("jax.nn-cudnn", partial(_jax_nn, "cudnn")),
        Peer("fa3", _dew_flash_attn),
        Peer("tokamax", partial(_tokamax, "mosaic")),
        Peer("tokamax-triton", partial(_tokamax, "triton")),
        Peer("pallas-triton", _pallas_triton),
        *(Peer(name, None, backward_alone=False) for name in torch_sdpa.BACKENDS),
    )


def select(names: list[str] | None, peers: tuple[Peer, ...]) -> list[Peer]:
    """By name, in the order of the list; None: all. ValueError for a name that there is not."""
    known = [peer.name for peer in peers]
    for name in names or []:
        if name not in known:
            raise ValueError(f"--implementations {name}: no such implementation; there are {', '.join(known)}")
    return [peer for peer in peers if names is None or peer.name in names]


def refuse(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)


def _ours(name: str, workload: Workload) -> Attend:
    def attend(q: Array, k: Array, v: Array, packing: Packing | None) -> Array:
        ids = None if packing is None else packing.segment_ids
        return flash_attention(
            q, k, v, is_causal=workload.is_causal, local_window_size=workload.local_window_size, segment_ids=ids,
            logits_soft_cap=workload.soft_cap, implementation=name,
        )  # fmt: skip

    return attend


def _jax_nn(implementation: str, workload: Workload) -> Attend:
    refuse("no soft cap" if workload.soft_cap is not None else None)
    refuse("takes documents as an array of T x S only" if workload.documents else None)
    options: Any = {"is_causal": workload.is_causal, "local_window_size": workload.local_window_size}
    options["implementation"] = implementation
    return lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v, **options)


def _dew_flash_attn(workload: Workload) -> Attend:
    """FlashAttention-3 (on Hopper; FlashAttention-2 elsewhere) from the package dew-flash-attn."""
    dew: Any = importlib.import_module("dew_flash_attn")
    refuse("no soft cap" if workload.soft_cap is not None else None)
    options: Any = {"is_causal": workload.is_causal, "window_size": workload.local_window_size or (-1, -1)}
    if not workload.documents:
        return lambda q, k, v, _: dew.flash_mha(q, k, v, **options)
    refuse("packs documents without a batch dimension" if workload.batch != 1 else None)
    longest = int(max(workload.starts()[1:] - workload.starts()[:-1]))

    def attend(q: Array, k: Array, v: Array, packing: Packing | None) -> Array:
        assert packing is not None
        return dew.flash_mha_varlen(q[0], k[0], v[0], packing.starts, longest, **options)[None]

    return attend


def _tokamax(implementation: str, workload: Workload) -> Attend:
    """Its kernels for Mosaic GPU or for Triton, with their default configurations."""
    tokamax = import_tokamax()
    refuse("takes documents as an array of T x S only" if workload.documents else None)
    options: Any = {"is_causal": workload.is_causal, "local_window_size": workload.local_window_size}
    options |= {"logits_soft_cap": workload.soft_cap, "implementation": implementation}
    return lambda q, k, v, _: tokamax.dot_product_attention(q, k, v, **options)


def import_tokamax() -> Any:
    if importlib.util.find_spec("xprof") is None:
        _stand_in_for_xprof()
    return importlib.import_module("tokamax")


def _stand_in_for_xprof() -> None:
    """tokamax imports `get_kernel_stats_tool` from xprof for its own profiler alone, which is not used here: empty
    modules in its place spare the installation of a large package. The innermost comes first, as another thread takes
    it that there is xprof once it finds the outermost."""
    parts = ["xprof", "cli", "tools", "get_kernel_stats_tool"]
    inner = None
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        if inner is not None:
            setattr(module, parts[depth], inner)
        inner = sys.modules.setdefault(name, module)


def _pallas_triton(workload: Workload) -> Attend:
    """JAX's own example kernel, in Pallas' Triton backend."""
    kernel: Any = importlib.import_module("jax.experimental.pallas.ops.gpu.attention")
    w = workload
    refuse("no grouped heads: it gives wrong numbers" if w.num_q_heads != w.num_kv_heads else None)
    refuse("no soft cap" if w.soft_cap is not None else None)
    refuse("no window" if w.window is not None else None)
    refuse("no value head size unlike the key's" if w.dim_v != w.head_dim else None)

    def attend(q: Array, k: Array, v: Array, packing: Packing | None) -> Array:
        ids = None if packing is None else packing.segment_ids
        return kernel.mha(q, k, v, ids, sm_scale=w.head_dim**-0.5, causal=w.is_causal)

    return attend
