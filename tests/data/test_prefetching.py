"""Batches that a thread makes ahead: the same, with the position of the last one taken."""

import pathlib

import numpy as np
import pytest

from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.prefetching import DEPTH, PrefetchedStream
from tests.data import small

CHANGES = {"inputs_length": 64, "pack": True}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("data")
    small.write(folder)
    return folder


def test_every_position_is_that_of_the_last_batch_taken(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    expected = small.digests(small.stream(data_dir, **CHANGES), 12)
    with PrefetchedStream(small.stream(data_dir, **CHANGES)) as batches:
        for step in range(8):
            batches.save(tmp_path / str(step))
            assert small.digests(batches, 1) == [expected[step]]
        for step in (7, 0, 3):
            batches.restore(tmp_path / str(step))
            batches.save(tmp_path / "again")
            assert small.digests(batches, 3) == expected[step : step + 3]
            plain = small.stream(data_dir, **CHANGES)
            plain.restore(tmp_path / "again")
            assert small.digests(plain, 2) == expected[step : step + 2]


def test_batches_are_made_ahead(data_dir: pathlib.Path) -> None:
    made: list[dict[str, np.ndarray]] = []

    class Counting(Stream):
        def __next__(self) -> dict[str, np.ndarray]:
            made.append(super().__next__())
            return made[-1]

    stream = small.stream(data_dir, **CHANGES)
    stream.__class__ = Counting
    batches = PrefetchedStream(stream)
    next(batches)
    batches._thread.shutdown(wait=True)  # what was begun is finished
    assert len(made) == 1 + DEPTH


def test_an_error_of_the_stream_is_the_reader_s(data_dir: pathlib.Path) -> None:
    stream = small.stream(data_dir)

    class Damaged(Stream):
        def __next__(self) -> dict[str, np.ndarray]:
            raise ValueError("record 3 is damaged")

    stream.__class__ = Damaged
    with (
        PrefetchedStream(stream) as batches,
        pytest.raises(ValueError, match="record 3 is damaged"),
    ):
        next(batches)
