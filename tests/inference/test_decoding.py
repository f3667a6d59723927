"""Compares greedy decoding and beam search with full passes, exhaustive search, and T5X."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax import nnx as snnx
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.inference import Decoding, decode
from synthesizer_jax.inference.beam_search import GROUP, beam_search, top_tokens
from synthesizer_jax.inference.decoder import Constraints
from synthesizer_jax.inference.sampling import decode_rows
from synthesizer_jax.models import Encoder, Size, alignment, t5
from tests.inference.beam_search import t5x_beams
from tests.inference.table import Table, constrain, look_up, table_log_p

VOCAB, LENGTH = 5, 3


@pytest.fixture(scope="module")
def trained():
    kind = alignment("rv", head_dim=4, max_length=8)
    model = t5(Size(8, 2, 12, 2, 4), encoder=kind, vocab_size=VOCAB, scan=True)
    source = jnp.asarray(np.random.default_rng(0).integers(2, VOCAB, (4, 6))).at[1, 4:].set(0)
    variables = jax.jit(model.init)(jax.random.key(7), source, source[:, :LENGTH])
    # With larger logits, the sequences differ clearly, and some of them end early.
    variables["params"]["logits_kernel"] *= 3.0
    return model, variables, source


@functools.partial(jax.jit, static_argnums=0)
def full_pass(model, variables, source, shifted):
    return jax.nn.log_softmax(model.apply(variables, source, shifted).astype(jnp.float32))


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
    wider = jnp.pad(source, ((0, 0), (0, 2)))  # more padding must not change the result
    same = decode(variables, wider, model=model, max_length=LENGTH)
    np.testing.assert_array_equal(same.tokens, tokens)
    narrow = decode(variables, source, model=model, max_length=LENGTH, logits_dtype="bfloat16")
    np.testing.assert_allclose(narrow.scores, score, atol=0.05 * np.abs(score).max())
    assert not np.array_equal(narrow.scores, found.scores)


@functools.partial(jax.jit, static_argnums=1)
def search(logits, beams, alpha, shortest=1):
    table = Table(logits)
    constraints = Constraints(shortest, jnp.full(table.batch, table.max_length))
    return beam_search(table, constraints, beams=beams, alpha=alpha, samples=beams)


@given(
    beams=st.sampled_from([1, 2, 5]),
    length=st.sampled_from([1, 4]),
    alpha=st.sampled_from([0.0, 0.6, 1.0, 2.0]),
    shortest=st.integers(1, 3),
    end=st.sampled_from([-8.0, -2.0, 0.0, 3.0]),
    seed=st.integers(0, 999),
)
@settings(deadline=None, max_examples=60)
def test_beam_search_is_that_of_t5x(beams, length, alpha, shortest, end, seed):
    """All beams equal T5X's beams, in the same order.

    Sequences that end come before sequences that are cut off.

    Ended sequences come first even if their end is very improbable.
    """
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


def exhaustive(log_p, length, ends, alpha):
    """Returns the best of all sequences that end, and its score."""
    best = (-np.inf, ())
    prefixes = [((), 0.0)]
    for n in range(1, length + 1):
        found = log_p([tokens for tokens, _ in prefixes])
        every = [
            ((*tokens, token), score + value)
            for (tokens, score), row in zip(prefixes, found, strict=True)
            for token, value in enumerate(row)
        ]
        penalty = ((5 + n) / 6) ** alpha
        best = max(
            best, *((score / penalty, tokens) for tokens, score in every if tokens[-1] in ends)
        )
        prefixes = [(tokens, score) for tokens, score in every if tokens[-1] not in ends]
    return best[1], best[0]


def test_a_search_continues_after_several_ends():
    """If the 2n best continuations end with one of two EOS ids, n others stay alive."""
    beams = 2
    alpha = 5.0
    ids = SpecialIds(also_end=(2,))
    logits = np.random.default_rng(0).normal(size=(64, 4, Table.CODES, 5))
    logits[..., 1:3] += 1
    logits[0] = np.log(
        [
            [[0.01, 0.25, 0.25, 0.40, 0.09]],
            # For both words, the best four continuations are ends.
            [[0.01, 0.45, 0.45, 0.06, 0.03]],
            [[0.01, 0.03, 0.03, 0.90, 0.03]],
            [[0.01, 0.94, 0.01, 0.02, 0.02]],
        ]
    )
    table = Table(np.float32(logits))
    table.ids = ids
    constraints = Constraints(None, jnp.full(64, 4), ids=ids)
    found = jax.jit(
        lambda: beam_search(table, constraints, beams=beams, alpha=alpha, samples=beams)
    )()

    def is_end(tokens):
        """Whether the last token ends a sequence."""
        return tokens[-1] in ids.ends

    for example, rows, scores in zip(logits, found.tokens, found.scores, strict=True):
        wanted = t5x_beams(table_log_p(example), 4, beams, alpha, ends=is_end, num_ends=2)
        for (best, expected), tokens, score in zip(wanted, rows, scores, strict=True):
            assert tuple(tokens[: len(best)].tolist()) == best and not tokens[len(best) :].any()
            np.testing.assert_allclose(score, expected, atol=1e-5)
    best, score = exhaustive(table_log_p(logits[0]), 4, ids.ends, alpha)
    assert tuple(found.tokens[0, 0].tolist()) == best == (3, 3, 3, 1)
    np.testing.assert_allclose(found.scores[0, 0], score, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_repetition_is_constrained_as_in_transformers(n):
    """Repetition penalties equal those of transformers.

    They change logits in greedy decoding, and log-probabilities in beam search. Tokens of the
    prompt count as repetitions, too.
    """
    logits = np.random.default_rng(n).normal(scale=2, size=(6, 8, Table.CODES, 12))
    logits[..., 1] -= 3
    prompts = np.array(
        [[0, 4, 5, 4], [0, 0, 0, 0], [2, 3, 4, 5], [7, 7, 2, 7], [0, 2, 2, 3], [0, 0, 9, 8]]
    )
    table = Table(np.float32(logits))
    constraints = Constraints(
        None,
        jnp.full(6, 8),
        repetition_penalty=1.5,
        no_repeat_ngram_size=n,
        prompt=jnp.asarray(prompts),
    )
    greedy = jax.jit(lambda: decode_rows(table, constraints))()
    beams = jax.jit(lambda: beam_search(table, constraints, beams=3, alpha=0.6, samples=3))()
    changed = 0
    for i, (example, prompt) in enumerate(zip(logits, prompts.tolist(), strict=True)):
        tokens = ()
        while len(tokens) < 8 and tokens[-1:] != (1,):
            (row,) = look_up(example)([tokens])
            changed += row.argmax()
            tokens += (int(constrain(row, [*prompt, *tokens], 1.5, n).argmax()),)
            changed -= tokens[-1]
        assert tuple(greedy.tokens[i, 0, : len(tokens)].tolist()) == tokens

        def log_p(prefixes, example=example, prompt=prompt):
            rows = table_log_p(example)(prefixes)
            pairs = zip(rows, prefixes, strict=True)
            return [constrain(row, [*prompt, *p], 1.5, n) for row, p in pairs]

        wanted = t5x_beams(log_p, 8, 3, 0.6, 1)
        for (best, score), found, value in zip(
            wanted, beams.tokens[i], beams.scores[i], strict=False
        ):
            assert tuple(found[: len(best)].tolist()) == best
            np.testing.assert_allclose(value, score, atol=1e-5)
    assert changed


@pytest.mark.parametrize("vocab", [2, GROUP, 3 * GROUP + 5])
@pytest.mark.parametrize("n", [1, 4])
def test_best_tokens_are_those_of_a_stable_sort(n, vocab):
    best = jax.jit(top_tokens, static_argnums=2)
    for seed in range(30):
        rng = np.random.default_rng(seed)
        # The logits have few different values, so most of them occur more than once, and sums are
        # exact.
        logits = rng.integers(0, (2, 5, 1000)[seed % 3], (3, n, vocab)).astype(np.float32)
        own = rng.integers(0, 3, (3, n)).astype(np.float32)
        count = min(2 * n, n * vocab)
        flat = (logits + own[:, :, None]).reshape(3, -1)
        wanted = np.argsort(-flat, axis=-1, kind="stable")[:, :count]
        top, source, token = best(logits, own, count)
        np.testing.assert_array_equal(source * vocab + token, wanted)
        np.testing.assert_array_equal(top, np.take_along_axis(flat, wanted, axis=-1))


def test_models_that_cannot_decode_are_refused():
    tokens = jnp.ones((1, 3), int)
    model = t5(Size(8, 1, 12, 2, 4), vocab_size=VOCAB)
    encoder = Encoder(vocab_size=VOCAB, d_model=8, encoder=model.encoder)
    with pytest.raises(TypeError, match=r"type Encoder cannot decode\. Pass an EncoderDecoder"):
        decode({}, tokens, model=encoder, max_length=3)
    module = snnx.EncoderDecoder(model, rngs=nnx.Rngs(0))
    with pytest.raises(
        TypeError, match="For an NNX module, pass its config as model and linen_variables"
    ):
        decode({}, tokens, model=module, max_length=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, "max_length is 0, but it must be 1 to 1,048,576"),
        ({"min_length": 9}, "min_length is 9, but it must be at most max_length, which is 8"),
        ({"beams": 1.5}, "beams is 1.5, but int is expected"),
        ({"temperature": float("nan")}, "temperature is nan, but float is expected"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0, but it must be above 0 and at most 1"),
        (
            {"beams": 2, "temperature": 1.0},
            "temperature is 1.0 and beams is 2, but beam search does not sample. Set temperature "
            "to 0",
        ),
        (
            {"top_k": 5},
            "top_k is 5, but temperature is 0, so nothing is sampled. Set a temperature",
        ),
        (
            {"samples": 2},
            "samples is 2, but beams is 1 and temperature is 0. Set .* or use 2 beams or more",
        ),
    ],
)
def test_what_settings_may_not_be_is_told_in_one_line(options, message):
    with pytest.raises(ValueError, match=f"^{message}") as error:
        Decoding(**{"max_length": 8} | options)
    assert len(str(error.value).splitlines()) == 1
    together = {"min_length": 8, "temperature": 0.1, "top_k": 1, "top_p": 1, "samples": 9}
    assert Decoding(max_length=8, seed=7, **together).samples == 9
    assert Decoding(max_length=8, relative_length=2, beams=4, alpha=0, samples=4).samples == 4
