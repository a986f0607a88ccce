"""Runs a case of the fuzzer under its transformation and judges every result against the float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests import oracles
from tests.conftest import (
    CPU_IMPLEMENTATIONS,
    DIFFERENTIABLE,
    KEY_SEED,
    Call,
    Outputs,
    attend,
    cotangents_of,
    judge,
    op_by_op,
)
from tests.fuzz.case import Case, arrays_of, call_of, with_arrays, with_junk, with_keep

INSTANCES = 2  # of a vmap or scan
# Wider than in the tests, as the largest of many thousand errors is wider than that of a few; for kernels wider again,
# as in tests/test_gpu.py: their delta comes from the rounded output.
FACTOR, KERNEL_FACTOR, SLACK = 3.0, 4.0, 6.0


class Prepared:
    """The instances of a case: a call each with its cotangents. Arrays that are not mapped are those of the first."""

    def __init__(self, case: Case):
        first = call_of(case)
        self.calls, self.cotangents = [], []
        mapped = case.transformation in ("vmap", "grad of vmap", "scan")
        for number in range(INSTANCES if mapped else 1):
            call = first
            if number:
                other = arrays_of(call_of(_reseeded(case)))
                call = with_arrays(first, {name: other[name] for name in _paired(case.mapped, other)})
            call = with_keep(call)
            dout, dlse = _cotangents(case, call, number)
            if not mapped:
                call, dout = with_junk(call, case, dout)
            self.calls.append(call)
            self.cotangents.append((dout, dlse))


def _reseeded(case: Case) -> Case:
    return dataclasses.replace(case, seed=case.seed + 1)


def _paired(mapped: tuple[str, ...], arrays: dict[str, Any]) -> set[str]:
    """The mapped names, where segment ids always come in pairs."""
    names = set(mapped) & set(arrays)
    return names | {"q_ids", "kv_ids"} if names & {"q_ids", "kv_ids"} else names


def _cotangents(case: Case, call: Call, number: int) -> tuple[Any, Any]:
    dout, dlse = cotangents_of(call, case.seed % 1000 + number)
    which = case.options.get("cotangents", "both")
    return dout * (which not in ("lse", "zero")), dlse * (which not in ("out", "zero"))


def check(case: Case) -> None:
    """Raises AssertionError if a result is wrong, or whatever the operator raises."""
    prepared = Prepared(case)
    RUNNERS[case.transformation](case, prepared)


def program(case: Case, call: Call, wrap: Callable[[Any], Any] = lambda f: f) -> Callable[..., Any]:
    """(arrays, (dout, dlse)) -> ((out, lse), max_logit, gradients)."""
    names = arrays_of(call)
    static = {name: value for name, value in call.items() if name not in (*names, "segment_ids", "keep")}
    extra: dict[str, Any] = {"return_residual": True, "return_max_logit": True}
    if "rate" in call:
        extra["dropout_key"] = jax.random.key(KEY_SEED)
    if "deterministic" in case.options:
        extra["deterministic"] = True

    def run(arrays: dict[str, Any], cotangents: Any) -> Any:
        floats = {name: value for name, value in arrays.items() if name in DIFFERENTIABLE}
        others = {name: value for name, value in arrays.items() if name not in floats}

        def forward(floats: Any, others: Any) -> Any:
            out, lse, max_logit = attend(with_arrays(static, floats | others), case.implementation, **extra)
            return (out, lse), max_logit

        results, pull, max_logit = jax.vjp(lambda floats: wrap(forward)(floats, others), floats, has_aux=True)
        return results, max_logit, pull(cotangents)[0]

    return run


def _judge(case: Case, results: Any, call: Call, cotangents: Any) -> None:
    (out, lse), max_logit, gradients = results
    outputs = Outputs(*jax.tree.map(np.asarray, (out, lse, max_logit, gradients)))
    factor = FACTOR if case.implementation in CPU_IMPLEMENTATIONS else KERNEL_FACTOR
    judge(outputs, call, *cotangents, factor=factor, slack=SLACK)


def _device_arrays(call: Call) -> dict[str, Any]:
    return {name: jnp.asarray(value) for name, value in arrays_of(call).items()}


def _single(case: Case, prepared: Prepared, transform: Callable[[Any], Any], wrap: Any = lambda f: f) -> None:
    (call,), (cotangents,) = prepared.calls, prepared.cotangents
    results = transform(program(case, call, wrap))(_device_arrays(call), jax.tree.map(jnp.asarray, cotangents))
    _judge(case, results, call, cotangents)


def _plain(case: Case, prepared: Prepared) -> None:
    with op_by_op(case.implementation):
        _single(case, prepared, lambda f: f)


def _jit(case: Case, prepared: Prepared) -> None:
    _single(case, prepared, jax.jit)


def _remat(case: Case, prepared: Prepared) -> None:
    policies = (jax.checkpoint_policies.nothing_saveable, jax.checkpoint_policies.dots_saveable, None)
    policy = policies[case.seed % len(policies)]
    _single(case, prepared, jax.jit, lambda f: jax.checkpoint(f, policy=policy))


def _stacked(case: Case, prepared: Prepared) -> tuple[dict[str, Any], dict[str, int | None], Any]:
    """The arrays with the mapped ones stacked, the axis of each, and the cotangents stacked."""
    names = _paired(case.mapped, arrays_of(prepared.calls[0]))
    instances = [arrays_of(call) for call in prepared.calls]
    arrays = {
        name: jnp.stack([x[name] for x in instances]) if name in names else jnp.asarray(instances[0][name])
        for name in instances[0]
    }
    axes = {name: 0 if name in names else None for name in arrays}
    return arrays, axes, jax.tree.map(lambda *x: jnp.stack(x), *prepared.cotangents)


def _judge_instances(case: Case, prepared: Prepared, results: Any) -> None:
    for number, (call, cotangents) in enumerate(zip(prepared.calls, prepared.cotangents, strict=True)):
        _judge(case, jax.tree.map(lambda x, number=number: x[number], results), call, cotangents)


def _vmap(case: Case, prepared: Prepared) -> None:
    """vmap of the gradient."""
    arrays, axes, cotangents = _stacked(case, prepared)
    run = jax.vmap(program(case, prepared.calls[0]), (axes, 0))
    with op_by_op(case.implementation):
        _judge_instances(case, prepared, run(arrays, cotangents))


def _scan(case: Case, prepared: Prepared) -> None:
    arrays, axes, cotangents = _stacked(case, prepared)
    fixed = {name: arrays[name] for name, axis in axes.items() if axis is None}
    moving = {name: arrays[name] for name, axis in axes.items() if axis == 0}

    @jax.jit
    def scanned(moving: Any, fixed: Any, cotangents: Any) -> Any:
        run = program(case, prepared.calls[0])
        return jax.lax.scan(lambda carry, x: (carry, run(x[0] | fixed, x[1])), 0, (moving, cotangents))[1]

    _judge_instances(case, prepared, scanned(moving, fixed, cotangents))


def _grad_of_vmap(case: Case, prepared: Prepared) -> None:
    """The gradients of what is not mapped are sums over the instances: compared to those of a loop in float64."""
    arrays, axes, cotangents = _stacked(case, prepared)
    floats = {name: x for name, x in arrays.items() if name in DIFFERENTIABLE}
    others = {name: x for name, x in arrays.items() if name not in floats}
    extra: dict[str, Any] = {"dropout_key": jax.random.key(KEY_SEED)} if "rate" in prepared.calls[0] else {}
    static = {n: x for n, x in prepared.calls[0].items() if n not in (*arrays, "segment_ids", "keep")}

    def mapped(floats: Any) -> Any:
        def one(arrays: Any) -> Any:
            call = with_arrays(static, arrays)
            return attend(call, case.implementation, return_residual=True, **extra)

        return jax.vmap(one, (axes,))(floats | others)

    with op_by_op(case.implementation):
        gradients = jax.vjp(mapped, floats)[1](cotangents)[0]
    _judge_sums(case, prepared, axes, gradients)


def _judge_sums(case: Case, prepared: Prepared, axes: dict[str, int | None], gradients: dict[str, Any]) -> None:
    dtype = np.dtype(prepared.calls[0]["q"].dtype)
    instances = list(zip(prepared.calls, prepared.cotangents, strict=True))
    exact, rough = (
        [oracles.gradients(**call, dout=dout, dlse=dlse, arithmetic=a) for call, (dout, dlse) in instances]
        for a in (oracles.FLOAT64, oracles.plain(dtype))
    )
    sizes = [oracles.rounding_magnitudes(**call, dout=dout, dlse=dlse) for call, (dout, dlse) in instances]
    for name, got in gradients.items():
        combine = (lambda xs: np.stack(xs)) if axes[name] == 0 else (lambda xs: np.sum(np.stack(xs), 0))
        want, plain = (combine([np.float64(x[name]) for x in xs]) for xs in (exact, rough))
        (computed, stored), (_, own) = map(oracles.rounding_units, (dtype, prepared.calls[0][name].dtype))
        unit = 16 * computed + max(stored, own)
        floor = unit * combine([np.float64(x[name]) for x in sizes])
        oracles.assert_within_budget(got, want, plain, factor=4.0, floor=floor, name=f"summed {name}")


def _shard_map(case: Case, prepared: Prepared) -> None:
    """Over two devices, the batch split in two; what has no batch axis is replicated."""
    (call,), (cotangents,) = prepared.calls, prepared.cotangents
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    arrays = _device_arrays(call)
    batched = lambda name, x: x.ndim > 0 and x.shape[0] == case.batch and name != "sinks"  # noqa: E731
    full_rank = lambda name, x: name not in ("bias", "mask") or x.shape[0] == case.batch  # noqa: E731
    specs = {n: P("x") if batched(n, x) and full_rank(n, x) else P() for n, x in arrays.items()}
    gradient_specs = {name: specs[name] for name in arrays if name in DIFFERENTIABLE}

    run = program(case, call)
    out_specs = ((P("x"), P("x")), P("x"), gradient_specs)
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(specs, P("x")), out_specs=out_specs)
    results = jax.jit(sharded)(arrays, jax.tree.map(jnp.asarray, cotangents))
    _judge(case, results, call, cotangents)


def _sharded(case: Case, prepared: Prepared) -> None:
    """On a mesh with automatic axes, each array split in any way that its sizes allow."""
    (call,), (cotangents,) = prepared.calls, prepared.cotangents
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rng = np.random.default_rng(case.seed)

    def place(x: Any) -> jax.Array:
        over: list[tuple[str, ...]] = [() for _ in x.shape]
        for axis in rng.permutation(mesh.axis_names).tolist():
            number = int(rng.integers(-1, x.ndim))  # -1: none
            if number >= 0 and x.shape[number] % 2 ** (len(over[number]) + 1) == 0:
                over[number] += (axis,)
        return jax.device_put(jnp.asarray(x), jax.sharding.NamedSharding(mesh, P(*over)))

    results = jax.jit(program(case, call))(*jax.tree.map(place, (_device_arrays(call), cotangents)))
    _judge(case, results, call, cotangents)


def _batch_dimensions(case: Case, prepared: Prepared) -> None:
    """Two batch dimensions, or none where there is one element."""
    (call,), (cotangents,) = prepared.calls, prepared.cotangents
    lead = () if case.batch == 1 else (1, case.batch)

    def run(arrays: Any, cotangents: Any) -> Any:
        shaped = {name: _with_lead(name, x, case.batch, lead) for name, x in arrays.items()}
        cotangents = jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), cotangents)
        results, max_logit, gradients = program(case, call)(shaped, cotangents)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), (results, max_logit))
        return *flat, {name: x.reshape(arrays[name].shape) for name, x in gradients.items()}

    with op_by_op(case.implementation):
        results = run(_device_arrays(call), jax.tree.map(jnp.asarray, cotangents))
    _judge(case, results, call, cotangents)


def _with_lead(name: str, x: Any, batch: int, lead: tuple[int, ...]) -> Any:
    if name in ("sinks", "scale") or x.ndim == 0:
        return x
    if name in ("bias", "mask") and x.shape[0] != batch:
        return x[0]
    return x.reshape(*lead, *x.shape[1:])


RUNNERS: dict[str, Callable[[Case, Prepared], None]] = {
    "none": _plain,
    "jit": _jit,
    "vmap": _vmap,
    "grad of vmap": _grad_of_vmap,
    "scan": _scan,
    "remat": _remat,
    "shard_map": _shard_map,
    "sharded": _sharded,
    "batch dimensions": _batch_dimensions,
}
