"""Every size and option of the model in one frozen dataclass, the presets, and the arithmetic of their cost."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_flash import dispatch
from pallas_flash.checks import require, static_number
from pallas_flash.validation import checked_soft_cap

COMPUTE_DTYPES = ("bfloat16", "float32")
CUDNN = "cudnn"


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """What a `Transformer` is.

    `windows` gives each layer its sliding causal window: the number of most recent positions that a token attends to,
    its own included, or None for all of them. It is cycled when it is shorter than the model, so that `(256, None)`
    alternates local and global layers; None alone means no windows.
    `attention` is the `implementation=` of `flash_attention`, `decode` that of `flash_decode`; None lets it choose.
    CUDNN as `attention` stands for `jax.nn.dot_product_attention` with cuDNN instead, a peer to compare training with:
    it takes whole sequences alone, and under `remat` it is computed a second time.
    `context_parallel` names the mesh axes that batches and sequences are sharded over while a mesh with them is in use
    (`jax.set_mesh`): tokens then come in zigzag order, and attention goes around the second axis.
    `remat` recomputes each block in the backward pass and keeps only the results of its attention.

    Raises ValueError, by the name of the field, for what is no such thing and for sizes that do not fit together.
    """

    vocab_size: int
    num_layers: int
    hidden_dim: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    windows: tuple[int | None, ...] | None = None
    logits_soft_cap: float | None = None
    use_sinks: bool = False
    tie_embeddings: bool = True
    compute_dtype: str = "bfloat16"
    remat: bool = False
    attention: str | None = None
    decode: str | None = None
    context_parallel: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_layers", "hidden_dim", "num_q_heads", "num_kv_heads", "head_dim", "mlp_dim"):
            self._require(name, _is_size(getattr(self, name)), "an integer, at least 1")
        for name in ("use_sinks", "tie_embeddings", "remat"):
            self._require(name, isinstance(getattr(self, name), bool), "a bool")
        for name in ("rope_theta", "norm_eps"):
            self._require(name, _is_positive(getattr(self, name)), "a number above 0, within the range of float32")
        divides = self.num_q_heads % self.num_kv_heads == 0
        self._require("num_q_heads", divides, f"a multiple of num_kv_heads={self.num_kv_heads}")
        self._require("head_dim", self.head_dim % 2 == 0, "even, for the rotary embedding")
        windows = self.windows
        listed = isinstance(windows, tuple) and windows and all(w is None or _is_size(w) for w in windows)
        wanted = "None or a tuple of at least one, each None or an integer, at least 1"
        self._require("windows", windows is None or listed, wanted)
        checked_soft_cap(self.logits_soft_cap)
        for name, known in (
            ("compute_dtype", COMPUTE_DTYPES),
            ("attention", (None, *dispatch.names(), CUDNN)),
            ("decode", (None, *dispatch.names(dispatch.DECODE_TABLE))),
        ):
            value = getattr(self, name)
            self._require(name, isinstance(value, str | None) and value in known, f"one of {known}")
        axes = self.context_parallel
        pair = isinstance(axes, tuple) and len(axes) == 2 and all(isinstance(axis, str) for axis in axes)
        named = axes is None or (pair and axes[0] != axes[1])
        self._require("context_parallel", named, "None or the names of two mesh axes")

    def _require(self, name: str, condition: object, wanted: str) -> None:
        require(condition, name, getattr(self, name), wanted)

    def window(self, layer: int) -> int | None:
        """The sliding window of one layer."""
        return None if self.windows is None else self.windows[layer % len(self.windows)]

    def flops_per_token(self, seq_len: int) -> float:
        """FLOPs of one training step (forward and backward) per token, at sequences of `seq_len` tokens.

        A multiply-add counts as two, the backward pass as twice the forward pass; attention counts the pairs that the
        causal mask and the windows allow. What is recomputed does not count, as usual for the utilisation of a device.
        """
        q_dim, kv_dim = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        projections = self.hidden_dim * (2 * q_dim + 2 * kv_dim)
        mlp = 3 * self.hidden_dim * self.mlp_dim
        weights = self.num_layers * (projections + mlp) + self.hidden_dim * self.vocab_size
        keys = sum(_mean_visible_keys(seq_len, self.window(layer)) for layer in range(self.num_layers))
        return 3 * (2 * weights + 4 * q_dim * keys)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and value >= 1


def _is_positive(value: Any) -> bool:
    number, float32 = static_number(value), np.finfo(np.float32)
    return number is not None and float(float32.tiny) <= number <= float(float32.max)


def _mean_visible_keys(seq_len: int, window: int | None) -> float:
    """The average over rows i = 0 … seq_len - 1 of min(i + 1, window)."""
    window = seq_len if window is None else min(window, seq_len)
    return window - window * (window - 1) / (2 * seq_len)


PRESETS: dict[str, TransformerConfig] = {
    # Trains in seconds on a CPU, where bfloat16 is slower than float32.
    "tiny": TransformerConfig(
        vocab_size=256,
        num_layers=2,
        hidden_dim=64,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        mlp_dim=128,
        compute_dtype="float32",
    ),
    # The size of the smallest GPT-2.
    "125m": TransformerConfig(
        vocab_size=50_304, num_layers=12, hidden_dim=768, num_q_heads=12, num_kv_heads=12, head_dim=64, mlp_dim=2_048
    ),
    "1b": TransformerConfig(
        vocab_size=50_304,
        num_layers=16,
        hidden_dim=2_048,
        num_q_heads=16,
        num_kv_heads=4,
        head_dim=128,
        mlp_dim=8_192,
        rope_theta=500_000.0,
        remat=True,
    ),
}
