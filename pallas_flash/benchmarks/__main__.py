"""python -m pallas_flash.benchmarks run | report | traffic: measure on this machine, make tables and figures of it, and
say by formula what must be computed and moved."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

import jax

from pallas_flash.benchmarks import cases, decoding, peers
from pallas_flash.benchmarks.cases import PASSES
from pallas_flash.command_line import positive, seconds

OUTPUT = Path("output/benchmarks")
TRAFFIC_TILES = (64, 128, 256)
INTERRUPTED = 130  # exit status, as shells have it: what was measured is in the file
QUICK_IMPLEMENTATIONS = ["xla", "reference", "jax.nn-xla"]


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pallas_flash.benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="measure, and write a new JSON file")
    run.set_defaults(command=_run)
    run.add_argument("--workloads", nargs="+", metavar="GLOB", help="by name (default: all)")
    run.add_argument(
        "--passes",
        nargs="+",
        choices=(*PASSES, decoding.PASS),
        default=list(PASSES),
        metavar="PASS",
        help=f"{', '.join(PASSES)} (default: these), or {decoding.PASS}, which has workloads of its own",
    )
    run.add_argument("--implementations", nargs="+", metavar="NAME", help="by name (default: all)")
    run.add_argument(
        "--quick", action="store_true", help="tiny workloads, in plain JAX: a check of the benchmark itself"
    )
    run.add_argument("--rounds", type=positive, default=3, help="in each, every program is timed once (default: 3)")
    run.add_argument("--iterations", type=positive, default=8, help="calls of a program a round (default: 8)")
    run.add_argument("--sustained", action="store_true", help="also after half a second of calls back to back")
    run.add_argument("--limit", type=seconds, metavar="SECONDS", help="start no workload that may not end within them")
    run.add_argument("--output", type=Path, default=OUTPUT, metavar="FOLDER")
    run.add_argument("--note", help="anything worth knowing of this run, such as compiler flags; it is in the file")
    run.add_argument(
        "--tiles", action="store_true", help="also our kernels with every size of tile, in the passes that have them"
    )
    run.add_argument("--list", action="store_true", help="print the workloads, implementations and passes, and stop")
    report = commands.add_parser("report", help="tables (Markdown, HTML) and figures (PNG, SVG) of JSON files")
    report.set_defaults(command=_report)
    report.add_argument("files", nargs="+", type=Path, metavar="FILE")
    report.add_argument("--output", type=Path, default=OUTPUT / "report", metavar="FOLDER")
    traffic = commands.add_parser(
        "traffic", help="FLOPs and bytes of standard and flash attention: by formula, or counted with --measure"
    )
    traffic.set_defaults(command=_traffic, refuse=traffic.error)
    traffic.add_argument("--workloads", nargs="+", metavar="GLOB", default=["*"], help="by name (default: all)")
    traffic.add_argument("--passes", nargs="+", choices=PASSES, default=["forward+backward"], metavar="PASS")
    traffic.add_argument(
        "--tiles", nargs="+", type=positive, metavar="ROWS", help=f"by formula (default: {TRAFFIC_TILES})"
    )
    traffic.add_argument("--measure", action="store_true", help="count the bytes of device memory by ncu, on this GPU")
    traffic.add_argument("--implementations", nargs="+", metavar="NAME", help="to measure, by name (default: all)")
    traffic.add_argument("--force-tiles", action="store_true", help="measure our kernels with every size of tile too")
    traffic.add_argument("--output", type=Path, metavar="FOLDER", help=f"of what is measured (default: {OUTPUT})")
    return parser


def _run(options: argparse.Namespace) -> int:
    from pallas_flash.benchmarks import results, runner
    from pallas_flash.benchmarks.progress import Progress

    decodes = decoding.PASS in options.passes
    if decodes and len(set(options.passes)) > 1:
        raise ValueError(f"--passes {decoding.PASS} has workloads of its own: give it alone")
    chosen, every = (decoding, decoding.all_peers()) if decodes else (cases, peers.all_peers())
    known = [peer.name for peer in every]
    quick = [name for name in QUICK_IMPLEMENTATIONS if name in known] if options.quick else None
    settings = runner.Settings(
        workloads=cases.select(options.workloads or ["*"], chosen.QUICK if options.quick else chosen.WORKLOADS),
        passes=[passed for passed in (*PASSES, decoding.PASS) if passed in options.passes],
        peers=[*peers.select(options.implementations or quick, every), *_tiled(options.passes * options.tiles)],
        rounds=options.rounds,
        iterations=options.iterations,
        sustained=options.sustained,
        limit=options.limit,
        folder=options.output,
        note=options.note,
    )
    if options.list:
        names = {"workloads": settings.workloads, "implementations": settings.peers}
        listed = {title: [each.name for each in those] for title, those in names.items()} | {"passes": settings.passes}
        print("\n\n".join("\n".join([f"{title}:", *those]) for title, those in listed.items()))
        if not decodes:
            print(f"\n--passes {decoding.PASS} has workloads and implementations of its own")
        return 0
    if not options.quick and jax.default_backend() == "cpu":
        print("no GPU here: wall time on a CPU; these workloads take many minutes, --quick takes one", file=sys.stderr)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was measured is kept
    with Progress(workloads=len(settings.workloads)) as progress:
        path = runner.run(settings, progress)
    print(f"results: {path}")
    return INTERRUPTED if results.read(path)["interrupted"] else 0


def _report(options: argparse.Namespace) -> int:
    from pallas_flash.benchmarks import report

    print(f"report: {report.write(options.files, options.output)}")
    return 0


def _tiled(passes: list[str]) -> list[peers.Peer]:
    from pallas_flash.benchmarks import tiles

    if passes and not set(passes) & set(tiles.TILES):
        raise ValueError(f"--tiles: wanted with --passes {' or '.join(tiles.TILES)}, not {' '.join(passes)} alone")
    return [peer for passed in tiles.TILES if passed in passes for peer in tiles.peers(passed)]


def _traffic(options: argparse.Namespace) -> int:
    from pallas_flash.benchmarks import tables, traffic

    _check_traffic(options)
    workloads = cases.select(options.workloads, cases.WORKLOADS)
    if options.measure:
        return _measure_traffic(workloads, options)
    for passed in options.passes:
        made = traffic.table(workloads, passed, options.tiles or list(TRAFFIC_TILES))
        print(f"{made.title}\n\n{tables.markdown(made)}\n")
    return 0


def _check_traffic(options: argparse.Namespace) -> None:
    """Some options are for one of the two ways to count alone."""
    to_measure = ("implementations", "force_tiles", "output")
    given = ["--" + name.replace("_", "-") for name in to_measure if getattr(options, name)]
    if given and not options.measure:
        options.refuse(f"{', '.join(given)}: only with --measure; by formula, --tiles says which sizes of tile")
    if options.tiles and options.measure:
        options.refuse("--tiles: only without --measure; with it, --force-tiles takes every size of tile")


def _measure_traffic(workloads: list[cases.Workload], options: argparse.Namespace) -> int:
    from pallas_flash.benchmarks import ncu, results, traffic

    if (reason := ncu.obstacle()) is not None:
        raise ValueError(f"--measure: {reason}")
    if "backward" in options.passes:
        raise ValueError("--passes backward: ncu counts whole programs; take forward and forward+backward")
    chosen = peers.select(options.implementations, peers.all_peers())
    chosen = [peer for peer in chosen if peer.attend is not None]  # PyTorch has a process of its own already
    chosen += _tiled(["forward"] if options.force_tiles else [])
    file = results.ResultsFile(options.output or OUTPUT, traffic.KIND)
    try:
        traffic.measure(workloads, chosen, options.passes, file, _show_traffic)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    finally:
        print(f"results: {file.path}")
    return 0


def _show_traffic(row: dict[str, Any]) -> None:
    said = f"{(row['read'] + row['written']) / 1e9:.3f} GB" if row["status"] == "ok" else f"failed: {row['reason']}"
    print(f"{row['workload']:28} {row['implementation']:24} {row['pass']:16} {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
