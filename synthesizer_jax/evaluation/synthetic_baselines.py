"""Baselines for the synthetic tasks: the most frequent target, and linear models over words."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable

from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.tasks.formats import WSC, Similarity
from synthesizer_jax.tasks.synthetic.definitions import DEFINITIONS, as_text, config_name
from synthesizer_jax.tasks.synthetic.rows import Row, examples
from synthesizer_jax.tasks.task import Task

Answer = Callable[[list[Row]], list[str]]
"""Maps rows to predictions."""


def majority_scores() -> dict[str, float]:
    """Returns the main metric, in percent, of always predicting the most frequent training target.

    For WSC, whose targets are names, the most frequent label is used.
    """
    found = {}
    for task in DEFINITIONS:
        answers = [_label(task, row) for row in examples(config_name(task), "train")]
        common = Counter(answers).most_common(1)[0][0]
        found[task.name] = _score_answers(task, functools.partial(_repeat_answer, common))
    return found


def bag_of_words_scores() -> dict[str, float]:
    """Returns the main metric, in percent, of logistic regression over the words of the inputs by task.

    STS-B uses ridge regression. WSC is classified by label, from the inputs and the candidate, which the
    T5 model has to name.
    """
    found = {}
    for task in DEFINITIONS:
        train = examples(
            config_name(task), "validation" if isinstance(task.format, WSC) else "train"
        )
        if isinstance(task.format, WSC):
            # Only held-out rows have both labels: fit to the first half, score the second one.
            half = len(train) // 2
            model = _fit_linear_model(task, train[:half])
            rows = train[half:]
            wanted = [_label(task, row) for row in rows]
            hits = [a == b for a, b in zip(model(rows), wanted, strict=True)]
            found[task.name] = 100 * sum(hits) / len(hits)
            continue
        found[task.name] = _score_answers(task, _fit_linear_model(task, train))
    return found


def _fit_linear_model(task: Task, rows: list[Row]) -> Answer:
    """Returns a function from rows to predictions."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline

    words = CountVectorizer(binary=True, token_pattern=r"[^ ]+")
    if isinstance(task.format, Similarity):
        ridge = make_pipeline(words, Ridge(alpha=3.0))
        ridge.fit([_feature_text(task, r) for r in rows], [r["label"] for r in rows])
        return lambda new: [
            f"{x:.1f}" for x in ridge.predict([_feature_text(task, r) for r in new])
        ]
    model = make_pipeline(words, LogisticRegression(C=0.3, max_iter=300))
    model.fit([_feature_text(task, r) for r in rows], [_label(task, r) for r in rows])
    return lambda new: model.predict([_feature_text(task, r) for r in new]).tolist()


def _repeat_answer(answer: str, rows: list[Row]) -> list[str]:
    return [answer] * len(rows)


def _feature_text(task: Task, row: Row) -> str:
    """Returns the text of a row that the linear model reads."""
    inputs, _ = as_text(task, row)
    return f"{inputs} {row['span1_text']}" if isinstance(task.format, WSC) else inputs


def _label(task: Task, row: Row) -> str:
    """Returns what the linear model has to predict."""
    return str(row["label"]) if isinstance(task.format, WSC) else as_text(task, row)[1]


def _score_answers(task: Task, answer: Answer) -> float:
    """Returns the task's first metric on its held-out rows."""
    rows = examples(config_name(task), "validation")
    given = answer(rows)
    if isinstance(task.format, WSC):
        return 100 * sum(a == str(r["label"]) for a, r in zip(given, rows, strict=True)) / len(rows)
    shown = [
        {"inputs_pretokenized": inputs, "targets_pretokenized": targets}
        for inputs, targets in (as_text(task, row) for row in rows)
    ]
    held_out = EvaluationSet(task, "validation", [], [], shown)
    return next(iter(held_out.score(given).values()))
