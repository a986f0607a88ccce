"""Bytes of device memory, by formula and as ncu counts them, and kernels with forced tiles."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_flash.benchmarks import __main__ as command_line
from pallas_flash.benchmarks import cases, ncu, report, results, tiles, traffic


def test_traffic_by_formula(capsys):
    gpt2 = cases.select(["gpt2-full-1024"], cases.WORKLOADS)[0]
    matrix, tensor = 64 * 16 * 1024**2 * 2, 64 * 1024 * 16 * 64 * 2
    assert traffic.standard_bytes(gpt2, "forward") == 4 * matrix + 4 * tensor
    assert traffic.standard_bytes(gpt2, "forward+backward") == 11 * matrix + 4 * tensor + 8 * tensor
    assert traffic.flash_bytes(gpt2, "forward", 1024) == gpt2.min_bytes("forward")
    streamed = [traffic.flash_bytes(gpt2, "forward", tile) - 2 * tensor - 4 * 64 * 1024 * 16 for tile in (128, 64)]
    assert streamed == [8 * 2 * tensor, 16 * 2 * tensor]
    causal = cases.select(["gpt2-causal-1024"], cases.WORKLOADS)[0]
    assert traffic.flash_bytes(causal, "backward", 64) < traffic.flash_bytes(gpt2, "backward", 64)
    assert command_line.main(["traffic", "--workloads", "gpt2-full*", "--tiles", "128"]) == 0
    assert "| gpt2-full-1024 | 962.1 |" in capsys.readouterr().out


# ncu, played by a script that says what the real one says ----------------------------------------------------------

NCU = """#!/bin/sh
case "$*" in "--target-processes application-only "*) ;; *) echo "attached to the assembler too" >&2; exit 1;; esac
while [ "$1" != --log-file ]; do shift; done
cat > "$2" <<'END'
==PROF== Connected to process 7
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum"
"","","Mbyte","Kbyte","usecond"
"0","attention_forward","1,200.5","3","1,500"
"1","a, b","2","4000","10"
END
"""


@pytest.fixture
def ncu_on_path(tmp_path, monkeypatch):
    def install(script: str) -> None:
        (tmp_path / "ncu").write_text(script)
        (tmp_path / "ncu").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


@pytest.mark.parametrize("arguments", ["--implementations xla", "--force-tiles", "--output x", "--measure --tiles 64"])
def test_each_option_is_of_one_way_to_count(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["traffic", "--workloads", "gpt2-full*", *arguments.split()])
    option = arguments.removeprefix("--measure ").split()[0]
    assert re.search(rf"error: {option}: only with(out)? --measure", capsys.readouterr().err)


def test_counts_that_cannot_be_written(ncu_on_path, capsys):
    ncu_on_path(NCU)
    command = ["traffic", "--measure", "--workloads", "gpt2-full*", "--implementations", "reference"]
    assert command_line.main([*command, "--output", "/dev/null/x"]) == 2
    assert capsys.readouterr().err == "error: --output /dev/null/x: Not a directory\n"


def test_traffic_as_counted(tmp_path, ncu_on_path, capsys):
    ncu_on_path(NCU)
    command = [
        "traffic",
        "--measure",
        "--workloads",
        "gpt2-full*",
        "fa3-h64-full-1024",
        "--implementations",
        "sm90",
        "reference",
    ]
    assert command_line.main([*command, "--output", str(tmp_path), "--force-tiles", "--passes", "forward"]) == 0
    (file,) = tmp_path.glob("traffic-*.json")
    content = results.read(file)
    first = content["rows"][0]
    assert (first["read"], first["written"], first["ms"]) == (1_202_500_000, 4_003_000, 1.51)
    assert [kernel["name"] for kernel in first["kernels"]] == ["attention_forward", "a, b"]
    assert len(content["rows"]) == 2 * (2 + len(tiles.TILES["forward"])) and content["rows"][2]["tile"] == [64, 64]
    made = report.table("traffic", content, "forward", "gpt2*")
    least = cases.select(["gpt2-full-1024"], cases.WORKLOADS)[0].min_bytes("forward")
    assert made.rows[0][:7] == ["gpt2-full-1024", "sm90", "2", "1.20", "0.00", "1.21", f"{1_206_503_000 / least:.2f}"]
    assert len(report.table("kernels", content, "forward").rows) == 2 * len(content["rows"])
    assert "Counted by ncu" in report.write([file], tmp_path / "report").read_text()
    assert (tmp_path / "report" / "traffic-forward.svg").is_file()
    with pytest.raises(ValueError, match="no table 'ratios'"):
        report.table("ratios", content, "forward")


def test_traffic_that_cannot_be_counted(tmp_path, ncu_on_path, monkeypatch, capsys):
    command = ["traffic", "--measure", "--workloads", "gpt2-full*", "--output", str(tmp_path)]
    monkeypatch.setenv("PATH", "")
    assert command_line.main(command) == 2 and "not on the PATH" in capsys.readouterr().err
    ncu_on_path("#!/bin/sh\necho no permission >&2; exit 1")
    assert command_line.main([*command, "--passes", "backward"]) == 2
    assert command_line.main([*command, "--implementations", "xla"]) == 0
    (file,) = tmp_path.glob("traffic-*.json")
    (row,) = results.read(file)["rows"]
    assert row["status"] == "failed" and row["reason"] == "no permission"
    assert report.table("traffic", results.read(file), "forward+backward").rows[0][2] == "no permission"
    with pytest.raises(RuntimeError, match="counted nothing"):
        ncu.parse("==ERROR== no kernels were profiled")


def test_a_count_that_takes_too_long_leaves_nothing_running(tmp_path, ncu_on_path, monkeypatch):
    ncu_on_path(f"#!/bin/sh\nsleep 600 & echo $! > {tmp_path}/child; wait")
    monkeypatch.setattr(ncu, "TIMEOUT", 1)
    (workload,) = cases.select(["gpt2-full-1024"], cases.WORKLOADS)
    with pytest.raises(RuntimeError, match="not done after 1 s"):
        ncu.count(workload, "sm90", "forward")
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    assert not child.exists() or child.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    "passed, tile, outcome",
    [("forward", (64, 96), "lowers"), ("forward", (192, 256), "shared memory"), ("backward", (64, 64), "lowers")],
)
def test_forced_tiles(passed, tile, outcome):
    """Those that fit lower for CUDA, and the others say why not."""
    (workload,) = cases.select(["fa3-h128-causal-2048"], cases.WORKLOADS)
    inputs = jax.eval_shape(lambda: cases.make_inputs(workload, 0))
    (peer,) = (peer for peer in tiles.peers(passed) if peer.tile == tile)
    assert peer.attend is not None
    attend = peer.attend(workload)
    run = {
        "forward": lambda *qkv: attend(*qkv, None),
        "backward": jax.grad(lambda *qkv: attend(*qkv, None).astype(jnp.float32).sum(), argnums=(0, 1, 2)),
    }[passed]
    try:
        jax.jit(run).trace(*inputs[:3]).lower(lowering_platforms=("cuda",))
        assert outcome == "lowers"
    except NotImplementedError as error:
        assert outcome in str(error)
