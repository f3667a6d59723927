"""T5's text formats, as `tf.data` transformations (Raffel et al. 2020, appendix D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from etils import epy

from synthesizer_jax.tasks.postprocessors import UNKNOWN

with epy.lazy_imports():
    import tensorflow as tf

Row: TypeAlias = "dict[str, tf.Tensor]"
"""Features by name; only ``idx`` may be a dictionary of tensors."""


def classification(
    dataset: tf.data.Dataset,
    *,
    prefix: str,
    features: Sequence[str] | Mapping[str, str],
    labels: Sequence[str],
) -> tf.data.Dataset:
    """Formats rows as ``prefix key1: value1 key2: value2 …`` with a label word as target.

    Args:
      dataset: rows with `features`, an integer ``label`` and optionally ``idx``.
      prefix: the first word of the input.
      features: feature names in input order; ``{key: feature}`` where they are shown by other names.
      labels: label words, indexed by the integer label.
    """
    return dataset.map(
        lambda row: {
            "inputs": _format_input(row, prefix, features),
            "targets": _label_word(row["label"], labels),
            **_index(row),
        }
    )


def _format_input(row: Row, prefix: str, features: Sequence[str] | Mapping[str, str]) -> tf.Tensor:
    names = features if isinstance(features, Mapping) else {name: name for name in features}
    words = [part for key, name in names.items() for part in (f"{key}:", row[name])]
    return tf.strings.join([prefix, *words], separator=" ")


def _label_word(label: tf.Tensor, labels: Sequence[str]) -> tf.Tensor:
    """Returns the word of an integer label, `UNKNOWN` for −1."""
    return tf.gather(tf.constant([UNKNOWN, *labels]), tf.cast(label, tf.int64) + 1)


def _index(row: Row) -> Row:
    """Returns the features that identify a row of the original files."""
    index = row.get("idx", {})
    if isinstance(index, dict):
        return {f"idx/{name}": value for name, value in index.items()}
    return {"idx": index}


def text_to_text(dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]) -> tf.data.Dataset:
    """Formats rows as ``prefix source`` with the target as it is; `features` are the names of both.

    It is T5's `translate` and `summarize`.
    """
    source, target = features
    return dataset.map(
        lambda row: {
            "inputs": tf.strings.join([prefix, row[source]], separator=" "),
            "targets": row[target],
        }
    )


def language_modeling(dataset: tf.data.Dataset, *, feature: str = "text") -> tf.data.Dataset:
    """Returns the texts as targets; there are no inputs."""
    return dataset.map(lambda row: {"targets": row[feature]})


def dialogue(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats dialogues as ``dialogue history: … persona: …`` with the reply as target.

    Utterances are separated by `` | ``, of which the latest eight are kept; the speakers take turns. The
    persona, some sentences about the speaker of the reply, comes last, so that a cut on the right costs no
    utterance; a row may have none.
    """

    def convert(row: Row) -> Row:
        history = tf.strings.reduce_join(row["history"][-8:], separator=" | ")
        persona = tf.strings.reduce_join(row["persona"], separator=" ")
        part = tf.where(tf.size(row["persona"]) > 0, tf.strings.join([" persona: ", persona]), "")
        return {"inputs": tf.strings.join(["dialogue history: ", history, part]), "targets": row["reply"]}

    return dataset.map(convert)


def similarity(dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]) -> tf.data.Dataset:
    """Formats STS-B: the target is the score rounded to a fifth, ``round(label · 5) / 5``, half to even."""

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
    """Formats MultiRC: question, answer, paragraph, with a space for ``<br>`` and without ``<b>``."""

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
    """Formats ReCoRD: query, entities, passage; a row per answer, or one with `UNKNOWN`."""

    def convert(row: Row) -> Row:
        passage = tf.strings.regex_replace(row["passage"], r"(\.|\?|\!|\"|\')\n@highlight\n", r"\1 ")
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


# Question answering. ----------------------------------------------------------------------------------


def squad(dataset: tf.data.Dataset, *, context: bool = True) -> tf.data.Dataset:
    """Formats SQuAD as ``question: … context: …`` with the first answer as target.

    Every ASCII punctuation character gets spaces around it, and white space is squeezed. All answers
    are kept as ``answers``.

    Args:
      dataset: rows of ``squad/v1.1``.
      context: whether the inputs have it; otherwise they are ``squad trivia question: …``.
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
    return _squeeze(tf.strings.regex_replace(text, r"([[:punct:]])", r" \1 "))


def _squeeze(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, r"\s+", " ")


def takes_batches(preprocess: Callable[..., tf.data.Dataset] | None) -> bool:
    """Returns whether a task's `preprocess` makes of batches of rows what it makes of rows."""
    elementwise = (classification, text_to_text, language_modeling, similarity, multirc)
    return preprocess is None or getattr(preprocess, "func", preprocess) in elementwise
