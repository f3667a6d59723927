"""Decoding against exhaustive search and against step-by-step argmax of full passes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax import nnx as snnx
from synthesizer_jax.inference import decode, score_choices
from synthesizer_jax.inference.beam_search import GROUP, beam_search, top_tokens
from synthesizer_jax.inference.decoder import Lengths
from synthesizer_jax.models import Encoder, Size, alignment, t5
from tests.inference.beam_search import t5x_beams
from tests.inference.table import Table, table_log_p

VOCAB, LENGTH = 5, 3


@pytest.fixture(scope="module", params=["v", "rv"])
def trained(request):
    kind = alignment(request.param, head_dim=4, max_length=8)
    model = t5(Size(8, 2, 12, 2, 4), encoder=kind, vocab_size=VOCAB, scan=request.param == "v")
    source = jnp.asarray(np.random.default_rng(0).integers(2, VOCAB, (4, 6))).at[1, 4:].set(0)
    variables = model.init(jax.random.key(7), source, source[:, :LENGTH])
    # Sharpen the output so that sequences differ clearly and some end early.
    variables["params"]["logits_kernel"] *= 3.0
    return model, variables, source


@functools.partial(jax.jit, static_argnums=0)
def full_pass(model, variables, source, shifted):
    return jax.nn.log_softmax(model.apply(variables, source, shifted).astype(jnp.float32))


def log_probability(model, variables, source, sequence):
    """Of one sequence after each source, by a full pass; EOS ends it."""
    shifted = np.zeros((len(source), LENGTH), np.int32)
    shifted[:, 1 : len(sequence)] = sequence[:-1]
    logp = np.asarray(full_pass(model, variables, source, shifted))
    return sum(logp[:, i, t] for i, t in enumerate(sequence))


def ended_sequences():
    """Every sequence that ends with EOS."""
    for n in range(LENGTH):
        for s in itertools.product(range(VOCAB), repeat=n):
            if 1 not in s:
                yield (*s, 1)


@pytest.mark.slow
def test_greedy_is_the_argmax_of_full_passes(trained):
    model, variables, source = trained
    tokens = np.zeros((4, LENGTH), np.int32)
    score, done = np.zeros(4), np.zeros(4, bool)
    for i in range(LENGTH):
        shifted = np.concatenate([np.zeros((4, 1), np.int32), tokens[:, :-1]], 1)
        logp = np.asarray(full_pass(model, variables, source, shifted))[:, i]
        score += np.where(done, 0, logp.max(-1))
        tokens[:, i] = np.where(done, 0, logp.argmax(-1))
        done |= tokens[:, i] == 1
    found = decode(variables, source, model=model, max_length=LENGTH)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_allclose(found.scores, score, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_wide_beam_is_exhaustive_search(trained, alpha):
    model, variables, source = trained
    found = decode(variables, source, model=model, max_length=LENGTH, beams=80, alpha=alpha)
    sequences = list(ended_sequences())
    scores = np.stack(
        [
            log_probability(model, variables, source, s) / ((5 + len(s)) / 6) ** alpha
            for s in sequences
        ],
        axis=1,
    )
    for row, (tokens, score) in enumerate(zip(*map(np.asarray, found), strict=True)):
        best = sequences[scores[row].argmax()]
        assert tuple(tokens[: len(best)]) == best and not tokens[len(best) :].any()
        np.testing.assert_allclose(score, scores[row].max(), atol=1e-4)


@functools.partial(jax.jit, static_argnums=1)
def search(logits, beams, alpha, shortest=1):
    table = Table(logits)
    lengths = Lengths(shortest, jnp.full(table.batch, table.max_length))
    return beam_search(table, lengths, beams=beams, alpha=alpha, samples=beams)


@given(
    beams=st.integers(1, 8),
    length=st.sampled_from([1, 4]),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    shortest=st.integers(1, 3),
    end=st.sampled_from([-8.0, -2.0, 0.0, 3.0]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=40)
def test_beam_search_is_that_of_t5x(beams, length, alpha, shortest, end, seed):
    """All beams in order; ended ones come before those that are cut, however improbable the end is."""
    logits = np.random.default_rng(seed).normal(size=(2, length, Table.CODES, 9))
    logits[..., 1] += end
    found = search(np.float32(logits), beams, alpha, shortest)
    for example, *rows in zip(logits, *map(np.asarray, found), strict=True):
        wanted = t5x_beams(table_log_p(example), length, beams, alpha, shortest)
        for (best, expected), tokens, score, log_p in zip(wanted, *rows, strict=False):
            assert tuple(tokens[: len(best)]) == best and not tokens[len(best) :].any()
            np.testing.assert_allclose(score, expected, atol=1e-5)
            penalty = ((5 + len(best)) / 6) ** alpha
            np.testing.assert_allclose(log_p, expected * penalty, atol=1e-5)


def test_a_cut_sequence_is_returned_where_none_has_ended():
    logits = np.zeros((2, 2, Table.CODES, 9), np.float32)
    logits[0, ..., 1] = -1e9  # the first example never ends
    logits[1, :, :, 1] = [[-3.0], [-9.0]]  # the second ends with little probability
    logits[..., 5] = 4.0
    found = search(logits, 5, 1.0)
    assert found.tokens[:, 0].tolist() == [[5, 5], [1, 0]]
    likely = 4 - np.log(np.exp(4) + 7)
    np.testing.assert_allclose(found.scores[0, 0], 2 * likely / (7 / 6), rtol=1e-5)


@pytest.mark.slow
def test_padding_of_the_input_changes_nothing(trained):
    model, variables, source = trained
    wider = jnp.pad(source, ((0, 0), (0, 2)))
    for beams in (1, 3):
        one, two = (
            decode(variables, s, model=model, max_length=LENGTH, beams=beams)
            for s in (source, wider)
        )
        np.testing.assert_array_equal(one.tokens, two.tokens)
        np.testing.assert_allclose(one.scores, two.scores, atol=1e-5)


def test_scores_of_choices_are_their_log_probabilities(trained):
    model, variables, source = trained
    words = [(2, 3, 1), (4, 1), (1,)]
    choices = np.zeros((3, 4), np.int32)
    for row, word in enumerate(words):
        choices[row, : len(word)] = word
    found = score_choices(variables, source, choices=jnp.asarray(choices), model=model)
    expected = np.stack([log_probability(model, variables, source, w) for w in words], 1)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@given(
    b=st.integers(1, 3),
    n=st.integers(1, 4),
    vocab=st.sampled_from([2, GROUP - 1, GROUP, 3 * GROUP + 5]),
    values=st.sampled_from([2, 5, 1000]),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=30)
def test_best_tokens_are_those_of_a_stable_sort(b, n, vocab, values, seed):
    rng = np.random.default_rng(seed)
    # Few different values: most are equal to another, and sums are exact.
    logits = rng.integers(0, values, (b, n, vocab)).astype(np.float32)
    own = rng.integers(0, 3, (b, n)).astype(np.float32)
    count = min(2 * n, n * vocab)
    flat = (logits + own[:, :, None]).reshape(b, -1)
    wanted = np.argsort(-flat, axis=-1, kind="stable")[:, :count]
    top, source, token = top_tokens(jnp.asarray(logits), jnp.asarray(own), count)
    np.testing.assert_array_equal(source * vocab + token, wanted)
    np.testing.assert_array_equal(top, np.take_along_axis(flat, wanted, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 4])
def test_a_narrow_output_projection_scores_nearly_alike(trained, beams):
    model, variables, source = trained
    options = {"model": model, "max_length": 6, "beams": beams}
    wide = decode(variables, source, **options)
    same = decode(variables, source, **options, logits_dtype="float32")
    narrow = decode(variables, source, **options, logits_dtype="bfloat16")
    np.testing.assert_array_equal(wide.scores, same.scores)
    np.testing.assert_allclose(narrow.scores, wide.scores, atol=0.05 * np.abs(wide.scores).max())
    assert not np.array_equal(narrow.scores, wide.scores)


def test_what_does_not_decode():
    tokens = jnp.ones((1, 3), int)
    model = t5(Size(8, 1, 12, 2, 4), vocab_size=VOCAB)
    encoder = Encoder(vocab_size=VOCAB, d_model=8, encoder=model.encoder)
    with pytest.raises(TypeError, match=r"an? Encoder cannot decode; pass an EncoderDecoder"):
        decode({}, tokens, model=encoder, max_length=3)
    module = snnx.EncoderDecoder(model, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="for an NNX module its config, with linen_variables"):
        decode({}, tokens, model=module, max_length=3)
    for options in ({"max_length": 0}, {"max_length": 3, "beams": 0}):
        with pytest.raises(ValueError, match=r"(max_length|beams) is 0; allowed: 1 to"):
            decode({}, tokens, model=model, **options)
