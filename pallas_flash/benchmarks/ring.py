"""Causal attention over a long sequence: on one device, and as a ring over several.

    python -m pallas_flash.benchmarks.ring                     64k tokens, bfloat16, 16 heads of 128, on all GPUs here
    python -m pallas_flash.benchmarks.ring --trace DIRECTORY   and a profile of one step, to see keys travel meanwhile

Prints one table and writes one JSON file; takes a minute or two, most of which compiles. The sequence is in zigzag
order for the ring. Times are medians of wall times of single calls, milliseconds long; memory is what the compiled
program needs on each device, arguments and results included. The ring's result is compared with one device's first.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention
from pallas_flash.benchmarks.results import ResultsFile, environment
from pallas_flash.distributed import from_zigzag, ring_attention, to_zigzag

AXIS = "context"
TOLERANCE = 0.02  # of bfloat16 results, relative to the largest of them
SECONDS = 5.0  # of one program
MAX_CALLS = 30

Arrays = tuple[jax.Array, ...]


def attentions(mesh: Mesh) -> dict[str, Callable[..., jax.Array]]:
    rows = P(None, AXIS)
    ring = functools.partial(ring_attention, axis_name=AXIS, order="zigzag", is_causal=True)
    return {
        "one device": functools.partial(flash_attention, is_causal=True),
        "ring": jax.shard_map(lambda q, k, v: ring(q, k, v), mesh=mesh, in_specs=rows, out_specs=rows),
    }


def forward_and_backward(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    def run(dout: jax.Array, *tensors: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, *tensors)
        return out, pullback(dout)

    return run


def median_milliseconds(program: Any, arguments: Arrays) -> float:
    jax.block_until_ready(program(*arguments))
    times: list[float] = []
    while len(times) < 3 or (len(times) < MAX_CALLS and sum(times) < SECONDS):
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def needed_bytes(program: Any) -> int:
    """On each device."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    count = arguments.devices or jax.device_count()
    mesh = jax.make_mesh((count,), (AXIS,), (AxisType.Auto,), devices=jax.devices()[:count])
    shape = (1, arguments.tokens, arguments.heads, arguments.head_dim)
    keys = jax.random.split(jax.random.key(0), 4)
    whole = tuple(jax.random.normal(key, shape, jnp.bfloat16) for key in keys)  # dout, q, k, v
    sharding = NamedSharding(mesh, P(None, AXIS))
    inputs = {
        "one device": whole,
        "ring": tuple(jax.device_put(to_zigzag(x, count), sharding) for x in whole),
    }
    rows, results = [], {}
    for name, attend in attentions(mesh).items():
        programs = {"forward": (attend, inputs[name][1:])}
        programs["forward and backward"] = forward_and_backward(attend), inputs[name]
        for direction, (function, arrays) in programs.items():
            program = jax.jit(function).lower(*arrays).compile()
            milliseconds = median_milliseconds(program, arrays)
            if direction != "forward":
                results[name] = jax.tree.leaves(program(*arrays))
            row = {"attention": name, "direction": direction, "devices": 1 if name == "one device" else count}
            rows.append(row | {"milliseconds": milliseconds, "bytes_a_device": needed_bytes(program)})
            print(
                f"{name:12} {direction:22} {milliseconds:9.2f} ms {needed_bytes(program) / 2**30:7.2f} GiB", flush=True
            )
            if arguments.trace and name == "ring":
                with jax.profiler.trace(str(arguments.trace / direction.replace(" ", "_"))):
                    jax.block_until_ready(program(*arrays))
    check_results(results, count)
    return rows


def check_results(results: dict[str, list[jax.Array]], count: int) -> None:
    """SystemExit where the ring gives something else."""
    one = results["one device"]
    for name, got, want in zip(("out", "dq", "dk", "dv"), results["ring"], one, strict=True):
        got = from_zigzag(jax.device_put(got, want.sharding), count)
        error = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want.astype(jnp.float32)).max())
        print(f"{name:4} differs by {error:.1e} of the largest")
        if not error < TOLERANCE:
            raise SystemExit(f"{name} of the ring differs from one device's")


def speedups(rows: list[dict[str, Any]]) -> dict[str, float]:
    times = {(row["attention"], row["direction"]): row["milliseconds"] for row in rows}
    return {
        direction: times["one device", direction] / time for (name, direction), time in times.items() if name == "ring"
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="how many share the sequence (default: all)")
    parser.add_argument("--tokens", type=int, default=2**16)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--output", type=Path, default=Path("output/benchmarks"), help="folder of the JSON file")
    parser.add_argument("--trace", type=Path, help="folder of a profile")
    parsed = parser.parse_args(arguments)
    gpus = 0 if jax.default_backend() == "cpu" else jax.device_count()
    if gpus < (needed := parsed.devices or 2):
        parser.error(f"it measures a ring of {needed} GPUs or more, and there are {gpus} here")
    rows = measure(parsed)
    file = ResultsFile(parsed.output, "ring")
    shape = {name: getattr(parsed, name) for name in ("tokens", "heads", "head_dim")}
    file.write({"ring": shape, "environment": environment("ring"), "rows": rows, "speedups": speedups(rows)})
    print(", ".join(f"{direction} {factor:.2f} times as fast" for direction, factor in speedups(rows).items()))
    print(file.path)


if __name__ == "__main__":
    main()
