"""A short run of the fuzzer, and that it finds, shrinks and repeats what is wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.fuzz import run
from tests.fuzz.__main__ import main
from tests.fuzz.case import OPTIONS, TRANSFORMATIONS, Case, draw
from tests.fuzz.search import cases, search

SECONDS = 6
SMALL = Case("xla", 5, 2, (5, 7), (6, 3), (8, 6), "float32", {"is_causal": True, "junk": "nan"})


def test_a_short_run_finds_nothing() -> None:
    """Of one size, which compiles little; `python -m tests.fuzz --seconds 600` is a longer one of all sizes."""
    report = search(0, ("xla",), seconds=SECONDS, like=SMALL)
    assert report.failures == [] and report.refused == 0
    assert sum(report.ran.values()) > 0


def test_a_fault_is_found_and_made_small() -> None:
    """As if causal were wrong beside a window whenever there are several rows."""

    def check(case: Case) -> None:
        if {"is_causal", "window"} <= set(case.options) and case.lengths[0] > 1:
            raise AssertionError(f"out: wrong at {case.lengths}")

    told: list[str] = []
    report = search(3, ("reference", "xla"), inputs=160, check=check, tell=told.append)
    assert report.failures
    for case, problem in report.failures:
        assert set(case.options) == {"is_causal", "window"} and case.transformation == "none"
        assert (case.batch, case.lengths, case.heads, case.dims) == (1, (2, 1), (1, 1), (1, 1))
        assert problem == "AssertionError: out: wrong at (2, 1)" and any(case.line() in line for line in told)


def test_a_line_repeats_its_case() -> None:
    for case in itertools.islice(cases(7, ("xla",)), 30):
        assert Case.parse(case.line()).line() == case.line()


WRONG = (
    ["--seed", "-1"], ["--case", "{"], ["--case", "[]"], ["--case", '{"implementation": "xla"}'],
    ["--case", SMALL.line().replace("[5, 7]", "[5]")], ["--implementations", "nope"], ["--implementations", "sm90"],
    ["--case", SMALL.line().replace('"xla"', '"nope"')],
)  # fmt: skip


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert len([line for line in capsys.readouterr().err.splitlines() if "error: " in line]) == 1


def test_everything_is_drawn() -> None:
    """Each argument and each transformation, within a few hundred cases."""
    rng = np.random.default_rng(0)
    drawn = [draw(rng, "xla", None) for _ in range(200)]
    assert {case.transformation for case in drawn} == set(TRANSFORMATIONS) == set(run.RUNNERS)
    assert {name for case in drawn for name in case.options} == set(OPTIONS)
