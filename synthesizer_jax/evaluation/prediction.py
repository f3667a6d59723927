"""Predictions for a list of tokenized inputs: few compiled programs, order restored."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from synthesizer_jax.attention import Mask
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.data.stop_strings import stop_table
from synthesizer_jax.data.vocabularies import Classes, Vocabulary, index_by_tokens
from synthesizer_jax.inference import (
    Decoding,
    Sequences,
    decode_sequences,
    encode_tokens,
    score_choices,
    score_classes,
    score_masked_tokens,
    score_targets,
)
from synthesizer_jax.models import Encoder, TextToText
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.sharding import (
    batch_sharding,
    batch_shards,
    gather_to_host,
    replicate_to_devices,
    use_mesh,
)

CHOICES, CHOICE_LENGTH = 4, 8
"""The numbers of label words, and of their tokens, are padded to multiples of these."""

LENGTHS = {"rank": (64, 128, 256, 512), "decode": (128, 512)}
"""Lengths of compiled batches where inputs have up to 512 tokens, in proportion elsewhere. Ranking, which
most tasks want, has more of them: GLUE and SuperGLUE together take eight programs, and four for the
loss."""


class Generated(NamedTuple):
    """A text that a model generated, and its log-probability in nats; see `inference.Sequences`."""

    text: str
    score: float


class Predictions(NamedTuple):
    """The answers of a model to n inputs.

    Attributes:
      texts: the answers.
      scores: ``[n]`` their log-probabilities in nats, end of sequence included.
      ranked: ``[n, words]`` the log-probabilities of all label words, where they were ranked.
      words: the label words that were ranked.
      tokens: the token ids of the answers before the end of the sequence, where they were decoded.
    """

    texts: list[str]
    scores: np.ndarray
    ranked: np.ndarray | None = None
    words: tuple[str, ...] = ()
    tokens: list[np.ndarray] | None = None


class Predictor:
    """Predicts texts with a model, its variables and a vocabulary.

    Args:
      model: an unbound model.
      variables: its variables, on any devices.
      vocabulary: maps text to ids and back.
      inputs_length: inputs are truncated to this many tokens. 0: there are none, and texts that are given
        are continued by a `LanguageModel`.
      row_length: number of tokens of a training row, which a text to continue and its continuation share.
        Texts are not padded beyond it, for models that have no more positions. None: it is not known.
      decoding: how texts are decoded. Of several sequences per input, only `generate_texts` returns more
        than the first.
      ranks: whether label words are scored where there are any; then nothing is decoded.
      classes: the label words of the outputs of an `Encoder`, which has no other answers; see
        `DataConfig.classes`.
      batch_size: number of rows of a compiled batch.
      mesh: the mesh that shards the variables, and is to shard the inputs; batches are padded to a multiple
        of its devices. Of several processes each gives all inputs and gets all answers. None: one device.

    Attributes:
      advance: is told the number of inputs after every batch of them.
    """

    def __init__(
        self,
        model: TokenModel,
        variables: Variables,
        vocabulary: Vocabulary,
        *,
        inputs_length: int,
        row_length: int | None = None,
        decoding: Decoding,
        ranks: bool = False,
        classes: Sequence[str] = (),
        batch_size: int = 64,
        mesh: Mesh | None = None,
    ):
        self.model, self.variables, self.vocabulary = model, variables, vocabulary
        self.inputs_length, self.decoding, self.ranks = inputs_length, decoding, ranks
        self._row_length = row_length
        strings = decoding.stop_strings
        self._stops = stop_table(vocabulary, strings, model.vocab_size) if strings else None
        self.classes = Classes(classes, vocabulary) if classes else None
        self.mesh = None if mesh is None or mesh.size == 1 else mesh
        self._num_shards = 1 if self.mesh is None else batch_shards(self.mesh)
        self.advance: Callable[[int], object] = lambda _: None
        self.batch_size = -(-batch_size // self._num_shards) * self._num_shards

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of an input, truncated to `inputs_length`; see `around_inputs`.

        Without inputs they are those of a text to continue, all of them and without EOS.
        """
        ids = self.vocabulary.encode(text)
        if self.inputs_length:
            first, last = self.vocabulary.around_inputs
            ids = [*first, *ids[: self.inputs_length - len(first) - len(last)], *last]
        return np.asarray(ids, np.int32)

    def predict(
        self, inputs: Sequence[np.ndarray], label_words: Sequence[str] | None = None
    ) -> Predictions:
        """Predicts a text per input, in their order.

        A model with classes ranks all of them where the task names no label words.

        Args:
          inputs: token ids with EOS.
          label_words: the allowed answers, if they are ranked.
        """
        words = tuple(label_words or (self.classes.words if self.classes else ()))
        if self.ranks and words:
            ranked = self.rank(inputs, words)
            best = ranked.argmax(axis=-1)
            scores = np.take_along_axis(ranked, best[:, None], axis=-1)[:, 0]
            return Predictions([words[i] for i in best], scores, ranked, words)
        answers = self._map(inputs, "decode", self._generate)
        tokens = [np.asarray(_until_end(rows[0], self.model.ids), np.int32) for rows, _, _ in answers]
        scores = np.array([score[0] for _, _, score in answers], np.float32)
        texts = [self._text(row.tolist()) for row in tokens]
        return Predictions(texts, scores, tokens=tokens)

    def generate_texts(self, inputs: Sequence[np.ndarray]) -> list[list[Generated]]:
        """Returns `Decoding.samples` texts per input, the best of the beams first.

        Samples of an input depend on its position among the inputs, not on `batch_size` or `mesh`.

        Args:
          inputs: token ids from `encode`.
        """
        return [
            [
                Generated(self._text(_until_end(row, self.model.ids)), float(score))
                for row, score in zip(tokens, scores, strict=True)
            ]
            for tokens, _, scores in self._map(inputs, "decode", self._generate)
        ]

    def states(
        self, inputs: Sequence[np.ndarray], mask: Callable[[jax.Array], Mask | None] = lambda _: None
    ) -> list[np.ndarray]:
        """Returns the encoder's states of every input, ``[length, d_model]`` float32.

        Args:
          inputs: token ids with EOS.
          mask: returns the mask of a batch of tokens; see `encode_tokens`, also for errors.
        """
        encode = functools.partial(encode_tokens, self.variables, model=self.model)
        batches = self._map(inputs, "rank", lambda _, tokens: encode(tokens, mask=mask(tokens)))
        return [states[: len(ids)] for (states,), ids in zip(batches, inputs, strict=True)]

    def rank(self, inputs: Sequence[np.ndarray], label_words: Sequence[str]) -> np.ndarray:
        """Returns the log-probabilities in nats of label words as answers, ``[n, words]`` float32.

        Raises:
          ValueError: the model has classes, and a word is none of them; see also `index_by_tokens`.
        """
        if self.classes is not None:
            return self._class_log_probabilities(inputs)[:, self.classes.columns(label_words)]
        indices = index_by_tokens(label_words, self.vocabulary, owner="the list of label words")
        words = [np.asarray(ids) for ids in indices]
        length = -(-max(map(len, words)) // CHOICE_LENGTH) * CHOICE_LENGTH
        choices = _pad_tokens(words, -(-len(words) // CHOICES) * CHOICES, length, self.model.ids.padding)

        def score(_: list[int], tokens: jax.Array) -> jax.Array:
            return score_choices(self.variables, tokens, choices=choices, model=self._decoder)

        return self._scores(inputs, "rank", score).reshape(len(inputs), -1)[:, : len(words)]

    def log_probabilities(self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the log-probabilities in nats of given targets, teacher-forced, ``[n]`` float32.

        Args:
          inputs: token ids with EOS.
          targets: token ids with EOS, one for each input. Of a masked language model those at the places
            of the inputs, and padding where nothing is predicted.

        Raises:
          ValueError: the model has classes, and a target is none of them.
        """
        model = self.model
        if self.classes is not None:
            indices = [self.classes.index(target, owner="an example") for target in targets]
            return self._class_log_probabilities(inputs)[np.arange(len(inputs)), indices]
        longest, length = max(map(len, targets), default=1), CHOICE_LENGTH
        if longest > length or self.decoding.max_length < length:
            length = max(self.decoding.max_length, longest)
        masked = isinstance(model, Encoder)  # of the inputs' length

        def score(indices: list[int], tokens: jax.Array) -> jax.Array:
            width = tokens.shape[1] if masked else length
            rows = self._to_devices(
                _pad_tokens([targets[i] for i in indices], len(tokens), width, model.ids.padding)
            )
            if isinstance(model, Encoder):
                return score_masked_tokens(self.variables, tokens, targets=rows, model=model)
            return score_targets(self.variables, tokens, targets=rows, model=self._decoder)

        # No more logits than ranking four label words computes.
        rows = self.batch_size * CHOICES * CHOICE_LENGTH
        rows //= (self.inputs_length if masked else length) * self._num_shards
        rows = min(max(rows, 1) * self._num_shards, self.batch_size)
        return self._scores(inputs, "rank" if masked else "decode", score, batch_size=rows)

    def count_tokens(self, targets: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the number of predicted tokens of given targets, ``[n]`` int64.

        `log_probabilities` sums over these tokens: all of a target but padding, at which an objective
        predicts nothing. A class is one token.
        """
        if self.classes is not None:
            return np.ones(len(targets), np.int64)
        padding = self.model.ids.padding
        return np.array([np.count_nonzero(target != padding) for target in targets], np.int64)

    @property
    def _decoder(self) -> TextToText:
        """The model, if it generates text."""
        if not isinstance(self.model, TextToText):
            raise TypeError(
                f"{type(self.model).__name__} generates no text; give an EncoderDecoder or a LanguageModel"
            )
        return self.model

    def _class_log_probabilities(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the log-probabilities in nats of all classes, ``[n, classes]`` float32."""
        model, classes = self.model, self.classes
        assert isinstance(model, Encoder) and classes is not None
        scores = self._scores(
            inputs, "rank", lambda _, tokens: score_classes(self.variables, tokens, model=model)
        )
        return scores.reshape(len(inputs), len(classes.words))

    def _generate(self, indices: list[int], tokens: jax.Array) -> Sequences:
        """Decodes ``[batch, k]`` inputs of those indices, on which samples depend."""
        examples = np.zeros(len(tokens), np.int32)
        examples[: len(indices)] = indices
        return decode_sequences(
            self.variables,
            tokens,
            model=self._decoder,
            decoding=self.decoding,
            examples=self._to_devices(examples),
            continues=not self.inputs_length,
            stops=self._stops,
        )

    def _text(self, ids: list[int]) -> str:
        """Returns the text of ids before the first stop string."""
        text = self.vocabulary.decode(ids)
        found = [text.index(string) for string in self.decoding.stop_strings if string in text]
        return text[: min(found, default=len(text))]

    def _to_devices(self, x: np.ndarray) -> jax.Array:
        if self.mesh is None:
            return jnp.asarray(x)
        return replicate_to_devices(x, batch_sharding(self.mesh))

    def _scores(
        self,
        inputs: Sequence[np.ndarray],
        kind: str,
        answer: Callable[[list[int], jax.Array], jax.Array],
        *,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Returns the array whose parts a function computes for batches; see `_map`."""
        rows = self._map(inputs, kind, answer, batch_size=batch_size)
        return np.array([row for (row,) in rows], np.float32)

    def _map(
        self,
        inputs: Sequence[np.ndarray],
        kind: str,
        answer: Callable[[list[int], jax.Array], jax.Array | Sequences],
        *,
        batch_size: int | None = None,
    ) -> list[tuple[np.ndarray, ...]]:
        """Returns a row per input of the arrays that a function computes for batches of the `LENGTHS`."""
        answers: list[tuple[np.ndarray, ...]] = [()] * len(inputs)
        longest = self.inputs_length or self._padded_length(max(map(len, inputs), default=0))
        allowed = [-(-n * longest // 512) for n in LENGTHS[kind]]
        fetch = np.asarray if self.mesh is None else gather_to_host
        with contextlib.nullcontext() if self.mesh is None else use_mesh(self.mesh):
            for rows, batch in _length_batches(
                inputs, batch_size or self.batch_size, allowed, self.model.ids.padding
            ):
                outputs = jax.tree.leaves(answer(rows, self._to_devices(batch)))
                for row, *values in zip(rows, *map(fetch, outputs), strict=False):
                    answers[row] = tuple(values)
                self.advance(len(rows))
        return answers

    def _padded_length(self, longest: int) -> int:
        """Returns the length to which texts of at most `longest` tokens are padded to be continued.

        It is a power of two, so that few programs are compiled, or what `row_length` leaves for it.
        """
        if not longest:
            return 0
        rounded = 1 << (longest - 1).bit_length()
        if self._row_length is not None:
            rounded = min(rounded, self._row_length - self.decoding.max_length)
        return max(longest, rounded)


def _until_end(tokens: np.ndarray, ids: SpecialIds) -> list[int]:
    """Returns the ids of a row before EOS or padding."""
    ends = np.flatnonzero(np.isin(tokens, (*ids.ends, ids.padding)))
    return tokens[: ends[0] if len(ends) else len(tokens)].tolist()


def _length_batches(
    inputs: Sequence[np.ndarray], batch_size: int, lengths: Sequence[int], padding: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yields indices of inputs, sorted by length, and ``[batch_size, length]`` tokens; lengths ascend."""
    order = sorted(range(len(inputs)), key=lambda i: (len(inputs[i]), i))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(inputs[i]) for i in rows)
        length = next((n for n in lengths if n >= longest), lengths[-1])
        yield rows, _pad_tokens([inputs[i] for i in rows], batch_size, length, padding)


def _pad_tokens(rows: Sequence[np.ndarray], count: int, length: int, padding: int) -> np.ndarray:
    """Returns token ids as ``[count, length]`` int32, truncated and padded."""
    result = np.full((count, length), padding, np.int32)
    for slot, ids in zip(result, rows, strict=False):
        slot[: min(len(ids), length)] = ids[:length]
    return result
