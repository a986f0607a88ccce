"""The public decoding operators: a few new tokens against a cache of keys and values, or against pages of one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_flash import autodiff, dispatch, partitioning
from pallas_flash.checks import require
from pallas_flash.combine import Partial
from pallas_flash.decode_spec import DecodeOperands
from pallas_flash.decode_validation import DecodeArguments, DecodeCall, canonicalise
from pallas_flash.passes import DecodePass
from pallas_flash.spec import Array, called_with, of_structs


def flash_decode(
    query: Array,
    key_cache: Array,
    value_cache: Array,
    kv_lengths: Array,
    *,
    query_lengths: Array | None = None,
    scale: float | Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    score_mod: Any = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Exact attention of 1 to 16 new tokens to a cache that holds their keys and values already.

    `flash_attention(query, key_cache, value_cache, is_causal=True, query_offset=kv_lengths - T,
    key_value_seq_lengths=kv_lengths, ...)`, made for few queries and many keys, at a cost that follows the longest
    sequence (or the window) and not the capacity of the cache. It has no derivative; flash_attention has.

    Positions: `kv_lengths` counts the new tokens. Query row i stands at kv_lengths - query_lengths + i and attends to
    the keys up to there. A row with no key (position < 0), and rows from query_lengths on, give output 0 and
    log-sum-exp -inf (with sinks: the sink). Whatever stands behind a length, NaN and Inf too, reaches nothing.

    Args:
      query: [*B, T, N, H], T <= 16; float16, bfloat16, float32 or float64; *B is any number of batch dimensions.
      key_cache: [*B, S, K, H] in query's dtype, int8 or float8_e4m3fn; N a multiple of K. Row j holds position j.
      value_cache: [*B, S, K, Hv] in key_cache's dtype.
      kv_lengths: int, [*B] or a scalar: how many rows of each sequence are there. Clamped to [0, S].
      query_lengths: int, [*B] or a scalar: how many of the T tokens are real, the first ones; T by default. Clamped to
        [0, T].
      scale: number, or a scalar array; 1 / sqrt(H) by default.
      local_window_size: left, or (left, right): keys from position - left on, which are left + 1 of them; None or -1 no
        bound. As attention is causal, right changes nothing.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c).
      sinks: floating [N]: a logit for each head that takes part in the denominator only.
      score_mod: (score, batch, head, q_pos, kv_pos) -> score on scalars, after scale, before soft cap.
      k_scale, v_scale: float32 [*B, S, K], one factor a token, or [*B, 1, K], one a sequence, by which int8 (there they
        are needed) and float8 keys and values are multiplied. `quantise` makes them.
      return_residual: also return the log-sum-exp of the logits, for `combine`.
      implementation: a name of `explain_decode`'s table; None takes the first that supports the call on the device that
        the program is lowered for. A name never falls back.

    Returns:
      out [*B, T, N, Hv] in query's dtype; or (out, lse [*B, T, N] float32) if return_residual. float64 gives float64.

    Raises:
      ValueError: an argument is wrong; the message names it, what came and what is wanted.
      NotImplementedError: `implementation` was named and cannot compute this call, a derivative was asked for, or an
        array has a symbolic size of jax.export.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import flash_decode
      >>> query = jax.random.normal(jax.random.key(0), (2, 1, 8, 64))
      >>> keys, values = jax.random.normal(jax.random.key(1), (2, 2, 1024, 2, 64))
      >>> flash_decode(query, keys, values, jnp.array([1000, 17])).shape
      (2, 1, 8, 64)

    Source: Dao, Haziza, Massa, Sizov 2023 (Flash-Decoding).
    """
    options = dict(locals())
    query, key, value = (options.pop(name) for name in ("query", "key_cache", "value_cache"))
    del options["implementation"]
    return _compute(DecodeArguments(query, key, value, **options), implementation)


def paged_flash_decode(
    query: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    kv_lengths: Array,
    *,
    query_lengths: Array | None = None,
    scale: float | Array | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    score_mod: Any = None,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """`flash_decode` over pages: row j of a sequence is row j % page_size of page page_table[j // page_size].

    Pages lie in any order and may be shared between sequences. Entries of the table from
    ceil(kv_lengths / page_size) on are never followed, whatever they hold. With T beyond 16 it is chunked prefill: the
    new tokens' keys and values are in the pages already (`append_to_pages`), and T has no limit of its own.

    Args:
      query: [*B, T, N, H].
      key_pages: [P, page_size, K, H] in query's dtype, int8 or float8_e4m3fn: one pool for all sequences.
      value_pages: [P, page_size, K, Hv] in key_pages' dtype.
      page_table: int [*B, max_pages]. An entry in use that is out of range is clamped to [0, P - 1].
      kv_lengths: int, [*B] or a scalar, the new tokens included. Clamped to [0, max_pages * page_size].
      k_scale, v_scale: float32 [P, page_size, K], one factor a token, or [P, 1, K], one a page.

    All else, and what it returns and raises, is as in `flash_decode`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from pallas_flash import paged_flash_decode
      >>> query = jax.random.normal(jax.random.key(0), (2, 1, 8, 64))
      >>> keys, values = jax.random.normal(jax.random.key(1), (2, 9, 16, 2, 64))  # 9 pages of 16 tokens
      >>> table = jnp.array([[3, 8, -1], [7, -1, -1]])
      >>> paged_flash_decode(query, keys, values, table, jnp.array([20, 5])).shape
      (2, 1, 8, 64)
    """
    require(page_table is not None, "page_table", page_table, "of shape [*B, max_pages]")
    options = dict(locals())
    query, key, value = (options.pop(name) for name in ("query", "key_pages", "value_pages"))
    del options["implementation"]
    return _compute(DecodeArguments(query, key, value, **options), implementation)


def explain_decode(
    query: Array, key: Array, value: Array, kv_lengths: Array, *, implementation: str | None = None, **options: Any
) -> dispatch.Explanation:
    """Which implementation `flash_decode` (with page_table=: `paged_flash_decode`), called with the same arguments,
    would use on this machine, and why not the others. Nothing is computed, and `jax.ShapeDtypeStruct`s may stand for
    the arrays.

    >>> import jax.numpy as jnp
    >>> from pallas_flash import explain_decode
    >>> x = jnp.ones((1, 4, 1, 8))
    >>> explain_decode(x, x, x, kv_lengths=4, implementation="xla").chosen
    'xla'
    """

    def table(given: tuple[Any, Any]) -> dispatch.Explanation:
        call = canonicalise(called_with("explain_decode", DecodeArguments, *given))
        capability = dispatch.compute_capability()
        return dispatch.explain(call.spec, call.operands, capability, implementation, dispatch.DECODE_TABLE)

    return of_structs(table, ((query, key, value, kv_lengths), options))


def _compute(arguments: DecodeArguments, implementation: str | None) -> Any:
    call = canonicalise(arguments)
    choice = dispatch.choose(call.spec, call.operands, implementation, dispatch.DECODE_TABLE)
    pass_ = DecodePass(autodiff.ByPlatform(choice, "decode"), call.spec, arguments.paged)
    call = call._replace(operands=partitioning.alike(pass_, call.operands))
    with dispatch.refusals_by_name(choice):
        result = _decode(pass_, call.operands)
    out, lse = _without_padding(call, result)
    out, lse = (x.reshape(*call.lead, *x.shape[1:]) for x in (out, lse))
    return (out, lse) if arguments.return_residual else out


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _decode(pass_: DecodePass, operands: DecodeOperands) -> Partial:
    return partitioning.run(pass_, operands)


@_decode.defjvp
def _refuse_derivative(*_: Any) -> Any:
    raise NotImplementedError(
        "flash_decode and paged_flash_decode have no derivative: flash_attention(..., is_causal=True, "
        "query_offset=kv_lengths - T, key_value_seq_lengths=kv_lengths) is the same function and has one"
    )


def _without_padding(call: DecodeCall, result: Partial) -> Partial:
    """Query rows that are no tokens attend to nothing."""
    operands = call.operands
    if operands.q_lengths is None:
        return result
    real = (jnp.arange(operands.q.shape[1])[None] < operands.q_lengths[:, None])[..., None]
    nothing = -jnp.inf if operands.sinks is None else operands.sinks.astype(result.lse.dtype)[None, None]
    return Partial(jnp.where(real[..., None], result.out, 0), jnp.where(real, result.lse, nothing))
