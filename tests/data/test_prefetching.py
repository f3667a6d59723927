"""Batches that a thread makes ahead: the same, with the position of the last one taken."""

import pathlib

import numpy as np
import pytest

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.prefetching import PrefetchedStream
from tests.data import small

CONFIG = DataConfig("small", inputs_length=64, targets_length=8, batch_size=12, shards=4, pack=True)
LIVE = DataConfig("small_live", inputs_length=64, targets_length=8, batch_size=12, shards=2)


@pytest.fixture(scope="module", autouse=True)
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    small.register(folder)
    return folder


@pytest.mark.parametrize("config", [CONFIG, LIVE])
def test_every_position_is_that_of_the_last_batch_taken(
    config: DataConfig, tmp_path: pathlib.Path
) -> None:
    expected = small.digests(small.open_small(config), 12)
    with PrefetchedStream(small.open_small(config)) as batches:
        for step in range(8):
            batches.save(tmp_path / str(step))
            assert small.digests(batches, 1) == [expected[step]]
        for step in (7, 0, 3):
            batches.restore(tmp_path / str(step))
            batches.save(tmp_path / "again")
            assert small.digests(batches, 3) == expected[step : step + 3]
            plain = small.open_small(config)
            plain.restore(tmp_path / "again")
            assert small.digests(plain, 2) == expected[step : step + 2]


def test_batches_are_made_ahead_where_positions_are_numbers() -> None:
    for config, ahead in ((CONFIG, 2), (LIVE, 0)):
        stream = small.open_small(config)
        assert stream.has_numeric_position == bool(ahead)
        made: list[dict[str, np.ndarray]] = []
        make = type(stream).__next__

        class Counting(Stream):
            def __next__(self, make=make, made=made) -> dict[str, np.ndarray]:
                made.append(make(self))
                return made[-1]

        stream.__class__ = Counting
        batches = PrefetchedStream(stream)
        next(batches)
        batches._thread.shutdown(wait=True)  # what was begun is finished
        assert len(made) == 1 + ahead


def test_an_error_of_the_stream_is_the_reader_s() -> None:
    stream = small.open_small(CONFIG)

    class Damaged(Stream):
        def __next__(self) -> dict[str, np.ndarray]:
            raise ValueError("record 3 is damaged")

    stream.__class__ = Damaged
    with (
        PrefetchedStream(stream) as batches,
        pytest.raises(ValueError, match="record 3 is damaged"),
    ):
        next(batches)
