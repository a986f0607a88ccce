"""What a call is: its static facts (`AttentionSpec`), its arrays (`Operands`), what it saves and returns.

Everything below the public API passes these few values around, never a list of sixteen keywords. A feature that is
new adds one field here.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

Array = jax.Array
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)


class Shapes(NamedTuple):
    """The sizes of one call, under the letters of `jax.nn`: B T S N K H Hv."""

    batch: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def q_heads_per_kv_head(self) -> int:
        return self.num_q_heads // self.num_kv_heads if self.num_kv_heads else 0


class Operands(NamedTuple):
    """Every array of a call; what is absent is None (or an empty tuple). `*` marks what has a gradient."""

    q: Array  # * [B, T, N, H]
    k: Array  # * [B, S, K, H]
    v: Array  # * [B, S, K, Hv]
    bias: Array | None = None  # * [1|B, 1|N, 1|T, 1|S], added after the soft cap
    sinks: Array | None = None  # * [N], one logit a head that only enlarges the denominator
    scale: Array | None = None  # * [], float32; None where the scale is static (AttentionSpec.scale)
    score_mod: tuple[Array, ...] = ()  # * arrays that score_mod captured, for AttentionSpec.score_mod
    mask: tuple[tuple[Array, ...], ...] = ()  # the arrays of each part of AttentionSpec.mask
    q_offset: Array | None = None  # int32 [B]; None where the offset is static (AttentionSpec.q_offset)
    kv_offset: Array | None = None  # likewise of the keys
    dropout_key: Array | None = None  # uint32 [2]
    origin: Array | None = None  # int32 [2]: the first batch element and head, in a call that is spread over devices

    @property
    def shapes(self) -> Shapes:
        batch, q_len, num_q_heads, head_dim = self.q.shape
        _, kv_len, num_kv_heads, value_head_dim = self.v.shape
        return Shapes(batch, q_len, kv_len, num_q_heads, num_kv_heads, head_dim, value_head_dim)


class Index(NamedTuple):
    """Where the elements of a tile of scores stand. The fields broadcast against each other to the tile's shape."""

    batch: Array  # among those of all devices that share the call, as head
    head: Array
    q_row: Array  # row of the query array
    q_pos: Array  # position of that row among the keys: q_row + q_offset
    kv_row: Array  # row of the key array
    kv_pos: Array  # its position: kv_row + kv_offset


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """The static facts of a call besides the shapes of its operands: hashable, so that programs are cached by it.

    logits = soft_cap(score_mod(scale * q.k)) + bias; a pair (q, k) takes part where every part of `mask` allows it.
    """

    scale: float | None  # None: operands.scale
    mask: tuple[Any, ...] = ()  # masks.Part: a pair takes part where all of them allow it
    q_offset: int | None = 0  # None: operands.q_offset
    kv_offset: int | None = 0  # position of key row 0, in a part of a sequence; None: operands.kv_offset
    soft_cap: float | None = None
    score_mod: Any = None  # elementwise.Elementwise | None
    dropout_rate: float = 0.0
    precision: Any = None  # jax.lax.PrecisionLike for both products
    deterministic: bool = False
    return_max_logit: bool = False
    shares_device: bool = False  # other kernels run beside this call's (a ring sends keys): none may wait for the other


class Residuals(NamedTuple):
    """What the forward pass keeps for the backward pass, beside the operands."""

    out: Array  # [B, T, N, Hv]
    m: Array  # [B, N, T], row maximum of the logits (with the sink); -inf for a row with no key
    l: Array  # noqa: E741  [B, N, T], row sum of exp(logits - m) (with the sink's term); 0 for a row with no key


class Forward(NamedTuple):
    """What an implementation's forward pass returns."""

    residuals: Residuals
    max_logit: Array | None = None  # [B, N] if spec.return_max_logit; without the sink; -inf if nothing is allowed


class Cotangents(NamedTuple):
    """The gradients that arrive at the backward pass."""

    out: Array  # [B, T, N, Hv]
    lse: Array  # [B, N, T]; zeros where lse was not used


class Gradients(NamedTuple):
    """The gradients of the operands marked `*` in `Operands`, each in its operand's shape and dtype."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None
    sinks: Array | None = None
    scale: Array | None = None
    score_mod: tuple[Array | None, ...] = ()  # None for an array that is not floating


class Implementation(Protocol):
    """A way of computing attention: a module with these names. dispatch.py holds the table of them."""

    NAME: str

    def unsupported(self, spec: AttentionSpec, operands: Operands) -> str | None:
        """Why this call (its gradient included) cannot be computed here, in words; None if it can.

        Looks at shapes and dtypes only: the operands may be tracers or `jax.ShapeDtypeStruct`s.
        """
        ...

    def forward(self, spec: AttentionSpec, operands: Operands) -> Forward: ...

    def backward(
        self, spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents
    ) -> Gradients: ...


def described(value: Any) -> str:
    """What came as an argument, in an error message: dtype and shape of an array, the value of anything else."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"a jax.ShapeDtypeStruct of {value.dtype}{list(value.shape)}"
    if is_array(value) and not isinstance(value, np.generic):
        masked = "a masked array of " if isinstance(value, np.ma.MaskedArray) else ""
        return f"{masked}{value.dtype}{list(value.shape)}"
    if isinstance(value, tuple) and len(value) <= 3:
        return f"({', '.join(map(described, value))}{',' if len(value) == 1 else ''})"
    return reprlib.repr(value)


def is_array(value: Any) -> bool:
    """Whether it is one, and not what merely has its attributes: a scalar class of NumPy, a `jax.ShapeDtypeStruct`."""
    return hasattr(value, "dtype") and hasattr(value, "shape") and not isinstance(value, type | jax.ShapeDtypeStruct)


def array_of(name: str, value: Any, wanted: str) -> Any:
    """What came as an array, or NumPy's of numbers and lists of them; ValueError for what is neither, and for a masked
    array, whose mask would be lost."""
    if isinstance(value, type | jax.ShapeDtypeStruct | np.ma.MaskedArray):
        raise ValueError(f"{name} must be {wanted}, not {described(value)}")
    if is_array(value):
        return value
    try:
        return np.asarray(value)
    except (ValueError, TypeError) as error:  # rows of different lengths, or lists of tracers
        raise ValueError(f"{name} must be {wanted}, not {described(value)}: {error}") from error


def jax_array(name: str, value: Any, wanted: str) -> Array:
    """What came, as JAX's own array; ValueError for dtypes that JAX has not, big-endian ones too."""
    array = array_of(name, value, wanted)
    try:
        return jax.numpy.asarray(array)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be {wanted} of a dtype that JAX has, not {described(value)}") from error


def called_with(function: str, kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dataclass of a call's arguments; Python's TypeError for wrong names speaks of the function."""
    try:
        return kind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(str(error).replace(f"{kind.__name__}.__init__()", f"{function}()")) from None


def of_structs(function: Callable[[Any], Any], arguments: Any) -> Any:
    """function(arguments), in which a `jax.ShapeDtypeStruct` stands for an array: nothing is computed then."""
    leaves, tree = jax.tree.flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
    if not places:
        return function(arguments)
    results = []

    def look(*tracers: Array) -> None:
        given = dict(zip(places, tracers, strict=True))
        results.append(function(jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)])))

    jax.eval_shape(look, *(leaves[i] for i in places))
    return results[0]


def varying_axes(arrays: Any) -> tuple[str, ...]:
    """The mesh axes, inside shard_map, along which any array of a pytree differs from device to device."""
    types = (jax.typeof(array).manual_axis_type for array in jax.tree.leaves(arrays))
    return tuple(sorted(frozenset().union(*(type_.varying for type_ in types))))


def vary(array: Array, axes: tuple[str, ...]) -> Array:
    """Mark an array as differing along mesh axes; the transpose sums its gradient over them."""
    missing = tuple(axis for axis in axes if axis not in jax.typeof(array).manual_axis_type.varying)
    return jax.lax.pcast(array, missing, to="varying") if missing else array


def accumulator_dtype(dtype: Any) -> Any:
    """The dtype of logits, softmax and accumulators: float64 for float64 inputs, float32 for all others."""
    return np.dtype(np.float64) if np.dtype(dtype) == np.float64 else np.dtype(np.float32)
