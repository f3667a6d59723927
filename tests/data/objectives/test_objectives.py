"""Objectives: T5's table of lengths, examples by hand, and what is true of all examples."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax.data.objectives import (
    OBJECTIVES,
    ChosenTokens,
    CounterDraws,
    Denoising,
    ExampleFormat,
    FullLM,
    IidNoise,
    MaskedLM,
    Objective,
    ObjectiveMixture,
    PrefixLM,
    RandomSpans,
    SegmentObjective,
    SuffixNoise,
    ul2,
)
from synthesizer_jax.data.objectives.denoising import replace_spans
from synthesizer_jax.registry import from_json, to_json
from tests.data.objectives.draws import Given, counted

VOCAB_SIZE = 32_100
FIRST_SENTINEL = VOCAB_SIZE - 1
FORM = ExampleFormat(512, 512, VOCAB_SIZE)
LAST_WORD = 30_000
"""Random texts have no ids from here on, so that sentinels are known by their ids."""
SENTENCE = ["Thank", "you", "for", "inviting", "me", "to", "your", "party", "last", "week", "."]
"""The example of Raffel et al. 2020, figure 2; the id of a word is its index plus 10."""
NOISE = np.array([word in ("for", "inviting", "last") for word in SENTENCE])


def ids(string: str) -> np.ndarray:
    """Ids of words of the sentence, of sentinels ``<0>``, ``<1>``, …, and of ``</s>``."""
    special = {"</s>": 1} | {f"<{i}>": FIRST_SENTINEL - i for i in range(100)}
    return np.array([special.get(w) or SENTENCE.index(w) + 10 for w in string.split()], np.int32)


TOKENS = ids(" ".join(SENTENCE))


def span_corruption(mean: float = 3.0, density: float = 0.15) -> Denoising:
    return Denoising(RandomSpans(density, mean_span=mean))


@pytest.mark.parametrize(
    ("inputs_length", "tokens", "targets"),
    [(128, 141, 29), (256, 284, 58), (512, 568, 114), (1024, 1137, 229), (2048, 2274, 456)],
)
def test_lengths_of_span_corruption(inputs_length: int, tokens: int, targets: int) -> None:
    assert span_corruption().lengths(inputs_length) == (tokens, targets)


@pytest.mark.parametrize(
    ("mean", "density", "tokens", "targets"),
    [(2, 0.15, 552, 126), (5, 0.15, 581, 105), (10, 0.15, 591, 99), (3, 0.5, 766, 512)],
)
def test_lengths_of_other_spans(mean: float, density: float, tokens: int, targets: int) -> None:
    assert span_corruption(mean, density).lengths(512) == (tokens, targets)


@pytest.mark.parametrize("inputs_length", [172, 316, 1504])
def test_targets_fit_where_rounding_in_float32_and_float64_differs(inputs_length: int) -> None:
    """Of 190 tokens 0.15 are 28 in float64 and, as in the mask, 29 in float32."""
    tokens, targets = span_corruption().lengths(inputs_length)
    form = ExampleFormat(inputs_length, 512, VOCAB_SIZE)
    example = span_corruption().example(np.full(tokens, 9, np.int32), counted(), form)
    assert [len(ids) for ids in example] == [inputs_length, targets]


def test_at_density_one_half_targets_are_no_longer_than_inputs() -> None:
    tokens, targets = span_corruption(32.0, 0.5).lengths(512)
    assert targets == 512
    inputs, _ = span_corruption(32.0, 0.5).example(np.full(tokens + 1, 9), counted(), FORM)
    assert len(inputs) == 512  # one token more would fit the inputs


def test_the_papers_sentence() -> None:
    inputs = "Thank you <0> me to your party <1> week ."
    for marked, expected in ((NOISE, inputs), (~NOISE, "<0> for inviting <1> last <2>")):
        replaced = replace_spans(TOKENS, marked, vocab_size=VOCAB_SIZE)
        np.testing.assert_array_equal(replaced, ids(expected))


def test_examples_by_hand() -> None:
    # 2 noise tokens in 1 span; then 3 tokens of 11 as suffix
    inputs, targets = span_corruption().example(TOKENS, Given([0], [0, 1, 2, 3, 4, 5, 6, 7]), FORM)
    np.testing.assert_array_equal(
        inputs, ids("Thank you for inviting me to your party last <0> </s>")
    )
    np.testing.assert_array_equal(targets, ids("<0> week . </s>"))
    sequential = Denoising(SuffixNoise(0.25), mode=(5, 6))
    inputs, targets = sequential.example(TOKENS, Given(), FORM)
    expected = ids("Thank you for inviting me to your party <0> </s>")
    np.testing.assert_array_equal(inputs, [5, 6, *expected])
    np.testing.assert_array_equal(targets, ids("<0> last week . </s>"))
    prefix_lm = OBJECTIVES["prefix_lm"]
    assert isinstance(prefix_lm, PrefixLM)
    inputs, targets = prefix_lm.example(TOKENS, Given([4]), FORM)
    np.testing.assert_array_equal(inputs, ids("Thank you for inviting </s>"))
    np.testing.assert_array_equal(targets, ids("me to your party last week . </s>"))


def test_full_language_modeling_has_no_inputs() -> None:
    form = FORM._replace(targets_length=8)
    assert FullLM().segment_length(form) == 8
    inputs, targets = FullLM().example(TOKENS[:8], Given(), form)
    assert inputs.shape == (0,) and inputs.dtype == np.int32
    np.testing.assert_array_equal(targets, TOKENS[:8])
    segmentwise = FullLM(document_eos=False)
    assert segmentwise.segment_length(form) == 7
    _, targets = segmentwise.example(TOKENS[:7], Given(), form)
    np.testing.assert_array_equal(targets, [*TOKENS[:7], 1])


def test_masked_language_modeling_by_hand() -> None:
    order = [
        9,
        8,
        0,
        1,
        3,
        4,
        5,
        6,
        2,
        7,
        10,
    ]  # numbers below 3 are chosen: "for", "inviting", "last"
    uniform = [0, 0, 0.79, 0.85, 0, 0, 0, 0, 0.95, 0, 0]
    draws = order, uniform, [11] * 11
    objective = MaskedLM(ChosenTokens(0.3))
    masked = objective.mask(TOKENS, Given(*draws), vocab_size=VOCAB_SIZE)
    expected = ids("Thank you <0> you me to your party last week .")
    np.testing.assert_array_equal(masked.inputs, expected[: len(TOKENS)])
    np.testing.assert_array_equal(masked.targets, TOKENS)
    np.testing.assert_array_equal(masked.weights, np.where(NOISE, np.float32(1), np.float32(0)))
    inputs, targets = objective.example(TOKENS, Given(*draws), FORM)
    np.testing.assert_array_equal(inputs, [*expected, 1])
    np.testing.assert_array_equal(targets, [*np.where(NOISE, TOKENS, 0), 0])
    other = dataclasses.replace(objective, mask_id=4).mask(
        TOKENS, Given(*draws), vocab_size=VOCAB_SIZE
    )
    assert other.inputs[2] == 4


def test_shares_of_masked_language_modeling() -> None:
    tokens = np.full(20_000, 50, np.int32)
    masked = MaskedLM(IidNoise(0.15)).mask(tokens, counted(), vocab_size=VOCAB_SIZE)
    chosen = masked.inputs[masked.weights == 1]
    assert abs(masked.weights.mean() - 0.15) < 0.01
    assert abs((chosen == FIRST_SENTINEL).mean() - 0.8) < 0.02
    assert abs((chosen == 50).mean() - 0.1) < 0.02
    assert (masked.inputs[masked.weights == 0] == 50).all()


def restored(inputs: np.ndarray, targets: np.ndarray) -> list[int]:
    """The text of inputs and targets with unique sentinels, without EOS."""
    spans: dict[int, list[int]] = {}
    for token in targets[:-1].tolist():
        if token > LAST_WORD:
            spans[token] = current = []
        else:
            current.append(token)
    return [t for token in inputs[:-1].tolist() for t in spans.get(token, [token])]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    inputs_length=st.integers(8, 2100),
    density=st.sampled_from([0.1, 0.15, 0.25, 0.5]),
    mean=st.sampled_from([2.0, 3.0, 8.0, 64.0]),
    mode=st.sampled_from([(), (7, 8)]),
    seed=st.integers(0, 99),
)
def test_span_corruption_fills_the_inputs_and_loses_nothing(
    inputs_length: int, density: float, mean: float, mode: tuple[int, ...], seed: int
) -> None:
    objective = dataclasses.replace(span_corruption(mean, density), mode=mode)
    tokens, most_targets = objective.lengths(inputs_length)
    assert most_targets is not None
    form = ExampleFormat(inputs_length, most_targets, VOCAB_SIZE)
    assert objective.segment_length(form) == tokens
    text = np.random.default_rng(seed).integers(3, LAST_WORD, tokens).astype(np.int32)
    inputs, targets = objective.example(text, counted(seed), form)
    # No padding, but where T5's table takes one token less at density one half.
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


def test_ul2_draws_seven_denoisers_with_their_lengths_and_modes() -> None:
    mixture = ul2(regular_mode=(40,), sequential_mode=(41, 42), extreme_mode=(43,))
    members = [o for o in mixture.objectives if isinstance(o, Denoising)]
    assert [o.mode for o in members] == [(40,), (40,), (41, 42), *[(43,)] * 4]
    parts = mixture.split(2_000_000, counted(), FORM)
    assert parts[0].start == 0 and parts[-1].stop == 2_000_000
    assert [p.stop for p in parts[:-1]] == [p.start for p in parts[1:]]
    lengths = {id(o): o.segment_length(FORM) for o in members}
    assert all(p.stop - p.start == lengths[id(p.objective)] for p in parts[:-1])
    drawn = [sum(p.objective is o for p in parts) / len(parts) for o in members]
    np.testing.assert_allclose(drawn, 1 / 7, atol=0.03)
    sequential = members[2]
    text = np.arange(100, 100 + sequential.segment_length(FORM), dtype=np.int32)
    inputs, targets = sequential.example(text, counted(), FORM)
    assert len(inputs) == 512 and inputs[:2].tolist() == [41, 42]
    assert inputs[-2:].tolist() == [FIRST_SENTINEL, 1]
    assert targets[0] == FIRST_SENTINEL and len(targets) - 2 == round(0.25 * len(text))


def test_rates_of_a_mixture() -> None:
    members = span_corruption(), span_corruption(8.0)
    mixture = ObjectiveMixture(members, rates=(3.0, 1.0))
    parts = mixture.split(1_000_000, counted(), FORM)
    assert abs(np.mean([p.objective is members[0] for p in parts]) - 0.75) < 0.03
    only = ObjectiveMixture(members, rates=(0.0, 1.0)).split(10_000, counted(), FORM)
    assert {id(p.objective) for p in only} == {id(members[1])}
    assert mixture.split(0, counted(), FORM) == []


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: span_corruption().check(FORM._replace(targets_length=113)),
            r"targets_length is 113; RandomSpans with inputs_length=512 needs 114 or more",
        ),
        (
            lambda: ul2().check(FORM._replace(targets_length=511)),
            r"targets_length is 511; .* needs 512 or more",
        ),
        (
            lambda: MaskedLM().check(ExampleFormat(128, 64, VOCAB_SIZE)),
            r"targets_length is 64; MaskedLM with inputs_length=128 needs 128 or more",
        ),
        (
            lambda: ul2(regular_mode=(5, 6)).check(FORM._replace(inputs_length=3)),
            r"inputs_length is 3; a mode of 2 ids with EOS and a token needs 4 or more",
        ),
        (lambda: FullLM(documents=0), r"documents is 0; allowed: 1 or more"),
        (
            lambda: MaskedLM(mask_share=0.8, random_share=0.3),
            r"mask_share is 0.8 and random_share 0.3; allowed: .* at most 1",
        ),
        (lambda: ObjectiveMixture(()), r"objectives is empty; name one or more"),
        (
            lambda: ObjectiveMixture((FullLM(), span_corruption())),
            r"objectives differ in documents or document_eos",
        ),
        (lambda: ul2(rates=(1.0,)), r"rates is \(1.0,\); allowed: None, or 7 numbers"),
    ],
)
def test_errors_name_field_and_remedy(act: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        act()  # type: ignore[operator]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_are_saved_as_json(name: str) -> None:
    objective: Objective = OBJECTIVES[name]
    data = json.loads(json.dumps(to_json(objective)))
    assert from_json(data) == objective
    assert hash(from_json(data)) == hash(objective)


def test_a_saved_part_of_the_wrong_kind_is_refused() -> None:
    data = to_json(span_corruption())
    with pytest.raises(ValueError, match="noise is a FullLM, expected Noise"):
        from_json(data | {"noise": to_json(FullLM())})


def test_the_package_imports_neither_jax_nor_tensorflow() -> None:
    code = (
        "import sys; import synthesizer_jax.data.objectives; "
        "print({'jax', 'flax', 'tensorflow', 'seqio'} & sys.modules.keys())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_examples_of_a_seed_stay_the_same() -> None:
    """The numbers of the counters are part of what makes a run repeatable."""
    draws = CounterDraws(np.random.SeedSequence(17), 0, 3)
    inputs, targets = span_corruption(2.0, 0.4).example(TOKENS, draws, FORM)
    assert restored(inputs, targets) == TOKENS.tolist()
    np.testing.assert_array_equal(inputs, ids("Thank you for inviting me <0> party last <1> </s>"))
    np.testing.assert_array_equal(targets, ids("<0> to your <1> week . </s>"))
