"""T5's text formats, as `tf.data` transformations (Raffel et al. 2020, appendix D)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from etils import epy

from synthesizer_jax.tasks.postprocessors import UNKNOWN

with epy.lazy_imports():
    import seqio
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


def dialogue(dataset: tf.data.Dataset, *, turns: int = 8) -> tf.data.Dataset:
    """Formats dialogues as ``dialogue history: … persona: …`` with the reply as target.

    Utterances are separated by `` | ``, of which the latest `turns` are kept; the speakers take turns. The
    persona, some sentences about the speaker of the reply, comes last, so that a cut on the right costs no
    utterance; a row may have none.
    """

    def convert(row: Row) -> Row:
        history = tf.strings.reduce_join(row["history"][-turns:], separator=" | ")
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


def append_sentinel(
    dataset: tf.data.Dataset, *, sequence_length: dict[str, int] | None = None, sentinel: int
) -> tf.data.Dataset:
    """Appends the first sentinel to the inputs and prepends it to the targets.

    Args:
      dataset: tokenized rows, without EOS.
      sequence_length: the maximum lengths including EOS. Longer sequences are truncated before their last
        token, as in SeqIO's sentinel tasks: the inputs keep the sentinel, and the targets their last token.
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

    return dataset.map(convert)


def _truncate_before_last(ids: tf.Tensor, limit: int | None) -> tf.Tensor:
    """Returns at most ``limit - 1`` ids, always including the last one."""
    if limit is None:
        return ids
    length = tf.minimum(tf.size(ids), limit - 1)
    return tf.concat([ids[: length - 1], ids[tf.size(ids) - tf.minimum(length, 1) :]], 0)


# Question answering. ----------------------------------------------------------------------------------


def squad(dataset: tf.data.Dataset, *, context: bool = True, spans: bool = False) -> tf.data.Dataset:
    """Formats SQuAD as ``question: … context: …`` with the first answer as target.

    Every ASCII punctuation character gets spaces around it, and white space is squeezed. All answers
    are kept as ``answers``, the context, in which spans count words, as ``context``.

    Args:
      dataset: rows of ``squad/v1.1``.
      context: whether the inputs have it; otherwise they are ``squad trivia question: …``.
      spans: whether the target is the position of the answer, ``start: 3 end: 6``. Words are what is
        between single spaces after every character that belongs to no word has become one, so that empty
        words count, as they do not in `metrics.span_squad`; both are T5's rules. As in T5, the last
        possible position is not tried, and rows whose answer is not found are left out.
    """

    def convert(row: Row) -> Row:
        question, passage = _pad_punctuation(row["question"]), _pad_punctuation(row["context"])
        answers = _pad_punctuation(row["answers"]["text"])
        with_context = ["question:", question, "context:", passage]
        return {
            "inputs": _join(with_context if context else ["squad trivia question:", question]),
            "targets": _span(passage, answers[0]) if spans else answers[0],
            "answers": answers,
            "context": passage,
        }

    dataset = dataset.map(convert)
    return dataset.filter(lambda row: tf.strings.length(row["targets"]) > 0) if spans else dataset


def trivia_qa(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Formats TriviaQA as ``question: … context: …``: one row per context and alias that occurs in it.

    An alias, in lower case, is a regular expression that is searched in the context, as in T5.
    """

    def convert(row: Row) -> Row:
        pages = [("entity_pages", "wiki_context"), ("search_results", "search_context")]
        contexts = tf.concat([row[page][text] for page, text in pages if page in row], 0)
        aliases = _pad_punctuation(row["answer"]["normalized_aliases"])
        passages = tf.repeat(_pad_punctuation(contexts), tf.size(aliases))
        answers = tf.tile(aliases, [tf.size(contexts)])
        found = tf.map_fn(lambda pair: _occurs(*pair), (answers, passages), fn_output_signature=tf.bool)
        question = tf.fill(tf.shape(passages), _pad_punctuation(row["question"]))
        inputs = _join([tf.constant("question:"), question, tf.constant("context:"), passages])
        return {"inputs": tf.boolean_mask(inputs, found), "targets": tf.boolean_mask(answers, found)}

    return dataset.map(convert).unbatch()


def keep_answer(
    dataset: tf.data.Dataset, *, sequence_length: Mapping[str, int] | None = None
) -> tf.data.Dataset:
    """Cuts inputs that are too long to a random window that contains the tokens of the target.

    Rows of which no window does are left out. As in T5, EOS may then replace the window's last token.

    Args:
      dataset: tokenized rows, without EOS.
      sequence_length: the maximum lengths; None: any.
    """
    if sequence_length is None:
        return dataset
    length = sequence_length["inputs"]

    @seqio.map_over_dataset(num_seeds=1)
    def convert(row: Row, seed: tf.Tensor) -> Row:
        cut = functools.partial(_window, row["inputs"], row["targets"], length=length, seed=seed)
        kept = tf.cond(tf.size(row["inputs"]) > length, cut, lambda: row["inputs"])
        return {**row, "inputs": kept}

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
    """Returns where a sequence first occurs, −1 if nowhere; `last`: the last possible position counts."""
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
