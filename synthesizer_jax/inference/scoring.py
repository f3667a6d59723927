"""Log-probabilities of given answers: rank classification and held-out loss."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.models import TextToText


@functools.partial(jax.jit, static_argnames=("model",))
def score_choices(
    variables: dict[str, Any],
    encoder_tokens: jax.Array,
    *,
    choices: ArrayLike,
    model: TextToText,
) -> jax.Array:
    """Log-probabilities of the same choices for every example; the encoder runs once.

    Args:
      variables: the model's variables.
      encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
      choices: ``[choices, t]`` target tokens with EOS, 0 is padding; on any host or device.
      model: an unbound model.

    Returns:
      ``[batch, choices]`` float32, summed over each choice's tokens.
    """
    memory = model.apply(variables, encoder_tokens, method="remember")

    def score(choice: jax.Array) -> jax.Array:
        rows = jnp.broadcast_to(choice, (encoder_tokens.shape[0], choice.shape[0]))
        return log_probability(model, variables, rows, memory)

    return jax.vmap(score, out_axes=1)(jnp.asarray(choices))


@functools.partial(jax.jit, static_argnames=("model",))
def score_targets(
    variables: dict[str, Any],
    encoder_tokens: jax.Array,
    *,
    targets: jax.Array,
    model: TextToText,
) -> jax.Array:
    """Log-probability of every example's own target.

    Args:
      variables: the model's variables.
      encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
      targets: ``[batch, t]`` tokens with EOS, 0 is padding.
      model: an unbound model.

    Returns:
      ``[batch]`` float32, in nats, summed over the target's tokens.
    """
    memory = model.apply(variables, encoder_tokens, method="remember")
    return log_probability(model, variables, targets, memory)


def log_probability(
    model: TextToText, variables: dict[str, Any], targets: jax.Array, memory: Any
) -> jax.Array:
    """``[batch]`` sums of the target tokens' log-probabilities, teacher-forced."""
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)))
    hidden = model.apply(variables, shifted, memory, method="decode")
    logits: Any = model.apply(variables, hidden, method="logits")
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    logp = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]
    return jnp.where(targets != 0, logp, 0.0).sum(axis=-1)
