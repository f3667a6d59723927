"""A model as the decoding loops see it: tokens in, logits out."""

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
    """Several decoded sequences per input: the best of the beams, best first, or independent samples.

    Attributes:
      tokens: ``[batch, samples, max_length]``, including EOS; padding after it.
      scores: ``[batch, samples]`` what beam search ranks by: the log-probabilities divided by the length
        penalty. Without beams, the log-probabilities.
      log_probabilities: ``[batch, samples]`` in nats, EOS included, under the model itself: before
        temperature, `top_k`, `top_p`, `min_p` and the minimum length change its distribution. A repetition
        penalty changes those of beams.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probabilities: jax.Array


class Constraints(NamedTuple):
    """What sequences may hold; lengths count EOS.

    Attributes:
      shortest: ``[]`` the minimum length of every example; None: 1, without a copy of the logits.
      longest: ``[batch]`` the maximum length of each example.
      repetition_penalty: ``[]``, see `Decoding`; None: 1.
      no_repeat_ngram_size: see `Decoding`; None: all are allowed.
      prompt: ``[batch, k]`` the tokens before the decoded ones, the last at the end; read where repetition
        is constrained.
      stops: ``[states, vocab]``, see `data.stop_strings.stop_table`; None: EOS alone ends sequences.
      ids: those of padding and of EOS.
    """

    shortest: ArrayLike | None
    longest: jax.Array
    repetition_penalty: ArrayLike | None = None
    no_repeat_ngram_size: int | None = None
    prompt: jax.Array | None = None
    stops: ArrayLike | None = None
    ids: SpecialIds = T5_IDS

    def apply(self, logits: jax.Array, tokens: jax.Array, at: jax.Array) -> jax.Array:
        """Returns logits ``[rows, vocab]`` of position `at` after `tokens` ``[rows, m]``, changed.

        Forbidden tokens have −∞. `tokens` has padding from `at` on.
        """
        if self.prompt is not None:
            prompt = jnp.repeat(self.prompt, len(tokens) // len(self.prompt), axis=0)
            past = jnp.concatenate([prompt, tokens], axis=1)
            row, length = jnp.arange(len(past))[:, None], prompt.shape[1] + at
            nowhere = logits.shape[1]
            if (penalty := self.repetition_penalty) is not None:
                known = jnp.where((jnp.arange(past.shape[1]) < length) & (past >= 0), past, nowhere)
                seen = jnp.zeros(logits.shape, bool).at[row, known].set(True, mode="drop")
                scaled = jnp.where(logits < 0, logits * penalty, logits / penalty)
                logits = jnp.where(seen, scaled, logits)
            if self.no_repeat_ngram_size is not None:
                repeats = _repeats_ngram(past, length, self.no_repeat_ngram_size)
                ends = jnp.where(repeats & (past >= 0), past, nowhere)
                logits = logits.at[row, ends].set(-jnp.inf, mode="drop")
        if self.shortest is None:
            return logits
        is_end = self._are_ends(jnp.arange(logits.shape[-1]))
        return jnp.where(is_end & (at + 1 < self.shortest), -jnp.inf, logits)

    def follow(self, text: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the states of `stops` after tokens, from those before, and which tokens end sequences."""
        ends = self._are_ends(token)
        if self.stops is None:
            return text, ends
        stops = jnp.asarray(self.stops)
        text = stops[text, token].astype(text.dtype)
        return text, ends | (text == len(stops) - 1)

    def without_stops(self, logits: jax.Array, text: jax.Array) -> jax.Array:
        """Returns logits ``[..., vocab]`` with −∞ for tokens that complete a stop string.

        `text` ``[...]`` are the states of `stops` before the tokens; there are stop strings.
        """
        assert self.stops is not None
        stops = jnp.asarray(self.stops)
        return jnp.where(stops[text] == len(stops) - 1, -jnp.inf, logits)

    def _are_ends(self, tokens: jax.Array) -> jax.Array:
        return functools.reduce(operator.or_, [tokens == end for end in self.ids.ends])


def _repeats_ngram(past: jax.Array, length: jax.Array, n: int) -> jax.Array:
    """Returns which of the first `length` tokens come after the n - 1 last of them, ``[rows, k]``."""
    position = jnp.arange(past.shape[1])
    repeats = jnp.broadcast_to((position >= n - 1) & (position < length), past.shape)  # [rows, k]
    for i in range(1, min(n, past.shape[1])):
        last = jax.lax.dynamic_index_in_dim(past, length - i, axis=1)
        repeats &= jnp.roll(past, i, axis=1) == last
    return repeats


def check_continues(model: TextToText, continues: bool) -> None:
    """Raises a `TypeError` if a model would have to continue texts, and cannot."""
    if continues and not isinstance(model, LanguageModel):
        raise TypeError(
            f"{type(model).__name__} models read inputs and continue no text; pass a LanguageModel, or "
            "continues=False"
        )


class Decoder:
    """A model with looped layers and its variables; maps tokens to logits.

    The cache has `max_length` positions. For the other arguments see `decode_sequences` and `Decoding`.
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
        self.batch, self.max_length, self.ids = encoder_tokens.shape[0], max_length, model.ids
        self._model, self._variables, self._encoder_tokens = model, variables, encoder_tokens
        self._continues = continues
        kernel, self._scale = apply_method(model.output_kernel, variables)
        # Cast once, not in every iteration of the loop.
        self._kernel = kernel.astype(model.dtype if logits_dtype is None else logits_dtype)

    def begin(self) -> tuple[jax.Array, DecodingCache]:
        """Returns the tokens ``[batch]`` after which decoding starts, and the cache before them."""
        model, inputs = self._model, (self._variables, self._encoder_tokens)
        if isinstance(model, LanguageModel) and self._continues:
            return apply_method(model.begin_targets, *inputs, max_length=self.max_length)
        cache = apply_method(model.init_cache, *inputs, max_length=self.max_length)
        return jnp.full(self.batch, self.ids.start, jnp.int32), cache

    def next(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Returns the ``[rows, vocab]`` float32 logits after the tokens ``[rows]``, and the cache."""
        hidden, cache = apply_method(self._model.extend, self._variables, tokens[:, None], cache)
        x = (hidden[:, 0] * jnp.asarray(self._scale, hidden.dtype)).astype(self._kernel.dtype)
        logits = jnp.matmul(x, self._kernel, preferred_element_type=jnp.float32)
        return cap_logits(logits, self._model.logits_soft_cap), cache
