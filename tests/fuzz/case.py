"""What the fuzzer draws: a call and what is wrapped around it, as plain values that print as one line of JSON.

The numbers in the arrays come from the case's seed and the argument's name. So the line alone gives the same inputs
again, and taking an argument away, as shrinking does, leaves the others what they are.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests import oracles
from tests.conftest import Call, dropout_keep, inputs, op_by_op

LENGTHS = ((1, 1), (1, 64), (65, 1), (5, 7), (17, 17), (16, 33), (40, 37), (63, 65), (64, 63), (70, 70))
HEADS = ((1, 1), (2, 1), (6, 3), (4, 4), (12, 2))  # query heads, key heads
DIMS = ((8, 8), (7, 4), (16, 24), (1, 1), (40, 16))
DTYPES = ("float32", "bfloat16", "float16")
# Of the compiled kernels, whose tiles are larger; of their interpreter, where each tile of each head takes a second.
KERNEL_LENGTHS = ((1, 1), (1, 130), (5, 7), (64, 64), (100, 133), (130, 70), (144, 200), (100, 128), (70, 256))
INTERPRETED_LENGTHS, INTERPRETED_HEADS = ((1, 1), (5, 7), (1, 130), (65, 64), (70, 133), (70, 128)), ((1, 1), (2, 1))

# How often each is drawn: those that compile a program of their own cost most.
TRANSFORMATIONS = {
    "none": 8, "vmap": 3, "grad of vmap": 3, "batch dimensions": 2, "jit": 1, "scan": 1, "remat": 1, "shard_map": 1,
    "sharded": 1,
}  # fmt: skip
KERNEL_TRANSFORMATIONS = {"jit": 5, "vmap": 1, "grad of vmap": 1, "scan": 1, "remat": 1, "batch dimensions": 1}
LOCAL_PLACES = ("rate", "predicate", "score_mod")  # what sees batch and head, which shard_map counts anew in each shard

# Functions that NumPy evaluates on arrays and JAX on scalars alike; with the derivative of each score_mod.
PREDICATES = (
    lambda b, h, i, j: (i * 3 + j * 5 + h + 2 * b) % 4 != 0,
    lambda b, h, i, j: (i - j) * (i - j) <= 30 * (h + 1),
)
SCORE_MODS = (
    (lambda s, b, h, i, j: s - 0.05 * (h + 1) * abs(i - j), lambda s, b, h, i, j: 1 + 0 * s),
    (lambda s, b, h, i, j: s + 0.1 * s * s + 0.2 * b, lambda s, b, h, i, j: 1 + 0.2 * s),
)


PAIRS = ("lengths", "heads", "dims")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_size, value))


@dataclasses.dataclass(frozen=True)
class Case:
    """One input of the fuzzer. `options` holds how each argument is made that is present."""

    implementation: str
    seed: int
    batch: int
    lengths: tuple[int, int]
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: str
    options: dict[str, Any]
    transformation: str = "none"
    mapped: tuple[str, ...] = ()  # vmap, scan: the arrays that differ from instance to instance

    def line(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def parse(cls, line: str) -> Case:
        """ValueError if it is no line of a case."""
        fields, names = json.loads(line), [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, dict) or set(fields) != set(names):
            raise ValueError(f"a case is a JSON object with the fields {', '.join(names)}")
        is_right = dict.fromkeys(("seed", "batch"), _is_size) | dict.fromkeys(PAIRS, _is_pair)
        is_right |= {"dtype": lambda x: x in DTYPES, "transformation": lambda x: x in [*TRANSFORMATIONS]}
        is_right |= {"options": lambda x: isinstance(x, dict) and x.keys() <= OPTIONS.keys()}
        is_right |= {"mapped": lambda x: isinstance(x, list) and all(isinstance(name, str) for name in x)}
        for name, right in is_right.items():
            if not right(fields[name]):
                raise ValueError(f"{name} is {fields[name]!r}")
        return cls(**fields | {name: tuple(fields[name]) for name in (*PAIRS, "mapped")})


def draw(rng: np.random.Generator, implementation: str, like: Case | None) -> Case:
    """A random case, of the sizes and dtype of another if that is given."""
    pick = lambda options: options[rng.integers(len(options))]  # noqa: E731
    kernels = implementation not in ("reference", "xla")
    if like is None:
        interpreted = implementation == "interpreted"
        lengths = pick(INTERPRETED_LENGTHS if interpreted else KERNEL_LENGTHS if kernels else LENGTHS)
        dtype, heads = pick(DTYPES[1:] if kernels else DTYPES), pick(INTERPRETED_HEADS if interpreted else HEADS)
        sizes = {"batch": int(rng.integers(1, 4)), "lengths": lengths, "heads": heads, "dims": pick(DIMS)}
    else:
        sizes = {name: getattr(like, name) for name in ("batch", "lengths", "heads", "dims")}
        dtype = like.dtype
    case = Case(implementation, int(rng.integers(2**31)), **sizes, dtype=dtype, options={})
    options = {name: make(rng, case) for name, make in OPTIONS.items() if rng.random() < 0.3}
    if "soft_cap" in options:  # float32 does not hold the slope of a cap deep in saturation
        options.pop("loud", None)
    case = dataclasses.replace(case, options=options)
    weights = KERNEL_TRANSFORMATIONS if kernels else TRANSFORMATIONS
    if implementation == "interpreted":  # the interpreter's callbacks cannot be in a remat
        weights = {name: weight for name, weight in weights.items() if name != "remat"}
    transformation = pick([name for name, weight in weights.items() for _ in range(weight)])
    return with_transformation(rng, case, transformation)


def with_transformation(rng: np.random.Generator, case: Case, name: str) -> Case:
    mapped: tuple[str, ...] = ()
    if name in ("vmap", "grad of vmap", "scan"):
        names = [name for name, value in arrays_of(call_of(case)).items() if value.ndim or name == "scale"]
        mapped = tuple(n for n in names if rng.random() < 0.5) or ("q",)
    if name == "shard_map":
        case = dataclasses.replace(
            case, batch=2, options={n: v for n, v in case.options.items() if n not in LOCAL_PLACES}
        )
    if name == "sharded":
        case = dataclasses.replace(case, batch=4)  # by one or two axes of the mesh
    return dataclasses.replace(case, transformation=name, mapped=mapped)


def _flags(rng: np.random.Generator, case: Case) -> list[int]:
    return [int(x) for x in rng.random(4) < 0.6]


OPTIONS: dict[str, Any] = {
    "bias": lambda rng, case: {
        "axes": _flags(rng, case),
        "dtype": [case.dtype, "float32"][rng.integers(2)],
        "forbids": bool(rng.integers(2)),
    },
    "mask": _flags,
    "scale": lambda rng, case: [0.3, "0.9", "-0.4", 0.0][rng.integers(4)],  # text: an array
    "is_causal": lambda rng, case: True,
    "q_lengths": lambda rng, case: ["each", "all"][rng.integers(2)],
    "kv_lengths": lambda rng, case: ["each", "all"][rng.integers(2)],
    "window": lambda rng, case: [0, 2, 40, [3, 0], [0, 9], [None, 4], [-1, 2], [20, -1], [100, 1]][rng.integers(9)],
    "query_offset": lambda rng, case: [3, case.lengths[1] - case.lengths[0], -5, "each"][rng.integers(4)],
    "segment_ids": lambda rng, case: ["sorted", "unsorted"][rng.integers(2)],
    "prefix": lambda rng, case: "each",
    "chunk": lambda rng, case: [1, 9, 64][rng.integers(3)],
    "predicate": lambda rng, case: int(rng.integers(len(PREDICATES))),
    "soft_cap": lambda rng, case: [0.7, 5.0][rng.integers(2)],
    "sinks": lambda rng, case: [case.dtype, "float32"][rng.integers(2)],
    "score_mod": lambda rng, case: int(rng.integers(len(SCORE_MODS))),
    "rate": lambda rng, case: [0.1, 0.9][rng.integers(2)],
    "loud": lambda rng, case: [3.0, 20.0][rng.integers(2)],  # what q is multiplied with
    "junk": lambda rng, case: ["nan", "inf", "-inf"][rng.integers(3)],  # what stands where no pair takes part
    "cotangents": lambda rng, case: ["out", "lse", "zero"][rng.integers(3)],
    "deterministic": lambda rng, case: True,
}


def call_of(case: Case) -> Call:
    """The arguments in the oracle's names."""
    (q_len, kv_len), batch = case.lengths, case.batch
    sizes = {"batch": batch, "q_len": q_len, "kv_len": kv_len, "heads": case.heads, "dims": case.dims}
    call = inputs(case.seed, **sizes, dtype=_dtype(case.dtype))
    options = case.options
    call["q"] = (call["q"].astype(np.float32) * options.get("loud", 1)).astype(call["q"].dtype)
    for name in ("is_causal", "chunk", "soft_cap", "rate"):
        if name in options:
            call[name] = options[name]
    for name, limit in (("q_lengths", q_len), ("kv_lengths", kv_len), ("prefix", kv_len)):
        if name in options:
            call[name] = (
                _rng(case, name).integers(0, limit + 1, batch if options[name] == "each" else ()).astype(np.int32)
            )
    if "window" in options:
        call["window"] = tuple(options["window"]) if isinstance(options["window"], list) else options["window"]
    if "predicate" in options:
        call["predicate"] = PREDICATES[options["predicate"]]
    elif "mask" in options and not {"prefix", "chunk"} & set(options):
        call["mask"] = _rng(case, "mask").random(_shape(case, options["mask"])) < 0.8
    call |= {name: make(case, options[name]) for name, make in MAKERS.items() if name in options}
    return call


def with_keep(call: Call) -> Call:
    """With the mask that dropout draws at the call's positions."""
    if "rate" not in call:
        return call
    (batch, q_len, heads, _), kv_len = call["q"].shape, call["k"].shape[1]
    with op_by_op("reference"):
        keep = dropout_keep((batch, heads, q_len, kv_len), call["rate"], call.get("query_offset", 0))
    return call | {"keep": keep}


def _dtype(name: str) -> Any:
    return jnp.bfloat16 if name == "bfloat16" else np.dtype(name)


def _rng(case: Case, name: str) -> np.random.Generator:
    return np.random.default_rng([case.seed, zlib.crc32(name.encode())])


def _shape(case: Case, axes: Any) -> tuple[int, ...]:
    full = (case.batch, case.heads[0], *case.lengths)
    return tuple(n if axis else 1 for n, axis in zip(full, axes, strict=True))


def _bias(case: Case, how: dict[str, Any]) -> Any:
    rng = _rng(case, "bias")
    bias = rng.normal(size=_shape(case, how["axes"]))
    if how["forbids"]:
        bias[rng.random(bias.shape) < 0.2] = -np.inf
    return bias.astype(_dtype(how["dtype"]))


def _offset(case: Case, how: Any) -> Any:
    if how != "each":
        return how
    return _rng(case, "query_offset").integers(-5, case.lengths[1] + 1, case.batch).astype(np.int32)


def _segment_ids(case: Case, how: str) -> tuple[Any, Any]:
    rng = _rng(case, "segment_ids")
    ids = (rng.integers(0, 3, (case.batch, n)).astype(np.int32) for n in case.lengths)
    q_ids, kv_ids = (np.sort(x, axis=1) if how == "sorted" else x for x in ids)
    return q_ids, kv_ids


MAKERS: dict[str, Any] = {
    "bias": _bias,
    "scale": lambda case, how: np.float32(how) if isinstance(how, str) else how,
    "query_offset": _offset,
    "segment_ids": _segment_ids,
    "sinks": lambda case, how: _rng(case, "sinks").normal(size=case.heads[0]).astype(_dtype(how)),
    "score_mod": lambda case, how: SCORE_MODS[how],
}


def arrays_of(call: Call) -> dict[str, Any]:
    """The arrays of a call that are passed to it; the pair of segment ids under two names."""
    arrays = {
        name: value for name, value in call.items() if isinstance(value, np.ndarray | np.generic) and name != "keep"
    }
    if "segment_ids" in call:
        arrays |= dict(zip(("q_ids", "kv_ids"), call["segment_ids"], strict=True))
    return arrays


def belongs(array: str, option: str) -> bool:
    """Whether an array is there because of an option."""
    return array == option or (option == "segment_ids" and array in ("q_ids", "kv_ids"))


def with_arrays(call: Call, arrays: dict[str, Any]) -> Call:
    arrays = dict(arrays)
    ids = {"segment_ids": (arrays.pop("q_ids"), arrays.pop("kv_ids"))} if "q_ids" in arrays else {}
    return call | arrays | ids


def with_junk(call: Call, case: Case, dout: Any) -> tuple[Call, Any]:
    """The call with junk in every row of q, k and v, and every place of a full bias, that no live pair reads."""
    if "junk" not in case.options or min(call["q"].size, call["k"].size) == 0:
        return call, dout
    junk = float(case.options["junk"])
    live = oracles.intermediates(oracles.Arguments(**call)).live
    reads = live.any(3).transpose(0, 2, 1)  # [B, T, N]
    read = live.reshape(len(live), case.heads[1], -1, *live.shape[2:]).any((2, 3)).transpose(0, 2, 1)  # [B, S, K]
    fill = lambda x, keep: np.where(keep[..., None], x.astype(np.float32), junk).astype(x.dtype)  # noqa: E731
    call = call | {"q": fill(call["q"], reads), "k": fill(call["k"], read), "v": fill(call["v"], read)}
    if "bias" in call and call["bias"].shape == live.shape:
        bias = call["bias"].astype(np.float32)
        call["bias"] = np.where(live | (bias == -np.inf), bias, junk).astype(call["bias"].dtype)
    return call, fill(dout, reads)
