"""Evaluation sets: the examples of one task and split, to be predicted and scored."""

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
    """The examples of one task and split, in the order of the original file.

    Attributes:
      task: the task.
      split: the split.
      examples: the preprocessed rows, with ``inputs_pretokenized`` and ``targets_pretokenized``, and the
        token ids ``inputs`` and ``targets``, int32 with EOS; those of texts are whole, however long.
      vocabulary: the vocabulary of the token ids; metrics of SeqIO's tasks decode with it.
    """

    task: Task
    split: str
    examples: Sequence[Example]
    vocabulary: Vocabulary | None = None

    @functools.cached_property
    def inputs(self) -> list[np.ndarray]:
        """The token ids of the inputs."""
        return [row["inputs"] for row in self.examples]

    @functools.cached_property
    def targets(self) -> list[np.ndarray]:
        """The token ids of the targets."""
        return [row["targets"] for row in self.examples]

    @property
    def target_words(self) -> list[str]:
        """The target string of every example."""
        return [to_text(row["targets_pretokenized"]) for row in self.examples]

    @functools.cached_property
    def labeled(self) -> tuple[int, ...]:
        """Indices of the examples with a label; a test split may have none."""
        return tuple(i for i, row in enumerate(self.examples) if self.task.is_labeled(row))

    def score(self, answers: Answers | Sequence[str]) -> dict[str, float]:
        """Returns the task's metrics, T5's in percent; an empty dictionary if no example has a label.

        Args:
          answers: those to all examples, or their texts; those to examples without a label are ignored.

        Raises:
          ValueError: the number of answers differs from that of examples, or a metric is no number.
        """
        if not isinstance(answers, Answers):
            answers = Answers(list(answers))
        if len(answers.texts) != len(self.examples):
            raise ValueError(
                f"{self.task.name}: {len(answers.texts)} predictions for {len(self.examples)} examples"
            )
        if not self.labeled:
            return {}
        rows = [self.examples[i] for i in self.labeled]
        known = answers._replace(texts=list(map(self._shown, answers.texts))).select(self.labeled)
        result = dict(self.task.score(rows, known, vocabulary=self.vocabulary))
        for name, value in result.items():
            if not hasattr(value, "__float__"):
                raise ValueError(f"{self.task.name}: the metric {name!r} is {value!r}, which is no number")
        return result

    def predicted_value(self, index: int, prediction: str) -> Value:
        """Returns the value of a prediction for an example that metrics compare."""
        return self.task.postprocess(self._shown(prediction), example=self.examples[index])

    def _shown(self, answer: str) -> str:
        """Returns an answer with its sentinel, which bytes do not show; SeqIO strips all such answers."""
        if self.vocabulary and self.task.sentinel:
            hidden = not self.vocabulary.decode([self.vocabulary.vocab_size - 1])
            return SENTINEL + answer if hidden else answer
        return answer

    def record(self, index: int, prediction: str | None) -> dict[str, JSON]:
        """Returns the JSON record of an example and its prediction; None: there is none.

        ``idx`` is the index of the example in the original file, or of the stored row if it has none.
        ``target`` is None if it is hidden. If metrics compare numbers, ``label`` is that of the prediction
        (−1 if it is none of the labels) and ``target_label`` that of the target.
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
        if isinstance(target_label, Mapping):  # MultiRC's, with its question
            target_label = target_label["value"]
        return result | {"label": label, "target_label": target_label}

    def labeled_part(self, count: int) -> EvaluationSet:
        """Returns at most `count` of the labeled examples, evenly spaced."""
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

    Where the objective of texts makes inputs, such as that of span corruption, the examples are those that
    it makes of the split, once, with the same noise at every call; otherwise they are whole texts.

    Args:
      name: of the task.
      split: its split.
      prepared: data directory and vocabulary.
      lengths: maximum lengths of ``inputs`` and ``targets``, including EOS; texts without inputs are
        not truncated.
      max_examples: reading ends with the group of rows (MultiRC's questions, ReCoRD's queries, AX-g's
        pairs; single rows of other tasks) that reaches this number; None reads all.
      objective: by which texts without inputs are trained; None: they are targets.
      ids: the model's.

    Raises:
      FileNotFoundError: the split is not prepared for evaluation.
      ValueError: its files are damaged, or it has inputs and their length is 0.
    """
    task, ours = task_registry.find_task(name), name in task_registry.TASKS
    made_by = objective if task.is_text and objective and objective.makes_inputs else None
    examples = prepared.open(name, split, None if task.is_text else lengths, documents=made_by is not None)
    if not examples.info.has_rows:
        raise FileNotFoundError(
            f"{examples.name} is prepared for training alone; "
            f"{prepared.remedy(name, f'--evaluation-split {split}')}"
        )
    if made_by is not None:
        form = ExampleFormat(lengths["inputs"], lengths["targets"], prepared.vocabulary.vocab_size, ids)
        made = _made_rows(examples, made_by, form, prepared.vocabulary)
        rows = list(itertools.islice(made, max_examples))
    else:
        read = examples.rows(None if ours and not task.is_text else max_examples)
        rows = [
            {**row, "inputs": inputs, "targets": targets}
            for row, (inputs, targets) in zip(read, iter(examples), strict=False)
        ]
        if ours:
            # TFDS stores rows in a random order; in that of the original file groups are contiguous.
            rows.sort(key=lambda row: tuple(_places(row).values()))
        if max_examples is not None:
            groups = metric_groups(task, rows)
            end = max_examples
            while 0 < end < len(rows) and groups[end] == groups[max_examples - 1]:
                end += 1
            rows = rows[:end]
    measured = task_registry.find_task(measured_task(name, split))
    return EvaluationSet(measured, split, rows, prepared.vocabulary)


def _made_rows(
    documents: PreparedExamples, objective: Objective, form: ExampleFormat, vocabulary: Vocabulary
) -> Iterator[Example]:
    """Yields the examples that an objective makes of texts in one epoch, in their order."""
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
    """Returns a row's ``idx`` as JSON, an integer or integers by name; `index` if it has none."""
    places = _places(row)
    if "idx" in places:
        return places["idx"]
    return {name.removeprefix("idx/"): place for name, place in places.items()} or index


def _places(row: Example) -> dict[str, int]:
    """Returns a row's indices in the original file by name."""
    parts = ("paragraph", "passage", "question", "query", "answer")
    names = [name for name in ("idx", *(f"idx/{part}" for part in parts)) if name in row]
    return {n: int(row[n]) for n in names if np.asarray(row[n]).dtype.kind in "iu"}


def metric_groups(task: Task, rows: Sequence[Example]) -> list[tuple[int, ...]]:
    """Returns the group of each row of a task, which metrics need as a whole."""
    groups, in_pairs = [], gender_parity in task.metrics
    for i, row in enumerate(rows):
        key = tuple(_places(row).values()) or (i,)
        # MultiRC's question, ReCoRD's query; AX-g's pair.
        groups.append(tuple(x // 2 for x in key) if in_pairs else key[:2])
    return groups


def evenly_spaced(rows: Sequence[T], count: int) -> list[T]:
    """Returns at most `count` of the rows."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def evaluation_tasks(
    mixture: str, prepared: PreparedTasks, split: str = "validation"
) -> list[tuple[str, str]]:
    """Returns the pairs of task and split on which a mixture is evaluated; see `task_splits`."""
    names = [n for n in prepared.rates(mixture) or {} if n in task_registry.member_names(mixture)]
    parts = (split, f"{split}_matched", f"{split}_mismatched")
    splits = {name: [part for part in parts if prepared.find(name, part)] for name in names}
    return task_splits(names, splits, split)


def loss_weight(rates: Mapping[str, float], task: str) -> float:
    """Returns a task's weight in the held-out loss: its rate, or its share of the trained task's rate."""
    trained, part = STANDS_FOR.get(task, (task, 0.0))
    return rates.get(task) or part * rates.get(trained, 0.0)


def label_prior_entropy(sets: Sequence[tuple[EvaluationSet, float]]) -> dict[str, float]:
    """Returns the entropies of the targets in nats per example: the best loss without reading the inputs.

    Of sets of tasks with label words and their weights these are ``per_task``, the weighted mean of the
    entropies of the targets given the task, and ``joint``, the entropy of the weighted mixture of all.
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
    return -sum(p * math.log(p) for p in shares)
