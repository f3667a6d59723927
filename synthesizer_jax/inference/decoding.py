"""Decoding in a single compiled loop with static shapes and a cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from synthesizer_jax.inference.beam_search import beam_search
from synthesizer_jax.inference.decoder import Constraints, Decoder, Sequences, check_continues
from synthesizer_jax.inference.sampling import Sampling, decode_rows
from synthesizer_jax.inference.settings import Decoding
from synthesizer_jax.models import LanguageModel, TextToText, unroll, unroll_variables
from synthesizer_jax.models.token_model import num_real_tokens
from synthesizer_jax.primitives.mesh import on_any_mesh
from synthesizer_jax.primitives.parameters import Variables


class Decoded(NamedTuple):
    """One decoded sequence for each input.

    Attributes:
      tokens: ``[batch, max_length]``, including EOS, with padding after EOS.
      scores: ``[batch]`` log-probabilities in nats. With several beams, the scores are divided by
        the length penalty.
    """

    tokens: jax.Array
    scores: jax.Array


def decode(
    variables: Variables,
    encoder_tokens: jax.Array,
    *,
    model: TextToText,
    max_length: int,
    beams: int = 1,
    alpha: float = 0.6,
    logits_dtype: str | None = None,
    continues: bool = False,
) -> Decoded:
    """Decodes one sequence for each input, greedily or by beam search.

    Args:
      variables: the model's variables, with scanned or looped layers.
      encoder_tokens: ``[batch, k]`` integers, with padding on either side.
      model: an unbound model.
      max_length: the largest number of tokens of a sequence; see `Decoding`.
      beams: number of beams. With 1 beam, decoding is greedy.
      alpha: exponent of the length penalty of beam search, which greedy decoding ignores.
      logits_dtype: dtype of the factors of the output projection; see `Decoding`.
      continues: see `decode_sequences`.

    Returns:
      The best sequence of every example. As in T5X, beam search returns a finished sequence if it
      has found any, even if an unfinished sequence is more probable.

    Raises:
      ValueError: if a setting is not allowed, or the model has fewer than `max_length` positions.
      TypeError: if the model cannot decode, or is an NNX module.
    """
    decoding = Decoding(max_length=max_length, beams=beams, alpha=alpha, logits_dtype=logits_dtype)
    sequences = decode_sequences(
        variables, encoder_tokens, model=model, decoding=decoding, continues=continues
    )
    return Decoded(sequences.tokens[:, 0], sequences.scores[:, 0])


def decode_sequences(
    variables: Variables,
    encoder_tokens: jax.Array,
    *,
    model: TextToText,
    decoding: Decoding,
    examples: ArrayLike | None = None,
    continues: bool = False,
    stops: ArrayLike | None = None,
) -> Sequences:
    """Decodes a batch of inputs with any settings.

    The program is compiled once for all values of `alpha`, `temperature`, `top_p`, `min_p`,
    `repetition_penalty`, `min_length`, `relative_length`, `extra_length` and `seed`. Another
    program is compiled if a setting is turned on or off.

    Args:
      variables: the model's variables, with scanned or looped layers.
      encoder_tokens: ``[batch, k]`` integers, with padding on either side.
      model: an unbound model.
      decoding: the settings.
      examples: ``[batch]`` integers that identify the examples. The random samples of an example
        depend on the example's integer, not on the position in the batch. None means that the
        positions in the batch identify the examples.
      continues: whether `encoder_tokens` are the beginning of the targets, without EOS. The model
        must then be a `LanguageModel` that was trained on targets without inputs.
      stops: the result of `data.stop_strings.stop_table` for `Decoding.stop_strings`, or None if
        there are no stop strings.

    Returns:
      Several sequences for every example, as many as `Decoding.samples`. As in T5X, finished beams
      come before beams that were cut at the maximum length.

    Raises:
      ValueError: if the model has fewer than `Decoding.max_length` positions, or `stops` is
        missing.
      TypeError: if the model cannot decode, or is an NNX module.
    """
    if not isinstance(model, TextToText):
        raise TypeError(
            f"decode: an object of type {type(model).__name__} cannot decode. Pass an "
            "EncoderDecoder or a LanguageModel. For an NNX module, pass its config as model and "
            "linen_variables(module) as variables."
        )
    check_continues(model, continues)
    if decoding.stop_strings and stops is None:
        raise ValueError(
            "decode_sequences: decoding.stop_strings contains texts, but this function knows only "
            "tokens. Pass stops=stop_table(vocabulary, decoding.stop_strings, model.vocab_size), "
            "where stop_table is from synthesizer_jax.data.stop_strings."
        )

    sampling = None
    if decoding.temperature:
        if examples is None:
            examples = jnp.arange(encoder_tokens.shape[0])
        sampling = Sampling(
            # Threefry is used because JAX's other generators draw numbers under `jax.vmap` that
            # depend on the rest of the batch.
            jax.random.key(decoding.seed, impl="threefry2x32"),
            jnp.asarray(examples),
            temperature=float(decoding.temperature),
            top_p=_as_float(decoding.top_p),
            min_p=_as_float(decoding.min_p),
        )
    relative_length = None
    if decoding.relative_length is not None:
        relative_length = (float(decoding.relative_length), decoding.extra_length)

    # In `static`, settings that are passed as arrays have the same values in every call. A call
    # with different values of these settings therefore does not compile another program.
    static = Decoding(
        max_length=decoding.max_length,
        beams=decoding.beams,
        temperature=float(decoding.temperature > 0),
        top_k=decoding.top_k,
        no_repeat_ngram_size=decoding.no_repeat_ngram_size,
        samples=decoding.samples,
        logits_dtype=decoding.logits_dtype,
    )
    return run_decoding(
        variables,
        encoder_tokens,
        min_length=decoding.min_length if decoding.min_length > 1 else None,
        relative_length=relative_length,
        alpha=float(decoding.alpha),
        repetition_penalty=_as_float(decoding.repetition_penalty),
        sampling=sampling,
        stops=stops,
        model=model,
        decoding=static,
        continues=continues,
    )


def _as_float(setting: float | None) -> float | None:
    """Converts a setting to a float, because JAX would compile another program for an integer."""
    return None if setting is None else float(setting)


@functools.partial(jax.jit, static_argnames=("model", "decoding", "continues"))
@on_any_mesh
def run_decoding(
    variables: Variables,
    encoder_tokens: jax.Array,
    *,
    min_length: ArrayLike | None,
    relative_length: tuple[ArrayLike, ArrayLike] | None,
    alpha: ArrayLike,
    repetition_penalty: ArrayLike | None,
    sampling: Sampling | None,
    stops: ArrayLike | None,
    model: TextToText,
    decoding: Decoding,
    continues: bool,
) -> Sequences:
    """Decodes a batch; this is the compiled program of `decode_sequences`.

    The settings that are passed as arrays replace the corresponding settings in `decoding`.
    """
    longest = jnp.full(encoder_tokens.shape[0], decoding.max_length)
    if relative_length is not None:
        factor, extra = relative_length
        relative = jnp.round(factor * num_real_tokens(encoder_tokens, model.ids.padding)) + extra
        shortest = 1 if min_length is None else min_length
        longest = jnp.clip(relative.astype(longest.dtype), shortest, longest)
    prompt = None
    if repetition_penalty is not None or decoding.no_repeat_ngram_size is not None:
        prompt = _prompt_of(model, encoder_tokens)

    constraints = Constraints(
        min_length,
        longest,
        repetition_penalty,
        decoding.no_repeat_ngram_size,
        prompt,
        stops,
        model.ids,
    )
    decoder = Decoder(
        unroll(model),
        unroll_variables(model, variables),
        encoder_tokens,
        max_length=decoding.max_length,
        logits_dtype=decoding.logits_dtype,
        continues=continues,
    )
    samples = decoding.samples
    if decoding.beams > 1:
        return beam_search(decoder, constraints, beams=decoding.beams, alpha=alpha, samples=samples)
    return decode_rows(
        decoder, constraints, samples=samples, sampling=sampling, top_k=decoding.top_k
    )


def _prompt_of(model: TextToText, encoder_tokens: jax.Array) -> jax.Array:
    """Returns `Constraints.prompt`, the tokens whose repetition is limited, ``[batch, k]``.

    For a `LanguageModel`, the prompt consists of the inputs. For an `EncoderDecoder`, the prompt is
    only the decoder's first input.
    """
    if not isinstance(model, LanguageModel):
        return jnp.full_like(encoder_tokens[:, :1], model.ids.start)

    # The prompt must be aligned on the right, so padding after the last token is moved to the left.
    after = jnp.argmax(encoder_tokens[:, ::-1] != model.ids.padding, axis=1)
    prompt = jax.vmap(jnp.roll)(encoder_tokens, after)
    is_token = prompt != model.ids.padding

    # EOS at the end of the input is replaced by the start token, so that EOS at the end of the
    # output does not count as a repetition. Padding is replaced by −1, because padding is not a
    # token that could be repeated.
    prompt = jnp.where(prompt == model.ids.end, model.ids.start, prompt)
    return jnp.where(is_token, prompt, -1)
