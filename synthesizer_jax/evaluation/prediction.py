"""Predictions for a list of tokenised inputs: few compiled programs, order restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from synthesizer_jax.inference import decode, score_choices
from synthesizer_jax.models import TextToText

METHODS = ("greedy", "beam", "rank")
BEAMS = 4
CHOICES, CHOICE_LENGTH = 4, 8
"""Label words and their tokens are filled up to multiples of these."""

LENGTHS = {"rank": (64, 128, 256, 512), "decode": (128, 512)}
"""Lengths of compiled batches where inputs have up to 512 tokens, in proportion elsewhere. Ranking, which
most tasks want, has more of them: GLUE and SuperGLUE together take eight programs."""

LENGTH_PENALTY = 0.6


class Vocabulary(Protocol):
    """What evaluation needs of a vocabulary (SeqIO's have it)."""

    def encode(self, s: str) -> Sequence[int]:
        """Text to ids, without EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; what follows EOS is dropped."""
        ...


class Predictor:
    """A model with its variables and vocabulary, ready to answer.

    Args:
      model: an unbound model.
      variables: its variables, on any devices.
      vocabulary: maps text to ids and back.
      inputs_length: inputs are cut to this many tokens.
      targets_length: number of tokens to decode at most, EOS included.
      batch_size: rows of a compiled batch.
      method: one of `METHODS`: ``greedy``, ``beam`` (4 beams, T5's length penalty), or ``rank``,
        which scores label words and decodes greedily where there are none.
      logits_dtype: dtype of the output projection in decoding, see `inference.decode`.
      put: lays a host array over devices; None leaves it to JAX.
      fetch: brings a result back whole; None is `np.asarray`.
    """

    def __init__(
        self,
        model: TextToText,
        variables: Any,
        vocabulary: Vocabulary,
        *,
        inputs_length: int,
        targets_length: int,
        batch_size: int = 64,
        method: str = "greedy",
        logits_dtype: str | None = None,
        put: Callable[[np.ndarray], Any] | None = None,
        fetch: Callable[[Any], np.ndarray] | None = None,
    ):
        if method not in METHODS:
            raise ValueError(f"method={method!r}; allowed: {', '.join(METHODS)}")
        self.model, self.variables, self.vocabulary = model, variables, vocabulary
        self.inputs_length, self.targets_length = inputs_length, targets_length
        self.batch_size, self.method = batch_size, method
        self.logits_dtype = logits_dtype
        self.put = jnp.asarray if put is None else put
        self.fetch = np.asarray if fetch is None else fetch

    def encode(self, text: str) -> np.ndarray:
        """Token ids of an input, cut to `inputs_length`, EOS last."""
        ids = list(self.vocabulary.encode(text))[: self.inputs_length - 1]
        return np.asarray([*ids, 1], np.int32)

    def predict(
        self, inputs: Sequence[np.ndarray], *, label_words: Sequence[str] | None = None
    ) -> list[str]:
        """One string per input, in their order.

        Args:
          inputs: token ids with EOS.
          label_words: the allowed answers, used by ``rank``.
        """
        return self.answer(inputs, label_words)[0]

    def answer(
        self, inputs: Sequence[np.ndarray], label_words: Sequence[str] | None
    ) -> tuple[list[str], np.ndarray | None]:
        """`predict`, and where label words were ranked, their log-probabilities; see `rank`."""
        if self.method == "rank" and label_words:
            scores = self.rank(inputs, label_words)
            return [label_words[i] for i in scores.argmax(axis=-1)], scores
        tokens = self._map(inputs, "decode", self.generate)
        return [self.vocabulary.decode(until_eos(row)) for row in tokens], None

    def rank(self, inputs: Sequence[np.ndarray], label_words: Sequence[str]) -> np.ndarray:
        """Log-probabilities in nats of the label words as answers, ``[n, words]`` float32."""
        rows = [np.asarray([*self.vocabulary.encode(word), 1]) for word in label_words]
        count = -(-len(rows) // CHOICES) * CHOICES
        length = -(-max(map(len, rows)) // CHOICE_LENGTH) * CHOICE_LENGTH
        choices = table(rows, count, length)

        def score(batch: np.ndarray) -> Any:
            return score_choices(self.variables, self.put(batch), choices=choices, model=self.model)

        return np.stack(self._map(inputs, "rank", score))[:, : len(rows)]

    def generate(self, batch: np.ndarray) -> Any:
        """``[batch, k]`` tokens to ``[batch, targets_length]`` tokens."""
        beams = BEAMS if self.method == "beam" else 1
        return decode(
            self.variables,
            self.put(batch),
            model=self.model,
            max_length=self.targets_length,
            beams=beams,
            alpha=LENGTH_PENALTY,
            logits_dtype=self.logits_dtype,
        ).tokens

    def _map(
        self, inputs: Sequence[np.ndarray], kind: str, answer: Callable[[np.ndarray], Any]
    ) -> list[Any]:
        """A value per input, from values per row of batches of the `LENGTHS` of that kind."""
        answers: list[Any] = [None] * len(inputs)
        allowed = [-(-n * self.inputs_length // 512) for n in LENGTHS[kind]]
        for rows, batch in batches(inputs, self.batch_size, allowed):
            for row, value in zip(rows, self.fetch(answer(batch)), strict=False):
                answers[row] = value
        return answers


def until_eos(tokens: np.ndarray) -> list[int]:
    """A row's ids before EOS or padding."""
    ends = np.flatnonzero((tokens == 1) | (tokens == 0))
    return tokens[: ends[0] if len(ends) else len(tokens)].tolist()


def batches(
    inputs: Sequence[np.ndarray], batch_size: int, lengths: Sequence[int]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Rows sorted by length in batches of equal size, padded to one of a few lengths.

    Args:
      inputs: token ids.
      batch_size: rows per batch; the last batch is filled with empty rows.
      lengths: allowed lengths of a batch, rising; inputs are cut to the last.

    Yields:
      The rows' places in `inputs`, and ``[batch_size, length]`` int32 tokens.
    """
    order = sorted(range(len(inputs)), key=lambda i: (len(inputs[i]), i))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(inputs[i]) for i in rows)
        length = next((n for n in lengths if n >= longest), lengths[-1])
        yield rows, table([inputs[i] for i in rows], batch_size, length)


def table(rows: Sequence[np.ndarray], count: int, length: int) -> np.ndarray:
    """Token ids as ``[count, length]`` int32, cut and padded with zeros."""
    result = np.zeros((count, length), np.int32)
    for slot, ids in zip(result, rows, strict=False):
        slot[: min(len(ids), length)] = ids[:length]
    return result
