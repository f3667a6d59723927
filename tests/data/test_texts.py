"""Streams of texts alone: batches have targets only, with and without a cache."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from synthesizer_jax.data.cache import Caches

from synthesizer_jax.data import cache_writing
from synthesizer_jax.data.config import DataConfig
from tests.data import counted, small, texts

pytest.importorskip("grain")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Data sets and their caches; they are not to be changed."""
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    texts.add()
    caches = Caches(folder, texts.VOCABULARY)
    written = [
        info
        for mixture in ("mixed_texts", texts.MIXTURE)
        for info in cache_writing.write_caches(mixture, caches, split="train").written
    ]
    assert {info.task: info.has_inputs for info in written} == {
        **{"texts_many": False, "texts_few": False, "counted_few": True}
    }
    return folder


@pytest.mark.parametrize("changes", [{}, {"pack": True}, {"buckets": ((0, 16),)}, {"seed": 3}])
def test_batches_have_targets_only(data_dir: pathlib.Path, changes: dict[str, object]) -> None:
    live = texts.stream(data_dir, cached=False, **changes)
    cached = texts.stream(data_dir, cached=True, **changes)
    assert cached.is_cached and not live.is_cached
    assert cached.fingerprint() == live.fingerprint()
    assert counted.digests(cached, 30) == counted.digests(live, 30)
    batch = next(live)
    assert batch["encoder_input_tokens"].shape == (16, 0)
    known = {name: {small.text(name, i) for i in range(small.ROWS[name])} for name in small.ROWS}
    np.testing.assert_array_equal(
        batch["decoder_target_tokens"] != 0, batch["decoder_loss_weights"] == 1
    )
    for row in batch["decoder_target_tokens"]:
        text = bytes(int(i) - 3 for i in row[: row.tolist().index(1)]).decode()
        assert text in known["many"] | known["few"]


def test_packed_rows_are_filled_with_the_longest_texts_that_fit(data_dir: pathlib.Path) -> None:
    stream = texts.stream(data_dir, pack=True, targets_length=64)
    assert stream.config.segments_per_row == 4
    batches = [next(stream) for _ in range(10)]
    segments = np.concatenate([b["decoder_segment_ids"] for b in batches])
    assert segments.max() == 4
    assert (segments > 0).mean() > 0.8
    assert batches[0]["encoder_segment_ids"].shape == (16, 0)


@pytest.mark.parametrize("cached", [False, True])
def test_a_task_with_inputs_is_not_read_without_them(data_dir: pathlib.Path, cached: bool) -> None:
    with pytest.raises(ValueError, match=r"counted_few has inputs.*set data\.inputs_length"):
        texts.stream(data_dir, mixture="mixed_texts", cached=cached)
    both = texts.stream(data_dir, mixture="mixed_texts", cached=cached, inputs_length=32)
    inputs = np.concatenate([next(both)["encoder_input_tokens"] for _ in range(4)])
    lengths = (inputs != 0).sum(axis=1)
    assert (lengths == 0).any() and (lengths > 0).any()


def test_a_process_that_reads_cached_texts_imports_no_tensorflow(data_dir: pathlib.Path) -> None:
    command = [sys.executable, "-m", "tests.data.texts", str(data_dir), json.dumps({"pack": True})]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == counted.digests(texts.stream(data_dir, pack=True), 12)


@pytest.mark.parametrize("pack", [False, True])
def test_texts_continue_where_they_were_saved(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, pack: bool
) -> None:
    before = texts.stream(data_dir, cached=True, pack=pack)
    counted.digests(before, 17)
    before.save(tmp_path)
    after = texts.stream(data_dir, cached=False, pack=pack)
    after.restore(tmp_path)
    assert counted.digests(after, 20) == counted.digests(before, 20)


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"inputs_length is -1; allowed: 0 to"):
        DataConfig("texts", inputs_length=-1, targets_length=8, batch_size=8)
    with pytest.raises(ValueError, match=r"holds \(1, 4\); allowed: 0 to inputs_length=0"):
        DataConfig("texts", inputs_length=0, targets_length=8, batch_size=8, buckets=((1, 4),))
    assert DataConfig("texts", 0, 8, batch_size=8, pack=True).segments_per_row == 1
