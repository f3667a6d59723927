"""Log-probabilities of given targets and classes, and the states of an encoder.

The functions take an unbound model, its variables, and tokens ``[batch, k]`` with padding.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.attention.masks import MaskLike
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.inference.decoder import check_continues
from synthesizer_jax.models import Encoder, EncoderDecoder, TextToText
from synthesizer_jax.models.token_model import TokenModel, move_token_padding_last, num_real_tokens
from synthesizer_jax.primitives.mesh import on_any_mesh
from synthesizer_jax.primitives.parameters import Variables, apply_method


@functools.partial(jax.jit, static_argnames="model")
@on_any_mesh
def encode_tokens(
    variables: Variables, tokens: jax.Array, *, model: TokenModel, mask: MaskLike = None
) -> jax.Array:
    """Returns the outputs of an encoder, ``[batch, k, d_model]`` float32.

    If there is no mask, the padding of the tokens should be at the end, because an `EncoderDecoder`
    returns the states of the real tokens first. See `Encoder` for the mask.

    Raises:
      TypeError: if the model has no encoder.
    """
    if isinstance(model, Encoder):
        hidden = apply_method(model.__call__, variables, tokens, mask=mask).hidden
    elif isinstance(model, EncoderDecoder):
        hidden = apply_method(model.encode, variables, tokens, mask=mask)
    else:
        raise _no_encoder(model)
    return hidden.astype(jnp.float32)


def encoder_width(model: TokenModel) -> int:
    """Returns the width ``d_model`` of the outputs of `encode_tokens`.

    Raises:
      TypeError: if the model has no encoder.
    """
    if isinstance(model, EncoderDecoder):
        return model.width("encoder")
    if isinstance(model, Encoder):
        return model.d_model
    raise _no_encoder(model)


def _no_encoder(model: TokenModel) -> TypeError:
    """Returns the error that is raised for a model without an encoder."""
    return TypeError(
        f"{type(model).__name__} has no encoder. Pass an EncoderDecoder or an Encoder."
    )


@functools.partial(jax.jit, static_argnames="model")
@on_any_mesh
def score_choices(
    variables: Variables, encoder_tokens: jax.Array, *, choices: ArrayLike, model: TextToText
) -> jax.Array:
    """Returns the log-probability of every choice for every example.

    All examples have the same choices. The encoder runs only once per batch.

    Args:
      variables: the model's variables.
      encoder_tokens: ``[batch, k]`` inputs with padding.
      choices: ``[choices, t]`` the target tokens of each choice, with EOS and padding.
      model: an unbound model.

    Returns:
      ``[batch, choices]`` float32 log-probabilities in nats, summed over the tokens of a choice.
    """
    memory = apply_method(model.encode_inputs, variables, encoder_tokens)

    def score(choice: jax.Array) -> jax.Array:
        """Returns the log-probability of a choice for every example, ``[batch]``."""
        rows = jnp.broadcast_to(choice, (encoder_tokens.shape[0], choice.shape[0]))
        return _log_probability(model, variables, targets=rows, memory=memory)

    return jax.vmap(score, out_axes=1)(jnp.asarray(choices))


@functools.partial(jax.jit, static_argnames=("model", "continues"))
@on_any_mesh
def score_targets(
    variables: Variables,
    encoder_tokens: jax.Array,
    *,
    targets: jax.Array,
    model: TextToText,
    continues: bool = False,
) -> jax.Array:
    """Returns the log-probability of every example's target, ``[batch]`` float32 in nats.

    The log-probability is summed over the tokens of the target.

    Args:
      variables: the model's variables.
      encoder_tokens: ``[batch, k]`` inputs with padding.
      targets: ``[batch, t]`` target tokens with EOS and padding.
      model: an unbound model.
      continues: whether the targets directly continue the texts in `encoder_tokens`, which then
        have no EOS; see `decode_sequences`.

    Raises:
      TypeError: if `continues` is True, but the model cannot continue texts.
    """
    check_continues(model, continues)
    if continues:
        return _log_probability_of_rest(model, variables, texts=encoder_tokens, targets=targets)
    memory = apply_method(model.encode_inputs, variables, encoder_tokens)
    return _log_probability(model, variables, targets=targets, memory=memory)


@functools.partial(jax.jit, static_argnames="model")
@on_any_mesh
def score_classes(variables: Variables, tokens: jax.Array, *, model: Encoder) -> jax.Array:
    """Returns the log-probabilities of the classes of an encoder, ``[batch, outputs]``.

    The encoder's field `outputs` must not be None.
    """
    outputs = apply_method(model.__call__, variables, tokens).outputs
    assert outputs is not None
    return jax.nn.log_softmax(outputs)


@functools.partial(jax.jit, static_argnames="model")
@on_any_mesh
def score_masked_tokens(
    variables: Variables, tokens: jax.Array, *, targets: jax.Array, model: Encoder
) -> jax.Array:
    """Returns the log-probability of every example's masked tokens, ``[batch]`` float32 in nats.

    Args:
      variables: the encoder's variables.
      tokens: ``[batch, k]`` inputs with masked tokens.
      targets: ``[batch, k]`` the tokens to predict at masked positions, and padding at all other
        positions.
      model: an unbound encoder with `masked_lm`.
    """
    logits = apply_method(model.__call__, variables, tokens).token_logits
    assert logits is not None
    return _sum_log_probabilities(logits, targets, model.ids.padding)


def _log_probability(
    model: TextToText, variables: Variables, *, targets: jax.Array, memory: PyTree
) -> jax.Array:
    """Returns the log-probabilities of targets with teacher forcing, ``[batch]``."""
    logits = _teacher_forced_logits(model, variables, targets, memory)
    return _sum_log_probabilities(logits, targets, model.ids.padding)


def _log_probability_of_rest(
    model: TextToText, variables: Variables, *, texts: jax.Array, targets: jax.Array
) -> jax.Array:
    """Returns the log-probabilities of targets that directly continue texts, ``[batch]``."""
    padding = model.ids.padding
    n = texts.shape[1]
    count = num_real_tokens(texts, padding)[:, None]  # [b, 1]
    texts, _ = move_token_padding_last(texts, padding)
    both = jnp.concatenate([texts, targets], axis=1)  # [b, n + t]
    position = jnp.arange(both.shape[1])[None]

    # In each row, the targets begin directly after the `count` real tokens of the text.
    index = jnp.where(position < count, position, position - count + n)
    whole = jnp.take_along_axis(both, index, axis=1, mode="fill", fill_value=padding)
    logits = _teacher_forced_logits(model, variables, whole, texts[:, :0])
    predicted = jnp.where(position < count, padding, whole)
    return _sum_log_probabilities(logits, predicted, padding)


def _teacher_forced_logits(
    model: TextToText, variables: Variables, targets: jax.Array, memory: PyTree
) -> jax.Array:
    """Returns the logits ``[batch, t, vocab]`` of each target token, given the previous ones."""
    shifted = jnp.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=model.ids.start)
    hidden = apply_method(model.decode, variables, shifted, memory)
    return apply_method(model.logits, variables, hidden)


def _sum_log_probabilities(logits: jax.Array, targets: jax.Array, padding: int) -> jax.Array:
    """Returns the sums ``[batch]`` of the log-probabilities of target tokens, without padding."""
    logp = jax.nn.log_softmax(logits.astype(jnp.float32))
    logp = jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0]  # [b, t]
    return jnp.where(targets != padding, logp, 0.0).sum(axis=-1)
