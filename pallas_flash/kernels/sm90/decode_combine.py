"""Merges the splits of a decoding call, and counts the sinks: one CTA for each token of each query head."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_flash.kernels import softmax
from pallas_flash.kernels.sizes import round_up
from pallas_flash.kernels.sm90 import decode_plan
from pallas_flash.kernels.sm90.decode_config import ROWS, THREADS
from pallas_flash.kernels.sm90.decode_plan import Inputs, Outputs, Plan, Ref
from pallas_flash.spec import LN2, LOG2E

AT_ONCE = 16  # splits that are loaded together


class State(NamedTuple):
    m: jax.Array  # of the lse of the splits so far
    l: jax.Array  # noqa: E741
    acc: jax.Array


def width(value_head_dim: int) -> int:
    """Columns of a split's output: a whole number for every thread."""
    return round_up(value_head_dim, THREADS)


def with_sink(lse: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The lse with one more logit in it, and what an output of the old lse is to be multiplied with."""
    m = jnp.maximum(jnp.maximum(lse, sink), softmax.NO_MAXIMUM)
    keys, sum_ = jnp.exp2((lse - m) * LOG2E), jnp.exp2((sink - m) * LOG2E)
    sum_ = sum_ + keys
    weight = keys / jnp.maximum(sum_, jnp.finfo(jnp.float32).tiny)
    return m + jnp.log2(sum_) * LN2, weight


def run(plan: Plan, inputs: Inputs, partials: Outputs, *, interpret: Any = None) -> Outputs:
    rows = partials.lse.shape[-1]
    outputs = Outputs(
        jax.ShapeDtypeStruct((rows, plan.value_head_dim), plan.dtype), jax.ShapeDtypeStruct((rows,), jnp.float32)
    )
    needed = inputs._replace(q=None, k=None, v=None, page_table=None, k_scale=None, v_scale=None, scale=None)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=(outputs,),
        scratch_types=(plgpu.SMEM((width(plan.value_head_dim),), plan.dtype),),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
        kernel_name="flash_decode_combine_sm90",
    )
    return Outputs(*kernel(needed._replace(score_mod=()), partials)[0])


def _kernel(plan: Plan, inputs: Inputs, partials: Outputs, outputs: Outputs, buffer: Ref) -> None:
    if plan.config.early_combine:
        plgpu.griddepcontrol_wait()
    row = lax.axis_index("row")
    used = _used_splits(plan, inputs, row)

    def merge(step: jax.Array, state: State) -> State:
        splits = [step * AT_ONCE + i for i in range(AT_ONCE)]
        inside = [jnp.minimum(split, used - 1) for split in splits]  # one that is not used holds anything
        lses = [partials.lse[split, row] for split in inside]
        outs = [_columns(partials.out.at[split, row]) for split in inside]
        m = functools.reduce(jnp.maximum, lses, state.m)
        alpha = jnp.exp2((state.m - m) * LOG2E)
        l, acc = state.l * alpha, state.acc * alpha  # noqa: E741
        for split, lse, out in zip(splits, lses, outs, strict=True):
            weight = jnp.exp2((lse - m) * LOG2E) * (split < used).astype(jnp.float32)
            l, acc = l + weight, acc + out * weight  # noqa: E741
        return State(m, l, acc)

    nothing = State(
        jnp.float32(softmax.NO_MAXIMUM), jnp.float32(0), _columns_of(jnp.zeros((buffer.shape[0],), jnp.float32))
    )
    m, l, acc = lax.fori_loop(0, lax.div(used + (AT_ONCE - 1), jnp.int32(AT_ONCE)), merge, nothing)  # noqa: E741
    lse = m + jnp.log2(l) * LN2
    acc = acc * (1 / jnp.maximum(l, jnp.finfo(jnp.float32).tiny))
    if inputs.sinks is not None:
        lse, weight = with_sink(lse, inputs.sinks[lax.rem(row, jnp.int32(plan.shapes.num_q_heads))])
        acc = acc * weight
    buffer[...] = acc.astype(plan.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, plan.value_head_dim)], outputs.out.at[row])
    outputs.lse[row] = lse
    plgpu.wait_smem_to_gmem(0)


def _used_splits(plan: Plan, inputs: Inputs, row: jax.Array) -> jax.Array:
    """How many splits of a row's walk have keys: those come first."""
    heads, tokens = jnp.int32(plan.shapes.num_q_heads), jnp.int32(plan.shapes.q_len)
    group = jnp.int32(plan.shapes.q_heads_per_kv_head)
    batch, token, head = lax.div(row, heads * tokens), lax.rem(lax.div(row, heads), tokens), lax.rem(row, heads)
    qi = lax.div(token * group + lax.rem(head, group), jnp.int32(ROWS))
    length, q_offset = decode_plan.length_of(plan, inputs, batch)
    return plan.used_splits(plan.walk(length, q_offset, qi))


def _columns(source: Ref) -> jax.Array:
    return plgpu.load(source, layout=plgpu.Layout.WG_STRIDED((source.shape[0],), vec_size=1))


def _columns_of(values: jax.Array) -> jax.Array:
    return plgpu.layout_cast(values, plgpu.Layout.WG_STRIDED(values.shape, vec_size=1))
