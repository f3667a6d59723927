"""Turns documents into examples of a pre-training objective, as an endless stream.

The stream works on token ids, and its position can be saved and restored exactly.
"""

from __future__ import annotations

import numpy as np

from synthesizer_jax.data.examples import Example
from synthesizer_jax.data.objectives import Draws, ExampleFormat, Objective, SegmentObjective
from synthesizer_jax.data.prepared import PreparedExamples
from synthesizer_jax.data.task_streams import ExampleStream

LONGEST_DOCUMENT = 65_536
"""The maximum number of tokens of a document that are read per epoch.

As in T5, one chunk with this number of tokens is drawn from a longer document in every epoch.
Chunks begin at multiples of this number.
"""

# A group has separate random numbers for the chunks of long documents, for the objectives of its
# segments, and for the noise of every segment.
_CHUNKS, _SPLIT, _FIRST_SEGMENT = 0, 1, 2


class SegmentStream:
    """Makes examples of an objective from a virtual shard's documents, reordered in every epoch.

    Documents are read in the order of `ExampleStream`, and empty documents are dropped. If a
    document is long, only a random chunk of it is read. A group of documents
    (`SegmentObjective.documents`) is concatenated without padding and then split into segments.
    These steps are the same as those of T5's `select_random_chunk`, `reduce_concat_tokens` and
    `split_tokens`. All documents of a group belong to the same epoch. All random numbers are a
    function of the seed and of the position of the group, so the noise is different in every epoch.

    Args:
      documents: all documents of a task. The documents have no inputs, and their targets are token
        ids without EOS.
      objective: the objective that makes the examples.
      form: the lengths of the examples, and the vocabulary.
      shard: the index of the virtual shard, and the number of shards.
      seed: the seed of all random choices: the order of documents, the chunks, the objectives and
        the noise.
      shuffle: whether the documents are shuffled.

    Raises:
      ValueError: if the examples do not fit into the lengths, or if there are fewer documents than
        shards.
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
        """Returns the inputs and the targets of the next example."""
        if self._num_taken == len(self._segments):
            self._read_group()
        tokens, objective = self._segments[self._num_taken]
        draws = self._draws(_FIRST_SEGMENT + self._num_taken)
        self._num_taken += 1
        return objective.example(tokens, draws, self._form)

    @property
    def epoch(self) -> int:
        """The epoch of the last example, counted from 0."""
        return self._source.position()[0]

    def position(self) -> list[int]:
        """Returns the position of the current group, and the number of examples taken from it."""
        return [*self._start, self._num_taken]

    def restore(self, position: list[int]) -> None:
        """Continues at a position that `position` returned."""
        *start, num_taken = position
        self._source.restore(start)
        self._start, self._segments = start, []
        # The group is read again, because a position does not contain its tokens.
        if num_taken:
            self._read_group()
        self._num_taken = num_taken

    def _draws(self, part: int) -> Draws:
        """Returns the random numbers for a part of the current group, such as `_CHUNKS`."""
        return Draws(self._seed, *self._start, part)

    def _read_group(self) -> None:
        """Reads the next group of documents and splits it into segments.

        For every segment, an objective is drawn in proportion to its rate. The objective determines
        the length of the segment.
        """
        self._start, self._num_taken = self._source.position(), 0
        tokens = np.concatenate(self._read_documents())
        # Only the last segment may be shorter than the shortest length of the objectives. The
        # number of tokens divided by this length, rounded up, therefore bounds the number of
        # segments.
        uniform = self._draws(_SPLIT).uniform(-(-len(tokens) // min(self._lengths)))
        choices = np.searchsorted(self._boundaries[:-1], uniform, side="right").tolist()
        self._segments, start = [], 0
        while start < len(tokens):
            choice = choices[len(self._segments)]
            stop = start + self._lengths[choice]
            self._segments.append((tokens[start:stop], self._objectives[choice]))
            start = stop

    def _read_documents(self) -> list[np.ndarray]:
        """Returns the token ids of each document of the group, which has at least one document.

        All documents of the group belong to the same epoch.
        """
        draws = self._draws(_CHUNKS)
        # All objectives of a mixture have the same values of `documents` and `document_eos`.
        first = self._objectives[0]
        group: list[np.ndarray] = []
        first_epoch = epoch = self._start[0]
        while len(group) < first.documents:
            before = self._source.position()
            tokens = next(self._source)[1]
            tokens = tokens[tokens != self._form.ids.padding]
            # If this document is the first one of the next epoch, put it back for the next group.
            if group and self._source.position()[0] != epoch:
                self._source.restore(before)
                break
            epoch = self._source.position()[0]
            if len(tokens):
                tokens = random_chunk(tokens, draws, length=LONGEST_DOCUMENT)
                if first.document_eos:
                    tokens = np.append(tokens, self._form.ids.end)
                group.append(tokens.astype(np.int32))
            elif not group and epoch > first_epoch + 1:
                # If no document of this shard contained a token, this loop would never end.
                raise ValueError(f"{self.name} contains no tokens. Check how it is read.")
        return group


def random_chunk(tokens: np.ndarray, draws: Draws, *, length: int) -> np.ndarray:
    """Returns a random chunk of at most `length` tokens, like T5's `select_random_chunk`.

    Chunks begin at multiples of `length`. A document with at most `length` tokens is returned
    whole.
    """
    # No random number is drawn for a short document, so short documents do not change the random
    # chunks of later documents.
    if len(tokens) <= length:
        return tokens
    (chunk,) = draws.integers(1, low=0, high=-(-len(tokens) // length)).tolist()
    return tokens[chunk * length : (chunk + 1) * length]
