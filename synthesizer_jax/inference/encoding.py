"""The states of an encoder."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from synthesizer_jax.ambient import on_any_mesh
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables, apply_method


@functools.partial(jax.jit, static_argnames="model")
@on_any_mesh
def encode_tokens(variables: Variables, tokens: jax.Array, *, model: TokenModel) -> jax.Array:
    """Encodes a batch of inputs.

    Args:
      variables: the model's variables.
      tokens: ``[batch, k]`` integers; 0 is padding, after the tokens.
      model: an unbound `EncoderDecoder`, or an `Encoder`.

    Returns:
      ``[batch, k, d_model]`` float32, the encoder's outputs.

    Raises:
      TypeError: the model has no encoder.
    """
    if isinstance(model, Encoder):
        hidden = apply_method(model.__call__, variables, tokens).hidden
    elif isinstance(model, EncoderDecoder):
        hidden = apply_method(model.encode, variables, tokens)
    else:
        raise TypeError(
            f"{type(model).__name__} has no encoder; give an EncoderDecoder or an Encoder"
        )
    return hidden.astype(jnp.float32)
