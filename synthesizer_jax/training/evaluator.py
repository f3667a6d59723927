"""What a run measures of itself: held-out loss and every task's metrics."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from typing import Any

import numpy as np
from jax.sharding import Mesh

from synthesizer_jax.data import evaluation_sets
from synthesizer_jax.data.averages import averages
from synthesizer_jax.data.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation import (
    Predictor,
    TaskResult,
    evaluate_tasks,
    flat,
    score_of,
    write_results,
)
from synthesizer_jax.sharding import BATCH_AXES, batch_sharding, on_mesh, spread, whole
from synthesizer_jax.training.experiment import Evaluation, Experiment


class Evaluator:
    """A mixture's held-out examples, loaded once, and the measures over them.

    Args:
      experiment: the run; its mixture is registered.
      vocabulary: the built vocabulary.
      data_dir: where data sets lie.
      evaluation: None is the experiment's own.
      only: task names to keep; None keeps all.
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
        mixture = experiment.data.mixture
        pairs = evaluation_sets.evaluation_tasks(mixture, data_dir, self.evaluation.split)
        pairs = [pair for pair in pairs if not only or pair[0] in only]
        if not pairs:
            raise FileNotFoundError(
                f"no task of {mixture!r} has examples of the split {self.evaluation.split!r} in "
                f"{data_dir}; choose another --split, or train without evaluation"
            )
        self.sets = [
            evaluation_sets.load(
                task,
                split,
                vocabulary,
                data_dir=data_dir,
                lengths=experiment.data.lengths,
                max_examples=self.evaluation.max_examples,
            )
            for task, split in pairs
        ]
        self.weights = [evaluation_sets.weight(mixture, s.name) for s in self.sets]

    def measure(
        self, variables: Any, *, mesh: Mesh | None = None
    ) -> tuple[list[TaskResult], dict[str, Any]]:
        """Every task's result, and the measures over all: ``score``, losses, averages.

        Args:
          variables: the model's.
          mesh: over which they and the examples are spread, of any processes; batches are filled up
            to what it divides. None: one device.
        """
        model, batch_size = self.experiment.model, self.evaluation.batch_size
        places: dict[str, Any] = {}
        if mesh is not None and mesh.size > 1:
            sharding = batch_sharding(mesh)
            ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
            batch_size = -(-batch_size // ways) * ways
            places = {"put": functools.partial(spread, sharding=sharding), "fetch": whole}
        predictor = Predictor(
            model,
            variables,
            self.vocabulary,
            inputs_length=self.experiment.data.inputs_length,
            targets_length=self.experiment.data.targets_length,
            batch_size=batch_size,
            method=self.evaluation.method,
            logits_dtype=self.evaluation.logits_dtype,
            **places,
        )
        with contextlib.nullcontext() if mesh is None else on_mesh(mesh):
            results = evaluate_tasks(predictor, self.sets)
            losses = self.held_out_loss(predictor, results)
        overall: dict[str, Any] = {"score": score_of(results), **losses}
        overall |= averages({r.task: r.metrics for r in results})
        return results, overall

    def held_out_loss(self, predictor: Predictor, results: list[TaskResult]) -> dict[str, float]:
        """Teacher-forced loss over the sets, weighted as the mixture weights its tasks.

        ``loss`` is in nats per target token, ``loss_per_example`` in nats per example, comparable
        with ``label_prior_entropy`` (given the task) and ``joint_label_prior_entropy``: what one
        pays per example without reading the input. Only tasks with label words enter.
        """
        sets = zip(self.sets, self.weights, results, strict=True)
        chosen = [(s, w, r.scores) for s, w, r in sets if w and s.label_words]
        if not chosen:
            return {}
        total = sum(w for _, w, _ in chosen)
        nats, tokens = 0.0, 0.0
        for examples, w, scores in chosen:
            words = examples.label_words or ()
            logp = predictor.rank(examples.inputs, words) if scores is None else scores
            wanted = [words.index(word) for word in examples.target_words]
            nats -= w / total * float(np.mean(logp[np.arange(len(wanted)), wanted]))
            tokens += w / total * float(np.mean([len(t) for t in examples.targets]))
        prior = evaluation_sets.label_prior_entropy([(s, w) for s, w, _ in chosen])
        return {
            "loss": nats / tokens,
            "loss_per_example": nats,
            "label_prior_entropy": prior["per_task"],
            "joint_label_prior_entropy": prior["joint"],
        }

    def write(
        self, directory: pathlib.Path, step: int, variables: Any
    ) -> tuple[list[TaskResult], dict[str, Any]]:
        """Measures and writes ``evaluation/step_<step>.json``."""
        results, overall = self.measure(variables)
        write_results(directory, step, results, overall)
        return results, overall


def log_values(results: list[TaskResult], overall: dict[str, Any]) -> dict[str, float]:
    """One flat dictionary for ``metrics.jsonl``."""
    return {**overall, **flat(results)}


def describe(sets: list[EvaluationSet]) -> str:
    """How many examples of which tasks."""
    return ", ".join(f"{s.name} {len(s.inputs):,}" for s in sets)
