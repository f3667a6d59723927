"""What training and evaluation need of a task."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.tasks import metrics, postprocessors, stored
from synthesizer_jax.tasks.formats import TextFormat
from synthesizer_jax.tasks.metrics import Value
from synthesizer_jax.tasks.postprocessors import Example

if TYPE_CHECKING:
    import seqio
    import tensorflow as tf

TRAINED = ("train", "validation", "test")


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


@dataclasses.dataclass(frozen=True)
class Task:
    """A task over a TFDS data set; creating it loads nothing.

    `to_seqio` makes the SeqIO task that reads it. Tasks of SeqIO's registry are a subclass of it,
    `seqio_tasks.RegisteredTask`.

    Attributes:
      name: T5's name.
      dataset: TFDS data set and configuration, such as ``glue/cola``.
      format: how its rows are written as text, and answers are read.
      metrics: metric functions of targets and predictions.
      splits: the splits of the data set that the task exposes.
      rename: pairs (old, new) of feature names; features are renamed before preprocessing.
      sentinel: whether the task uses T5's sentinel format.
      objective: what makes training examples of its texts, which have no inputs; None: see
        `DataConfig.objective`.
    """

    name: str
    dataset: str
    format: TextFormat
    metrics: tuple[metrics.Metric, ...] = (metrics.accuracy,)
    splits: tuple[str, ...] = TRAINED
    rename: tuple[tuple[str, str], ...] = ()
    sentinel: bool = False
    objective: Objective | None = None

    @property
    def label_words(self) -> tuple[str, ...] | None:
        """The allowed answers; None for free text."""
        return self.format.answers

    @property
    def scores_targets(self) -> bool:
        """Whether a metric compares the log-probabilities of the targets (`Answers.target_scores`)."""
        return False

    @property
    def has_inputs(self) -> bool:
        """Whether its rows have inputs; otherwise they are texts."""
        return self.format.has_inputs

    @property
    def is_text(self) -> bool:
        """Whether it has no inputs and is measured by the loss of its texts, not by answers."""
        return not self.has_inputs

    def stored_splits(self, data_dir: pathlib.Path) -> dict[str, int | None]:
        """Returns the numbers of rows of the splits whose data set is in `data_dir`; None: not known."""
        versions = stored.prepared_versions(self.dataset, data_dir)
        if not versions:
            return {}
        found = stored.stored_splits(list(versions.values())[-1])
        return {split: found[split] for split in self.splits if split in found}

    def source_version(self, split: str, data_dir: pathlib.Path) -> str | None:
        """Returns what changes when the rows of a split are written again; None: nothing tells."""
        versions = stored.prepared_versions(self.dataset, data_dir)
        if not versions:
            return None
        return stored.describe_split(self.dataset, list(versions.values())[-1], split)

    def to_seqio(self, vocabulary: Vocabulary, data_dir: pathlib.Path) -> seqio.Task:
        """Returns the SeqIO task over the newest version of the data set.

        Raises:
          ValueError: TFDS must not open the data set (see `stored.check_dataset`).
        """
        import seqio

        version, directory = list(stored.prepared_versions(self.dataset, data_dir).items())[-1]
        stored.check_dataset(directory)
        seqio_vocabulary = vocabulary.to_seqio()
        return seqio.Task(
            self.name,
            source=seqio.TfdsDataSource(
                f"{self.dataset}:{version}",
                tfds_data_dir=str(data_dir),
                splits=list(self.stored_splits(data_dir)),
            ),
            preprocessors=self.seqio_preprocessors(vocabulary),
            postprocess_fn=functools.partial(_postprocess, self),
            output_features={
                "inputs": seqio.Feature(seqio_vocabulary, add_eos=True, required=False),
                "targets": seqio.Feature(seqio_vocabulary, add_eos=True),
            },
            metric_fns=list(self.metrics),
        )

    def seqio_preprocessors(self, vocabulary: Vocabulary) -> list[Callable[..., tf.data.Dataset]]:
        """Returns the SeqIO preprocessors that turn stored rows into token ids."""
        import seqio

        from synthesizer_jax.tasks import preprocessors

        steps: list[Callable[..., tf.data.Dataset]] = []
        if self.rename:
            steps.append(functools.partial(preprocessors.rename_features, names=dict(self.rename)))
        steps += [
            self.format.preprocess,
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            *self.format.token_preprocessors,
        ]
        if self.sentinel:
            sentinel_id = vocabulary.vocab_size - 1
            steps.append(functools.partial(preprocessors.append_sentinel, sentinel=sentinel_id))
        return [*steps, seqio.preprocessors.append_eos_after_trim]

    def is_labeled(self, example: Example) -> bool:
        """Returns whether the answer to a preprocessed row is known; in most test splits it is not."""
        return postprocessors.is_labeled(example)

    def postprocess(
        self, answer: str, *, example: Example | None = None, is_target: bool = False
    ) -> Value:
        """Converts a decoded answer or a target string to the value that the metrics compare.

        Args:
          answer: the string.
          example: the preprocessed row that it belongs to.
          is_target: whether `answer` is the target.
        """
        if self.sentinel:
            answer = postprocessors.remove_sentinel(answer)
        parse = self.format.parse_target if is_target else self.format.parse
        return parse(answer, example)

    def score(
        self, examples: Sequence[Example], answers: Answers, *, vocabulary: Vocabulary | None = None
    ) -> dict[str, float]:
        """Returns the task's metrics, T5's in percent.

        Args:
          examples: preprocessed rows whose answers are known.
          answers: those of a model to them.
          vocabulary: the vocabulary of the tokens; None: only the texts are used.
        """
        del vocabulary
        targets = [
            self.postprocess(
                postprocessors.to_text(row["targets_pretokenized"]), example=row, is_target=True
            )
            for row in examples
        ]
        predictions = [
            self.postprocess(text, example=row)
            for text, row in zip(answers.texts, examples, strict=True)
        ]
        result: dict[str, float] = {}
        for metric in self.metrics:
            result |= metric(targets, predictions)
        return result


def _postprocess(
    task: Task,
    answer: str,
    *,
    example: Example | None = None,
    is_target: bool = False,
    **_: Any,
) -> Value:
    return task.postprocess(answer, example=example, is_target=is_target)
