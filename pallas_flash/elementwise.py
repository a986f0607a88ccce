"""A user's elementwise function, traced once: its program is static, the arrays that it captures are operands."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import core  # and not jax.extend.core: importing that takes 30 ms, and empties the caches of jit

from pallas_flash.spec import Array, described, vary, varying_axes

# Operations whose printed form does not determine what they do: two of them are equal only if the functions are.
_OPAQUE = ("callback", "ffi_call", "pallas_call")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call")  # nor does that of these, which leaves out their rules
# The parameters of such an operation that hold its rules, and what JAX alone wraps around the user's function.
_RULES = {"jvp_jaxpr_fun": "_flatten_jvp", "fwd_jaxpr_thunk": "_flatten_fwd", "bwd": "_flatten_bwd"}


PLACE = {"batch": np.int32, "head": np.int32, "q_pos": np.int32, "kv_pos": np.int32}  # arguments that say where


class Elementwise:
    """The jaxpr of a scalar function. Equal programs are equal objects, so a lambda written anew in every step of a
    training loop does not compile anew."""

    def __init__(self, function: Callable[..., Any], jaxpr: Any, axes: tuple[str, ...]):
        self.jaxpr = jaxpr
        self._axes = axes  # the mesh axes that the arguments must vary over, as they did when it was traced
        self._mesh = jax.sharding.get_abstract_mesh()  # that it was traced under, and can be run under
        program = str(jaxpr)
        rules = [_rule(*rule) for rule in _rules(jaxpr)]
        opaque = any(name in program for name in _OPAQUE) or None in rules
        kept = [function] if opaque else [rule.function for rule in rules if rule is not None]
        trees = tuple(rule.trees for rule in rules if rule is not None)
        self._key = (program, tuple(_inner_constants(jaxpr)), axes, tuple(map(id, kept)), trees)
        self._kept = kept  # so that their ids stay their own

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and self._key == other._key

    def __call__(self, captures: Sequence[Array], *args: Array) -> Array:
        """Apply to arrays of one rank that broadcast against each other. Axes of size 1 stay scalars inside, so that
        `table[head]` is one load where all elements share the head."""
        args = tuple(vary(arg, self._axes) for arg in args)
        shape = jnp.broadcast_shapes(*(arg.shape for arg in args))
        program: Any = functools.partial(core.eval_jaxpr, self.jaxpr, captures)
        as_traced = set(varying_axes(args)) <= set(self._axes) and jax.sharding.get_abstract_mesh() == self._mesh
        pairs = zip(captures, self.jaxpr.constvars, strict=True)
        types = ((jax.typeof(x).manual_axis_type, var.aval.manual_axis_type) for x, var in pairs)
        if not as_traced or any(now.varying != traced.varying for now, traced in types):
            program = lambda *scalars: _evaluate(self.jaxpr, captures, scalars)  # noqa: E731
        function = lambda *scalars: program(*scalars)[0]  # noqa: E731
        if not shape:  # inside another such function, whose program has operations on scalars alone
            return function(*args)
        for axis in reversed(range(len(shape))):
            in_axes = tuple(0 if arg.shape[axis] != 1 else None for arg in args)
            if any(a is not None for a in in_axes):
                function = jax.vmap(function, in_axes)
        result = function(*(arg.reshape([n for n in arg.shape if n != 1]) for arg in args))
        return result.reshape(shape)


def _evaluate(jaxpr: Any, constants: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Run a program under another mesh than it was traced under: as a predicate that was made outside shard_map, or
    as a score_mod of arrays on explicit axes, on whose shards it runs; or on arrays that vary over more axes. Operands
    must vary alike over mesh axes, for which a trace would have cared."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *args), strict=True))
    read = lambda atom: jnp.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else values[atom]  # noqa: E731
    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        axes = varying_axes(inputs)
        inputs = [vary(x, axes) for x in inputs]
        inner = {"jit": "jaxpr", "custom_jvp_call": "call_jaxpr"}.get(equation.primitive.name)
        if equation.primitive.name == "pvary":
            results = [vary(inputs[0], equation.params["axes"])]  # which may vary over some of them already
        elif inner is not None:
            results = _evaluate(equation.params[inner].jaxpr, equation.params[inner].consts, inputs)
        else:
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equations(jaxpr: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Every equation, those of nested programs too, with the programs nested in it."""
    for equation in jaxpr.eqns:
        leaves = jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns"))
        nested = [leaf for leaf in leaves if hasattr(leaf, "eqns")]
        yield equation, nested
        for inner in nested:
            yield from _equations(inner)


def _inner_constants(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """The arrays inside nested programs (an inner jit's captures), which their printed form leaves out."""
    for _, nested in _equations(jaxpr):
        for constant in map(np.asarray, (const for inner in nested for const in getattr(inner, "consts", ()))):
            yield str(constant.dtype), constant.shape, constant.tobytes()


class _Rule(NamedTuple):
    """A derivative that a user defined, and the structures of the arguments that it is called with."""

    function: Callable[..., Any]
    trees: tuple[Any, ...]


def _rules(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Parameters with the derivatives of functions that have their own."""
    for equation, _ in _equations(jaxpr):
        if equation.primitive.name in _CUSTOM:
            yield from ((name, value) for name, value in equation.params.items() if name in _RULES)


def _rule(name: str, wrapped: Any) -> _Rule | None:
    """What JAX wrapped, which is one object in every trace of the same function. None if something else is bound to it
    (static arguments), or if it is not where JAX keeps it: the caller then goes by the whole function."""
    try:
        if name != "bwd":  # a memoised function that traces the rule
            trace_rule = inspect.getclosurevars(wrapped.f).nonlocals["fn"]
            wrapped = inspect.getclosurevars(trace_rule).nonlocals["jvp" if name == "jvp_jaxpr_fun" else "fwd"]
        ((flatten, bound),) = wrapped.transforms
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    if getattr(flatten, "__name__", None) != _RULES[name] or wrapped.params:
        return None
    return _Rule(wrapped.f, tuple(x for x in bound if isinstance(x, jax.tree_util.PyTreeDef)))


def trace(
    name: str, function: Callable[..., Any], arguments: dict[str, Any], result: Any, axes: tuple[str, ...] = ()
) -> tuple[Elementwise, tuple[Array, ...]]:
    """Trace `function` at scalars: arguments and result by dtype. Returns its program and the arrays that it captured.

    axes: inside shard_map, the mesh axes that the arguments will vary over.
    Raises ValueError, under the argument's `name`, for what is no such function.
    """
    wanted = f"{name} must be a function ({', '.join(arguments)}) of scalars that returns one {np.dtype(result)} scalar"
    if not callable(function):
        raise ValueError(f"{wanted}, not {function!r}")
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{wanted}: {error}") from error
    checked = functools.partial(_checked_result, wanted, function)
    closed = _jaxpr(checked, arguments, axes)
    captured_axes = varying_axes(closed.consts)
    if not set(captured_axes) <= set(axes):
        axes = tuple(sorted({*axes, *captured_axes}))
        closed = _jaxpr(checked, arguments, axes)
    if any(jnp.issubdtype(const.dtype, jnp.complexfloating) for const in closed.consts):
        raise ValueError(f"{wanted}, and captures no complex array")
    returned: list[Any] = [var.aval for var in closed.jaxpr.outvars]
    if len(returned) != 1 or returned[0].shape != () or returned[0].dtype != result:
        raise ValueError(f"{wanted}, not {', '.join(map(str, returned)) or None}")
    # Programs are cached by it, which would keep the captured arrays alive.
    without_captures = closed.with_consts([None] * len(closed.consts))
    return Elementwise(function, without_captures, axes), tuple(jnp.asarray(const) for const in closed.consts)


def _checked_result(wanted: str, function: Callable[..., Any], *args: Array) -> Any:
    """What the function returns, if it is one array or number: a tuple of one, too, is something else."""
    result = function(*args)
    try:
        jax.typeof(result)  # of a struct, too
        is_one = not isinstance(result, jax.ShapeDtypeStruct)
    except TypeError:
        is_one = False
    if not is_one:
        raise ValueError(f"{wanted}, not {described(result)}")
    return result


def _jaxpr(function: Callable[..., Any], arguments: dict[str, Any], axes: tuple[str, ...]) -> Any:
    scalars = (vary(jnp.zeros((), dtype), axes) for dtype in arguments.values())
    # Through a new function: make_jaxpr remembers programs by function, and what this one captures may have changed.
    return jax.make_jaxpr(lambda *args: function(*args))(*scalars)
