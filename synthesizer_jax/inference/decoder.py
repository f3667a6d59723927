"""A model as the decoding loops see it: tokens in, logits out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.models import DecodingCache, LanguageModel, TextToText
from synthesizer_jax.parameters import Variables, apply_method

EOS = 1
START = 0
"""T5's ids of the end of a sequence, and of padding, which is the decoder's first input."""


class Sequences(NamedTuple):
    """Several decoded sequences per input: the best of the beams, best first, or independent samples.

    Attributes:
      tokens: ``[batch, samples, max_length]``, including EOS; zeros after it.
      scores: ``[batch, samples]`` what beam search ranks by: the log-probabilities divided by the length
        penalty. Without beams, the log-probabilities.
      log_probabilities: ``[batch, samples]`` in nats, EOS included, under the model itself: before
        temperature, `top_k`, `top_p` and the minimum length change its distribution.
    """

    tokens: jax.Array
    scores: jax.Array
    log_probabilities: jax.Array


class Lengths(NamedTuple):
    """Allowed numbers of tokens, EOS included.

    Attributes:
      shortest: ``[]`` the minimum of every example; None: 1, without a copy of the logits.
      longest: ``[batch]`` the maximum of each example.
    """

    shortest: ArrayLike | None
    longest: jax.Array

    def forbid_early_end(self, logits: jax.Array, at: jax.Array) -> jax.Array:
        """Returns logits ``[..., vocab]`` of position `at` with EOS at −∞ where it is too early."""
        if self.shortest is None:
            return logits
        is_eos = jnp.arange(logits.shape[-1])[None] == EOS
        return jnp.where(is_eos & (at + 1 < self.shortest), -jnp.inf, logits)


class Decoder:
    """A model with looped layers and its variables; maps tokens to logits.

    Args:
      model: an unbound model with looped layers.
      variables: its variables.
      encoder_tokens: ``[batch, k]`` integers; 0 is padding.
      max_length: number of positions of the cache.
      logits_dtype: dtype of the operands of the output projection; None is the model's.
      continues: whether the tokens are the beginning of the targets, see `decode_sequences`.
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
        self.batch, self.max_length = encoder_tokens.shape[0], max_length
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
        return jnp.full(self.batch, START, jnp.int32), cache

    def next(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Returns the ``[rows, vocab]`` float32 logits after the tokens ``[rows]``, and the cache."""
        hidden, cache = apply_method(self._model.extend, self._variables, tokens[:, None], cache)
        x = (hidden[:, 0] * jnp.asarray(self._scale, hidden.dtype)).astype(self._kernel.dtype)
        return jnp.matmul(x, self._kernel, preferred_element_type=jnp.float32), cache
