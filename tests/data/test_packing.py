"""Tests best-fit packing, and buckets of rows with similar lengths.

No example is lost or waits for too long, and streams report exact positions.
"""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from synthesizer_jax.data.batch import GROUP, LengthSorter, Packer, smallest_bucket
from synthesizer_jax.data.examples import DrawnExample

LENGTHS = (20, 9)
SIZES = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 9)), min_size=1, max_size=80)


class Source:
    """An endless source of examples with given sizes.

    Every token of an example is the number of the example.

    Every epoch contains one example of each size.
    """

    def __init__(self, sizes: list[tuple[int, int]]):
        self.sizes = itertools.cycle(sizes)
        self.taken = 0
        self.per_epoch = len(sizes)

    def take(self, count: int) -> list[DrawnExample]:
        drawn = []
        for _ in range(count):
            inputs, targets = (np.full(size, self.taken) for size in next(self.sizes))
            drawn.append(DrawnExample(inputs, targets, 0, self.taken // self.per_epoch))
            self.taken += 1
        return drawn


def packer(source: Source, *, segments: int = 5, window: int = 8) -> Packer:
    return Packer(source.take, LENGTHS, max_segments=segments, window=window)


def numbers(row: list[DrawnExample]) -> list[int]:
    return [int(example.inputs[0]) for example in row]


@given(SIZES, st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_example_once_and_none_waits(
    sizes: list, segments: int, window: int
) -> None:
    source = Source(sizes)
    packing = packer(source, segments=segments, window=window)
    rows = [packing.next_row() for _ in range(40)]
    seen = [number for row in rows for number in numbers(row)]
    pending = numbers(packing.pending)
    assert sorted(seen + pending) == list(range(source.taken))
    assert pending == sorted(pending)
    epochs = [number // len(sizes) for number in seen]
    assert epochs == sorted(epochs)
    for row in rows:
        assert 1 <= len(row) <= min(segments, window)
        assert sum(len(e.inputs) for e in row) <= LENGTHS[0]
        assert sum(len(e.targets) for e in row) <= LENGTHS[1]
    drawn_before = {}  # the number of rows when each example was drawn
    for place, row in enumerate(rows):
        known = sum(len(r) for r in rows[:place]) + window
        for number in range(len(drawn_before), known):
            drawn_before[number] = place
        assert all(place - drawn_before[number] < window for number in numbers(row))


def test_the_longest_that_fits_follows_the_oldest() -> None:
    sizes = [(9, 1), (12, 1), (11, 9), (11, 2), (2, 1), (11, 3), (20, 1), (1, 1)]
    packing = packer(Source(sizes))
    # Of several examples with the same length, the oldest is packed first. Example 2 has 9 targets.
    assert numbers(packing.next_row()) == [0, 3]
    assert numbers(packing.next_row()) == [1, 4, 7]


def test_a_group_is_sorted_before_its_batches_are_mixed() -> None:
    sizes = np.random.default_rng(0).permutation(2 * GROUP * 3) + 1
    source = Source([(int(size), 1) for size in sizes])
    sorter = LengthSorter(source.take, rows=3, seed=0)
    for group in (sizes[: GROUP * 3], sizes[GROUP * 3 :]):
        batches = [[sorter.next_row() for _ in range(3)] for _ in range(GROUP)]
        lengths = [[len(row[0].inputs) for row in batch] for batch in batches]
        assert all(batch == sorted(batch) for batch in lengths)
        assert sorted(lengths) != lengths
        assert [n for batch in sorted(lengths) for n in batch] == sorted(group)
        assert smallest_bucket(batches[0], ((lengths[0][2], 1), (999, 9))) == (lengths[0][2], 1)
        assert smallest_bucket(batches[0], ((lengths[0][2], 0), (999, 9))) == (999, 9)
