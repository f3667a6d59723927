"""The order of examples from a cache: over hosts, over restarts, and by the mixture's rates."""

import collections
import itertools
import pathlib

import numpy as np
import pytest
from synthesizer_jax.data.cache import Caches

from synthesizer_jax.data import cache_writing
from tests.data import counted, small

pytest.importorskip("grain")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    counted.add()
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    cache_writing.write_caches(counted.MIXTURE, Caches(folder, counted.VOCABULARY), split="train")
    return folder


@pytest.mark.parametrize("hosts", [1, 2, 4, 8])
def test_hosts_read_disjoint_shards_that_cover_everything(
    data_dir: pathlib.Path, hosts: int
) -> None:
    whole = counted.stream(data_dir, mixture="counted_many", batch_size=8)
    shards = np.array_split(np.arange(8), hosts)
    parts = [
        counted.stream(data_dir, mixture="counted_many", batch_size=8, shards=part.tolist())
        for part in shards
    ]
    read: list[set[str]] = [set() for _ in parts]
    for _ in range(2500 // 8):
        batches = [next(part) for part in parts]
        for name, value in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([b[name] for b in batches]), value)
        for own, batch in zip(read, batches, strict=True):
            own.update(counted.texts(iter([batch]), 1))
    assert sum(map(len, read)) == len(set().union(*read)) == 2500 // 8 * 8
    rest = {small.text("many", i) for i in range(2500)} - set().union(*read)
    assert len(rest) == 2500 % 8  # the longer shards' last examples


@pytest.mark.parametrize("pack", [False, True])
def test_every_step_can_be_restored(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, pack: bool
) -> None:
    changes = {"pack": pack, "inputs_length": 64}
    stream = counted.stream(data_dir, **changes)
    expected: list[str] = []
    for step in range(25):
        stream.save(tmp_path / str(step))
        expected += counted.digests(stream, 1)
    again = counted.stream(data_dir, **changes)
    for step in range(24, -1, -1):
        again.restore(tmp_path / str(step))
        assert counted.digests(again, 2)[: 25 - step] == expected[step : step + 2]


def test_tasks_are_drawn_by_their_rates(data_dir: pathlib.Path) -> None:
    stream = counted.stream(data_dir, batch_size=200, inputs_length=8)
    draws = 100_000
    found: collections.Counter[str] = collections.Counter()
    sentinel = counted.VOCABULARY.vocab_size - 1
    for batch in itertools.islice(stream, draws // 200):
        first = batch["encoder_input_tokens"][:, 0]
        with_sentinel = (batch["decoder_target_tokens"] == sentinel).any(axis=1)
        found["counted_sentinel"] += int(with_sentinel.sum())
        found["counted_few"] += int((first == ord("f") + 3).sum())
        found["counted_many"] += int(((first == ord("m") + 3) & ~with_sentinel).sum())
    assert sum(found.values()) == draws
    for name, count in found.items():
        p = counted.RATES[name] / sum(counted.RATES.values())
        assert abs(count / draws - p) < 3 * np.sqrt(p * (1 - p) / draws)


def test_packing_neither_loses_nor_repeats_examples(data_dir: pathlib.Path) -> None:
    changes = {"mixture": "counted_many", "batch_size": 8, "inputs_length": 64}
    packed = counted.stream(data_dir, pack=True, max_segments=8, shards=[3], **changes)
    seen: list[str] = []
    while len(seen) < 600:
        batch = next(packed)
        ids, segments = batch["encoder_input_tokens"][0], batch["encoder_segment_ids"][0]
        for number in range(1, segments.max() + 1):
            row = {"encoder_input_tokens": ids[segments == number][None]}
            seen += counted.texts(iter([row]), 1)
    pending = packed.position()[3].pending
    plain = counted.stream(data_dir, shards=[3], **changes)
    drawn = counted.texts(plain, len(seen) + len(pending))
    waiting = [bytes(int(i) - 3 for i in e.inputs if i > 1).decode() for e in pending]
    assert collections.Counter(seen + waiting) == collections.Counter(drawn)


def test_packing_ends_an_epoch_of_a_small_task_before_the_next(data_dir: pathlib.Path) -> None:
    """40 examples in 8 shards: the 128 pending ones of a shard are of 26 epochs."""
    changes = {"mixture": "counted_few", "batch_size": 8, "inputs_length": 40}
    packed = counted.stream(data_dir, pack=True, max_segments=8, **changes)
    seen: dict[int, list[str]] = collections.defaultdict(list)
    while min(map(len, seen.values()), default=0) < 60:
        batch = next(packed)
        rows = zip(batch["encoder_input_tokens"], batch["encoder_segment_ids"], strict=True)
        for place, (ids, segments) in enumerate(rows):
            for number in range(1, segments.max() + 1):
                row = {"encoder_input_tokens": ids[segments == number][None]}
                seen[place] += counted.texts(iter([row]), 1)
    for texts in seen.values():
        epochs = [set(texts[start : start + 5]) for start in range(0, 60, 5)]
        assert all(len(epoch) == 5 for epoch in epochs)
