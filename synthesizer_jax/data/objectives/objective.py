"""What an objective is: documents to segments of tokens, a segment to inputs and targets."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import numpy as np

from synthesizer_jax.data.objectives.draws import Draws
from synthesizer_jax.data.task_streams import Example
from synthesizer_jax.data.vocabularies import EOS

GROUP = 128
"""T5 concatenates this many documents before it splits them into segments."""


class ExampleFormat(NamedTuple):
    """What examples must fit.

    Attributes:
      inputs_length: largest number of input tokens, including EOS.
      targets_length: largest number of target tokens, including EOS.
      vocab_size: number of ids, including sentinels.
    """

    inputs_length: int
    targets_length: int
    vocab_size: int


class Segment(NamedTuple):
    """The tokens ``start`` to ``stop - 1`` of a group of documents, and what makes them an example."""

    start: int
    stop: int
    objective: SegmentObjective


class Objective(abc.ABC):
    """A self-supervised task on documents of tokens: a frozen dataclass, saved as JSON.

    Attributes:
      documents: number of consecutive documents that are concatenated before they are split into
        segments; 1 keeps documents apart.
      document_eos: whether every document ends with EOS. The examples then get no EOS of their own.
      makes_inputs: whether examples have inputs.
    """

    makes_inputs: ClassVar[bool] = True
    documents: int
    document_eos: bool = False

    @abc.abstractmethod
    def check(self, form: ExampleFormat) -> None:
        """Raises a `ValueError` if the examples do not fit."""

    @abc.abstractmethod
    def split(self, num_tokens: int, draws: Draws, form: ExampleFormat) -> list[Segment]:
        """Returns the consecutive segments of a group of `num_tokens` tokens."""


class SegmentObjective(Objective):
    """An objective that makes one example of every segment, all of the same length."""

    @abc.abstractmethod
    def segment_length(self, form: ExampleFormat) -> int:
        """Returns the number of tokens of a segment; the last one of a group may be shorter.

        Raises:
          ValueError: the examples do not fit.
        """

    @abc.abstractmethod
    def example(self, tokens: np.ndarray, draws: Draws, form: ExampleFormat) -> Example:
        """Returns inputs and targets of a segment, int32, at most the lengths of `form`.

        Args:
          tokens: ids ``[length]``, at least one.
          draws: random numbers of this segment.
          form: lengths and vocabulary.
        """

    def check(self, form: ExampleFormat) -> None:
        """Raises a `ValueError` if the examples do not fit."""
        self.segment_length(form)

    def split(self, num_tokens: int, draws: Draws, form: ExampleFormat) -> list[Segment]:
        """Returns the consecutive segments of a group of `num_tokens` tokens."""
        del draws
        length = self.segment_length(form)
        starts = range(0, num_tokens, length)
        return [Segment(start, min(start + length, num_tokens), self) for start in starts]


def trim_and_append_eos(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns at most ``length - 1`` tokens and EOS, int32; SeqIO's `append_eos_after_trim`."""
    return np.append(tokens[: length - 1], EOS).astype(np.int32)


def check_documents(documents: int) -> None:
    """Raises a `ValueError` unless there is a document per group."""
    if documents < 1:
        raise ValueError(f"documents is {documents}; allowed: 1 or more")


def check_length(field: str, length: int, *, needed: int, reason: str) -> None:
    """Raises a `ValueError` if a length of the format is too small."""
    if length < needed:
        raise ValueError(f"{field} is {length}; {reason} needs {needed} or more")
