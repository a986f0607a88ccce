"""Which CTA of a kernel does what: every tile once, and about as much for each CTA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import masks
from pallas_flash.kernels import assignment, backward_schedule, schedule
from pallas_flash.kernels.sm90.backward_config import BackwardConfig
from pallas_flash.kernels.sm90.config import ForwardConfig
from pallas_flash.spec import AttentionSpec, Operands

CAUSAL = masks.Band(None, 0)
CONFIG = ForwardConfig()
BACKWARD = BackwardConfig(block_q=128, block_kv=128, num_ctas=None)


def documents(batch: int, length: int, count: int) -> jax.Array:
    """Ids of documents of random lengths that fill each sequence."""
    rng = np.random.default_rng(0)
    cuts = [np.sort(rng.choice(length, count - 1, replace=False)) for _ in range(batch)]
    return jnp.asarray(np.stack([np.searchsorted(c, np.arange(length), side="right") for c in cuts]), jnp.int32)


def items_of(batch: int, length: int, heads: int, mask, arrays) -> schedule.WorkItem:
    """The items of all CTAs, [CTAs, most items of a CTA]; an item that a CTA does not have costs nothing."""
    x = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16)
    table = np.asarray(schedule.work_items(AttentionSpec(0.1, mask), Operands(x, x, x, mask=arrays), CONFIG))
    counts = table[:, :1, schedule.ITEMS]
    absent = np.arange(table.shape[1]) >= counts
    items = schedule.WorkItem(*np.moveaxis(table, -1, 0)[: schedule.ITEMS])
    return items._replace(kv_end=np.where(absent, items.kv_start, items.kv_end))


def ragged(batch: int, length: int):
    lengths = jnp.asarray(np.random.default_rng(0).integers(1, length, batch), jnp.int32)
    return (CAUSAL, masks.QueryLengths(), masks.KeyValueLengths()), ((), (lengths,), (lengths,))


def packed(batch: int, length: int):
    ids = documents(batch, length, 16)
    return (masks.Segments(), CAUSAL), ((ids, ids), ())


def causal(batch: int, length: int):
    return (CAUSAL,), ((),)


@pytest.mark.parametrize("case", [causal, packed, ragged])
@pytest.mark.parametrize(("batch", "length", "heads"), [(1, 32768, 16), (2, 8192, 16), (3, 1000, 5), (1, 64, 12)])
def test_every_tile_once_and_fairly(case, batch, length, heads):
    items = items_of(batch, length, heads, *case(batch, length))
    present = items.kv_end > items.kv_start
    tiles = -(-length // CONFIG.tile_q)
    numbers = (items.batch * heads + items.head) * tiles + items.qi
    assert sorted(numbers[present]) == list(range(batch * heads * tiles))
    blocks = (items.kv_end - items.kv_start).sum(axis=1)
    ideal = max(blocks.mean(), (items.kv_end - items.kv_start).max())
    assert blocks.max() <= 1.3 * ideal


@pytest.mark.parametrize("case", [causal, packed, ragged])
@pytest.mark.parametrize("num_ctas", [132, None])
@pytest.mark.parametrize(("batch", "length", "heads"), [(1, 32768, 16), (2, 8192, 16), (3, 1000, 5), (1, 64, 12)])
def test_the_same_of_keys(case, num_ctas, batch, length, heads):
    config = BackwardConfig(head_group=4, num_ctas=num_ctas)
    mask, arrays = case(batch, length)
    x = jax.ShapeDtypeStruct((batch, length, 2 * heads, 64), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.bfloat16)
    operands = Operands(x, kv, kv, mask=arrays)
    table = np.asarray(backward_schedule.work_items(AttentionSpec(0.1, mask), operands, config))
    present = np.arange(table.shape[1]) < table[:, :1, backward_schedule.ITEMS]
    items = backward_schedule.WorkItem(*np.moveaxis(table, -1, 0)[: backward_schedule.ITEMS])
    tiles = -(-length // config.block_kv)
    numbers = (items.batch * heads + items.kv_head) * tiles + items.ki
    assert sorted(numbers[present]) == list(range(batch * heads * tiles))
    blocks = np.where(present, items.q_end - items.q_start, 0)
    if num_ctas is None:  # the hardware balances, if the longest come first
        assert blocks.shape[1] == 1
        group = items.kv_head[:, 0] // config.head_group
        assert all((np.diff(blocks[group == g, 0]) <= 0).all() for g in np.unique(group) if batch == 1)
    else:
        total = blocks.sum(axis=1)
        assert total.max() <= 1.3 * max(total.mean(), blocks.max())


@pytest.mark.parametrize("q_offset", [0, None])
@pytest.mark.parametrize("q_len", [1, 64, 100, 128, 200, 256])
def test_without_a_mask_only_cut_off_keys_are_masked(q_len, q_offset):
    """A kernel without masks and cut-off keys has no loop for masked blocks: it would wait for ever for one."""
    for kv_len in (128, 256, 300):
        q, kv = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (q_len, kv_len))
        operands = Operands(q, kv, kv, mask=(), q_offset=None if q_offset is not None else jnp.array([3]))
        table = np.asarray(backward_schedule.work_items(AttentionSpec(0.1, q_offset=q_offset), operands, BACKWARD))
        item = backward_schedule.WorkItem(*np.moveaxis(table[:, 0], -1, 0)[: backward_schedule.ITEMS])
        cut_off = (item.ki + 1) * BACKWARD.block_kv > kv_len
        np.testing.assert_array_equal(item.full_end - item.full_start, np.where(cut_off, 0, item.q_end - item.q_start))
        assert (item.q_end == -(-q_len // BACKWARD.block_q)).all()


@pytest.mark.parametrize(
    "costs, ctas, head_bytes, group",
    [
        ([3, 2, 1], 1, assignment.GROUP_BYTES // 2, 2),
        ([3, 2, 1], 1, assignment.GROUP_BYTES * 2, 1),
        ([3, 2, 1], 1, 0, 4),
        ([3, 2, 1], None, assignment.GROUP_BYTES // 2, 4),
        ([2, 2, 2], 1, assignment.GROUP_BYTES // 2, 4),
    ],
)
def test_heads_at_a_time(costs, ctas, head_bytes, group):
    order = assignment.by_cost(np.array(costs), 1, assignment.Crew(8, 4, ctas, head_bytes))
    assert set(order.head.ravel()[: 3 * group]) == set(range(group))
    assert set(order.head.ravel()[3 * group :][: 3 * group]) == set(range(group, 2 * group))
