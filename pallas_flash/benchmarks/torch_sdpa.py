"""PyTorch's scaled_dot_product_attention, measured in a process of its own: two frameworks in one process would share
its memory pool and its CUDA context. So it takes no turns with the others, and its clock is CUDA events.

The child reads a request from its standard input and writes an answer, both JSON; run as a module, this is the child.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import subprocess
import sys
from typing import Any

from pallas_flash.benchmarks.cases import Workload

# What it is asked for: the backend that PyTorch chooses, or one by name.
BACKENDS = {"torch-sdpa": None, "torch-flash": "FLASH_ATTENTION", "torch-cudnn": "CUDNN_ATTENTION"}
NOTE = "CUDA events, in a process of its own, after the others"
TIMEOUT = 120  # seconds for all passes of a workload
BLOCK_Q = 1024


def answer(workload: Workload, name: str, kinds: list[str], calls: int) -> dict[str, Any]:
    """By the backend of `name`, for each of `kinds` (forward, forward+backward): its errors, milliseconds of each call
    and temporary bytes.
    NotImplementedError or RuntimeError with the reason why there are none."""
    if importlib.util.find_spec("torch") is None:
        raise NotImplementedError("torch is not installed")
    w = workload
    if w.window is not None or w.soft_cap is not None or w.documents:
        raise NotImplementedError("takes windows and documents as an array of T x S only, and no soft cap")
    request = {"workload": dataclasses.asdict(w) | {"dim_v": w.dim_v}, "kinds": kinds, "calls": calls}
    request["backend"] = BACKENDS[name]
    command = [sys.executable, "-m", "pallas_flash.benchmarks.torch_sdpa"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT, check=True
        )
    except subprocess.CalledProcessError as error:
        raise RuntimeError(next(reversed(error.stderr.strip().splitlines()), "no message")) from error
    return json.loads(done.stdout)


def _main() -> None:
    request = json.load(sys.stdin)
    child = _Child(request["workload"])
    with child.choose(request["backend"]):
        json.dump({kind: child.measure(kind, request["calls"]) for kind in request["kinds"]}, sys.stdout)


class _Child:
    """q, k, v and dout of a workload on the GPU, [B, heads, S, dim] each."""

    def __init__(self, w: dict[str, Any]):
        self.torch: Any = importlib.import_module("torch")
        self.w = w
        self.group = w["num_q_heads"] // w["num_kv_heads"]
        self.torch.manual_seed(0)
        dtype, q, kv = getattr(self.torch, w["dtype"]), w["num_q_heads"], w["num_kv_heads"]
        sizes = ((q, w["head_dim"]), (kv, w["head_dim"]), (kv, w["dim_v"]), (q, w["dim_v"]))
        # Sequence before heads in memory, as the others have it.
        shapes = [(w["batch"], w["seq_len"], heads, dim) for heads, dim in sizes]
        made = [self.torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for shape in shapes]
        self.qkv, self.dout = [x.requires_grad_() for x in made[:3]], made[3]

    def choose(self, backend: str | None) -> contextlib.AbstractContextManager[Any]:
        attention: Any = importlib.import_module("torch.nn.attention")
        if backend is None:
            return contextlib.nullcontext()
        return attention.sdpa_kernel(getattr(attention.SDPBackend, backend))

    def measure(self, kind: str, calls: int) -> dict[str, Any]:
        cuda = self.torch.cuda
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        results = self._run(kind)
        cuda.synchronize()
        held = sum(x.numel() * x.element_size() for x in results)
        peak = cuda.max_memory_allocated()
        temp = peak - before - held
        errors = self._errors(results)
        del results
        events = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(calls)]
        self._run(kind)
        for start, end in events:
            start.record()
            self._run(kind)
            end.record()
        cuda.synchronize()
        ms = [start.elapsed_time(end) for start, end in events]
        return {"errors": errors, "ms": ms, "temp_bytes": max(temp, 0), "peak_bytes": peak}

    def _run(self, kind: str) -> list[Any]:
        attend = self.torch.nn.functional.scaled_dot_product_attention
        with self.torch.set_grad_enabled(kind != "forward"):
            out = attend(*self.qkv, is_causal=self.w["is_causal"], enable_gqa=self.group > 1)
        return [out] if kind == "forward" else [out, *self.torch.autograd.grad(out, self.qkv, self.dout)]

    def _errors(self, results: list[Any]) -> dict[str, float]:
        """Relative Frobenius errors against float32 standard attention, a key head at a time."""
        names = ("out", "dq", "dk", "dv")[: len(results)]
        sums = {name: [0.0, 0.0] for name in names}
        with self.torch.no_grad():
            for batch in range(self.w["batch"]):
                for head in range(self.w["num_kv_heads"]):
                    queries = slice(head * self.group, (head + 1) * self.group)
                    want = self._expected(batch, head, queries)
                    for name, got in zip(names, results, strict=True):
                        part = got[batch, queries if name in ("out", "dq") else head].float()
                        sums[name][0] += float((part - want[name]).square().sum())
                        sums[name][1] += float(want[name].square().sum())
        return {name: (apart / size) ** 0.5 for name, (apart, size) in sums.items()}

    def _expected(self, batch: int, head: int, queries: slice) -> dict[str, Any]:
        q, dout = (x[batch, queries].float() for x in (self.qkv[0], self.dout))
        k, v = (x[batch, head].float() for x in self.qkv[1:])
        scale, length = q.shape[-1] ** -0.5, q.shape[1]
        positions = self.torch.arange(length, device="cuda")
        outs, dqs, dk, dv = [], [], self.torch.zeros_like(k), self.torch.zeros_like(v)
        for start in range(0, length, BLOCK_Q):
            rows = slice(start, start + BLOCK_Q)
            logits = scale * q[:, rows] @ k.T
            if self.w["is_causal"]:
                logits.masked_fill_(positions > positions[rows, None], float("-inf"))
            p = logits.softmax(-1)
            out = p @ v
            ds = p * (dout[:, rows] @ v.T - (out * dout[:, rows]).sum(-1, keepdim=True)) * scale
            outs.append(out)
            dqs.append(ds @ k)
            dk += (ds.transpose(1, 2) @ q[:, rows]).sum(0)
            dv += (p.transpose(1, 2) @ dout[:, rows]).sum(0)
        return {"out": self.torch.cat(outs, 1), "dq": self.torch.cat(dqs, 1), "dk": dk, "dv": dv}


if __name__ == "__main__":
    _main()
