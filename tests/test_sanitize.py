"""What tests.sanitize makes of the tools' reports, with a tool that only says so. The real ones need a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import sanitize, sanitized

READ = "========= Uninitialized __global__ memory read of size 16 bytes\n=========     at {}+0x1b0 in x.py:1"
DIVERGENT = "========= Barrier error detected. Divergent thread(s) in block.\n=========     at {}+0x10"
WRITE = "========= Invalid __global__ write of size 4 bytes\n=========     at {}+0x1b0\n"
XLA, OURS = "loop_transpose_fusion", "flash_attention_forward_sm90_mosaic_gpu_kernel"
COMBINE = "flash_decode_combine_sm90_mosaic_gpu_kernel"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a compute-sanitizer that says this and ends so."""

    def install(said: str, status: int = sanitize.FOUND, ended: bool = True, then: str = "") -> None:
        (tmp_path / "said").write_text(f"{said}\n{sanitize.ENDED if ended else ''}\n")
        script = tmp_path / "compute-sanitizer"
        attached = 'case "$*" in "--target-processes application-only "*) ;; *) exit 1;; esac'
        script.write_text(f"#!/bin/sh\n{attached}\ncat {tmp_path}/said; {then} exit {status}\n")
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


@pytest.mark.parametrize(
    ("checker", "said", "judged", "excused"),
    [
        ("initcheck", READ.format(XLA), "found", "not judged"),
        ("initcheck", READ.format(COMBINE), "found", "not judged"),
        ("initcheck", READ.format(XLA) + "\n" + READ.format(OURS), "found", "found"),
        ("initcheck", WRITE.format(XLA), "found", "found"),
        ("initcheck", "no report at all", "found", "found"),
        ("synccheck", DIVERGENT.format(OURS), "found", "not judged"),
        ("synccheck", WRITE.format(OURS), "found", "found"),
        ("memcheck", WRITE.format(XLA), "found", "found"),
    ],
)
def test_what_counts(tool: Any, checker: str, said: str, judged: str, excused: str) -> None:
    tool(said)
    assert sanitize.check(checker, "a call", "sm90", set()) == judged
    assert sanitize.check(checker, "a call", "sm90", {"initcheck", "synccheck"}) == excused


def test_silence_is_clean_only_from_a_call_that_ended(tool: Any) -> None:
    tool("", 0)
    assert sanitize.check("memcheck", "a call", "sm90", set()) == "clean"
    for said, status, ended in (("", 1, True), ("", 0, False), (READ.format(XLA), sanitize.FOUND, False)):
        tool(said, status, ended)
        assert sanitize.check("initcheck", "a call", "sm90", {"initcheck"}) == "found"


def test_a_run_that_hangs_says_how_far_it_came(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "TIMEOUT", 1)
    tool("so far", then="sleep 600;")
    with pytest.raises(sanitize.Failure, match="not done after 1 s: so far"):
        sanitize.sanitize("memcheck", "a call", "sm90")


def test_a_report_that_ends_the_kernel(tool: Any) -> None:
    tool(DIVERGENT.format(OURS), sanitize.FOUND, ended=False)
    assert sanitize.check("synccheck", "a call", "sm90", {"synccheck"}) == "not judged"
    assert sanitize.check("synccheck", "a call", "sm90", set()) == "found"
    assert sanitize.unfollowed_by(["synccheck"]) == ({"synccheck"}, [])
    tool("no report", sanitize.FOUND, ended=False)
    assert sanitize.check("synccheck", "a call", "sm90", {"synccheck"}) == "found"


def test_a_control_that_fails_counts(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tool(READ.format(XLA))
    assert sanitize.unfollowed_by(["memcheck", "initcheck"]) == ({"initcheck"}, [])
    tool("", 0)
    assert sanitize.unfollowed_by(list(sanitize.TOOLS)) == (set(), [])
    for said, status in ((WRITE.format(XLA), sanitize.FOUND), ("a crash", 1)):
        tool(said, status)
        assert sanitize.unfollowed_by(["initcheck"]) == (set(), ["found"])
        assert "initcheck, a copy by TMA" in capsys.readouterr().out


def test_the_whole_command(tool: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tool("", 0)
    assert sanitize.main(["--jobs", "4"]) == 0
    assert "32 runs: 32 clean, 0 not judged, 0 found" in capsys.readouterr().out
    for wrong in (["--run", "nosuch"], ["--jobs", "0"], ["--implementation", "xla"]):
        with pytest.raises(SystemExit):
            sanitize.main(wrong)
        assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize("name", dict(sanitized.CONTROLS.values()))
def test_controls_lower(name: str) -> None:
    control = dict(sanitized.CONTROLS.values())[name]
    program = jax.jit(lambda: control(name, "sm90")).trace()
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()
