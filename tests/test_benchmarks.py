"""The benchmarks on a CPU: tiny workloads run end to end, failures and wrong results are rows, reports are made."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_decode
from pallas_flash.benchmarks import __main__ as command_line
from pallas_flash.benchmarks import (
    cases,
    check,
    decoding,
    peers,
    programs,
    report,
    results,
    ring,
    rows,
    runner,
    timing,
)
from pallas_flash.benchmarks.cases import Workload
from pallas_flash.benchmarks.peers import Peer
from pallas_flash.benchmarks.progress import Progress
from scripts import benchmark_tables

TINY = Workload("tiny", 2, 48, 4, 2, 16, 8, is_causal=True)
PACKED = Workload("packed", 2, 40, 2, 2, 16, documents=3)
WINDOW = Workload("window", 1, 40, 2, 1, 16, is_causal=True, window=7, soft_cap=3.0)


def measure(tmp_path: Path, chosen: list[Peer], *workloads: Workload, **options: Any) -> dict[str, Any]:
    settings = runner.Settings(
        workloads, options.pop("passes", cases.PASSES), chosen, rounds=2, iterations=2, folder=tmp_path, **options
    )
    return results.read(runner.run(settings, Progress(workloads=len(workloads))))


def ours(*names: str) -> list[Peer]:
    return peers.select(list(names), peers.all_peers())


def wrong_attend(workload: Workload) -> peers.Attend:
    """Forgets the documents."""
    return lambda q, k, v, _: jax.nn.dot_product_attention(q, k, v)


def test_end_to_end(tmp_path, capsys):
    content = measure(tmp_path, ours("xla", "reference", "jax.nn-xla"), PACKED)
    by_key = {(r["workload"], r["implementation"], r["pass"]): r for r in content["rows"]}
    assert len(by_key) == len(content["rows"]) == 3 * 3
    assert len(capsys.readouterr().out.splitlines()) == len(by_key)
    for (_, implementation, passed), row in by_key.items():
        if implementation == "jax.nn-xla":
            assert row["status"] == "failed" and "T x S" in row["reason"]
            continue
        is_difference = implementation == "reference" and passed == "backward"
        if is_difference and row["reason"] == rows.LOST_IN_NOISE:  # what other processes do to so short a time
            continue
        assert row["status"] == "ok" and row["clock"] == "wall" and "no GPU" in row["clock_note"], row
        assert row["tflops"] > 0 and row["gbps"] > 0 and row["bound_by"] in ("arithmetic", "memory")
        computed = {"forward": {"out"}, "backward": {"dq", "dk", "dv"}, "forward+backward": {*check.NAMES}}
        assert set(row["errors"]) == computed[passed]
        assert row["method"].startswith("difference") == is_difference
    row = by_key["packed", "xla", "forward"]
    assert row["peak_bytes"] >= row["temp_bytes"] + PACKED.min_bytes("forward") - 4 * 2 * 40 * 2  # without lse
    where = content["environment"]
    assert where["jax"] == jax.__version__ and where["device"] and where["command"] and "dirty" in where
    assert content["ceilings"]["matmul_tflops"] > 0 and not content["interrupted"] and content["left_out"] == []


@pytest.mark.parametrize("both, forward, reason", [(3.0, 1.0, None), (1.0, 1.0, rows.LOST_IN_NOISE)])
def test_differences_of_two_times(both, forward, reason):
    samples = [timing.Samples(wall=[ms, ms], note="a note") for ms in (both, forward)]
    kinds = ("forward+backward", "forward")
    parts = [rows.Measured(*ours("reference"), kind, samples=each) for kind, each in zip(kinds, samples, strict=True)]
    row = rows.make(PACKED, "backward", parts, None)
    assert row["reason"] == reason and row.get("ms", {}).get("median") == (None if reason else both - forward)


def test_wrong_results_and_failures_are_rows_without_times(tmp_path):
    def broken(_: Workload) -> peers.Attend:
        raise NotImplementedError("cannot\n  at all")

    chosen = [Peer("wrong", wrong_attend), Peer("broken", broken, backward_alone=False), *ours("xla")]
    passes = ["forward", "backward"]
    content = measure(tmp_path, chosen, PACKED, passes=passes, sustained=True)
    by_key = {(r["implementation"], r["pass"]): r for r in content["rows"]}
    for passed in passes:
        wrong, failed, right = (by_key[name, passed] for name in ("wrong", "broken", "xla"))
        assert wrong["status"] == "wrong" and "budget" in wrong["reason"] and not {"ms", "tflops"} & set(wrong)
        assert failed["status"] == "failed" and failed["reason"] == "NotImplementedError: cannot at all"
        assert "ms" not in failed
        assert right["status"] == "ok" and right["sustained_ms"]["samples"] == 1


def test_without_expected_results_nothing_is_timed(tmp_path, monkeypatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(check, "expected", fail)
    content = measure(tmp_path, ours("xla", "torch-sdpa"), PACKED, passes=["forward"])
    assert [row["reason"].split(":")[0] for row in content["rows"]] == ["no expected results", "NotImplementedError"]


def test_pytorch_measures_itself(tmp_path, monkeypatch):
    """What its process answers becomes rows like the others, judged by the same budgets."""

    def answer(workload: Workload, name: str, kinds: list[str], calls: int) -> Any:
        assert name == "torch-flash"
        gradients = {"dq": 1.0 if workload is WINDOW else 0.0, "dk": 0.0, "dv": 0.0}
        memory = {"temp_bytes": 7, "peak_bytes": 9}
        forward = {"errors": {"out": 0.0}, "ms": [1.0] * calls, **memory}
        both = {"errors": {"out": 0.0, **gradients}, "ms": [3.0] * calls, **memory}
        return {kind: {"forward": forward, "forward+backward": both}[kind] for kind in kinds}

    monkeypatch.setattr(runner.torch_sdpa, "answer", answer)
    first, second = measure(tmp_path, ours("torch-flash"), PACKED, WINDOW, passes=["backward"])["rows"]
    assert first["ms"]["median"] == 2.0 and first["clock"] == "cuda events" and first["peak_bytes"] == 9
    assert first["method"].startswith("difference") and "process of its own" in first["clock_note"]
    assert second["status"] == "wrong" and "dq" in second["reason"]


class Interrupting(Progress):
    """Ctrl-C while the second workload is measured."""

    def start(self, workload: str) -> None:
        if workload == WINDOW.name:
            raise KeyboardInterrupt


def test_ctrl_c_keeps_the_rows(tmp_path):
    settings = runner.Settings([PACKED, WINDOW], ["forward"], ours("xla"), rounds=1, folder=tmp_path)
    content = results.read(runner.run(settings, Interrupting(workloads=2)))
    assert content["interrupted"] and [row["workload"] for row in content["rows"]] == [PACKED.name]
    assert content["rows"][0]["status"] == "ok"


def test_the_command_says_that_it_was_interrupted(saved, tmp_path, monkeypatch):
    content = json.loads(saved.read_text())
    for interrupted, status in ((False, 0), (True, 130)):
        saved.write_text(json.dumps(content | {"interrupted": interrupted}))
        monkeypatch.setattr(runner, "run", lambda settings, progress: saved)
        assert command_line.main(["run", "--quick", "--output", str(tmp_path)]) == status


def test_ctrl_c_within_a_workload(tmp_path, monkeypatch):
    """What was sampled has its row, the rest say that they were interrupted."""
    sample = timing.Timer.sample
    calls = []

    def interrupted(self: Any, program: Any, samples: Any) -> None:
        calls.append(program)
        if len(calls) == 6:  # the ceilings are four; one program is measured
            raise KeyboardInterrupt
        sample(self, program, samples)

    monkeypatch.setattr(timing.Timer, "sample", interrupted)
    content = measure(tmp_path, ours("xla"), PACKED, passes=["forward", "backward"])
    assert content["interrupted"]
    assert sorted(row["reason"] or row["status"] for row in content["rows"]) == ["interrupted", "ok"]


def test_a_limit_leaves_out_what_does_not_fit(tmp_path):
    content = measure(tmp_path, ours("xla"), PACKED, WINDOW, passes=["forward"], limit=0.0)
    assert content["left_out"] == [PACKED.name, WINDOW.name] and content["rows"] == []


def test_no_file_is_overwritten(tmp_path):
    files = [results.ResultsFile(tmp_path) for _ in range(3)]
    for number, file in enumerate(files):
        file.write({"number": number, "x": 1 / 3})
    assert [json.loads(file.path.read_text()) for file in files] == [{"number": n, "x": 0.333333} for n in range(3)]
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("workload", [TINY, PACKED, WINDOW], ids=lambda w: w.name)
def test_expected_results_and_costs(workload, monkeypatch):
    """Standard attention in slices equals standard attention; the pairs are those that the mask allows."""
    monkeypatch.setattr(check, "BLOCK_Q", 16)
    inputs = cases.make_inputs(workload, 3)
    exact = inputs._replace(**{name: x.astype(jnp.float32) for name, x in zip("qkv", inputs[:3], strict=True)})
    attend = peers._ours("reference", workload)
    out, pull = jax.vjp(lambda *qkv: attend(*qkv, inputs.packing), *exact[:3])
    want = check.Results(out, *pull(inputs.dout.astype(jnp.float32)))
    errors = check.relative_errors(check.expected(workload, inputs), want)
    assert max(errors.values()) < 1e-5
    assert check.too_large(dict.fromkeys(check.NAMES, math.nan), workload.dtype).keys() == {*check.NAMES}

    ones = jnp.zeros((1, workload.seq_len, 1, 8), jnp.float32)
    allowed = (jax.jacobian(lambda v: attend(ones, ones, v, _first(inputs.packing))[0, :, 0, 0])(ones) != 0).sum()
    assert int(allowed) == workload.pairs()


def _first(packing: cases.Packing | None) -> cases.Packing | None:
    return None if packing is None else packing._replace(segment_ids=packing.segment_ids[:1])


def test_flops_and_bytes():
    w = Workload("x", 2, 8192, 16, 16, 128)
    assert w.flops("forward") == 4 * 2 * 16 * 8192**2 * 128
    assert w.flops("backward") == 2.5 * w.flops("forward")
    mla = Workload("x", 1, 100, 2, 2, 192, 128)
    assert mla.flops("forward+backward") == mla.flops("forward") + mla.flops("backward")
    gpt2 = cases.select(["gpt2-full-1024"], cases.WORKLOADS)[0]
    tensor = 64 * 1024 * 16 * 64 * 2
    assert gpt2.min_bytes("forward") == 4 * tensor + 4 * 64 * 1024 * 16


def test_selection():
    names = [w.name for w in cases.select(["fa3-h128-*-8192", "window*"], cases.WORKLOADS)]
    assert names == ["fa3-h128-full-8192", "fa3-h128-causal-8192", "window-1024-32768"]
    assert len(cases.select(["fa3-*"], cases.WORKLOADS)) == 36
    with pytest.raises(ValueError, match="no such workload"):
        cases.select(["gpt5*"], cases.WORKLOADS)
    with pytest.raises(ValueError, match="no such implementation"):
        ours("fa9")
    assert all(w.batch * w.seq_len == cases.TOKENS for w in cases.select(["fa3-*"], cases.WORKLOADS))


def test_small_inputs_are_rotated():
    small, large = (cases.select([name], cases.WORKLOADS)[0] for name in ("gpt2-full-1024", "llama3-8b-8192"))
    assert programs.number_of_sets(TINY, rotate=True) == programs.MAX_SETS
    assert programs.number_of_sets(TINY, rotate=False) == 1
    assert programs.number_of_sets(large, rotate=True) == programs.number_of_sets(small, rotate=True) == 1
    program = programs.compile_program(lambda x: x + 1, [(jnp.array(n),) for n in range(3)])
    call = programs.Rotating(program)
    assert isinstance(call, jax.stages.Wrapped)
    assert [int(call()) for _ in range(4)] == [1, 2, 3, 1]


def test_command_line(tmp_path, capsys):
    assert command_line.main(["run", "--list", "--workloads", "gpt2*", "--implementations", "fa3", "sm90"]) == 0
    assert capsys.readouterr().out.split("\n\n") == [
        "workloads:\ngpt2-full-1024\ngpt2-causal-1024",
        "implementations:\nsm90\nfa3",
        "passes:\nforward\nbackward\nforward+backward",
        "--passes decode has workloads and implementations of its own\n",
    ]
    assert command_line.main(["run", "--workloads", "nothing*"]) == 2
    assert "no such workload" in capsys.readouterr().err
    (tmp_path / "bad.json").write_text("{}")
    assert command_line.main(["report", str(tmp_path / "bad.json"), "--output", str(tmp_path)]) == 2
    assert "schema" in capsys.readouterr().err


WRONG_RINGS = {
    "--devices": ["--devices -1", "--devices 0", "--devices 1", "--devices two", "--devices 64"],
    "--tokens": ["--tokens 0", "--tokens 1022 --devices 2", "--tokens 65536 --devices 3", "--tokens 6"],
    "--heads": ["--heads 0", "--heads -2"],
    "--head-dim": ["--head-dim 0"],
    "--heads-at-once": [f"--heads-at-once {heads}" for heads in ("2 2", "3", "32", "0", "1 -1")],
}


@pytest.mark.parametrize("name", WRONG_RINGS)
def test_arguments_of_the_ring(name, capsys):
    for arguments in WRONG_RINGS[name]:
        with pytest.raises(SystemExit, match="2"):
            ring.main(arguments.split())
        assert re.search(rf"error: (argument )?{name}: .*must be|error: {name}: .* ring", capsys.readouterr().err)


def test_a_folder_of_the_ring_is_made_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ring.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(ring, "measure", lambda parsed: pytest.fail("measured"))
    for option in ("--output", "--trace"):
        with pytest.raises(SystemExit, match="2"):
            ring.main(["--devices", "2", "--output", str(tmp_path), option, "/dev/null/x"])
        assert f"error: {option} /dev/null/x: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize("limit", ["nan", "-5", "0", "inf", "x"])
def test_a_limit_is_a_time(limit, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["run", "--limit", limit])
    assert f"argument --limit: must be a finite number above 0, not '{limit}'" in capsys.readouterr().err


def test_tiles_are_wanted_in_a_pass_that_has_them(capsys):
    for passed in ("decode", "forward+backward"):
        assert command_line.main(["run", "--tiles", "--list", "--passes", passed]) == 2
        assert "--tiles: wanted with --passes forward or backward" in capsys.readouterr().err


def test_where_nothing_can_be_written(saved, capsys):
    for command in (["run", "--quick"], ["report", str(saved)]):
        assert command_line.main([*command, "--output", "/dev/null/x"]) == 2
        assert capsys.readouterr().err.endswith("error: --output /dev/null/x: Not a directory\n")


def test_what_a_machine_lacks_is_said(saved, capsys, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda settings, progress: saved)
    for quick, said in (([], "no GPU here: wall time on a CPU"), (["--quick"], "")):
        assert command_line.main(["run", *quick]) == 0
        error = capsys.readouterr().err
        assert said in error and bool(error) == bool(said)
    with pytest.raises(SystemExit, match="2"):
        ring.main([])
    assert "a ring of 2 GPUs or more, and there are 0 here" in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "pallas_flash.benchmarks.figures", raising=False)
    monkeypatch.delattr("pallas_flash.benchmarks.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command_line.main(["report", "none.json"]) == 2
    assert 'report needs matplotlib: from a checkout, pip install ".[benchmarks]"' in capsys.readouterr().err


def test_decoding(tmp_path, capsys):
    """The quick workloads end to end; a position that is off by one is wrong; what others lack is said."""
    command = ["run", "--passes", "decode", "--quick", "--rounds", "1", "--iterations", "1", "--output", str(tmp_path)]
    assert command_line.main(command) == 0
    (path,) = tmp_path.glob("*.json")
    rows = {(row["workload"], row["implementation"]): row for row in results.read(path)["rows"]}
    assert all(row["status"] == "ok" for (_, name), row in rows.items() if name == "xla")
    assert rows["quick-decode-one", "jax.nn-xla"]["status"] == "ok"
    assert "no pages" in rows["quick-decode-paged-int8", "jax.nn-xla"]["reason"]
    assert report.table("speed", results.read(path), "decode").title == "GB/s, decode"

    def shifted(workload: Any) -> Any:
        return lambda i: flash_decode(i.q, i.k, i.v, i.lengths - 1, local_window_size=workload.window)

    content = measure(tmp_path / "wrong", [Peer("shifted", shifted)], decoding.QUICK[0], passes=["decode"])
    assert content["rows"][0]["status"] == "wrong"
    assert command_line.main(["run", "--passes", "decode", "forward"]) == 2
    assert "alone" in capsys.readouterr().err


def test_bytes_and_flops_of_decoding():
    w = decoding.DecodeWorkload("x", 8, 32768)
    assert w.pairs() == 32768 and w.flops("decode") == 4 * 8 * 32 * 128 * 32768
    assert w.min_bytes("decode") == 2 * 8 * 32768 * 8 * 128 * 2 + 2 * 8 * 32 * 128 * 2
    int8 = decoding.DecodeWorkload("x", 8, 32768, cache_dtype="int8", window=99, new_tokens=2)
    assert int8.pairs() == 200 and int8.seen() == 101
    assert int8.min_bytes("decode") == 2 * 8 * 101 * 8 * (128 + 4) + 2 * 2 * 8 * 32 * 128 * 2
    assert len({w.name for w in decoding.WORKLOADS}) == len(decoding.WORKLOADS)


# Reports: from a file that nobody measured ----------------------------------------------------------------------------


def synthetic(times: dict[str, float]) -> dict[str, Any]:
    """`times`: milliseconds of each implementation at 512 tokens, twice as many at 1,024."""
    workloads = cases.select(["fa3-h64-full-512", "fa3-h64-full-1024"], cases.WORKLOADS)
    made = []
    for factor, workload in enumerate(workloads, 1):
        for name, ms in times.items():
            spread = {"median": factor * ms, "p20": ms, "p80": 3 * ms, "min": ms, "samples": 6}
            made.append({
                "workload": workload.name, "implementation": name, "pass": "forward", "status": "ok", "reason": None,
                "errors": {"out": 2e-3}, "method": "a program of its own", "clock": "cupti", "clock_note": None,
                "ms": spread, "wall_ms": spread, "temp_bytes": factor * 2**20, "tflops": 100.0 / ms, "gbps": 1.0,
                "share_of_matmul": 0.5, "share_of_copy": 0.1, "bound_by": "arithmetic",
            })  # fmt: skip
        refused = {"workload": workload.name, "implementation": "fa3", "pass": "forward", "status": "failed"}
        made.append(refused | {"reason": "no | module", "errors": {}, "method": "a program of its own"})
    where = dict.fromkeys(("driver", "runtime", "jaxlib", "python", "machine"), "1") | {
        "device": "Some GPU",
        "jax": "2",
    }
    return {
        "schema": results.SCHEMA, "environment": where | {"commit": "a" * 40, "dirty": True, "command": "python"},
        "inputs": "normal", "settings": {"passes": ["forward"], "rounds": 3, "iterations": 8, "note": None},
        "interrupted": False, "left_out": ["gpt2"], "ceilings": {"matmul_tflops": 700.0, "copy_gbps": 4000.0},
        "workloads": {w.name: {"head_dim": 64, "is_causal": False, "seq_len": w.seq_len} for w in workloads},
        "rows": made,
    }  # fmt: skip


@pytest.fixture
def saved(tmp_path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(synthetic({"sm90": 1.0, "jax.nn-cudnn": 1.25, "reference": 8.0})))
    return path


def test_report(saved, tmp_path):
    page = report.write([saved], tmp_path / "report")
    text = page.read_text()
    assert "| fa3-h64-full-512 | 1 | 1 to 3 | 100 | 50 % | arithmetic | 1.250 | 8.000 |" in text
    assert "| jax.nn-cudnn | 64 | 1.250 | 1.250 | fa3-h64-full-512 | 2 |" in text
    assert "no \\| module" in text and "Left out for lack of time: gpt2." in text
    assert "aaaaaaaaaaaa with changes" in text and "<td>1.250</td>" in page.with_suffix(".html").read_text()
    drawn = {path.name for path in page.parent.iterdir()} - {"report.md", "report.html"}
    names = ("speed-forward", "speedup-forward", "memory-forward", "roofline-forward")
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}


def test_a_ring_makes_no_report(tmp_path):
    """Its one table is printed at once."""
    file = Path(__file__).parent.parent / "docs/results/ring.json"
    with pytest.raises(ValueError, match=r"ring\.json: not the results of `run` or `traffic`, but of ring"):
        report.write([file], tmp_path)


def test_files_of_different_devices_make_no_report(saved, tmp_path):
    other = json.loads(saved.read_text())
    other["environment"]["device"] = "Another"
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="different devices"):
        report.write([saved, tmp_path / "other.json"], tmp_path / "report")


def test_documents_are_current():
    assert benchmark_tables.stale() == [], "run `make readme`"


def test_tables_in_a_document(saved):
    begin, end = (
        "<!-- benchmarks: begin ratios of forward for *-512 in run.json (make readme) -->",
        "<!-- benchmarks: end -->",
    )
    commands = "<!-- benchmarks: begin commands of * for * in * (make readme) -->"
    text = f"Before.\n{begin}\n| stale |\n{end}\nBetween.\n{commands}{end}\nAfter.\n"
    made = benchmark_tables.with_tables(text, saved.parent)
    assert "stale" not in made and made.count("| 1.250 | 8.000 |") == 1 and "Some GPU" in made
    assert "From [run.json](#runjson)." in made and "### [run.json](run.json)" in made and "Command: `python" in made
    assert made.startswith("Before.\n") and "\nBetween.\n" in made and made.endswith("\nAfter.\n")
    assert benchmark_tables.with_tables(made, saved.parent) == made
    for old, new in (("(make readme)", ""), ("ratios of", "ratio of"), ("run.", "r."), ("*-512", "*-513")):
        with pytest.raises(ValueError):
            benchmark_tables.with_tables(text.replace(old, new), saved.parent)


def test_several_runs_are_read_as_one(saved):
    """A workload comes from the run that measured most of it, never from two."""
    failed = results.read(saved) | {"left_out": ["all"]}
    rows = [row | {"status": "failed", "reason": "no", "ms": None} for row in failed["rows"]]
    both = report.together([failed | {"rows": rows}, results.read(saved)])
    assert both["rows"] == results.read(saved)["rows"] and both["left_out"] == ["all"]
    begin = "<!-- benchmarks: begin ratios of forward for *-512 in run.json+run.json (make readme) -->"
    text = f"{begin}<!-- benchmarks: end -->"
    assert "| 1.250 | 8.000 |" in benchmark_tables.with_tables(text, saved.parent)


def test_a_ratio_needs_both_times():
    content = synthetic({"sm90": 1.0, "reference": 4.0})
    content["rows"][0] |= {"status": "wrong", "reason": "relative error"}
    made = report.ratios(content, "forward")
    assert [row[0] for row in made.rows] == ["fa3-h64-full-1024"]
    (mean,) = [row for row in report.means(content, "forward").rows if row[1] == "all"]
    assert np.isclose(float(mean[2]), 4.0) and mean[-1] == "1"


@pytest.mark.gpu
def test_device_times(tmp_path):
    """On a GPU there are device times, also after sustained work, and the wall time is no shorter."""
    workload = Workload("small", 2, 1024, 8, 8, 128, is_causal=True)
    content = measure(tmp_path, ours("xla", "jax.nn-cudnn"), workload, sustained=True)
    for row in content["rows"]:
        assert row["status"] == "ok" and row["clock"] == "cupti", row
        assert 0 < row["ms"]["min"] < 1.1 * row["wall_ms"]["median"] and row["sustained_ms"]["samples"] > 0
    assert content["ceilings"]["copy_gbps"] > 100
