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
"""Maps each sentence whose pronoun index is wrong to the marked text that T5 uses for it."""


def wsc(dataset: tf.data.Dataset, *, positive_only: bool) -> tf.data.Dataset:
    """Formats WSC in T5's "simple" format.

    The input is the text with the pronoun marked as ``*pronoun*``. The target is the candidate,
    which is the phrase to which the pronoun may refer. The feature ``label`` is 1 if the pronoun
    refers to the candidate, and 0 if it does not. If the label is hidden, it remains −1.

    Args:
      dataset: rows of ``super_glue/wsc.fixed``.
      positive_only: whether to keep only the rows with label 1. Set `positive_only` for training.
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
    """Returns the input, which has ``*pronoun*`` in place of the word at the pronoun's index.

    Raises:
      ValueError: if the word at this index is not the pronoun.
    """
    sentence, word = text.decode(), pronoun.decode()
    if sentence in SPECIAL:
        return f"wsc: {SPECIAL[sentence]}"
    words = sentence.split(" ")
    if words[index : index + 1] != [word]:
        raise ValueError(f"WSC: The word at span2_index is not {word!r}.")
    return " ".join(["wsc:", *words[:index], f"*{word}*", *words[index + 1 :]])


def dpr(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats the examples of definite pronoun resolution (DPR) in the format of WSC.

    The first occurrence of the pronoun is marked. The target is the candidate to which the pronoun
    refers.
    """

    def convert(row: Row) -> Row:
        pattern = tf.strings.join([" (", row["pronoun"], r")( |\.|,)"])
        # Use `tf.strings.regex_replace`, because its pattern may be a tensor.
        replace = tf.strings.regex_replace
        marked_text = replace(row["sentence"], pattern, r" *\1*\2", replace_global=False)
        return {
            "inputs": tf.strings.join(["wsc: ", marked_text]),
            "targets": row["candidates"][tf.cast(row["label"], tf.int32)],
        }

    return dataset.map(convert)


# WNLI as coreference resolution, which is used only for evaluation. -------------------------------

PRONOUNS = ("he", "she", "they", "it", "her", "his", "their", "them", "him")
_PUNCTUATION = ".,?!"


def wnli(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats the examples of WNLI in the format of WSC (see `_wnli_question`).

    Hidden labels remain −1.

    T5's authors have verified this conversion only on the validation and test splits.
    """

    def question(premise: bytes, hypothesis: bytes) -> tuple[str, str]:
        """Calls `_wnli_question` with strings, because TensorFlow passes the texts as bytes."""
        return _wnli_question(premise.decode(), hypothesis.decode())

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
    """Returns the input ``wsc: … *pronoun* …`` and the candidate of a WNLI row.

    The hypothesis of a row repeats a part of the premise, with a candidate in place of a pronoun.
    The function chooses the pronoun of the premise whose neighboring words have the longest match
    in the hypothesis. The candidate is the text between the matching words in the hypothesis. The
    candidate is empty if no words match, or if there is no text between the matching words.

    Raises:
      ValueError: if the premise has no pronoun, or if the candidate does not occur in the
        hypothesis.
    """
    words, target = _clean(premise), _clean(hypothesis)
    positions = [i for i, word in enumerate(words) if word in PRONOUNS]
    if not positions:
        raise ValueError(f"WNLI: There is no pronoun in {premise!r}.")
    # For every pronoun, find the words before and after the pronoun that also occur in the
    # hypothesis.
    overlaps = [(i, _overlap(words, target, i)) for i in positions]
    position, (left, right) = max(overlaps, key=lambda pair: sum(map(len, pair[1])))
    candidate = _between(left, right, " ".join(target))
    return _question(premise, position), _original(candidate, hypothesis) if candidate else ""


def _clean(text: str) -> list[str]:
    """Returns the lower-case words of a text, without a punctuation character at their ends."""
    words = (word[:-1] if word[-1:] in _PUNCTUATION else word for word in text.lower().split(" "))
    return [word for word in words if word]


def _overlap(words: list[str], target: list[str], position: int) -> tuple[list[str], list[str]]:
    """Returns the longest sequences of words before and after a position that occur in `target`.

    The first sequence ends directly before the position, and the second sequence begins directly
    after the position. As in T5, the words before the position are compared in reverse order.
    """

    def longest_prefix(words: list[str], text: str) -> list[str]:
        """Returns the longest beginning of a list of words that occurs in a text."""
        count = len(words)
        while " ".join(words[:count]) not in text:
            count -= 1
        return words[:count]

    left = longest_prefix(words[:position][::-1], " ".join(target[::-1]))
    return left[::-1], longest_prefix(words[position + 1 :], " ".join(target))


def _between(left: Sequence[str], right: Sequence[str], target: str) -> str:
    """Returns the part of `target` between two sequences of words.

    If `target` does not contain `left` followed by `right`, the result is the text before `right`,
    or else the text after `left`. The result is empty if neither sequence is found.
    """
    if not left and not right:
        return ""
    before, after = ([re.escape(" ".join(words))] if words else [] for words in (left, right))
    for parts in ([*before, "(.+)", *after], ["^(.+)", *after], [*before, "(.+)$"]):
        if match := re.search(" ".join(parts), target):
            return match.group(1)
    return ""


def _question(premise: str, position: int) -> str:
    """Returns the input, which is the premise with asterisks around a word.

    Args:
      premise: the text.
      position: the index of the word. Empty words and single punctuation characters are not
        counted.
    """
    words = premise.split(" ")
    counted = [i for i, word in enumerate(words) if len(word) > 1 or word not in _PUNCTUATION]
    i = counted[position]
    word = words[i]
    if word[-1] in _PUNCTUATION:
        words[i] = f"*{word[:-1]}* {word[-1]}"
    else:
        words[i] = f"*{word}*"
    return "wsc: " + " ".join(words)


def _original(candidate: str, hypothesis: str) -> str:
    """Returns the candidate in the spelling of the hypothesis, beginning with its last article.

    Raises:
      ValueError: if the candidate does not occur in the hypothesis.
    """
    words = candidate.split(" ")
    articles = [words.index(article) for article in ("a", "an", "the") if article in words]
    if articles:
        words = words[max(articles) :]
    pattern = " ".join(re.escape(word) + f"[{_PUNCTUATION}]?" for word in words)
    match = re.search(pattern, hypothesis, re.IGNORECASE)
    if match is None:
        raise ValueError(f"WNLI: The candidate {candidate!r} is not in {hypothesis!r}.")
    # Remove a punctuation character and a possessive ending, which do not belong to the candidate.
    found = re.sub(f"[{_PUNCTUATION}]$", "", match.group(0))
    return re.sub(r"'s?$", "", found)
