"""What the figures and the tables of a report say alike: names, units, and how far the loss curves are apart."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Results = dict[str, Any]


def unit(results: Results) -> tuple[str, float]:
    """The unit of every loss in a report, and what a loss in nats is multiplied by."""
    return ("bits/byte", 1 / math.log(2.0)) if results["options"]["task"] == "text" else ("nats", 1.0)


def losses(training: dict[str, Any]) -> np.ndarray:
    """In nats, NaN where a loss was not finite."""
    return np.array([np.nan if loss is None else loss for loss in training["losses"]], np.float64)


def agreement(results: Results) -> dict[str, Any] | None:
    """How far the loss curves of the first two trainings are apart, over the steps that both have."""
    curves = [losses(training) for training in results["training"].values() if training["losses"]]
    if len(curves) < 2:
        return None
    steps = min(len(curve) for curve in curves)
    apart = np.abs(curves[0][:steps] - curves[1][:steps])
    if not np.isfinite(apart).all():
        return None
    return {
        "steps": steps,
        "max_abs_difference": float(apart.max()),
        "at_step": int(apart.argmax()) + 1,
        "median_abs_difference": float(np.median(apart)),
    }


def label(results: Results, name: str) -> str:
    """The name on the command line, and what it stands for on this device where that is another name."""
    used = results["uses"][name]
    return name if used == name else f"{name} ({used})"
