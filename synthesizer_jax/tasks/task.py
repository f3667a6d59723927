"""What training and evaluation need of a task."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.tasks import metrics, postprocessors, stored
from synthesizer_jax.tasks.metrics import Value
from synthesizer_jax.tasks.postprocessors import Example, to_text

if TYPE_CHECKING:
    import tensorflow as tf

TRAINED = ("train", "validation", "test")

Preprocessor: TypeAlias = "Callable[..., tf.data.Dataset]"


@contextlib.contextmanager
def errors_of(function: str, task: str) -> Iterator[None]:
    """Names a task and its function in what the function raises, which may be a user's code.

    Raises:
      ValueError: the function has raised anything; that is the cause.
    """
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{function} of the task {task!r} raised {type(error).__name__}: {error}; correct it "
            "(SYNTHESIZER_JAX_TRACEBACK=1 shows where it is)"
        ) from error


class Answers(NamedTuple):
    """What a model made of some examples; every field has one entry per example.

    Attributes:
      texts: the decoded answers.
      tokens: their token ids before EOS; None where label words were ranked instead of decoded.
      scores: ``[n]`` the log-probabilities of the answers in nats, EOS included; None: not known.
      target_scores: ``[n]`` the log-probabilities of the targets in nats; None: not computed.
    """

    texts: list[str]
    tokens: Sequence[np.ndarray] | None = None
    scores: np.ndarray | None = None
    target_scores: np.ndarray | None = None

    def select(self, indices: Sequence[int]) -> Answers:
        """Returns the answers to some of the examples."""
        chosen = list(indices)
        pick = lambda x: x[chosen] if isinstance(x, np.ndarray) else [x[i] for i in chosen]
        return Answers._make(None if part is None else pick(part) for part in self)


@dataclasses.dataclass(frozen=True)
class Task:
    """A task over a TFDS data set: functions as those of a SeqIO task, and what such a task lacks.

    Creating it loads nothing; `preparation` reads it. Tasks of SeqIO's registry are a subclass of it,
    `seqio_tasks.RegisteredTask`.

    Attributes:
      name: T5's name.
      dataset: TFDS data set and configuration, such as ``glue/cola``.
      preprocess: makes rows with the strings ``inputs`` and ``targets`` of those of the data set; None:
        they have them.
      metrics: metric functions of targets and predictions.
      splits: the splits of the data set that the task exposes.
      label_words: the allowed answers, which are ranked instead of decoded; None: free text.
      postprocess_fn: makes of an answer, by name its ``example`` and whether it ``is_target``, the value
        that metrics compare; None: the index among the label words, −1 if it is none of them, or the text.
      has_inputs: whether rows have inputs; otherwise they are texts.
      sentinel: whether the task uses T5's sentinel format.
      objective: what makes training examples of its texts, which have no inputs; None: see
        `DataConfig.objective`.
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
        """Whether a metric compares the log-probabilities of the targets (`Answers.target_scores`)."""
        return False

    @property
    def is_text(self) -> bool:
        """Whether it has no inputs and is measured by the loss of its texts, not by answers."""
        return not self.has_inputs

    def stored_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the numbers of rows of the splits whose data set is in `data_dir`; None: not known."""
        directory = stored.newest_version(self.dataset, data_dir)
        rows = {} if directory is None else stored.stored_splits(directory)
        return {split: rows[split] for split in self.splits if split in rows}

    def source_version(self, split: str, data_dir: pathlib.Path) -> str | None:
        """Returns what changes when the rows of a split are written again; None: nothing tells."""
        directory = stored.newest_version(self.dataset, data_dir)
        return None if directory is None else stored.describe_split(self.dataset, directory, split)

    def is_labeled(self, example: Example) -> bool:
        """Returns whether the answer to a preprocessed row is known; in most test splits it is not."""
        return postprocessors.is_labeled(example)

    def postprocess(self, answer: str, *, example: Example | None = None, is_target: bool = False) -> Value:
        """Converts a decoded answer, or the target, of a preprocessed row to what metrics compare."""
        if self.sentinel and answer.startswith(postprocessors.SENTINEL):
            answer = answer.removeprefix(postprocessors.SENTINEL).strip()
        if self.postprocess_fn is not None:
            with errors_of("the postprocess_fn", self.name):
                return self.postprocess_fn(answer, example=example, is_target=is_target)
        words = self.label_words
        return answer if words is None else postprocessors.label_index(answer, words)

    def score(
        self, examples: Sequence[Example], answers: Answers, *, vocabulary: Vocabulary | None = None
    ) -> dict[str, float]:
        """Returns the task's metrics, T5's in percent.

        Args:
          examples: preprocessed rows whose answers are known.
          answers: those of a model to them.
          vocabulary: the vocabulary of the tokens; None: only the texts are used.
        """
        targets = [
            self.postprocess(to_text(row["targets_pretokenized"]), example=row, is_target=True)
            for row in examples
        ]
        predictions = [
            self.postprocess(text, example=row) for text, row in zip(answers.texts, examples, strict=True)
        ]
        result: dict[str, Any] = {}
        for metric in self.metrics:
            with errors_of(f"the metric {getattr(metric, '__name__', metric)}", self.name):
                result |= metric(targets, predictions)
        return result
