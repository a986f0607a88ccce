"""A user's elementwise function (`score_mod`, `masks.predicate`) on a tile in registers.

Its program is walked operation by operation. A value is a scalar or a tile; what the program makes of a captured array
is a `Window`, which is read once it has shrunk to one element for each place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from pallas_flash.elementwise import Elementwise
from pallas_flash.spec import LN2, LOG2E, vary

# Of arrays in device memory, and of values on the way: with x64, Python's integers are int64.
STORED = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32")
DTYPES = (*STORED, "int64")
Gather = Callable[[Any, tuple[Any, ...]], jax.Array]  # source[index]; each index is a scalar or a tile


class Window(NamedTuple):
    """A part of a captured array: where it starts on each axis, its sizes, and the axes that it still has."""

    source: Any  # a reference to device memory
    start: tuple[Any, ...]
    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    @classmethod
    def whole(cls, source: Any) -> Window:
        rank = len(source.shape)
        return cls(source, (0,) * rank, tuple(source.shape), tuple(range(rank)))

    def cut(self, starts: Sequence[Any], sizes: Sequence[int]) -> Window:
        """As lax.dynamic_slice cuts: a start too far out is moved in."""
        start, new = list(self.start), list(self.sizes)
        for axis, first, size in zip(self.axes, starts, sizes, strict=True):
            room = self.sizes[axis] - size
            start[axis] = start[axis] + _clipped(first, room)
            new[axis] = size
        return self._replace(start=tuple(start), sizes=tuple(new))

    def squeeze(self, dimensions: Sequence[int]) -> Window:
        return self._replace(axes=tuple(axis for i, axis in enumerate(self.axes) if i not in dimensions))


def _clipped(index: Any, last: int) -> Any:
    if isinstance(index, int) or last == 0:
        return min(max(index, 0), last) if last else 0
    return jnp.minimum(jnp.maximum(index, 0), last)


# Operations. Those that Mosaic computes otherwise than XLA, or only roughly, are put together from those it does right.


def _tanh(x: jax.Array) -> jax.Array:
    """The hardware's own is right to 11 bits only."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))


def _convert(x: jax.Array, dtype: Any) -> jax.Array:
    if x.dtype == dtype:
        return x
    if dtype == jnp.bool_:
        return x != lax.full(x.shape, 0, x.dtype)
    if x.dtype == jnp.bool_:
        return lax.select(x, lax.full(x.shape, 1, dtype), lax.full(x.shape, 0, dtype))
    return lax.convert_element_type(x, dtype)


def _not(x: jax.Array) -> jax.Array:
    return x ^ lax.full(x.shape, True if x.dtype == jnp.bool_ else -1, x.dtype)


def _power(x: jax.Array, y: int) -> jax.Array:
    if y == 0:
        return lax.full(x.shape, 1, x.dtype)
    result = x
    for bit in bin(abs(y))[3:]:
        result = result * result
        if bit == "1":
            result = result * x
    return result if y > 0 else 1 / result


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "div", "max", "min", "neg", "abs", "sign")},
    **{name: getattr(lax, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(lax, f"bitwise_{name}") for name in ("and", "or", "xor")},
    **{name: getattr(lax, name) for name in ("shift_left", "shift_right_logical", "shift_right_arithmetic")},
    "rem": lax.rem,
    "not": _not,
    "select_n": lambda which, no, yes: lax.select(which, yes, no),
    "clamp": lambda low, x, high: lax.min(lax.max(x, low), high),
    "convert_element_type": lambda x, *, new_dtype, **_: _convert(x, new_dtype),
    "exp": lambda x, **_: jnp.exp2(x * LOG2E),
    "exp2": lambda x, **_: jnp.exp2(x),
    "pow": lambda base, x: jnp.exp2(x * jnp.log2(base)),
    "log": lambda x, **_: jnp.log2(x) * LN2,
    "tanh": lambda x, **_: _tanh(x),
    "logistic": lambda x, **_: 1 / (1 + jnp.exp2(x * -LOG2E)),
    "sqrt": lambda x, **_: lax.sqrt(x),
    "rsqrt": lambda x, **_: lax.rsqrt(x),
    "square": lambda x: x * x,
    "integer_pow": lambda x, *, y: _power(x, y),
    "is_finite": lambda x: jnp.abs(x) < lax.full(x.shape, jnp.inf, x.dtype),
    "add_any": lax.add,  # this and the next occur in derivatives
    "one_minus_square": lambda x, **_: 1 - x * x,
}
FLOAT_ONLY = ("exp", "exp2", "log", "tanh", "logistic", "sqrt", "rsqrt")  # in float32
INTEGER_ONLY = ("rem",)
NESTED = ("jit", "pjit", "closed_call", "custom_jvp_call")
WINDOWS = ("slice", "dynamic_slice", "squeeze")
IDENTITIES = ("copy", "pvary", "stop_gradient")


def obstacle(function: Elementwise) -> str | None:
    """Why the kernel cannot compute this function, in words; None if it can."""
    return _obstacle(function.jaxpr)


def derivative_obstacle(function: Elementwise) -> str | None:
    """Likewise of its derivative by the score."""
    jaxpr = derivative(function).jaxpr
    if any(program.consts for program in _all_inner(jaxpr).values()):
        return "arrays that functions under jit captured"
    return _obstacle(jaxpr)


class Derivative(NamedTuple):
    """A program with the arguments of an `Elementwise`, and before them what that captures."""

    jaxpr: Any
    captures: int


@functools.lru_cache(maxsize=64)
def derivative(function: Elementwise) -> Derivative:
    """Of a `score_mod`'s value by the score."""
    jaxpr = function.jaxpr

    def slope(captures: list[Any], score: Any, *place: Any) -> Any:
        value = lambda score: core.eval_jaxpr(jaxpr, captures, score, *place)[0]  # noqa: E731
        return jax.jvp(value, (score,), (jnp.ones_like(score),))[1]

    def like(var: Any) -> Any:  # inside shard_map, varying along the same axes
        shape, dtype, axes = var.aval.shape, var.aval.dtype, tuple(var.aval.manual_axis_type.varying)
        return jax.eval_shape(lambda: vary(jnp.zeros(shape, dtype), axes))

    traced = jax.make_jaxpr(slope)([like(x) for x in jaxpr.constvars], *(like(x) for x in jaxpr.invars))
    assert not traced.consts, "what it captures are its arguments"
    return Derivative(traced.jaxpr, len(jaxpr.constvars))


def _obstacle(jaxpr: Any) -> str | None:
    for var in (*jaxpr.constvars, *jaxpr.invars):
        if var.aval.dtype.name not in DTYPES:
            return f"values of {var.aval.dtype}"
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in NESTED:
            inner = _inner(equation)
            problem = _obstacle(inner.jaxpr)
        else:
            problem = _operation_obstacle(name, equation)
        if problem is not None:
            return problem
    return None


def _operation_obstacle(name: str, equation: Any) -> str | None:
    scalars = all(var.aval.shape == () for var in (*equation.invars, *equation.outvars))
    dtype = (*equation.invars, *equation.outvars)[0].aval.dtype
    known = name in (*WINDOWS, *IDENTITIES) or (scalars and name in OPERATIONS)
    if name in WINDOWS and equation.params.get("strides") is not None:
        known = False
    if not known:
        return f"the operation {name}" if scalars else f"the operation {name} on an array"
    if name in FLOAT_ONLY and dtype != jnp.float32:
        return f"the operation {name} of {dtype}"
    if name in INTEGER_ONLY and not jnp.issubdtype(dtype, jnp.integer):
        return f"the operation {name} of {dtype}"
    if name == "select_n" and (len(equation.invars) != 3 or dtype != jnp.bool_):
        return "the operation select_n of more than two cases"
    if name == "pow" and not getattr(equation.invars[0], "val", 0) > 0:
        return "the operation pow of a base that is no positive constant"
    wrong = [var.aval.dtype for var in equation.outvars if var.aval.dtype.name not in DTYPES]
    return f"values of {wrong[0]}" if wrong else None


def _inner(equation: Any) -> Any:
    return equation.params["jaxpr" if "jaxpr" in equation.params else "call_jaxpr"]


def _all_inner(jaxpr: Any) -> dict[int, Any]:
    """The programs nested in this one, by identity, as one that is called twice is the same."""
    found = {}
    for equation in jaxpr.eqns:
        if equation.primitive.name in NESTED:
            inner = _inner(equation)
            found |= {id(inner.jaxpr): inner} | _all_inner(inner.jaxpr)
    return found


def operands(function: Elementwise, captures: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The arrays that `evaluate` reads: what the function captured, and what functions under `jit` inside it did."""
    inner = _all_inner(function.jaxpr).values()
    return (*captures, *(jnp.asarray(const) for program in inner for const in program.consts))


class Program(NamedTuple):
    """How to read the values of a function's program."""

    gather: Gather
    inner: dict[int, list[Window]]  # captures of nested programs


def evaluate(
    function: Elementwise | Derivative, sources: Sequence[Any], args: Sequence[Callable[[], Any]], gather: Gather
) -> Any:
    """The function's value, a tile or a scalar. sources: references to `operands`. An argument is called if something
    reads it: what nobody reads must not be there, as Mosaic finds no layout for it."""
    windows = iter([Window.whole(source) for source in sources])
    captures = [next(windows) for _ in function.jaxpr.constvars]
    if isinstance(function, Derivative):
        first = [next(windows) for _ in range(function.captures)]
        args = [*(lambda window=window: window for window in first), *args]
    inner = {key: [next(windows) for _ in program.consts] for key, program in _all_inner(function.jaxpr).items()}
    (result,) = _evaluate(Program(gather, inner), function.jaxpr, captures, args)
    return result()


def _evaluate(
    program: Program, jaxpr: Any, captures: list[Window], args: Sequence[Callable[[], Any]]
) -> list[Callable[[], Any]]:
    """What gives its results."""
    values: dict[Any, Callable[[], Any]] = dict(zip(jaxpr.invars, args, strict=True))
    values |= {var: lambda window=window: window for var, window in zip(jaxpr.constvars, captures, strict=True)}

    def read(var: Any) -> Any:
        value = np.asarray(var.val, var.aval.dtype)[()] if hasattr(var, "val") else values[var]()
        if isinstance(value, Window) and not value.axes:
            value = program.gather(value.source, value.start)
        return value

    for equation in _needed(jaxpr):
        name, params = equation.primitive.name, equation.params
        if name in NESTED:
            inner, arguments = _inner(equation).jaxpr, [functools.partial(read, var) for var in equation.invars]
            results = _evaluate(program, inner, program.inner[id(inner)], arguments)
            values |= dict(zip(equation.outvars, results, strict=True))
            continue
        if name in IDENTITIES:
            result = read(equation.invars[0])
        elif name in WINDOWS:
            result = _window(name, [read(var) for var in equation.invars], params)
        else:
            result = OPERATIONS[name](*_broadcast([read(var) for var in equation.invars]), **params)
        values[equation.outvars[0]] = lambda result=result: result
    return [functools.partial(read, var) for var in jaxpr.outvars]


def _needed(jaxpr: Any) -> list[Any]:
    """The operations that the result depends on."""
    variables = lambda atoms: {atom for atom in atoms if not hasattr(atom, "val")}  # noqa: E731
    needed, used = [], variables(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if used & set(equation.outvars):
            needed.append(equation)
            used |= variables(equation.invars)
    return needed[::-1]


def _window(name: str, operands: list[Any], params: dict[str, Any]) -> Window:
    window, *starts = operands
    if name == "squeeze":
        return window.squeeze(params["dimensions"])
    if name == "slice":
        starts, limits = params["start_indices"], params["limit_indices"]
        return window.cut(starts, [limit - start for start, limit in zip(starts, limits, strict=True)])
    return window.cut(starts, params["slice_sizes"])


def _broadcast(operands: list[Any]) -> list[Any]:
    """Scalars as tiles, where a tile stands beside them."""
    shape = max((jnp.shape(x) for x in operands), key=len)
    return [lax.broadcast_in_dim(x, shape, ()) if shape and jnp.ndim(x) == 0 else x for x in operands]
