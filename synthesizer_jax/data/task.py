"""What training and evaluation need of a task, wherever it is defined."""

from __future__ import annotations

import abc
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.postprocessors import Example
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.metrics import Value

if TYPE_CHECKING:
    import seqio


class Answers(NamedTuple):
    """What a model made of some examples; every field has one entry per example.

    Attributes:
      texts: the decoded answers.
      tokens: their token ids; None where label words were ranked instead of decoded.
      scores: ``[n]`` the log-probabilities of the answers in nats; None: not known.
      target_scores: ``[n]`` the log-probabilities of the targets in nats; None: not computed.
    """

    texts: Sequence[str]
    tokens: Sequence[np.ndarray] | None = None
    scores: np.ndarray | None = None
    target_scores: np.ndarray | None = None

    def select(self, indices: Sequence[int]) -> Answers:
        """Returns the answers to some of the examples."""
        chosen = list(indices)
        return Answers(
            [self.texts[i] for i in chosen],
            None if self.tokens is None else [self.tokens[i] for i in chosen],
            None if self.scores is None else self.scores[chosen],
            None if self.target_scores is None else self.target_scores[chosen],
        )


class Task(abc.ABC):
    """A task: `definitions.TaskDefinition`, or one of SeqIO's registry (`seqio_tasks.SeqioTask`)."""

    name: str
    """Its name."""

    objective: Objective | None = None
    """What makes training examples of its texts, if it has no inputs; None: they are targets."""

    @property
    @abc.abstractmethod
    def source(self) -> str:
        """Where its rows come from, such as a TFDS data set."""

    @property
    @abc.abstractmethod
    def label_words(self) -> tuple[str, ...] | None:
        """The allowed answers; None for free text."""

    @property
    @abc.abstractmethod
    def scores_targets(self) -> bool:
        """Whether a metric compares the log-probabilities of the targets (`Answers.target_scores`)."""

    @property
    @abc.abstractmethod
    def has_inputs(self) -> bool:
        """Whether its rows have inputs; otherwise they are texts."""

    @property
    @abc.abstractmethod
    def is_text(self) -> bool:
        """Whether it has no inputs and is measured by the loss of its texts, not by answers."""

    @abc.abstractmethod
    def prepared_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the splits that can be read, and their numbers of stored rows; None: not known.

        Args:
          data_dir: the directory of the data sets.
        """

    @abc.abstractmethod
    def to_seqio(self, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
        """Returns the SeqIO task with that vocabulary; equal arguments give the same object.

        Raises:
          ValueError: TFDS must not open the data set (see `stored.check_dataset`).
        """

    @abc.abstractmethod
    def is_labeled(self, example: Example) -> bool:
        """Returns whether the answer to a preprocessed row is known; in most test splits it is not."""

    @abc.abstractmethod
    def postprocess(
        self, answer: str, *, example: Example | None = None, is_target: bool = False
    ) -> Value:
        """Converts a decoded answer or a target string to the value that the metrics compare.

        Args:
          answer: the string.
          example: the preprocessed row that it belongs to.
          is_target: whether `answer` is the target.
        """

    @abc.abstractmethod
    def score(
        self,
        examples: Sequence[Example],
        answers: Answers,
        *,
        vocabulary: Vocabulary | None = None,
    ) -> Mapping[str, float]:
        """Returns the task's metrics.

        Args:
          examples: preprocessed rows whose answers are known.
          answers: those of a model to them.
          vocabulary: the vocabulary of the tokens; None: only the texts are used.
        """
