"""Predictions for a list of tokenised inputs: few compiled programs, order restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from synthesizer_jax.inference import decode, score_choices, score_targets
from synthesizer_jax.models import TextToText

METHODS = ("greedy", "beam", "rank")
BEAMS = 4
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
      put: lays a host array over devices; None leaves it to JAX.
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
        put: Callable[[np.ndarray], Any] | None = None,
    ):
        if method not in METHODS:
            raise ValueError(f"method={method!r}; allowed: {', '.join(METHODS)}")
        self.model, self.variables, self.vocabulary = model, variables, vocabulary
        self.inputs_length, self.targets_length = inputs_length, targets_length
        self.batch_size, self.method = batch_size, method
        self.put = jnp.asarray if put is None else put

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
        if self.method == "rank" and label_words:
            choices = self.put_choices(label_words)
            answers = self._map(inputs, lambda batch: np.asarray(self.rank(batch, choices)))
            return [label_words[int(i)] for i in answers]
        tokens = self._map(inputs, lambda batch: np.asarray(self.generate(batch)))
        return [self.vocabulary.decode(until_eos(row)) for row in tokens]

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
        ).tokens

    def rank(self, batch: np.ndarray, choices: Any) -> Any:
        """``[batch, k]`` tokens to the index of the most probable choice, ``[batch]``."""
        scores = score_choices(self.variables, self.put(batch), choices=choices, model=self.model)
        return scores.argmax(axis=-1)

    def log_likelihood(
        self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Log-probability in nats of every example's target, ``[n]`` float32.

        Args:
          inputs: token ids with EOS.
          targets: token ids with EOS, cut to `targets_length`.
        """
        found = np.zeros(len(inputs), np.float32)
        for rows, batch in batches(inputs, self.batch_size, self.inputs_length):
            wanted = table([targets[i] for i in rows], self.batch_size, self.targets_length)
            scores = score_targets(
                self.variables, self.put(batch), targets=self.put(wanted), model=self.model
            )
            found[rows] = np.asarray(scores)[: len(rows)]
        return found

    def put_choices(self, label_words: Sequence[str]) -> Any:
        """Label words as ``[choices, t]`` tokens with EOS."""
        rows = [np.asarray([*self.vocabulary.encode(word), 1]) for word in label_words]
        return jnp.asarray(table(rows, len(rows), max(map(len, rows))))

    def _map(
        self, inputs: Sequence[np.ndarray], answer: Callable[[np.ndarray], np.ndarray]
    ) -> list[Any]:
        answers: list[Any] = [None] * len(inputs)
        for rows, batch in batches(inputs, self.batch_size, self.inputs_length):
            for row, value in zip(rows, answer(batch), strict=False):
                answers[row] = value
        return answers


def until_eos(tokens: np.ndarray) -> list[int]:
    """A row's ids before EOS or padding."""
    ends = np.flatnonzero((tokens == 1) | (tokens == 0))
    return tokens[: ends[0] if len(ends) else len(tokens)].tolist()


def batches(
    inputs: Sequence[np.ndarray], batch_size: int, max_length: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Rows sorted by length in batches of equal size, padded to a power of two or `max_length`.

    Args:
      inputs: token ids.
      batch_size: rows per batch; the last batch is filled with empty rows.
      max_length: longer inputs are cut.

    Yields:
      The rows' places in `inputs`, and ``[batch_size, length]`` int32 tokens.
    """
    order = sorted(range(len(inputs)), key=lambda i: (len(inputs[i]), i))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = min(max(len(inputs[i]) for i in rows), max_length)
        length = min(max(32, 1 << (longest - 1).bit_length()), max_length)
        yield rows, table([inputs[i] for i in rows], batch_size, length)


def table(rows: Sequence[np.ndarray], count: int, length: int) -> np.ndarray:
    """Token ids as ``[count, length]`` int32, cut and padded with zeros."""
    result = np.zeros((count, length), np.int32)
    for slot, ids in zip(result, rows, strict=False):
        slot[: min(len(ids), length)] = ids[:length]
    return result
