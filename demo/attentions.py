"""The attentions to train with: what their names stand for on this device, and which of them can run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demo import InputError
from demo.training import Run
from models.config import CUDNN
from pallas_flash import dispatch, explain
from pallas_flash.kernels.support import compute_capability

FLASH = "flash"  # what flash_attention chooses
REFERENCE = "reference"


def config_name(name: str) -> str | None:
    """What the model's configuration calls this attention. InputError, with the names, for an unknown one."""
    known = (FLASH, *sorted((CUDNN, *dispatch.names())))
    if name not in known:
        raise InputError(f"--implementation {name or repr(name)}: unknown; the names are {', '.join(known)}")
    return None if name == FLASH else name


def chosen(run: Run) -> str | None:
    """What computes the attention of this model: the name asked for, or the table's choice; None if nothing can."""
    if run.config.attention == CUDNN:
        return CUDNN if cudnn_obstacle(run) is None else None
    return _explanation(run, run.config.attention).chosen


def check(run: Run, name: str) -> None:
    """InputError with the reason if the attention of this name cannot be used."""
    if name == CUDNN:
        reason = cudnn_obstacle(run)
    else:
        table = _explanation(run, run.config.attention)
        reasons = {verdict.name: verdict.reason for verdict in table.verdicts}
        reason = None if table.chosen else reasons.get(name, "nothing runs on this device")
    if reason is not None:
        raise InputError(f"--implementation {name}: {reason}")


def cudnn_obstacle(run: Run) -> str | None:
    """Why cuDNN's attention cannot train this model here, in one line; None if it can."""
    if compute_capability() is None:
        return "needs an NVIDIA GPU"
    if run.config.context_parallel is not None:
        return "takes whole sequences, but --parallel context and both share them between devices"

    def total(query: jax.Array, key: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(query, key, key, is_causal=True, implementation=CUDNN)
        return jnp.sum(out.astype(jnp.float32))

    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1)), *_operands(run))
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return " ".join(str(error).split())
    return None


def _operands(run: Run) -> list[np.ndarray]:
    """A short query and its key, which can be the value too, in this model."""
    config = run.config
    shapes = ((1, 8, heads, config.head_dim) for heads in (config.num_q_heads, config.num_kv_heads))
    return [np.zeros(shape, jnp.dtype(config.compute_dtype)) for shape in shapes]


def _explanation(run: Run, implementation: str | None) -> Any:
    """What the table of `flash_attention` says of the attention of this model."""
    query, key = _operands(run)
    return explain(query, key, key, is_causal=True, implementation=implementation)
