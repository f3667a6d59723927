"""The interface through which decoding loops use a model, which maps tokens to logits."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.attention.terms import cap_logits
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.models import DecodingCache, LanguageModel, TextToText
from synthesizer_jax.primitives.parameters import Variables, apply_method


class Sequences(NamedTuple):
    """Several decoded sequences for each input.

    The sequences are the best results of a beam search, best first, or independent samples.

    Attributes:
      tokens: ``[batch, samples, max_length]``, including EOS, with padding after EOS.
      scores: ``[batch, samples]`` the log-probabilities. In beam search, the scores are divided by
        the length penalty, and the sequences are sorted by their scores.
      log_probabilities: ``[batch, samples]`` log-probabilities in nats, including the
        log-probability of EOS. The log-probabilities come from the model's own distribution, before
        this distribution is changed by the temperature, `top_k`, `top_p`, `min_p` and the minimum
        length. A repetition penalty changes the log-probabilities only in beam search.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probabilities: jax.Array


class Constraints(NamedTuple):
    """Constraints on the lengths and tokens of decoded sequences. Lengths include EOS.

    Attributes:
      shortest: ``[]`` the minimum length of every sequence. None means a minimum length of 1, and
        avoids a copy of the logits.
      longest: ``[batch]`` the maximum length of the sequences of each example.
      repetition_penalty: ``[]`` the repetition penalty; see `Decoding`. None means no penalty.
      no_repeat_ngram_size: the length of n-grams that must not be repeated; see `Decoding`. None
        means that all repetitions are allowed.
      prompt: ``[batch, k]`` the tokens before the decoded tokens, aligned on the right. The prompt
        is given only if repetition is constrained.
      stops: ``[states, vocab]`` the transitions of the stop strings; see
        `data.stop_strings.stop_table`. None means that only EOS ends sequences.
      ids: the ids of padding and EOS.
    """

    shortest: ArrayLike | None
    longest: jax.Array
    repetition_penalty: ArrayLike | None = None
    no_repeat_ngram_size: int | None = None
    prompt: jax.Array | None = None
    stops: ArrayLike | None = None
    ids: SpecialIds = T5_IDS

    def apply(self, logits: jax.Array, tokens: jax.Array, at: jax.Array) -> jax.Array:
        """Returns the logits after applying the constraints.

        The logits of forbidden tokens are −∞.

        Args:
          logits: ``[rows, vocab]`` the logits at position `at`.
          tokens: ``[rows, m]`` the tokens decoded so far, with padding from `at` on.
          at: the position to decode.
        """
        if self.prompt is not None:
            prompt = jnp.repeat(self.prompt, len(tokens) // len(self.prompt), axis=0)
            logits = self._limit_repetition(logits, prompt, tokens, at)
        if self.shortest is None:
            return logits
        is_end = self._are_ends(jnp.arange(logits.shape[-1]))  # [vocab]
        return jnp.where(is_end & (at + 1 < self.shortest), -jnp.inf, logits)

    def _limit_repetition(
        self, logits: jax.Array, prompt: jax.Array, tokens: jax.Array, at: jax.Array
    ) -> jax.Array:
        """Returns the logits after applying the repetition penalty and forbidding n-grams.

        Args:
          logits: as in `apply`.
          prompt: ``[rows, k]`` the tokens before the decoded tokens. −1 marks positions without a
            token.
          tokens: as in `apply`.
          at: as in `apply`.
        """
        past = jnp.concatenate([prompt, tokens], axis=1)  # [rows, k + m]
        row = jnp.arange(len(past))[:, None]
        length = prompt.shape[1] + at  # the number of tokens in `past` so far.
        # The index is past the end of the vocabulary, so updates at this index are dropped.
        nowhere = logits.shape[1]

        penalty = self.repetition_penalty
        if penalty is not None:
            known = jnp.where((jnp.arange(past.shape[1]) < length) & (past >= 0), past, nowhere)
            seen = jnp.zeros(logits.shape, bool).at[row, known].set(True, mode="drop")
            scaled = jnp.where(logits < 0, logits * penalty, logits / penalty)
            logits = jnp.where(seen, scaled, logits)

        if self.no_repeat_ngram_size is not None:
            repeats = _repeats_ngram(past, length, self.no_repeat_ngram_size)
            ends = jnp.where(repeats & (past >= 0), past, nowhere)
            logits = logits.at[row, ends].set(-jnp.inf, mode="drop")
        return logits

    def follow(self, text: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the states of `stops` after the tokens, and whether each token ends its sequence.

        Args:
          text: the states before the tokens.
          token: the tokens, in the same shape as `text`.
        """
        ends = self._are_ends(token)
        if self.stops is None:
            return text, ends
        stops = jnp.asarray(self.stops)
        text = stops[text, token].astype(text.dtype)
        return text, ends | (text == len(stops) - 1)

    def without_stops(self, logits: jax.Array, text: jax.Array) -> jax.Array:
        """Returns logits ``[..., vocab]`` with −∞ for tokens that complete a stop string.

        The field `stops` must not be None.

        Args:
          logits: the logits.
          text: ``[...]`` the states of `stops` before the tokens.
        """
        assert self.stops is not None
        stops = jnp.asarray(self.stops)
        return jnp.where(stops[text] == len(stops) - 1, -jnp.inf, logits)

    def _are_ends(self, tokens: jax.Array) -> jax.Array:
        """Returns whether each token is one of the ids that end a sequence."""
        return functools.reduce(operator.or_, [tokens == end for end in self.ids.ends])


def _repeats_ngram(past: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """Returns a mask of the positions whose tokens complete a repeated n-gram, ``[rows, k]``.

    The mask is True at a position of `past` if the n - 1 tokens before the position are equal to
    the last n - 1 of the first `length` tokens.
    """
    position = jnp.arange(past.shape[1])
    repeats = jnp.broadcast_to((position >= n - 1) & (position < length), past.shape)  # [rows, k]
    for i in range(1, min(n, past.shape[1])):
        last = jax.lax.dynamic_index_in_dim(past, length - i, axis=1)
        repeats &= jnp.roll(past, i, axis=1) == last
    return repeats


def check_continues(model: TextToText, continues: bool) -> None:
    """Raises a `TypeError` if a model is asked to continue texts but cannot."""
    if continues and not isinstance(model, LanguageModel):
        raise TypeError(
            f"A model of type {type(model).__name__} cannot continue a text. Pass a LanguageModel, "
            "or continues=False."
        )


class Decoder:
    """A model with its variables and inputs, which maps tokens to logits.

    The layers of the model must be looped, not scanned. The cache has `max_length` positions. See
    `decode_sequences` and `Decoding` for the other arguments.
    """

    def __init__(
        self,
        model: TextToText,
        variables: Variables,
        encoder_tokens: jax.Array,
        *,
        max_length: int,
        logits_dtype: str | None = None,
        continues: bool = False,
    ):
        self.batch = encoder_tokens.shape[0]
        self.max_length = max_length
        self.ids = model.ids
        self._model = model
        self._variables = variables
        self._encoder_tokens = encoder_tokens
        self._continues = continues
        kernel, self._scale = apply_method(model.output_kernel, variables)
        # The output kernel is cast here once, instead of in every iteration of the decoding loop.
        self._kernel = kernel.astype(model.dtype if logits_dtype is None else logits_dtype)

    def begin(self) -> tuple[jax.Array, DecodingCache]:
        """Returns the tokens ``[batch]`` and the cache for the first call of `next`."""
        model = self._model
        inputs = (self._variables, self._encoder_tokens)
        if isinstance(model, LanguageModel) and self._continues:
            return apply_method(model.begin_targets, *inputs, max_length=self.max_length)
        cache = apply_method(model.init_cache, *inputs, max_length=self.max_length)
        return jnp.full(self.batch, self.ids.start, jnp.int32), cache

    def next(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Returns float32 logits ``[rows, vocab]`` after tokens ``[rows]``, and the new cache."""
        hidden, cache = apply_method(self._model.extend, self._variables, tokens[:, None], cache)
        x = (hidden[:, 0] * jnp.asarray(self._scale, hidden.dtype)).astype(self._kernel.dtype)
        logits = jnp.matmul(x, self._kernel, preferred_element_type=jnp.float32)
        return cap_logits(logits, self._model.logits_soft_cap), cache
