"""The search for tiles, on a stand-in for a kernel: what it tries, what it takes, what it writes."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from pallas_flash.kernels.sm90.config import ForwardConfig
from pallas_flash.spec import AttentionSpec, Operands
from pallas_flash.tuning import __main__ as command
from pallas_flash.tuning import cache, kernels, search
from pallas_flash.tuning.cache import Case

CASE = Case(64, 64, "bfloat16", "causal")
MILLISECONDS = {64: 3.0, 80: 2.0, 96: 1.0, 112: 5.0, 128: 4.0}  # of blocks of so many keys


@dataclasses.dataclass
class Bench:
    """A kernel that only notes its tiles. `broken`: block_kv with wrong results; `failing`: that do not compile."""

    broken: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()

    def kernel(self) -> search.Kernel:
        return search.Kernel(
            table="stand_in",
            choices={"block_kv": tuple(MILLISECONDS), "num_stages": (1, 2, 3)},
            start=lambda spec, operands: ForwardConfig(),
            fits=lambda config, spec, operands: config.block_kv != 112,
            run=self.run,
        )

    def run(self, config, spec, operands):
        if config.block_kv in self.failing:
            raise ValueError("too much shared memory")
        wrong = config.block_kv in self.broken
        return lambda operands: (operands.v * (2 if wrong else 1), jnp.float32(config.block_kv), config.num_stages)

    def findings(self):
        return list(search.search(search.problem(self.kernel(), CASE, 16), measure))


def measure(program, arguments):
    _, block_kv, stages = program(*arguments)
    return MILLISECONDS[int(block_kv)] * (0.9 if int(stages) == 3 else 1.0)


@pytest.fixture(autouse=True)
def only_the_first_result_is_compared(monkeypatch):
    compare = search._difference
    monkeypatch.setattr(search, "_difference", lambda got, expected: compare(got[:1], expected[:1]))
    monkeypatch.setattr(search, "HIDDEN", 64)
    monkeypatch.setattr(search, "TOKENS", 16)


def best(findings):
    return [finding for finding in findings if finding.is_best][-1]


def test_the_fastest_of_each_field_is_kept():
    findings = Bench().findings()
    assert findings[0].note == "in use" and findings[0].config == ForwardConfig()
    assert (best(findings).config.block_kv, best(findings).config.num_stages) == (96, 3)
    configs = [finding.config for finding in findings]
    assert len(set(configs)) == len(configs), "nothing is measured twice"
    assert all(config.block_kv != 112 for config in configs), "what does not fit is not tried"


def test_what_is_wrong_or_does_not_compile_is_never_taken():
    findings = Bench(broken=(96,), failing=(80,)).findings()
    assert best(findings).config.block_kv == 64
    notes = {finding.config.block_kv: finding.note for finding in findings if finding.ms is None}
    assert "results differ" in notes[96] and "too much shared memory" in notes[80]


def test_a_start_that_does_not_compile_is_an_error():
    with pytest.raises(RuntimeError, match="too much shared memory"):
        Bench(failing=(128,)).findings()


def test_a_users_table_comes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "user_folder", lambda: tmp_path)
    cache.entries.cache_clear()
    try:
        before = cache.nearest("sm90_forward", CASE)[0]
        mine = ForwardConfig(block_kv=64, num_stages=3)
        for config in (ForwardConfig(), mine):
            file = cache.remember(tmp_path, "sm90_forward", CASE, config, {"ms": 1.0})
        assert cache.nearest("sm90_forward", CASE)[0] == dataclasses.asdict(mine) != before
        assert len(json.loads(file.read_text())) == 1, "a case has one entry"
        assert [path.name for path in tmp_path.iterdir()] == [file.name]
    finally:
        cache.entries.cache_clear()


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(kernels.dispatch, "compute_capability", lambda: None)
    assert command.main([]) == 2
    assert "no NVIDIA GPU" in capsys.readouterr().err


def test_a_folder_is_made_before_anything_is_measured(capsys, monkeypatch):
    monkeypatch.setattr(command.kernels, "obstacle", lambda kernel: None)
    monkeypatch.setattr(command, "_tune", lambda *_: pytest.fail("measured"))
    for arguments, said in (
        (["--folder", "/dev/null/x"], "error: --folder /dev/null/x: Not a directory"),
        (["--seq-len", "0"], "argument --seq-len: must be a whole number of at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["0", "128/300", "a", "1/2/3"])
def test_head_dims_are_checked(wrong, capsys):
    with pytest.raises(SystemExit):
        command.main(["--head-dims", wrong])
    assert "head-dims" in capsys.readouterr().err


@pytest.mark.parametrize("kernel", kernels.TUNED, ids=lambda kernel: kernel.table)
def test_what_is_tried_are_fields_of_the_kernels_tiles(kernel):
    array = jax.ShapeDtypeStruct((1, 1024, 2, 64), jnp.bfloat16)
    spec, operands = AttentionSpec(0.125), Operands(array, array, array)
    start = kernel.start(spec, operands)
    assert set(kernel.choices) <= {field.name for field in dataclasses.fields(start)}
    assert kernel.fits(start, spec, operands) and cache.entries(kernel.table)
