"""What a model must beat: the most frequent answer, and a linear model over words."""

from __future__ import annotations

from collections import Counter
from typing import Any

from synthesizer_jax.data.definitions import TaskDefinition
from synthesizer_jax.data.embedded.definitions import DEFINITIONS, as_text, config_of
from synthesizer_jax.data.embedded.rows import Row, examples
from synthesizer_jax.data.evaluation_sets import EvaluationSet


def majority() -> dict[str, float]:
    """Main metric in percent of always giving the most frequent training answer, by task.

    For WSC, whose answers are names, always "the referent is meant" or never, as the rows' labels
    have it more often.
    """
    found = {}
    for task in DEFINITIONS:
        answers = [answer_of(task, row) for row in examples(config_of(task), "train")]
        common = Counter(answers).most_common(1)[0][0]
        found[task.name] = score(task, lambda rows, common=common: [common] * len(rows))
    return found


def bag_of_words() -> dict[str, float]:
    """Main metric in percent of logistic regression over the words that occur, by task.

    STS-B is ridge regression, rounded to fifths. WSC judges whether the row's own referent is meant,
    fitted to rows with both labels; it is shown the referent, which the T5 model has to name.
    """
    found = {}
    for task in DEFINITIONS:
        train = examples(config_of(task), "validation" if task.kind == "wsc" else "train")
        if task.kind == "wsc":
            # Held-out rows alone carry both labels: fit to one half, judge the other.
            half = len(train) // 2
            model = fitted(task, train[:half])
            rows = train[half:]
            wanted = [answer_of(task, row) for row in rows]
            hits = [a == b for a, b in zip(model(rows), wanted, strict=True)]
            found[task.name] = 100 * sum(hits) / len(hits)
            continue
        found[task.name] = score(task, fitted(task, train))
    return found


def fitted(task: TaskDefinition, rows: list[Row]) -> Any:
    """A function from rows to answers."""
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.pipeline import make_pipeline

    words = CountVectorizer(binary=True, token_pattern=r"[^ ]+")
    if task.kind == "similarity":
        ridge = make_pipeline(words, Ridge(alpha=3.0))
        ridge.fit([text_of(task, r) for r in rows], [r["label"] for r in rows])
        return lambda new: [f"{x:.1f}" for x in ridge.predict([text_of(task, r) for r in new])]
    model = make_pipeline(words, LogisticRegression(C=0.3, max_iter=300))
    model.fit([text_of(task, r) for r in rows], [answer_of(task, r) for r in rows])
    return lambda new: model.predict([text_of(task, r) for r in new]).tolist()


def text_of(task: TaskDefinition, row: Row) -> str:
    """What the linear model reads."""
    inputs, _ = as_text(task, row)
    return f"{inputs} {row['span1_text']}" if task.kind == "wsc" else inputs


def answer_of(task: TaskDefinition, row: Row) -> str:
    """What the linear model says."""
    return str(row["label"]) if task.kind == "wsc" else as_text(task, row)[1]


def score(task: TaskDefinition, answer: Any) -> float:
    """The task's first metric on its held-out rows."""
    rows = examples(config_of(task), "validation")
    given = answer(rows)
    if task.kind == "wsc":
        return 100 * sum(a == str(r["label"]) for a, r in zip(given, rows, strict=True)) / len(rows)
    shown = [
        {"inputs_pretokenized": inputs, "targets_pretokenized": targets}
        for inputs, targets in (as_text(task, row) for row in rows)
    ]
    held_out = EvaluationSet(task, "validation", [], [], shown)
    return next(iter(held_out.score(given).values()))
