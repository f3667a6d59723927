"""Documents to examples: an endless stream with an exact position, from token ids alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from synthesizer_jax.data.objectives import Draws, ExampleFormat, Objective, SegmentObjective
from synthesizer_jax.data.task_streams import Example, ExampleStream

if TYPE_CHECKING:
    from synthesizer_jax.data.prepared import PreparedExamples

LONGEST_DOCUMENT = 65_536
"""Of a longer document one aligned chunk of this many tokens is read per epoch, as in T5."""

_CHUNKS, _SPLIT, _FIRST_SEGMENT = 0, 1, 2  # parts of a group's random numbers


class SegmentStream:
    """A shard of documents as examples of an objective, with another order and noise every epoch.

    Documents come in the order of `ExampleStream`. Empty ones are dropped, of long ones a chunk is drawn,
    groups of them (`SegmentObjective.documents`) are concatenated without padding and split into segments,
    as by T5's `select_random_chunk`, `reduce_concat_tokens` and `split_tokens`. No group contains documents
    of two epochs. All random numbers are a function of the seed and of the group's position.

    Args:
      documents: all documents of a task: no inputs, and token ids without EOS as targets.
      objective: what is made of them.
      form: lengths of the examples and vocabulary.
      shard: index of the virtual shard and number of shards.
      seed: of order, chunks, mixture and noise.
      shuffle: False keeps the documents' order.

    Raises:
      ValueError: the examples do not fit, or there are fewer documents than shards.
    """

    def __init__(
        self,
        documents: PreparedExamples,
        objective: Objective,
        form: ExampleFormat,
        *,
        shard: tuple[int, int],
        seed: np.random.SeedSequence,
        shuffle: bool = True,
    ):
        self._objectives, self._form, self._seed = objective.objectives, form, seed
        self._lengths = [member.segment_length(form) for member in self._objectives]
        rates = objective.rates or (1.0,) * len(self._lengths)
        self._boundaries = np.cumsum(rates, dtype=np.float64)
        self._boundaries /= self._boundaries[-1]
        self.name = documents.name
        self._source = ExampleStream(documents, shard=shard, seed=seed if shuffle else None)
        self._start, self._num_taken = self._source.position(), 0
        self._segments: list[tuple[np.ndarray, SegmentObjective]] = []

    def __next__(self) -> Example:
        if self._num_taken == len(self._segments):
            self._read_group()
        tokens, objective = self._segments[self._num_taken]
        draws = self._draws(_FIRST_SEGMENT + self._num_taken)
        self._num_taken += 1
        return objective.example(tokens, draws, self._form)

    @property
    def epoch(self) -> int:
        """The epoch of the last example, from 0."""
        return self._source.position()[0]

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

    def _draws(self, part: int) -> Draws:
        """Returns the random numbers of a part of this group."""
        return Draws(self._seed, *self._start, part)

    def _read_group(self) -> None:
        """Reads the next group and splits it: every segment is of an objective drawn by its rate."""
        self._start, self._num_taken = self._source.position(), 0
        tokens = np.concatenate(self._read_documents())
        uniform = self._draws(_SPLIT).uniform(-(-len(tokens) // min(self._lengths)))
        choices = np.searchsorted(self._boundaries[:-1], uniform, side="right").tolist()
        self._segments, start = [], 0
        while start < len(tokens):
            choice = choices[len(self._segments)]
            stop = start + self._lengths[choice]
            self._segments.append((tokens[start:stop], self._objectives[choice]))
            start = stop

    def _read_documents(self) -> list[np.ndarray]:
        """Returns the tokens of a group's documents, at least one, all of one epoch."""
        draws, first = self._draws(_CHUNKS), self._objectives[0]
        group: list[np.ndarray] = []
        first_epoch = epoch = self._start[0]
        while len(group) < first.documents:
            before = self._source.position()
            tokens = next(self._source)[1]
            tokens = tokens[tokens != self._form.ids.padding]
            if group and self._source.position()[0] != epoch:
                self._source.restore(before)
                break
            epoch = self._source.position()[0]
            if len(tokens):
                tokens = random_chunk(tokens, draws, length=LONGEST_DOCUMENT)
                end = [self._form.ids.end] * first.document_eos
                group.append(np.append(tokens, end).astype(np.int32))
            elif not group and epoch > first_epoch + 1:
                raise ValueError(f"there are no tokens in {self.name}; check how it is read")
        return group


def random_chunk(tokens: np.ndarray, draws: Draws, *, length: int) -> np.ndarray:
    """Returns one of the chunks that start at multiples of `length`; T5's `select_random_chunk`."""
    if len(tokens) <= length:  # without a random number
        return tokens
    (chunk,) = draws.integers(1, low=0, high=-(-len(tokens) // length)).tolist()
    return tokens[chunk * length : (chunk + 1) * length]
