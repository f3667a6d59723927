"""Documents to examples: an endless stream with an exact position, from token ids alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from synthesizer_jax.data.objectives.draws import CounterDraws, Draws
from synthesizer_jax.data.objectives.objective import ExampleFormat, Objective, Segment
from synthesizer_jax.data.task_streams import Example, Examples, ExampleStream
from synthesizer_jax.data.vocabularies import EOS, PAD

LONGEST_DOCUMENT = 65_536
"""Of a longer document one aligned chunk of this many tokens is read per epoch, as in T5."""

_CHUNKS, _SPLIT, _FIRST_SEGMENT = 0, 1, 2  # parts of a group's random numbers


class Documents:
    """Documents in memory: no inputs, and token ids without EOS as targets.

    Args:
      documents: the token ids of every document.
      name: of the documents, for messages.
    """

    def __init__(self, documents: Sequence[np.ndarray], *, name: str):
        self.name, self.is_resident = name, True
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Example:
        return np.zeros(0, np.int32), self._documents[index]


class SegmentStream:
    """A shard of documents as examples of an objective, with another order and noise every epoch.

    Documents come in the order of `ExampleStream`. Empty ones are dropped, of long ones a
    chunk is drawn, groups of ``objective.documents`` are concatenated without padding and split
    into segments, as by T5's `select_random_chunk`, `reduce_concat_tokens` and `split_tokens`. No
    group contains documents of two epochs. All random numbers are a function of the seed and of
    the group's position.

    Args:
      documents: all documents of a task.
      objective: what is made of them.
      form: lengths of the examples and vocabulary.
      shard: index of the virtual shard and number of shards.
      seed: of order, chunks, mixture and noise.
      shuffle: False keeps the documents' order.

    Raises:
      ValueError: the examples do not fit, or there are fewer documents than shards.
    """

    index: int | None = None

    def __init__(
        self,
        documents: Examples,
        objective: Objective,
        form: ExampleFormat,
        *,
        shard: tuple[int, int],
        seed: np.random.SeedSequence,
        shuffle: bool = True,
    ):
        objective.check(form)
        self._objective, self._form, self._seed = objective, form, seed
        self._name = documents.name
        self._source = ExampleStream(documents, shard=shard, seed=seed if shuffle else None)
        self._start, self._num_taken = self._source.position(), 0
        self._tokens = np.zeros(0, np.int32)
        self._segments: list[Segment] = []

    def __next__(self) -> Example:
        if self._num_taken == len(self._segments):
            self._read_group()
        start, stop, objective = self._segments[self._num_taken]
        draws = self._draws().fork(_FIRST_SEGMENT + self._num_taken)
        self._num_taken += 1
        return objective.example(self._tokens[start:stop], draws, self._form)

    @property
    def epoch(self) -> int:
        """The epoch of the last example, from 0."""
        return self._source.position()[0]

    def recall(self, index: int) -> Example:
        """Is not called: its examples have no index."""
        raise NotImplementedError

    def position(self) -> list[int]:
        """Returns where the group's documents begin and the number of examples taken from it."""
        return [*self._start, self._num_taken]

    def restore(self, position: list[int]) -> None:
        """Continues at a position that `position` returned."""
        *start, num_taken = position
        self._source.restore(start)
        self._start, self._segments = start, []
        if num_taken:
            self._read_group()
        self._num_taken = num_taken

    def _draws(self) -> CounterDraws:
        """Returns the random numbers of this group."""
        return CounterDraws(self._seed, *self._start)

    def _read_group(self) -> None:
        """Reads the next group and splits it."""
        self._start, self._num_taken = self._source.position(), 0
        self._tokens = np.concatenate(self._read_documents(self._draws().fork(_CHUNKS)))
        self._segments = self._objective.split(
            len(self._tokens), self._draws().fork(_SPLIT), self._form
        )

    def _read_documents(self, draws: Draws) -> list[np.ndarray]:
        """Returns the tokens of a group's documents, at least one, all of one epoch."""
        group: list[np.ndarray] = []
        first_epoch = epoch = self._start[0]
        while len(group) < self._objective.documents:
            before = self._source.position()
            tokens = next(self._source)[1]
            tokens = tokens[tokens != PAD]
            if group and self._source.position()[0] != epoch:
                self._source.restore(before)
                break
            epoch = self._source.position()[0]
            if len(tokens):
                group.append(self._as_document(tokens, draws))
            elif not group and epoch > first_epoch + 1:
                raise ValueError(f"there are no tokens in {self._name}; check how it is read")
        return group

    def _as_document(self, tokens: np.ndarray, draws: Draws) -> np.ndarray:
        """Returns the tokens, or a random chunk of them, with the document's EOS."""
        if len(tokens) > LONGEST_DOCUMENT:
            tokens = random_chunk(tokens, draws, length=LONGEST_DOCUMENT)
        if self._objective.document_eos:
            tokens = np.append(tokens, EOS)
        return tokens.astype(np.int32)


def random_chunk(tokens: np.ndarray, draws: Draws, *, length: int) -> np.ndarray:
    """Returns one of the chunks that start at multiples of `length`; T5's `select_random_chunk`.

    Args:
      tokens: ids ``[n]``.
      draws: random numbers.
      length: number of tokens of a chunk; the last one may have fewer.
    """
    num_chunks = -(-len(tokens) // length)
    (chunk,) = draws.integers(1, low=0, high=num_chunks).tolist()
    return tokens[chunk * length : (chunk + 1) * length]
