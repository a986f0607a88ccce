"""Where numbers come from: device, driver, versions and commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

ROOT = Path(__file__).parent


def facts() -> dict[str, Any]:
    """As JSON has them; None for what cannot be found out. No paths, and no name of the machine."""
    device = jax.devices()[0]
    commit = said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return {
        "device": device.device_kind,
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "runtime": device.client.platform_version,
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "commit": commit,
        "dirty": None if commit is None else said("git", "-C", str(ROOT), "status", "--porcelain") is not None,
    }


def summary(where: dict[str, Any]) -> str:
    """Device, driver, jax and commit in a few words, without what is not known."""
    commit = where["commit"] and f"commit {where['commit'][:12]}{' with changes' if where['dirty'] else ''}"
    driver = where["driver"] and f"driver {where['driver']}"
    return "; ".join(part for part in (where["device"], driver, f"jax {where['jax']}", commit) if part)


def said(*command: str) -> str | None:
    """What a command prints first; None where there is no such command or it fails."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.splitlines()), None)
