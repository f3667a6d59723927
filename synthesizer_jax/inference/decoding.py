"""Greedy and beam decoding in one compiled loop with static shapes and a cache."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp

from synthesizer_jax.ambient import with_variables_on_any_mesh
from synthesizer_jax.models import DecodingCache, TextToText, unroll, unroll_variables
from synthesizer_jax.parameters import Variables, apply_method

EOS = 1
START = 0
"""T5's ids of the end of a sequence, and of padding, which is the decoder's first input."""

NEVER = -1e9
"""Log-probability of an absent sequence; those below half of it are absent."""

GROUP = 128
"""Number of tokens in a group of `_top_tokens`."""


class Decoded(NamedTuple):
    """Decoded sequences.

    Attributes:
      tokens: ``[batch, max_length]``, including EOS; zeros after it.
      scores: ``[batch]`` log-probabilities in nats; with several beams divided by the length penalty.
    """

    tokens: jax.Array
    scores: jax.Array


@functools.partial(
    jax.jit, static_argnames=("model", "max_length", "beams", "alpha", "logits_dtype")
)
@with_variables_on_any_mesh
def decode(
    variables: Variables,
    encoder_tokens: jax.Array,
    *,
    model: TextToText,
    max_length: int,
    beams: int = 1,
    alpha: float = 0.6,
    logits_dtype: str | None = None,
) -> Decoded:
    """Decodes a batch of inputs.

    Args:
      variables: the model's variables, with scanned or looped layers.
      encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
      model: an unbound model.
      max_length: maximum number of decoded tokens, including EOS.
      beams: number of beams; 1 is greedy decoding.
      alpha: exponent of the length penalty ``((5 + n) / 6)^alpha`` of a sequence of n tokens (Wu et al.
        2016; T5 uses 0.6 with 4 beams). Greedy decoding ignores it.
      logits_dtype: dtype of the operands of the output projection; None is the model's. ``"bfloat16"``
        halves the memory traffic of the projection, which dominates a step of small models. The
        logits are float32 in any case.

    Returns:
      The best sequence of every example. As in T5X, beam search returns a finished sequence, however
      improbable, unless none has finished.

    Raises:
      ValueError: `beams` or `max_length` is less than 1, or the model has fewer than `max_length`
        positions.
      TypeError: the model cannot decode, or is an NNX module.
    """
    if not isinstance(model, TextToText):
        raise TypeError(
            f"decode: a {type(model).__name__} cannot decode; pass an EncoderDecoder or a LanguageModel, "
            "or for an NNX module its config, with linen_variables(module) as variables"
        )
    if beams < 1 or max_length < 1:
        raise ValueError(f"decode: beams={beams}, max_length={max_length}; both must be at least 1")
    variables = unroll_variables(model, variables)
    decoder = Decoder(
        unroll(model),
        variables,
        encoder_tokens,
        max_length=max_length,
        logits_dtype=logits_dtype,
    )
    return _decode_greedily(decoder) if beams == 1 else _beam_search(decoder, beams, alpha)


class Decoder:
    """A model with looped layers and its variables; maps tokens to logits."""

    def __init__(
        self,
        model: TextToText,
        variables: Variables,
        encoder_tokens: jax.Array,
        *,
        max_length: int,
        logits_dtype: str | None = None,
    ):
        self.batch, self.max_length = encoder_tokens.shape[0], max_length
        self._model, self._variables, self._encoder_tokens = model, variables, encoder_tokens
        kernel, self._scale = apply_method(model.output_kernel, variables)
        # Cast once, not in every iteration of the loop.
        self._kernel = kernel.astype(model.dtype if logits_dtype is None else logits_dtype)

    def start(self) -> tuple[jax.Array, DecodingCache]:
        """Returns the ``[batch, vocab]`` float32 logits of the first token, and the cache."""
        cache = apply_method(
            self._model.init_cache,
            self._variables,
            self._encoder_tokens,
            max_length=self.max_length,
        )
        return self.next(jnp.full(self.batch, START, jnp.int32), cache)

    def next(self, tokens: jax.Array, cache: DecodingCache) -> tuple[jax.Array, DecodingCache]:
        """Returns the ``[rows, vocab]`` float32 logits after the tokens ``[rows]``, and the cache."""
        hidden, cache = apply_method(self._model.extend, self._variables, tokens[:, None], cache)
        x = (hidden[:, 0] * jnp.asarray(self._scale, hidden.dtype)).astype(self._kernel.dtype)
        return jnp.matmul(x, self._kernel, preferred_element_type=jnp.float32), cache


class _GreedyState(NamedTuple):
    """State of greedy decoding of b examples with m positions.

    Attributes:
      at: number of decoded positions.
      token: ``[b]`` the last tokens.
      tokens: ``[b, m]`` all tokens; zeros after EOS.
      scores: ``[b]`` log-probabilities of the tokens.
      done: ``[b]`` whether EOS was decoded.
      cache: the model's cache.
    """

    at: jax.Array
    token: jax.Array
    tokens: jax.Array
    scores: jax.Array
    done: jax.Array
    cache: DecodingCache


def _decode_greedily(decoder: Decoder) -> Decoded:
    """Decodes the most probable token at every position until every example has ended."""

    def append(state: _GreedyState, logits: jax.Array) -> _GreedyState:
        token = jnp.where(state.done, 0, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
        logp = jnp.max(logits, axis=-1) - logsumexp(logits, axis=-1)
        return _GreedyState(
            at=state.at + 1,
            token=token,
            tokens=state.tokens.at[:, state.at].set(token),
            scores=state.scores + jnp.where(state.done, 0.0, logp),
            done=state.done | (token == EOS),
            cache=state.cache,
        )

    def body(state: _GreedyState) -> _GreedyState:
        logits, cache = decoder.next(state.token, state.cache)
        return append(state._replace(cache=cache), logits)

    def unfinished(state: _GreedyState) -> jax.Array:
        return (state.at < decoder.max_length) & ~jnp.all(state.done)

    logits, cache = decoder.start()
    state = _GreedyState(
        at=jnp.asarray(0),
        token=jnp.full(decoder.batch, START, jnp.int32),
        tokens=jnp.zeros((decoder.batch, decoder.max_length), jnp.int32),
        scores=jnp.zeros(decoder.batch),
        done=jnp.zeros(decoder.batch, bool),
        cache=cache,
    )
    state = jax.lax.while_loop(unfinished, body, append(state, logits))
    return Decoded(state.tokens, state.scores)


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array:
    """Returns ``((5 + length) / 6)^alpha`` (Wu et al. 2016, equation 14)."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


class _Beams(NamedTuple):
    """State of a beam search over b examples with n beams and m positions.

    Attributes:
      at: number of decoded positions.
      live: ``[b, n]`` log-probabilities of the unfinished sequences, best first.
      tokens: ``[b, n, m]`` the unfinished sequences.
      ended: ``[b, n]`` scores of the finished sequences with the length penalty, best first.
      ended_tokens: ``[b, n, m]`` the finished sequences.
      cache: self-attention caches have b · n rows; cross-attention caches that no step changes have b
        rows, which the beams of an example share.
    """

    at: jax.Array
    live: jax.Array
    tokens: jax.Array
    ended: jax.Array
    ended_tokens: jax.Array
    cache: DecodingCache


def _beam_search(decoder: Decoder, beams: int, alpha: float) -> Decoded:
    """Searches with `beams` unfinished and `beams` finished sequences of every example.

    The search for an example ends when no unfinished sequence can exceed the score of its worst finished
    sequence. A sequence that reaches the length limit is returned only if none has finished, as in T5X.
    Its score is divided by the length penalty like all others; T5X returns its log-probability.
    """
    b, n, m = decoder.batch, beams, decoder.max_length

    def advance(state: _Beams, logits: jax.Array) -> tuple[_Beams, jax.Array]:
        """Extends all beams by one token; also returns the beam that each live one continues."""
        own = state.live - logsumexp(logits, axis=-1).reshape(b, n)
        top, source, token = _top_tokens(logits.reshape(b, n, -1), own, 2 * n)
        tokens = jnp.take_along_axis(state.tokens, source[:, :, None], axis=1)
        tokens = tokens.at[:, :, state.at].set(token)
        ends = token == EOS
        real = ends & (top > NEVER / 2)
        penalised = jnp.where(real, top / length_penalty(state.at + 1, alpha), NEVER)
        ended, ended_tokens = _select_best(
            jnp.concatenate([state.ended, penalised], axis=1),
            jnp.concatenate([state.ended_tokens, tokens], axis=1),
            n,
        )
        live, order = jax.lax.top_k(jnp.where(ends, NEVER, top), n)
        tokens = jnp.take_along_axis(tokens, order[:, :, None], axis=1)
        source = jnp.take_along_axis(source, order, axis=1)
        return _Beams(state.at + 1, live, tokens, ended, ended_tokens, state.cache), source

    def body(state: _Beams) -> _Beams:
        token = jnp.take_along_axis(
            state.tokens, jnp.full((b, n, 1), state.at - 1), axis=2
        ).reshape(-1)
        logits, cache = decoder.next(token, state.cache)
        state, source = advance(state._replace(cache=cache), logits)
        rows = (jnp.arange(b)[:, None] * n + source).reshape(-1)
        return state._replace(cache=state.cache.map_rows(lambda x: x[rows]))

    def unfinished(state: _Beams) -> jax.Array:
        hope = state.live[:, 0] / length_penalty(m, alpha)
        return (state.at < m) & jnp.any(hope > state.ended[:, -1])

    logits, cache = decoder.start()
    empty = jnp.zeros((b, n, m), jnp.int32)
    # All beams are equal at the start, so only the first one may be extended.
    live = jnp.full((b, n), NEVER).at[:, 0].set(0.0)
    state = _Beams(jnp.asarray(0), live, empty, jnp.full((b, n), NEVER), empty, cache)
    state, _ = advance(state, jnp.repeat(logits, n, axis=0))
    cache = cache.map_rows(lambda x: jnp.repeat(x, n, axis=0))
    state = jax.lax.while_loop(unfinished, body, state._replace(cache=cache))
    has_ended = state.ended[:, 0] > NEVER
    cut = state.live[:, 0] / length_penalty(m, alpha)
    return Decoded(
        jnp.where(has_ended[:, None], state.ended_tokens[:, 0], state.tokens[:, 0]),
        jnp.where(has_ended, state.ended[:, 0], cut),
    )


def _top_tokens(
    logits: jax.Array, own: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the best continuations of an example's beams, as `jax.lax.top_k` over all of them would.

    The vocabulary is divided into groups of `GROUP` tokens. The best `count` tokens are in the `count`
    groups with the largest maxima, so only these groups are searched.

    Args:
      logits: ``[b, n, vocab]`` of n beams.
      own: ``[b, n]`` numbers that are added to all logits of a beam.
      count: number of continuations.

    Returns:
      Scores, beams and tokens, each ``[b, count]``, best first.
    """
    b, n, vocab = logits.shape
    groups = -(-vocab // GROUP)
    logits = jnp.pad(
        logits, ((0, 0), (0, 0), (0, groups * GROUP - vocab)), constant_values=-jnp.inf
    )
    logits = logits.reshape(b, n, groups, GROUP)
    peaks = (logits.max(axis=-1) + own[:, :, None]).reshape(b, n * groups)
    _, chosen = jax.lax.top_k(peaks, min(count, n * groups))
    chosen = jnp.sort(chosen)  # as in top_k, the first of equal values comes first
    near = jnp.take_along_axis(logits.reshape(b, n * groups, GROUP), chosen[:, :, None], axis=1)
    near += jnp.take_along_axis(own, chosen // groups, axis=1)[:, :, None]
    top, index = jax.lax.top_k(near.reshape(b, -1), count)
    group = jnp.take_along_axis(chosen, index // GROUP, axis=1)
    token = group % groups * GROUP + index % GROUP
    return top, group // groups, token.astype(jnp.int32)


def _select_best(scores: jax.Array, tokens: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """Returns the n best of the sequences ``[b, c, m]`` with scores ``[b, c]``."""
    scores, order = jax.lax.top_k(scores, n)
    return scores, jnp.take_along_axis(tokens, order[:, :, None], axis=1)
