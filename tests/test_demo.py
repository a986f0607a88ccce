"""The training demo: its tasks, its report, its errors, and that a killed run goes on bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import train_demo
from demo import comparison, report, tasks
from demo.options import make_run, with_defaults
from demo.run_folder import RunFolder
from demo.training import Checkpoints, Run
from models.config import PRESETS

ROOT = Path(__file__).parent.parent
SMALL = ["--seq-len", "16", "--batch-size", "4", "--steps", "8", "--checkpoint-every", "3", "--lengths", "16,32"]
LONG = ["--seq-len", "16", "--batch-size", "4", "--checkpoint-every", "20", "--lengths", "32"]
STEPS = 300  # of the runs that are killed
BUDGET = ["--memory-budget", "0.002"]  # GiB: just enough for these, so that the longest sequence is found at once


@pytest.fixture(scope="module", autouse=True)
def quick_compilation() -> Iterator[None]:
    """What takes time here is the compiler."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def halve_the_model(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=1))


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the tiny model, where the model does not matter."""
    halve_the_model(monkeypatch)


def demo(*arguments: object) -> int:
    return train_demo.main([str(argument) for argument in arguments])


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "train_demo.py", *map(str, arguments)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text())


def wait_for_checkpoint(process: subprocess.Popen[str], folder: Path, implementation: str) -> None:
    deadline = time.monotonic() + 120
    while not saved_steps(folder, implementation):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no checkpoint appeared"
        time.sleep(0.02)


def saved_steps(folder: Path, implementation: str) -> list[int]:
    saved = (folder / "checkpoints" / implementation).glob("*")
    return [int(path.name) for path in saved if path.name.isdecimal()]


def recall_run(implementation: str) -> Run:
    """The run that LONG describes."""
    options = with_defaults({"seq_len": 16, "batch_size": 4, "steps": STEPS})
    return make_run(options, tasks.make_task("recall", 16), implementation)


def same_bits(left: object, right: object) -> bool:
    leaves = zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves)


# Tasks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["recall", "copy"])
def test_batches_are_a_function_of_seed_and_step(name: str) -> None:
    task = tasks.make_task(name, 32)
    again = tasks.make_task(name, 32)
    assert same_bits(task.train_batch(1, 7, 4), again.train_batch(1, 7, 4))
    assert not same_bits(task.train_batch(1, 7, 4), task.train_batch(1, 8, 4))
    assert not same_bits(task.train_batch(1, 7, 4), task.train_batch(2, 7, 4))
    assert not same_bits(task.train_batch(1, 0, 4), next(iter(task.evaluation_batches(1, 4))))


def test_recall_is_answered_by_looking_the_key_up() -> None:
    batch = tasks.make_task("recall", 32).train_batch(0, 0, 64)
    for tokens, targets, weights in zip(*batch, strict=True):
        pairs = dict(zip(tokens[0:16:2], tokens[1:16:2], strict=True))
        assert len(pairs) == 8, "the keys of a sequence are distinct"
        asked = np.flatnonzero(weights)
        assert asked.tolist() == list(range(16, 32, 2))
        assert [pairs[tokens[position]] for position in asked] == targets[asked].tolist()
    assert batch.tokens.min() >= 0
    assert batch.tokens.max() < 32


def test_copy_repeats_what_came_before_the_separator() -> None:
    batch = tasks.make_task("copy", 16).train_batch(0, 0, 4)
    assert np.array_equal(batch.targets[:, 8:], batch.tokens[:, :8])
    assert (batch.tokens[:, 8] == tasks.COPY_SYMBOLS).all()
    assert batch.weights.sum(axis=1).tolist() == [8.0] * 4


def test_text_splits_and_counts_each_validation_byte_once(tmp_path: Path) -> None:
    file = tmp_path / "bytes"
    file.write_bytes(bytes(range(200)))
    task = tasks.make_task("text", 9, str(file))
    assert isinstance(task, tasks.Text)
    assert task.split == 180
    for step in range(50):
        batch = task.train_batch(0, step, 8)
        assert np.array_equal(batch.targets, batch.tokens + 1)
        assert batch.targets.max() < 180
    counted = [b.targets[b.weights > 0] for b in task.evaluation_batches(0, 4)]
    assert np.concatenate(counted).tolist() == list(range(181, 199))


# The whole job --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run with one layer."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    with pytest.MonkeyPatch.context() as patch:
        halve_the_model(patch)
        assert demo(*SMALL, *BUDGET, "--output", folder) == 0
    return folder


def test_the_report_is_complete_and_consistent(finished: Path) -> None:
    found = results(finished)
    assert set(found["training"]) == {"reference", "flash"}
    for training in found["training"].values():
        assert training["status"] == "finished"
        assert len(training["losses"]) == training["steps"] == 8
        assert 0 <= training["accuracy"] <= 1
    curves = [np.array(training["losses"]) for training in found["training"].values()]
    assert found["agreement"]["max_abs_difference"] == np.abs(curves[0] - curves[1]).max() < 1e-4
    assert [(c["implementation"], c["seq_len"], c["status"]) for c in found["costs"]] == [
        (name, seq_len, "measured") for seq_len in (16, 32) for name in ("reference", "flash")
    ]
    for longest in found["longest"]:
        assert longest["total_bytes"] <= found["options"]["memory_budget"] * 2**30 < longest["too_long_bytes"]
    page = (finished / "report.md").read_text()
    for name in ("loss.png", "memory.png", "time.png"):
        assert f"({name})" in page
        assert (finished / name).read_bytes().startswith(b"\x89PNG")
    assert f"{found['agreement']['max_abs_difference']:.2e}" in page


@pytest.mark.usefixtures("one_layer")
def test_resuming_a_finished_run_trains_nothing_and_reports_again(finished: Path) -> None:
    before = results(finished)
    (finished / "report.md").unlink()
    assert demo("--resume", "--output", finished) == 0
    assert results(finished) == before
    assert (finished / "report.md").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "--steps", "9"], "--steps is 9, but the run in"),
        (["--resume", "--implementation", "flash"], "--implementation is ('flash',), but the run in"),
        (["--resume", "--overwrite"], "exclude each other"),
        ([], "holds an earlier run; add --resume to go on or --overwrite"),
    ],
)
def test_an_earlier_run_is_neither_mixed_nor_destroyed(
    finished: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert demo("--output", finished, *flags) == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


@pytest.mark.usefixtures("one_layer")
def test_out_of_memory_in_the_reference_is_a_row_and_not_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_step = Run.compile_step

    def without_memory(run: Run, batch_size: int, seq_len: int):
        if run.config.attention == "reference":
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")
        return compile_step(run, batch_size, seq_len)

    monkeypatch.setattr(Run, "compile_step", without_memory)
    assert demo(*SMALL, *BUDGET, "--lengths", "32", "--output", tmp_path) == 0
    found = results(tmp_path)
    assert {name: t["status"] for name, t in found["training"].items()} == {
        "reference": comparison.OUT_OF_MEMORY,
        "flash": "finished",
    }
    assert [cost["status"] for cost in found["costs"]] == [comparison.OUT_OF_MEMORY, comparison.MEASURED]
    assert found["longest"][0]["seq_len"] == 0
    assert found["longest"][1]["seq_len"] > 0
    assert found["agreement"] is None
    assert "out of memory" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("one_layer")
def test_what_needs_more_than_the_budget_is_not_run(tmp_path: Path) -> None:
    flags = [*SMALL, "--lengths", "16", "--implementation", "reference", "--memory-budget", "0.0001"]
    assert demo(*flags, "--output", tmp_path) == 0
    found = results(tmp_path)
    assert found["training"]["reference"]["status"] == comparison.OVER_BUDGET
    assert found["costs"][0]["seconds"] is None
    assert found["longest"][0]["seq_len"] == 0


@pytest.mark.usefixtures("one_layer")
def test_text_reports_bits_per_byte_and_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. [bold] " * 40)
    flags = ["--task", "text", "--file", file, *SMALL, "--implementation", "flash", *BUDGET]
    assert demo(*flags, "--lengths", "32", "--output", tmp_path / "run") == 0
    training = results(tmp_path / "run")["training"]["flash"]
    assert training["bits"] == pytest.approx(training["loss"] / np.log(2))
    assert training["sample"]["prompt"] in file.read_text()
    assert training["sample"]["continuation"]
    assert "Sample (flash)" in capsys.readouterr().out
    file.write_text("Something else. " * 100)
    assert demo("--resume", "--output", tmp_path / "run") == 2
    assert "has changed since" in capsys.readouterr().err


# Killed and resumed ---------------------------------------------------------------------------------------------------


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    flags = [*LONG, *BUDGET, "--steps", STEPS]
    for implementation in ("reference", "flash"):  # once in the first training, once in the second
        process = start(*flags, "--output", tmp_path, *(["--resume"] if (tmp_path / "options.json").exists() else []))
        wait_for_checkpoint(process, tmp_path, implementation)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert 0 < max(saved_steps(tmp_path, implementation)) < STEPS
    assert results(tmp_path)["training"].keys() == {"reference"}
    assert demo("--resume", "--output", tmp_path) == 0
    for implementation in ("reference", "flash"):
        run = recall_run(implementation)
        program, state = run.compile_step(run.batch_size, 16), run.initial_state()
        for step in range(STEPS):
            state = program(state, run.task.train_batch(run.seed, step, run.batch_size))
        with contextlib.closing(Checkpoints(tmp_path / "checkpoints" / implementation)) as checkpoints:
            assert same_bits(checkpoints.restore(run.initial_state()), state)
        assert results(tmp_path)["training"][implementation]["losses"] == np.asarray(state.losses).tolist()


def test_sigint_saves_reports_and_exits_with_130(tmp_path: Path) -> None:
    process = start(*LONG, "--steps", 100_000, "--output", tmp_path)
    wait_for_checkpoint(process, tmp_path, "reference")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "--resume" in err
    training = results(tmp_path)["training"]["reference"]
    assert training["status"] == "interrupted"
    assert training["steps"] == len(training["losses"]) == max(saved_steps(tmp_path, "reference"))
    assert "interrupted" in (tmp_path / "report.md").read_text()
    assert "interrupted" in out


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "poetry"], "invalid choice: 'poetry'"),
        (["--task", "text"], "needs --file PATH"),
        (["--task", "text", "--file", "missing.txt"], "--file missing.txt: No such file"),
        (["--task", "text", "--file", "empty.txt"], "the file is empty"),
        (["--task", "text", "--file", "."], "--file .: Is a directory"),
        (["--task", "text", "--file", "short.txt"], "--seq-len 128 is longer than the data: short.txt has 20 bytes"),
        (["--file", "short.txt"], "only --task text reads a file"),
        (["--seq-len", "0"], "--seq-len: '0' is not a whole number of at least 1"),
        (["--seq-len", "30"], "recall needs a multiple of 4"),
        (["--steps", "many"], "--steps: 'many' is not a whole number"),
        (["--batch-size", "-3"], "--batch-size: '-3' is not"),
        (["--lr", "nan"], "--lr: 'nan' is not a number above 0"),
        (["--lengths", "16,16"], "names something twice"),
        (["--lengths", "16,,32"], "'' is not a whole number"),
        (["--memory-budget", "0"], "--memory-budget: '0' is not a number above 0"),
        (["--implementation", "flash,magic"], "--implementation magic: unknown"),
        (["--unheard-of"], "unrecognized arguments: --unheard-of"),
        (["--output", "short.txt/run"], "--output short.txt/run: cannot be written: Not a directory"),
        (["--resume", "--output", "nowhere"], "--resume: nowhere holds no run"),
        (["--resume"], "--resume: output holds no run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("short.txt").write_text("only twenty bytes...")
    assert demo(*flags) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.txt", "short.txt"], "nothing is left behind"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert demo("--output", tmp_path, "--overwrite") == 2
    assert "holds checkpoints, which is of no run" in capsys.readouterr().err
    assert (tmp_path / "checkpoints").is_dir()


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder.fresh(tmp_path, tmp_path, overwrite=False)
    folder.write_json("options.json", {})
    folder.write_text("report.md", "")
    folder.checkpoints("flash").mkdir(parents=True)
    (tmp_path / "thesis.tex").touch()
    RunFolder.fresh(tmp_path, tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_each_run_without_a_folder_gets_the_next_number(tmp_path: Path) -> None:
    folders = [RunFolder.fresh(None, tmp_path / "output", overwrite=False) for _ in range(2)]
    assert [folder.path.name for folder in folders] == ["001", "002"]
    folders[0].write_json("options.json", {})
    assert RunFolder.existing(None, tmp_path / "output").path == folders[0].path, "002 was killed before it began"


def test_help_documents_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        demo("--help")
    assert exit_code.value.code == 0
    text = capsys.readouterr().out
    actions = [a for a in train_demo.build_parser()._actions if a.option_strings != ["-h", "--help"]]
    assert all(action.help for action in actions)
    assert all("default" in action.help for action in actions if action.nargs != 0)
    assert all(action.option_strings[0] in text for action in actions)


def test_a_curve_that_is_not_finite_has_no_agreement() -> None:
    curves = {"reference": {"losses": [1.0, None]}, "flash": {"losses": [1.0, 2.0]}}
    assert report.agreement({"training": curves}) is None


def test_other_runtime_errors_are_not_taken_for_lack_of_memory() -> None:
    assert comparison.is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not comparison.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: failed"))
    assert not comparison.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))
