"""Converts data sets of `tf.data` to T5's text formats (Raffel et al. 2020, appendix D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from etils import epy

from synthesizer_jax.tasks.postprocessors import UNKNOWN

with epy.lazy_imports():
    import tensorflow as tf

Row: TypeAlias = "dict[str, tf.Tensor]"
"""The features of a row by name. Only ``idx`` may be a dictionary of tensors."""


def classification(
    dataset: tf.data.Dataset,
    *,
    prefix: str,
    features: Sequence[str] | Mapping[str, str],
    labels: Sequence[str],
) -> tf.data.Dataset:
    """Formats rows as ``prefix key1: value1 key2: value2 …``, with a label word as the target.

    Args:
      dataset: rows with `features`, an integer ``label`` and optionally ``idx``.
      prefix: the first word of the input.
      features: the names of the features in the order of the input. To write a different name in
        the input, pass a dictionary ``{key: feature}``.
      labels: the label words, indexed by the integer label.
    """
    return dataset.map(
        lambda row: {
            "inputs": _format_input(row, prefix, features),
            "targets": _label_word(row["label"], labels),
            **_index(row),
        }
    )


def _format_input(row: Row, prefix: str, features: Sequence[str] | Mapping[str, str]) -> tf.Tensor:
    """Returns the input, which is the prefix followed by ``key: value`` for every feature."""
    names = features if isinstance(features, Mapping) else {name: name for name in features}
    words = [part for key, name in names.items() for part in (f"{key}:", row[name])]
    return tf.strings.join([prefix, *words], separator=" ")


def _label_word(label: tf.Tensor, labels: Sequence[str]) -> tf.Tensor:
    """Returns the label word of an integer label, or `UNKNOWN` for −1."""
    return tf.gather(tf.constant([UNKNOWN, *labels]), tf.cast(label, tf.int64) + 1)


def _index(row: Row) -> Row:
    """Returns the features that identify a row of the original files."""
    index = row.get("idx", {})
    if isinstance(index, dict):
        return {f"idx/{name}": value for name, value in index.items()}
    return {"idx": index}


def text_to_text(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]
) -> tf.data.Dataset:
    """Formats rows as ``prefix source``, and keeps the target as it is.

    The function takes the place of T5's `translate` and `summarize`.

    Args:
      dataset: rows with `features`.
      prefix: the first words of the input.
      features: the names of the features of the source and of the target.
    """
    source, target = features
    return dataset.map(
        lambda row: {
            "inputs": tf.strings.join([prefix, row[source]], separator=" "),
            "targets": row[target],
        }
    )


def language_modeling(dataset: tf.data.Dataset, *, feature: str = "text") -> tf.data.Dataset:
    """Uses the texts of the rows as targets. The examples have no inputs."""
    return dataset.map(lambda row: {"targets": row[feature]})


def dialogue(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats dialogues as ``dialogue history: … persona: …``, with the reply as the target.

    The history consists of the latest eight utterances, separated by `` | ``. The speakers take
    turns. The persona consists of sentences about the speaker of the reply. A row may have no
    persona. The persona comes last, so that no utterance is lost if the end of the input is cut
    off.
    """

    def convert(row: Row) -> Row:
        history = tf.strings.reduce_join(row["history"][-8:], separator=" | ")
        persona = tf.strings.reduce_join(row["persona"], separator=" ")
        part = tf.where(tf.size(row["persona"]) > 0, tf.strings.join([" persona: ", persona]), "")
        return {
            "inputs": tf.strings.join(["dialogue history: ", history, part]),
            "targets": row["reply"],
        }

    return dataset.map(convert)


def similarity(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]
) -> tf.data.Dataset:
    """Formats STS-B. The target is the score, rounded to a multiple of 0.2.

    The score is ``round(label · 5) / 5``, where halves are rounded to even numbers.
    """

    def convert(row: Row) -> Row:
        label = tf.cast(row["label"], tf.float32)
        return {
            "inputs": _format_input(row, prefix, features),
            "targets": tf.strings.as_string(tf.round(label * 5) / 5, precision=1),
            "label": label,
            **_index(row),
        }

    return dataset.map(convert)


def multirc(dataset: tf.data.Dataset, *, labels: Sequence[str]) -> tf.data.Dataset:
    """Formats MultiRC as question, answer and paragraph.

    The tag ``<br>`` becomes a space, and ``<b>`` is removed.
    """

    def convert(row: Row) -> Row:
        text = _format_input(row, "multirc", ("question", "answer", "paragraph"))
        text = tf.strings.regex_replace(text, "<br>", " ")
        return {
            "inputs": tf.strings.regex_replace(text, "<(/)?b>", ""),
            "targets": _label_word(row["label"], labels),
            **_index(row),
        }

    return dataset.map(convert)


def record(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats ReCoRD as query, entities and passage.

    The result has one row for every answer. If a row has no answers, its target is `UNKNOWN`.
    """

    def convert(row: Row) -> Row:
        # Highlights become sentences of the passage. If the text before a highlight does not end
        # with a period or similar, a period is added.
        passage = tf.strings.regex_replace(
            row["passage"], r"(\.|\?|\!|\"|\')\n@highlight\n", r"\1 "
        )
        passage = tf.strings.regex_replace(passage, r"\n@highlight\n", ". ")
        entities = tf.strings.reduce_join(row["entities"], separator=", ")
        parts = ["record query:", row["query"], "entities:", entities, "passage:", passage]
        answers = row["answers"]
        targets = tf.cond(tf.size(answers) > 0, lambda: answers, lambda: tf.constant([UNKNOWN]))
        num_rows = tf.shape(targets)[:1]
        same = {"inputs": tf.strings.join(parts, separator=" "), **_index(row)}
        return {
            "targets": targets,
            "answers": tf.tile(answers[None], [num_rows[0], 1]),
            **{name: tf.fill(num_rows, value) for name, value in same.items()},
        }

    return dataset.map(convert).unbatch()


# Question answering. -----------------------------------------------------------------------------


def squad(dataset: tf.data.Dataset, *, context: bool = True) -> tf.data.Dataset:
    """Formats SQuAD as ``question: … context: …``, with the first answer as the target.

    Spaces are put around every ASCII punctuation character, and white space is reduced to single
    spaces. The feature ``answers`` holds all answers.

    Args:
      dataset: rows of ``squad/v1.1``.
      context: whether inputs contain the context. Without the context, inputs have the form ``squad
        trivia question: …``.
    """

    def convert(row: Row) -> Row:
        question, passage = _pad_punctuation(row["question"]), _pad_punctuation(row["context"])
        answers = _pad_punctuation(row["answers"]["text"])
        with_context = ["question:", question, "context:", passage]
        parts = with_context if context else ["squad trivia question:", question]
        return {
            "inputs": _squeeze(tf.strings.join(parts, separator=" ")),
            "targets": answers[0],
            "answers": answers,
        }

    return dataset.map(convert)


def _pad_punctuation(text: tf.Tensor) -> tf.Tensor:
    """Returns the text with spaces around every ASCII punctuation character."""
    return _squeeze(tf.strings.regex_replace(text, r"([[:punct:]])", r" \1 "))


def _squeeze(text: tf.Tensor) -> tf.Tensor:
    """Returns the text with single spaces in place of white space."""
    return tf.strings.regex_replace(text, r"\s+", " ")


def takes_batches(preprocess: Callable[..., tf.data.Dataset] | None) -> bool:
    """Returns whether a preprocessor gives the same result for batches of rows as for single rows.

    The result is true for preprocessors that convert every row separately with string operations.
    """
    elementwise = (classification, text_to_text, language_modeling, similarity, multirc)
    return preprocess is None or getattr(preprocess, "func", preprocess) in elementwise
