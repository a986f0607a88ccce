"""The public operator."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from pallas_flash import autodiff, dispatch, partitioning, reference
from pallas_flash.autodiff import Output
from pallas_flash.masks import Mask
from pallas_flash.passes import AttentionPass
from pallas_flash.spec import Array, called_with, of_structs
from pallas_flash.validation import Arguments, Canonical, canonicalise


def flash_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | Mask | None = None,
    *,
    scale: float | Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_offset: int | Array = 0,
    segment_ids: Array | tuple[Array, Array] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    score_mod: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Array | None = None,
    precision: Any = None,
    deterministic: bool = False,
    return_residual: bool = False,
    return_max_logit: bool = False,
    implementation: str | None = None,
) -> Any:
    """Exact attention that never stores the score matrix: query [*B, T, N, H], sequence before heads.

    For each query, softmax(logits) @ value over the keys it may attend to, where
    logits = soft_cap(score_mod(scale * query.key)) + bias. Floating-point calls of `jax.nn.dot_product_attention` work
    unchanged and give the same result, fully masked rows and a window of -1 aside. Differentiable in query, key, value,
    bias, sinks, an array `scale` and the float arrays that score_mod captures; between the passes only the output and
    two numbers a row (m, l) are kept.

    Positions: query row i stands at `query_offset + i` among the keys, key j at j. The default, 0, aligns top-left;
    pass S - T for bottom-right, or the number of cached tokens for decoding.

    A query that may attend to nothing gives output 0, log-sum-exp -inf (with sinks: the sink) and gradients 0. NaN or
    Inf in a masked-out place reaches no result and no gradient.

    Args:
      query: [*B, T, N, H], float16, bfloat16, float32 or float64; *B is any number of batch dimensions, also none.
      key: [*B, S, K, H] in query's dtype; N a multiple of K (grouped-query attention).
      value: [*B, S, K, Hv] in query's dtype; Hv may differ from H.
      bias: floating, broadcastable to [*B, N, T, S]; added after scale and soft cap. -inf means "may not attend".
      mask: bool, broadcastable to [*B, N, T, S] (True: may attend), or a `pallas_flash.masks.Mask`, by which tiles that
        allow nothing are skipped. All that restricts attention is intersected.
      scale: number, or a scalar array; 1 / sqrt(H) by default.
      is_causal: a key is attended to only if it does not stand behind the query's position.
      query_seq_lengths: int, [*B] or a scalar. Query rows from there on attend to nothing. Clamped to [0, T].
      key_value_seq_lengths: int, [*B] or a scalar. Keys from there on are never attended to. Clamped to [0, S].
      local_window_size: (left, right): keys from position - left to position + right, ends included; an int means both
        sides, None or -1 no bound.
      query_offset: int, or integers [*B]: the position of query row 0.
      segment_ids: int [*B, S], or (int [*B, T], int [*B, S]): attention only between equal ids.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c), before bias and mask.
      sinks: floating [N]: a logit for each head that takes part in the denominator only.
      score_mod: (score, batch, head, q_pos, kv_pos) -> score on scalars, after scale, before soft cap and bias. Traced
        once; may capture arrays.
      dropout_rate: share of attention weights set to 0, in [0, 1); the others are divided by 1 - rate.
      dropout_key: JAX random key, needed where dropout_rate > 0. What is dropped depends on (key, batch, head,
        positions) only.
      precision: of both products, as in `jax.lax.dot`. By default float32 inputs give float32 accuracy.
      deterministic: demand gradients that are equal bit for bit from run to run.
      return_residual: also return the log-sum-exp of the logits, natural logarithm, which has a gradient.
      return_max_logit: also return the largest logit a head, without sinks; no gradient.
      implementation: a name of `explain`'s table; None takes the first that supports the call on the device that the
        program is lowered for. A name never falls back.

    Returns:
      out [*B, T, N, Hv] in query's dtype; or a tuple (out, lse [*B, T, N] float32 if return_residual, max_logit [*B, N]
      float32 if return_max_logit). float64 inputs give float64.

    Raises:
      ValueError: an argument is wrong; the message names it, what came and what is wanted.
      NotImplementedError: `implementation` was named and cannot compute this call, or not this derivative of it
        (forward mode: implementation="reference"; inside jit, and when the result of jax.linearize is called, JAX's own
        TypeError says so), or an array has a symbolic size of jax.export.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import flash_attention
      >>> q = jax.random.normal(jax.random.key(0), (2, 128, 8, 64))
      >>> kv = jax.random.normal(jax.random.key(1), (2, 128, 2, 64))
      >>> out, lse = flash_attention(q, kv, kv, is_causal=True, return_residual=True)
      >>> out.shape, lse.shape
      ((2, 128, 8, 64), (2, 128, 8))

    Sources: Dao et al. 2022 (FlashAttention), sections 3.1 and B; Dao 2023 (FlashAttention-2), section 3.
    """
    given = dict(locals())
    del given["implementation"]
    arguments = Arguments(**given)
    dispatch.require_known_sizes(implementation, vars(arguments))
    call = canonicalise(arguments)
    return restore(call, attend(call, implementation), return_residual=return_residual)


def reference_attention(*args: Any, **kwargs: Any) -> Any:
    """Standard attention, O(T S) memory: `flash_attention(..., implementation="reference")`, with the same arguments.

    The meaning of every argument, in plain JAX; forward-mode and higher derivatives work.

    >>> import jax.numpy as jnp
    >>> from pallas_flash import reference_attention
    >>> x = jnp.ones((4, 1, 8))
    >>> float(reference_attention(x, x, x, is_causal=True).sum())
    32.0
    """
    return flash_attention(*args, **kwargs, implementation="reference")


def explain(*args: Any, implementation: str | None = None, **kwargs: Any) -> dispatch.Explanation:
    """Which implementation `flash_attention`, called with the same arguments, would use on this machine, and why not
    the others. Nothing is computed, and `jax.ShapeDtypeStruct`s may stand for the arrays.

    >>> import jax.numpy as jnp
    >>> from pallas_flash import explain
    >>> x = jnp.ones((1, 4, 1, 8))
    >>> explain(x, x, x, is_causal=True, implementation="reference").chosen
    'reference'
    """

    def table(given: tuple[Any, Any]) -> dispatch.Explanation:
        arguments = called_with("explain", Arguments, *given)
        dispatch.require_known_sizes(implementation, vars(arguments))
        call = canonicalise(arguments)
        return dispatch.explain(call.spec, call.operands, dispatch.compute_capability(), implementation)

    return of_structs(table, (args, kwargs))


def attend(call: Canonical, implementation: str | None) -> Output:
    """A checked call, computed by what is named, or chosen."""
    choice = dispatch.choose(call.spec, call.operands, implementation, dispatch.TABLE)
    forward = AttentionPass(autodiff.ByPlatform(choice, "forward"), call.spec)
    operands = partitioning.alike(forward, call.operands)
    if choice.default is reference:
        residuals, max_logit = partitioning.differentiated_by_jax(forward, operands)
        return Output(residuals.out, autodiff.log_sum_exp(residuals.m, residuals.l), max_logit)
    with dispatch.refusals_by_name(choice):
        return autodiff.attention(choice, call.spec, operands)


def restore(call: Canonical, output: Output, *, return_residual: bool) -> Any:
    """The caller's batch dimensions, and only what was asked for."""
    lead = call.lead
    results = [output.out.reshape(*lead, *output.out.shape[1:])]
    if return_residual:
        lse = jnp.swapaxes(output.lse, 1, 2)
        results.append(lse.reshape(*lead, *lse.shape[1:]))
    if output.max_logit is not None:
        results.append(output.max_logit.reshape(*lead, *output.max_logit.shape[1:]))
    return results[0] if len(results) == 1 else tuple(results)
