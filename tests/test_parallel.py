"""The demo on several devices: the same losses as on one, parameters in shards, processes that work together."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from demo import InputError, tasks
from demo.arguments import build_parser
from demo.job import prepare
from demo.options import make_run, with_defaults
from demo.parallel import Layout, Processes
from demo.training import Checkpoints, Run, TrainState
from models.config import PRESETS

ROOT = Path(__file__).parent.parent
SIZES = {"seq_len": 16, "batch_size": 5, "steps": 3, "lengths": (16,)}


@pytest.fixture(autouse=True)
def one_layer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half of the tiny model, compiled quickly."""
    monkeypatch.setitem(PRESETS, "tiny", dataclasses.replace(PRESETS["tiny"], num_layers=1))
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def run_of(devices: int, kind: str, implementation: str = "flash") -> Run:
    options = with_defaults({**SIZES, "devices": devices, "parallel": kind})
    return make_run(options, tasks.make_task("recall", 16), implementation)


def trained(run: Run) -> TrainState:
    program, state = run.compile_step(run.batch_size, run.task.seq_len), run.start()
    for step in range(run.steps):
        state = program(state, run.place(run.task.train_batch(run.seed, step, run.batch_size)))
    return state


def test_losses_are_those_of_one_device(tmp_path: Path) -> None:
    """Five sequences over two pairs of devices: one that counts for nothing fills the batch up."""
    want = trained(run_of(1, "data")).losses
    assert np.isfinite(want).all()
    run = run_of(4, "both")
    state = trained(run)
    np.testing.assert_allclose(state.losses, want, rtol=1e-5)
    for table in (state.params["embedding"]["embedding"], state.optimizer[1][0].mu["embedding"]["embedding"]):
        assert table.addressable_shards[0].data.size * run.layout.data == table.size
    with closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(state)
        restored = checkpoints.restore(run.start())
    for got, saved in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        assert got.sharding == saved.sharding
        np.testing.assert_array_equal(got, saved)


def test_layouts() -> None:
    assert [Layout.of(8, kind) for kind in ("data", "context", "both")] == [Layout(8, 1), Layout(1, 8), Layout(4, 2)]
    assert run_of(4, "context").config.context_parallel == ("data", "context")
    assert run_of(4, "context", "reference").config.context_parallel is None


REFUSED = {
    "--devices 3 --parallel both": "an even number of --devices, not 3",
    "--devices 2 --parallel context --seq-len 36 --lengths 30": "--lengths 30: must be a multiple of 4",
    "--devices 16": "--devices 16: there are 8",
    "--devices 3": "do not divide the model's width",
    "--num-processes 2": "go together",
    "--coordinator here:1 --num-processes 2 --process-id 2": "--process-id 2: must be below",
    "--coordinator here:1 --num-processes 2 --process-id 0": "needs --output",
    "--coordinator here:1 --num-processes 2 --process-id 0 --output there": "must be a multiple of --num-processes 2",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_impossible_wishes(arguments: str) -> None:
    with pytest.raises(InputError, match=REFUSED[arguments]):
        prepare(build_parser().parse_args(arguments.split()))


def test_one_process_of_one_is_alone() -> None:
    assert Processes().first
    assert Processes("here:1", 2, 0).first and not Processes("here:1", 2, 1).first


def start_process(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    command = [sys.executable, "train_demo.py", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_two_processes_stop_together_and_go_on(tmp_path: Path) -> None:
    """Each with one device of its own: they find each other, a signal to one of them stops both at the same step, the
    lines that they end with make them go on, and one of them writes what both have computed."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    folder = tmp_path / "run"
    wishes = "--seq-len 16 --batch-size 6 --lengths 16 --no-longest --implementation flash --devices 2 --steps 60"
    several = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id"]
    first = [*wishes.split(), "--output", str(folder), "--checkpoint-every", "10", *several]
    processes = [start_process(*first, str(i)) for i in range(2)]
    deadline = time.monotonic() + 300
    while not list(folder.glob("checkpoints/flash/10/_CHECKPOINT_METADATA")):
        assert all(process.poll() is None for process in processes), [p.communicate() for p in processes]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    processes[1].terminate()
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [128 + signal.SIGTERM] * 2, errors
    stopped = json.loads((folder / "results.json").read_text())["training"]["flash"]
    assert stopped["status"] == "interrupted" and 10 <= stopped["steps"] < 60

    commands = [error.splitlines()[-1].partition("python train_demo.py ")[2].removesuffix(")") for error in errors]
    processes = [start_process(*shlex.split(command)) for command in commands]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    training = json.loads((folder / "results.json").read_text())["training"]["flash"]
    assert training["status"] == "finished" and len(training["losses"]) == 60
    assert np.isfinite(training["losses"]).all()
    assert training["losses"][: stopped["steps"]] == stopped["losses"]
    assert ["Report:" in output for output, _ in outputs] == [True, False]
