"""Tables and figures of the JSON files of runs. Only times of one run compare, so every file has tables of its own."""

from __future__ import annotations

import fnmatch
import html
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pallas_flash.benchmarks import environment, results, traffic
from pallas_flash.benchmarks.cases import PASSES
from pallas_flash.benchmarks.decoding import PASS as DECODE
from pallas_flash.benchmarks.tables import Table, as_html, markdown
from pallas_flash.command_line import make_folder

Content = dict[str, Any]
# Of the implementations of this package, the first of these that was measured is the one compared.
OURS = ("sm90", "sm80", "xla", "reference")
READING = (
    "Times are medians over interleaved calls. TFLOP/s counts the matrix products over pairs that the mask allows; "
    "x is a peer's time over ours, so above 1 is faster. Results that are wrong, or were refused, have no time."
)


class Cells:
    """The rows of one pass of a run, by workload and implementation, in the order in which they were measured; without
    those of forced tiles, which have a table of their own."""

    def __init__(self, content: Content, passed: str):
        rows = [row for row in content["rows"] if row["pass"] == passed and "tile" not in row]
        self.workloads = list(dict.fromkeys(row["workload"] for row in rows))
        self.implementations = list(dict.fromkeys(row["implementation"] for row in rows))
        self._rows = {(row["workload"], row["implementation"]): row for row in rows}

    def row(self, workload: str, implementation: str | None) -> dict[str, Any] | None:
        """Only if it has a time."""
        row = self._rows.get((workload, str(implementation)))
        return row if row is not None and row["status"] == "ok" else None

    def timed(self) -> list[str]:
        """The implementations that have any time."""
        return [name for name in self.implementations if any(self.row(w, name) for w in self.workloads)]

    def ours(self) -> str | None:
        return next((name for name in OURS if name in self.timed()), None)

    def peers(self) -> list[str]:
        return [name for name in self.timed() if name != self.ours()]

    def ratio(self, workload: str, peer: str, key: str) -> float | None:
        """The peer's time over ours."""
        rows = [self.row(workload, name) for name in (peer, self.ours())]
        if any(row is None or row.get(key) is None for row in rows):
            return None
        theirs, mine = (row[key]["median"] for row in rows if row is not None)
        return theirs / mine

    def without_time(self) -> Iterator[dict[str, Any]]:
        return (row for row in self._rows.values() if row["status"] != "ok")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


class Rate(NamedTuple):
    """What a pass is measured in: its unit, its key in a row, that of its share of a ceiling, and which ceiling."""

    unit: str
    key: str
    share: str
    ceiling: str


def rate_of(passed: str) -> Rate:
    """Attention is bound by arithmetic, decoding by memory."""
    if passed == DECODE:
        return Rate("GB/s", "gbps", "share_of_copy", "copy")
    return Rate("TFLOP/s", "tflops", "share_of_matmul", "matmul")


def speed(content: Content, passed: str) -> Table:
    """TFLOP/s (decoding: GB/s) of every implementation."""
    rate = rate_of(passed)
    cells = Cells(content, passed)
    names = cells.timed()
    rows = []
    for workload in cells.workloads:
        found = [cells.row(workload, name) for name in names]
        rows.append([workload, *(_number(row and row[rate.key], "{:.4g}") for row in found)])
    return Table(f"{rate.unit}, {passed}", ["workload", *names], rows)


def ratios(content: Content, passed: str) -> Table:
    """Ours beside each peer."""
    cells = Cells(content, passed)
    ours, peers = cells.ours(), cells.peers()
    sustained = any("sustained_ms" in row for row in content["rows"])
    known = bool(content["ceilings"])
    rate = rate_of(passed)
    header = ["workload", f"{ours} ms", "p20 to p80", rate.unit]
    header += [f"of the {rate.ceiling} ceiling", "bound by"] * known
    header += [f"x {peer}" for peer in peers] + [f"x {peer}, sustained" for peer in peers if sustained]
    rows = []
    for workload in cells.workloads:
        row = cells.row(workload, ours)
        if row is None:
            continue
        share = row.get(rate.share)
        line = [workload, f"{row['ms']['median']:.4g}", f"{row['ms']['p20']:.4g} to {row['ms']['p80']:.4g}"]
        line.append(f"{row[rate.key]:.4g}")
        line += [_number(share and 100 * share, "{:.0f} %"), row.get("bound_by", "")] * known
        for key in ("ms", "sustained_ms") if sustained else ("ms",):
            line += [_number(cells.ratio(workload, peer, key), "{:.3f}") for peer in peers]
        rows.append(line)
    return Table(f"{ours} beside its peers, {passed}", header, rows)


def means(content: Content, passed: str) -> Table:
    """Geometric means of the ratios for each head dim, with the worst."""
    cells = Cells(content, passed)
    dims = {w: content["workloads"][w]["head_dim"] for w in cells.workloads}
    sustained = any("sustained_ms" in row for row in content["rows"])
    rows = []
    for peer in cells.peers():
        for key in ("ms", "sustained_ms") if sustained else ("ms",):
            name = f"{peer}, sustained" if key == "sustained_ms" else peer
            for dim in [*sorted(set(dims.values())), None]:
                found = {w: cells.ratio(w, peer, key) for w in cells.workloads if dim in (None, dims[w])}
                line = _mean_line({w: ratio for w, ratio in found.items() if ratio is not None and ratio > 0})
                if line:
                    rows.append([name, "all" if dim is None else str(dim), *line])
    header = ["peer", "head dim", "geometric mean of x", "least x", "at", "workloads"]
    return Table(f"{cells.ours()} against each peer, {passed}", header, rows)


def _mean_line(found: dict[str, float]) -> list[str]:
    if not found:
        return []
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    worst = min(found, key=lambda workload: found[workload])
    return [f"{mean:.3f}", f"{found[worst]:.3f}", worst, str(len(found))]


def memory(content: Content, passed: str) -> Table:
    """Temporary memory of the compiled programs."""
    cells = Cells(content, passed)
    names = cells.timed()
    rows = []
    for workload in cells.workloads:
        found = [cells.row(workload, name) for name in names]
        sizes = (None if row is None or row["temp_bytes"] is None else row["temp_bytes"] / 2**20 for row in found)
        rows.append([workload, *(_number(size, "{:,.1f}") for size in sizes)])
    return Table(f"Temporary memory (MiB), {passed}", ["workload", *names], rows)


def errors(content: Content, passed: str) -> Table:
    """The largest relative error of each implementation."""
    cells = Cells(content, passed)
    rows = []
    for name in cells.timed():
        found = [row for workload in cells.workloads if (row := cells.row(workload, name))]
        worst = {of: max(row["errors"][of] for row in found) for of in found[0]["errors"]}
        rows.append([name, ", ".join(f"{of} {error:.2e}" for of, error in worst.items()), str(len(found))])
    title = f"Largest relative error against float32 standard attention, {passed}"
    return Table(title, ["implementation", "error", "workloads"], rows)


def without_time(content: Content, passed: str) -> Table:
    """What was wrong, refused or failed, with its reason."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in Cells(content, passed).without_time():
        reasons.setdefault((row["implementation"], row["status"], row["reason"]), []).append(row["workload"])
    rows = [[name, status, why, ", ".join(workloads)] for (name, status, why), workloads in reasons.items()]
    return Table(f"Without a time, {passed}", ["implementation", "status", "reason", "workloads"], rows)


def tiles(content: Content, passed: str) -> Table:
    """Each forced tile of our kernel beside the tuned one."""
    cells = Cells(content, passed)
    forced = [row for row in content["rows"] if row["pass"] == passed and "tile" in row]
    rows = []
    for row in forced:
        line = [row["workload"], "{} x {}".format(*row["tile"])]
        if row["status"] != "ok":
            rows.append([*line, "", "", row["reason"]])
            continue
        tuned = cells.row(row["workload"], cells.ours())
        ratio = None if tuned is None else tuned["ms"]["median"] / row["ms"]["median"]
        rows.append([*line, f"{row['ms']['median']:.4g}", f"{row['tflops']:.4g}", _number(ratio, "{:.3f}")])
    header = ["workload", "tile (queries x keys)", "ms", "TFLOP/s", f"x {cells.ours()} with its tuned tile"]
    return Table(f"Size of the tile, {passed}", header, rows)


# Of a run's times, and of the bytes that `traffic --measure` counts.
TIMES: dict[str, Callable[[Content, str], Table]] = {
    "ratios": ratios,
    "means": means,
    "speed": speed,
    "memory": memory,
    "errors": errors,
    "tiles": tiles,
    "without-time": without_time,
}
TRAFFIC: dict[str, Callable[[Content, str], Table]] = {"traffic": traffic.counted, "kernels": traffic.kernels}


def _tables(content: Content) -> dict[str, Callable[[Content, str], Table]]:
    return TRAFFIC if content["kind"] == traffic.KIND else TIMES


def together(contents: Sequence[Content]) -> Content:
    """Several runs as one: of each workload the rows of the run that measured most of it, as only those of one run are
    compared. What is said of the run itself is that of the first."""
    runs: dict[str, list[list[Any]]] = {}
    for content in contents:
        rows: dict[str, list[Any]] = {}
        for row in content["rows"]:
            rows.setdefault(row["workload"], []).append(row)
        for workload, found in rows.items():
            runs.setdefault(workload, []).append(found)
    best = [max(found, key=lambda rows: sum(row["status"] == "ok" for row in rows)) for found in runs.values()]
    workloads = {name: workload for content in contents for name, workload in content["workloads"].items()}
    return contents[0] | {"workloads": workloads, "rows": [row for rows in best for row in rows]}


def table(name: str, content: Content, passed: str, workloads: str = "*") -> Table:
    """Of the workloads that match a glob pattern. ValueError for a name or a pass that there is not, or no workload."""
    known, passes = _tables(content), (*PASSES, DECODE)
    if name not in known or passed not in passes:
        raise ValueError(f"no table {name!r} of {passed!r}; there are {', '.join(known)} of {', '.join(passes)}")
    rows = [row for row in content["rows"] if fnmatch.fnmatchcase(row["workload"], workloads)]
    if not rows:
        raise ValueError(f"no rows of workloads {workloads!r}")
    return known[name](content | {"rows": rows}, passed)


def setting(content: Content) -> str:
    """Where, how and from what, in a sentence or two."""
    where, settings = content["environment"], content["settings"]
    said = f"{environment.summary(where)}; inputs {content['inputs']}"
    if content["kind"] == traffic.KIND:
        return f"{said}. Counted by ncu. Command: `{where['command']}`"
    clocks = " and ".join(sorted({row["clock"] for row in content["rows"] if row["status"] == "ok"}))
    text = f"{said}. {settings['rounds']} rounds of up to {settings['iterations']} calls, clock: {clocks or 'none'}."
    if content["ceilings"]:
        ceiling = content["ceilings"]
        text += f" Ceilings: {ceiling['matmul_tflops']:.4g} TFLOP/s, {ceiling['copy_gbps']:.4g} GB/s."
    for name, what in (("left_out", "left out for lack of time"), ("interrupted", "interrupted")):
        if content[name]:
            text += f" {what.capitalize()}{': ' + ', '.join(content[name]) if name == 'left_out' else ''}."
    return f"{text}{' Note: ' + settings['note'] + '.' if settings['note'] else ''} Command: `{where['command']}`"


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Benchmarks</title>
<style>body {{ font: 15px/1.5 sans-serif; max-width: 75em; margin: 2em auto; }} table {{ border-collapse: collapse; }}
td, th {{ padding: .2em .7em; border-bottom: 1px solid #ddd; text-align: left; }} img {{ max-width: 100%; }}</style>
{body}
</html>
"""


def write(files: list[Path], folder: Path) -> Path:
    """report.md, report.html and the figures (PNG and SVG) of the runs in `files`; returns the page."""
    try:
        from pallas_flash.benchmarks import figures  # matplotlib, which nothing else here needs
    except ModuleNotFoundError as error:
        raise ValueError(f'report needs {error.name}: from a checkout, pip install ".[benchmarks]"') from error

    contents = [results.read(path) for path in files]
    for path, content in zip(files, contents, strict=True):
        if content["kind"] not in (results.KIND, traffic.KIND):
            raise ValueError(f"report: {path}: not the results of `run` or `traffic`, but of {content['kind']}")
    if len({content["environment"]["device"] for content in contents}) > 1:
        raise ValueError("report: the files are of different devices; make one report for each")
    make_folder("--output", folder)
    drawn = figures.draw(contents, folder)
    text, page = ["# Benchmarks", READING], ["<h1>Benchmarks</h1>", f"<p>{html.escape(READING)}</p>"]
    for name in drawn:
        text.append(f"![{name}]({name}.png)")
        page.append(f'<p><img src="{name}.svg" alt="{name}"></p>')
    for path, content in zip(files, contents, strict=True):
        text += [f"## {path.name}", setting(content)]
        page += [f"<h2>{html.escape(path.name)}</h2>", f"<p>{html.escape(setting(content))}</p>"]
        for made in _all_tables(content):
            text += [f"### {made.title}", markdown(made)]
            page += [f"<h3>{html.escape(made.title)}</h3>", as_html(made)]
    (folder / "report.md").write_text("\n\n".join(text) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(PAGE.format(body="\n".join(page)), encoding="utf-8")
    return folder / "report.md"


def _all_tables(content: Content) -> Iterator[Table]:
    made = (make(content, passed) for passed in content["settings"]["passes"] for make in _tables(content).values())
    return (each for each in made if each.rows)
