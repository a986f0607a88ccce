"""Tuned tiles: tables by device and shape class, measured ones shipped with the package."""
