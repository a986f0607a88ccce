"""The output folder of a run: options, results so far and checkpoints, none of which is ever half written."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from demo import InputError

OPTIONS, RESULTS, REPORT, CHECKPOINTS = "options.json", "results.json", "report.md", "checkpoints"
OUTPUT = Path("output")
FIGURES = ("loss", "memory", "time")
PICTURE, DRAWING = ".png", ".svg"  # for a screen; for a repository, as text


class RunFolder:
    """A folder that holds one run."""

    def __init__(self, path: Path, *, writes: bool = True, figures: str = PICTURE):
        """writes=False: for a process of several that leaves writing to another one. figures: what they end in."""
        self.path = path
        self.writes = writes
        self.figures = tuple(name + figures for name in FIGURES)

    @classmethod
    def fresh(cls, path: Path | None, parent: Path, *, overwrite: bool) -> RunFolder:
        """`path`, or the next numbered folder in `parent`. InputError if it holds a run already or is not writable."""
        try:
            folder = cls(_next_numbered(parent) if path is None else path)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._make_room(overwrite)
            folder._prove_writable()
        except OSError as error:
            raise InputError(
                f"--output {path or parent}: no folder can be made or written there ({error.strerror or error}); "
                "name another with --output"
            ) from error
        return folder

    @classmethod
    def existing(cls, path: Path | None, parent: Path) -> RunFolder:
        """`path`, or the newest numbered folder in `parent`. InputError if it holds no run."""
        found = [path] if path is not None else [numbered for _, numbered in _numbered(parent)][::-1]
        for candidate in found:
            if (candidate / OPTIONS).is_file():
                return cls(candidate)
        raise InputError(f"--resume: {path or parent} holds no run; start one without --resume")

    @classmethod
    def for_report(cls, path: Path, output: Path | None) -> RunFolder:
        """A folder for a copy of a report, made if need be. InputError if it is a run's, or cannot be written."""
        if (path / OPTIONS).exists() or (output is not None and path.resolve() == output.resolve()):
            raise InputError(f"--report-to {path}: is the folder of a run, which has its report; name another one")
        try:
            folder = cls(path, figures=DRAWING)
            path.mkdir(parents=True, exist_ok=True)
            folder._prove_writable()
        except OSError as error:
            raise InputError(f"--report-to {path}: cannot be written ({error.strerror or error})") from error
        return folder

    def file(self, name: str) -> Path:
        return self.path / name

    @property
    def own_files(self) -> tuple[str, ...]:
        """That the report is made of."""
        return RESULTS, REPORT, *self.figures

    def checkpoints(self, implementation: str) -> Path:
        return self.path / CHECKPOINTS / implementation

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        self.write_text(name, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Replace the file in one move: whoever reads it, also after a crash, finds the old or the new one whole."""
        if not self.writes:
            return
        partial = self.file(name + ".partial")
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(self.file(name))

    def _prove_writable(self) -> None:
        probe = self.file(".writable")
        probe.touch()
        probe.unlink()

    def _make_room(self, overwrite: bool) -> None:
        """Refuse what is not ours; delete an earlier run, and nothing else, where --overwrite asks for it."""
        held = [name for name in (OPTIONS, CHECKPOINTS, *self.own_files) if self.file(name).exists()]
        if not held:
            return
        if OPTIONS not in held:
            raise InputError(f"--output {self.path}: holds {held[0]}, which is of no run; choose another folder")
        if not overwrite:
            raise InputError(f"--output {self.path}: holds an earlier run; add --resume to go on or --overwrite")
        if self.file(CHECKPOINTS).exists():
            shutil.rmtree(self.file(CHECKPOINTS))
        for name in (*self.own_files, OPTIONS):  # the options last: until then, the folder is known to be a run's
            self.file(name).unlink(missing_ok=True)


def _numbered(parent: Path) -> list[tuple[int, Path]]:
    if not parent.is_dir():
        return []
    return sorted((int(path.name), path) for path in parent.iterdir() if path.name.isdecimal() and path.is_dir())


def _next_numbered(parent: Path) -> Path:
    numbered = _numbered(parent)
    path = parent / f"{numbered[-1][0] + 1 if numbered else 1:03}"
    path.mkdir(parents=True)  # exist_ok=False: two runs started at once never share a folder
    return path
