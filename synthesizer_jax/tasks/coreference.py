"""Preprocessors that turn Winograd schemas (WSC, DPR and WNLI) into text-to-text examples."""

from __future__ import annotations

import re
from collections.abc import Sequence

from etils import epy

from synthesizer_jax.tasks.preprocessors import Row

with epy.lazy_imports():
    import tensorflow as tf

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
"""Sentences whose pronoun index is wrong, and the marked text that T5 uses for each of them."""


def wsc(dataset: tf.data.Dataset, *, positive_only: bool) -> tf.data.Dataset:
    """Returns WSC in T5's "simple" format: the text with ``*pronoun*``, and the row's candidate as target.

    Hidden labels stay −1. With `positive_only` only rows whose label is true are kept (for training).
    """
    if positive_only:
        dataset = dataset.filter(lambda row: tf.equal(row["label"], 1))

    def convert(row: Row) -> Row:
        parts = [row["text"], row["span2_text"], row["span2_index"]]
        return {
            "inputs": tf.ensure_shape(tf.numpy_function(_mark_pronoun, parts, tf.string), ()),
            "targets": row["span1_text"],
            "label": tf.cast(row["label"], tf.int64),
            "idx": row["idx"],
        }

    return dataset.map(convert)


def _mark_pronoun(text: bytes, pronoun: bytes, index: int) -> str:
    """Returns the input: the text with the word at the pronoun's index written as ``*pronoun*``."""
    if marked := SPECIAL.get(text.decode()):
        return f"wsc: {marked}"
    words, word = text.decode().split(" "), pronoun.decode()
    if words[index : index + 1] != [word]:
        raise ValueError(f"WSC: the word at span2_index is not {word!r}")
    return " ".join(["wsc:", *words[:index], f"*{word}*", *words[index + 1 :]])


def dpr(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns definite pronoun resolution (DPR) in WSC's format.

    The first occurrence of the pronoun is marked; the target is the candidate that it refers to.
    """

    def convert(row: Row) -> Row:
        pattern = tf.strings.join([" (", row["pronoun"], r")( |\.|,)"])
        replace = tf.strings.regex_replace  # accepts a pattern that is a tensor
        marked_text = replace(row["sentence"], pattern, r" *\1*\2", replace_global=False)
        return {
            "inputs": tf.strings.join(["wsc: ", marked_text]),
            "targets": row["candidates"][tf.cast(row["label"], tf.int32)],
        }

    return dataset.map(convert)


# WNLI as coreference resolution, for evaluation only. ---------------------------------------------

PRONOUNS = ("he", "she", "they", "it", "her", "his", "their", "them", "him")
_PUNCTUATION = ".,?!"


def wnli(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns WNLI rows in WSC's format (see `_wnli_question`); hidden labels stay −1.

    T5's authors have verified the conversion on the validation and test splits only.
    """
    question = lambda premise, hypothesis: _wnli_question(premise.decode(), hypothesis.decode())

    def convert(row: Row) -> Row:
        pair = [row["sentence1"], row["sentence2"]]
        inputs, targets = tf.numpy_function(question, pair, (tf.string, tf.string))
        return {
            "inputs": tf.ensure_shape(inputs, ()),
            "targets": tf.ensure_shape(targets, ()),
            "premise": row["sentence1"],
            "hypothesis": row["sentence2"],
            "label": tf.cast(row["label"], tf.int64),
            "idx": row["idx"],
        }

    return dataset.map(convert)


def _wnli_question(premise: str, hypothesis: str) -> tuple[str, str]:
    """Returns the pair (``wsc: … *pronoun* …``, candidate) of a WNLI row.

    Of the premise's pronouns it marks the one whose neighboring words have the longest match in
    the hypothesis. The candidate is the text between those neighbors in the hypothesis; it is
    empty if no neighbors match or if there is no text between them.

    Raises:
      ValueError: the premise has no pronoun, or the candidate does not occur in the hypothesis.
    """
    words, target = _clean(premise), _clean(hypothesis)
    positions = [i for i, word in enumerate(words) if word in PRONOUNS]
    if not positions:
        raise ValueError(f"WNLI: no pronoun in {premise!r}")
    overlaps = [(i, _overlap(words, target, i)) for i in positions]
    position, (left, right) = max(overlaps, key=lambda pair: sum(map(len, pair[1])))
    candidate = _between(left, right, " ".join(target))
    return _question(premise, position), _original(candidate, hypothesis) if candidate else ""


def _clean(text: str) -> list[str]:
    words = (word[:-1] if word[-1:] in _PUNCTUATION else word for word in text.lower().split(" "))
    return [word for word in words if word]


def _overlap(words: list[str], target: list[str], position: int) -> tuple[list[str], list[str]]:
    """Returns the longest suffix before and prefix after a position that occur in the target.

    As in T5, the words before the position are compared in reverse order.
    """

    def longest_prefix(words: list[str], text: str) -> list[str]:
        return next(w for n in range(len(words), -1, -1) if " ".join(w := words[:n]) in text)

    left = longest_prefix(words[:position][::-1], " ".join(target[::-1]))
    return left[::-1], longest_prefix(words[position + 1 :], " ".join(target))


def _between(left: Sequence[str], right: Sequence[str], target: str) -> str:
    """Returns the text between two word sequences, else before the right or after the left one."""
    if not left and not right:
        return ""
    before, after = ([re.escape(" ".join(words))] if words else [] for words in (left, right))
    for parts in ([*before, "(.+)", *after], ["^(.+)", *after], [*before, "(.+)$"]):
        if match := re.search(" ".join(parts), target):
            return match.group(1)
    return ""


def _question(premise: str, position: int) -> str:
    """Returns the premise with the word at `position`, which does not count empty words, marked."""
    words = premise.split(" ")
    i = [i for i, word in enumerate(words) if len(word) > 1 or word not in _PUNCTUATION][position]
    word = words[i]
    punctuation = word[-1] if word[-1] in _PUNCTUATION else ""
    words[i] = f"*{word[:-1]}* {punctuation}" if punctuation else f"*{word}*"
    return "wsc: " + " ".join(words)


def _original(candidate: str, hypothesis: str) -> str:
    """Returns the candidate, from its last article on, in the hypothesis' original spelling.

    Raises:
      ValueError: the candidate does not occur in the hypothesis.
    """
    words = candidate.split(" ")
    articles = [words.index(article) for article in ("a", "an", "the") if article in words]
    words = words[max(articles) :] if articles else words
    pattern = " ".join(re.escape(word) + f"[{_PUNCTUATION}]?" for word in words)
    match = re.search(pattern, hypothesis, re.IGNORECASE)
    if match is None:
        raise ValueError(f"WNLI: the candidate {candidate!r} is not in {hypothesis!r}")
    return re.sub(r"'s?$", "", re.sub(f"[{_PUNCTUATION}]$", "", match.group(0)))
