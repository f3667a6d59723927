"""Tests objectives with T5's table of lengths, examples by hand, and properties of all examples."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.data.objectives import (
    OBJECTIVES,
    Denoising,
    Draws,
    ExampleFormat,
    FullLM,
    MaskedLM,
    ObjectiveMixture,
    PrefixLM,
    SegmentObjective,
    replace_spans,
)

VOCAB_SIZE = 32_100
FIRST_SENTINEL = VOCAB_SIZE - 1
FORM = ExampleFormat(512, 512, VOCAB_SIZE)
LAST_WORD = 30_000
"""Random texts only have smaller ids, so that larger ids are sentinels."""
SENTENCE = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
"""The example of Raffel et al. 2020, figure 2. The id of a word is its index plus 10."""
NOISE = np.array([word in ("for", "inviting", "last") for word in SENTENCE])


def ids(string: str) -> np.ndarray:
    """Returns the ids of a string of words, sentinels such as ``<0>``, and ``</s>``."""
    special = {"</s>": 1} | {f"<{i}>": FIRST_SENTINEL - i for i in range(100)}
    return np.array([special.get(w) or SENTENCE.index(w) + 10 for w in string.split()], np.int32)


TOKENS = ids(" ".join(SENTENCE))


def counted(seed: int = 0) -> Draws:
    return Draws(np.random.SeedSequence(seed))


class Given:
    """Replaces a random number generator, and returns the given numbers call by call."""

    def __init__(self, *values: list):
        self._values: Iterator[np.ndarray] = iter([np.asarray(v) for v in values])

    def uniform(self, count: int) -> np.ndarray:
        return self.permutation(count).astype(np.float32)

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        values = self.permutation(count)
        assert (low <= values).all() and (values < high).all()
        return values

    def permutation(self, count: int) -> np.ndarray:
        values = next(self._values)
        assert len(values) == count
        return values

    def fork(self, part: int) -> "Given":
        del part
        return self


def test_draws_depend_only_on_seed_place_and_call() -> None:
    draws = counted(5).fork(1)
    first, second = draws.uniform(4), draws.uniform(4)
    assert first.dtype == np.float32
    assert (first != second).all() and (first >= 0).all() and (first < 1).all()
    np.testing.assert_array_equal(counted(5).fork(1).uniform(4), first)
    np.testing.assert_array_equal(Draws(np.random.SeedSequence(5), 1).uniform(4), first)
    assert (counted(6).fork(1).uniform(4) != first).all()
    assert (counted(5).fork(2).uniform(4) != first).all()
    assert set(counted().integers(1000, low=-2, high=5)) == set(range(-2, 5))
    assert sorted(counted().permutation(100)) == list(range(100))


def test_examples_by_hand() -> None:
    """Compares objectives with examples that were made by hand.

    The examples are the figure in T5's paper, corrupted spans, a suffix with a mode token,
    prefixes, and whole texts.
    """
    marked = "Thank you <0> me to your party <1> week ."
    for noise, expected in ((NOISE, marked), (~NOISE, "<0> for inviting <1> last <2>")):
        replaced = replace_spans(TOKENS, noise, vocab_size=VOCAB_SIZE)
        np.testing.assert_array_equal(replaced, ids(expected))
    # The first call corrupts 2 tokens in 1 span. The second call corrupts a suffix of 3 of 11
    # tokens.
    inputs, targets = Denoising().example(TOKENS, Given([0], [0, 1, 2, 3, 4, 5, 6, 7]), FORM)
    expected = ids("Thank you for inviting me to your party last <0> </s>")
    np.testing.assert_array_equal(inputs, expected)
    np.testing.assert_array_equal(targets, ids("<0> week . </s>"))
    sequential = Denoising(0.25, None, mode=(5, 6))
    inputs, targets = sequential.example(TOKENS, counted(), FORM)
    expected = ids("Thank you for inviting me to your party <0> </s>")
    np.testing.assert_array_equal(inputs, [5, 6, *expected])
    np.testing.assert_array_equal(targets, ids("<0> last week . </s>"))
    inputs, targets = PrefixLM().example(TOKENS, Given([4]), FORM)
    np.testing.assert_array_equal(inputs, ids("Thank you for inviting </s>"))
    np.testing.assert_array_equal(targets, ids("me to your party last week . </s>"))
    form = FORM._replace(targets_length=8)
    segmentwise = FullLM(document_eos=False)
    assert (FullLM().segment_length(form), segmentwise.segment_length(form)) == (8, 7)
    inputs, targets = FullLM().example(TOKENS[:8], counted(), form)
    assert inputs.shape == (0,) and inputs.dtype == np.int32
    np.testing.assert_array_equal(targets, TOKENS[:8])
    _, targets = segmentwise.example(TOKENS[:7], counted(), form)
    np.testing.assert_array_equal(targets, [*TOKENS[:7], 1])


def test_examples_of_a_seed_stay_the_same() -> None:
    """The same seed always gives the same examples, because runs must be repeatable."""
    draws = Draws(np.random.SeedSequence(17), 0, 3)
    inputs, targets = Denoising(0.4, 2.0).example(TOKENS, draws, FORM)
    np.testing.assert_array_equal(inputs, ids("Thank you for inviting me <0> party last <1> </s>"))
    np.testing.assert_array_equal(targets, ids("<0> to your <1> week . </s>"))


def test_masked_language_modeling_by_hand() -> None:
    # The tokens whose number is below 3 are chosen: "for", "inviting" and "last".
    order = [9, 8, 0, 1, 3, 4, 5, 6, 2, 7, 10]
    uniform = [0, 0, 0.79, 0.85, 0, 0, 0, 0, 0.95, 0, 0]
    objective = MaskedLM(0.3)
    inputs, targets = objective.example(TOKENS, Given(order, uniform, [11] * 11), FORM)
    expected = ids("Thank you <0> you me to your party last week . </s>")
    np.testing.assert_array_equal(inputs, expected)
    np.testing.assert_array_equal(targets, [*np.where(NOISE, TOKENS, 0), 0])
    other = dataclasses.replace(objective, mask_id=4)
    assert other.example(TOKENS, Given(order, uniform, [11] * 11), FORM)[0][2] == 4


def test_random_tokens_are_never_special() -> None:
    """Random tokens are never padding, start or end tokens, although these are in the id range."""
    special = SpecialIds(padding=5, end=1, start=8, also_end=(7, 20))
    form = FORM._replace(vocab_size=12, ids=special)
    draws = Draws(np.random.SeedSequence(0), 0, 0)
    tokens = np.full(500, 3)
    inputs, targets = MaskedLM(1.0, mask_share=0.0, random_share=1.0).example(tokens, draws, form)
    assert set(inputs[:-1].tolist()) == {3, 4, 6, 9, 10, 11}
    np.testing.assert_array_equal(targets, [3] * 500 + [5])


def restored(inputs: np.ndarray, targets: np.ndarray) -> list[int]:
    """Reassembles the text of inputs and targets that have unique sentinels, without EOS."""
    spans: dict[int, list[int]] = {}
    for token in targets[:-1].tolist():
        if token > LAST_WORD:
            spans[token] = current = []
        else:
            current.append(token)
    return [t for token in inputs[:-1].tolist() for t in spans.get(token, [token])]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    # In float32, the computation for these lengths rounds up.
    inputs_length=st.integers(8, 2100) | st.sampled_from([172, 316, 1504]),
    density=st.sampled_from([0.1, 0.15, 0.25, 0.5]),
    mean=st.sampled_from([2.0, 3.0, 8.0, 64.0, None]),
    mode=st.sampled_from([(), (7, 8)]),
    seed=st.integers(0, 99),
)
def test_span_corruption_fills_the_inputs_and_loses_nothing(
    inputs_length: int, density: float, mean: float, mode: tuple[int, ...], seed: int
) -> None:
    objective = Denoising(density, mean, mode=mode)
    tokens, most_targets = objective.lengths(inputs_length)
    form = ExampleFormat(inputs_length, most_targets, VOCAB_SIZE)
    assert objective.segment_length(form) == tokens
    text = np.random.default_rng(seed).integers(3, LAST_WORD, tokens).astype(np.int32)
    inputs, targets = objective.example(text, counted(seed), form)
    # The inputs fill their length. If the noise density is 0.5, T5's table takes one token less.
    assert inputs_length - len(inputs) <= (density == 0.5)
    assert most_targets - len(targets) <= (density == 0.5)
    assert restored(inputs[len(mode) :], targets) == text.tolist()
    assert inputs[: len(mode)].tolist() == list(mode)
    assert inputs.dtype == targets.dtype == np.int32
    assert inputs[-1] == targets[-1] == 1
    sentinels = targets[targets > LAST_WORD].tolist()
    assert sentinels == list(range(FIRST_SENTINEL, FIRST_SENTINEL - len(sentinels), -1))
    assert inputs[inputs > LAST_WORD].tolist() == sentinels


SINGLE = {n: o for n, o in OBJECTIVES.items() if isinstance(o, SegmentObjective)}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(length=st.integers(1, 511), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", SINGLE)
def test_every_example_fits(name: str, length: int, seed: int) -> None:
    objective = SINGLE[name]
    length = min(length, objective.segment_length(FORM))
    text = np.random.default_rng(seed).integers(3, LAST_WORD, length).astype(np.int32)
    kept = text.copy()
    inputs, targets = objective.example(text, counted(seed), FORM)
    np.testing.assert_array_equal(text, kept)
    assert inputs.dtype == targets.dtype == np.int32
    assert len(inputs) <= 512 and 1 <= len(targets) <= 512
    again = objective.example(text, counted(seed), FORM)
    for ours, theirs in zip((inputs, targets), again, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    if name == "masked_lm":
        assert len(inputs) == len(targets) == length + 1
        assert (targets != 0).sum() == max(1, round(0.15 * length))
    if name == "prefix_lm":
        np.testing.assert_array_equal(np.concatenate([inputs[:-1], targets[:-1]]), text)
        assert len(targets) > 1


def test_errors_name_field_and_remedy() -> None:
    for make, message in (
        (lambda: FullLM(documents=0), r"documents is 0, but it must be 1 to"),
        (lambda: Denoising(1.0), r"density is 1.0, but it must be at least 0 and below 1"),
        (lambda: Denoising(0.15, 0.5), r"mean_span is 0.5, but it must be 1 or more"),
        (lambda: ObjectiveMixture(()), r"objectives is \(\), but it must be not empty"),
        (lambda: ObjectiveMixture((FullLM(), Denoising())), r"must have the same documents and d"),
        (
            lambda: ObjectiveMixture((FullLM(),), (1, 2)),
            r"rates is \(1, 2\), .* empty or contain 1 n",
        ),
        (lambda: ObjectiveMixture((OBJECTIVES["ul2"],)), "objectives is .*, but .* is expected"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    for objective, changes, message in (
        (
            Denoising(),
            {"targets_length": 113},
            r"targets_length is 113, .* for the noise of inputs_length=512",
        ),
        (
            MaskedLM(),
            {"targets_length": 64},
            r"is 64, but it must be at least 512 for MaskedLM with inputs_length=512",
        ),
        (Denoising(mode=(5, 6)), {"inputs_length": 3}, r"at least 4 for the mode, a token and EOS"),
    ):
        with pytest.raises(ValueError, match=message):
            objective.segment_length(FORM._replace(**changes))
