"""T5's text formats, as `tf.data` transformations (Raffel et al. 2020, appendix D)."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from synthesizer_jax.tasks.postprocessors import UNKNOWN

Row = dict[str, tf.Tensor]
"""Features by name; only ``idx`` may be a dictionary of tensors."""


def classification(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str], labels: Sequence[str]
) -> tf.data.Dataset:
    """Formats rows as ``prefix key1: value1 key2: value2 …`` with a label word as target.

    Args:
      dataset: rows with `features`, an integer ``label`` and optionally ``idx``.
      prefix: the first word of the input.
      features: feature names in input order.
      labels: label words, indexed by the integer label.
    """
    return dataset.map(
        lambda row: {
            "inputs": _format_input(row, prefix, features),
            "targets": _label_word(row["label"], labels),
            **_passthrough_features(row),
        },
        num_parallel_calls=1,
    )


def _format_input(row: Row, prefix: str, features: Sequence[str]) -> tf.Tensor:
    words: list[str | tf.Tensor] = [prefix]
    for name in features:
        words += [f"{name}:", row[name]]
    return tf.strings.join(words, separator=" ")


def translation(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]
) -> tf.data.Dataset:
    """Formats rows as ``prefix source`` with the translation as target, T5's `translate`.

    Args:
      dataset: rows with both `features`.
      prefix: the instruction at the beginning of the input.
      features: names of the source and the target feature.
    """
    source, target = features
    return dataset.map(
        lambda row: {
            "inputs": tf.strings.join([prefix, row[source]], separator=" "),
            "targets": row[target],
        },
        num_parallel_calls=1,
    )


def dialogue(dataset: tf.data.Dataset, *, turns: int) -> tf.data.Dataset:
    """Formats dialogues as ``dialogue history: … persona: …`` with the reply as target.

    Args:
      dataset: rows with ``reply`` and the lists of texts ``history`` and ``persona``; a row without a
        persona has no such part.
      turns: the number of latest utterances that are kept.
    """

    def convert(row: Row) -> Row:
        history = tf.strings.reduce_join(row["history"][-turns:], separator=" | ")
        persona = tf.strings.reduce_join(row["persona"], separator=" ")
        part = tf.where(tf.size(row["persona"]) > 0, tf.strings.join([" persona: ", persona]), "")
        return {
            "inputs": tf.strings.join(["dialogue history: ", history, part]),
            "targets": row["reply"],
        }

    return dataset.map(convert, num_parallel_calls=1)


def _label_word(label: tf.Tensor, labels: Sequence[str]) -> tf.Tensor:
    """Returns the word of an integer label, `UNKNOWN` for −1."""
    return tf.gather(tf.constant([UNKNOWN, *labels]), tf.cast(label, tf.int64) + 1)


def _passthrough_features(row: Row) -> Row:
    """Returns the features that identify a row of the original files."""
    index = row.get("idx")
    if isinstance(index, dict):
        return {f"idx/{name}": value for name, value in index.items()}
    return {} if index is None else {"idx": index}


def similarity(
    dataset: tf.data.Dataset, *, prefix: str, features: Sequence[str]
) -> tf.data.Dataset:
    """Formats STS-B.

    The target is the score rounded to a fifth, ``round(label · 5) / 5``, half to even.
    """

    def convert(row: Row) -> Row:
        score = tf.round(tf.cast(row["label"], tf.float32) * 5) / 5
        target = tf.strings.as_string(score, precision=1)
        return {
            "inputs": _format_input(row, prefix, features),
            "targets": target,
            "label": tf.cast(row["label"], tf.float32),
            **_passthrough_features(row),
        }

    return dataset.map(convert, num_parallel_calls=1)


def multirc(dataset: tf.data.Dataset, *, labels: Sequence[str]) -> tf.data.Dataset:
    """Formats MultiRC: question, answer, paragraph.

    ``<br>`` is replaced by a space; ``<b>`` and ``</b>`` are removed.
    """

    def convert(row: Row) -> Row:
        text = _format_input(row, "multirc", ("question", "answer", "paragraph"))
        text = tf.strings.regex_replace(text, "<br>", " ")
        return {
            "inputs": tf.strings.regex_replace(text, "<(/)?b>", ""),
            "targets": _label_word(row["label"], labels),
            **_passthrough_features(row),
        }

    return dataset.map(convert, num_parallel_calls=1)


def record(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats ReCoRD: one row per distinct answer.

    A query whose answers are hidden gives one row with the target `UNKNOWN`.
    """

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
        num_rows = tf.shape(targets)[:1]
        return {
            "inputs": tf.fill(num_rows, tf.strings.join(parts, separator=" ")),
            "targets": targets,
            "answers": tf.tile(answers[None], [num_rows[0], 1]),
            **{
                name: tf.fill(num_rows, value) for name, value in _passthrough_features(row).items()
            },
        }

    return dataset.map(convert, num_parallel_calls=1).unbatch()


def rename_features(dataset: tf.data.Dataset, *, names: dict[str, str]) -> tf.data.Dataset:
    """Returns the rows with some features renamed; `names` is ``{old: new}``."""
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
    """Appends the first sentinel to the inputs and prepends it to the targets.

    Args:
      dataset: tokenized rows, without EOS.
      sequence_length: the maximum lengths including EOS. Longer sequences are truncated before
        their last token, as in SeqIO's sentinel tasks: the inputs keep the sentinel, and the
        targets their last token.
      sentinel: id of the sentinel.
    """
    limits = sequence_length or {}

    def convert(row: Row) -> Row:
        inputs, targets = row["inputs"], row["targets"]
        inputs = tf.concat([inputs, tf.cast([sentinel], inputs.dtype)], 0)
        targets = tf.concat([tf.cast([sentinel], targets.dtype), targets], 0)
        return {
            **row,
            "inputs": _truncate_before_last(inputs, limits.get("inputs")),
            "targets": _truncate_before_last(targets, limits.get("targets")),
        }

    return dataset.map(convert, num_parallel_calls=1)


def _truncate_before_last(ids: tf.Tensor, limit: int | None) -> tf.Tensor:
    """Returns at most ``limit - 1`` ids, always including the last one."""
    if limit is None:
        return ids
    length = tf.minimum(tf.size(ids), limit - 1)
    return tf.concat([ids[: length - 1], ids[tf.size(ids) - tf.minimum(length, 1) :]], 0)
