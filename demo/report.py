"""The report of a run: figures, a Markdown page and the console, all from the dictionary that results.json holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.run_folder import FIGURES, REPORT, RESULTS, RunFolder

Results = dict[str, Any]
LOSS_FIGURE, MEMORY_FIGURE, TIME_FIGURE = FIGURES
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
}


def write(results: Results, folder: RunFolder) -> None:
    """Save results.json, the figures for which there are numbers, and report.md."""
    results["agreement"] = agreement(results)
    folder.write_json(RESULTS, results)
    with matplotlib.rc_context(LOOK):
        drawn = [name for name, draw in DRAWINGS.items() if draw(results, folder.file(name))]
    folder.write_text(REPORT, "\n".join(markdown(results, drawn)) + "\n")


def agreement(results: Results) -> dict[str, Any] | None:
    """How far the loss curves of the first two trainings are apart, over the steps that both have."""
    curves = [_losses(training) for training in results["training"].values() if training["losses"]]
    if len(curves) < 2:
        return None
    steps = min(len(curve) for curve in curves)
    apart = np.abs(curves[0][:steps] - curves[1][:steps])
    if not np.isfinite(apart).all():
        return None
    return {
        "steps": steps,
        "max_abs_difference": float(apart.max()),
        "at_step": int(apart.argmax()) + 1,
        "median_abs_difference": float(np.median(apart)),
    }


def _losses(training: dict[str, Any]) -> np.ndarray:
    return np.array([np.nan if loss is None else loss for loss in training["losses"]], np.float64)


def label(results: Results, name: str) -> str:
    """The name on the command line, and what it stands for on this device where that is another name."""
    used = results["uses"][name]
    return name if used == name else f"{name} ({used})"


# Figures -------------------------------------------------------------------------------------------------------------


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
    for order, (name, text, style) in enumerate(_styles(results)):
        losses = _losses(results["training"].get(name, {"losses": []}))
        # The first curve is a broad band, so that those on top of it leave it visible.
        line = {**style, "marker": "", "linewidth": 1.6 if order else 4.0, "alpha": 1.0 if order else 0.55}
        top.plot(np.arange(1, len(losses) + 1), losses, label=text, **line)
    top.set(title=f"Training loss, task {results['options']['task']}", ylabel="cross-entropy (nats)")
    top.set_ylim(bottom=0)
    top.legend()
    if apart:
        _draw_difference(rows[1, 0], results)
    rows[-1, 0].set_xlabel("training step")
    figure.savefig(path)
    return True


def _draw_difference(axes: Axes, results: Results) -> None:
    first, second = [_losses(t) for t in results["training"].values() if t["losses"]][:2]
    steps = results["agreement"]["steps"]
    difference = np.abs(first[:steps] - second[:steps])
    apart = difference > 0
    axes.semilogy(np.flatnonzero(apart) + 1, difference[apart], color="#444444", linestyle="", marker=".", markersize=4)
    greatest = results["agreement"]["max_abs_difference"]
    axes.set_title(f"Difference: at most {greatest:.1e}, none at {steps - apart.sum()} of {steps} steps", fontsize=11)
    axes.set_ylabel("absolute (nats)")


def draw_memory(results: Results, path: Path) -> bool:
    """Memory of a training step over the sequence length, up to where it goes over the budget."""
    figure, axes = _lengths_figure("Memory of a training step", "all memory, as compiled (MiB)")
    budget = results["options"]["memory_budget"]
    axes.axhline(budget * 1024, color="#444444", linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(f"budget {budget:g} GiB", (0.01, budget * 1024), xycoords=("axes fraction", "data"),
                  xytext=(0, 4), textcoords="offset points", color="#444444", fontsize=10)  # fmt: skip
    for name, text, style in _styles(results):
        points = dict(_points(results, name, "total_bytes"))
        for found in (found for found in results["longest"] if found["implementation"] == name):
            points[found["seq_len"]] = found["total_bytes"]
            points[found["too_long"]] = found["too_long_bytes"]
            if found["seq_len"]:
                axes.annotate(f"{found['seq_len']:,}\ntokens fit", (found["seq_len"], found["total_bytes"] / 2**20),
                              xytext=(9, -6), textcoords="offset points", va="top", color=style["color"],
                              fontsize=10)  # fmt: skip
        _plot_lengths(axes, [(n, b / 2**20) for n, b in points.items() if n and b], text, style)
    return _save_lengths_figure(figure, axes, path)


def draw_time(results: Results, path: Path) -> bool:
    """Time of a training step over the sequence length."""
    figure, axes = _lengths_figure("Time of a training step", "median time of a step (ms)")
    for name, text, style in _styles(results):
        _plot_lengths(axes, [(n, s * 1e3) for n, s in _points(results, name, "seconds")], text, style)
    return _save_lengths_figure(figure, axes, path)


def _plot_lengths(axes: Axes, points: list[tuple[int, float]], text: str, style: dict[str, Any]) -> None:
    lengths, values = zip(*sorted(points), strict=True) if points else ((), ())
    axes.plot(lengths, values, label=text, linewidth=2, markersize=6, **style)


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


def _save_lengths_figure(figure: Figure, axes: Axes, path: Path) -> bool:
    lengths = sorted({float(x) for line in axes.get_lines() if line.get_marker() != "None" for x in line.get_xdata()})
    if not lengths:
        return False
    axes.margins(x=0.08, y=0.12)
    axes.set_xticks(2.0 ** np.arange(np.floor(np.log2(lengths[0])), np.ceil(np.log2(lengths[-1])) + 1))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_length(int(x))))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.legend(loc="lower right")
    figure.savefig(path)
    return True


DRAWINGS = {LOSS_FIGURE: draw_losses, MEMORY_FIGURE: draw_memory, TIME_FIGURE: draw_time}


def short_length(tokens: int) -> str:
    """4096 as 4k, 1000 as 1000."""
    return f"{tokens // 1024}k" if tokens >= 1024 and tokens % 1024 == 0 else str(tokens)


# Tables: a title, a header and rows of text, for Markdown and for the console alike ---------------------------------

Rows = tuple[str, list[str], list[list[str]]]


def tables(results: Results) -> list[Rows]:
    return [table for table in (_training_table(results), _cost_table(results), _longest_table(results)) if table[2]]


def _training_table(results: Results) -> Rows:
    is_text = results["options"]["task"] == "text"
    held_out = "validation (bits/byte)" if is_text else "held-out loss (nats)"
    header = ["attention", "status", "steps", "last loss", held_out, "accuracy", "ms/step", "tokens/s"]
    rows = []
    for name, training in results["training"].items():
        accuracy, step_seconds = training.get("accuracy"), training.get("step_seconds")
        last = training["losses"][-1] if training["losses"] else None
        rows.append([
            label(results, name),
            training["status"],
            str(training["steps"]),
            _number(last, "{:.4f}"),
            _number(training.get("bits" if is_text else "loss"), "{:.4f}"),
            _number(accuracy and 100 * accuracy, "{:.2f} %"),
            _number(step_seconds and 1e3 * step_seconds, "{:.1f}"),
            _number(training.get("tokens_per_second"), "{:,.0f}"),
        ])  # fmt: skip
    return "Training", header, rows


def _cost_table(results: Results) -> Rows:
    header = ["tokens", "attention", "temporary (MiB)", "in all (MiB)", "ms/step", "status"]
    rows = [
        [
            f"{cost['seq_len']:,}",
            label(results, cost["implementation"]),
            _number(cost["temp_bytes"] and cost["temp_bytes"] / 2**20, "{:,.1f}"),
            _number(cost["total_bytes"] and cost["total_bytes"] / 2**20, "{:,.1f}"),
            _number(cost["seconds"] and 1e3 * cost["seconds"], "{:,.1f}"),
            cost["status"],
        ]
        for cost in sorted(results["costs"], key=lambda cost: cost["seq_len"])
    ]
    return "Memory (as compiled) and time of a training step on one sequence", header, rows


def _longest_table(results: Results) -> Rows:
    header = ["attention", "longest sequence", "needs (MiB)", "twice as long needs (MiB)"]
    rows = [
        [
            label(results, found["implementation"]),
            f"{'' if found['too_long'] else 'at least '}{found['seq_len']:,} tokens",
            _number(found["total_bytes"] and found["total_bytes"] / 2**20, "{:,.1f}"),
            _number(found["too_long_bytes"] and found["too_long_bytes"] / 2**20, "{:,.1f}"),
        ]
        for found in results["longest"]
    ]
    return f"Longest sequence within {results['options']['memory_budget']:g} GiB", header, rows


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)  # noqa: RUF001


def agreement_sentence(results: Results) -> str | None:
    """How far the curves are apart, in words."""
    found = results["agreement"]
    if found is None:
        return None
    return (
        f"Over {found['steps']} steps the loss curves differ by at most {found['max_abs_difference']:.2e} "
        f"(at step {found['at_step']}; median {found['median_abs_difference']:.2e})."
    )


# Markdown and console ------------------------------------------------------------------------------------------------


def markdown(results: Results, figures: list[str]) -> Iterator[str]:
    """The lines of report.md."""
    options, model, machine = results["options"], results["model"], results["environment"]
    yield f"# Training with {' and '.join(label(results, name) for name in results['uses'])} attention"
    yield ""
    yield (
        f"Task {options['task']}, sequences of {options['seq_len']} tokens, {options['batch_size']} a step, "
        f"{options['dtype']}, seed {options['seed']}. Model {options['preset']}: {model['parameters']:,} parameters, "
        f"{model['num_layers']} layers, {model['num_q_heads']} query heads over {model['num_kv_heads']} key-value "
        f"heads, {model['flops_per_token'] / 1e6:,.2f} MFLOP per token and training step. "
        f"Device {machine['device']}, {machine['machine']}; Python {machine['python']}, jax {machine['jax']}, "
        f"flax {machine['flax']}."
    )
    for title, header, rows in tables(results):
        yield from ("", f"## {title}", "")
        yield f"| {' | '.join(header)} |"
        yield f"|{'|'.join('---' for _ in header)}|"
        yield from (f"| {' | '.join(row)} |" for row in rows)
    if sentence := agreement_sentence(results):
        yield from ("", "## Agreement", "", sentence)
    for name in figures:
        yield from ("", f"![{name.removesuffix('.png')}]({name})")
    for name, drawn in _samples(results):
        yield from ("", f"## Sample of the model trained with {name}", "")
        yield "The prompt is the beginning of the validation text:"
        yield from ("", *_quoted(drawn["prompt"]), "", "and the model goes on:", "", *_quoted(drawn["continuation"]))


def _quoted(text: str) -> list[str]:
    return ["    " + line for line in text.splitlines()]


def _samples(results: Results) -> list[tuple[str, dict[str, str]]]:
    return [(name, training["sample"]) for name, training in results["training"].items() if "sample" in training]


def show(results: Results, folder: RunFolder, console: Console) -> None:
    """Print the report."""
    for title, header, rows in tables(results):
        table = Table(title=title, title_justify="left", title_style="bold")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if rows[0][index][:1].isalpha() else "right")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    if sentence := agreement_sentence(results):
        console.print(sentence, highlight=False)
    for name, drawn in _samples(results):
        console.print(Text.assemble((f"\nSample ({name})\n", "bold"), (drawn["prompt"], "dim"), drawn["continuation"]))
    console.print(f"Report: {folder.file(REPORT)}", highlight=False, markup=False, soft_wrap=True)
