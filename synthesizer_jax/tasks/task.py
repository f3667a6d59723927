"""Defines the class `Task`, which contains all that training and evaluation need to know."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from synthesizer_jax.base.messages import end_sentence
from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.tasks import metrics, postprocessors, stored
from synthesizer_jax.tasks.metrics import Value
from synthesizer_jax.tasks.postprocessors import Example, to_text

if TYPE_CHECKING:
    import tensorflow as tf

TRAINED = ("train", "validation", "test")
"""The splits that a task has by default."""

Preprocessor: TypeAlias = "Callable[..., tf.data.Dataset]"
"""A function that transforms a data set of rows."""


@contextlib.contextmanager
def errors_of(function: str, task: str) -> Iterator[None]:
    """Context manager that names a task and its function in the error if the function fails.

    The function may be a user's code, which can raise any exception.

    Args:
      function: a description of the function, such as ``The postprocess_fn``.
      task: the name of the task.

    Raises:
      ValueError: if the function raises an exception. The original exception is the cause.
    """
    try:
        yield
    except Exception as error:
        # The error of a plain `assert` has no message.
        name = type(error).__name__
        text = f"{name}: {error}" if str(error) else name
        raise ValueError(
            f"{function} of the task {task!r} raised {end_sentence(text)} Correct it. "
            "SYNTHESIZER_JAX_TRACEBACK=1 shows the traceback."
        ) from error


class Answers(NamedTuple):
    """The answers of a model to several examples. Every field has one entry per example.

    Attributes:
      texts: the decoded answers.
      tokens: the token ids of the answers before EOS. `None` means that label words were ranked
        instead of decoding answers.
      scores: the log-probabilities of the answers in nats, including EOS, ``[n]``. `None` means
        that they are not known.
      target_scores: the log-probabilities of the targets in nats, ``[n]``. `None` means that they
        were not computed.
    """

    texts: list[str]
    tokens: Sequence[np.ndarray] | None = None
    scores: np.ndarray | None = None
    target_scores: np.ndarray | None = None

    def select(self, indices: Sequence[int]) -> Answers:
        """Returns the answers to the examples with the given indices."""
        chosen = list(indices)

        def pick(part: Any) -> Any:
            """Returns the entries of a field at the given indices."""
            if part is None:
                return None
            return part[chosen] if isinstance(part, np.ndarray) else [part[i] for i in chosen]

        return Answers._make(map(pick, self))


@dataclasses.dataclass(frozen=True)
class Task:
    """A task on a TFDS data set.

    A task has functions for preprocessing, postprocessing and metrics, like a SeqIO task. A task
    also has attributes that SeqIO tasks lack, such as label words. Creating a task does not read
    its data. The package `preparation` reads the data. Tasks of SeqIO's registry belong to the
    subclass `seqio_tasks.RegisteredTask`.

    Attributes:
      name: the name of the task. Tasks of T5 have T5's names.
      dataset: the TFDS data set and its configuration, such as ``glue/cola``.
      preprocess: a function that converts the rows of the data set to rows with the strings
        ``inputs`` and ``targets``. Use `None` if the rows of the data set have these strings
        already.
      metrics: functions that compute scores from targets and predictions.
      splits: the splits of the data set that the task offers.
      label_words: the allowed answers. The allowed answers are ranked by their probabilities, so
        nothing is decoded. `None` means that answers are free text.
      postprocess_fn: a function that converts an answer to the value that metrics compare. The
        keyword arguments of this function are ``example`` and ``is_target``. If `postprocess_fn` is
        `None`, the value is the text of the answer, or, if the task has label words, the index of
        the answer among the label words, which is −1 for any other answer.
      has_inputs: whether rows have inputs. If `has_inputs` is `False`, rows have only targets,
        which are texts.
      sentinel: whether the task uses T5's sentinel format.
      objective: the objective that turns the texts of a task without inputs into training examples.
        If `objective` is `None`, `DataConfig.objective` is used.
    """

    name: str
    dataset: str
    preprocess: Preprocessor | None = None
    metrics: tuple[metrics.Metric, ...] = (metrics.accuracy,)
    splits: tuple[str, ...] = TRAINED
    label_words: tuple[str, ...] | None = None
    postprocess_fn: Callable[..., Value] | None = None
    has_inputs: bool = True
    sentinel: bool = False
    objective: Objective | None = None

    @property
    def scores_targets(self) -> bool:
        """Whether a metric needs the log-probabilities of the targets (`Answers.target_scores`)."""
        return False

    @property
    def is_text(self) -> bool:
        """Whether the task consists of texts without inputs.

        A task without inputs is evaluated by the loss of its texts, and not by its answers.
        """
        return not self.has_inputs

    def stored_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the number of rows of each split of the data set in `data_dir`.

        A number is `None` if it is not known.
        """
        directory = stored.newest_version(self.dataset, data_dir)
        rows = {} if directory is None else stored.stored_splits(directory)
        return {split: rows[split] for split in self.splits if split in rows}

    def source_version(self, split: str, data_dir: pathlib.Path) -> str | None:
        """Returns a description of a split's rows, which changes if the rows are written again.

        The result is `None` if such changes cannot be detected.
        """
        directory = stored.newest_version(self.dataset, data_dir)
        return None if directory is None else stored.describe_split(self.dataset, directory, split)

    def is_labeled(self, example: Example) -> bool:
        """Returns whether the answer to a preprocessed row is known.

        Test splits often hide answers.
        """
        return postprocessors.is_labeled(example)

    def postprocess(
        self, answer: str, *, example: Example | None = None, is_target: bool = False
    ) -> Value:
        """Converts an answer to a preprocessed row to the value that metrics compare.

        Args:
          answer: the decoded text of the answer, or of the row's target.
          example: the preprocessed row.
          is_target: whether `answer` is the target of the row.

        Raises:
          ValueError: if the task's `postprocess_fn` fails.
        """
        if self.sentinel and answer.startswith(postprocessors.SENTINEL):
            answer = answer.removeprefix(postprocessors.SENTINEL).strip()
        if self.postprocess_fn is not None:
            with errors_of("The postprocess_fn", self.name):
                return self.postprocess_fn(answer, example=example, is_target=is_target)
        words = self.label_words
        return answer if words is None else postprocessors.label_index(answer, words)

    def score(
        self, examples: Sequence[Example], answers: Answers, *, vocabulary: Vocabulary | None = None
    ) -> dict[str, float]:
        """Returns the scores of the task's metrics. The scores of T5's metrics are in percent.

        Args:
          examples: preprocessed rows whose answers are known.
          answers: the answers of a model to these rows.
          vocabulary: the vocabulary of the tokens. `None` is allowed if the metrics use only the
            texts of the answers.

        Raises:
          ValueError: if a metric or the task's `postprocess_fn` fails.
        """
        targets = [
            self.postprocess(to_text(row["targets_pretokenized"]), example=row, is_target=True)
            for row in examples
        ]
        predictions = [
            self.postprocess(text, example=row)
            for text, row in zip(answers.texts, examples, strict=True)
        ]
        result: dict[str, Any] = {}
        for metric in self.metrics:
            with errors_of(f"The metric {getattr(metric, '__name__', metric)}", self.name):
                result |= metric(targets, predictions)
        return result
