"""T5's text formats, as `tf.data` transformations (Raffel et al. 2020, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from synthesizer_jax.data.postprocessors import UNKNOWN

Row = dict[str, Any]


def classification(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str], labels: Sequence[str]
) -> tf.data.Dataset:
    """``prefix key1: value1 key2: value2 …`` to a label word.

    Args:
      dataset: rows with `features`, an integer ``label`` and maybe ``idx``.
      prefix: first word of the input.
      features: names in the order of the input.
      labels: words in the order of the integers.
    """
    return dataset.map(
        lambda row: {
            "inputs": formatted(row, prefix, features),
            "targets": label_word(row["label"], labels),
            **kept(row),
        },
        num_parallel_calls=1,
    )


def formatted(row: Row, prefix: str, features: Sequence[str]) -> tf.Tensor:
    """The input string."""
    words: list[Any] = [prefix]
    for name in features:
        words += [f"{name}:", row[name]]
    return tf.strings.join(words, separator=" ")


def translation(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]
) -> tf.data.Dataset:
    """``prefix source`` to the target, T5's `translate`; `features` are source and target."""
    source, target = features
    return dataset.map(
        lambda row: {
            "inputs": tf.strings.join([prefix, row[source]], separator=" "),
            "targets": row[target],
        },
        num_parallel_calls=1,
    )


def label_word(label: tf.Tensor, labels: Sequence[str]) -> tf.Tensor:
    """The word of an integer label, `UNKNOWN` for −1."""
    return tf.gather(tf.constant([UNKNOWN, *labels]), tf.cast(label, tf.int64) + 1)


def kept(row: Row) -> Row:
    """What matches predictions with rows of the original files."""
    index = row.get("idx")
    if isinstance(index, dict):
        return {f"idx/{name}": value for name, value in index.items()}
    return {} if index is None else {"idx": index}


def similarity(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]
) -> tf.data.Dataset:
    """STS-B: the target is the score rounded to a fifth, ``round(label · 5) / 5``, half to even."""

    def convert(row: Row) -> Row:
        score = tf.round(tf.cast(row["label"], tf.float32) * 5) / 5
        target = tf.strings.as_string(score, precision=1)
        return {
            "inputs": formatted(row, prefix, features),
            "targets": target,
            "label": tf.cast(row["label"], tf.float32),
            **kept(row),
        }

    return dataset.map(convert, num_parallel_calls=1)


def multirc(dataset: tf.data.Dataset, *, labels: Sequence[str]) -> tf.data.Dataset:
    """MultiRC: question, answer, paragraph; ``<br>`` becomes a space, ``<b>`` and ``</b>`` vanish."""

    def convert(row: Row) -> Row:
        text = formatted(row, "multirc", ("question", "answer", "paragraph"))
        text = tf.strings.regex_replace(text, "<br>", " ")
        return {
            "inputs": tf.strings.regex_replace(text, "<(/)?b>", ""),
            "targets": label_word(row["label"], labels),
            **kept(row),
        }

    return dataset.map(convert, num_parallel_calls=1)


def record(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """ReCoRD: one row per distinct answer, one row with `UNKNOWN` where answers are hidden."""

    def convert(row: Row) -> Row:
        passage = tf.strings.regex_replace(
            row["passage"], r"(\.|\?|\!|\"|\')\n@highlight\n", r"\1 "
        )
        passage = tf.strings.regex_replace(passage, r"\n@highlight\n", ". ")
        parts = [
            *("record query:", row["query"], "entities:"),
            tf.strings.reduce_join(row["entities"], separator=", "),
            *("passage:", passage),
        ]
        answers = row["answers"]
        targets = tf.cond(tf.size(answers) > 0, lambda: answers, lambda: tf.constant([UNKNOWN]))
        rows = tf.shape(targets)[:1]
        return {
            "inputs": tf.fill(rows, tf.strings.join(parts, separator=" ")),
            "targets": targets,
            "answers": tf.tile(answers[None], [rows[0], 1]),
            **{name: tf.fill(rows, value) for name, value in kept(row).items()},
        }

    return dataset.map(convert, num_parallel_calls=1).unbatch()


def renamed(dataset: tf.data.Dataset, *, names: dict[str, str]) -> tf.data.Dataset:
    """Rows with some features under other names."""
    return dataset.map(
        lambda row: {names.get(name, name): value for name, value in row.items()},
        num_parallel_calls=1,
    )


def append_sentinel(
    dataset: tf.data.Dataset,
    *,
    sequence_length: dict[str, int] | None = None,
    sentinel: int,
) -> tf.data.Dataset:
    """The first sentinel at the end of the inputs and at the front of the targets.

    Args:
      dataset: tokenised rows, without EOS.
      sequence_length: what is too long, EOS included, is cut before its last token, as SeqIO does
        it in sentinel tasks: so the inputs keep the sentinel, and targets that are cut their end.
      sentinel: its id.
    """
    limits = sequence_length or {}

    def convert(row: Row) -> Row:
        inputs, targets = row["inputs"], row["targets"]
        inputs = tf.concat([inputs, tf.cast([sentinel], inputs.dtype)], 0)
        targets = tf.concat([tf.cast([sentinel], targets.dtype), targets], 0)
        return {
            **row,
            "inputs": _cut_before_last(inputs, limits.get("inputs")),
            "targets": _cut_before_last(targets, limits.get("targets")),
        }

    return dataset.map(convert, num_parallel_calls=1)


def _cut_before_last(ids: tf.Tensor, limit: int | None) -> tf.Tensor:
    """At most ``limit - 1`` ids, the last one kept."""
    if limit is None:
        return ids
    length = tf.minimum(tf.size(ids), limit - 1)
    return tf.concat([ids[: length - 1], ids[tf.size(ids) - tf.minimum(length, 1) :]], 0)
