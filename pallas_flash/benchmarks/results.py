"""The JSON file of a run: what was measured, where and how; whole at any moment, never overwritten by another run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from pallas_flash.benchmarks.environment import facts
from pallas_flash.command_line import make_folder

SCHEMA = 1
KIND = "benchmarks"  # of the files of a run; others have a kind of their own


class ResultsFile:
    """A new file in a folder, named by the time; `write` replaces its content in one move. ValueError if the folder
    cannot be written to."""

    def __init__(self, folder: Path, kind: str = KIND):
        make_folder("--output", folder)
        stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
        number = 1
        while True:
            self.path = folder / f"{kind}-{stamp}{'' if number == 1 else f'-{number}'}.json"
            try:
                self.path.touch(exist_ok=False)  # two runs started at once never share a file
                return
            except FileExistsError:
                number += 1

    def write(self, content: dict[str, Any]) -> None:
        partial = self.path.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(_rounded(content), indent=1, allow_nan=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.path)


def _rounded(value: Any) -> Any:
    """Floats to six digits: the rest is noise."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read(path: Path) -> dict[str, Any]:
    """ValueError if it is no file of a run."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not readable as the results of a run ({error})") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"{path}: not the results of a run of this version (schema {SCHEMA})")
    return {"kind": KIND, **content}


def environment(module: str = "") -> dict[str, Any]:
    """Where the numbers come from. module: which one of the package was run, if not the package."""
    return {
        **facts(),
        "command": shlex.join(["python", "-m", ".".join(["pallas_flash.benchmarks", *module.split()]), *sys.argv[1:]]),
        "peers": {name: _version(name) for name in ("tokamax", "dew-flash-attn-cu13", "dew-flash-attn-cu12", "torch")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
