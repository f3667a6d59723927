"""The view that the decoding loops have of a model: tokens in, logits out."""

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

    They are the best sequences of a beam search, best first, or independent samples.

    Attributes:
      tokens: ``[batch, samples, max_length]``, including EOS, with padding after it.
      scores: ``[batch, samples]`` the log-probabilities. In beam search they are divided by the
        length penalty, and sequences are ranked by them.
      log_probabilities: ``[batch, samples]`` log-probabilities in nats, including that of EOS. They
        are those of the model itself, before temperature, `top_k`, `top_p`, `min_p` and the minimum
        length change its distribution. Only in beam search do they include the effect of a
        repetition penalty.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probabilities: jax.Array


class Constraints(NamedTuple):
    """What decoded sequences may hold. Lengths include EOS.

    Attributes:
      shortest: ``[]`` the minimum length of every example. None means 1, and avoids a copy of the
        logits.
      longest: ``[batch]`` the maximum length of each example.
      repetition_penalty: ``[]``, see `Decoding`. None means no penalty.
      no_repeat_ngram_size: see `Decoding`. None means that all repetitions are allowed.
      prompt: ``[batch, k]`` the tokens before the decoded ones, aligned on the right. It is given
        only if repetition is constrained.
      stops: ``[states, vocab]``, see `data.stop_strings.stop_table`. None means that only EOS ends
        sequences.
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

        Forbidden tokens get −∞.

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
          prompt: ``[rows, k]`` the tokens before the decoded ones. −1 is no token.
          tokens: as in `apply`.
          at: as in `apply`.
        """
        past = jnp.concatenate([prompt, tokens], axis=1)  # [rows, k + m]
        row = jnp.arange(len(past))[:, None]
        length = prompt.shape[1] + at  # the number of tokens so far
        nowhere = logits.shape[1]  # an index past the vocabulary, which updates drop

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
        """Returns the states of `stops` after tokens, and whether each token ends its sequence.

        Args:
          text: the states before the tokens.
          token: the tokens, in the same shape.
        """
        ends = self._are_ends(token)
        if self.stops is None:
            return text, ends
        stops = jnp.asarray(self.stops)
        text = stops[text, token].astype(text.dtype)
        return text, ends | (text == len(stops) - 1)

    def without_stops(self, logits: jax.Array, text: jax.Array) -> jax.Array:
        """Returns logits ``[..., vocab]`` with −∞ for tokens that complete a stop string.

        There must be stop strings.

        Args:
          logits: the logits.
          text: ``[...]`` the states of `stops` before the tokens.
        """
        assert self.stops is not None
        stops = jnp.asarray(self.stops)
        return jnp.where(stops[text] == len(stops) - 1, -jnp.inf, logits)

    def _are_ends(self, tokens: jax.Array) -> jax.Array:
        """Returns which tokens end a sequence by their id."""
        return functools.reduce(operator.or_, [tokens == end for end in self.ids.ends])


def _repeats_ngram(past: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """Returns which tokens would complete an n-gram that has occurred before, ``[rows, k]``.

    A position is marked if the n - 1 tokens before it are equal to the last n - 1 of the first
    `length` tokens.
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

    The layers of the model must be looped. The cache has `max_length` positions. See
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
        # The kernel is cast here once, and not in every iteration of the loop.
        self._kernel = kernel.astype(model.dtype if logits_dtype is None else logits_dtype)

    def begin(self) -> tuple[jax.Array, DecodingCache]:
        """Returns the tokens ``[batch]`` after which decoding starts, and the cache before them."""
        model = self._model
        inputs = (self._variables, self._encoder_tokens)
        if isinstance(model, LanguageModel) and self._continues:
            return apply_method(model.begin_targets, *inputs, max_length=self.max_length)
        cache = apply_method(model.init_cache, *inputs, max_length=self.max_length)
        return jnp.full(self.batch, self.ids.start, jnp.int32), cache

    def next(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Returns the float32 logits ``[rows, vocab]`` after tokens ``[rows]``, and the cache."""
        hidden, cache = apply_method(self._model.extend, self._variables, tokens[:, None], cache)
        x = (hidden[:, 0] * jnp.asarray(self._scale, hidden.dtype)).astype(self._kernel.dtype)
        logits = jnp.matmul(x, self._kernel, preferred_element_type=jnp.float32)
        return cap_logits(logits, self._model.logits_soft_cap), cache
