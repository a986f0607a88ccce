"""The figures of a report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from demo.run_folder import DRAWING, RunFolder
from demo.summary import Results, label, losses, unit

# Okabe and Ito's palette, told apart with any colour vision; lines differ in shape and marker as well.
STYLES = (
    {"color": "#D55E00", "linestyle": "-", "marker": "o"},
    {"color": "#0072B2", "linestyle": (0, (4, 2)), "marker": "s"},
    {"color": "#009E73", "linestyle": ":", "marker": "^"},
    {"color": "#CC79A7", "linestyle": "-.", "marker": "D"},
)
LOOK = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 11,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.hashsalt": "demo",  # the same numbers give the same file
}
GREY = "#444444"
MAX_TICKS = 7  # of a logarithmic axis of quantities


def draw(results: Results, folder: RunFolder) -> list[str]:
    """Save the figures for which there are numbers; returns their names."""
    drawings = zip(folder.figures, (draw_losses, draw_memory, draw_time), strict=True)
    with matplotlib.rc_context(LOOK):
        return [name for name, draw_one in drawings if draw_one(results, folder.file(name))]


def _styles(results: Results) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for index, name in enumerate(results["uses"]):
        yield name, label(results, name), STYLES[index % len(STYLES)]


def draw_losses(results: Results, path: Path) -> bool:
    """The loss curves on top of each other and, below, how far they are apart."""
    if not any(training["losses"] for training in results["training"].values()):
        return False
    apart = results["agreement"] is not None
    figure = Figure(figsize=(8, 6 if apart else 4.2), layout="constrained")
    rows = figure.subplots(2 if apart else 1, 1, sharex=True, squeeze=False, height_ratios=[2.2, 1] if apart else [1])
    top: Axes = rows[0, 0]
    unit_name, factor = unit(results)
    for order, (name, text, style) in enumerate(_styles(results)):
        curve = factor * losses(results["training"].get(name, {"losses": []}))
        # The first curve is a broad band, so that those on top of it leave it visible.
        line = {"linewidth": 1.6 if order else 4.0, "alpha": 1.0 if order else 0.55}
        marker = style["marker"] if len(curve) == 1 else ""  # one step makes no line
        top.plot(np.arange(1, len(curve) + 1), curve, label=text, **{**style, **line, "marker": marker})
    top.set(title=f"Training loss, task {results['options']['task']}", ylabel=f"cross-entropy ({unit_name})")
    top.set_ylim(bottom=0)
    top.legend()
    if apart:
        _draw_difference(rows[1, 0], results)
    rows[-1, 0].set_xlabel("training step")
    rows[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(figure, path)
    return True


def _draw_difference(axes: Axes, results: Results) -> None:
    unit_name, factor = unit(results)
    first, second = [factor * losses(t) for t in results["training"].values() if t["losses"]][:2]
    steps = results["agreement"]["steps"]
    difference = np.abs(first[:steps] - second[:steps])
    apart = difference > 0
    if apart.any():
        axes.set_yscale("log")
        axes.plot(np.flatnonzero(apart) + 1, difference[apart], color=GREY, linestyle="", marker=".", markersize=4)
        exponents = np.log10([difference[apart].min() / 1.2, difference.max() * 1.2])
        axes.set_ylim(10.0 ** np.floor(exponents[0]), 10.0 ** np.ceil(exponents[1]))  # whole decades
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_yticks([0])
    title = f"Difference: at most {difference.max():.1e}, none at {steps - apart.sum()} of {steps} steps"
    axes.set_title(title, fontsize=11)
    axes.set_ylabel(f"absolute ({unit_name})")


def draw_memory(results: Results, path: Path) -> bool:
    """Memory of a training step over the sequence length: what was asked for, and what the search compiled."""
    figure, axes = _lengths_figure("Memory of a training step", "all memory, as compiled (MiB)")
    searched = counted = False
    for name, text, style in _styles(results):
        rows = [(seq_len, total / 2**20) for seq_len, total in _points(results, name, "total_bytes")]
        _plot_lengths(axes, rows, text, style)
        peaks = [(seq_len, peak / 2**20) for seq_len, peak in _points(results, name, "peak_bytes")]
        if peaks:
            counted = True
            axes.plot(*zip(*peaks, strict=True), color=style["color"], linestyle="", marker="x", markersize=9)
        for found in (found for found in results["longest"] if found["implementation"] == name):
            beyond = sorted((seq_len, total / 2**20) for seq_len, total in found["compiled"] if total)
            searched |= bool(beyond)
            _plot_search(axes, rows, beyond, style)
            if found["seq_len"]:
                _annotate_longest(axes, found, style)
    budget = 1024 * results["options"]["memory_budget"]
    handles, names = axes.get_legend_handles_labels()
    if searched:
        handles.append(Line2D([], [], color=GREY, linestyle="", marker="o", markerfacecolor="white"))
        names.append("hollow: compiled in the search\nfor the longest (line: a guide)")
    if counted:
        handles.append(Line2D([], [], color=GREY, linestyle="", marker="x", markersize=9))
        names.append("peak that the allocator counted")
    return _save_lengths_figure(figure, axes, path, legend=(handles, names), budget=budget)


def _plot_search(axes: Axes, rows: list, beyond: list, style: dict[str, Any]) -> None:
    """Hollow markers at what was compiled; nothing is known between them, which the thin line leaves open."""
    if beyond:
        joined = sorted([*rows[-1:], *beyond])
        axes.plot(*zip(*joined, strict=True), color=style["color"], linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
        axes.plot(*zip(*beyond, strict=True), color=style["color"], linestyle="", marker=style["marker"],
                  markerfacecolor="white", markersize=7)  # fmt: skip


def _annotate_longest(axes: Axes, found: dict[str, Any], style: dict[str, Any]) -> None:
    at = (found["seq_len"], found["total_bytes"] / 2**20)
    axes.annotate(f"{found['seq_len']:,}\ntokens fit", at, xytext=(9, -6), textcoords="offset points", va="top",
                  color=style["color"], fontsize=10)  # fmt: skip


def draw_time(results: Results, path: Path) -> bool:
    """Time of a training step over the sequence length."""
    figure, axes = _lengths_figure("Time of a training step", "median time of a step (ms)")
    for name, text, style in _styles(results):
        _plot_lengths(axes, [(n, s * 1e3) for n, s in _points(results, name, "seconds")], text, style)
    return _save_lengths_figure(figure, axes, path, legend=axes.get_legend_handles_labels())


def _plot_lengths(axes: Axes, points: list[tuple[int, float]], text: str, style: dict[str, Any]) -> None:
    lengths, values = zip(*sorted(points), strict=True) if points else ((), ())
    axes.plot(lengths, values, label=text, linewidth=2, markersize=7, **style)


def _points(results: Results, name: str, value: str) -> list[tuple[int, float]]:
    rows = (cost for cost in results["costs"] if cost["implementation"] == name and cost[value] is not None)
    return sorted((cost["seq_len"], cost[value]) for cost in rows)


def _lengths_figure(title: str, quantity: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(title=f"{title}, one sequence", xlabel="sequence length (tokens)", ylabel=quantity)
    return figure, axes


def _save_lengths_figure(
    figure: Figure, axes: Axes, path: Path, *, legend: tuple[list, list[str]], budget: float | None = None
) -> bool:
    """Scale both axes to the points, and to a line at the budget if it is near; False without points."""
    lengths = np.array([x for line in axes.get_lines() for x in line.get_xdata()])
    values = np.array([y for line in axes.get_lines() for y in line.get_ydata()])
    if not lengths.size:
        return False
    if budget is not None and values.min() / 100 <= budget <= 100 * values.max():
        values = np.append(values, budget)
        axes.axhline(budget, color=GREY, linewidth=1, linestyle=(0, (1, 2)))
        axes.annotate(f"budget {budget / 1024:g} GiB", (0.01, budget), xycoords=("axes fraction", "data"),
                      xytext=(0, 4), textcoords="offset points", color=GREY, fontsize=10)  # fmt: skip
    _scale_lengths(axes, lengths)
    _scale_quantity(axes, values)
    axes.legend(*legend, loc="best")
    _save(figure, path)
    return True


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == DRAWING else None)


def _scale_lengths(axes: Axes, lengths: np.ndarray) -> None:
    """A tick at each power of two, or at each second, third ... where there are many."""
    first, last = int(np.floor(np.log2(lengths.min()))), int(np.ceil(np.log2(lengths.max())))
    axes.set_xlim(2.0 ** (np.log2(lengths.min()) - 0.7), 2.0 ** (np.log2(lengths.max()) + 0.9))
    axes.xaxis.set_major_locator(FixedLocator(2.0 ** np.arange(first, last + 1, 1 + (last - first) // 12)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_length(int(x))))


def _scale_quantity(axes: Axes, values: np.ndarray) -> None:
    """Few ticks, at plain numbers: 1, 2 and 5 times powers of ten, or powers of ten alone over a wide range."""
    low, high = values.min() / 1.6, values.max() * 1.6
    axes.set_ylim(low, high)
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = np.outer(decades, steps).ravel()
        ticks = ticks[(ticks >= low) & (ticks <= high)]
        if len(ticks) <= MAX_TICKS:
            break
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.0f}" if y >= 1 else f"{y:.3g}"))


def short_length(tokens: int) -> str:
    """4096 as 4k, 1000 as 1000."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)
