"""Cases at the sizes of real tiles, for the compiled kernels on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_flash import flash_attention
from tests import oracles
from tests.cases.common import KERNELS, case, check, close, counting, evaluate, inputs, keys_read
from tests.conftest import Call, dropout_keep

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("kernel", KERNELS)]


@case("E01", "A16")
@pytest.mark.parametrize("q_len", [1, 7, 16, 63, 65, 127, 129, 257])
def test_lengths_off_the_tile_grid(kernel: str, q_len: int) -> None:
    """Both ways round, forward and backward, the same bits on a second run."""
    for kv_len in (1, 15, 64, 128, 130, 255):
        call = inputs(kernel, q_len=q_len, kv_len=kv_len, heads=(2, 1), dims=(64, 64)) | {
            "is_causal": (q_len + kv_len) % 2 == 0
        }
        first, second = check(call, kernel), check(call, kernel)
        np.testing.assert_array_equal(np.float32(first.out), np.float32(second.out))


@case("E03", "C08")
@pytest.mark.parametrize(("q_len", "kv_len"), [(512, 2048), (2048, 512), (1, 4096), (4096, 1), (300, 301)])
def test_one_side_far_longer_than_the_other(kernel: str, q_len: int, kv_len: int) -> None:
    call = inputs(kernel, batch=1, q_len=q_len, kv_len=kv_len, heads=(2, 1), dims=(64, 64))
    check(call, kernel)
    check(call | {"is_causal": True, "query_offset": kv_len - q_len}, kernel)


@case("C05", "C06", "E13", "B24")
@pytest.mark.parametrize("heads", [(8, 2), (6, 3), (12, 2), (4, 4), (40, 4), (71, 1), (17, 1), (128, 2)])
def test_groups_of_heads(kernel: str, heads: tuple[int, int]) -> None:
    """Group sizes beside a mask of each batch element, where B = K too; the value's head dim below, at and above."""
    for value_dim in (32, 64, 128):
        call = inputs(kernel, q_len=70, kv_len=133, heads=heads, dims=(64, value_dim))
        check(call | {"mask": np.random.default_rng(0).random((2, 1, 70, 133)) < 0.7}, kernel)


@case("B19", "D12", "D05", "E05")
@pytest.mark.parametrize("head_dim", [1, 16, 63, 64, 72, 80, 96, 100, 128, 192, 256])
def test_head_dims(kernel: str, head_dim: int) -> None:
    """Row 0 of causal is v[0]; the default scale is by the head dim as given; a bias is not scaled."""
    call = inputs(kernel, batch=1, q_len=130, kv_len=130, heads=(2, 1), dims=(head_dim, head_dim)) | {"is_causal": True}
    outputs = check(call, kernel)
    np.testing.assert_array_equal(np.float32(outputs.out)[:, 0, 0], np.float32(call["v"])[:, 0, 0])
    bias = 3 * np.random.default_rng(1).normal(size=(130, 130)).astype(np.float32)
    for scale in (None, 0.05):
        check(call | {"bias": bias, "scale": scale}, kernel)


@case("B11", "H11", "E07")
def test_a_window_far_down_a_long_row(kernel: str) -> None:
    """Beyond 16-bit positions too: v = 1 and q = 0 count the keys by lse."""
    for kv_len, q_len, left in ((4096, 300, 333), (4096, 1, 64), (32767, 64, 512), (32769, 1, 512), (65537, 64, 512)):
        call = inputs(kernel, batch=1, q_len=q_len, kv_len=kv_len, heads=(4, 1), dims=(64, 64))
        call |= {"q": call["q"] * 0, "window": (left, 0), "query_offset": kv_len - q_len}
        outputs = evaluate(call, kernel)
        np.testing.assert_allclose(outputs.lse, np.log(left + 1), rtol=1e-6)
        near = {name: call[name][:, -left - q_len :] for name in "kv"}
        want = oracles.attention(call["q"], near["k"], near["v"], window=(left, 0), query_offset=left).out
        close(outputs.out, want, kernel)


@case("C14", "C12")
@pytest.mark.parametrize("value_dim", [64, 96, 128, 192, 256])
def test_sinks_over_ragged_lengths(kernel: str, value_dim: int) -> None:
    lengths = np.array([700, 1, 300])
    call = inputs(kernel, batch=3, q_len=700, kv_len=700, heads=(4, 2), dims=(64, value_dim))
    check(
        call | {"q_lengths": lengths, "kv_lengths": lengths, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)}, kernel
    )


@case("D09")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_gradients_are_as_exact_as_plain_attention(kernel: str, head_dim: int, dtype: Any) -> None:
    call = inputs(kernel, batch=1, q_len=2048, kv_len=2048, heads=(1, 1), dims=(head_dim, head_dim), dtype=dtype)
    check(call, kernel)


@case("C11", "C09")
def test_caps_and_windows_at_an_odd_length(kernel: str) -> None:
    call = inputs(kernel, q_len=257, kv_len=257, heads=(2, 1), dims=(64, 64))
    loud = call | {"q": call["q"] * 3, "scale": 1.0}
    for options in ({"soft_cap": 30.0}, {"soft_cap": 1.0}, {"soft_cap": 1.0, "window": (5, 0)}):
        check(loud | options | {"is_causal": True}, kernel)
    narrow = call | {"window": (5, 0)}
    narrow["v"][:, 200:] *= 100
    check(narrow, kernel)


@case("F01", "F02")
@pytest.mark.parametrize("rate", [0.1, 0.9])
def test_dropout_over_several_tiles(kernel: str, rate: float) -> None:
    keep = dropout_keep((1, 2, 133, 200), rate)
    call = inputs(kernel, batch=1, q_len=133, kv_len=200, heads=(2, 1), dims=(64, 64))
    check(call | {"rate": rate, "keep": keep, "is_causal": True, "query_offset": 0}, kernel)


@case("C16")
def test_views(kernel: str) -> None:
    """q a transpose, k and v slices of a packed projection, the cotangent a broadcast scalar; an odd length."""
    rng = np.random.default_rng(4)
    packed = jnp.asarray(rng.normal(size=(2, 133, 3, 4, 64)), jnp.bfloat16)
    heads_first = jnp.asarray(rng.normal(size=(2, 4, 133, 64)), jnp.bfloat16)
    attend = lambda q, k, v: flash_attention(q, k, v, is_causal=True, implementation=kernel).astype(jnp.float32)  # noqa: E731
    views = jax.grad(lambda q, p: attend(q.transpose(0, 2, 1, 3), p[:, :, 1], p[:, :, 2]).sum(), (0, 1))
    dq, dpacked = jax.jit(views)(heads_first, packed)
    copies = [np.asarray(x).copy() for x in (heads_first.transpose(0, 2, 1, 3), packed[:, :, 1], packed[:, :, 2])]
    want = oracles.gradients(*copies, is_causal=True, dout=np.ones((2, 133, 4, 64)))
    close(dq.transpose(0, 2, 1, 3), want["q"], kernel, factor=2)
    close(dpacked[:, :, 1], want["k"], kernel, factor=2)
    close(dpacked[:, :, 2], want["v"], kernel, factor=2)


@case("G04")
def test_vmap_over_inputs_and_bias_with_one_mask(kernel: str) -> None:
    rng = np.random.default_rng(5)
    x = jnp.asarray(rng.normal(size=(3, 512, 4, 48)), jnp.bfloat16)
    bias = jnp.asarray(rng.normal(size=(3, 4, 512, 512)), jnp.bfloat16)
    mask = jnp.asarray(rng.random((1, 1, 512)) < 0.8)

    def loss(x: Any, bias: Any, mask: Any) -> Any:
        return flash_attention(x, x, x, bias, mask, implementation=kernel).astype(jnp.float32).sum()

    got = jax.vmap(jax.grad(loss, (0, 1)), (0, 0, None))(x, bias, mask)
    for number in range(3):
        want = jax.grad(loss, (0, 1))(x[number], bias[number], mask)
        for a, b in zip(got, want, strict=True):
            close(a[number], b, kernel, factor=2)


@case("B04")
@pytest.mark.parametrize("first", range(4))
def test_every_subset_of_the_masking_arguments(kernel: str, first: int) -> None:
    """Forward; of the 128, those with at most 2 or at least 6 of the arguments, each fourth in one test."""
    rng, sizes = np.random.default_rng(0), {"batch": 2, "q_len": 70, "kv_len": 133, "heads": (2, 1), "dims": (64, 64)}
    parts: list[Call] = [
        {"mask": rng.random((2, 1, 70, 133)) < 0.8},
        {"is_causal": True},
        {"q_lengths": np.array([64, 0])},
        {"kv_lengths": np.array([65, 133])},
        {"window": (40, 9)},
        {"segment_ids": tuple(np.arange(n)[None].repeat(2, 0) // 50 for n in (70, 133))},
        {"bias": rng.normal(size=(1, 2, 70, 133)).astype(np.float32)},
    ]
    call = inputs(kernel, **sizes)
    subsets = [subset for count in (0, 1, 2, 6, 7) for subset in itertools.combinations(parts, count)]
    for subset in subsets[first::4]:
        options = {name: value for part in subset for name, value in part.items()}
        out = evaluate(call | options, kernel).out
        close(out, oracles.attention(**call, **options).out, kernel, factor=2)


@case("B02")
def test_counts_over_several_tiles(kernel: str) -> None:
    """Bottom right with twice as many queries as keys: the first half reads nothing, then one key more a row."""
    call = counting(kernel, 400, 200) | {"is_causal": True, "query_offset": -200}
    assert keys_read(call, kernel).tolist() == [[0] * 200 + list(range(1, 201))]
