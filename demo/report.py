"""The report of a run: a Markdown page and the console, all from the dictionary that results.json holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo import figures
from demo.options import Options
from demo.run_folder import REPORT, RESULTS, RunFolder
from demo.summary import Results, agreement, label, unit
from pallas_flash.benchmarks import environment


def write(results: Results, folder: RunFolder) -> None:
    """Save results.json, the figures for which there are numbers, and report.md."""
    results["agreement"] = agreement(results)
    folder.write_json(RESULTS, results)
    folder.write_text(REPORT, page(results, figures.draw(results, folder)))


def without_paths(results: Results) -> Results:
    """For others to read: of the file that was learned, its name alone."""
    options = results["options"]
    return results | {"options": options | {"file": options["file"] and Path(options["file"]).name}}


# Tables: a title, a header and rows of text, for Markdown and for the console alike ---------------------------------

Rows = tuple[str, list[str], list[list[str]]]


def tables(results: Results) -> list[Rows]:
    return [table for table in (_training_table(results), _cost_table(results), _longest_table(results)) if table[2]]


def _training_table(results: Results) -> Rows:
    unit_name, factor = unit(results)
    held_out = "validation" if results["options"]["task"] == "text" else "held-out"
    header = ["attention", "status", "steps", f"last training loss ({unit_name})", f"{held_out} loss ({unit_name})"]
    header += ["accuracy", "ms/step", "p20 to p80", "tokens/s"]
    rows = []
    for name, training in results["training"].items():
        accuracy, loss = training.get("accuracy"), training.get("loss")
        last = training["losses"][-1] if training["losses"] else None
        milliseconds = {part: 1e3 * seconds for part, seconds in training.get("step_seconds", {}).items()}
        spread = f"{milliseconds['p20']:.1f} to {milliseconds['p80']:.1f}" if milliseconds else None
        rows.append([
            label(results, name),
            training["status"],
            str(training["steps"]),
            _number(None if last is None else factor * last, "{:.4f}"),
            _number(None if loss is None else factor * loss, "{:.4f}"),
            _number(None if accuracy is None else 100 * accuracy, "{:.2f} %"),
            _number(milliseconds.get("median"), "{:.1f}"),
            _number(spread, "{}"),
            _number(training.get("tokens_per_second"), "{:,.0f}"),
        ])  # fmt: skip
    return "Training", header, rows


def _cost_table(results: Results) -> Rows:
    header = ["tokens", "attention", "temporary (MiB)", "in all (MiB)", "peak (MiB)", "ms/step", "tokens/s", "status"]
    rows = [
        [
            f"{cost['seq_len']:,}",
            label(results, cost["implementation"]),
            _number(cost["temp_bytes"] and cost["temp_bytes"] / 2**20, "{:,.1f}"),
            _number(cost["total_bytes"] and cost["total_bytes"] / 2**20, "{:,.1f}"),
            _number(cost["peak_bytes"] and cost["peak_bytes"] / 2**20, "{:,.1f}"),
            _number(cost["seconds"] and 1e3 * cost["seconds"], "{:,.1f}"),
            _number(cost["seconds"] and cost["seq_len"] / cost["seconds"], "{:,.0f}"),
            cost["status"],
        ]
        for cost in sorted(results["costs"], key=lambda cost: cost["seq_len"])
    ]
    return "Memory and time of a training step on one sequence", header, rows


def _longest_table(results: Results) -> Rows:
    header = ["attention", "longest sequence", "needs (MiB)", "too long", "would need (MiB)"]
    rows = [
        [
            label(results, found["implementation"]),
            _longest_text(found),
            _number(found["total_bytes"] and found["total_bytes"] / 2**20, "{:,.1f}"),
            _number(found["too_long"], "{:,} tokens"),
            _number(found["too_long_bytes"] and found["too_long_bytes"] / 2**20, "{:,.1f}"),
        ]
        for found in results["longest"]
    ]
    return f"Longest sequence within {results['options']['memory_budget']:g} GiB", header, rows


def _longest_text(found: dict[str, Any]) -> str:
    """The search goes by powers of two, so that it is exact if twice the length is known to be too long."""
    if found["seq_len"] == 0:
        return "none" if found["too_long"] == 1 else "none found"
    exact = found["too_long"] == 2 * found["seq_len"]
    return f"{'' if exact else 'at least '}{found['seq_len']:,} tokens"


def _number(value: float | str | None, form: str) -> str:
    return "–" if value is None else form.format(value)  # noqa: RUF001


def agreement_sentence(results: Results) -> str | None:
    """How far the curves are apart, in words."""
    found = results["agreement"]
    if found is None:
        return None
    unit_name, factor = unit(results)
    most, median = factor * found["max_abs_difference"], factor * found["median_abs_difference"]
    names = [label(results, name) for name, training in results["training"].items() if training["losses"]][:2]
    return (
        f"Over {found['steps']} steps the loss curves of {' and '.join(names)} differ by at most {most:.2e} "
        f"{unit_name} (at step {found['at_step']}; median {median:.2e})."
    )


READING = (
    "`reference` is standard attention, which holds the whole matrix of scores; `flash` is the implementation that "
    "flash_attention chooses for this device, which never does; both compute the same function. `temporary` is the "
    "scratch memory of the compiled step, `in all` adds parameters, optimizer state and batch. `peak` is the most that "
    "the device's allocator has given out at once, where it counts: it includes all that the process holds, and as it "
    "never falls, steps run by growing need of memory, and a step that did not raise it has none. `cudnn` is "
    "jax.nn.dot_product_attention with cuDNN. Flash attention saves "
    "memory that grows with the square of the length: at short lengths, standard attention can be as fast or faster. "
    "Times are medians over steps, without checkpoints and display; p20 to p80 is where the middle 60 % of them lie."
)


# Markdown and console ------------------------------------------------------------------------------------------------


def page(results: Results, figures: list[str]) -> str:
    """The text of report.md, with these figures."""
    return "\n".join(_markdown(results, figures)) + "\n"


def _markdown(results: Results, figures: list[str]) -> Iterator[str]:
    options, model = results["options"], results["model"]
    yield f"# Training with attention by {', '.join(label(results, name) for name in results['uses'])}"
    yield ""
    yield (
        f"Task {options['task']}, sequences of {options['seq_len']} tokens, {options['batch_size']} a step, "
        f"{options['dtype']}, seed {options['seed']}. Model {options['preset']}: {model['parameters']:,} parameters, "
        f"{model['num_layers']} layers, {model['num_q_heads']} query heads over {model['num_kv_heads']} key-value "
        f"heads, {model['flops_per_token'] / 1e6:,.2f} MFLOP per token and training step."
    )
    for machine in results["environments"]:
        yield ""
        yield (
            f"Measured on: {environment.summary(machine)}; jaxlib {machine['jaxlib']}, flax {machine['flax']}, Python "
            f"{machine['python']}, {machine['machine']}."
        )
    yield from ("", "Command:", "", "```console", Options.of_json(options).command(), "```")
    yield from ("", READING)
    for title, header, rows in tables(results):
        yield from ("", f"## {title}", "")
        yield f"| {' | '.join(header)} |"
        yield f"|{'|'.join('---' for _ in header)}|"
        yield from (f"| {' | '.join(row)} |" for row in rows)
    if sentence := agreement_sentence(results):
        yield from ("", "## Agreement", "", sentence)
    for name in figures:
        yield from ("", f"![{name.partition('.')[0]}]({name})")
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
