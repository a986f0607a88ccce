"""Benchmarks against what a user would otherwise call: `python -m pallas_flash.benchmarks run` and `report`."""
