"""Loads evaluation sets, each of which contains the examples of one task and one split."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import JSON
from synthesizer_jax.data.objectives import ExampleFormat, Objective
from synthesizer_jax.data.prepared import PreparedExamples, PreparedTasks
from synthesizer_jax.data.segments import SegmentStream
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.metrics import Value, gender_parity
from synthesizer_jax.tasks.postprocessors import SENTINEL, Example, to_text
from synthesizer_jax.tasks.splits import STANDS_FOR, measured_task, task_splits
from synthesizer_jax.tasks.task import Answers, Task

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """The examples of one task and one split, in the order of the original file.

    Attributes:
      task: the task.
      split: the split.
      examples: the preprocessed rows. Each row has ``inputs_pretokenized`` and
        ``targets_pretokenized``, and the token ids ``inputs`` and ``targets``, which are int32 and
        end with EOS. Texts without inputs are never truncated.
      vocabulary: the vocabulary of the token ids, with which the metrics of SeqIO's tasks decode
        tokens.
    """

    task: Task
    split: str
    examples: Sequence[Example]
    vocabulary: Vocabulary | None = None

    @functools.cached_property
    def inputs(self) -> list[np.ndarray]:
        """The token ids of the inputs of every example."""
        return [row["inputs"] for row in self.examples]

    @functools.cached_property
    def targets(self) -> list[np.ndarray]:
        """The token ids of the targets of every example."""
        return [row["targets"] for row in self.examples]

    @property
    def target_words(self) -> list[str]:
        """The target text of every example."""
        return [to_text(row["targets_pretokenized"]) for row in self.examples]

    @functools.cached_property
    def labeled(self) -> tuple[int, ...]:
        """The indices of the examples that have a label, which test splits may hide."""
        return tuple(i for i, row in enumerate(self.examples) if self.task.is_labeled(row))

    def score(self, answers: Answers | Sequence[str]) -> dict[str, float]:
        """Returns the metrics of the task, or an empty dictionary if no example has a label.

        The metrics of T5's tasks are in percent.

        Args:
          answers: the answers to all examples, as `Answers` or as strings. Answers to examples
            without a label are ignored.

        Raises:
          ValueError: if the number of answers differs from the number of examples, or a metric is
            not a number.
        """
        if not isinstance(answers, Answers):
            answers = Answers(list(answers))
        if len(answers.texts) != len(self.examples):
            raise ValueError(
                f"There are {len(answers.texts)} predictions for the {len(self.examples)} examples "
                f"of the task {self.task.name}. Give one prediction for each example."
            )
        if not self.labeled:
            return {}
        rows = [self.examples[i] for i in self.labeled]
        known = answers._replace(texts=list(map(self._shown, answers.texts))).select(self.labeled)
        result = dict(self.task.score(rows, known, vocabulary=self.vocabulary))
        for name, value in result.items():
            if not hasattr(value, "__float__"):
                raise ValueError(
                    f"The metric {name!r} of the task {self.task.name} is {value!r}, which is not "
                    "a number."
                )
        return result

    def predicted_value(self, index: int, prediction: str) -> Value:
        """Returns the value that metrics use for the predicted text of an example."""
        return self.task.postprocess(self._shown(prediction), example=self.examples[index])

    def _shown(self, answer: str) -> str:
        """Returns an answer, with a sentinel added if the vocabulary does not decode sentinels.

        Vocabularies of bytes do not decode sentinels. If the targets of a task begin with a
        sentinel, SeqIO strips the sentinel from every answer.
        """
        if self.vocabulary is None or not self.task.sentinel:
            return answer
        is_hidden = not self.vocabulary.decode([self.vocabulary.first_sentinel])
        return SENTINEL + answer if is_hidden else answer

    def record(self, index: int, prediction: str | None) -> dict[str, JSON]:
        """Returns a JSON record of an example and its prediction.

        ``idx`` is the index of the example in the original file, or the index of the stored row if
        the file has none. ``target`` is None if the target is hidden. If the metrics compare
        numbers, the record also contains the numbers ``label`` of the prediction and
        ``target_label`` of the target. ``label`` is −1 if the prediction is not one of the labels.

        Args:
          index: the index of the example.
          prediction: the prediction, or None if the example has no prediction.
        """
        example = self.examples[index]
        target = None
        if self.task.is_labeled(example):
            target = to_text(example["targets_pretokenized"])
        result = {
            "idx": original_index(example, index),
            "input": to_text(example["inputs_pretokenized"]),
            "target": target,
        }
        if prediction is None:
            return result
        result["prediction"] = prediction
        label = self.predicted_value(index, prediction)
        if isinstance(label, str):
            return result
        target_label: Value | None = None
        if target is not None:
            target_label = self.task.postprocess(target, example=example, is_target=True)
        if isinstance(target_label, Mapping):  # a label of MultiRC also contains the question
            target_label = target_label["value"]
        return result | {"label": label, "target_label": target_label}

    def labeled_part(self, count: int) -> EvaluationSet:
        """Returns at most `count` labeled examples, which are evenly spaced in the set."""
        chosen = evenly_spaced(self.labeled, count)
        return dataclasses.replace(self, examples=[self.examples[i] for i in chosen])


def load_evaluation_set(
    name: str,
    split: str,
    prepared: PreparedTasks,
    *,
    lengths: Mapping[str, int],
    max_examples: int | None = None,
    objective: Objective | None = None,
    ids: SpecialIds = T5_IDS,
) -> EvaluationSet:
    """Reads the prepared examples of a task and split.

    The examples of some tasks are texts without inputs. If the training objective makes inputs from
    texts, as span corruption does, the objective makes the examples from the whole split. The noise
    of the objective is the same in every call. If the objective does not make inputs, each example
    is a whole text.

    Args:
      name: the name of the task.
      split: the split.
      prepared: the data directory and the vocabulary.
      lengths: maximum lengths of ``inputs`` and ``targets``, including EOS. Texts without inputs
        are not truncated.
      max_examples: reading stops after this number of rows, at the end of the current group. A
        group is a question of MultiRC, a query of ReCoRD, a pair of AX-g, or a single row of any
        other task. None means all rows.
      objective: the objective with which the model is trained on texts without inputs. None means
        that whole texts are the targets.
      ids: the special ids of the model.

    Raises:
      FileNotFoundError: if the split is not prepared for evaluation.
      ValueError: if the files of the split are damaged, or the split has inputs but the length of
        inputs is 0.
    """
    task = task_registry.find_task(name)
    is_made = task.is_text and objective is not None and objective.makes_inputs
    examples = prepared.open(name, split, None if task.is_text else lengths, documents=is_made)
    if not examples.info.has_rows:
        raise FileNotFoundError(
            f"{examples.name} is prepared only for training. "
            f"{prepared.remedy(name, f'--evaluation-split {split}')}"
        )
    if is_made:
        assert objective is not None
        form = ExampleFormat(
            lengths["inputs"], lengths["targets"], prepared.vocabulary.first_sentinel + 1, ids
        )
        made = _made_rows(examples, objective, form, prepared.vocabulary)
        rows = list(itertools.islice(made, max_examples))
    else:
        rows = _stored_rows(task, examples, max_examples)
    measured = task_registry.find_task(measured_task(name, split))
    return EvaluationSet(measured, split, rows, prepared.vocabulary)


def _stored_rows(task: Task, examples: PreparedExamples, max_examples: int | None) -> list[Example]:
    """Returns the rows of a prepared split with their token ids.

    Args:
      task: the task.
      examples: the prepared split.
      max_examples: see `load_evaluation_set`.
    """
    # TFDS stores rows in a random order, so the rows of this package's tasks are sorted below.
    # Sorting needs all rows of a split. Texts are not sorted, because they have no indices.
    is_sorted = task.name in task_registry.TASKS and not task.is_text
    stored = examples.rows(None if is_sorted else max_examples)
    rows: list[Example] = [
        {**row, "inputs": inputs, "targets": targets}
        for row, (inputs, targets) in zip(stored, iter(examples), strict=False)
    ]
    if is_sorted:
        # Sort the rows by their order in the original file, in which the rows of a group are
        # adjacent.
        rows.sort(key=lambda row: tuple(_indices(row).values()))
    if max_examples is None:
        return rows

    # Extend the rows to the end of the last group, because metrics need whole groups.
    groups = metric_groups(task, rows)
    end = max_examples
    while 0 < end < len(rows) and groups[end] == groups[max_examples - 1]:
        end += 1
    return rows[:end]


def _made_rows(
    documents: PreparedExamples, objective: Objective, form: ExampleFormat, vocabulary: Vocabulary
) -> Iterator[Example]:
    """Yields the examples that an objective makes from texts in one epoch, in order."""
    seed = np.random.SeedSequence(0)
    stream = SegmentStream(documents, objective, form, shard=(0, 1), seed=seed, shuffle=False)
    while True:
        inputs, targets = next(stream)
        if stream.epoch:
            return
        texts = {"inputs_pretokenized": inputs, "targets_pretokenized": targets}
        row: Example = {name: vocabulary.decode(tokens) for name, tokens in texts.items()}
        yield {**row, "inputs": inputs, "targets": targets}


def original_index(row: Example, index: int) -> int | dict[str, int]:
    """Returns the ``idx`` of a row as JSON, or `index` if the row has none.

    The ``idx`` is an integer or a dictionary of integers. For example, the dictionary may contain
    the indices of a paragraph, a question and an answer.
    """
    indices = _indices(row)
    if "idx" in indices:
        return indices["idx"]
    return {name.removeprefix("idx/"): number for name, number in indices.items()} or index


def _indices(row: Example) -> dict[str, int]:
    """Returns the indices of a row in the original file, by the names of the indices."""
    parts = ("paragraph", "passage", "question", "query", "answer")
    names = [name for name in ("idx", *(f"idx/{part}" for part in parts)) if name in row]
    # Keep only integers, because data sets of users may use the same names for other values.
    return {name: int(row[name]) for name in names if np.asarray(row[name]).dtype.kind in "iu"}


def metric_groups(task: Task, rows: Sequence[Example]) -> list[tuple[int, ...]]:
    """Returns the group to which each row of a task belongs.

    Some metrics can only be computed for whole groups.
    """
    groups = []
    for i, row in enumerate(rows):
        key = tuple(_indices(row).values()) or (i,)
        if gender_parity in task.metrics:
            # A pair of AX-g consists of two adjacent rows.
            groups.append(tuple(index // 2 for index in key))
        else:
            # The first two indices identify a question of MultiRC or a query of ReCoRD.
            groups.append(key[:2])
    return groups


def evenly_spaced(rows: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` rows, which are evenly spaced in the list."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def evaluation_tasks(
    mixture: str, prepared: PreparedTasks, split: str = "validation"
) -> list[tuple[str, str]]:
    """Returns the tasks and splits on which a mixture is evaluated; see `task_splits`."""
    names = [n for n in prepared.rates(mixture) or {} if n in task_registry.member_names(mixture)]
    parts = (split, f"{split}_matched", f"{split}_mismatched")
    splits = {name: [part for part in parts if prepared.find(name, part)] for name in names}
    return task_splits(names, splits, split)


def loss_weight(rates: Mapping[str, float], task: str) -> float:
    """Returns the weight of a task in the held-out loss.

    The weight of a trained task is the rate of the task in the mixture. If the task is not trained
    but measures a trained task, the weight is a share of the trained task's rate.
    """
    trained, part = STANDS_FOR.get(task, (task, 0.0))
    return rates.get(task) or part * rates.get(trained, 0.0)


def label_prior_entropy(sets: Sequence[tuple[EvaluationSet, float]]) -> dict[str, float]:
    """Returns the lowest losses that are possible without reading the inputs.

    The losses are entropies of the targets, in nats per example. ``per_task`` is the weighted mean
    over tasks of the entropy of a task's targets, which is the lowest loss of a model that knows
    the task. ``joint`` is the entropy of the targets of all tasks together, with the same weights
    of the tasks.

    Args:
      sets: evaluation sets of tasks with label words, and the weight of each set.
    """
    total = sum(weight for _, weight in sets)
    per_task = 0.0
    joint: dict[str, float] = collections.defaultdict(float)
    for examples, weight in sets:
        counts = collections.Counter(examples.target_words)
        share = {word: count / counts.total() for word, count in counts.items()}
        per_task += weight / total * _entropy(share.values())
        for word, p in share.items():
            joint[word] += weight / total * p
    return {"per_task": per_task, "joint": _entropy(joint.values())}


def _entropy(shares: Iterable[float]) -> float:
    """Returns the entropy of a distribution in nats."""
    return -sum(p * math.log(p) for p in shares)
