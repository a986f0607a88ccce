"""NVIDIA's compute-sanitizer over a small call of every kernel.

    python -m tests.sanitize                     all four tools; needs a GPU and the CUDA toolkit
    python -m tests.sanitize --tools racecheck   one of them
    python -m tests.sanitize --jobs 8            several runs side by side: most of each is compilation

initcheck may not follow what TMA stores: it is first asked about a kernel that only copies by TMA, and an addition by
XLA of what that stored. If it takes that for uninitialised, its reports from kernels of XLA's do not count.

Exit codes: 0 no tool found anything, 1 one did, 2 there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CONTROL = "a copy by TMA"
OURS = "flash_"  # in the names of this package's kernels
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def attention_calls() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    """Sizes (B, T, S, N, K, H, Hv) and options: each kernel, with tiles cut off, and every addition to the scores."""
    import jax
    import jax.numpy as jnp

    ids = jnp.asarray([[0] * 40 + [1] * 60], jnp.int32)
    everything: dict[str, Any] = {
        "segment_ids": (ids, jnp.asarray([[0] * 70 + [1] * 63], jnp.int32)), "sinks": jnp.ones(2),
        "logits_soft_cap": 5.0, "dropout_rate": 0.2, "dropout_key": jax.random.key(0),
        "key_value_seq_lengths": jnp.array([120]), "mask": jnp.ones((1, 1, 100, 133), bool).at[..., 5].set(False),
    }  # fmt: skip
    return {
        "forward, one backward kernel": ((1, 100, 133, 2, 1, 64, 64), {"is_causal": True}),
        "forward, two backward kernels": ((1, 100, 133, 2, 1, 64, 64), {"is_causal": True, "deterministic": True}),
        "gradient of a bias": ((1, 100, 133, 2, 1, 64, 64), {"bias": jnp.zeros((1, 2, 100, 133))}),
        "shared keys": ((1, 100, 133, 2, 1, 192, 128), {"local_window_size": (20, 3)}),
        "shared keys, two backward kernels": ((1, 100, 133, 2, 1, 256, 256), {"deterministic": True}),
        "everything": ((1, 100, 133, 2, 1, 128, 128), everything),
    }


def attend(name: str, implementation: str) -> Any:
    import jax.numpy as jnp

    from tests.test_gpu import inputs, run

    sizes, options = attention_calls()[name]
    tensors, dout, dlse = inputs(sizes, jnp.bfloat16)
    return run(implementation, tensors, dout, dlse, **options)


def decode(name: str, implementation: str) -> Any:
    """Several splits of ragged lengths, one that is 0; the cache contiguous, or in pages of 8 bits."""
    import jax
    import jax.numpy as jnp

    from pallas_flash import flash_decode, paged_flash_decode, quantise

    q, k, v = (jax.random.normal(jax.random.key(i), (3, *shape), jnp.bfloat16) for i, shape in enumerate(
        ((2, 8, 64), (1024, 2, 64), (1024, 2, 64))))  # fmt: skip
    lengths = jnp.array([1000, 0, 77])
    if "pages" not in name:
        return flash_decode(q, k, v, lengths, implementation=implementation)
    (k, k_scale), (v, v_scale) = (quantise(x.reshape(48, 64, 2, 64), jnp.int8) for x in (k, v))
    table = jnp.arange(48).reshape(3, 16)[:, ::-1]
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return paged_flash_decode(q, k, v, table, lengths, **scales, implementation=implementation)


def copy_by_tma(name: str, implementation: str) -> Any:
    """No kernel of ours: what initcheck says of this is about initcheck."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(source: Any, target: Any, buffer: Any, barrier: Any) -> None:
        plgpu.copy_gmem_to_smem(source, buffer, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    shape = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    scratch = {"buffer": plgpu.SMEM(shape.shape, shape.dtype), "barrier": plgpu.Barrier()}
    copied = plgpu.kernel(body, out_type=shape, scratch_types=scratch)
    return jax.jit(lambda x: copied(x) + 1)(jnp.ones(shape.shape, shape.dtype))


def calls(implementation: str) -> dict[str, Callable[[str, str], Any]]:
    decoding = ("decoding", "decoding, pages of 8 bits") if implementation == "sm90" else ()
    return dict.fromkeys(attention_calls(), attend) | dict.fromkeys(decoding, decode) | {CONTROL: copy_by_tma}


def run_call(name: str, implementation: str) -> None:
    import jax
    import numpy as np

    results = jax.tree.leaves(calls(implementation)[name](name, implementation))
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in results), name


def sanitize(tool: str, name: str, implementation: str) -> str:
    """What the tool said, "" if it found nothing. XLA's own allocator and command buffers stay out of its way."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_FLAGS": flags}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    command += [sys.executable, "-m", "tests.sanitize", "--run", name, "--implementation", implementation]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return result.stdout + result.stderr if result.returncode else ""


def kernels_of(report: str) -> set[str]:
    """In which the tool found something."""
    return set(re.findall(r"^=+ +at (?:void )?([\w:<>]+).*\+0x", report, re.MULTILINE))


def only_other_kernels(report: str) -> bool:
    found = kernels_of(report)
    return bool(found) and not any(OURS in kernel for kernel in found)


def check(tool: str, name: str, implementation: str, follows_tma: bool) -> bool:
    """Whether the tool found nothing that counts."""
    start = time.perf_counter()
    report = sanitize(tool, name, implementation)
    clean, verdict = not report, report or "nothing found"
    if tool == "initcheck" and not follows_tma and only_other_kernels(report):
        clean, verdict = True, f"nothing found but in {', '.join(sorted(kernels_of(report)))}, of what TMA stored"
    print(f"{implementation}, {tool}, {name}: {verdict} ({time.perf_counter() - start:.0f} s)", flush=True)
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--implementation", default="sm90")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, on one GPU")
    parser.add_argument("--run", metavar="CALL", help="one call, without a tool")
    options = parser.parse_args()
    if options.run:
        run_call(options.run, options.implementation)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    names = [name for name in calls(options.implementation) if name != CONTROL]
    pairs = itertools.product(options.tools, names)
    with ThreadPoolExecutor(options.jobs) as pool:
        follows_tma = "initcheck" not in options.tools or not sanitize("initcheck", CONTROL, options.implementation)
        if not follows_tma:
            print("initcheck does not follow what TMA stores: what it says of XLA's kernels does not count", flush=True)
        clean = list(pool.map(lambda pair: check(pair[0], pair[1], options.implementation, follows_tma), pairs))
    print(f"{sum(clean)} of {len(clean)} runs found nothing")
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
