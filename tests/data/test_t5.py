"""Compares objectives with T5's own functions, using the same random numbers from TensorFlow."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
import seqio
import tensorflow as tf

from synthesizer_jax.data.objectives import (
    OBJECTIVES,
    Denoising,
    ExampleFormat,
    FullLM,
    PrefixLM,
    SegmentObjective,
    noise_mask,
)
from synthesizer_jax.data.segments import SegmentStream, random_chunk

t5 = pytest.importorskip(
    "t5.data.preprocessors", reason="t5 is not installed; `make install` installs it"
)

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
FORM = ExampleFormat(64, 64, VOCABULARY.vocab_size)
LENGTHS = {"inputs": 64, "targets": 64}
FEATURES = dict.fromkeys(LENGTHS, seqio.Feature(VOCABULARY, add_eos=True, dtype=tf.int32))
SEEDS = [(0, 0), (1, 7), (2**31 - 1, 3)]


class T5Draws:
    """Draws the same random numbers as T5's functions do.

    T5 draws one seed for each call, and splits it into two seeds for each step.
    """

    def __init__(self, seeds: list[tf.Tensor]):
        self._seeds = seeds
        self._next = iter(seeds)

    @classmethod
    def split(cls, seed: tuple[int, int], count: int) -> "T5Draws":
        return cls(tf.unstack(tf.random.experimental.stateless_split(seed, count)))

    def integers(self, count: int, *, low: int, high: int) -> np.ndarray:
        seed = next(self._next)
        return tf.random.stateless_uniform([count], seed, low, high, tf.int32).numpy()

    def permutation(self, count: int) -> np.ndarray:
        return tf.argsort(tf.random.stateless_uniform([count], seed=next(self._next))).numpy()

    def fork(self, part: int) -> "T5Draws":
        return T5Draws(self._seeds[2 * part : 2 * part + 2])


def text(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(3, 259, length).astype(np.int32)


@pytest.mark.parametrize(("density", "mean"), [(0.15, 3.0), (0.15, 64.0), (0.5, 3.0), (0.3, 1.5)])
def test_masks_are_t5s(density: float, mean: float) -> None:
    """Noise masks equal T5's for every length.

    All lengths are compared, because the numbers of noise tokens and of spans are rounded.
    """
    function = functools.partial(t5.random_spans_noise_mask, mean_noise_span_length=mean)
    theirs = tf.function(function, reduce_retracing=True)
    for length in range(1, 700, 1 if (density, mean) == (0.15, 3.0) else 19):
        draws = T5Draws.split((length, 7), 2)
        expected = theirs(tf.constant(length), density, tf.stack(draws._seeds))
        np.testing.assert_array_equal(noise_mask(length, density, mean, draws), expected)


@pytest.mark.parametrize("density", [0.1, 0.15, 0.25, 0.5])
@pytest.mark.parametrize("mean", [2.0, 3.0, 5.0, 8.0, 10.0, 32.0, 64.0])
def test_lengths_are_t5s(density: float, mean: float) -> None:
    denoising = Denoising(density, mean)
    for inputs_length in (16, 50, 100, 128, 256, 500, 512, 1000, 1024, 2048):
        expected = t5.random_spans_helper(inputs_length, density, mean, 1, 1)
        if round(round(expected[0] * density) / mean):  # T5 counts the spans of its mask
            assert denoising.lengths(inputs_length) == expected


SENTINELS = (t5.noise_span_to_unique_sentinel, t5.nonnoise_span_to_unique_sentinel)
DENOISING: dict[str, tuple] = {
    f"span_{mean}_15_u_u": (
        functools.partial(t5.random_spans_noise_mask, mean_noise_span_length=float(mean)),
        *SENTINELS,
    )
    for mean in (2, 3, 5, 10)
} | {"prefix_lm": (t5.random_prefix_noise_mask, t5.drop_nonnoise_tokens, t5.drop_noise_tokens)}
"""T5's functions for noise masks, inputs and targets, by the names of its ``objectives/*.gin``."""


@pytest.mark.parametrize("name", DENOISING)
def test_examples_are_those_of_t5s_denoise(name: str) -> None:
    objective = OBJECTIVES[name]
    functions = zip(("noise_mask_fn", "inputs_fn", "targets_fn"), DENOISING[name], strict=True)
    options = {"output_features": FEATURES, **dict(functions)}
    options["noise_density"] = 0.5 if isinstance(objective, PrefixLM) else objective.density
    for seed in SEEDS:
        for length in (1, 2, 7, 40, 63, 90):
            tokens = text(length)
            theirs = t5.single_example_denoise({"targets": tf.constant(tokens)}, seed, **options)
            trimmed = seqio.preprocessors.append_eos_after_trim_impl(theirs, FEATURES, LENGTHS)
            inputs, targets = objective.example(tokens, T5Draws.split(seed, 6), FORM)
            np.testing.assert_array_equal(inputs, trimmed["inputs"])
            np.testing.assert_array_equal(targets, trimmed["targets"])


class Documents(list):
    """A source of documents that are in memory."""

    name = "the documents"
    is_resident = True

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(0, np.int32), super().__getitem__(index)


class Recorder(SegmentObjective):
    """Yields the segments of an objective as examples."""

    segment_length = None

    def __init__(self, objective: SegmentObjective):
        self.documents, self.document_eos = objective.documents, objective.document_eos
        self.segment_length = objective.segment_length

    def example(self, tokens: np.ndarray, draws: object, form: ExampleFormat) -> tuple:
        return tokens, tokens


@pytest.mark.parametrize(
    ("objective", "theirs"),
    [(Denoising(), t5.span_corruption), (PrefixLM(), t5.prefix_lm), (FullLM(), t5.full_lm)],
    ids=["span_corruption", "prefix_lm", "full_lm"],
)
def test_segments_are_t5s(objective: SegmentObjective, theirs: Callable, monkeypatch) -> None:
    """Our pipeline and T5's pipeline make the same segments from one chunk of documents."""
    monkeypatch.setattr(t5, "denoise", lambda dataset, *args, **kwargs: dataset)
    documents = Documents(map(text, (0, 5, 300, 63, 0, 1, 64, 65, 128, 700, 2) * 30))
    dataset = tf.data.Dataset.from_generator(
        lambda: ({"targets": documents[i][1]} for i in range(len(documents))),
        output_signature={"targets": tf.TensorSpec([None], tf.int32)},
    )
    expected = theirs(dataset, sequence_length=LENGTHS, output_features=FEATURES)
    options = {"shard": (0, 1), "seed": np.random.SeedSequence(0), "shuffle": False}
    stream = SegmentStream(documents, Recorder(objective), FORM, **options)
    for row in expected.as_numpy_iterator():
        np.testing.assert_array_equal(next(stream)[1], row["targets"])


@pytest.mark.parametrize("length", [1, 9, 10, 11, 95])
def test_chunks_are_t5s(length: int) -> None:
    tokens = text(length)
    for seed in SEEDS:
        theirs = t5.single_example_select_random_chunk(
            {"targets": tf.constant(tokens)}, seed, output_features=FEATURES, max_length=10
        )
        draws = T5Draws(T5Draws.split(seed, 2)._seeds[1:])
        np.testing.assert_array_equal(random_chunk(tokens, draws, length=10), theirs["targets"])
