"""What only a GPU can show beside right values: unwritten memory, races, index width, grids, and time.

`python -m tests.sanitize` adds NVIDIA's compute-sanitizer; docs/reliability.md has the commands.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention
from tests.cases.common import case
from tests.test_gpu import inputs, program

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", ["sm90", "sm80"])]

POISON_GIB = 4  # more than the calls below use
CALLS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "causal, off the grid": ((2, 333, 517, 6, 2, 64, 64), {"is_causal": True}),
    "lengths": (
        (3, 200, 200, 4, 2, 128, 128),
        {"query_seq_lengths": jnp.array([5, 0, 200]), "key_value_seq_lengths": jnp.array([9, 40, 0])},
    ),
    "192/128, window": ((1, 129, 65, 2, 2, 192, 128), {"local_window_size": (9, 3)}),
    "256": ((1, 77, 133, 2, 1, 256, 256), {"is_causal": True}),
    "segments, sinks, cap": (
        (2, 257, 257, 4, 2, 64, 64),
        {
            "segment_ids": jnp.asarray(np.arange(257)[None].repeat(2, 0) // 100, jnp.int32),
            "sinks": jnp.ones(4),
            "logits_soft_cap": 5.0,
        },
    ),
    "bias": ((1, 200, 130, 4, 4, 64, 64), {"bias": jnp.sin(jnp.arange(130.0))}),
    "dropout": ((1, 300, 300, 2, 2, 128, 128), {"dropout_rate": 0.2, "dropout_key": jax.random.key(3)}),
}


def poison_memory() -> None:
    """Leave NaN in what the allocator hands out next."""
    blocks = [jnp.full(2**28, jnp.nan, jnp.float32) for _ in range(POISON_GIB)]
    jax.block_until_ready(blocks)
    for block in blocks:
        block.delete()


@case("E01", "A14", "A16")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_what_memory_held(kernel: str, name: str, deterministic: bool) -> None:
    """Ten runs, each on poisoned memory: finite, and the same bits; without deterministic=True all but dq."""
    sizes, options = CALLS[name]
    tensors, dout, dlse = inputs(sizes, jnp.bfloat16)
    ours = program(kernel, **options, deterministic=deterministic)
    runs = []
    for _ in range(10):
        poison_memory()
        runs.append([np.asarray(x).astype(np.float32) for x in ours(tensors, dout, dlse)])
    for number, (first, *others) in enumerate(zip(*runs, strict=True)):
        assert np.isfinite(first).all(), number
        for other in others:
            if number == 2 and not deterministic:
                np.testing.assert_allclose(other, first, rtol=0.05, atol=0.05)
            else:
                np.testing.assert_array_equal(other, first)


@case("E10")
@pytest.mark.parametrize(("batch", "heads", "size"), [(65_536, 1, 16), (8192, 8, 16), (65_536, 1, 1), (1, 70_000, 16)])
def test_grids_beyond_65535(kernel: str, batch: int, heads: int, size: int) -> None:
    """Forward and backward equal two half batches (or halves of the heads), bit for bit."""
    tensors, dout, dlse = inputs((batch, size, 16, heads, heads, 16, 16), jnp.bfloat16)
    ours = program(kernel, deterministic=True)
    whole = ours(tensors, dout, dlse)
    axis = 0 if batch > 1 else 2
    half = (batch if batch > 1 else heads) // 2
    for part in (slice(0, half), slice(half, None)):
        take = lambda x, part=part: x[part] if axis == 0 else x[:, :, part]  # noqa: E731
        for got, want in zip(ours(*jax.tree.map(take, (tensors, dout, dlse))), whole, strict=True):
            assert bool(jnp.array_equal(got, take(want)))


@case("E08")
def test_more_than_two_billion_elements(kernel: str) -> None:
    """q of 2.2 G elements: the last batch element is what it is alone."""
    batch, length, heads, dim = 34, 8192, 64, 128  # 2.28e9 elements, 4.6 GB
    make = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)  # noqa: E731
    q, k, v = make(0, (batch, length, heads, dim)), make(1, (batch, length, 1, dim)), make(2, (batch, length, 1, dim))
    assert q.size > 2**31
    attend = lambda q, k, v: flash_attention(q, k, v, local_window_size=(255, 0), implementation=kernel)  # noqa: E731
    whole = attend(q, k, v)
    for number in (0, batch - 1):
        one = slice(number, number + 1)
        assert bool(jnp.array_equal(whole[one], attend(q[one], k[one], v[one])))


@case("E08")
def test_a_mask_of_more_than_two_billion_elements(kernel: str) -> None:
    """46,341 squared is beyond 2**31: the rows at the end agree with the call that has no array."""
    size = 46_341
    tensors, _, _ = inputs((1, size, size, 1, 1, 64, 64), jnp.bfloat16)
    row, key = jnp.arange(size)[:, None], jnp.arange(size)
    mask = (key <= row) & (key >= row - 1000)
    assert mask.size > 2**31
    with_array = flash_attention(*tensors, mask=mask, implementation=kernel)
    without = flash_attention(*tensors, is_causal=True, local_window_size=(1000, 0), implementation=kernel)
    np.testing.assert_allclose(np.float32(with_array[:, -200:]), np.float32(without[:, -200:]), atol=1e-2)


def milliseconds(function: Any, *arguments: Any) -> float:
    """Of device time; the least of many calls, as other processes may use the GPU."""
    from jax.experimental.mosaic.gpu import profiler

    return min(profiler.measure(function, iterations=30)(*arguments)[1])


@case("J06")
def test_time_follows_the_live_keys(kernel: str) -> None:
    """A window of 256 at 32k costs a small part of causal; a length of 64 in a cache of 65,536 as much as a cache of
    64, a launch and a copy of the operands' layout aside."""
    tensors, _, _ = inputs((1, 32_768, 32_768, 8, 8, 128, 128), jnp.bfloat16)
    causal = functools.partial(flash_attention, is_causal=True, implementation=kernel)
    windowed = functools.partial(causal, local_window_size=(255, 0))
    assert milliseconds(jax.jit(windowed), *tensors) < 0.1 * milliseconds(jax.jit(causal), *tensors)
    (q, k, v), _, _ = inputs((8, 1, 65_536, 8, 8, 128, 128), jnp.bfloat16)
    step = jax.jit(lambda q, k, v, n: flash_attention(q, k, v, key_value_seq_lengths=n, implementation=kernel))
    short, full = jnp.full(8, 64), jnp.full(8, 65_536)
    assert milliseconds(step, q, k, v, short) < 0.3 * milliseconds(step, q, k, v, full)
