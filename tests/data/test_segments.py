"""Tests how documents become examples: the contents of an epoch, shards, and continuing."""

import numpy as np
import pytest

from synthesizer_jax.data import segments
from synthesizer_jax.data.examples import Example
from synthesizer_jax.data.objectives import (
    OBJECTIVES,
    Denoising,
    Draws,
    ExampleFormat,
    ObjectiveMixture,
)
from synthesizer_jax.data.segments import SegmentStream

FORM = ExampleFormat(32, 32, 400)
LONG = 50
"""The number of tokens of a long document in these tests."""


class Numbered:
    """Documents of given lengths.

    Document d has the tokens ``1000 · d + 10``, ``1000 · d + 11``, …
    """

    name = "the numbers"
    is_resident = True

    def __init__(self, lengths: list[int]):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        tokens = 1000 * index + 10 + np.arange(self.lengths[index], dtype=np.int32)
        return np.zeros(0, np.int32), tokens


DOCUMENTS = Numbered([(7 * d) % 23 for d in range(300)])


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LONGEST_DOCUMENT", LONG)


def make(
    objective="span_3_15_u_u", *, documents=DOCUMENTS, shard=(0, 1), seed=0, form=FORM, shuffle=True
):
    """Returns the stream of an objective, which is given as an object or by its name."""
    chosen = OBJECTIVES[objective] if isinstance(objective, str) else objective
    start = np.random.SeedSequence(seed, spawn_key=(shard[0], 1))
    return SegmentStream(documents, chosen, form, shard=shard, seed=start, shuffle=shuffle)


def take(source: SegmentStream, count: int) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in next(source)] for _ in range(count)]


def group_of(source: SegmentStream) -> list[Example]:
    """Returns the examples of the next group of documents."""
    examples = [next(source)]
    start = source.position()[:-1]
    while True:
        before = source.position()
        example = next(source)
        if source.position()[:-1] != start:
            source.restore(before)
            return examples
        examples.append(example)


def epoch_of(source: SegmentStream, num_tokens: int) -> list[int]:
    """Returns the tokens of the next examples, until `num_tokens` tokens have been read."""
    examples: list[Example] = []
    while len(tokens_of(examples)) < num_tokens:
        examples.append(next(source))
    return tokens_of(examples)


def tokens_of(examples: list[Example]) -> list[int]:
    """Returns the tokens of full language-modeling examples, without EOS."""
    return [t for _, targets in examples for t in targets.tolist() if t != 1]


def all_tokens(documents: Numbered, indices: range) -> list[int]:
    return sorted(t for i in indices for t in documents[i][1].tolist())


def test_every_epoch_has_every_token_once_in_another_order() -> None:
    source = make("full_lm")
    total = all_tokens(DOCUMENTS, range(300))
    first, second = (epoch_of(source, len(total)) for _ in range(2))
    assert sorted(first) == sorted(second) == total
    assert first != second
    assert epoch_of(make("full_lm", shuffle=False), len(total)) == total
    for s in range(3):
        held = all_tokens(DOCUMENTS, range(s, 300, 3))
        assert sorted(epoch_of(make("full_lm", shard=(s, 3)), len(held))) == held
    assert take(make(seed=3), 20) == take(make(seed=3), 20) != take(make(seed=4), 20)


def test_groups_are_of_128_documents_of_an_epoch_and_segments_are_full() -> None:
    source = make("full_lm", shuffle=False)
    with_tokens = [d for d in range(300) if DOCUMENTS.lengths[d]]
    for _ in range(2):
        for chosen in (with_tokens[:128], with_tokens[128:256], with_tokens[256:]):
            group = group_of(source)
            flat = [t for _, targets in group for t in targets]
            assert flat == [t for d in chosen for t in [*DOCUMENTS[d][1].tolist(), 1]]
            assert all(len(targets) == 32 for _, targets in group[:-1])
    source = make("full_lm", documents=Numbered([5, 5, 5]))
    for _ in range(5):
        targets = next(source)[1]
        assert len(targets) == 18 and len({int(t) // 1000 for t in targets if t != 1}) == 3


def test_noise_differs_between_epochs() -> None:
    noisy = {str(x) for x in take(make(Denoising(0.4, 2.0), documents=Numbered([25])), 20)}
    assert len(noisy) > 10


def test_long_documents_give_one_aligned_chunk() -> None:
    source = make("full_lm", documents=Numbered([2 * LONG + 20]))
    seen = set()
    for _ in range(30):
        tokens = tokens_of(group_of(source))
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        seen.add((tokens[0] - 10, len(tokens)))
    assert seen == {(0, LONG), (LONG, LONG), (2 * LONG, 20)}


def test_segments_are_of_the_objectives_of_a_mixture_by_their_rates() -> None:
    members = Denoising(), Denoising(mean_span=8.0, mode=(7, 8))
    for rates, share in (((3.0, 1.0), 0.25), ((0.0, 1.0), 1), ((), 0.5)):
        source = make(ObjectiveMixture(members, rates), form=FORM._replace(vocab_size=10**6))
        chosen = [next(source)[0][:2].tolist() == [7, 8] for _ in range(2000)]
        assert abs(np.mean(chosen) - share) < 0.04


def test_the_order_of_documents_has_numbers_of_its_own() -> None:
    """The order of documents and `ExampleStream` never use the same random counters."""
    seed = np.random.SeedSequence(0)
    order = Draws(seed, 0).uniform(4)  # the order of epoch 0 and chunk 0
    for place in ((0, 0), (0, 0, 0), (0, 0, 0, 0)):
        assert (Draws(seed, *place).uniform(4) != order).all()


def test_documents_without_tokens_and_with_padding() -> None:
    with pytest.raises(ValueError, match=r"the numbers contains no tokens\. Check how it is r"):
        next(make(documents=Numbered([0] * 9)))
    lonely = make("full_lm", documents=Numbered([0] * 9 + [3] + [0] * 9), shuffle=False)
    assert take(lonely, 2) == [[[], [9010, 9011, 9012, 1]]] * 2

    class Padded(Numbered):
        def __getitem__(self, index: int) -> Example:
            return np.zeros(0), np.array([5, 0, 6, 0, 0], np.int64)

    example = next(make("full_lm", documents=Padded([5])))
    assert example[1].tolist() == [5, 6, 1] and example[1].dtype == np.int32
