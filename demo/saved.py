"""What an earlier process saved, checked as a whole before anything is done with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

from demo import InputError, comparison, tasks
from demo.arguments import build_parser
from demo.options import Options
from demo.run_folder import OPTIONS, RESULTS, RunFolder
from demo.training import Checkpoints, Run

FINISHED = ("finished", "diverged", comparison.OUT_OF_MEMORY, comparison.OVER_BUDGET)  # not trained again
INTERRUPTED = "interrupted"


def resumed_options(given: dict[str, Any], folder: RunFolder) -> Options:
    """The options saved in the folder. InputError if a flag, or the file, says something else."""
    options = _read(folder, OPTIONS, _options)
    for name, value in given.items():
        if value != (saved := getattr(options, name)):
            flag = "--no-longest" if name == "longest" else "--" + name.replace("_", "-")
            raise InputError(f"--resume: {flag} is {value}, but the run in {folder.path} has {saved}")
    if options.file and tasks.fingerprint(options.file) != options.file_sha256:
        raise InputError(f"--resume: {options.file} has changed since the run in {folder.path} began")
    return options


def saved_results(folder: RunFolder, options: Options) -> dict[str, Any]:
    """What an earlier process of this run found out; empty at the beginning."""
    if not folder.file(RESULTS).exists():
        return {}
    return _read(folder, RESULTS, lambda content: _results(content, options))


def check_checkpoints(folder: RunFolder, runs: dict[str, Run], results: dict[str, Any]) -> None:
    """InputError if a training that is to go on finds checkpoints of another configuration, or damaged ones."""
    for name, run in runs.items():
        status = results.get("training", {}).get(name, {}).get("status", INTERRUPTED)
        if status == INTERRUPTED and folder.checkpoints(name).exists():
            with closing(Checkpoints(folder.checkpoints(name), read_only=True)) as checkpoints:
                if checkpoints.latest_step() is not None:
                    checkpoints.restore(run.start())


def _read[Content](folder: RunFolder, name: str, check: Callable[[Any], Content]) -> Content:
    try:
        return check(json.loads(folder.file(name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"--resume: {folder.file(name)} is damaged or of another version of this program: {reason}"
        ) from error


def _options(content: Any) -> Options:
    """Each value must be one that the command line would take: its text is parsed again, and must give the value."""
    _expect(isinstance(content, dict), "it holds no table of options")
    names = [field.name for field in dataclasses.fields(Options)]
    for name in sorted(content.keys() ^ set(names)):
        raise ValueError(f"{name} is {'unknown' if name in content else 'missing'}")
    options = Options.of_json(content)
    sha256 = options.file_sha256
    _expect((sha256 is None) == (options.file is None) and isinstance(sha256, str | None), "file_sha256 is not valid")
    _expect(isinstance(options.longest, bool), "longest is neither true nor false")
    parsed = build_parser().parse_args(options.flags())
    for name, value in vars(options).items():
        if name not in ("longest", "file_sha256"):
            _expect(repr(getattr(parsed, name)) == repr(value), f"{name} is {value!r}")
    return options


def _results(content: Any, options: Options) -> dict[str, Any]:
    _expect(isinstance(content, dict), "it holds no table of results")
    _expect(content["options"] == json.loads(json.dumps(dataclasses.asdict(options))), f"it is not of this {OPTIONS}")
    trainings, names = content["training"], options.implementation
    _expect(isinstance(trainings, dict) and trainings.keys() <= set(names), "training is not valid")
    for name, training in trainings.items():
        losses, status = training["losses"], training["status"]
        numbers = isinstance(losses, list) and all(loss is None or isinstance(loss, float | int) for loss in losses)
        _expect(numbers and training["steps"] == len(losses), f"the losses of {name} are not whole")
        _expect(status in (*FINISHED, INTERRUPTED), f"status {status!r} is unknown")
    for name, row in (("costs", comparison.Cost), ("longest", comparison.Longest)):
        _expect(isinstance(content[name], list), f"{name} is not a list")
        _expect(all(row(**found).implementation in names for found in content[name]), f"{name} is not valid")
    return content


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
