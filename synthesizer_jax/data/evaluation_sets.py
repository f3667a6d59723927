"""A task's held-out examples, ready to be predicted and scored."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synthesizer_jax.data import postprocessors, stored, tasks
from synthesizer_jax.data.definitions import EXTRA_METRICS, TaskDefinition


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Examples of one task and split, in the order of the original file.

    Attributes:
      task: the task's definition.
      split: its split.
      inputs: token ids with EOS, int32.
      targets: token ids with EOS.
      examples: the preprocessed rows, with ``inputs_pretokenized`` and ``targets_pretokenized``.
    """

    task: TaskDefinition
    split: str
    inputs: list[np.ndarray]
    targets: list[np.ndarray]
    examples: list[dict[str, Any]]

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def label_words(self) -> tuple[str, ...] | None:
        """The allowed answers; None where answers are free text."""
        if self.task.kind == "similarity":
            return tuple(f"{i / 5:.1f}" for i in range(26))
        return self.task.labels or None

    @functools.cached_property
    def labelled(self) -> tuple[int, ...]:
        """The examples whose right answer is known; a test split may hide all of them."""
        return tuple(i for i, row in enumerate(self.examples) if postprocessors.is_labelled(row))

    @property
    def target_words(self) -> list[str]:
        """Every example's target string."""
        return [text(e["targets_pretokenized"]) for e in self.examples]

    def score(self, predictions: Sequence[str]) -> dict[str, float]:
        """The task's metrics in percent, on decoded strings; none where no example is labelled.

        Args:
          predictions: of all examples; those of unlabelled ones are not looked at.

        Raises:
          ValueError: there are not as many predictions as examples.
        """
        if len(predictions) != len(self.examples):
            raise ValueError(
                f"{self.name}: {len(predictions)} predictions for {len(self.examples)} examples"
            )
        if not self.labelled:
            return {}
        wanted = [self.wanted(i) for i in self.labelled]
        found = [self.found(i, predictions[i]) for i in self.labelled]
        result: dict[str, float] = {}
        for metric in (*self.task.metrics, *EXTRA_METRICS.get(self.name, ())):
            result |= metric(wanted, found)
        return result

    def wanted(self, index: int) -> Any:
        """An example's target as metrics compare it."""
        example = self.examples[index]
        target = text(example["targets_pretokenized"])
        return self.task.postprocess(target, example=example, is_target=True)

    def found(self, index: int, prediction: str) -> Any:
        """A prediction for an example as metrics compare it."""
        return self.task.postprocess(prediction, example=self.examples[index])

    def record(self, index: int, prediction: str) -> dict[str, Any]:
        """What a file of predictions says of one example, as JSON.

        ``idx`` is its place in the original file, or among the stored rows where they have none; ``target``
        is None where it is hidden. Where metrics compare numbers, ``label`` is the prediction's (−1: the
        answer is none of the labels) and ``target_label`` the target's.
        """
        example, known = self.examples[index], index in self._known
        target = text(example["targets_pretokenized"]) if known else None
        result = {
            "idx": original_place(example, index),
            "input": text(example["inputs_pretokenized"]),
            "target": target,
            "prediction": prediction,
        }
        label = self.found(index, prediction)
        if isinstance(label, str):
            return result
        wanted = self.wanted(index) if known else None
        if isinstance(wanted, Mapping):  # MultiRC's, with its question
            wanted = wanted["value"]
        return result | {"label": label, "target_label": wanted}

    @functools.cached_property
    def _known(self) -> frozenset[int]:
        return frozenset(self.labelled)

    def labelled_part(self, count: int) -> EvaluationSet:
        """At most so many of the labelled examples, evenly spaced."""
        n = len(self.labelled)
        chosen = [self.labelled[i * n // min(count, n)] for i in range(min(count, n))]
        return dataclasses.replace(
            self,
            inputs=[self.inputs[i] for i in chosen],
            targets=[self.targets[i] for i in chosen],
            examples=[self.examples[i] for i in chosen],
        )


def text(value: Any) -> str:
    """A TensorFlow string as Python's."""
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def load(
    name: str,
    split: str,
    vocabulary: Any,
    *,
    data_dir: pathlib.Path,
    lengths: Mapping[str, int],
    max_examples: int | None = None,
) -> EvaluationSet:
    """Reads a split.

    Args:
      name: a task.
      split: its split.
      vocabulary: from `vocabularies`, built.
      data_dir: where data sets lie.
      lengths: longest ``inputs`` and ``targets``, EOS included.
      max_examples: stop at the end of the group (MultiRC's question, ReCoRD's query, AX-g's pair; else
        a row) that reaches this number.

    Raises:
      FileNotFoundError: the data is not on this machine.
      ValueError: its files are damaged.
    """
    import seqio

    here = tasks.splits(name, data_dir)
    if split not in here:
        raise FileNotFoundError(
            f"{name} has no split {split!r} in {data_dir} (found: {', '.join(here) or 'none'}); "
            "import the original files with 'synthesizer-jax data import'"
        )
    tasks.register_task(tasks.definition(name), vocabulary, data_dir)
    directory = data_dir / tasks.definition(name).dataset
    with stored.reading(f"{name}'s split {split!r}", directory):
        dataset = seqio.get_mixture_or_task(name).get_dataset(
            dict(lengths),
            split=split,
            shuffle=False,
            num_epochs=1,
            use_cached=False,
            try_in_mem_cache=False,
        )
        rows = list(dataset.as_numpy_iterator())
    # TFDS stores rows shuffled; in the order of the original file groups stand together.
    rows.sort(key=_order)
    if max_examples is not None and max_examples < len(rows):
        groups = [_group(name, row) or (i,) for i, row in enumerate(rows)]
        last = groups[max_examples - 1]
        end = next((i for i in range(max_examples, len(rows)) if groups[i] != last), None)
        rows = rows[:end]
    return EvaluationSet(
        task=tasks.definition(measured_task(name, split)),
        split=split,
        inputs=[np.asarray(r["inputs"], np.int32) for r in rows],
        targets=[np.asarray(r["targets"], np.int32) for r in rows],
        examples=rows,
    )


def original_place(row: Mapping[str, Any], index: int) -> Any:
    """A row's ``idx`` as JSON: a number, or numbers by name; the index where it has none."""
    if "idx" in row:
        return int(row["idx"])
    names = [n for n in _INDICES if n in row]
    return {n.removeprefix("idx/"): int(row[n]) for n in names} or index


def _order(row: Mapping[str, Any]) -> tuple[int, ...]:
    """The row's place in the original file; rows without one keep their order."""
    names = (n for n in ("idx", *_INDICES) if n in row)
    return tuple(int(row[name]) for name in names)


_INDICES = ("idx/paragraph", "idx/passage", "idx/question", "idx/query", "idx/answer")


def _group(name: str, row: Mapping[str, Any]) -> tuple[int, ...]:
    """What must stay together for a metric to make sense; empty where rows have no place."""
    place = _order(row)
    if len(place) > 1:
        return place[:2]  # MultiRC's question, ReCoRD's query
    return tuple(i // 2 for i in place) if "axg" in name else place


def evaluation_tasks(
    mixture: str, data_dir: pathlib.Path, split: str = "validation"
) -> list[tuple[str, str]]:
    """The (task, split) pairs that a mixture is evaluated on: every member that has the split.

    ``glue_mnli`` itself has no ``validation``; its matched and mismatched twins stand in. Where they
    are not prepared on their own, its ``validation_matched`` and ``validation_mismatched`` are used.
    """
    members = tasks.members(mixture)
    found = [(name, split) for name in members if split in tasks.splits(name, data_dir)]
    names = {name for name, _ in found}
    for name in members:
        here = tasks.splits(name, data_dir) if name == MNLI else {}
        for part in (f"{split}_matched", f"{split}_mismatched"):
            if part in here and measured_task(name, part) not in names:
                found.append((name, part))
    return found


MNLI = "glue_mnli_v002"


def measured_task(name: str, split: str) -> str:
    """The task that a split measures: MNLI's ``validation_matched`` is that of its matched twin."""
    twin = split.rpartition("_")[2]
    stands_in = name == MNLI and twin in ("matched", "mismatched")
    return name.replace("mnli", f"mnli_{twin}") if stands_in else name


STANDS_FOR = {
    "glue_mnli_matched_v002": (MNLI, 0.5),
    "glue_mnli_mismatched_v002": (MNLI, 0.5),
    "super_glue_wsc_v102_simple_eval": ("super_glue_wsc_v102_simple_train", 1.0),
}
"""Evaluation-only members of mixtures: which trained task they measure, and their part of it."""


def names(task: str, split: str) -> tuple[str, str]:
    """The task that a split measures, and the trained task that it stands for."""
    measured = measured_task(task, split)
    return measured, STANDS_FOR.get(measured, (measured, 1.0))[0]


def weight(mixture: str, task: str) -> float:
    """A task's share in a mixture's held-out loss: its rate, or its part of the trained twin's."""
    rates = tasks.members(mixture)
    if rates.get(task):
        return rates[task]
    trained, part = STANDS_FOR.get(task, (task, 0.0))
    return part * rates.get(trained, 0.0)


def label_prior_entropy(sets: Sequence[tuple[EvaluationSet, float]]) -> dict[str, float]:
    """How well one can do without reading the input, in nats per example.

    Args:
      sets: held-out sets of tasks with label words, and their weights.

    Returns:
      ``per_task``: the weighted mean of the entropies of the targets given the task;
      ``joint``: the entropy of the weighted mixture of all targets.
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
