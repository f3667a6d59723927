"""Winograd schemas as text: WSC, DPR, and WNLI turned into such questions."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

Row = dict[str, Any]

_PONY = (
    "The boy continued to whip the pony , and eventually the pony threw him over. John laughed out "
    'quite loud. "Good for {}he said.'
)
_PEBBLE = (
    "When they had eventually calmed down a bit , and had gotten home, Mr. Farley put the magic "
    "pebble in an iron safe . Some day they might want to use {} , but really for now, what more "
    "could they wish for?"
)
SPECIAL = {
    _PONY.format('him," ') + " ": _PONY.format('*him* ," '),
    _PEBBLE.format("it"): _PEBBLE.format("*it*"),
}
"""Sentences whose pronoun index is wrong, and how T5 writes them."""


def wsc(dataset: tf.data.Dataset, *, positive_only: bool) -> tf.data.Dataset:
    """WSC "simple": the text with ``*pronoun*``, the target is the referent whatever the label.

    Hidden labels stay −1.

    Args:
      dataset: rows of ``super_glue/wsc.fixed``.
      positive_only: keep only rows whose label is true (training).
    """
    if positive_only:
        dataset = dataset.filter(lambda row: tf.equal(row["label"], 1))

    def convert(row: Row) -> Row:
        return {
            "inputs": tf.strings.join(["wsc: ", marked(row)]),
            "targets": row["span1_text"],
            "label": tf.cast(row["label"], tf.int64),
            "idx": row["idx"],
        }

    return dataset.map(convert, num_parallel_calls=1)


def marked(row: Row) -> tf.Tensor:
    """The text in which the word at the pronoun's index is written ``*pronoun*``."""
    text, pronoun, index = row["text"], row["span2_text"], row["span2_index"]
    words = tf.strings.split(text, " ")
    ordinary = functools.partial(_mark_word, words, pronoun, index)
    for special, written in SPECIAL.items():
        ordinary = functools.partial(_choose, tf.equal(text, special), written, ordinary)
    return ordinary()


def _choose(condition: tf.Tensor, written: str, otherwise: Any) -> tf.Tensor:
    return tf.cond(condition, lambda: tf.constant(written), otherwise)


def _mark_word(words: tf.Tensor, pronoun: tf.Tensor, index: tf.Tensor) -> tf.Tensor:
    checks = [
        tf.debugging.assert_greater(index, 0, "WSC: the pronoun is the first word"),
        tf.debugging.assert_less(index, tf.size(words), "WSC: the pronoun lies beyond the text"),
    ]
    with tf.control_dependencies(checks):
        found = words[index]
    with tf.control_dependencies(
        [tf.debugging.assert_equal(found, pronoun, "WSC: the word at span2_index is another")]
    ):
        before = tf.strings.reduce_join(words[:index], separator=" ")
    after = tf.strings.reduce_join(words[index + 1 :], separator=" ")
    return tf.strings.join([before, tf.strings.join(["*", pronoun, "*"]), after], separator=" ")


def dpr(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Definite pronoun resolution: the first such pronoun is marked, the target is the candidate."""

    def convert(row: Row) -> Row:
        pattern = tf.strings.join([" (", row["pronoun"], r")( |\.|,)"])
        text = tf.strings.regex_replace  # the pattern is a tensor, so the dynamic op is used
        marked_text = text(row["sentence"], pattern, r" *\1*\2", replace_global=False)
        return {
            "inputs": tf.strings.join(["wsc: ", marked_text]),
            "targets": row["candidates"][tf.cast(row["label"], tf.int32)],
        }

    return dataset.map(convert, num_parallel_calls=1)


# WNLI as coreference, for evaluation only. ------------------------------------------------------

PRONOUNS = frozenset(["he", "she", "they", "it", "her", "his", "their", "them", "him"])
_MARK = r"[.,?!]?"


def wnli(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """WNLI rows as WSC questions (see `wnli_question`); checked by hand on dev and test only.

    Hidden labels stay −1.
    """

    def convert(row: Row) -> Row:
        inputs, targets = tf.numpy_function(
            _wnli_bytes, [row["sentence1"], row["sentence2"]], (tf.string, tf.string)
        )
        return {
            "inputs": tf.ensure_shape(inputs, ()),
            "targets": tf.ensure_shape(targets, ()),
            "premise": row["sentence1"],
            "hypothesis": row["sentence2"],
            "label": tf.cast(row["label"], tf.int64),
            "idx": row["idx"],
        }

    return dataset.map(convert, num_parallel_calls=1)


def _wnli_bytes(premise: bytes, hypothesis: bytes) -> tuple[bytes, bytes]:
    question, candidate = wnli_question(premise.decode(), hypothesis.decode())
    return question.encode(), candidate.encode()


def wnli_question(premise: str, hypothesis: str) -> tuple[str, str]:
    """The pair (``wsc: … *pronoun* …``, candidate) of a WNLI row.

    The pronoun is the one whose neighbours in the premise occur longest in the hypothesis; the
    candidate is what stands between those neighbours there. It is empty when none occurs, or
    nothing stands there.

    Raises:
      ValueError: the premise has no pronoun, or the candidate is not found in the hypothesis.
    """
    words, target = _clean(premise), _clean(hypothesis)
    places = [i for i, word in enumerate(words) if word in PRONOUNS]
    if not places:
        raise ValueError(f"WNLI: no pronoun in {premise!r}")
    scored = [(i, _overlap(words, target, i)) for i in places]
    place, (left, right) = max(scored, key=lambda pair: sum(map(len, pair[1])))
    found = _between(left, right, " ".join(target))
    return _question(premise, place), _original(found, hypothesis) if found else ""


def _clean(text: str) -> list[str]:
    words = [
        word[:-1] if word.endswith((".", ",", "?", "!")) else word
        for word in text.strip().lower().split(" ")
    ]
    return [word for word in words if word]


def _overlap(words: Sequence[str], target: Sequence[str], place: int) -> tuple[list[str], ...]:
    """The longest suffix before and prefix after a place that occur in the target.

    As in T5 the words before it are compared from the last to the first.
    """
    left = _longest_prefix(list(words[:place])[::-1], " ".join(target[::-1]))
    return left[::-1], _longest_prefix(list(words[place + 1 :]), " ".join(target))


def _longest_prefix(words: list[str], text: str) -> list[str]:
    return next(w for n in range(len(words), -1, -1) if " ".join(w := words[:n]) in text)


def _between(left: Sequence[str], right: Sequence[str], target: str) -> str:
    """What stands between two runs of words, else before the right, else behind the left one."""
    if not left and not right:
        return ""
    before, after = ([re.escape(" ".join(words))] if words else [] for words in (left, right))
    for parts in ([*before, "(.+)", *after], ["^(.+)", *after], [*before, "(.+)$"]):
        if match := re.search(" ".join(parts), target):
            return match.group(1)
    return ""


def _question(premise: str, place: int) -> str:
    """The original premise with its word number `place` (empty words not counted) marked."""
    words = premise.split(" ")
    counted = [i for i, word in enumerate(words) if re.sub(rf"{_MARK[:-1]}$", "", word)]
    i = counted[place]
    word = words[i]
    mark = word[-1] if word[-1:] in ".,?!" else ""
    words[i] = f"*{word[:-1]}* {mark}" if mark else f"*{word}*"
    return "wsc: " + " ".join(words)


def _original(candidate: str, hypothesis: str) -> str:
    """The candidate from its last article on, as it is written in the hypothesis."""
    words = candidate.split(" ")
    articles = [words.index(article) for article in ("a", "an", "the") if article in words]
    words = words[max(articles) :] if articles else words
    pattern = " ".join(re.escape(word) + _MARK for word in words)
    match = re.search(pattern, hypothesis, re.IGNORECASE)
    if match is None:
        raise ValueError(f"WNLI: the candidate {candidate!r} is not in {hypothesis!r}")
    found = re.sub(rf"{_MARK[:-1]}$", "", match.group(0))
    return re.sub(r"'s?$", "", found)
