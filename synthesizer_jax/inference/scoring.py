"""Rank classification: the log-probability of every label word."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Mask
from synthesizer_jax.models import EncoderDecoder, Memory


@functools.partial(jax.jit, static_argnames=("model",))
def score_choices(
    variables: dict[str, Any],
    encoder_tokens: jax.Array,
    *,
    choices: jax.Array,
    model: EncoderDecoder,
) -> jax.Array:
    """Log-probabilities of the same choices for every example; the encoder runs once.

    Args:
      variables: the model's variables.
      encoder_tokens: ``[batch, k]`` integers, 0 is padding.
      choices: ``[choices, t]`` target tokens with EOS, 0 is padding.
      model: an unbound model.

    Returns:
      ``[batch, choices]`` float32, summed over each choice's tokens.
    """
    encoded: Any = model.apply(variables, encoder_tokens, method="encode")
    lengths = (encoder_tokens != 0).sum(axis=-1, dtype=jnp.int32)
    memory = Memory(encoded, Mask(key_lengths=lengths))

    def score(choice: jax.Array) -> jax.Array:
        shifted = jnp.concatenate([jnp.zeros(1, choice.dtype), choice[:-1]])
        tokens = jnp.broadcast_to(shifted, (encoder_tokens.shape[0], choice.shape[0]))
        hidden = model.apply(variables, tokens, memory, method="decode")
        logits: Any = model.apply(variables, hidden, method="logits")
        logp = jax.nn.log_softmax(logits.astype(jnp.float32))
        logp = jnp.take_along_axis(logp, choice[None, :, None], axis=-1)
        return jnp.where(choice != 0, logp[..., 0], 0.0).sum(axis=-1)

    return jax.vmap(score, out_axes=1)(choices)
