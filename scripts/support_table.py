"""The README's support table, made from the dispatch table and from what each implementation says of sample calls.

    python -m scripts.support_table           print it
    python -m scripts.support_table --write   put it into README.md

Nothing is computed, so any machine gives the same table.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_flash import dispatch, masks
from pallas_flash.spec import Implementation
from pallas_flash.validation import Arguments, canonicalise

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- support table: begin (make readme) -->", "<!-- support table: end -->"
B, T, S, N, K, H = 2, 256, 512, 8, 2, 64


def samples() -> dict[str, dict[str, Any]]:
    """A call for each feature: what it changes in an ordinary one."""
    bf16 = jnp.bfloat16
    return {
        "float16, bfloat16": {"query": jnp.zeros((B, T, N, H), bf16)},
        "float32": {"query": jnp.zeros((B, T, N, H), jnp.float32)},
        "grouped and multi-query heads": {"key": jnp.zeros((B, S, K, H), bf16), "value": jnp.zeros((B, S, K, H), bf16)},
        "value head size unlike the key's (192/128)": {
            "query": jnp.zeros((B, T, N, 192), bf16),
            "key": jnp.zeros((B, S, N, 192), bf16),
            "value": jnp.zeros((B, S, N, 128), bf16),
        },
        "`bias` with its gradient": {"bias": jnp.zeros((1, N, T, S), bf16)},
        "`mask` as an array": {"mask": jnp.ones((B, 1, T, S), bool)},
        "`is_causal`, `local_window_size`": {"is_causal": True, "local_window_size": (128, 0)},
        "`query_offset`, also per sequence": {"is_causal": True, "query_offset": jnp.array([S - T, 0])},
        "`query_seq_lengths`": {"query_seq_lengths": jnp.array([T, 77])},
        "`key_value_seq_lengths`": {"key_value_seq_lengths": jnp.array([S, 77])},
        "`segment_ids`": {"segment_ids": (jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32))},
        "`masks.prefix_lm`, `masks.chunked`": {"mask": masks.prefix_lm(64) & masks.chunked(128)},
        "`masks.predicate`": {"mask": masks.predicate(lambda b, h, q, k: (q - k) % 2 == 0)},
        "`logits_soft_cap`": {"logits_soft_cap": 30.0},
        "`sinks` with their gradient": {"sinks": jnp.zeros(N)},
        "`score_mod` with its gradient": {"score_mod": lambda s, b, h, q, k: s - jnp.abs(q - k) * 0.5},
        "`dropout_rate`": {"dropout_rate": 0.1, "dropout_key": jnp.zeros(2, jnp.uint32)},
        "`deterministic`": {"deterministic": True},
        "`return_max_logit`": {"return_max_logit": True},
    }


def ordinary() -> dict[str, Any]:
    bf16 = jnp.bfloat16
    return {
        "query": jnp.zeros((B, T, N, H), bf16),
        "key": jnp.zeros((B, S, N, H), bf16),
        "value": jnp.zeros((B, S, N, H), bf16),
    }


def verdict(implementation: Implementation, changes: dict[str, Any]) -> str:
    arguments = ordinary() | changes
    for name in ("key", "value"):  # one dtype, whatever the sample made the query
        arguments[name] = arguments[name].astype(arguments["query"].dtype)
    call = canonicalise(Arguments(**arguments))
    reason = implementation.unsupported(call.spec, call.operands)
    return "yes" if reason is None else f"no: {reason}"


def devices(entry: dispatch.Entry) -> str:
    if entry.capability is None:
        return "every device"
    lowest, beyond = (None if bound is None else ".".join(map(str, bound)) for bound in entry.capability)
    return f"NVIDIA GPUs, {lowest} <= compute capability" + ("" if beyond is None else f" < {beyond}")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table() -> str:
    entries = dispatch.TABLE
    lines = [row("", *(f"`{entry.name}`" for entry in entries)), row(*["---"] * (len(entries) + 1))]
    lines.append(row("runs on", *(devices(entry) for entry in entries)))
    lines.append(row("taken by `implementation=None`", *("yes" if e.automatic else "only by name" for e in entries)))
    lines.append(row("place in the order", *(entry.rank for entry in entries)))
    for feature, changes in samples().items():
        lines.append(row(feature, *(verdict(entry.implementation, changes) for entry in entries)))
    return "\n".join(lines)


def with_table(readme: str) -> str:
    """The README's text with the table between its two markers."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    assert len(pattern.findall(readme)) == 1, f"{README} must hold the markers {BEGIN} and {END} once"
    return pattern.sub(lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", readme)


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_table(README.read_text()))
    else:
        print(table())
