"""Causal attention over a long sequence: on one device, and as a ring over several, all heads at once and in groups.

    python -m pallas_flash.benchmarks.ring                     64k tokens, bfloat16, 16 heads of 128, on all GPUs here
    python -m pallas_flash.benchmarks.ring --trace DIRECTORY   and a profile of one step, to see keys travel meanwhile

Prints one table and writes one JSON file; takes a few minutes, most of which compiles. The sequence is in zigzag order
for the ring. Times are medians of wall times of single calls, milliseconds long; memory is what the compiled program
needs on each device, arguments and results included, also as a fraction of what one device needs alone. The results of
each ring are compared with one device's first.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention
from pallas_flash.benchmarks.results import SCHEMA, ResultsFile, environment
from pallas_flash.benchmarks.tables import Table
from pallas_flash.command_line import make_folder, positive
from pallas_flash.distributed import from_zigzag, ring_attention, to_zigzag

KIND = "ring"  # of the files
AXIS = "context"
ONE = "one device"
TOLERANCE = 0.02  # of bfloat16 results, relative to the largest of them
SECONDS = 5.0  # of one program
MAX_CALLS = 30

Arrays = tuple[jax.Array, ...]


def attentions(mesh: Mesh, groups: Iterable[int]) -> dict[str, Callable[..., jax.Array]]:
    """groups: how many heads at once a ring takes, beside all of them."""
    rows = P(None, AXIS)

    def ring(heads_at_once: int | None) -> Callable[..., jax.Array]:
        attend = functools.partial(
            ring_attention, axis_name=AXIS, order="zigzag", is_causal=True, heads_at_once=heads_at_once
        )
        return jax.shard_map(lambda q, k, v: attend(q, k, v), mesh=mesh, in_specs=rows, out_specs=rows)

    rings = {"ring": ring(None)} | {f"ring, {heads} heads at once": ring(heads) for heads in groups}
    return {ONE: functools.partial(flash_attention, is_causal=True)} | rings


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
    spread = tuple(jax.device_put(to_zigzag(x, count), sharding) for x in whole)
    todo = {}
    for name, attend in attentions(mesh, arguments.heads_at_once).items():
        inputs = whole if name == ONE else spread
        todo[name, "forward"] = jax.jit(attend), inputs[1:]
        todo[name, "forward and backward"] = jax.jit(forward_and_backward(attend)), inputs
    rows, wanted = [], None
    for (name, direction), program in compiled(todo).items():
        arrays = todo[name, direction][1]
        if direction != "forward":
            results = jax.tree.leaves(program(*arrays))
            wanted = wanted or results
            check_results(name, results, wanted, count)
        row = {"attention": name, "direction": direction, "devices": 1 if name == ONE else count}
        row |= {"milliseconds": median_milliseconds(program, arrays), "bytes_a_device": needed_bytes(program)}
        rows.append(row)
        numbers = f"{row['milliseconds']:9.2f} ms {row['bytes_a_device'] / 2**30:7.2f} GiB"
        print(f"{name:23} {direction:22} {numbers}", flush=True)
        if arguments.trace and name != ONE:
            with jax.profiler.trace(str(arguments.trace / f"{name}_{direction}".replace(" ", "_"))):
                jax.block_until_ready(program(*arrays))
    return rows


def compiled(programs: dict[Any, tuple[Any, Arrays]]) -> dict[Any, Any]:
    """Side by side: that is most of what the benchmark takes."""
    lowered = [function.lower(*arrays) for function, arrays in programs.values()]
    with ThreadPoolExecutor() as pool:
        return dict(zip(programs, pool.map(lambda each: each.compile(), lowered), strict=True))


def check_results(name: str, results: list[jax.Array], wanted: list[jax.Array], count: int) -> None:
    """SystemExit where a ring gives something else than one device."""
    if name == ONE:
        return
    for what, got, want in zip(("out", "dq", "dk", "dv"), results, wanted, strict=True):
        got = from_zigzag(jax.device_put(got, want.sharding), count)
        error = float(jnp.abs(got.astype(jnp.float32) - want).max() / jnp.abs(want.astype(jnp.float32)).max())
        print(f"{name}: {what} differs by {error:.1e} of the largest")
        if not error < TOLERANCE:
            raise SystemExit(f"{what} of {name} differs from one device's")


def against_one_device(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast each ring is as one device, and which fraction of its memory each device needs."""
    one = {row["direction"]: row for row in rows if row["attention"] == ONE}
    return [
        {
            **{key: row[key] for key in ("attention", "direction", "devices")},
            "speedup": one[row["direction"]]["milliseconds"] / row["milliseconds"],
            "memory": row["bytes_a_device"] / one[row["direction"]]["bytes_a_device"],
        }
        for row in rows
        if row["attention"] != ONE
    ]


def table(content: dict[str, Any]) -> Table:
    """Of a file that this module wrote."""
    compared = {(row["attention"], row["direction"]): row for row in content["against_one_device"]}
    rows = []
    for row in content["rows"]:
        ratio = compared.get((row["attention"], row["direction"]))
        line = [row["attention"], row["direction"], str(row["devices"]), f"{row['milliseconds']:.2f}"]
        line += [f"{row['bytes_a_device'] / 2**30:.2f}"]
        rows.append(line + (["", ""] if ratio is None else [f"{ratio['speedup']:.2f}", f"{ratio['memory']:.2f}"]))
    header = ["attention", "pass", "devices", "ms", "GiB a device", "x one device", "of one device's memory"]
    title = "Causal, {tokens} tokens, {heads} heads of {head_dim}".format(**content["ring"])
    return Table(title, header, rows)


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=positive, help="how many share the sequence, at least 2 (default: all)")
    parser.add_argument("--tokens", type=positive, default=2**16)
    parser.add_argument("--heads", type=positive, default=16)
    parser.add_argument("--head-dim", type=positive, default=128)
    parser.add_argument(
        "--heads-at-once", type=positive, nargs="*", default=[2, 1], help="rings to measure beside that of all heads"
    )
    parser.add_argument("--output", type=Path, default=Path("output/benchmarks"), help="folder of the JSON file")
    parser.add_argument("--trace", type=Path, help="folder of a profile")
    parsed = parser.parse_args(given)
    try:
        _check(parsed, 0 if jax.default_backend() == "cpu" else jax.device_count())
    except ValueError as error:
        parser.error(str(error))
    return parsed


def _check(parsed: argparse.Namespace, gpus: int) -> None:
    """ValueError that names the argument, before anything is measured."""
    if parsed.devices == 1:
        raise ValueError("--devices: a ring is of at least 2, not 1")
    groups = parsed.heads_at_once
    if len(set(groups)) < len(groups) or any(parsed.heads % heads for heads in groups):
        wanted = f"different divisors of --heads={parsed.heads}"
        raise ValueError(f"--heads-at-once: must be {wanted}, not {' '.join(map(str, groups))}")
    needed = parsed.devices or max(gpus, 2)
    if parsed.tokens % (2 * needed):
        wanted = f"a multiple of {2 * needed}, as {needed} devices hold two parts each (zigzag)"
        raise ValueError(f"--tokens: must be {wanted}, not {parsed.tokens}")
    if gpus < needed:
        raise ValueError(f"--devices: it measures a ring of {needed} GPUs or more, and there are {gpus} here")
    for option, folder in (("--output", parsed.output), ("--trace", parsed.trace)):
        if folder is not None:
            make_folder(option, folder)


def main(arguments: list[str] | None = None) -> None:
    parsed = _arguments(arguments)
    rows = measure(parsed)
    file = ResultsFile(parsed.output, KIND)
    shape = {name: getattr(parsed, name) for name in ("tokens", "heads", "head_dim")}
    compared = against_one_device(rows)
    whole = {"schema": SCHEMA, "kind": KIND, "ring": shape, "environment": environment("ring")}
    file.write(whole | {"rows": rows, "against_one_device": compared})
    for row in compared:
        numbers = f"{row['speedup']:.2f} times as fast as one device, with {row['memory']:.2f} of its memory each"
        print(f"{row['attention']:23} {row['direction']:22} {numbers}")
    print(file.path)


if __name__ == "__main__":
    main()
