"""Text formats: how a row becomes inputs and targets, and an answer the value that metrics compare.

T5's formats (Raffel et al. 2020, appendix D). A format of one's own is a subclass of `TextFormat`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from synthesizer_jax.tasks import postprocessors
from synthesizer_jax.tasks.metrics import MultiRCTarget, ReCoRDTarget, Value
from synthesizer_jax.tasks.postprocessors import Example

if TYPE_CHECKING:
    import tensorflow as tf

Preprocessor: TypeAlias = "Callable[..., tf.data.Dataset]"


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """How a task's rows are written as text, and its answers are read.

    The values that `parse` and `parse_target` return are what the task's metrics compare.
    """

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words, indexed by the integer label; empty for free-text answers."""
        return ()

    @property
    def answers(self) -> tuple[str, ...] | None:
        """The allowed answers, for rank classification; None: free text."""
        return self.labels or None

    @property
    def has_inputs(self) -> bool:
        """Whether rows have inputs; those of language models have only targets."""
        return True

    @property
    def token_preprocessors(self) -> tuple[Preprocessor, ...]:
        """SeqIO preprocessors of the tokenized rows, which may be random and are not cached."""
        return ()

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns rows with the strings ``inputs`` and ``targets``; imports TensorFlow."""
        raise NotImplementedError

    def parse(self, answer: str, example: Example | None) -> Value:
        """Returns the value of a decoded answer.

        Args:
          answer: the string.
          example: the preprocessed row that it belongs to.
        """
        del example
        return postprocessors.label_index(answer, self.labels) if self.labels else answer

    def parse_target(self, target: str, example: Example | None) -> Value:
        """Returns the value of a target string; see `parse`."""
        return self.parse(target, example)

    def submission_label(self, value: Value) -> int | str:
        """Returns a parsed answer as leaderboards expect it; a label index is still to be named."""
        return max(int(value), 0)


@dataclasses.dataclass(frozen=True)
class Written(TextFormat):
    """Rows that have their inputs and targets as text already, such as imported files.

    Attributes:
      words: label words; empty for free text.
      numeric: answers are numbers, and metrics compare them.
      has_inputs: False: the task has targets only.
    """

    words: tuple[str, ...] = ()
    numeric: bool = False
    has_inputs: bool = True

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words."""
        return self.words

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the rows as they are, without ``inputs`` if the task has none."""
        if self.has_inputs:
            return dataset
        return dataset.map(lambda row: {k: v for k, v in row.items() if k != "inputs"})

    def parse(self, answer: str, example: Example | None) -> Value:
        """Returns the number, the index of the label, or the text."""
        return (
            postprocessors.parse_number(answer) if self.numeric else super().parse(answer, example)
        )


@dataclasses.dataclass(frozen=True)
class Classification(TextFormat):
    """``prefix key1: value1 key2: value2 …`` with a label word as target.

    Attributes:
      prefix: the first word of the input.
      features: the row's features in input order.
      words: label words, indexed by the integer label.
    """

    prefix: str
    features: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Label words, indexed by the integer label."""
        return self.words

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.classification`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.classification(
            dataset, prefix=self.prefix, features=self.features, labels=self.words
        )


@dataclasses.dataclass(frozen=True)
class Similarity(TextFormat):
    """STS-B: the target is the score, rounded to a fifth.

    Attributes:
      prefix: the first word of the input.
      features: the row's features in input order.
    """

    prefix: str
    features: tuple[str, ...]

    @property
    def answers(self) -> tuple[str, ...]:
        """The fifths from 0 to 5."""
        return tuple(f"{i / 5:.1f}" for i in range(26))

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.similarity`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.similarity(dataset, prefix=self.prefix, features=self.features)

    def parse(self, answer: str, example: Example | None) -> float:
        """Returns the number; NaN for anything else."""
        return postprocessors.parse_number(answer)

    def submission_label(self, value: float) -> str:
        """Returns the number between 0 and 5, with three digits."""
        return f"{min(max(value, 0.0), 5.0) if math.isfinite(value) else 0.0:.3f}"


@dataclasses.dataclass(frozen=True)
class MultiRC(TextFormat):
    """MultiRC: every candidate answer of a question is true or false.

    Attributes:
      words: the words for false and true.
    """

    words: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The words for false and true."""
        return self.words

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.multirc`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.multirc(dataset, labels=self.words)

    def parse_target(self, target: str, example: Example | None) -> MultiRCTarget:
        """Returns the label with the question that it belongs to."""
        return postprocessors.multirc_target(target, given(example), self.words)


@dataclasses.dataclass(frozen=True)
class ReCoRD(TextFormat):
    """ReCoRD: a passage, a query and its entities; one row per distinct answer."""

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.record`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.record(dataset)

    def parse_target(self, target: str, example: Example | None) -> ReCoRDTarget:
        """Returns all answers with the query that they belong to."""
        return postprocessors.record_target(given(example))

    def submission_label(self, value: str) -> str:
        """Returns the answer itself."""
        return value


@dataclasses.dataclass(frozen=True)
class _Referent(TextFormat):
    """Coreference as text: the model names the referent of a marked pronoun."""

    def parse(self, answer: str, example: Example | None) -> int:
        """Returns 1 if the answer names the row's candidate, else 0."""
        referent = postprocessors.to_text(given(example)["targets_pretokenized"])
        return postprocessors.matches_referent(answer, referent)

    def parse_target(self, target: str, example: Example | None) -> int:
        """Returns the row's label."""
        return int(given(example)["label"])


@dataclasses.dataclass(frozen=True)
class WSC(_Referent):
    """The Winograd schema challenge.

    Attributes:
      positive_only: leave out rows whose candidate is not the referent, for training.
    """

    positive_only: bool = False

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `coreference.wsc`."""
        from synthesizer_jax.tasks import coreference

        return coreference.wsc(dataset, positive_only=self.positive_only)

    def submission_label(self, value: int) -> str:
        """Returns ``True`` or ``False``."""
        return str(bool(max(value, 0)))


@dataclasses.dataclass(frozen=True)
class WNLI(_Referent):
    """WNLI as coreference."""

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `coreference.wnli`."""
        from synthesizer_jax.tasks import coreference

        return coreference.wnli(dataset)


@dataclasses.dataclass(frozen=True)
class PronounResolution(TextFormat):
    """Definite pronoun resolution; the referent is free text."""

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `coreference.dpr`."""
        from synthesizer_jax.tasks import coreference

        return coreference.dpr(dataset)


@dataclasses.dataclass(frozen=True)
class Translation(TextFormat):
    """``prefix source`` with the translation as target.

    Attributes:
      prefix: the instruction at the beginning of the input.
      features: names of the source and the target feature.
    """

    prefix: str
    features: tuple[str, str]

    def preprocess(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """See `preprocessors.translation`."""
        from synthesizer_jax.tasks import preprocessors

        return preprocessors.translation(dataset, prefix=self.prefix, features=self.features)


def given(example: Example | None) -> Example:
    """Returns the example.

    Raises:
      ValueError: there is none.
    """
    if example is None:
        raise ValueError("this format reads answers with their example; give it")
    return example
