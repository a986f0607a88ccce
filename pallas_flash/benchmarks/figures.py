"""The figures of a report: speed, speed-up and memory over the sequence length, and the roofline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from pallas_flash.benchmarks import traffic

Content = dict[str, Any]
# Okabe and Ito's palette, told apart with any colour vision; markers differ as well.
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "os^Dv<>P"
LOOK = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.hashsalt": "pallas_flash",  # the same drawing is the same file
}
NO_MEMORY = 0.001  # MiB: where no memory at all stands on a logarithmic axis
MEMORY_LABEL = f"MiB (none: drawn at {NO_MEMORY})"
BASELINES = ("reference", "jax.nn-xla")  # standard attention: the first of them that was measured


class Point(NamedTuple):
    run: int  # only times of one run compare
    head_dim: int
    is_causal: bool
    seq_len: int
    implementation: str
    row: dict[str, Any]


class Drawing(NamedTuple):
    """value: of a point, beside its baseline's row (None where there is none); None: not drawn."""

    name: str
    title: str
    label: str
    passed: str
    value: Callable[[Point, dict[str, Any] | None], float | None]
    logarithmic: bool = False


def draw(contents: list[Content], folder: Path) -> list[str]:
    """Save every figure for which there are numbers, as PNG and SVG; returns their names without the ending."""
    counted = [content for content in contents if content["kind"] == traffic.KIND]
    contents = [content for content in contents if content["kind"] != traffic.KIND]
    passes = _passes(contents)
    drawings = [
        drawing
        for passed in passes
        for drawing in (
            Drawing(f"speed-{passed}", f"Speed, {passed}", "TFLOP/s", passed, lambda p, _: p.row["tflops"]),
            Drawing(f"speedup-{passed}", f"Speed-up over standard attention, {passed}", "x", passed, _speedup, True),
            Drawing(f"memory-{passed}", f"Temporary memory, {passed}", MEMORY_LABEL, passed, _mebibytes, True),
        )
    ]
    with matplotlib.rc_context(LOOK):
        drawn = [drawing.name for drawing in drawings if _draw(drawing, contents, folder)]
        drawn += [drawing.name for drawing in map(_traffic, _passes(counted)) if _draw(drawing, counted, folder)]
        rooflines = [f"roofline-{passed}" for passed in passes if _draw_roofline(passed, contents, folder)]
        swept = [f"tiles-{passed}" for passed in passes if _draw_tiles(passed, contents, folder)]
    return drawn + rooflines + swept


def _passes(contents: list[Content]) -> list[str]:
    return list(dict.fromkeys(passed for content in contents for passed in content["settings"]["passes"]))


def _traffic(passed: str) -> Drawing:
    def gigabytes(point: Point, _: dict[str, Any] | None) -> float:
        return (point.row["read"] + point.row["written"]) / 1e9

    return Drawing(f"traffic-{passed}", f"Device memory read and written, {passed}", "GB", passed, gigabytes, True)


def _speedup(point: Point, baseline: dict[str, Any] | None) -> float | None:
    return None if baseline is None else baseline["ms"]["median"] / point.row["ms"]["median"]


def _mebibytes(point: Point, _: dict[str, Any] | None) -> float | None:
    size = point.row["temp_bytes"]
    return None if size is None else max(size / 2**20, NO_MEMORY)


def _points(contents: list[Content], passed: str) -> list[Point]:
    """Of the published grid, whose workloads differ in nothing but head dim, mask and length."""
    points = []
    for run, content in enumerate(contents):
        for row in content["rows"]:
            w = content["workloads"][row["workload"]]
            grid = row["workload"].startswith("fa3-") and "tile" not in row
            if grid and row["pass"] == passed and row["status"] == "ok":
                points.append(Point(run, w["head_dim"], w["is_causal"], w["seq_len"], row["implementation"], row))
    return points


def _draw(drawing: Drawing, contents: list[Content], folder: Path) -> bool:
    points = _points(contents, drawing.passed)
    rows = {point[:5]: point.row for point in points}
    values: dict[tuple[int, bool], dict[str, dict[int, float]]] = {}
    for p in points:
        baselines = (rows.get((*p[:4], name)) for name in BASELINES)
        value = drawing.value(p, next((row for row in baselines if row is not None), None))
        if value is not None:
            values.setdefault((p.head_dim, p.is_causal), {}).setdefault(p.implementation, {})[p.seq_len] = value
    if not values:
        return False
    names = list(dict.fromkeys(p.implementation for p in points))
    dims = sorted({dim for dim, _ in values})
    masks = sorted({causal for _, causal in values})
    figure = Figure(figsize=(1 + 4 * len(dims), 0.9 + 3 * len(masks)), layout="constrained")
    axes = figure.subplots(len(masks), len(dims), squeeze=False, sharex=True, sharey=True)
    for row, causal in zip(axes, masks, strict=True):
        for axis, dim in zip(row, dims, strict=True):
            axis.set_title(f"head dim {dim}, {'causal' if causal else 'full'}")
            _draw_curves(axis, values.get((dim, causal), {}), names, logarithmic=drawing.logarithmic)
        row[0].set_ylabel(drawing.label)
    for axis in axes[-1]:
        axis.set_xlabel("sequence length")
    shown = {label: handle for a in axes.flat for handle, label in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper")
    figure.suptitle(f"{drawing.title}: {contents[0]['environment']['device']}", x=0.01, ha="left", weight="bold")
    _save(figure, folder / drawing.name)
    return True


def _draw_curves(axis: Axes, curves: dict[str, dict[int, float]], names: list[str], *, logarithmic: bool) -> None:
    axis.set_xscale("log", base=2)
    if logarithmic:
        axis.set_yscale("log")
    for index, name in enumerate(names):
        if name in curves:
            lengths = sorted(curves[name])
            axis.plot(lengths, [curves[name][length] for length in lengths], label=name, markersize=4, **_style(index))
    lengths = sorted({length for curve in curves.values() for length in curve})
    axis.xaxis.set_major_locator(FixedLocator(lengths))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / 1024:g}k" if x >= 1024 else f"{x:g}"))
    if not logarithmic:
        axis.set_ylim(bottom=0)


def _draw_roofline(passed: str, contents: list[Content], folder: Path) -> bool:
    """Every time of a pass as a point: FLOPs for each byte that must move, and FLOPs a second, under what the device
    reaches."""
    runs = [content for content in contents if content["ceilings"]]
    rows = [r for content in runs for r in content["rows"] if r["pass"] == passed and r["status"] == "ok"]
    if not rows:
        return False
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axis = figure.subplots()
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    for index, name in enumerate(names):
        points = [(1e3 * r["tflops"] / r["gbps"], r["tflops"]) for r in rows if r["implementation"] == name]
        axis.scatter(*zip(*points, strict=True), s=18, label=name, **_style(index))
    matmul, copy = (max(run["ceilings"][key] for run in runs) for key in ("matmul_tflops", "copy_gbps"))
    reach = [1e3 * r["tflops"] / r["gbps"] for r in rows]
    ridge = 1e3 * matmul / copy
    ends = [min(*reach, ridge) / 2, ridge, max(*reach, ridge) * 2]
    axis.plot(ends, [min(matmul, end * copy / 1e3) for end in ends], color="#444444", label="matrix product, copy")
    axis.set(xscale="log", yscale="log", xlabel="FLOP for each byte that must move", ylabel="TFLOP/s")
    figure.legend(loc="outside right upper")
    figure.suptitle(f"Roofline, {passed}: {runs[0]['environment']['device']}", x=0.01, ha="left", weight="bold")
    _save(figure, folder / f"roofline-{passed}")
    return True


def _draw_tiles(passed: str, contents: list[Content], folder: Path) -> bool:
    """Time over the keys of a forced tile, a curve for each number of queries."""
    panels: dict[tuple[int, str], dict[int, dict[int, float]]] = {}
    for run, content in enumerate(contents):
        for row in content["rows"]:
            if row["pass"] == passed and row["status"] == "ok" and "tile" in row:
                tile_q, block_kv = row["tile"]
                curves = panels.setdefault((run, row["workload"]), {})
                curves.setdefault(tile_q, {})[block_kv] = row["ms"]["median"]
    if not panels:
        return False
    figure = Figure(figsize=(1.5 + 4 * len(panels), 3.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, ((_, workload), curves) in zip(axes, panels.items(), strict=True):
        for index, tile_q in enumerate(sorted(curves)):
            points = sorted(curves[tile_q].items())
            axis.plot(*zip(*points, strict=True), label=f"{tile_q} queries", markersize=4, **_style(index))
        axis.set(title=workload, xlabel="keys of a tile", ylabel="ms")
        axis.set_ylim(bottom=0)
        axis.legend()
    figure.suptitle(
        f"Size of the tile, {passed}: {contents[0]['environment']['device']}", x=0.01, ha="left", weight="bold"
    )
    _save(figure, folder / f"tiles-{passed}")
    return True


def _style(index: int) -> dict[str, str]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path.with_name(f"{path.name}.png"))
    figure.savefig(path.with_name(f"{path.name}.svg"), metadata={"Date": None})
