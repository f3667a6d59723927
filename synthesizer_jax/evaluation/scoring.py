"""Computes the results of a model on every task, and writes files of results.

Results are metrics, losses of the targets and measures of texts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from synthesizer_jax.base.files import refuse_links, write_atomic
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import plain_json
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.tasks.task import Answers

LOWER_IS_BETTER = ("loss", "perplexity", "word_perplexity", "bits_per_byte")
"""The names of the measures for which lower is better: the loss, and the measures of texts.

For all other results, which are metrics, higher is better.
"""

RESULTS_FILE = "results.json"
"""The name of the file of results in the folder of an evaluation."""

PART = "part"
"""The name of the folder for the last evaluation of only some tasks or examples.

The folder is beside the files of a whole evaluation, because a partial evaluation must not replace
the files of a whole evaluation.
"""


@dataclasses.dataclass(frozen=True)
class TargetLoss:
    """The teacher-forced loss of targets.

    Attributes:
      nats: negative log-probability of a target, averaged over examples.
      tokens: number of tokens of a target, including EOS, averaged over examples. The number is 1
        if the target is a class.
    """

    nats: float
    tokens: float

    @property
    def per_token(self) -> float:
        """The loss in nats per target token."""
        return self.nats / self.tokens


@dataclasses.dataclass(frozen=True)
class TaskResult:
    """The results of one task.

    Attributes:
      task: name of the task.
      split: the split.
      n: number of examples.
      labeled: number of examples with a label. Only labeled examples are scored.
      metrics: metrics over the labeled examples. Metrics of T5's tasks are in percent. The
        dictionary is empty if no example has a label.
      predictions: predictions in the order of the examples. The list is empty for texts.
      scores: ``[n]`` log-probabilities of the predictions, or of the texts, in nats.
      ranked: ``[n, words]`` log-probabilities of the label words, or None if the label words were
        not ranked.
      words: the label words that were ranked.
      loss: the loss over labeled examples or over all texts, or None if the loss was not computed.
      text_metrics: the measures of texts, for which lower is better; see the function
        `text_metrics`. The dictionary is empty for other tasks.
    """

    task: str
    split: str
    n: int
    labeled: int
    metrics: dict[str, float]
    predictions: tuple[str, ...]
    scores: np.ndarray
    ranked: np.ndarray | None = None
    words: tuple[str, ...] = ()
    loss: TargetLoss | None = None
    text_metrics: dict[str, float] = dataclasses.field(default_factory=dict)


def evaluate_tasks(
    predictor: Predictor,
    sets: Sequence[EvaluationSet],
    *,
    loss_sets: Sequence[EvaluationSet] | None = None,
    phase: Phase = silent_phase,
) -> list[TaskResult]:
    """Predicts and scores every evaluation set. For texts, only losses are computed.

    Args:
      predictor: the model.
      sets: the evaluation sets.
      loss_sets: for each evaluation set, the labeled examples over which the loss is computed. None
        means that no losses are computed.
      phase: a function that is called with the name and the size of every set, to report progress.
    """
    results = []
    for i, examples in enumerate(sets):
        task = examples.task
        size = len(examples.inputs)
        loss_set = loss_sets[i] if loss_sets else None
        # `passes` is the number of inputs that the model reads, which is needed to report progress.
        if task.is_text:
            window = predictor.decoding.max_length
            passes = sum(-(-len(target) // window) for target in examples.targets)
        else:
            # The model reads each example once to predict an answer. The model reads an example
            # again if a metric or the loss needs the log-probability of the target.
            passes = size * (1 + task.scores_targets)
            if loss_set:
                passes += len(loss_set.inputs)
        predictor.advance = phase(f"{task.name}, {examples.split}: {size:,} examples", passes)
        if task.is_text:
            results.append(_evaluate_texts(predictor, examples))
        else:
            results.append(_evaluate_answers(predictor, examples, loss_set))
    return results


def _evaluate_answers(
    predictor: Predictor, examples: EvaluationSet, loss_set: EvaluationSet | None
) -> TaskResult:
    """Returns the result of an evaluation set with inputs, for which the model predicts answers.

    Args:
      predictor: the model.
      examples: the set.
      loss_set: the labeled examples over which the loss is computed. None means that no loss is
        computed.
    """
    task = examples.task
    predictions = predictor.predict(examples.inputs, task.label_words)
    answers = Answers(predictions.texts, predictions.tokens, predictions.scores)
    if task.scores_targets:
        logp = predictor.log_probabilities(examples.inputs, examples.targets)
        answers = answers._replace(target_scores=logp)
    return TaskResult(
        task=task.name,
        split=examples.split,
        n=len(examples.inputs),
        labeled=len(examples.labeled),
        metrics=examples.score(answers),
        predictions=tuple(predictions.texts),
        scores=predictions.scores,
        ranked=predictions.ranked,
        words=predictions.words,
        loss=_target_loss(predictor, loss_set) if loss_set else None,
    )


def _evaluate_texts(predictor: Predictor, examples: EvaluationSet) -> TaskResult:
    """Returns the result of a set of texts, which consists of the loss and measures of texts."""
    nats = text_nats(predictor, examples.inputs, examples.targets)
    tokens = predictor.count_tokens(examples.targets)
    # Count words and bytes only if the targets are the whole texts.
    texts = None if any(map(len, examples.inputs)) else examples.target_words
    return TaskResult(
        task=examples.task.name,
        split=examples.split,
        n=len(examples.targets),
        labeled=len(examples.targets),
        metrics={},
        predictions=(),
        scores=-nats,
        loss=TargetLoss(nats=float(nats.mean()), tokens=float(tokens.mean())),
        text_metrics=text_metrics(nats, tokens, texts),
    )


def text_nats(
    predictor: Predictor, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
) -> np.ndarray:
    """Returns the negative log-probabilities of texts of any length, a float64 array ``[n]``.

    The length of the targets in a training row is the ``max_length`` of `Predictor.decoding`. A
    longer text is evaluated in consecutive windows of this length. Every token of a text counts
    exactly once. Each window starts without context. The loss of a window's first tokens is
    therefore higher than with the preceding text as context.

    Args:
      predictor: the model.
      inputs: token ids that the model reads before each text. An array is empty if the model reads
        nothing before the text.
      targets: token ids of each text, with EOS. Padding replaces tokens that an objective does not
        predict.
    """
    length = predictor.decoding.max_length
    starts = [(i, s) for i, t in enumerate(targets) for s in range(0, len(t), length)]
    scores = predictor.log_probabilities(
        [inputs[i] for i, _ in starts], [targets[i][s : s + length] for i, s in starts]
    )
    nats = np.zeros(len(targets))
    np.subtract.at(nats, [i for i, _ in starts], scores)
    return nats


def text_metrics(
    nats: np.ndarray, tokens: np.ndarray, texts: Sequence[str] | None
) -> dict[str, float]:
    """Returns the measures of texts, for which lower is better.

    ``perplexity`` is exp(nats / tokens). ``word_perplexity`` is exp(nats / (words + texts)), where
    words are separated by white space. ``bits_per_byte`` is nats / ln 2 / bytes.
    ``word_perplexity`` and ``bits_per_byte`` can be compared between vocabularies.

    Args:
      nats: ``[n]`` negative log-probability of every text, including EOS.
      tokens: ``[n]`` number of tokens of every text, including EOS.
      texts: the texts, whose words and bytes are counted. None means that the targets are not whole
        texts. If the texts are not given, only the perplexity is computed.
    """
    total = float(nats.sum(dtype=np.float64))
    measures = {"perplexity": _exp(total / float(tokens.sum()))}
    if texts:
        measures["word_perplexity"] = _exp(total / sum(len(text.split()) + 1 for text in texts))
        if size := sum(len(text.encode()) for text in texts):
            measures["bits_per_byte"] = total / math.log(2) / size
    return measures


def _exp(nats: float) -> float:
    """Returns the exponential of a number, or infinity if the result is too large for a float."""
    return math.exp(nats) if nats < 700 else math.inf


def _target_loss(predictor: Predictor, examples: EvaluationSet) -> TargetLoss | None:
    """Returns the loss of the targets of a set, or None if the set is empty."""
    if not examples.inputs:
        return None
    logp = predictor.log_probabilities(examples.inputs, examples.targets)
    tokens = predictor.count_tokens(examples.targets)
    return TargetLoss(nats=-float(np.mean(logp)), tokens=float(np.mean(tokens)))


def mean_score(results: Sequence[TaskResult]) -> float:
    """Returns the mean over tasks of each task's mean metric, or NaN if there are no metrics."""
    means = [sum(r.metrics.values()) / len(r.metrics) for r in results if r.metrics]
    return float(np.mean(means)) if means else float("nan")


def flatten_results(results: Sequence[TaskResult]) -> dict[str, float]:
    """Returns all results as ``{"task/metric": value}``.

    The dictionary also contains ``"task/loss"``, in nats per target token.
    """
    values = {
        f"{r.task}/{name}": value
        for r in results
        for name, value in (r.metrics | r.text_metrics).items()
    }
    return values | {f"{r.task}/loss": r.loss.per_token for r in results if r.loss is not None}


def evaluation_folder(
    directory: pathlib.Path, step: int, split: str | None = None, *, part: bool = False
) -> pathlib.Path:
    """Returns the folder in a run's directory for the files of an evaluation.

    Args:
      directory: the directory of the run.
      step: the evaluated step.
      split: the split, or None for the split that the recipe evaluates. If `split` is None, the
        folder is ``evaluation/STEP``. Otherwise, the folder is ``evaluation/STEP/SPLIT``.
      part: whether only some tasks or examples are evaluated. The files of such an evaluation are
        in the subfolder ``part``, because they must not replace the files of a whole evaluation.

    Raises:
      OSError: if a folder in the path is a symbolic link, which might lead out of the run's
        directory.
    """
    for name in filter(None, ("evaluation", str(step), split, PART if part else None)):
        refuse_links(directory)
        directory = directory / name
    return directory


def write_results(
    folder: pathlib.Path, step: int, results: Sequence[TaskResult], *, overall: Mapping[str, float]
) -> pathlib.Path:
    """Writes ``FOLDER/results.json``. Numbers that are not finite are written as ``null``.

    Args:
      folder: the folder of the evaluation.
      step: the evaluated step.
      results: the results of every task.
      overall: the results over all tasks.

    Returns:
      The path of the file.
    """
    tasks = [
        {
            "task": result.task,
            "split": result.split,
            "n": result.n,
            "labeled": result.labeled,
            "metrics": result.metrics | result.text_metrics,
            "loss": None if result.loss is None else result.loss.per_token,
        }
        for result in results
    ]
    text = json.dumps(plain_json({"step": step, "tasks": tasks, **overall}), indent=1)
    return write_atomic(folder / RESULTS_FILE, text + "\n")


def write_predictions(
    folder: pathlib.Path, result: TaskResult, *, examples: EvaluationSet
) -> pathlib.Path:
    """Writes the predictions for a task to ``FOLDER/TASK.jsonl``.

    Each line describes one example. The line contains the `EvaluationSet.record` of the example and
    ``score``, the log-probability of the prediction in nats. If label words were ranked, ``scores``
    contains the log-probability of each word. A text has no prediction, so the ``score`` of a text
    is the log-probability of the text.

    Args:
      folder: the folder of the evaluation.
      result: the result of the task.
      examples: the evaluation set of the task.

    Returns:
      The path of the file.
    """

    def lines() -> Iterable[str]:
        """Yields the lines of the file."""
        for i, prediction in enumerate(result.predictions or (None,) * result.n):
            record = {**examples.record(i, prediction), "score": float(result.scores[i])}
            if result.ranked is not None:
                record["scores"] = dict(zip(result.words, result.ranked[i].tolist(), strict=True))
            yield json.dumps(plain_json(record), ensure_ascii=False) + "\n"

    return write_atomic(folder / f"{result.task}.jsonl", lines())
