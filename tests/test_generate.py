"""Generation: the cache gives the tokens that recomputing everything gives, whatever the lengths."""

from __future__ import annotations

import logging
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.generate import Sampling, _generate, generate, sample
from models.transformer import Transformer
from tests.test_models import ALL_OPTIONS, SMALL, extend, logits_of, make

LENGTHS = np.array([7, 1, 4])


def random_prompts(lengths: np.ndarray, width: int = 7, padding: int = 0, seed: int = 0) -> np.ndarray:
    prompts = np.random.default_rng(seed).integers(0, SMALL.vocab_size, (len(lengths), width))
    return np.where(np.arange(width) < lengths[:, None], prompts, padding)


def recompute(model: Transformer, prompts: np.ndarray, lengths: np.ndarray, max_new_tokens: int) -> np.ndarray:
    """Greedy tokens without a cache: the whole sequences again for each token."""
    rows, lengths = np.arange(len(prompts)), lengths.copy()
    tokens = np.pad(prompts, ((0, 0), (0, max_new_tokens)))
    for _ in range(max_new_tokens):
        # One width for all steps, so that it compiles once; nothing that follows a position reaches it.
        tokens[rows, lengths] = np.argmax(logits_of(model, jnp.asarray(tokens))[rows, lengths - 1], axis=-1)
        lengths += 1
    return np.stack([row[length - max_new_tokens : length] for row, length in zip(tokens, lengths, strict=True)])


@pytest.mark.parametrize(
    "options",
    [{}, {"windows": (3,)}, {"tie_embeddings": False, "attention": "reference"}, ALL_OPTIONS],
    ids=["plain", "window", "untied", "all_options"],
)
def test_tokens_equal_recomputation_for_ragged_prompts(options):
    prompts = random_prompts(LENGTHS)
    tokens = generate(make(**options), prompts, LENGTHS, max_new_tokens=9)
    oracle = make(**options | {"attention": "reference"})
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, recompute(oracle, prompts, LENGTHS, 9))


def test_prompts_go_through_flash_attention_and_tokens_through_flash_decode():
    model, prompts = make(num_layers=1), random_prompts(LENGTHS)
    arguments = (model, jnp.asarray(prompts), jnp.asarray(LENGTHS), None, Sampling(None, None, None), None)
    program = _generate.lower(*arguments, max_new_tokens=9).as_text()
    assert program.count("call @forward") == 1 and program.count("call @decode") == 1
    hopper = make(num_layers=1, compute_dtype="bfloat16", attention="sm90", decode="sm90")
    on_gpu = _generate.trace(hopper, *arguments[1:], max_new_tokens=9).lower(lowering_platforms=("cuda",)).as_text()
    assert on_gpu.count("call @decode") == 1 and "mosaic_gpu" in on_gpu


def test_logits_of_the_cache_equal_those_of_one_pass():
    model = make(**ALL_OPTIONS)
    lengths, tokens = jnp.array([5, 2]), jnp.asarray(random_prompts(np.array([9, 9]), width=9))
    expected = logits_of(model, tokens)
    logits, caches = extend(model, tokens[:, :5], model.empty_caches(2, 9), jnp.zeros(2, jnp.int32), lengths)
    for _ in range(4):
        np.testing.assert_allclose(logits, expected[jnp.arange(2), lengths - 1], atol=1e-4)
        token = jnp.take_along_axis(tokens, lengths[:, None], axis=1)
        logits, caches = extend(model, token, caches, lengths, jnp.ones(2, jnp.int32))
        lengths += 1


def test_padding_and_batch_mates_do_not_matter():
    model, prompts = make(**ALL_OPTIONS), random_prompts(LENGTHS)
    tokens = generate(model, prompts, LENGTHS, max_new_tokens=9)
    other = np.where(np.arange(7) < LENGTHS[:, None], prompts, -(2**31))  # an id that there is not, which embeds as NaN
    np.testing.assert_array_equal(generate(model, other, LENGTHS, max_new_tokens=9), tokens)
    permuted = generate(model, prompts[::-1], LENGTHS[::-1], max_new_tokens=9)
    np.testing.assert_array_equal(permuted, tokens[::-1])


def test_all_lengths_and_sampling_values_share_one_compilation(caplog):
    model = make(num_layers=1)
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        for seed, lengths in enumerate(([3, 5], [1, 1], [5, 2])):
            lengths = np.array(lengths)
            prompts = random_prompts(lengths, width=5, seed=seed)
            generate(model, prompts, lengths, max_new_tokens=6, eos_id=seed)
            for option in range(2):
                generate(
                    model,
                    prompts,
                    lengths,
                    max_new_tokens=6,
                    temperature=0.5 + option,
                    top_k=3 + option * 2**40,
                    top_p=0.9 - option / 2,
                    key=jax.random.key(seed),
                )
    compiled = Counter(r.message.split(" in ")[0] for r in caplog.records if r.message.startswith("Finished XLA"))
    assert compiled["Finished XLA compilation of jit(_generate)"] == 2  # greedy and sampled


def test_a_row_ends_with_its_first_eos():
    model, prompts = make(), random_prompts(LENGTHS)
    free = np.asarray(generate(model, prompts, LENGTHS, max_new_tokens=9))
    eos_id = int(free[0, 3])
    tokens = np.asarray(generate(model, prompts, LENGTHS, max_new_tokens=9, eos_id=eos_id))
    for row, free_row in zip(tokens, free, strict=True):
        hits = np.flatnonzero(free_row == eos_id)
        end = hits[0] if len(hits) else len(row)
        np.testing.assert_array_equal(row[:end], free_row[:end])
        assert (row[end:] == eos_id).all()


def test_generation_stops_when_every_row_has_ended():
    model, steps = make(), []
    prompts, lengths = np.broadcast_to(random_prompts(LENGTHS)[0], (3, 7)), np.array([7, 7, 7])
    eos_id = int(generate(model, prompts, lengths, max_new_tokens=9)[0, 0])  # the first token of every row
    extend = model.extend

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: steps.append(1))
        return extend(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transformer, "extend", lambda self, *args, **kwargs: counted(*args, **kwargs))
        generate(model, prompts, lengths, max_new_tokens=100, eos_id=eos_id)
    jax.effects_barrier()
    assert len(steps) == 1


def test_sampling_is_reproducible_and_follows_its_key():
    model, prompts = make(), random_prompts(LENGTHS)
    draw = lambda seed: generate(  # noqa: E731
        model, prompts, LENGTHS, max_new_tokens=9, temperature=1.0, key=jax.random.key(seed)
    )
    np.testing.assert_array_equal(draw(0), draw(0))
    assert (draw(0) != draw(1)).any()


@pytest.mark.parametrize("sampling", [Sampling(1.0, 1, None), Sampling(1.0, None, 1e-6), Sampling(2e-38, None, 0.5)])
def test_narrow_sampling_takes_the_most_likely_token(sampling):
    logits = jax.random.normal(jax.random.key(0), (50, 32))
    greedy = sample(logits, None, Sampling(None, None, None))
    np.testing.assert_array_equal(greedy, jnp.argmax(logits, axis=-1))
    np.testing.assert_array_equal(sample(logits, jax.random.key(1), sampling), greedy)


@pytest.mark.parametrize(
    "sampling, expected",
    [
        (Sampling(1.0, None, None), [0.1, 0.4, 0.2, 0.3]),
        (Sampling(0.5, None, None), [0.01 / 0.3, 0.16 / 0.3, 0.04 / 0.3, 0.09 / 0.3]),
        (Sampling(1.0, 2, None), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(1.0, None, 0.75), [0, 4 / 9, 2 / 9, 3 / 9]),
        (Sampling(1.0, None, 0.65), [0, 4 / 7, 0, 3 / 7]),
        (Sampling(1.0, 3, 0.4), [0, 1, 0, 0]),  # of the best three, the first already has 4/9 > 0.4
        (Sampling(1.0, 100, 1.0), [0.1, 0.4, 0.2, 0.3]),
    ],
)
def test_sampling_has_the_distribution_asked_for(sampling, expected):
    draws = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.1, 0.4, 0.2, 0.3])) + 3, (draws, 4))
    tokens = sample(logits, jax.random.key(0), sampling)
    frequencies = np.bincount(tokens, minlength=4) / draws
    np.testing.assert_allclose(frequencies, expected, atol=4 * 0.5 / draws**0.5)
    assert (frequencies[np.array(expected) == 0] == 0).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": np.zeros(3, int)}, "prompts must be integers with 2 axes"),
        ({"prompts": np.zeros((3, 7))}, "prompts must be integers"),
        ({"prompts": np.full((3, 7), SMALL.vocab_size)}, "prompts must be in 0"),
        ({"prompt_lengths": LENGTHS[:2]}, "prompt_lengths must have an entry for each of the 3 prompts"),
        ({"prompt_lengths": np.array([7, 0, 4])}, "prompt_lengths must be in 1"),
        ({"prompt_lengths": np.array([8, 1, 4])}, "prompt_lengths must be in 1"),
        ({"prompts": [[1], [2, 3]]}, "prompts must be integers"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer, at least 1, not 0"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, at least 1, not True"),
        ({"max_new_tokens": 2.5}, "max_new_tokens must be an integer, at least 1, not 2.5"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": 1e-40}, "temperature must be 0, or a number from 1.2e-38 to 3.4e.38, not 1e-40"),
        ({"temperature": 1e39}, "temperature must be"),
        ({"temperature": "1"}, "temperature must be .* not '1'"),
        ({"temperature": 1.0}, "key must be"),
        ({"temperature": 1.0, "key": 0}, "key must be one JAX random key .* not 0"),
        ({"temperature": 1.0, "key": np.zeros((2, 2), np.uint32)}, "key must be one JAX random key"),
        ({"top_k": 5}, "temperature must be above 0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k must be"),
        ({"temperature": 1.0, "top_k": 1.5}, "top_k must be None or an integer, at least 1, not 1.5"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p must be"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p must be"),
        ({"temperature": 1.0, "top_p": "x"}, "top_p must be"),
        ({"eos_id": SMALL.vocab_size}, "eos_id must be None or an integer in 0"),
        ({"eos_id": True}, "eos_id must be"),
        ({"eos_id": 1.5}, "eos_id must be"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, message):
    arguments = {"prompts": random_prompts(LENGTHS), "prompt_lengths": LENGTHS, "max_new_tokens": 2} | changes
    with pytest.raises(ValueError, match=message):
        generate(make(num_layers=1), **arguments)


def test_generation_is_not_traced():
    with pytest.raises(ValueError, match="prompts must not be traced"):
        jax.jit(lambda prompts: generate(make(num_layers=1), prompts, LENGTHS, max_new_tokens=2))(
            random_prompts(LENGTHS)
        )
