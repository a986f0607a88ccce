"""The portable kernels, in every configuration of their tables and with every feature, lower for CUDA on a machine
without a GPU, for each architecture that they are for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import utils

from pallas_flash import dispatch, flash_attention, masks
from pallas_flash.kernels import sm80
from pallas_flash.kernels.sizes import padded_head_dims
from pallas_flash.kernels.sm80 import backward_pass, config
from pallas_flash.kernels.sm80.config import ForwardConfig, KeysConfig, QueriesConfig
from pallas_flash.spec import AttentionSpec, Operands
from pallas_flash.tuning import cache
from tests.test_lowering import CAUSAL, FEATURES, SCALAR, operands_of, score_mod
from tests.test_lowering_backward import arguments

ARCHITECTURES = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))


@pytest.fixture
def lower_for(monkeypatch):
    """Mosaic lowers for the GPU that JAX sees, and without one for Hopper: there is no public way to name another."""

    def choose(architecture: tuple[int, int]) -> None:
        jax.clear_caches()
        monkeypatch.setattr(utils, "_infer_arch", lambda: architecture)

    yield choose
    jax.clear_caches()


def lower(function: Any, *arrays: Any) -> str:
    leaves, tree = jax.tree.flatten(arrays)
    call = lambda *leaves: function(*jax.tree.unflatten(tree, leaves))  # noqa: E731
    return jax.jit(call).trace(*leaves).lower(lowering_platforms=("cuda",)).as_text()


def lower_both(spec: AttentionSpec, operands: Operands) -> None:
    """Forward and backward; the latter by the kernels."""
    operands = operands._replace(mask=operands.mask or ((),) * len(spec.mask))
    assert sm80.unsupported(spec, operands) is None
    assert "forward_sm80" in lower(lambda operands: sm80.forward(spec, operands), operands)
    text = lower(lambda *args: sm80.backward(spec, *args), *arguments(operands))
    configs = backward_pass.tuned_configs(spec, operands)
    assert configs is not None
    taken = backward_pass.obstacle(spec, operands) is None
    two = backward_pass.two_kernels(spec, operands) or not configs.keys.fused
    assert ("backward_keys_sm80" in text) == taken and ("backward_queries_sm80" in text) == (taken and two)


def case_of(entry) -> tuple[AttentionSpec, Operands]:
    case = cache.Case(**entry["case"])
    spec = AttentionSpec(0.1, (CAUSAL,) if case.mask == "causal" else ())
    operands = operands_of(case[:2], 256, 256)._replace(mask=((),) * len(spec.mask))
    if case.mask == "general":
        more = {"bias": jax.ShapeDtypeStruct((1, 8, 256, 256), jnp.float32)}
        more["dropout_key"] = jax.ShapeDtypeStruct((2,), jnp.uint32)
        return dataclasses.replace(spec, dropout_rate=0.5), operands._replace(**more)
    return spec, operands


def unlike(*tables: str) -> Any:
    """The entries of tables side by side, once for each choice of tiles."""
    rows = zip(*(cache.entries(table) for table in tables), strict=True)
    tiles = lambda entry: (entry["case"]["head_dim"], entry["case"]["value_head_dim"], entry["config"])  # noqa: E731
    return {str([*map(tiles, row)]): row for row in reversed([*rows])}.values()


def test_every_tuned_config_lowers():
    for (entry,) in unlike("sm80_forward"):
        spec, operands = case_of(entry)
        forward = lambda x: sm80.forward(spec, x, config=ForwardConfig(**entry["config"]))  # noqa: B023, E731
        assert "forward_sm80" in lower(forward, operands)
    for part, make in (("queries", QueriesConfig), ("keys", KeysConfig)):
        for (entry,) in unlike(f"sm80_backward_{part}"):
            spec, operands = case_of(entry)
            spec = dataclasses.replace(spec, deterministic=part == "queries" and operands.bias is None)
            configs = backward_pass.tuned_configs(spec, operands)
            assert configs is not None
            configs = configs._replace(**{part: make(**entry["config"])})
            backward = lambda *args: backward_pass.backward(spec, *args, configs=configs)  # noqa: B023, E731
            assert f"backward_{part}_sm80" in lower(backward, *arguments(operands))


@pytest.mark.parametrize("capability", [*ARCHITECTURES, None])
def test_every_case_has_tiles_that_fit(monkeypatch, capability):
    """Into the shared memory of each architecture, and the registers of a thread."""
    monkeypatch.setattr("pallas_flash.kernels.support.compute_capability", lambda: capability)
    limit = config.max_shared_bytes(capability)
    for entry in cache.entries("sm80_forward"):
        spec, operands = case_of(entry)
        dims = padded_head_dims(operands.shapes, config.COLUMN_UNIT)
        found = sm80.forward_config(spec, operands)
        assert found is not None and found.shared_bytes(dims, 2, hides_values=bool(spec.mask)) <= limit
        configs = backward_pass.tuned_configs(spec, operands)
        assert configs is not None and all(x.shared_bytes(dims, 2) <= limit for x in configs)
    for dims in ((8, 8), (72, 40), (200, 256), (256, 16)):
        assert sm80.unsupported(AttentionSpec(0.1), operands_of(dims)) is None


def test_warpgroups_share_keys_where_both_have_queries_and_nothing_is_hidden():
    def warpgroups(q_len: int, **options: Any) -> int:
        mask = ((),) if "mask" in options else ()
        found = sm80.forward_config(AttentionSpec(0.1, **options), operands_of((128, 128), q_len, 512, mask=mask))
        return 0 if found is None else found.warpgroups

    assert [warpgroups(q_len) for q_len in (1, 128, 129, 512)] == [1, 1, 2, 2]
    assert warpgroups(512, mask=(CAUSAL,)) == 1


@pytest.mark.parametrize("architecture", [(8, 0), (12, 0)])  # between 8.0 and 8.9 Mosaic sees no difference
def test_it_lowers_for(monkeypatch, lower_for, architecture):
    """With what needs the most of an architecture: vectors, votes, additions in device memory, junk in values."""
    lower_for(architecture)
    mask = (CAUSAL, masks.Segments())
    ids = (jax.ShapeDtypeStruct((2, 300), jnp.int32),) * 2
    bias = jax.ShapeDtypeStruct((1, 8, 300, 300), jnp.float32)
    spec = AttentionSpec(None, mask, soft_cap=5.0)
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    lower_both(spec, operands_of((72, 128), 300, 300, bias=bias, mask=((), ids), scale=scale))
    monkeypatch.setattr("pallas_flash.kernels.support.compute_capability", lambda: architecture)
    for dims in ((64, 64), (72, 128)):  # dQ added up by one warpgroup, and by two where they have room
        lower_both(AttentionSpec(0.1), operands_of(dims, 300, 300))


@pytest.mark.parametrize(
    "feature", ["key lengths", "dense masks", "bias of each query", "slopes", "one query", "different head dims"]
)
def test_a_feature_lowers(feature):
    """What these kernels do themselves; the rest is shared with those for Hopper."""
    lower_both(*FEATURES[feature])


@pytest.mark.parametrize("way", ["vmap", "scan", "shard_map", "x64"])
def test_it_lowers_inside(way):
    """What users wrap around a call, with gradients, for shapes that are no multiple of a tile."""
    array = jax.ShapeDtypeStruct
    arrays = [array((2, n, 4, 72), jnp.bfloat16) for n in (77, 133, 133)] + [array((), jnp.float32)]

    def call(q, k, v, scale):
        attend = lambda *x: flash_attention(*x[:3], scale=x[3], is_causal=True, implementation="sm80")  # noqa: E731
        return jax.grad(lambda *x: attend(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2))(q, k, v, scale)

    one = call
    if way in ("vmap", "scan"):
        arrays = [array((3, *x.shape), x.dtype) for x in arrays]
        scan = lambda *arrays: jax.lax.scan(lambda carry, xs: (carry, one(*xs)), 0, arrays)  # noqa: E731
        call = jax.vmap(one) if way == "vmap" else scan
    elif way == "shard_map":
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        data = jax.P("data")
        call = jax.shard_map(one, mesh=mesh, in_specs=(data, data, data, jax.P()), out_specs=data)
    with jax.enable_x64(way == "x64"):
        text = jax.jit(call).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "backward_keys_sm80" in text


@pytest.mark.parametrize("feature", [{}, {"deterministic": True}, {"dropout_rate": 0.5, "soft_cap": 5.0}])
def test_one_kernel_adds_dq_up_where_its_order_may_differ(feature):
    """And not where deterministic=True asks for the same bits, or a kernel for dQ meets the rows of a bias whole."""
    spec, operands = AttentionSpec(None, (CAUSAL,), **feature), operands_of((128, 128), 300, 300, mask=((),))
    operands = operands._replace(scale=jax.ShapeDtypeStruct((), jnp.float32))
    if spec.dropout_rate:
        operands = operands._replace(dropout_key=jax.ShapeDtypeStruct((2,), jnp.uint32))
    lower_both(spec, operands)
    assert backward_pass.two_kernels(spec, operands) == spec.deterministic


def test_what_its_backward_pass_leaves_to_xla():
    spec, operands = score_mod(lambda s, b, h, q, k: s * SCALAR)
    assert "captures" in (backward_pass.obstacle(spec, operands) or "")
    spec, operands = AttentionSpec(0.1, deterministic=True), operands_of((64, 64))
    shared = operands._replace(bias=jax.ShapeDtypeStruct((1, 8, 1024, 1024), jnp.float32))
    assert "the order of its sums" in (backward_pass.obstacle(spec, shared) or "")
    assert backward_pass.obstacle(spec, operands) is None


def test_what_it_cannot_do_it_refuses():
    spec = AttentionSpec(0.1)
    assert sm80.unsupported(spec, operands_of((64, 64), dtype=jnp.float32))
    assert sm80.unsupported(spec, operands_of((264, 64)))
    assert sm80.unsupported(dataclasses.replace(spec, precision="highest"), operands_of((64, 64)))


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (ForwardConfig, {"block_q": 32}),
        (ForwardConfig, {"block_kv": 40}),
        (ForwardConfig, {"num_stages": 4}),
        (ForwardConfig, {"rescale_threshold": 20.0}),
        (ForwardConfig, {"warpgroups": 3}),
        (QueriesConfig, {"block_q": 32}),
        (KeysConfig, {"block_kv": 96}),
        (KeysConfig, {"num_stages": 3}),
        (KeysConfig, {"part_q": 48}),
        (KeysConfig, {"fused": True, "block_q": 32}),
        (KeysConfig, {"warpgroups": 2}),
        (QueriesConfig, {"head_group": 0}),
    ],
)
def test_a_config_names_what_is_wrong(make, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        make(**wrong)


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((7, 5), "xla"), ((8, 0), "sm80"), ((8, 9), "sm80"), ((9, 0), "sm90"), ((12, 0), "sm80"), (None, "xla")],
)
def test_it_is_the_choice_where_no_other_kernels_are(capability, chosen):
    assert dispatch.explain(AttentionSpec(0.1), operands_of((64, 64)), capability).chosen == chosen
    by_name = dispatch.explain(AttentionSpec(0.1), operands_of((64, 64)), capability, "sm80")
    assert (by_name.chosen == "sm80") == (capability is not None and capability >= (8, 0))
