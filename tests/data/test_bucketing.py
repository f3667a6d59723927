"""Batches of rows of similar length: the same examples, less padding, one shape for all hosts."""

import collections
import dataclasses
import itertools
import pathlib

import numpy as np
import pytest

from synthesizer_jax.data.bucketing import GROUP, LengthSorter
from synthesizer_jax.data.task_streams import DrawnExample
from tests.data import small

BUCKETS = ((12, 8), (18, 8))
CHANGES = {"shards": 4, "batch_size": 12, "targets_length": 8}
CONFIG = dataclasses.replace(small.CONFIG, **CHANGES, buckets=BUCKETS)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    return folder


def examples(batches: list[dict[str, np.ndarray]]) -> collections.Counter[bytes]:
    rows = (row for batch in batches for row in batch["encoder_input_tokens"])
    return collections.Counter(map(small.spell, rows))


def padding(batches: list[dict[str, np.ndarray]]) -> float:
    inputs = [batch["encoder_input_tokens"] for batch in batches]
    return 1 - sum(map(np.count_nonzero, inputs)) / sum(x.size for x in inputs)


def test_groups_of_batches_hold_the_same_examples_with_less_padding(data_dir: pathlib.Path) -> None:
    bucketed = list(itertools.islice(small.stream(data_dir, CONFIG), 3 * GROUP))
    plain = list(itertools.islice(small.stream(data_dir, CONFIG, buckets=()), 3 * GROUP))
    for start in range(0, 3 * GROUP, GROUP):
        part = slice(start, start + GROUP)
        assert examples(bucketed[part]) == examples(plain[part])
    shapes = collections.Counter(
        (b["encoder_input_tokens"].shape, b["decoder_target_tokens"].shape) for b in bucketed
    )
    assert set(shapes) == {((12, n), (12, 8)) for n in (12, 18, 32)}
    assert padding(bucketed) < 0.6 * padding(plain)
    lengths = [b["encoder_input_tokens"].shape[1] for b in bucketed[:GROUP]]
    assert lengths != sorted(lengths)


def test_all_hosts_have_the_shape_of_the_whole_batch(data_dir: pathlib.Path) -> None:
    whole = small.stream(data_dir, CONFIG)
    hosts = [small.stream(data_dir, CONFIG, here=part, saved=part) for part in ([0], [1, 2], [3])]
    for _ in range(GROUP + 2):
        parts = [next(host) for host in hosts]
        for name, value in next(whole).items():
            np.testing.assert_array_equal(np.concatenate([p[name] for p in parts]), value)


def test_every_step_can_be_restored(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    hosts = [small.stream(data_dir, CONFIG, here=part, saved=part) for part in ([0, 1], [2, 3])]
    whole, expected = small.stream(data_dir, CONFIG), []
    for step in range(GROUP + 6):
        for host in hosts:
            host.save(tmp_path / str(step))
            next(host)
        expected += small.digests(whole, 1)
    again = small.stream(data_dir, CONFIG)
    for step in range(GROUP + 4, -1, -1):
        again.restore(tmp_path / str(step))
        assert small.digests(again, 2)[: GROUP + 6 - step] == expected[step : step + 2]


def test_a_group_is_sorted_before_its_batches_are_mixed() -> None:
    sizes = iter(np.random.default_rng(0).permutation(2 * GROUP * 3) + 1)

    def take(count: int) -> list[DrawnExample]:
        drawn = [np.ones(next(sizes), np.int32) for _ in range(count)]
        return [DrawnExample(ids, ids[:1], 0, None) for ids in drawn]

    sorter = LengthSorter(take, rows=3, seed=0)
    batches = [[len(sorter.next_row()[0].inputs) for _ in range(3)] for _ in range(GROUP)]
    assert all(batch == sorted(batch) for batch in batches)
    assert sorted(batches) != batches
    ordered = [length for batch in sorted(batches) for length in batch]
    assert ordered == sorted(ordered)


def test_buckets_that_cannot_work_are_said_in_one_sentence() -> None:
    for changes, message in (
        ({"pack": True}, r"data\.buckets is for rows that are not packed; set data\.pack=false"),
        ({"buckets": ((64, 8),)}, r"data\.buckets holds \(64, 8\); allowed: 1 to inputs_length=32"),
        ({"buckets": ((18, 8), (12, 8))}, "in ascending order"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(CONFIG, **changes)


def test_other_buckets_are_another_stream(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    small.stream(data_dir, CONFIG).save(tmp_path)
    with pytest.raises(
        ValueError, match=r"buckets was \(\(12, 8\), \(18, 8\)\) in groups.* is None"
    ):
        small.stream(data_dir, CONFIG, buckets=()).restore(tmp_path)
