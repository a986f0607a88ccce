"""The training demo: its tasks, its report, its errors, and that a killed run goes on bit for bit."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import itertools
import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

import train_demo
from demo import InputError, arguments, attentions, comparison, figures, options, report, summary, tasks
from demo.arguments import build_parser
from demo.compiling import Compiler, StoppedError
from demo.options import make_run, with_defaults
from demo.run_folder import RunFolder
from demo.stop import StopRequest
from demo.training import Checkpoints, Run
from models.config import PRESETS
from tests import test_docs

ROOT = Path(__file__).parent.parent
SMALL = ["--seq-len", "16", "--batch-size", "4", "--steps", "8", "--checkpoint-every", "3", "--lengths", "32,64"]
LONG = ["--seq-len", "16", "--batch-size", "4", "--checkpoint-every", "20", "--lengths", "16", "--no-longest"]
STEPS = 200  # of the run that is killed
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
        seconds = training["step_seconds"]
        assert 0 < seconds["p20"] <= seconds["median"] <= seconds["p80"]
    curves = [np.array(training["losses"]) for training in found["training"].values()]
    assert found["agreement"]["max_abs_difference"] == np.abs(curves[0] - curves[1]).max() < 1e-4
    assert [(c["implementation"], c["seq_len"], c["status"]) for c in found["costs"]] == [
        (name, seq_len, "measured") for seq_len in (32, 64) for name in ("reference", "flash")
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
    lower_step = Run.lower_step

    class TooLarge:
        def compile(self, options: object = None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.")

    def without_memory(run: Run, batch_size: int, seq_len: int):
        return TooLarge() if run.config.attention == "reference" else lower_step(run, batch_size, seq_len)

    monkeypatch.setattr(Run, "lower_step", without_memory)
    assert demo(*SMALL, "--no-longest", "--lengths", "16", "--output", tmp_path) == 0
    found = results(tmp_path)
    assert {name: t["status"] for name, t in found["training"].items()} == {
        "reference": comparison.OUT_OF_MEMORY,
        "flash": "finished",
    }
    assert [cost["status"] for cost in found["costs"]] == [comparison.OUT_OF_MEMORY, comparison.MEASURED]
    assert found["longest"] == []
    assert found["agreement"] is None
    assert "out of memory" in (tmp_path / "report.md").read_text()


@pytest.mark.usefixtures("one_layer")
def test_what_needs_more_than_the_budget_is_not_run(tmp_path: Path) -> None:
    flags = [*SMALL, "--lengths", "16", "--implementation", "reference", "--memory-budget", "0.0001", "--no-longest"]
    assert demo(*flags, "--output", tmp_path) == 0
    found = results(tmp_path)
    assert found["training"]["reference"]["status"] == comparison.OVER_BUDGET
    assert found["costs"][0]["seconds"] is None


@pytest.mark.usefixtures("one_layer")
def test_text_reports_bits_per_byte_and_a_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The quick brown fox jumps over the lazy dog. [bold] " * 40)
    flags = ["--task", "text", "--file", file, *SMALL, "--implementation", "flash", "--no-longest"]
    assert demo(*flags, "--lengths", "16", "--output", tmp_path / "run") == 0
    training = results(tmp_path / "run")["training"]["flash"]
    assert training["bits"] == pytest.approx(training["loss"] / np.log(2))
    assert training["sample"]["prompt"] in file.read_text()
    assert training["sample"]["continuation"]
    assert "Sample (flash)" in capsys.readouterr().out
    page = (tmp_path / "run" / "report.md").read_text()
    assert "last training loss (bits/byte)" in page
    assert f"| {training['losses'][-1] / np.log(2):.4f} | {training['bits']:.4f} |" in page
    assert "nats" not in page
    file.write_text("Something else. " * 100)
    assert demo("--resume", "--output", tmp_path / "run") == 2
    assert "has changed since" in capsys.readouterr().err


# Killed and resumed ---------------------------------------------------------------------------------------------------


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    process = start(*LONG, "--steps", STEPS, "--implementation", "flash", "--output", tmp_path)
    wait_for_checkpoint(process, tmp_path, "flash")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert 0 < max(saved_steps(tmp_path, "flash")) < STEPS
    assert demo("--resume", "--output", tmp_path) == 0
    run = recall_run("flash")
    program, state = run.compile_step(run.batch_size, 16), run.initial_state()
    for step in range(STEPS):
        state = program(state, run.task.train_batch(run.seed, step, run.batch_size))
    with contextlib.closing(Checkpoints(tmp_path / "checkpoints" / "flash")) as checkpoints:
        assert same_bits(checkpoints.restore(run.initial_state()), state)
    assert results(tmp_path)["training"]["flash"]["losses"] == np.asarray(state.losses).tolist()


def stop_at_step(patch: pytest.MonkeyPatch, last: int) -> None:
    """Let SIGINT come while a step's data is drawn."""
    train_batch = tasks.Generated.train_batch

    def with_signal(task: tasks.Generated, seed: int, step: int, batch_size: int) -> tasks.Batch:
        if step == last:
            signal.raise_signal(signal.SIGINT)
        return train_batch(task, seed, step, batch_size)

    patch.setattr(tasks.Generated, "train_batch", with_signal)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that SIGINT stopped at step 3 of the first training."""
    folder = tmp_path_factory.mktemp("demo") / "stopped run"
    with pytest.MonkeyPatch.context() as patch:
        halve_the_model(patch)
        stop_at_step(patch, 2)
        assert demo(*SMALL, "--no-longest", "--output", folder) == 130
    return folder


def test_sigint_saves_and_reports(interrupted: Path) -> None:
    training = results(interrupted)["training"]
    assert training.keys() == {"reference"}
    assert training["reference"]["status"] == "interrupted"
    assert training["reference"]["steps"] == len(training["reference"]["losses"]) == 3
    assert max(saved_steps(interrupted, "reference")) == 3
    assert "interrupted" in (interrupted / "report.md").read_text()


@pytest.mark.usefixtures("one_layer")
def test_after_a_signal_the_whole_command_to_go_on_is_named(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "stopped run"
    shutil.copytree(interrupted, folder)
    stop_at_step(monkeypatch, 4)
    assert demo("--resume", "--checkpoint-every", "7", "--output", folder) == 130
    assert max(saved_steps(folder, "reference")) == 5
    flags = f"--resume --output '{folder}' --checkpoint-every 7"
    assert capsys.readouterr().err == (
        f'train_demo.py: stopped by SIGINT and saved; to go on: make demo ARGS="{flags}" '
        f"(without make: python train_demo.py {flags})\n"
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_anything_began_leaves_nothing(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def with_signal(description: str | None = None) -> argparse.ArgumentParser:
        signal.raise_signal(number)
        return build_parser(description)

    monkeypatch.setattr(arguments, "build_parser", with_signal)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)  # the tests may run under nohup
    monkeypatch.chdir(tmp_path)
    assert demo() == code
    assert capsys.readouterr().err == f"train_demo.py: stopped by {signal.Signals(number).name} before it began\n"
    assert not list(tmp_path.iterdir())


def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert not stop.asked()
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_what_is_printed_to_a_closed_terminal_ends_nothing() -> None:
    program = """if True:
        import signal, sys, time
        from demo.stop import StopRequest
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with StopRequest() as stop:
            print("ready", flush=True)
            while not stop.asked():
                time.sleep(0.01)
            print("saved", flush=True)
            print("saved", file=sys.stderr, flush=True)
        sys.exit(7)
    """
    mine, its = pty.openpty()
    login = {"stdin": its, "stdout": its, "stderr": its, "start_new_session": True}
    to_be_its_own = lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # noqa: E731 - its terminal: it is told when that closes
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, preexec_fn=to_be_its_own, **login) as process:
        os.close(its)
        assert os.read(mine, 5) == b"ready"
        os.close(mine)
        assert process.wait(timeout=60) == 7


def test_a_signal_to_one_process_is_one_to_all() -> None:
    """As long as they ask equally often, whatever comes between the questions."""
    first, second = StopRequest(), StopRequest()
    first.share = second.share = lambda _: max(first.signal or 0, second.signal or 0)
    assert not first.asked() and not second.asked()
    first.signal = signal.SIGTERM
    assert first.asked() and second.asked()
    assert second.signal == signal.SIGTERM
    first.share = second.share = lambda _: pytest.fail("agreed already")
    assert first.asked() and second.asked()


def test_signals_are_listened_to_before_the_imports_that_take_time() -> None:
    program = "import sys, train_demo; print(*({'jax', 'numpy', 'matplotlib', 'rich', 'flax'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert shown.stdout.split() == []


# What was saved is refused as a whole where it is damaged -------------------------------------------------------------


def edited(name: str, **changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | changes))

    return edit


def replaced(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100]) and None


def without_option(folder: Path) -> None:
    content = json.loads((folder / "options.json").read_text())
    del content["seed"]
    (folder / "options.json").write_text(json.dumps(content))


def of_another_configuration(folder: Path) -> None:
    for name in ("options.json", "results.json"):
        edited(name, **({"seq_len": 32} if name == "options.json" else {}))(folder)
    options = json.loads((folder / "options.json").read_text())
    edited("results.json", options=options)(folder)


def without_structure(folder: Path) -> None:
    for file in (folder / "checkpoints").rglob("_METADATA"):
        file.unlink()


def without_database(folder: Path) -> None:
    for file in (folder / "checkpoints").rglob("manifest.ocdbt"):
        file.write_bytes(b"")


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (replaced("options.json", "{}"), "options.json is damaged or of another version of this program: batch_size"),
        (replaced("options.json", "[]"), "options.json is damaged"),
        (truncated("options.json"), "options.json is damaged"),
        (without_option, "seed is missing"),
        (edited("options.json", colour="blue"), "colour is unknown"),
        (edited("options.json", preset="huge"), "invalid choice: 'huge'"),
        (edited("options.json", steps="8"), "steps is '8'"),
        (edited("options.json", steps=3_000_000_000_000), "--steps: 3000000000000 is too large"),
        (edited("options.json", seed=True), "--seed: 'True' is not"),
        (edited("options.json", lr=float("nan")), "--lr: 'nan' is not"),
        (edited("options.json", longest=1), "longest is neither"),
        (edited("options.json", seed=1), "results.json is damaged"),
        (truncated("results.json"), "results.json is damaged"),
        (replaced("results.json", "{}"), "results.json is damaged"),
        (replaced("results.json", "[1]"), "results.json is damaged"),
        (edited("results.json", training={"magic": {}}), "training is not valid"),
        (edited("results.json", costs=[{"seq_len": 3}]), "results.json is damaged"),
        (of_another_configuration, "is damaged or of a run with another configuration"),
        (without_structure, "is damaged or of a run with another configuration"),
        (without_database, "is damaged or of a run with another configuration"),
    ],
)
def test_a_damaged_run_is_refused_by_name_and_left_as_it_is(
    damage: Callable[[Path], None],
    message: str,
    interrupted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(interrupted, folder)
    damage(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert demo("--resume", "--output", folder) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "poetry"], "invalid choice: 'poetry'"),
        (["--task", "text"], "needs --file PATH"),
        (["--task", "text", "--file", "missing.txt"], "--file missing.txt: No such file"),
        (["--task", "text", "--file", "empty.txt"], "the file is empty"),
        (["--task", "text", "--file", "."], "--file .: Is a directory"),
        (["--task", "text", "--file", "short.txt"], "needs a file of at least 258 bytes, but short.txt has 20"),
        (["--file", "short.txt"], "only --task text reads a file"),
        (["--seq-len", "0"], "--seq-len: '0' is not a whole number of at least 1"),
        (["--seq-len", "100000000"], "--seq-len: 100000000 is too large: at most 1,048,576"),
        (["--batch-size", "1048576", "--seq-len", "1024"], "make 1,073,741,824 tokens in a step: at most 1,048,576"),
        (["--steps", "3000000000000"], "--steps: 3000000000000 is too large: at most 10,000,000"),
        (["--lengths", "64,99999999999999999999"], "--lengths: 99999999999999999999 is too large"),
        (["--memory-budget", "1e308"], "--memory-budget: 1e308 is too large"),
        (["--seed", "9223372036854775808"], "--seed: 9223372036854775808 is too large: at most 4,294,967,295"),
        (["--output", ""], "--output: the path is empty"),
        (["--task", "text", "--file", ""], "--file: the path is empty"),
        (["--seq-len", "16384"], "--seq-len 16384: recall takes at most 8,192"),
        (["--seq-len", "30"], "recall needs a multiple of 4"),
        (["--steps", "many"], "--steps: 'many' is not a whole number"),
        (["--batch-size", "-3"], "--batch-size: '-3' is not"),
        (["--lr", "nan"], "--lr: 'nan' is not a number above 0"),
        (["--lengths", "16,16"], "names something twice"),
        (["--lengths", "16,,32"], "'' is not a whole number"),
        (["--memory-budget", "0"], "--memory-budget: '0' is not a number above 0"),
        (["--implementation", "flash,magic"], "--implementation magic: unknown; the names are flash, "),
        (["--implementation", "flash,cudnn", "--dtype", "bfloat16"], "--implementation cudnn: needs an NVIDIA GPU"),
        (["--report-to", "short.txt/docs"], "--report-to short.txt/docs: cannot be written (Not a dir"),
        (["--implementation", "flash,"], "--implementation '': unknown; the names are flash, "),
        (["--unheard-of"], "unrecognized arguments: --unheard-of"),
        (["--output", "short.txt/run"], "--output short.txt/run: no folder can be made or written there (Not a dir"),
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


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to those who ask for help, by a Python without any packages."""
    advice = 'make demo installs it, or here pip install ".[demo]"\n'
    command = [sys.executable, "-E", "-S", "train_demo.py", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (2, f"train_demo.py: error: needs jax: {advice}")
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "demo.job")
        patch.setitem(sys.modules, "rich.console", None)
        assert demo("--help") == 2
        assert capsys.readouterr().err == f"train_demo.py: error: needs rich: {advice}"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 11, 7))
        assert demo("--help") == 2
    assert "error: needs Python >= 3.12, not " in capsys.readouterr().err


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
    actions = [a for a in build_parser()._actions if a.option_strings != ["-h", "--help"]]
    assert all(action.help for action in actions)
    assert all("default" in action.help for action in actions if action.nargs != 0)
    assert all(action.option_strings[0] in text for action in actions)


@pytest.mark.parametrize(("preset", "millions"), [("125m", 85), ("1b", 970)])
def test_help_names_the_size_that_a_preset_has_here(preset: str, millions: int) -> None:
    for name, given in (("recall", {}), ("text", {"file": __file__})):
        made = with_defaults({"task": name, "preset": preset, **given})
        run = make_run(made, tasks.make_task(name, made.seq_len, made.file), "flash")
        parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(run.initial_state).params))
        assert parameters == pytest.approx(millions * 1e6, rel=0.005)


def test_a_curve_that_is_not_finite_has_no_agreement() -> None:
    curves = {"reference": {"losses": [1.0, None]}, "flash": {"losses": [1.0, 2.0]}}
    assert summary.agreement({"training": curves}) is None


# Devices that are not here: GPUs, and allocators that count -----------------------------------------------------------


class Allocator:
    """A device that counts: each program that runs raises the peak to what it needs, if that is more."""

    def __init__(self, limit: int = 0):
        self.stats = {"bytes_limit": limit, "peak_bytes_in_use": 10}

    def memory_stats(self) -> dict[str, int]:
        return self.stats


def test_a_peak_is_reported_only_where_it_rose(monkeypatch: pytest.MonkeyPatch) -> None:
    device, needs = Allocator(), iter([30, 20, 30, 31])

    def run_it(*_: object) -> float:
        device.stats["peak_bytes_in_use"] = max(device.stats["peak_bytes_in_use"], next(needs))
        return 0.5

    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    monkeypatch.setattr(comparison, "_median_seconds", run_it)
    row = comparison.Cost("flash", 16, comparison.MEASURED, 1, 2)
    costs = [comparison.measured(recall_run("flash"), row, None) for _ in range(4)]  # type: ignore[arg-type]
    assert [cost.peak_bytes for cost in costs] == [30, None, None, 31]
    assert all(cost.seconds == 0.5 for cost in costs)


def test_batches_grow_and_their_members_need_about_the_same() -> None:
    costs = [comparison.Cost("flash", n, comparison.MEASURED, 0, n) for n in (100, 7, 5, 199, 10, 200)]
    batches = comparison.in_batches(costs)
    assert [[cost.seq_len for cost in batch] for batch in batches] == [[5, 7], [10], [100, 199], [200]]


def test_without_statistics_there_is_no_peak() -> None:
    assert comparison.peak_bytes() is None


@pytest.mark.parametrize(
    ("limit", "capability", "given", "expected"),
    [
        (100, (9, 0), {}, ("125m", 64, 32768, "bfloat16", 6e-4)),
        (100, (9, 0), {"preset": "tiny"}, ("tiny", 32, 4096, "float32", 3e-3)),
        (100, (9, 0), {"seq_len": 16, "dtype": "float32"}, ("125m", 16, 32768, "float32", 6e-4)),
        (10, (8, 6), {}, ("tiny", 32, 4096, "float32", 3e-3)),
        (10, (8, 6), {"preset": "125m"}, ("125m", 32, 4096, "bfloat16", 6e-4)),
        (100, None, {}, ("tiny", 32, 4096, "float32", 3e-3)),
    ],
)
def test_the_default_size_suits_the_device_and_flags_win(
    limit: int, capability: tuple[int, int] | None, given: dict, expected: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda: [Allocator(limit * 2**30)])
    monkeypatch.setattr(options, "compute_capability", lambda: capability)
    found = with_defaults(given)
    assert (found.preset, found.seq_len, max(found.lengths), found.dtype, found.lr) == expected
    assert found.memory_budget == limit


def cudnn_run(dtype: str = "bfloat16", **given: object) -> Run:
    return make_run(with_defaults({"dtype": dtype, **given}), tasks.make_task("recall", 32), "cudnn")


def test_cudnn_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attentions.chosen(cudnn_run()) is None
    monkeypatch.setattr(attentions, "compute_capability", lambda: (9, 0))
    with pytest.raises(InputError, match=r"--implementation cudnn: cuDNN is not detected"):
        attentions.check(cudnn_run(), "cudnn")
    with pytest.raises(InputError, match="--parallel context and both share them"):
        attentions.check(cudnn_run(devices=2, parallel="context"), "cudnn")


def test_cudnn_is_in_the_lowered_step_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    assert attentions.chosen(cudnn_run()) == "cudnn"
    with pytest.raises(InputError, match=r"cudnn: .*float32"):
        attentions.check(cudnn_run("float32"), "cudnn")
    run = cudnn_run()
    batch = tasks.Batch(*(jax.ShapeDtypeStruct((2, 32), dtype) for dtype in (np.int32, np.int32, np.float32)))
    traced = jax.jit(run.train_step).trace(jax.eval_shape(run.initial_state), batch)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__cudnn$fmhaSoftmaxBackward") == run.config.num_layers


# Compiling side by side, and the copy of the report -------------------------------------------------------------------


def test_compilations_overlap_and_end_with_a_signal() -> None:
    stop, both, hold = StopRequest(), threading.Barrier(2, timeout=60), threading.Event()

    def meet() -> str:
        both.wait()
        return "met"

    with Compiler(stop) as compiler:
        if (os.cpu_count() or 1) > 1:
            assert dict(compiler.each({1: meet, 2: meet})) == {1: "met", 2: "met"}
        stop.signal = signal.SIGTERM
        assert dict(compiler.each({3: hold.wait})) == {}, "nothing waits for what cannot be broken off"
        hold.set()
        with pytest.raises(StoppedError):
            compiler.step(recall_run("flash"), 1, 16)


@pytest.mark.usefixtures("one_layer")
def test_a_signal_while_steps_are_measured_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, measured, peaks = [], comparison.measured, itertools.count(1)

    def with_signal(run: Run, cost: comparison.Cost, program: jax.stages.Compiled) -> comparison.Cost:
        rows.append(dataclasses.asdict(measured(run, cost, program)))
        signal.raise_signal(signal.SIGTERM)
        return comparison.Cost(**rows[-1])

    monkeypatch.setattr(comparison, "measured", with_signal)
    monkeypatch.setattr(comparison, "peak_bytes", lambda: next(peaks))
    flags = ["--implementation", "flash", "--lengths", "32,16", "--seq-len", "16", "--no-longest"]
    assert demo(*flags, "--output", tmp_path) == 143
    assert [row["seq_len"] for row in rows] == [16], "by growing need"
    assert results(tmp_path)["costs"] == rows
    assert rows[0]["peak_bytes"] > 0
    assert demo("--resume", "--output", tmp_path) == 143
    assert results(tmp_path)["costs"] == rows[::-1], "in the order of the options, and no row measured twice"
    assert results(tmp_path)["training"] == {}


@pytest.mark.usefixtures("one_layer")
def test_a_copy_of_the_report_is_regenerated_from_its_numbers(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / "docs" / "demo"
    assert demo("--resume", "--output", finished, "--report-to", copy) == 0
    assert sorted(path.name for path in copy.iterdir()) == sorted(
        ("results.json", "report.md", "loss.svg", "memory.svg", "time.svg")
    )
    test_docs.check_demo_report(copy)
    text = (copy / "report.md").read_text()
    assert "python train_demo.py --task=recall --preset=tiny --seq-len=16" in text
    assert str(tmp_path) not in text + (copy / "results.json").read_text()
    (copy / "report.md").write_text(text.replace("measured", "guessed"))
    with pytest.raises(AssertionError):
        test_docs.check_demo_report(copy)


def test_the_copy_of_a_text_report_names_the_file_without_its_folder() -> None:
    found = {"options": {"file": "/home/someone/book.txt", "seed": 0}}
    assert report.without_paths(found) == {"options": {"file": "book.txt", "seed": 0}}


def test_a_report_is_not_copied_over_a_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo("--resume", "--output", finished, "--report-to", finished) == 2
    assert "is the folder of a run" in capsys.readouterr().err


def test_the_command_of_a_run_gives_its_options() -> None:
    made = with_defaults({"implementation": ("flash",), "longest": False, "memory_budget": 0.1})
    command = shlex.split(made.command())
    parsed = vars(build_parser().parse_args(command[2:]))
    given = {name: parsed[name] for name in vars(made) if parsed.get(name) is not None}
    assert with_defaults(given) == made


def test_other_runtime_errors_are_not_taken_for_lack_of_memory() -> None:
    assert comparison.is_out_of_memory(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"))
    assert not comparison.is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: failed"))
    assert not comparison.is_out_of_memory(ValueError("RESOURCE_EXHAUSTED"))


# The search for the longest sequence, and the figures -----------------------------------------------------------------


def search(memory: Callable[[int], int | None], budget: int, *measured: int) -> comparison.Longest:
    """The search for a program whose memory is a function of its length; None: the device has too little."""

    def memory_of(seq_len: int) -> comparison.Memory | None:
        return None if (total := memory(seq_len)) is None else comparison.Memory(0, total)

    rows = [comparison.Cost("flash", n, comparison.MEASURED, 0, memory(n)) for n in measured]
    return comparison.longest_sequence("flash", recall_run("flash"), budget, rows, memory_of)


@pytest.mark.parametrize("measured", [(), (64,), (64, 128), (512, 1024, 2048, 4096), (1000, 3000)])
@pytest.mark.parametrize("quadratic", [0, 20])
def test_the_longest_sequence_is_found_with_few_compilations(quadratic: int, measured: tuple[int, ...]) -> None:
    def memory(seq_len: int) -> int:
        return 10**6 + 10_000 * seq_len + quadratic * seq_len**2

    found = search(memory, 2**31, *measured)
    assert len(found.compiled) <= comparison.MAX_COMPILATIONS
    assert found.too_long == 2 * found.seq_len
    assert memory(found.seq_len) <= 2**31 < memory(2 * found.seq_len) == found.too_long_bytes


def test_a_search_ends_at_both_ends_of_what_is_tried() -> None:
    none = search(lambda _: 100, 10, 16)
    assert (none.seq_len, none.too_long) == (0, 1)
    short = search(lambda n: n if n < 8 else None, 100, 4)
    assert (short.seq_len, short.too_long, short.too_long_bytes) == (4, 8, None)
    nothing = search(lambda _: None, 100)
    assert (nothing.seq_len, nothing.too_long_bytes, len(nothing.compiled)) == (0, None, comparison.MAX_COMPILATIONS)
    everything = search(lambda n: n, 2**40, 1024, 2048)
    assert (everything.seq_len, everything.too_long) == (comparison.LONGEST_TRIED, None)


@pytest.mark.parametrize(("low", "high"), [(7.0, 7.0), (90.0, 620.0), (2.5, 4000.0), (0.01, 1e6)])
def test_ticks_are_few_and_plain_numbers(low: float, high: float) -> None:
    axes = figures.Figure().subplots()
    axes.set_yscale("log")
    figures._scale_quantity(axes, np.array([low, high]))
    ticks = axes.get_yticks()
    assert 1 <= len(ticks) <= 10
    assert not len(axes.get_yticks(minor=True))
    labels = axes.yaxis.get_major_formatter().format_ticks(ticks)
    assert all(float(text.replace(",", "")) == pytest.approx(tick) for text, tick in zip(labels, ticks, strict=True))
