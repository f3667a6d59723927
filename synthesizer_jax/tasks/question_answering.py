"""Preprocessors of SQuAD and TriviaQA in T5's formats, and the window that keeps an answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import seqio
import tensorflow as tf

from synthesizer_jax.tasks.preprocessors import Row


def squad(dataset: tf.data.Dataset, *, context: bool = True) -> tf.data.Dataset:
    """Formats SQuAD as ``question: … context: …`` with the first answer as target.

    Every ASCII punctuation character gets spaces around it, and white space is squeezed. All answers
    are kept as ``answers``, the context, in which `spans` counts words, as ``context``.

    Args:
      dataset: rows of ``squad/v1.1``.
      context: whether the inputs have it; otherwise they are ``squad trivia question: …``.
    """

    def convert(row: Row) -> Row:
        question, passage = _pad_punctuation(row["question"]), _pad_punctuation(row["context"])
        answers = _pad_punctuation(row["answers"]["text"])
        with_context = ["question:", question, "context:", passage]
        return {
            "inputs": _join(with_context if context else ["squad trivia question:", question]),
            "targets": answers[0],
            "answers": answers,
            "context": passage,
        }

    return dataset.map(convert, num_parallel_calls=1)


def spans(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Replaces the targets of rows of `squad` by the position of the answer, ``start: 3 end: 6``.

    Words are what is between single spaces after every character that belongs to no word has become
    one, so that empty words count, as they do not in `metrics.span_squad`; both are T5's rules. As in
    T5, the last possible position is not tried, and rows whose answer is not found are left out.
    """
    dataset = dataset.map(
        lambda row: {**row, "targets": _span(row["context"], row["targets"])}, num_parallel_calls=1
    )
    return dataset.filter(lambda row: tf.strings.length(row["targets"]) > 0)


def trivia_qa(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats TriviaQA as ``question: … context: …``: one row per context and alias that occurs in it.

    An alias, in lower case, is a regular expression that is searched in the context, as in T5.

    Args:
      dataset: rows of ``trivia_qa/rc``.
    """

    def convert(row: Row) -> Row:
        pages = [("entity_pages", "wiki_context"), ("search_results", "search_context")]
        contexts = tf.concat([row[page][text] for page, text in pages if page in row], 0)
        aliases = _pad_punctuation(row["answer"]["normalized_aliases"])
        passages = tf.repeat(_pad_punctuation(contexts), tf.size(aliases))
        answers = tf.tile(aliases, [tf.size(contexts)])
        found = tf.map_fn(
            lambda pair: _occurs(*pair), (answers, passages), fn_output_signature=tf.bool
        )
        question = tf.fill(tf.shape(passages), _pad_punctuation(row["question"]))
        inputs = _join([tf.constant("question:"), question, tf.constant("context:"), passages])
        return {
            "inputs": tf.boolean_mask(inputs, found),
            "targets": tf.boolean_mask(answers, found),
        }

    return dataset.map(convert, num_parallel_calls=1).unbatch()


def keep_answer(
    dataset: tf.data.Dataset, *, sequence_length: Mapping[str, int] | None = None
) -> tf.data.Dataset:
    """Cuts inputs that are too long to a random window that contains the tokens of the target.

    Rows of which no window does are left out. As in T5, EOS may then replace the window's last token.

    Args:
      dataset: tokenized rows, without EOS.
      sequence_length: the maximum lengths; None: inputs of any length.
    """
    if sequence_length is None:
        return dataset
    cut = functools.partial(_window, length=sequence_length["inputs"])

    @seqio.map_over_dataset(num_seeds=1)
    def convert(row: Row, seed: tf.Tensor) -> Row:
        is_long = tf.size(row["inputs"]) > sequence_length["inputs"]
        return {
            **row,
            "inputs": tf.cond(
                is_long,
                lambda: cut(row["inputs"], row["targets"], seed=seed),
                lambda: row["inputs"],
            ),
        }

    return convert(dataset).filter(lambda row: tf.size(row["inputs"]) > 0)


def _window(inputs: tf.Tensor, answer: tf.Tensor, *, length: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns a random window that contains the answer where it occurs first; empty if nowhere."""
    position = _find(answer, inputs, last=True)
    first = tf.maximum(0, position - (length - tf.size(answer)))
    end = tf.minimum(position, tf.size(inputs) - length) + 1
    start = tf.random.stateless_uniform(
        [], minval=first, maxval=tf.maximum(end, first + 1), dtype=tf.int32, seed=seed
    )
    return tf.cond(position >= 0, lambda: inputs[start : start + length], lambda: inputs[:0])


def _span(context: tf.Tensor, answer: tf.Tensor) -> tf.Tensor:
    words = _split(answer)
    start = _find(words, _split(context), last=False)
    end = tf.strings.as_string(start + tf.size(words) - 1)
    text = tf.strings.join(["start: ", tf.strings.as_string(start), " end: ", end])
    return tf.where(start >= 0, text, "")


def _find(needle: tf.Tensor, haystack: tf.Tensor, *, last: bool) -> tf.Tensor:
    """Returns where a sequence first occurs in another, −1 if nowhere.

    Args:
      needle: the sequence.
      haystack: the other.
      last: whether the last possible position counts.
    """
    num_positions = tf.size(haystack) - tf.size(needle) + int(last)
    starts = tf.range(tf.maximum(num_positions, 0))
    windows = tf.gather(haystack, starts[:, None] + tf.range(tf.size(needle)))
    matches = tf.where(tf.reduce_all(windows == needle, axis=1))
    positions = tf.concat([tf.cast(matches[:, 0], tf.int32), [-1]], 0)
    return positions[0]


def _occurs(answer: tf.Tensor, passage: tf.Tensor) -> tf.Tensor:
    pattern = tf.strings.join([".*", answer, ".*"])
    return tf.strings.regex_full_match(tf.strings.lower(passage), tf.strings.lower(pattern))


def _split(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.split(tf.strings.regex_replace(text, r"\W", " "), " ")


def _pad_punctuation(text: tf.Tensor) -> tf.Tensor:
    return _squeeze(tf.strings.regex_replace(text, r"([[:punct:]])", r" \1 "))


def _join(parts: list[str | tf.Tensor]) -> tf.Tensor:
    return _squeeze(tf.strings.join(parts, separator=" "))


def _squeeze(text: tf.Tensor) -> tf.Tensor:
    return tf.strings.regex_replace(text, r"\s+", " ")
