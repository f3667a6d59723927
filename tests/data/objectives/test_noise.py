"""Noise masks and random numbers: by hand, and what is true of all of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax.data.objectives import (
    ChosenTokens,
    CounterDraws,
    IidNoise,
    Noise,
    RandomPrefix,
    RandomSpans,
    SuffixNoise,
)
from tests.data.objectives.draws import Given, counted

NOISE: list[Noise] = [
    IidNoise(0.15),
    RandomSpans(0.15, mean_span=3.0),
    RandomSpans(0.5, mean_span=3.0, roll=True),
    RandomSpans(0.9, mean_span=1.0),
    SuffixNoise(0.25),
    RandomPrefix(0.5),
    ChosenTokens(0.15),
]


def spelled(mask: np.ndarray) -> str:
    return "".join("x" if noise else "." for noise in mask)


def spans(mask: np.ndarray) -> int:
    """Number of runs of True."""
    return int((mask & ~np.concatenate([[False], mask[:-1]])).sum())


def test_masks_by_hand() -> None:
    assert spelled(IidNoise(0.5)(4, Given([0.1, 0.5, 0.9, 0.4]))) == "x..x"
    assert spelled(SuffixNoise(0.25)(10, Given())) == "........xx"
    assert spelled(RandomPrefix(0.5)(5, Given([2]))) == "..xxx"
    assert spelled(ChosenTokens(0.4)(5, Given([4, 1, 3, 0, 2]))) == ".x.x."
    # 4 noise tokens in 2 spans, parted after the 3rd; 6 others, parted after the 2nd
    draws = Given([1, 2, 0], [1, 0, 2, 3, 4])
    assert spelled(RandomSpans(0.4, mean_span=2.0)(10, draws)) == "..xxx....x"
    draws = Given([1, 2, 0], [1, 0, 2, 3, 4], [3])
    assert spelled(RandomSpans(0.4, mean_span=2.0, roll=True)(10, draws)) == "..x..xxx.."


@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_segments(length: int) -> None:
    for noise in (RandomSpans(0.15), SuffixNoise(0.25)):
        assert spelled(noise(length, counted())) == ".x"[:length]
    assert not RandomPrefix()(2, counted())[0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    length=st.integers(2, 600),
    density=st.sampled_from([0.1, 0.15, 0.5, 0.77]),
    mean=st.sampled_from([1.0, 3.0, 8.0, 64.0]),
    seed=st.integers(0, 99),
)
def test_numbers_of_random_spans(length: int, density: float, mean: float, seed: int) -> None:
    mask = RandomSpans(density, mean_span=mean)(length, counted(seed))
    num_noise = min(max(round(np.float32(length) * np.float32(density)), 1), length - 1)
    num_spans = min(max(round(num_noise / mean), 1), length - num_noise)
    assert (mask.sum(), spans(mask)) == (num_noise, num_spans)
    assert not mask[0] and mask[-1]


@pytest.mark.parametrize("noise", NOISE, ids=str)
def test_masks_are_booleans_of_the_length_and_mostly_of_the_density(noise: Noise) -> None:
    assert noise(7, counted()).dtype == bool
    masks = np.stack([noise(500, CounterDraws(np.random.SeedSequence(1), i)) for i in range(100)])
    assert masks.shape == (100, 500)
    assert abs(masks.mean() - noise.density) < 0.05
    same = noise(500, CounterDraws(np.random.SeedSequence(1), 3))
    np.testing.assert_array_equal(same, masks[3])


def test_random_spans_are_anywhere() -> None:
    """Rolled masks are uniform over positions; others never begin with noise."""
    draws = [CounterDraws(np.random.SeedSequence(2), i) for i in range(1500)]
    plain = np.mean([RandomSpans(0.15)(20, d) for d in draws], axis=0)
    rolled = np.mean([RandomSpans(0.15, roll=True)(20, d) for d in draws], axis=0)
    assert plain[0] == 0 and plain[-1] == 1
    np.testing.assert_allclose(rolled, 0.15, atol=0.03)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IidNoise(0.0), r"density is 0.0; allowed: above 0, at most 1"),
        (lambda: RandomPrefix(0.6), r"density is 0.6; allowed: above 0, at most 0.5"),
        (lambda: RandomSpans(1.0), r"density is 1.0; allowed for random spans: below 1"),
        (lambda: RandomSpans(0.15, mean_span=0.5), r"mean_span is 0.5; allowed: 1 or more"),
    ],
)
def test_settings_that_make_no_noise(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


def test_draws_depend_on_seed_place_and_call_alone() -> None:
    draws = counted(5).fork(1)
    first, second = draws.uniform(4), draws.uniform(4)
    assert first.dtype == np.float32
    assert (first != second).all() and (first >= 0).all() and (first < 1).all()
    np.testing.assert_array_equal(counted(5).fork(1).uniform(4), first)
    np.testing.assert_array_equal(CounterDraws(np.random.SeedSequence(5), 1).uniform(4), first)
    assert (counted(6).fork(1).uniform(4) != first).all()
    assert (counted(5).fork(2).uniform(4) != first).all()
    integers = counted().integers(10_000, low=-2, high=5)
    assert set(integers) == set(range(-2, 5))
    np.testing.assert_allclose(np.bincount(integers + 2) / 10_000, 1 / 7, atol=0.02)
    assert sorted(counted().permutation(100)) == list(range(100))
