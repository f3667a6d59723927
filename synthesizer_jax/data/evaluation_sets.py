"""A task's held-out examples, ready to be predicted and scored."""

from __future__ import annotations

import collections
import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from synthesizer_jax.data import tasks
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

    @property
    def target_words(self) -> list[str]:
        """Every example's target string."""
        return [text(e["targets_pretokenized"]) for e in self.examples]

    def score(self, predictions: Sequence[str]) -> dict[str, float]:
        """The task's metrics in percent, on decoded strings.

        Raises:
          ValueError: there are not as many predictions as examples.
        """
        if len(predictions) != len(self.examples):
            raise ValueError(
                f"{self.name}: {len(predictions)} predictions for {len(self.examples)} examples"
            )
        pairs = list(zip(self.examples, predictions, strict=True))
        wanted = [
            self.task.postprocess(text(e["targets_pretokenized"]), example=e, is_target=True)
            for e in self.examples
        ]
        found = [self.task.postprocess(p, example=e) for e, p in pairs]
        metrics = (*self.task.metrics, *EXTRA_METRICS.get(self.name, ()))
        result: dict[str, float] = {}
        for metric in metrics:
            result |= metric(wanted, found)
        return result


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
      max_examples: stop at the end of the group (MultiRC's question, ReCoRD's query, AX-g's pair)
        that reaches this number.

    Raises:
      FileNotFoundError: the data is not on this machine.
    """
    import seqio

    here = tasks.splits(name, data_dir)
    if split not in here:
        raise FileNotFoundError(
            f"{name} has no split {split!r} in {data_dir} (found: {', '.join(here) or 'none'}); "
            "import the original files with 'synthesizer-jax data import'"
        )
    definition = tasks.definition(name)
    tasks.register_task(definition, vocabulary, data_dir)
    dataset = seqio.get_mixture_or_task(name).get_dataset(
        dict(lengths),
        split=split,
        shuffle=False,
        num_epochs=1,
        use_cached=False,
        try_in_mem_cache=False,
    )
    # TFDS stores rows shuffled; in the order of the original file groups stand together.
    rows = sorted(dataset.as_numpy_iterator(), key=_order)
    if max_examples is not None and max_examples < len(rows):
        last = _group(name, rows[max_examples - 1])
        end = next(
            (i for i in range(max_examples, len(rows)) if _group(name, rows[i]) != last), None
        )
        rows = rows[:end]
    return EvaluationSet(
        task=definition,
        split=split,
        inputs=[np.asarray(r["inputs"], np.int32) for r in rows],
        targets=[np.asarray(r["targets"], np.int32) for r in rows],
        examples=rows,
    )


def _order(row: dict[str, Any]) -> tuple[int, ...]:
    """The row's place in the original file; rows without one keep their order."""
    names = (n for n in ("idx", *_INDICES) if n in row)
    return tuple(int(row[name]) for name in names)


_INDICES = ("idx/paragraph", "idx/passage", "idx/question", "idx/query", "idx/answer")


def _group(name: str, row: dict[str, Any]) -> tuple[int, ...]:
    """What must stay together for a metric to make sense."""
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
    found = []
    for name in tasks.members(mixture):
        here = tasks.splits(name, data_dir)
        if split in here and tasks.definition(name).metrics:
            found.append((name, split))
    names = {name for name, _ in found}
    for name in tasks.members(mixture):
        for twin in ("matched", "mismatched"):
            stands_in = name.replace("mnli", f"mnli_{twin}")
            here = tasks.splits(name, data_dir) if name == "glue_mnli_v002" else {}
            if f"{split}_{twin}" in here and stands_in not in names:
                found.append((name, f"{split}_{twin}"))
    return found


STANDS_FOR = {
    "glue_mnli_matched_v002": ("glue_mnli_v002", 0.5),
    "glue_mnli_mismatched_v002": ("glue_mnli_v002", 0.5),
    "super_glue_wsc_v102_simple_eval": ("super_glue_wsc_v102_simple_train", 1.0),
}
"""Evaluation-only members of mixtures: which trained task they measure, and their part of it."""


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
