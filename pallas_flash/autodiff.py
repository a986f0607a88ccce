"""The one place where attention gets its derivative: a `custom_vjp` that keeps the operands, O, m and l."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_flash import partitioning
from pallas_flash.passes import AttentionPass
from pallas_flash.spec import (
    Array,
    AttentionSpec,
    Cotangents,
    Forward,
    Gradients,
    Implementation,
    Operands,
    Residuals,
)

# A remat policy that saves these (jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)) keeps the forward
# pass from running again in the backward pass.
CHECKPOINT_NAMES = ("flash_attention_out", "flash_attention_m", "flash_attention_l")


class Choice[I](NamedTuple):
    """Which implementation computes a call: one for programs lowered for an NVIDIA GPU, one for all others."""

    cuda: I
    default: I


class Output(NamedTuple):
    out: Array  # [B, T, N, Hv]
    lse: Array  # [B, N, T]
    max_logit: Array | None  # [B, N]


def log_sum_exp(m: Array, l: Array) -> Array:  # noqa: E741
    """Natural logarithm of the softmax denominator; -inf, with derivative 0, for a row with no key."""
    return jnp.where(l == 0, -jnp.inf, m + jnp.log(jnp.where(l == 0, 1, l)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(choice: Choice[Implementation], spec: AttentionSpec, operands: Operands) -> Output:
    """Attention by the chosen implementation, differentiable in the operands that spec.Operands marks."""
    return _attention_fwd(choice, spec, operands)[0]


def _attention_fwd(
    choice: Choice[Implementation], spec: AttentionSpec, operands: Operands
) -> tuple[Output, tuple[Operands, Residuals]]:
    residuals, max_logit = _mapped_alike(operands, run(choice, "forward", spec, operands))
    residuals = Residuals(*map(checkpoint_name, residuals, CHECKPOINT_NAMES))
    out, m, l = residuals  # noqa: E741
    return Output(out, log_sum_exp(m, l), max_logit), (operands, residuals)


def _mapped_alike(operands: Operands, forward: Forward) -> Forward:
    """Under vmap of any operand, all results get an axis of instances, as `out` has it.

    vmap over `value` alone would leave lse without one, and its cotangent, which is then the sum over all instances,
    would enter the backward pass of each. Without vmap this selects by a constant, which compiles to nothing."""
    never = _never(jax.tree.map(lax.stop_gradient, operands))
    out, *others = forward.residuals
    m, l, max_logit = jax.tree.map(lambda x: jnp.where(never, 0, x), (*others, forward.max_logit))  # noqa: E741
    return Forward(Residuals(out, m, l), max_logit)


@jax.custom_batching.custom_vmap
def _never(operands: Operands) -> Array:
    """False; under vmap one for each instance."""
    del operands
    return jnp.zeros((), bool)


@_never.def_vmap
def _never_vmap(axis_size: int, in_batched: Any, operands: Operands) -> tuple[Array, bool]:
    del in_batched, operands
    return jnp.zeros(axis_size, bool), True


def _attention_bwd(
    choice: Choice[Implementation], spec: AttentionSpec, saved: tuple[Operands, Residuals], cotangents: Output
) -> tuple[Operands]:
    operands, residuals = saved
    gradients = run(choice, "backward", spec, operands, residuals, Cotangents(cotangents.out, cotangents.lse))
    return (in_place_of(operands, gradients),)


attention.defvjp(_attention_fwd, _attention_bwd)


def run(choice: Choice[Any], method: str, spec: AttentionSpec, *arrays: Any) -> Any:
    """A pass of the chosen implementation, by each device on its own part of the batch and heads."""
    pass_ = AttentionPass(ByPlatform(choice, method), spec, backward=method == "backward")
    return partitioning.run(pass_, *arrays)


@dataclasses.dataclass(frozen=True)
class ByPlatform:
    """A function of the implementations: each device's own, as the program is lowered."""

    choice: Choice[Any]
    method: str

    def __call__(self, spec: Any, *arrays: Any) -> Any:
        functions = (partial(compiled(getattr(chosen, self.method)), spec) for chosen in self.choice)
        cuda, default = functions
        if self.choice.cuda is self.choice.default:
            return default(*arrays)
        return lax.platform_dependent(*arrays, cuda=cuda, default=default)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One program for equal specs and shapes, also where the caller does not jit."""
    return jax.jit(function, static_argnums=0)


def in_place_of(operands: Operands, gradients: Gradients) -> Operands:
    """The gradients as cotangents of the operands: None (zero) for those that have no derivative."""
    no_gradient: Any = dict.fromkeys(Operands._fields)
    return Operands(**no_gradient | gradients._asdict())
