"""The README's support tables, made from the dispatch tables and from what each implementation says of sample calls.

    python -m scripts.support_table           print them
    python -m scripts.support_table --write   put them into README.md

Nothing is computed, so any machine gives the same tables.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_flash import decode_validation, dispatch, masks
from pallas_flash.decode_spec import DecodeImplementation
from pallas_flash.spec import Implementation
from pallas_flash.validation import Arguments, canonicalise

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- {}: begin (make readme) -->", "<!-- {}: end -->"
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


def decode_samples() -> dict[str, dict[str, Any]]:
    bf16, cache = jnp.bfloat16, (B, S, K, H)
    scales = {"k_scale": jnp.ones((B, S, K)), "v_scale": jnp.ones((B, S, K))}
    int8, float8 = (
        {"key": jnp.zeros(cache, dtype), "value": jnp.zeros(cache, dtype)} for dtype in (jnp.int8, jnp.float8_e4m3fn)
    )
    pool = jnp.zeros((B * S // 64, 64, K, H), bf16)
    pages = {"key": pool, "value": pool, "page_table": jnp.zeros((B, S // 64), jnp.int32)}
    return {
        "float16, bfloat16": {},
        "float32": {
            name: jnp.zeros(shape) for name, shape in (("query", (B, 1, N, H)), ("key", cache), ("value", cache))
        },
        "2 to 16 new tokens, ragged": {"query": jnp.zeros((B, 16, N, H), bf16), "query_lengths": jnp.array([16, 3])},
        "int8 cache with its scales": int8 | scales,
        "float8 cache, with scales or without": float8,
        "pages": pages,
        "chunked prefill in pages": pages | {"query": jnp.zeros((B, 256, N, H), bf16)},
        "`local_window_size`": {"local_window_size": 128},
        "`logits_soft_cap`, `sinks`": {"logits_soft_cap": 30.0, "sinks": jnp.zeros(N)},
        "`score_mod`": {"score_mod": lambda s, b, h, q, k: s - jnp.abs(q - k) * 0.5},
    }


def ordinary() -> dict[str, Any]:
    bf16 = jnp.bfloat16
    return {
        "query": jnp.zeros((B, T, N, H), bf16),
        "key": jnp.zeros((B, S, N, H), bf16),
        "value": jnp.zeros((B, S, N, H), bf16),
    }


def decode_verdict(implementation: DecodeImplementation, changes: dict[str, Any]) -> str:
    bf16 = jnp.bfloat16
    query, cache = jnp.zeros((B, 1, N, H), bf16), jnp.zeros((B, S, K, H), bf16)
    arguments = {"query": query, "key": cache, "value": cache, "kv_lengths": jnp.array([S, 77])} | changes
    call = decode_validation.canonicalise(decode_validation.DecodeArguments(**arguments))
    return _said(implementation.unsupported(call.spec, call.operands))


def _said(reason: str | None) -> str:
    return "yes" if reason is None else f"no: {reason}"


def verdict(implementation: Implementation, changes: dict[str, Any]) -> str:
    arguments = ordinary() | changes
    for name in ("key", "value"):  # one dtype, whatever the sample made the query
        arguments[name] = arguments[name].astype(arguments["query"].dtype)
    call = canonicalise(Arguments(**arguments))
    return _said(implementation.unsupported(call.spec, call.operands))


def devices(entry: dispatch.Entry[Any]) -> str:
    if entry.capability is None:
        return "every device"
    lowest, beyond = (None if bound is None else ".".join(map(str, bound)) for bound in entry.capability)
    return f"NVIDIA GPUs, {lowest} <= compute capability" + ("" if beyond is None else f" < {beyond}")


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(entries: tuple[dispatch.Entry[Any], ...], samples: dict[str, dict[str, Any]], verdict: Any) -> str:
    lines = [row("", *(f"`{entry.name}`" for entry in entries)), row(*["---"] * (len(entries) + 1))]
    lines.append(row("runs on", *(devices(entry) for entry in entries)))
    lines.append(row("taken by `implementation=None`", *("yes" if e.automatic else "only by name" for e in entries)))
    lines.append(row("place in the order", *(entry.rank for entry in entries)))
    for feature, changes in samples.items():
        lines.append(row(feature, *(verdict(entry.implementation, changes) for entry in entries)))
    return "\n".join(lines)


def tables() -> dict[str, str]:
    return {
        "support table": table(dispatch.TABLE, samples(), verdict),
        "decode table": table(dispatch.DECODE_TABLE, decode_samples(), decode_verdict),
    }


def with_tables(readme: str) -> str:
    """The README's text with each table between its two markers."""
    for name, text in tables().items():
        begin, end = BEGIN.format(name), END.format(name)
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        assert len(pattern.findall(readme)) == 1, f"{README} must hold the markers {begin} and {end} once"
        readme = pattern.sub(lambda _, text=f"{begin}\n\n{text}\n\n{end}": text, readme)
    return readme


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        README.write_text(with_tables(README.read_text()))
    else:
        print("\n\n".join(tables().values()))
