"""Documents to examples: what an epoch holds, shards, and going on at any step."""

import numpy as np
import pytest

from synthesizer_jax.data.objectives import (
    OBJECTIVES,
    CounterDraws,
    Documents,
    ExampleFormat,
    FullLM,
    SegmentStream,
    stream,
    ul2,
)
from synthesizer_jax.data.task_streams import Example, TaskStream

FORM = ExampleFormat(32, 32, 400)
LONG = 50
"""Tokens of a long document in these tests."""


class Numbered(Documents):
    """Document d has ``lengths[d]`` tokens: ``1000 · d + 10``, ``… + 11``, …"""

    def __init__(self, lengths: list[int]):
        tokens = [1000 * d + 10 + np.arange(n, dtype=np.int32) for d, n in enumerate(lengths)]
        super().__init__(tokens, name="the numbers")
        self.lengths = lengths


DOCUMENTS = Numbered([(7 * d) % 23 for d in range(300)])


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LONGEST_DOCUMENT", LONG)


def make(
    objective: str = "span_3_15_u_u",
    *,
    documents: Numbered = DOCUMENTS,
    shard: tuple[int, int] = (0, 1),
    seed: int = 0,
    shuffle: bool = True,
) -> SegmentStream:
    chosen = ul2() if objective == "ul2" else OBJECTIVES[objective]
    return SegmentStream(
        documents,
        chosen,
        FORM,
        shard=shard,
        seed=np.random.SeedSequence(seed, spawn_key=(shard[0], 1)),
        shuffle=shuffle,
    )


def take(source: TaskStream, count: int) -> list[list[list[int]]]:
    return [[ids.tolist() for ids in next(source)] for _ in range(count)]


def group_of(source: SegmentStream) -> list[Example]:
    """The examples of the next group of documents."""
    examples = [next(source)]
    start = source.position()[:-1]
    while True:
        before = source.position()
        example = next(source)
        if source.position()[:-1] != start:
            source.restore(before)
            return examples
        examples.append(example)


def epoch_of(source: SegmentStream, num_tokens: int) -> list[Example]:
    """The next examples, with as many tokens as an epoch has."""
    examples: list[Example] = []
    while len(tokens_of(examples)) < num_tokens:
        examples.append(next(source))
    return examples


def tokens_of(examples: list[Example]) -> list[int]:
    """The tokens of full language modeling, without EOS."""
    return [t for _, targets in examples for t in targets.tolist() if t != 1]


def all_tokens(documents: Numbered, indices: range | None = None) -> list[int]:
    chosen = range(len(documents)) if indices is None else indices
    return sorted(t for i in chosen for t in documents[i][1].tolist())


def test_every_epoch_has_every_token_once_in_another_order() -> None:
    source, total = make("full_lm"), all_tokens(DOCUMENTS)
    first, second = (tokens_of(epoch_of(source, len(total))) for _ in range(2))
    assert sorted(first) == sorted(second) == total
    assert first != second
    stored = tokens_of(epoch_of(make("full_lm", shuffle=False), len(total)))
    assert stored == total


def test_documents_end_with_eos_and_segments_are_full() -> None:
    source = make("full_lm", shuffle=False)
    examples = take(source, 12)
    assert all(not inputs and len(targets) == 32 for inputs, targets in examples)
    flat = [t for _, targets in examples for t in targets]
    expected = [
        t for d in range(60) for t in [*DOCUMENTS[d][1].tolist(), 1] if DOCUMENTS.lengths[d]
    ]
    assert flat == expected[: len(flat)]


def test_groups_are_of_128_documents_with_tokens() -> None:
    source = make("full_lm", shuffle=False)
    with_tokens = [d for d in range(300) if DOCUMENTS.lengths[d]]
    for _ in range(2):
        for chosen in (with_tokens[:128], with_tokens[128:256], with_tokens[256:]):
            group = group_of(source)
            expected = [t for d in chosen for t in DOCUMENTS[d][1].tolist()]
            assert tokens_of(group) == expected
            assert all(len(targets) == 32 for _, targets in group[:-1])


def test_noise_is_another_every_epoch() -> None:
    source = make("iid_15_u_u", documents=Numbered([25]), shuffle=False)
    noisy = {str(example) for example in take(source, 20)}
    assert len(noisy) > 10


def test_long_documents_give_one_aligned_chunk() -> None:
    source = make("full_lm", documents=Numbered([2 * LONG + 20]))
    seen = set()
    for _ in range(30):
        tokens = tokens_of(group_of(source))
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        seen.add((tokens[0] - 10, len(tokens)))
    assert seen == {(0, LONG), (LONG, LONG), (2 * LONG, 20)}


def test_shards_are_disjoint_and_cover_everything() -> None:
    for s in range(3):
        held = all_tokens(DOCUMENTS, range(s, 300, 3))
        assert sorted(tokens_of(epoch_of(make("full_lm", shard=(s, 3)), len(held)))) == held


@pytest.mark.parametrize("name", ["span_3_15_u_u", "prefix_lm", "full_lm", "masked_lm"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_restored_stream_goes_on_at_any_step(name: str, shuffle: bool) -> None:
    documents = Numbered([*DOCUMENTS.lengths[:40], 3 * LONG])
    source = make(name, documents=documents, shuffle=shuffle)
    positions, examples = [], []
    for _ in range(60):  # several epochs
        positions.append(source.position())
        examples += take(source, 1)
    assert len({tuple(position) for position in positions}) == len(positions)
    for step in range(60):
        restored = make(name, documents=documents, shuffle=shuffle)
        restored.restore(positions[step])
        assert restored.position() == positions[step]
        assert take(restored, min(3, 60 - step)) == examples[step : step + 3]


def test_a_stream_of_a_mixture_goes_on_at_any_step() -> None:
    source = make("ul2")
    first = take(source, 25)
    position = source.position()
    expected = take(source, 40)
    source.restore(position)
    assert take(source, 40) == expected
    assert take(make("ul2"), 25) == first


def test_the_first_epoch_is_shuffled_in_chunks() -> None:
    """No one waits for all documents to be read."""
    source = make("full_lm", documents=Numbered([4] * 3000))
    first = {t // 1000 for example in group_of(source) for t in tokens_of([example])}
    assert len(first) == 128 and max(first) < 1024


def test_the_seed_decides() -> None:
    assert take(make(seed=3), 20) == take(make(seed=3), 20)
    assert take(make(seed=3), 20) != take(make(seed=4), 20)


def test_the_order_of_documents_has_numbers_of_its_own() -> None:
    """The counters of noise never coincide with those of `ExampleStream`."""
    seed = np.random.SeedSequence(0)
    order = CounterDraws(seed, 0).uniform(4)  # what the order of epoch 0, chunk 0 is drawn from
    for place in ((0, 0), (0, 0, 0), (0, 0, 0, 0)):
        assert (CounterDraws(seed, *place).uniform(4) != order).all()


def test_documents_without_tokens() -> None:
    with pytest.raises(
        ValueError, match="there are no tokens in the numbers; check how it is read"
    ):
        next(make(documents=Numbered([0] * 9)))
    lonely = make("full_lm", documents=Numbered([0] * 9 + [3] + [0] * 9), shuffle=False)
    assert take(lonely, 2) == [[[], [9010, 9011, 9012, 1]]] * 2


def test_padding_inside_documents_is_dropped() -> None:
    class Padded(Numbered):
        def __getitem__(self, index: int) -> Example:
            return np.zeros(0), np.array([5, 0, 6, 0, 0], np.int64)

    example = next(make("full_lm", documents=Padded([5])))
    assert example[1].tolist() == [5, 6, 1] and example[1].dtype == np.int32


def test_settings_that_do_not_fit_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match=r"targets_length is 3; .* needs 8 or more"):
        SegmentStream(
            DOCUMENTS,
            OBJECTIVES["span_3_15_u_u"],
            FORM._replace(targets_length=3),
            shard=(0, 1),
            seed=np.random.SeedSequence(0),
        )
    with pytest.raises(ValueError, match="the numbers has 2 examples, fewer than shards=3"):
        make(documents=Numbered([5, 5]), shard=(2, 3))


def test_groups_are_not_mixed_across_epochs() -> None:
    source = SegmentStream(
        Numbered([5, 5, 5]),
        FullLM(),
        FORM,
        shard=(0, 1),
        seed=np.random.SeedSequence(0),
    )
    for _ in range(5):
        targets = next(source)[1]
        assert len(targets) == 18 and len({int(t) // 1000 for t in targets if t != 1}) == 3
