"""NVIDIA's compute-sanitizer over a small call of every kernel.

    python -m tests.sanitize                     all four tools; needs a GPU and the CUDA toolkit
    python -m tests.sanitize --tools racecheck   one of them
    python -m tests.sanitize --run               the calls alone, as the sanitizer runs them

Exit codes: 0 no tool found anything, 1 one did, 2 there is no compute-sanitizer.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def calls() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
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


def run_calls(implementation: str) -> None:
    import jax.numpy as jnp
    import numpy as np

    from tests.test_gpu import inputs, run

    for name, (sizes, options) in calls().items():
        tensors, dout, dlse = inputs(sizes, jnp.bfloat16)
        results = run(implementation, tensors, dout, dlse, **options)
        assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in results), name
        print(f"{name}: ran", flush=True)


def sanitize(tool: str, implementation: str) -> bool:
    """Whether the tool found nothing. XLA's own allocator and command buffers stay out of its way."""
    flags = "--xla_gpu_enable_command_buffer="
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_FLAGS": flags}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    command += [sys.executable, "-m", "tests.sanitize", "--run", "--implementation", implementation]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(f"{tool}: {'nothing found' if result.returncode == 0 else result.stdout + result.stderr}", flush=True)
    return result.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--implementation", default="sm90")
    parser.add_argument("--run", action="store_true")
    options = parser.parse_args()
    if options.run:
        run_calls(options.implementation)
        return 0
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    found = [tool for tool in options.tools if not sanitize(tool, options.implementation)]
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
