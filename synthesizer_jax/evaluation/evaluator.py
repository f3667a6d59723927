"""Computes the held-out loss and the metrics of every task for a run."""

from __future__ import annotations

import itertools
import math

from jax.sharding import Mesh

from synthesizer_jax.base.messages import Phase, did_you_mean, silent_phase
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import MaskedLM
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.evaluation import evaluation_sets
from synthesizer_jax.evaluation.benchmarks import averages
from synthesizer_jax.evaluation.config import RANK, Evaluation
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.evaluation.scoring import TaskResult, evaluate_tasks, mean_score
from synthesizer_jax.models import Encoder, TextToText
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.splits import import_remedy, names_of_split, task_objective


class Evaluator:
    """Evaluates models on the held-out examples of a mixture.

    The examples are loaded only once.

    Args:
      model: the configured, unbound model.
      data: the configuration of the data on which the model was trained.
      evaluation: the configuration of what to measure.
      prepared: the data directory and the vocabulary of the prepared examples.
      only: names of the tasks to evaluate. The name of a trained task also selects the tasks that
        are only evaluated and measure it, such as mismatched MNLI for MNLI. None means all tasks.

    Attributes:
      sets: the examples of every task that has the split.
      loss_sets: for each set, the examples whose loss is computed.
      lacking: the tasks of the mixture that do not have the split.

    Raises:
      ValueError: if `only` names a task that is not in the mixture, or the model is a masked
        language model and a task requires answers.
      FileNotFoundError: if no task has the split.
    """

    def __init__(
        self,
        model: TextToText | Encoder,
        data: DataConfig,
        evaluation: Evaluation,
        *,
        prepared: PreparedTasks,
        only: list[str] | None = None,
    ):
        check_masked_tasks(model, data)
        self.model, self.data, self.evaluation = model, data, evaluation
        self.vocabulary = prepared.vocabulary
        mixture, split = data.mixture, evaluation.split
        members = task_registry.member_names(mixture)
        # Collect the names of evaluated tasks and of the trained tasks that they measure, because
        # `only` may contain both kinds of names.
        measures = {
            pair: names_of_split(*pair)
            for pair in evaluation_sets.evaluation_tasks(mixture, prepared, split)
        }
        names = {*members, *itertools.chain(*measures.values())}
        asked = set(only or members)
        for name in asked - names:
            hint = did_you_mean(name, names) or "."
            raise ValueError(
                f"The run's mixture {mixture!r} has no task {name!r}{hint} Its tasks are "
                f"{', '.join(sorted(names))}."
            )
        pairs = [pair for pair, measured in measures.items() if measured & asked]
        if not pairs:
            stored = (task_registry.find_task(t).stored_splits(prepared.data_dir) for t in asked)
            splits = dict.fromkeys(itertools.chain(*stored))
            choice = ""
            if splits:
                choice = (
                    f"Choose {' or '.join(splits)} with --split or evaluation.split, or add the "
                    "missing split. "
                )
            raise FileNotFoundError(
                f"{', '.join(only) if only else mixture} has no examples of the split {split!r} in "
                f"{prepared.root}. {choice}{import_remedy(members, prepared.data_dir)}"
            )
        self.lacking = sorted(asked.difference(*(measures[pair] for pair in pairs)))
        self.sets = [
            evaluation_sets.load_evaluation_set(
                task,
                part,
                prepared,
                lengths=data.lengths,
                max_examples=evaluation.max_examples,
                objective=task_objective(data, task_registry.find_task(task)),
                ids=model.ids,
            )
            for task, part in pairs
        ]
        rates = prepared.rates(mixture) or {}
        self.weights = [evaluation_sets.loss_weight(rates, s.task.name) for s in self.sets]
        count = evaluation.loss_batches * evaluation.batch_size
        self.loss_sets = [s.labeled_part(count) for s in self.sets]

    def measure(
        self, variables: Variables, *, mesh: Mesh | None = None, phase: Phase = silent_phase
    ) -> tuple[list[TaskResult], dict[str, float]]:
        """Returns the results of every task, and the results over all tasks.

        The results over all tasks are ``score``, the losses and the averages of benchmarks.
        ``score`` decides which checkpoints are kept and when a run stops early. The score is the
        mean over tasks of the mean of each task's metrics. If no task has a metric, for example
        because all tasks are texts, the score is −``loss``. The mean does not include the measures
        of texts, because they are lower for a better model and are not percentages.

        Args:
          variables: the variables of the model.
          mesh: the mesh that shards the variables and the examples; see `Predictor`.
          phase: a function that is called with the name and the size of every task, to report
            progress.
        """
        data, evaluation = self.data, self.evaluation
        predictor = Predictor(
            self.model,
            variables,
            self.vocabulary,
            inputs_length=data.inputs_length,
            decoding=evaluation.decoding(
                data.targets_length,
                beams=evaluation.beams if evaluation.method == "beam" else 1,
                logits_dtype=evaluation.logits_dtype,
            ),
            ranks=evaluation.method == RANK,
            classes=data.classes,
            batch_size=evaluation.batch_size,
            mesh=mesh,
        )
        results = evaluate_tasks(predictor, self.sets, loss_sets=self.loss_sets, phase=phase)
        losses = self._held_out_loss(results)
        score = mean_score(results)
        if not any(result.metrics for result in results):
            score = -losses.get("loss", math.nan)
        overall = {"score": score} if math.isfinite(score) else {}
        return results, overall | losses | averages({r.task: r.metrics for r in results})

    def _held_out_loss(self, results: list[TaskResult]) -> dict[str, float]:
        """Returns the teacher-forced loss of labeled examples, weighted by the mixture's rates.

        ``loss`` is in nats per target token, over all tasks. ``label_loss`` is in nats per example,
        over tasks with label words. Compare ``label_loss`` with the losses of a model that does not
        read the input: ``label_prior_entropy`` for a model that knows the task, and
        ``joint_label_prior_entropy`` for a model that does not.
        """
        weighted = zip(self.loss_sets, self.weights, results, strict=True)
        chosen = [(s, w, r.loss) for s, w, r in weighted if w and r.loss is not None]
        if not chosen:
            return {}
        nats = sum(w * loss.nats for _, w, loss in chosen)
        losses = {"loss": nats / sum(w * loss.tokens for _, w, loss in chosen)}
        labeled = [(s, w, loss) for s, w, loss in chosen if s.task.label_words]
        if labeled:
            total = sum(w for _, w, _ in labeled)
            prior = evaluation_sets.label_prior_entropy([(s, w) for s, w, _ in labeled])
            losses |= {
                "label_loss": sum(w / total * loss.nats for _, w, loss in labeled),
                "label_prior_entropy": prior["per_task"],
                "joint_label_prior_entropy": prior["joint"],
            }
        return losses


def check_masked_tasks(model: TextToText | Encoder, data: DataConfig) -> None:
    """Raises a `ValueError` if the model is a masked language model and a task requires answers.

    The message names the first task whose targets are not masked tokens.
    """
    if not (isinstance(model, Encoder) and model.masked_lm):
        return
    for name in task_registry.member_names(data.mixture):
        if not isinstance(task_objective(data, task_registry.find_task(name)), MaskedLM):
            raise ValueError(
                f"The task {name} cannot be used with a masked language model, which can only "
                "predict masked tokens. Choose a task without inputs and without its own "
                "objective, and set data.objective=masked_lm."
            )
