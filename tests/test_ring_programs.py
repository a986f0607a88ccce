"""What a ring compiles to: how many calls of attention, which of them under a condition, and how much memory."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_flash import flash_attention, masks
from pallas_flash.distributed import from_zigzag, plan, ring_attention, to_zigzag
from pallas_flash.distributed.order import Order
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sizes import EVERY_ITEM
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.masks import Band
from pallas_flash.spec import AttentionSpec, Operands, Shapes
from tests.sharding import mesh_of

ROWS = P(None, "x")
CAUSAL = AttentionSpec(1.0, mask=(Band(None, 0),))


def plan_of(spec: AttentionSpec, devices: int = 4, kv_len: int = 16) -> plan.Plan:
    return plan.make(spec, Order("zigzag", devices), Shapes(1, 16, kv_len, 2, 2, 8, 8))


def test_plan_of_a_causal_mask_in_zigzag_order() -> None:
    """The own keys in one call; later the second half of the queries sees the first half of the keys, and either the
    second halves see each other or the first ones do."""
    made = plan_of(CAUSAL)
    assert made.own == (plan.Pair(None, None, always=True, masked=True, offset=0),)
    assert [(pair.q, pair.kv, pair.other) for pair in made.forward[1]] == [(0, 0, (1, 1)), (1, 0, None)]
    assert all(pair.always and not pair.masked for pair in made.forward[1])


@pytest.mark.parametrize("part", [Band(0, 0), masks.QueryLengths(), masks.KeyValueLengths(), masks.Segments()])
def test_own_keys_are_one_call(part: Any) -> None:
    assert [pair.q for pair in plan_of(AttentionSpec(1.0, mask=(*CAUSAL.mask, part))).own] == [None]


@pytest.mark.parametrize(
    ("spec", "kv_len"),
    [
        (AttentionSpec(1.0, mask=(Band(3, 0),)), 16),
        (AttentionSpec(1.0, mask=(Band(None, 0), masks.PrefixLM())), 16),
        (AttentionSpec(1.0, mask=CAUSAL.mask, q_offset=1), 16),
        (AttentionSpec(1.0, mask=CAUSAL.mask, q_offset=None), 16),
        (AttentionSpec(1.0, mask=CAUSAL.mask, dropout_rate=0.1), 16),
        (AttentionSpec(1.0, mask=CAUSAL.mask, score_mod=abs), 16),
        (CAUSAL, 32),
    ],
)
def test_own_keys_are_not_one_call_where_positions_count(spec: AttentionSpec, kv_len: int) -> None:
    assert None not in [pair.q for pair in plan_of(spec, kv_len=kv_len).own]


def test_all_pairs_are_one_call() -> None:
    made = plan_of(AttentionSpec(1.0, mask=(masks.KeyValueLengths(),)))
    for pairs in (made.own, made.forward[1]):
        assert [(pair.q, pair.kv, pair.masked) for pair in pairs] == [(None, None, pairs is made.own)]
    assert not made.backward[0]


def ring_of(mesh: Any, **arguments: Any) -> Any:
    attend = functools.partial(ring_attention, axis_name="x", order="zigzag", **arguments)
    return jax.shard_map(lambda q, k, v: attend(q, k, v), mesh=mesh, in_specs=ROWS, out_specs=ROWS)


def both(attend: Any) -> Any:
    def run(dout: Any, *tensors: Any) -> Any:
        out, pullback = jax.vjp(attend, *tensors)
        return out, pullback(dout)

    return run


def struct(mesh: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, ROWS))


def counted(jaxpr: Any, found: collections.Counter[str]) -> collections.Counter[str]:
    """Attention passes by name, and conditions outside of them."""
    for equation in jaxpr.eqns:
        name = equation.params.get("name", equation.primitive.name)
        if name in ("forward", "backward", "cond"):
            found[name] += 1
        else:
            for inner in jaxprs_in_params(equation.params):
                counted(inner, found)
    return found


@pytest.mark.parametrize(("devices", "heads_at_once", "calls"), [(1, None, 1), (2, 2, 3), (4, None, 5)])
def test_causal_zigzag_calls(devices: int, heads_at_once: int | None, calls: int) -> None:
    """One with the own keys, two with those of each hop (of which the last one stands behind a loop of the others)."""
    mesh = jax.sharding.AbstractMesh((devices,), ("x",), (AxisType.Auto,))
    attend = ring_of(mesh, is_causal=True, implementation="sm90", heads_at_once=heads_at_once)
    traced = jax.jit(both(attend)).trace(*[struct(mesh, 1, 256 * devices, 4, 64)] * 4)
    assert counted(traced.jaxpr.jaxpr, collections.Counter()) == {"forward": calls, "backward": calls}


@pytest.mark.parametrize(("devices", "of"), [(2, both), (8, lambda attend: lambda _, *tensors: attend(*tensors))])
def test_groups_of_heads_need_less_memory(devices: int, of: Any) -> None:
    """Forward and backward, and forward alone."""
    mesh = mesh_of((devices,), ("x",))
    shape = struct(mesh, 1, 512 * devices, 8, 64)

    def needed(heads_at_once: int | None) -> int:
        program = of(ring_of(mesh, is_causal=True, heads_at_once=heads_at_once))
        return jax.jit(program).lower(*[shape] * 4).compile().memory_analysis().temp_size_in_bytes

    assert needed(1) < needed(None) / 3


def test_dropout_in_groups_of_heads_has_the_mask_of_one_device() -> None:
    """Equal weights of values that are unit vectors: what a query gets is its row of the mask."""
    zeros, units = jnp.zeros((2, 32, 4, 8)), jnp.broadcast_to(jnp.eye(32)[:, None], (2, 32, 4, 32))
    dropout = {"dropout_rate": 0.4, "dropout_key": jax.random.key(3)}
    ring = ring_of(mesh_of((2,), ("x",)), heads_at_once=2, **dropout)
    kept = from_zigzag(jax.jit(ring)(zeros, zeros, to_zigzag(units, 2)), 2) > 0
    np.testing.assert_array_equal(kept, flash_attention(zeros, zeros, units, **dropout) > 0)
    assert 0.5 < kept.mean() < 0.7


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kernels_beside_sends_are_not_persistent(head_dim: int) -> None:
    """A send that holds a few SMs, or waits for some, would double the time of CTAs that want all of them at once."""
    x = jax.ShapeDtypeStruct((1, 8192, 16, head_dim), jnp.bfloat16)
    operands = Operands(x, x, x, mask=((),))
    beside = dataclasses.replace(CAUSAL, shares_device=True)
    configs = [
        (sm90.forward_config(spec, operands), backward_pass.tuned_config(spec, operands, "causal"))
        for spec in (CAUSAL, beside)
    ]
    assert configs[0][0].num_ctas == 132
    assert configs[1][0].num_ctas == EVERY_ITEM
    assert configs[1][1].num_ctas in (None, EVERY_ITEM)
    deterministic = dataclasses.replace(beside, deterministic=True)
    assert backward_pass.tuned_queries_config(deterministic, operands, "causal").num_ctas == EVERY_ITEM


def test_a_ring_says_that_it_sends() -> None:
    """Each CTA of each call has one work item, a row of the tables in the program."""
    attend = functools.partial(ring_attention, axis_name="x", order="zigzag", is_causal=True, implementation="sm90")
    program = jax.jit(
        jax.shard_map(lambda q, k, v: attend(q, k, v), mesh=mesh_of((2,), ("x",)), in_specs=ROWS, out_specs=ROWS)
    )
    x = jax.ShapeDtypeStruct((1, 8192, 16, 128), jnp.bfloat16)
    text = program.trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    tables = set(re.findall(r"tensor<(\d+)x(\d+)x\d+xi32>", text))
    assert tables == {("512", "1"), ("256", "1")}
