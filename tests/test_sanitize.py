"""What tests.sanitize makes of the tools' reports. The tools themselves need a GPU."""

from __future__ import annotations

import jax
import pytest

from tests import sanitize

READ = "========= Uninitialized __global__ memory read of size 16 bytes\n=========     at {}+0x1b0\n====="
XLA, OURS = "loop_transpose_fusion", "flash_attention_forward_sm90_mosaic_gpu_kernel"


@pytest.mark.parametrize(
    "report, clean",
    [
        ("", (True, True)),
        (READ.format(XLA), (False, True)),
        (READ.format(XLA) + "\n" + READ.format(OURS), (False, False)),
        (READ.format(OURS), (False, False)),
        ("Error: the program ended", (False, False)),
    ],
)
def test_only_initcheck_is_excused_and_only_for_other_kernels(
    report: str, clean: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sanitize, "sanitize", lambda *_: report)
    follows, does_not = (sanitize.check("initcheck", "a call", "sm90", follows_tma) for follows_tma in (True, False))
    assert (follows, does_not) == clean
    assert sanitize.check("memcheck", "a call", "sm90", follows_tma=False) == (not report)


def test_the_control_lowers():
    program = jax.jit(lambda: sanitize.copy_by_tma(sanitize.CONTROL, "sm90")).trace()
    assert "mosaic_gpu" in program.lower(lowering_platforms=("cuda",)).as_text()
