"""Predicts texts for a list of tokenized inputs.

Inputs of similar length share a batch, so that few programs are compiled. The predictions are in
the order of the inputs.
"""

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
"""The numbers of label words and of tokens in a label word are padded to multiples of these.

With this padding, tasks with different label words can share a compiled program.
"""

LENGTHS = {"rank": (64, 128, 256, 512), "decode": (128, 512)}
"""The lengths of compiled batches if inputs have at most 512 tokens.

For other maximum lengths of inputs, the lengths of batches change in proportion. Ranking has more
lengths than decoding, because most tasks use ranking. GLUE and SuperGLUE together need eight
programs for predictions, and four more programs for the loss.
"""


class Generated(NamedTuple):
    """A text that a model generated.

    Attributes:
      text: the text.
      score: the log-probability of the text in nats; see `Sequences.scores`.
    """

    text: str
    score: float


class Predictions(NamedTuple):
    """The answers of a model to n inputs.

    Attributes:
      texts: the answers.
      scores: ``[n]`` log-probabilities of the answers in nats, including EOS.
      ranked: ``[n, words]`` log-probabilities of all label words, if the answers were ranked.
      words: the label words that were ranked.
      tokens: the token ids of the answers before EOS, if the answers were decoded.
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
      variables: the variables of the model, on any devices.
      vocabulary: the vocabulary, which converts texts to ids and ids to texts.
      inputs_length: inputs are truncated to this many tokens. With 0, there are no inputs, and a
        `LanguageModel` continues the given texts.
      row_length: number of tokens in a training row, which holds a text to continue and its
        continuation. Texts are not padded beyond `row_length`, because a model may have no more
        positions. None means that the number of tokens in a training row is not known.
      decoding: the settings of decoding. If the settings ask for several sequences per input,
        `generate_texts` returns all sequences, and other methods return only the first.
      ranks: whether label words are scored for tasks that have them, instead of decoding an answer.
      classes: the label words that the outputs of an `Encoder` stand for. An encoder can answer
        only with these words; see `DataConfig.classes`.
      batch_size: number of rows in a compiled batch.
      mesh: the mesh that shards the variables and the inputs. Batches are padded to a multiple of
        the number of devices. If there are several processes, every process must pass all inputs,
        and gets all answers. None means one device.

    Attributes:
      advance: a function that is called with the number of inputs after every batch, to report
        progress.
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
        # Round up the batch size, so that each shard of the mesh gets the same number of rows.
        self.batch_size = -(-batch_size // self._num_shards) * self._num_shards

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids of an input, truncated to `inputs_length`.

        `Vocabulary.around_inputs` defines the first and last ids. If `inputs_length` is 0, the
        input is a text to continue. The ids of a text to continue are neither truncated nor
        followed by EOS.
        """
        ids = self.vocabulary.encode(text)
        if self.inputs_length:
            first, last = self.vocabulary.around_inputs
            ids = [*first, *ids[: self.inputs_length - len(first) - len(last)], *last]
        return np.asarray(ids, np.int32)

    def predict(
        self, inputs: Sequence[np.ndarray], label_words: Sequence[str] | None = None
    ) -> Predictions:
        """Predicts a text for each input, in the order of the inputs.

        If the model has classes and the task has no label words, all classes are ranked.

        Args:
          inputs: token ids with EOS.
          label_words: the allowed answers, if answers are ranked.
        """
        words = tuple(label_words or (self.classes.words if self.classes else ()))
        if self.ranks and words:
            ranked = self.rank(inputs, words)
            best = ranked.argmax(axis=-1)
            scores = np.take_along_axis(ranked, best[:, None], axis=-1)[:, 0]
            return Predictions([words[i] for i in best], scores, ranked, words)
        answers = self._map(inputs, "decode", self._generate)
        tokens = [
            np.asarray(_until_end(rows[0], self.model.ids), np.int32) for rows, _, _ in answers
        ]
        scores = np.array([score[0] for _, _, score in answers], np.float32)
        texts = [self._text(row.tolist()) for row in tokens]
        return Predictions(texts, scores, tokens=tokens)

    def generate_texts(self, inputs: Sequence[np.ndarray]) -> list[list[Generated]]:
        """Returns `Decoding.samples` texts for each input. The best beam of an input comes first.

        The samples of an input depend on its position among the inputs, but not on `batch_size` or
        `mesh`.

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
        self,
        inputs: Sequence[np.ndarray],
        mask: Callable[[jax.Array], Mask | None] = lambda _: None,
    ) -> list[np.ndarray]:
        """Returns the encoder's states of every input, ``[length, d_model]`` float32.

        Args:
          inputs: token ids with EOS.
          mask: a function that returns the mask of a batch of tokens. See `encode_tokens` for the
            function and for errors.
        """
        encode = functools.partial(encode_tokens, self.variables, model=self.model)
        batches = self._map(inputs, "rank", lambda _, tokens: encode(tokens, mask=mask(tokens)))
        return [states[: len(ids)] for (states,), ids in zip(batches, inputs, strict=True)]

    def rank(self, inputs: Sequence[np.ndarray], label_words: Sequence[str]) -> np.ndarray:
        """Returns the log-probabilities of label words in nats, ``[n, words]`` float32.

        Raises:
          ValueError: if the model has classes, and a word is not one of them. See also
            `index_by_tokens`.
        """
        if self.classes is not None:
            return self._class_log_probabilities(inputs)[:, self.classes.columns(label_words)]
        indices = index_by_tokens(label_words, self.vocabulary, owner="The list of label words")
        words = [np.asarray(ids) for ids in indices]
        # Round up the number of words and the number of tokens, so that few programs are compiled.
        count = -(-len(words) // CHOICES) * CHOICES
        length = -(-max(map(len, words)) // CHOICE_LENGTH) * CHOICE_LENGTH
        choices = _pad_tokens(words, count, length, self.model.ids.padding)

        def score(_: list[int], tokens: jax.Array) -> jax.Array:
            """Returns the scores of all choices for each input of a batch."""
            return score_choices(self.variables, tokens, choices=choices, model=self._decoder)

        return self._scores(inputs, "rank", score).reshape(len(inputs), -1)[:, : len(words)]

    def log_probabilities(
        self, inputs: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Returns the log-probabilities of given targets in nats, a float32 array ``[n]``.

        The log-probabilities are computed with teacher forcing.

        Args:
          inputs: token ids with EOS.
          targets: token ids with EOS, one array for each input. For a masked language model, each
            target is as long as its input. The target contains the tokens to predict at the masked
            positions, and padding at all other positions.

        Raises:
          ValueError: if the model has classes, and a target is not one of them.
        """
        model = self.model
        if self.classes is not None:
            indices = [self.classes.index(target, owner="An example") for target in targets]
            return self._class_log_probabilities(inputs)[np.arange(len(inputs)), indices]
        # Pad targets to one of two lengths, so that few programs are compiled. The short length is
        # enough for label words, and the long length is the maximum length of an answer.
        longest = max(map(len, targets), default=1)
        length = CHOICE_LENGTH
        if longest > length or self.decoding.max_length < length:
            length = max(self.decoding.max_length, longest)
        # The targets of a masked language model are as long as the inputs.
        masked = isinstance(model, Encoder)

        def score(indices: list[int], tokens: jax.Array) -> jax.Array:
            """Returns the log-probabilities of the targets of a batch."""
            width = tokens.shape[1] if masked else length
            rows = self._to_devices(
                _pad_tokens([targets[i] for i in indices], len(tokens), width, model.ids.padding)
            )
            if isinstance(model, Encoder):
                return score_masked_tokens(self.variables, tokens, targets=rows, model=model)
            return score_targets(self.variables, tokens, targets=rows, model=self._decoder)

        # Choose the largest batch that does not need more logits than the ranking of `CHOICES`
        # label words.
        rows = self.batch_size * CHOICES * CHOICE_LENGTH
        rows //= (self.inputs_length if masked else length) * self._num_shards
        rows = min(max(rows, 1) * self._num_shards, self.batch_size)
        return self._scores(inputs, "rank" if masked else "decode", score, batch_size=rows)

    def count_tokens(self, targets: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the numbers of predicted tokens in given targets, an int64 array ``[n]``.

        `log_probabilities` sums over the predicted tokens. All tokens of a target are predicted,
        except padding. A class counts as one token.
        """
        if self.classes is not None:
            return np.ones(len(targets), np.int64)
        padding = self.model.ids.padding
        return np.array([np.count_nonzero(target != padding) for target in targets], np.int64)

    @property
    def _decoder(self) -> TextToText:
        """The model, after a check that it is a `TextToText` and can generate text.

        Raises:
          TypeError: if the model is an encoder.
        """
        if not isinstance(self.model, TextToText):
            raise TypeError(
                f"The model is of the class {type(self.model).__name__}, which cannot generate "
                "text. Use an EncoderDecoder or a LanguageModel."
            )
        return self.model

    def _class_log_probabilities(self, inputs: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the log-probabilities of all classes in nats, ``[n, classes]`` float32."""
        model, classes = self.model, self.classes
        assert isinstance(model, Encoder) and classes is not None
        scores = self._scores(
            inputs, "rank", lambda _, tokens: score_classes(self.variables, tokens, model=model)
        )
        return scores.reshape(len(inputs), len(classes.words))

    def _generate(self, indices: list[int], tokens: jax.Array) -> Sequences:
        """Decodes a batch of inputs ``[batch, k]``.

        The samples of an input depend on its index in `indices`.
        """
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
        """Returns the text of token ids, cut before the first stop string."""
        text = self.vocabulary.decode(ids)
        found = [text.index(string) for string in self.decoding.stop_strings if string in text]
        return text[: min(found, default=len(text))]

    def _to_devices(self, x: np.ndarray) -> jax.Array:
        """Puts a batch on the devices, and shards it over the mesh if a mesh was given."""
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
        """Returns an array of all rows that `answer` returns for batches; see `_map`."""
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
        """Calls a function for batches of inputs, and returns the results in the inputs' order.

        Args:
          inputs: token ids.
          kind: a key of `LENGTHS`, which gives the lengths of batches.
          answer: a function from the indices and the tokens ``[batch, length]`` of a batch to
            arrays with a row for each input.
          batch_size: number of rows in a batch. None means the batch size of the predictor.

        Returns:
          A tuple for each input, which contains the input's row of each array.
        """
        answers: list[tuple[np.ndarray, ...]] = [()] * len(inputs)
        longest = self.inputs_length or self._padded_length(max(map(len, inputs), default=0))
        # Scale the lengths in `LENGTHS`, which are for inputs of at most 512 tokens, to the maximum
        # length of the inputs.
        allowed = [-(-n * longest // 512) for n in LENGTHS[kind]]
        fetch = np.asarray if self.mesh is None else gather_to_host
        with contextlib.nullcontext() if self.mesh is None else use_mesh(self.mesh):
            for rows, batch in _length_batches(
                inputs, batch_size or self.batch_size, allowed, self.model.ids.padding
            ):
                outputs = jax.tree.leaves(answer(rows, self._to_devices(batch)))
                # A batch may have more rows than inputs. Leave out the remaining rows, which are
                # padding.
                for row, *values in zip(rows, *map(fetch, outputs), strict=False):
                    answers[row] = tuple(values)
                self.advance(len(rows))
        return answers

    def _padded_length(self, longest: int) -> int:
        """Returns the length to which texts to continue are padded.

        The longest text has `longest` tokens. The padded length is a power of two, so that few
        programs are compiled. If `row_length` does not leave room for this power of two, the padded
        length is the remaining room.
        """
        if not longest:
            return 0
        rounded = 1 << (longest - 1).bit_length()
        if self._row_length is not None:
            rounded = min(rounded, self._row_length - self.decoding.max_length)
        return max(longest, rounded)


def _until_end(tokens: np.ndarray, ids: SpecialIds) -> list[int]:
    """Returns the ids of a row before the first EOS or padding."""
    ends = np.flatnonzero(np.isin(tokens, (*ids.ends, ids.padding)))
    return tokens[: ends[0] if len(ends) else len(tokens)].tolist()


def _length_batches(
    inputs: Sequence[np.ndarray], batch_size: int, lengths: Sequence[int], padding: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yields batches of inputs of similar length. The shortest inputs come first.

    A batch consists of the indices of the inputs, and the tokens ``[batch_size, length]`` of these
    inputs.

    Args:
      inputs: token ids.
      batch_size: number of rows in a batch.
      lengths: the allowed lengths, in ascending order. Longer inputs are truncated to the last of
        the lengths.
      padding: the id of padding.
    """
    order = sorted(range(len(inputs)), key=lambda i: (len(inputs[i]), i))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        longest = max(len(inputs[i]) for i in rows)
        length = next((n for n in lengths if n >= longest), lengths[-1])
        yield rows, _pad_tokens([inputs[i] for i in rows], batch_size, length, padding)


def _pad_tokens(rows: Sequence[np.ndarray], count: int, length: int, padding: int) -> np.ndarray:
    """Returns token ids as an array ``[count, length]`` of int32, truncated or padded."""
    result = np.full((count, length), padding, np.int32)
    for slot, ids in zip(result, rows, strict=False):
        slot[: min(len(ids), length)] = ids[:length]
    return result
