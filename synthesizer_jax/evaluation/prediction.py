"""Predictions for a list of tokenised inputs: few compiled programs, order restored."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from synthesizer_jax.inference import decode, score_choices, score_targets
from synthesizer_jax.inference.decoding import length_penalty
from synthesizer_jax.models import TextToText
from synthesizer_jax.sharding import BATCH_AXES, batch_sharding, on_mesh, spread, whole

METHODS = ("greedy", "beam", "rank")
BEAMS = 4
CHOICES, CHOICE_LENGTH = 4, 8
"""Label words and their tokens are filled up to multiples of these."""

LENGTHS = {"rank": (64, 128, 256, 512), "decode": (128, 512)}
"""Lengths of compiled batches where inputs have up to 512 tokens, in proportion elsewhere. Ranking, which
most tasks want, has more of them: GLUE and SuperGLUE together take eight programs, and four for the
loss."""

LENGTH_PENALTY = 0.6


class Vocabulary(Protocol):
    """What evaluation needs of a vocabulary (SeqIO's have it)."""

    def encode(self, s: str) -> Sequence[int]:
        """Text to ids, without EOS."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text; what follows EOS is dropped."""
        ...


@dataclasses.dataclass(frozen=True)
class Answers:
    """What a model says to n inputs.

    Attributes:
      texts: the answers.
      scores: ``[n]`` their log-probabilities in nats, end of sequence included.
      ranked: ``[n, words]`` the log-probabilities of all label words, where they were ranked.
    """

    texts: list[str]
    scores: np.ndarray
    ranked: np.ndarray | None = None


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
      mesh: over which the variables are spread, and over which inputs are to be; batches are filled up to
        what it divides. Of several processes each gives all inputs and gets all answers. None: one
        device.
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
        mesh: Mesh | None = None,
    ):
        if method not in METHODS:
            raise ValueError(f"method={method!r}; allowed: {', '.join(METHODS)}")
        self.model, self.variables, self.vocabulary = model, variables, vocabulary
        self.inputs_length, self.targets_length = inputs_length, targets_length
        self.method, self.logits_dtype = method, logits_dtype
        self.mesh = None if mesh is None or mesh.size == 1 else mesh
        ways = 1 if self.mesh is None else math.prod(self.mesh.shape[a] for a in BATCH_AXES)
        self.ways = ways
        self.batch_size = -(-batch_size // ways) * ways

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
        return self.answer(inputs, label_words).texts

    def answer(self, inputs: Sequence[np.ndarray], label_words: Sequence[str] | None) -> Answers:
        """`predict` with log-probabilities, and where label words were ranked, those of all."""
        if self.method == "rank" and label_words:
            ranked = self.rank(inputs, label_words)
            best = ranked.argmax(axis=-1)
            scores = np.take_along_axis(ranked, best[:, None], axis=-1)[:, 0]
            return Answers([label_words[i] for i in best], scores, ranked)
        found = self._map(inputs, "decode", lambda _, batch: self.generate(batch))
        texts = [self.vocabulary.decode(until_eos(tokens)) for tokens, _ in found]
        return Answers(texts, np.array([score for _, score in found], np.float32))

    def rank(self, inputs: Sequence[np.ndarray], label_words: Sequence[str]) -> np.ndarray:
        """Log-probabilities in nats of the label words as answers, ``[n, words]`` float32."""
        rows = [np.asarray([*self.vocabulary.encode(word), 1]) for word in label_words]
        count = -(-len(rows) // CHOICES) * CHOICES
        length = -(-max(map(len, rows)) // CHOICE_LENGTH) * CHOICE_LENGTH
        choices = table(rows, count, length)

        def score(_: list[int], batch: np.ndarray) -> Any:
            tokens = self.put(batch)
            return (score_choices(self.variables, tokens, choices=choices, model=self.model),)

        found = [scores for (scores,) in self._map(inputs, "rank", score)]
        return np.asarray(found, np.float32).reshape(len(inputs), count)[:, : len(rows)]

    def log_probabilities(
        self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Log-probabilities in nats of given targets, teacher-forced, ``[n]`` float32.

        Args:
          inputs: token ids with EOS.
          targets: token ids with EOS, one for each input.
        """
        longest, length = max(map(len, targets), default=1), CHOICE_LENGTH
        if longest > length or self.targets_length < length:
            length = max(self.targets_length, longest)
        # No more logits at a time than ranking four label words makes.
        rows = self.batch_size * CHOICES * CHOICE_LENGTH // length
        rows = min(max(rows // self.ways, 1) * self.ways, self.batch_size)

        def score(places: list[int], batch: np.ndarray) -> Any:
            wanted = self.put(table([targets[i] for i in places], rows, length))
            tokens = self.put(batch)
            return (score_targets(self.variables, tokens, targets=wanted, model=self.model),)

        found = self._map(inputs, "decode", score, batch_size=rows)
        return np.array([score for (score,) in found], np.float32)

    def generate(self, batch: np.ndarray) -> Any:
        """``[batch, k]`` tokens to ``[batch, targets_length]`` tokens and ``[batch]`` log-probabilities."""
        beams = BEAMS if self.method == "beam" else 1
        tokens, scores = decode(
            self.variables,
            self.put(batch),
            model=self.model,
            max_length=self.targets_length,
            beams=beams,
            alpha=LENGTH_PENALTY,
            logits_dtype=self.logits_dtype,
        )
        if beams > 1:
            scores = scores * length_penalty((tokens != 0).sum(axis=-1), LENGTH_PENALTY)
        return tokens, scores

    def put(self, x: np.ndarray) -> jax.Array:
        """A host array on the devices."""
        if self.mesh is None:
            return jnp.asarray(x)
        return spread(x, batch_sharding(self.mesh))

    def _map(
        self,
        inputs: Sequence[np.ndarray],
        kind: str,
        answer: Callable[[list[int], np.ndarray], tuple[Any, ...]],
        *,
        batch_size: int | None = None,
    ) -> list[tuple[Any, ...]]:
        """Values per input, from arrays with a row each for batches of the `LENGTHS` of that kind."""
        answers: list[Any] = [None] * len(inputs)
        allowed = [-(-n * self.inputs_length // 512) for n in LENGTHS[kind]]
        fetch = np.asarray if self.mesh is None else whole
        with contextlib.nullcontext() if self.mesh is None else on_mesh(self.mesh):
            for rows, batch in batches(inputs, batch_size or self.batch_size, allowed):
                found = [fetch(x) for x in answer(rows, batch)]
                for row, values in zip(rows, zip(*found, strict=True), strict=False):
                    answers[row] = values
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
