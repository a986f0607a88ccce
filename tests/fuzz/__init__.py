"""A differential fuzzer: random calls of the operator under random transformations, against the float64 oracle.

python -m tests.fuzz --seconds 600 --seed 1 --implementations reference xla
"""

import os

# Arrays that are sharded in any way need resharding, of which XLA would warn each time.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
