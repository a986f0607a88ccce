"""A differential fuzzer: random calls of the operator under random transformations, against the float64 oracle.

python -m tests.fuzz --seconds 600 --seed 1 --implementations reference xla
"""
