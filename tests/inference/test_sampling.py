"""Compares samples with exact distributions, and tests properties of all decoding methods."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from synthesizer_jax.inference import Decoding, decode_sequences, score_targets
from synthesizer_jax.inference.decoder import Constraints
from synthesizer_jax.inference.decoding import run_decoding
from synthesizer_jax.inference.sampling import Sampling, decode_rows, keep_most_probable
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.models.zoo import language_model
from tests.inference.table import Table, table_log_p

VOCAB, LENGTH, BATCH = 11, 6, 8


def kept_tokens(logits, top_k, top_p, min_p=0.0):
    """Returns the tokens that may be drawn, by probability, and their cumulative probabilities.

    The function follows the definitions. It first keeps the `top_k` most probable tokens. Of these,
    it keeps the smallest number of tokens whose total probability is at least `top_p`. Of these, it
    keeps the tokens with at least `min_p` times the largest probability.
    """
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]
    mass = np.exp(logits[order] - logits.max())
    sums = np.cumsum(mass / mass.sum())
    if top_p not in (None, 1):
        order = order[: 1 + int(np.argmax(sums >= top_p))]
    return [token for token, p in zip(order, mass, strict=False) if p >= min_p], sums


@given(
    vocab=st.sampled_from([2, 7, 300]),
    top_k=st.one_of(st.none(), st.integers(1, 9)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
    values=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_the_tokens_to_draw_from_are_those_of_the_definitions(vocab, top_k, top_p, values, seed):
    # The logits have few different values, so most of them occur more than once.
    logits = np.random.default_rng(seed).integers(0, values, vocab) * (8.0 / values)
    order, sums = kept_tokens(logits, top_k, top_p)
    assume(top_p is None or np.abs(sums - top_p).min() > 1e-5 or top_p == 1)
    found = keep_most_probable(jnp.float32(logits)[None], top_k=top_k, top_p=top_p)[0]
    assert set(np.flatnonzero(np.isfinite(found))) == set(order)
    np.testing.assert_array_equal(np.asarray(found)[order], np.float32(logits)[order])


@functools.partial(jax.jit, static_argnames=("samples", "top_k"))
def sample(logits, temperature, top_p=None, min_p=None, *, samples=1, top_k=None, shortest=None):
    table = Table(logits)
    constraints = Constraints(shortest, jnp.full(table.batch, table.max_length))
    sampling = Sampling(jax.random.key(3), jnp.arange(table.batch), temperature, top_p, min_p)
    return decode_rows(table, constraints, samples=samples, sampling=sampling, top_k=top_k)


def table_of(seed, vocab=5, length=2, batch=1, end=0.0):
    shape = (batch, length, Table.CODES, vocab)
    logits = np.random.default_rng(seed).normal(scale=1.5, size=shape).astype(np.float32)
    logits[..., 1] += end
    return logits


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, None, None, None),
        (0.5, None, None, None),
        (2.0, 3, None, None),
        (1.5, None, 0.7, None),
        (1.5, 4, 0.8, None),
        (1.5, None, None, 0.3),
        (2.0, 4, 0.9, 0.4),
    ],
)
def test_samples_have_the_exact_distribution(temperature, top_k, top_p, min_p):
    """Samples have the exact distribution.

    The frequencies of all sequences of two tokens are within five standard deviations of the
    expected frequencies.

    The log-probabilities of the samples are compared, too.
    """
    logits = table_of(1)
    samples = 20_000
    log_p = table_log_p(np.float64(logits[0]))
    expected, scores = {}, {}

    def follow(prefix, probability, score):
        if len(prefix) == 2 or prefix[-1:] == (1,):
            expected[prefix], scores[prefix] = probability, score
            return
        (row,) = log_p([prefix])
        order, _ = kept_tokens(row / temperature, top_k, top_p, min_p or 0.0)
        mass = np.exp(row[order] / temperature)
        for token, share in zip(order, mass / mass.sum(), strict=True):
            follow((*prefix, token), probability * share, score + row[token])

    follow((), 1.0, 0.0)
    found = sample(logits, temperature, top_p, min_p, samples=samples, top_k=top_k)
    rows = [tuple(row[:1] if row[0] == 1 else row) for row in np.asarray(found.tokens[0]).tolist()]
    counts = collections.Counter(rows)
    assert set(counts) <= set(expected)
    for sequence, p in expected.items():
        bound = 5 * np.sqrt(p * (1 - p) / samples) + 1 / samples
        assert abs(counts[sequence] / samples - p) < bound
    wanted = [scores[row] for row in rows]
    np.testing.assert_allclose(found.log_probabilities[0], wanted, atol=1e-5)


@pytest.mark.parametrize("shortest", [None, 3])
def test_low_temperatures_and_one_token_to_draw_from_are_greedy(shortest):
    logits = table_of(2, vocab=9, length=4, batch=6, end=1.0)
    table = Table(logits)
    longest = jnp.full(6, 4)
    greedy = jax.jit(lambda: decode_rows(table, Constraints(shortest, longest)))()
    for found in (
        *(sample(logits, t, shortest=shortest) for t in (1e-4, 1e-38, 1e-44)),
        sample(logits, 5.0, top_k=1, shortest=shortest),
        sample(logits, 5.0, 1e-6, shortest=shortest),
    ):
        np.testing.assert_array_equal(found.tokens, greedy.tokens)
        np.testing.assert_allclose(
            found.log_probabilities, greedy.log_probabilities, rtol=1e-5, atol=1e-6
        )


@pytest.fixture(scope="module")
def trained():
    model = t5(
        Size(8, 1, 12, 2, 4), encoder=alignment("v", head_dim=4, max_length=8), vocab_size=VOCAB
    )
    source = np.random.default_rng(0).integers(2, VOCAB, (BATCH, 7))
    for row, count in enumerate((7, 1, 2, 3, 4, 5, 6, 7)):
        source[row, count:] = 0
    source = jnp.asarray(source)
    variables = jax.jit(model.init)(jax.random.key(7), source, source[:, :LENGTH])
    kernel = variables["params"]["logits_kernel"] * 2.0
    variables["params"]["logits_kernel"] = kernel.at[:, 1].multiply(2.0)  # makes sequences end
    return model, variables, source


METHODS = {
    "greedy": Decoding(max_length=LENGTH),
    "beams": Decoding(max_length=LENGTH, beams=3, samples=3),
    "samples": Decoding(
        max_length=LENGTH, temperature=0.9, top_k=9, top_p=0.95, min_p=0.01, samples=3, seed=5
    ),
}


def run(trained, method, *, rows=slice(None), source=None, **changes):
    model, variables, tokens = trained
    decoding = dataclasses.replace(METHODS[method], **changes)
    examples = np.arange(BATCH)[rows]
    tokens = tokens[rows] if source is None else source
    return decode_sequences(variables, tokens, model=model, decoding=decoding, examples=examples)


def lengths_of(tokens):
    """Returns the number of tokens, including EOS if a sequence has one."""
    ends = np.asarray(tokens) == 1
    return np.where(ends.any(-1), ends.argmax(-1) + 1, tokens.shape[-1])


@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_the_targets(trained, method):
    """The scores of decoded sequences equal the scores of the same sequences as targets.

    The scores are also equal if EOS is forbidden, and if a maximum length cuts sequences off.
    """
    model, variables, source = trained
    checked = 0
    for changes in ({}, {"min_length": 4}):
        found = run(trained, method, **changes)
        for i in range(found.tokens.shape[1]):
            tokens = found.tokens[:, i]
            exact = score_targets(variables, source, targets=tokens, model=model)
            # Leave out sequences that contain token 0, which counts as padding.
            whole = np.asarray((tokens != 0).sum(-1)) == lengths_of(tokens)
            checked += whole.sum()
            np.testing.assert_allclose(
                found.log_probabilities[whole, i], exact[whole], rtol=1e-4, atol=1e-5
            )
    assert checked >= BATCH


@pytest.mark.parametrize("method", ["greedy", "beams"])
def test_lengths_have_a_minimum_and_a_maximum_relative_to_the_input(trained, method):
    """The length of an output may be limited relative to its input.

    The limit counts the real tokens of each example, wherever the padding is.
    """
    source = np.asarray(trained[2])
    assert lengths_of(run(trained, method).tokens).min() < 4
    assert lengths_of(run(trained, method, min_length=4).tokens).min() >= 4
    numbers = (source != 0).sum(-1)
    for relative, extra in ((0.8, 0), (0.5, 1)):
        longest = np.array([min(LENGTH, max(round(relative * n) + extra, 2)) for n in numbers])
        options = {"relative_length": relative, "extra_length": extra, "min_length": 2}
        found = run(trained, method, **options)
        for tokens, limit in zip(np.asarray(found.tokens), longest, strict=True):
            assert not tokens[:, limit:].any()
        # Each example has the same answer as in a batch that has this maximum length for all
        # examples.
        for limit in (3, 5):
            rows = np.flatnonzero(longest == limit)
            alone = run(trained, method, max_length=limit, min_length=2)
            np.testing.assert_array_equal(found.tokens[rows, :, :limit], alone.tokens[rows])
            np.testing.assert_allclose(found.scores[rows], alone.scores[rows], rtol=1e-4, atol=1e-5)
    left = np.stack([np.roll(row, (row == 0).sum()) for row in source])
    same = run(trained, method, source=jnp.asarray(left), **options)
    np.testing.assert_array_equal(found.tokens, same.tokens)


@pytest.mark.parametrize("method", METHODS)
def test_a_language_models_prompt_counts_as_repeated_wherever_its_padding_is(method):
    model = language_model("v", Size(8, 1, 12, 2, 4)).copy(vocab_size=2 * VOCAB)
    prompts = np.array([[2, 3, 4, 0, 0], [5, 6, 0, 0, 0], [7, 8, 9, 10, 11]])
    variables = jax.jit(model.init)(jax.random.key(1), prompts, prompts)
    decoding = dataclasses.replace(METHODS[method], no_repeat_ngram_size=1)
    left = np.stack([np.roll(row, (row == 0).sum()) for row in prompts])
    run = functools.partial(decode_sequences, variables, model=model, decoding=decoding)
    found, same = (np.asarray(run(jnp.asarray(x)).tokens) for x in (prompts, left))
    np.testing.assert_array_equal(found, same)
    for prompt, samples in zip(prompts, found, strict=True):
        for tokens in samples:
            tokens = [*prompt[prompt > 0], *tokens[tokens > 0]]
            assert len(set(tokens)) == len(tokens) > (prompt > 0).sum()
    decoding = dataclasses.replace(decoding, no_repeat_ngram_size=2, repetition_penalty=3.0)
    run = functools.partial(decode_sequences, variables, model=model, decoding=decoding)
    np.testing.assert_array_equal(run(jnp.asarray(prompts[:1, :3])).tokens, run(prompts).tokens[:1])
    decoding = dataclasses.replace(METHODS[method], no_repeat_ngram_size=1)
    run = functools.partial(decode_sequences, variables, model=model, decoding=decoding)
    # The input contains all tokens, but its EOS does not count as used.
    spent = run(jnp.array([[*range(2, 2 * VOCAB), 1]])).tokens
    assert (np.asarray(spent)[0, 0, :2] == (1, 0)).all()


def test_a_sample_depends_only_on_its_seed_example_and_number(trained):
    found = run(trained, "samples")
    rows = np.array([5, 2, 7])
    part = run(trained, "samples", rows=rows)
    np.testing.assert_array_equal(part.tokens, found.tokens[rows])
    fewer = run(trained, "samples", samples=2)
    np.testing.assert_array_equal(fewer.tokens, found.tokens[:, :2])
    assert np.any(run(trained, "samples", seed=6).tokens != found.tokens)


def test_one_program_serves_all_temperatures_and_probabilities(trained):
    run(trained, "samples", min_length=3)
    run(trained, "beams", min_length=3)
    before = run_decoding._cache_size()
    for changes in (
        {"temperature": 2},
        {"top_p": 0.5},
        {"min_p": 0.3},
        {"seed": 9},
        {"min_length": 2},
    ):
        run(trained, "samples", **{"min_length": 3} | changes)
    for changes in ({"alpha": 0}, {"alpha": 1.0}, {"min_length": 2}):
        run(trained, "beams", **{"min_length": 3} | changes)
    assert run_decoding._cache_size() == before


@pytest.mark.parametrize(("method", "axis_type"), [("beams", "Explicit"), ("samples", "Auto")])
def test_a_mesh_decodes_what_one_device_does(trained, method, axis_type):
    model, variables, source = trained
    expected = run(trained, method, relative_length=1.5)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[axis_type],))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(source, NamedSharding(mesh, P("data")))
        placed = jax.device_put(variables, NamedSharding(mesh, P()))
        found = run((model, placed, None), method, source=sharded, relative_length=1.5)
        assert found.tokens.sharding.spec[0] == "data"
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.scores, expected.scores, rtol=1e-4, atol=1e-5)
