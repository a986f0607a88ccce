"""python -m pallas_flash.tuning: measure tiles on this machine's GPU and keep the fastest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax

from pallas_flash.command_line import make_folder, positive
from pallas_flash.tuning import cache, kernels, search
from pallas_flash.tuning.cache import Case


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    chosen = [kernel for kernel in kernels.TUNED if kernel.table in options.tables]
    obstacles = {kernel.table: kernels.obstacle(kernel) for kernel in chosen}
    if not all(obstacles.values()):
        try:
            make_folder("--folder", options.folder)
        except ValueError as error:
            parser.error(str(error))
    for kernel in chosen:
        if (obstacle := obstacles[kernel.table]) is not None:
            print(f"{kernel.table}: nothing to tune: {obstacle}", file=sys.stderr)
            continue
        for case in _cases(kernel.table, options):
            _tune(kernel, case, options)
    return 2 if all(obstacles.values()) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m pallas_flash.tuning",
        description="Measures tiles of the GPU kernels on this machine and writes the fastest into a table that calls "
        "of the operator look into before the one that comes with the package.",
    )
    tables = [kernel.table for kernel in kernels.TUNED]
    parser.add_argument("--tables", nargs="+", choices=tables, default=tables, help="kernels (default: all)")
    parser.add_argument(
        "--head-dims", nargs="+", type=_head_dims, metavar="H[/HV]", help="e.g. 128 192/128 (default: those tuned here)"
    )
    parser.add_argument("--masks", nargs="+", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--seq-len", type=positive, default=8192, help="queries and keys of the measured call")
    parser.add_argument(
        "--folder", type=Path, default=cache.user_folder(), help="where the tables go (default: %(default)s)"
    )
    return parser


def _head_dims(text: str) -> tuple[int, int]:
    try:
        dims = [int(part) for part in text.split("/")]
        head_dim, value_head_dim = dims if len(dims) == 2 else dims * 2
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"wanted H or H/HV, such as 128 or 192/128, not {text!r}") from error
    if not (0 < head_dim <= 256 and 0 < value_head_dim <= 256):
        raise argparse.ArgumentTypeError(f"head dims lie between 1 and 256, not {text!r}")
    return head_dim, value_head_dim


def _cases(table: str, options: argparse.Namespace) -> list[Case]:
    known = {(e["case"]["head_dim"], e["case"]["value_head_dim"]) for e in cache.entries(table)}
    dims = options.head_dims or sorted(known)
    return [Case(head_dim, dim_v, options.dtype, mask) for head_dim, dim_v in dims for mask in options.masks]


def _tune(kernel: search.Kernel, case: Case, options: argparse.Namespace) -> None:
    print(f"{kernel.table}: {case}", flush=True)
    best = None
    for finding in search.search(search.problem(kernel, case, options.seq_len), search.device_time):
        time = "" if finding.ms is None else f"{finding.ms:.3f} ms"
        print(f"  {'*' if finding.is_best else ' '} {time:>12}  {finding.config}  {finding.note}", flush=True)
        best = finding if finding.is_best else best
    assert best is not None, "the configuration in use comes first"
    measured = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "ms": best.ms,
        "case": f"S {options.seq_len}",
    }
    file = cache.remember(options.folder, kernel.table, case, best.config, measured)
    print(f"  -> {file}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
