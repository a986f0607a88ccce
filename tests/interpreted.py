"""The Hopper kernels' own bodies in Pallas' GPU interpreter, as an implementation that the public operator takes by
name, so that a CPU runs them under everything that users wrap around a call.

XLA must have more threads than the kernels have warpgroups: the process starts with NPROC=8 in its environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from pallas_flash import dispatch, partitioning, xla
from pallas_flash.kernels import sm90
from pallas_flash.kernels.sm90 import backward_pass
from pallas_flash.spec import AttentionSpec, Cotangents, Forward, Gradients, Operands, Residuals

NAME = "interpreted"
ENVIRONMENT = {"NPROC": "8", "JAX_PLATFORMS": "cpu"}
FEW_CTAS: dict[str, Any] = {"num_ctas": 2}  # each must do several tiles, as on a GPU

unsupported = sm90.unsupported


def forward(spec: AttentionSpec, operands: Operands) -> Forward:
    config = sm90.forward_config(spec, operands)
    assert config is not None
    return sm90.forward(spec, operands, config=dataclasses.replace(config, **FEW_CTAS), interpret=_interpret())


def backward(spec: AttentionSpec, operands: Operands, residuals: Residuals, cotangents: Cotangents) -> Gradients:
    kind = sm90.mask_class(spec, operands)
    if backward_pass.obstacle(spec, operands, kind) is not None:
        return xla.backward(spec, operands, residuals, cotangents)
    config = backward_pass.tuned_config(spec, operands, kind)
    assert config is not None
    queries = backward_pass.queries_config(spec, operands, kind)
    return backward_pass.backward(
        spec, operands, residuals, cotangents, config=config, queries_config=_few_ctas(queries), interpret=_interpret()
    )


def _few_ctas(config: Any) -> Any:
    return None if config is None else dataclasses.replace(config, **FEW_CTAS)


@functools.cache
def _interpret() -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams(detect_races=True)


@contextlib.contextmanager
def by_name() -> Iterator[None]:
    """Inside, `implementation="interpreted"` is one of the names that the operator knows."""
    import tests.interpreted as this

    entry = dispatch.Entry(this, "the bodies of sm90, interpreted", automatic=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "TABLE", (*dispatch.TABLE, entry))
        # The interpreter's callbacks keep their order, which no program that a partitioner is asked about can have.
        patch.setattr(partitioning, "run", lambda pass_, *arrays: pass_(*arrays))
        yield
