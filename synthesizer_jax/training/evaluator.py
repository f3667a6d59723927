"""What a run measures of itself: held-out loss and every task's metrics."""

from __future__ import annotations

import itertools
import math
import pathlib
from collections.abc import Collection, Iterable
from typing import Any

from jax.sharding import Mesh

from synthesizer_jax.data import evaluation_sets, tasks
from synthesizer_jax.data.averages import averages
from synthesizer_jax.evaluation import Predictor, TaskResult, evaluate_tasks, flat, score_of
from synthesizer_jax.registry import suggestion
from synthesizer_jax.training.experiment import Evaluation, Experiment


class Evaluator:
    """A mixture's held-out examples, loaded once, and the measures over them.

    Args:
      experiment: the run; its mixture is registered.
      vocabulary: the built vocabulary.
      data_dir: where data sets lie.
      evaluation: None is the experiment's own.
      only: task names to keep; None keeps all. The name of a trained task keeps those that measure it.

    Attributes:
      sets: the examples of every task that has the split.
      loss_sets: those of them of which the loss is taken, set by set.
      lacking: the mixture's tasks that have not the split here.

    Raises:
      ValueError: `only` names a task that is not in the mixture.
      FileNotFoundError: no task has the split.
    """

    def __init__(
        self,
        experiment: Experiment,
        vocabulary: Any,
        *,
        data_dir: pathlib.Path,
        evaluation: Evaluation | None = None,
        only: list[str] | None = None,
    ):
        self.experiment, self.vocabulary = experiment, vocabulary
        self.evaluation = experiment.evaluation if evaluation is None else evaluation
        mixture, split = experiment.data.mixture, self.evaluation.split
        pairs = evaluation_sets.evaluation_tasks(mixture, data_dir, split)
        measures = {pair: {pair[0], *evaluation_sets.names(*pair)} for pair in pairs}
        wanted = set(only or tasks.members(mixture))
        check_tasks(
            wanted, {*tasks.members(mixture), *itertools.chain(*measures.values())}, mixture
        )
        pairs = [pair for pair in pairs if measures[pair] & wanted]
        if not pairs:
            raise FileNotFoundError(
                f"{', '.join(only) if only else mixture} has no examples of the split {split!r} in "
                f"{data_dir}; import them with 'synthesizer-jax data import', or choose another split"
            )
        self.lacking = sorted(wanted.difference(*(measures[pair] for pair in pairs)))
        self.sets = [
            evaluation_sets.load(
                task,
                part,
                vocabulary,
                data_dir=data_dir,
                lengths=experiment.data.lengths,
                max_examples=self.evaluation.max_examples,
            )
            for task, part in pairs
        ]
        self.weights = [evaluation_sets.weight(mixture, s.name) for s in self.sets]
        count = self.evaluation.loss_batches * self.evaluation.batch_size
        self.loss_sets = [s.labelled_part(count) for s in self.sets]

    def measure(
        self, variables: Any, *, mesh: Mesh | None = None
    ) -> tuple[list[TaskResult], dict[str, Any]]:
        """Every task's result, and the measures over all: ``score``, losses, averages.

        Args:
          variables: the model's.
          mesh: over which they and the examples are spread, of any processes; see `Predictor`.
        """
        predictor = Predictor(
            self.experiment.model,
            variables,
            self.vocabulary,
            inputs_length=self.experiment.data.inputs_length,
            targets_length=self.experiment.data.targets_length,
            batch_size=self.evaluation.batch_size,
            method=self.evaluation.method,
            logits_dtype=self.evaluation.logits_dtype,
            mesh=mesh,
        )
        results = evaluate_tasks(predictor, self.sets, loss_sets=self.loss_sets)
        score = score_of(results)
        overall: dict[str, Any] = {"score": score} if math.isfinite(score) else {}
        overall |= self.held_out_loss(results)
        overall |= averages({r.task: r.metrics for r in results})
        return results, overall

    def held_out_loss(self, results: list[TaskResult]) -> dict[str, float]:
        """Teacher-forced loss over labelled examples, weighted as the mixture weights its tasks.

        ``loss`` is in nats per target token, over all tasks. ``label_loss`` is in nats per example, over
        tasks with label words, and comparable with ``label_prior_entropy`` (given the task) and
        ``joint_label_prior_entropy``: what one pays per example without reading the input.
        """
        every = zip(self.loss_sets, self.weights, results, strict=True)
        chosen = [(s, w, r.loss) for s, w, r in every if w and r.loss is not None]
        if not chosen:
            return {}
        nats, tokens = (sum(w * getattr(loss, part) for _, w, loss in chosen) for part in PARTS)
        found = {"loss": nats / tokens}
        labelled = [(s, w, loss) for s, w, loss in chosen if s.label_words]
        if labelled:
            total = sum(w for _, w, _ in labelled)
            prior = evaluation_sets.label_prior_entropy([(s, w) for s, w, _ in labelled])
            found |= {
                "label_loss": sum(w / total * loss.nats for _, w, loss in labelled),
                "label_prior_entropy": prior["per_task"],
                "joint_label_prior_entropy": prior["joint"],
            }
        return found


PARTS = ("nats", "tokens")
"""Of `TargetLoss`."""


def check_tasks(names: Iterable[str], known: Collection[str], mixture: str) -> None:
    """Raises a `ValueError` that names the first task that a mixture has not."""
    for name in names:
        if name not in known:
            raise ValueError(
                f"the run's mixture {mixture!r} has no task {name!r}{suggestion(name, known)}; "
                f"its tasks: {', '.join(sorted(known))}"
            )


def log_values(results: list[TaskResult], overall: dict[str, Any]) -> dict[str, float]:
    """One flat dictionary for ``metrics.jsonl``."""
    return {**overall, **flat(results)}
