"""Evaluation sets: the examples of one task and split, to be predicted and scored."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from synthesizer_jax.data.objectives import Documents, ExampleFormat, Objective, SegmentStream
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import EOS, Vocabulary
from synthesizer_jax.registry import JSON
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.metrics import Value
from synthesizer_jax.tasks.postprocessors import SENTINEL, Example, to_text
from synthesizer_jax.tasks.preparation import STANDS_FOR, measured_task, task_splits
from synthesizer_jax.tasks.task import Answers, Task


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """The examples of one task and split, in the order of the original file.

    Attributes:
      task: the task.
      split: the split.
      inputs: token ids of every example with EOS, int32.
      targets: token ids of every example with EOS, int32; those of texts are whole, however long.
      examples: the preprocessed rows, with ``inputs_pretokenized`` and ``targets_pretokenized``.
      vocabulary: the vocabulary of the token ids; metrics of SeqIO's tasks decode with it.
      objective: what has made the examples of texts; None: they are as they are stored.
    """

    task: Task
    split: str
    inputs: list[np.ndarray]
    targets: list[np.ndarray]
    examples: Sequence[Example]
    vocabulary: Vocabulary | None = None
    objective: Objective | None = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def label_words(self) -> tuple[str, ...] | None:
        """The allowed answers; None for free text."""
        return self.task.label_words

    @property
    def scores_targets(self) -> bool:
        """Whether metrics need the log-probabilities of the targets."""
        return self.task.scores_targets

    @property
    def is_text(self) -> bool:
        """Whether the examples are texts without inputs, whose loss is measured."""
        return self.task.is_text

    @property
    def texts(self) -> list[str] | None:
        """The whole texts; None if an objective has made inputs and targets of them."""
        return None if self.objective is not None else self.target_words

    @functools.cached_property
    def labeled(self) -> tuple[int, ...]:
        """Indices of the examples with a label; a test split may have none."""
        return tuple(i for i, row in enumerate(self.examples) if self.task.is_labeled(row))

    @property
    def target_words(self) -> list[str]:
        """The target string of every example."""
        return [to_text(e["targets_pretokenized"]) for e in self.examples]

    def score(self, answers: Answers | Sequence[str]) -> dict[str, float]:
        """Returns the task's metrics, T5's in percent; an empty dictionary if no example has a label.

        Args:
          answers: those to all examples, or their texts; those to examples without a label are ignored.

        Raises:
          ValueError: the number of answers differs from that of examples.
        """
        if not isinstance(answers, Answers):
            answers = Answers(answers)
        answers = answers._replace(texts=list(map(self._shown, answers.texts)))
        if len(answers.texts) != len(self.examples):
            raise ValueError(
                f"{self.name}: {len(answers.texts)} predictions for {len(self.examples)} examples"
            )
        if not self.labeled:
            return {}
        rows = [self.examples[i] for i in self.labeled]
        known = answers.select(self.labeled)
        return dict(self.task.score(rows, known, vocabulary=self.vocabulary))

    def target_value(self, index: int) -> Value:
        """Returns the value of an example's target that metrics compare."""
        example = self.examples[index]
        target = to_text(example["targets_pretokenized"])
        return self.task.postprocess(target, example=example, is_target=True)

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
        example, known = self.examples[index], index in self._known
        target = to_text(example["targets_pretokenized"]) if known else None
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
        wanted = self.target_value(index) if known else None
        if isinstance(wanted, Mapping):  # MultiRC's, with its question
            wanted = wanted["value"]
        return result | {"label": label, "target_label": wanted}

    @functools.cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self.labeled)

    def labeled_part(self, count: int) -> EvaluationSet:
        """Returns at most `count` of the labeled examples, evenly spaced."""
        n = len(self.labeled)
        chosen = [self.labeled[i * n // min(count, n)] for i in range(min(count, n))]
        return dataclasses.replace(
            self,
            inputs=[self.inputs[i] for i in chosen],
            targets=[self.targets[i] for i in chosen],
            examples=[self.examples[i] for i in chosen],
        )


def load_evaluation_set(
    name: str,
    split: str,
    prepared: PreparedTasks,
    *,
    lengths: Mapping[str, int],
    max_examples: int | None = None,
    objective: Objective | None = None,
) -> EvaluationSet:
    """Reads the prepared examples of a task and split.

    Where the objective of texts makes inputs, such as that of span corruption, the examples are those that
    it makes of the split, once, with the same noise at every call; otherwise they are whole texts.

    Args:
      name: name of the task.
      split: its split.
      prepared: data directory and vocabulary.
      lengths: maximum lengths of ``inputs`` and ``targets``, including EOS; texts without inputs are
        not truncated.
      max_examples: reading ends with the group of rows (MultiRC's questions, ReCoRD's queries, AX-g's
        pairs; single rows of other tasks) that reaches this number; None reads all.
      objective: by which texts without inputs are trained; None: they are targets.

    Raises:
      FileNotFoundError: the split is not prepared for evaluation.
      ValueError: its files are damaged, or it has inputs and their length is 0.
    """
    task, vocabulary = task_registry.find_task(name), prepared.vocabulary
    examples = prepared.open(name, split, None if task.is_text else lengths)
    if not examples.info.has_rows:
        raise FileNotFoundError(
            f"{examples.name} is prepared for training alone; "
            f"{prepared.remedy(name, f'--evaluation-split {split}')}"
        )
    count = max_examples if task.is_text or name not in task_registry.TASKS else None
    rows: list[Example] = []
    for index, row in enumerate(examples.rows(count)):
        inputs, targets = examples[index]
        rows.append({**row, "inputs": inputs, "targets": targets})
    if name in task_registry.TASKS:
        # TFDS stores rows in a random order; in that of the original file groups are contiguous.
        rows.sort(key=_order)
    if max_examples is not None:
        rows = _whole_groups(name, rows, max_examples)
    if task.is_text and objective is not None and objective.makes_inputs:
        form = ExampleFormat(lengths["inputs"], lengths["targets"], vocabulary.vocab_size)
        rows = _by_objective(rows, objective, form, vocabulary)[:max_examples]
    else:
        objective = None
    return EvaluationSet(
        task=task_registry.find_task(measured_task(name, split)),
        split=split,
        inputs=[r["inputs"] for r in rows],
        targets=[r["targets"] for r in rows],
        examples=rows,
        vocabulary=vocabulary,
        objective=objective,
    )


def _whole_groups(name: str, rows: list[Example], count: int) -> list[Example]:
    """Returns the first rows, up to the end of the group of row number `count`."""
    groups = [_group(name, row) or (i,) for i, row in enumerate(rows)]
    end = count
    while 0 < end < len(rows) and groups[end] == groups[count - 1]:
        end += 1
    return rows[:end]


def _by_objective(
    rows: Sequence[Example], objective: Objective, form: ExampleFormat, vocabulary: Vocabulary
) -> list[Example]:
    """Returns the examples that an objective makes of texts in one epoch, in their order."""
    tokens = [_without_eos(np.asarray(row["targets"], np.int32)) for row in rows]
    stream = SegmentStream(
        Documents(tokens, name="the texts"),
        objective,
        form,
        shard=(0, 1),
        seed=np.random.SeedSequence(0),
        shuffle=False,
    )
    found: list[Example] = []
    while True:
        inputs, targets = next(stream)
        if stream.epoch:
            return found
        texts = {"inputs_pretokenized": inputs, "targets_pretokenized": targets}
        row: Example = {name: vocabulary.decode(tokens) for name, tokens in texts.items()}
        found.append({**row, "inputs": inputs, "targets": targets})


def _without_eos(tokens: np.ndarray) -> np.ndarray:
    """Returns token ids without the EOS at their end."""
    return tokens[: len(tokens) - (tokens[-1:] == EOS).sum()]


def original_index(row: Example, index: int) -> int | dict[str, int]:
    """Returns a row's ``idx`` as JSON, an integer or integers by name; `index` if it has none."""
    if np.issubdtype(np.asarray(row.get("idx", "")).dtype, np.integer):
        return int(row["idx"])
    names = [n for n in _INDICES if n in row]
    return {n.removeprefix("idx/"): int(row[n]) for n in names} or index


def _order(row: Example) -> tuple[int, ...]:
    """Returns the sort key of a row: its index in the original file; empty if it has none."""
    names = (n for n in ("idx", *_INDICES) if n in row)
    return tuple(int(row[name]) for name in names)


_INDICES = ("idx/paragraph", "idx/passage", "idx/question", "idx/query", "idx/answer")


def _group(name: str, row: Example) -> tuple[int, ...]:
    """Returns the group of a row, which metrics need as a whole; empty if rows have no index."""
    key = _order(row)
    if len(key) > 1:
        return key[:2]  # MultiRC's question, ReCoRD's query
    return tuple(i // 2 for i in key) if "axg" in name else key


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
    if rates.get(task):
        return rates[task]
    trained, part = STANDS_FOR.get(task, (task, 0.0))
    return part * rates.get(trained, 0.0)


def label_prior_entropy(sets: Sequence[tuple[EvaluationSet, float]]) -> dict[str, float]:
    """Returns the entropies of the targets in nats per example: the best loss without reading the inputs.

    Args:
      sets: evaluation sets of tasks with label words, and their weights.

    Returns:
      ``per_task``, the weighted mean of the entropies of the targets given the task, and ``joint``, the
      entropy of the weighted mixture of all targets.
    """
    total = sum(weight for _, weight in sets)
    per_task = 0.0
    joint: dict[str, float] = collections.defaultdict(float)
    for examples, weight in sets:
        counts = collections.Counter(examples.target_words)
        n = sum(counts.values())
        share = {word: count / n for word, count in counts.items()}
        per_task -= weight / total * sum(p * math.log(p) for p in share.values())
        for word, p in share.items():
            joint[word] += weight / total * p
    return {
        "per_task": per_task,
        "joint": -sum(p * math.log(p) for p in joint.values()),
    }
