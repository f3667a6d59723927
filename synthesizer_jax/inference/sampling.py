"""Greedy decoding and sampling, one token after another, with several rows per example."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jax.typing import ArrayLike

from synthesizer_jax.inference.decoder import Constraints, Decoder, Sequences
from synthesizer_jax.models import DecodingCache


class Sampling(NamedTuple):
    """The settings of sampling.

    Attributes:
      key: ``[]`` the random key.
      examples: ``[batch]`` integers that identify the examples.
      temperature: ``[]`` the number by which logits are divided.
      top_p: ``[]`` the smallest total probability of the tokens to draw from. None means all
        tokens.
      min_p: ``[]`` the smallest probability of a token to draw from, relative to the largest
        probability. None means 0.
    """

    key: jax.Array
    examples: jax.Array
    temperature: ArrayLike
    top_p: ArrayLike | None = None
    min_p: ArrayLike | None = None


def keep_most_probable(
    logits: jax.Array, *, top_k: int | None = None, top_p: ArrayLike | None = None
) -> jax.Array:
    """Returns logits with −∞ for all tokens except the most probable tokens.

    If several tokens have equal logits, the tokens with the smallest ids are kept first.

    Args:
      logits: ``[rows, vocab]``.
      top_k: number of tokens to keep. None means all tokens.
      top_p: the smallest total probability of the tokens that are kept after `top_k`. The function
        keeps as few tokens as possible. Probabilities are relative to the tokens that `top_k`
        keeps. None means all tokens.
    """
    vocab = logits.shape[-1]
    values, tokens = jax.lax.top_k(logits, vocab if top_k is None else min(top_k, vocab))
    count = jnp.full(logits.shape[:-1], values.shape[-1])
    if top_p is not None:
        sums = jnp.cumsum(jax.nn.softmax(values, axis=-1), axis=-1)
        # Because of rounding, the cumulative sum may reach 1 before the last token. If `top_p` is
        # 1, all tokens are kept.
        reached = (sums[..., :-1] >= top_p) & (jnp.asarray(top_p) < 1)
        count = 1 + jnp.sum(~reached, axis=-1)

    # `last_token` is the last token that is kept, and `least` is its logit, [rows, 1] each.
    last = count[..., None] - 1
    least, last_token = (jnp.take_along_axis(x, last, axis=-1) for x in (values, tokens))
    tied = (logits == least) & (jnp.arange(vocab)[None] <= last_token)
    return jnp.where((logits > least) | tied, logits, -jnp.inf)


class _State(NamedTuple):
    """The state of decoding r rows with m positions.

    Attributes:
      at: number of decoded positions.
      token: ``[r]`` the last tokens.
      tokens: ``[r, m]`` all tokens, with padding after the end.
      scores: ``[r]`` log-probabilities of the tokens.
      done: ``[r]`` whether a row has ended, because of EOS, a stop string or the maximum number of
        tokens.
      text: ``[r]`` the states of `Constraints.stops`.
      cache: the model's cache.
    """

    at: jax.Array
    token: jax.Array
    tokens: jax.Array
    scores: jax.Array
    done: jax.Array
    text: jax.Array
    cache: DecodingCache


def decode_rows(
    decoder: Decoder,
    constraints: Constraints,
    *,
    samples: int = 1,
    sampling: Sampling | None = None,
    top_k: int | None = None,
) -> Sequences:
    """Decodes one token after another until every row has ended.

    Args:
      decoder: the model and its inputs.
      constraints: the constraints on lengths and tokens of the sequences.
      samples: number of rows of each example.
      sampling: the settings of sampling. None means that the most probable token is taken at every
        position.
      top_k: number of most probable tokens to draw from. None means all tokens.
    """
    rows = decoder.batch * samples
    longest = jnp.repeat(constraints.longest, samples)

    def body(state: _State) -> _State:
        """Decodes one position."""
        logits, cache = decoder.next(state.token, state.cache)
        allowed = constraints.apply(logits, state.tokens, state.at)
        if sampling is None:
            token = _first_maximum(allowed)
        else:
            token = _draw(sampling, allowed, state.at, samples=samples, top_k=top_k)

        # Scores are log-probabilities of the model itself, so they are computed from the logits
        # without constraints.
        logp = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]  # [rows]
        logp -= logsumexp(logits, axis=-1)

        # Rows that have already ended are filled with padding.
        token = jnp.where(state.done, decoder.ids.padding, token).astype(jnp.int32)
        text, ends = constraints.follow(state.text, token)
        return _State(
            at=state.at + 1,
            token=token,
            tokens=state.tokens.at[:, state.at].set(token),
            scores=state.scores + jnp.where(state.done, 0.0, logp),
            done=state.done | ends | (state.at + 1 >= longest),
            text=text,
            cache=cache,
        )

    def unfinished(state: _State) -> jax.Array:
        """Returns whether a row has not ended yet."""
        return (state.at < decoder.max_length) & ~jnp.all(state.done)

    token, cache = decoder.begin()
    if samples > 1:
        cache = cache.map_rows(lambda x: jnp.repeat(x, samples, axis=0))
    state = _State(
        at=jnp.asarray(0),
        token=jnp.repeat(token, samples),
        tokens=jnp.full((rows, decoder.max_length), decoder.ids.padding, jnp.int32),
        scores=jnp.zeros(rows),
        done=jnp.zeros(rows, bool),
        text=jnp.zeros(rows, jnp.int32),
        cache=cache,
    )
    # The first token is also decoded inside the loop, so that a decoding step is compiled only
    # once.
    state = jax.lax.while_loop(unfinished, body, state)
    tokens = state.tokens.reshape(decoder.batch, samples, -1)  # [b, samples, m]
    scores = state.scores.reshape(decoder.batch, samples)
    return Sequences(tokens, scores, scores)


def _first_maximum(x: jax.Array) -> jax.Array:
    """Returns ``argmax(x, axis=-1)``.

    This function is faster than `jnp.argmax`, which XLA's CPU backend computes element by element.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    # If x contains NaN, no element is equal to the maximum, and the result is `last`.
    last = x.shape[-1] - 1
    return jnp.where(x == x.max(axis=-1, keepdims=True), ids, last).min(axis=-1)


def _draw(
    sampling: Sampling, logits: jax.Array, at: jax.Array, *, samples: int, top_k: int | None
) -> jax.Array:
    """Draws the tokens ``[rows]`` of position `at`, given the logits ``[rows, vocab]``."""
    # The largest logit is shifted to 0, so that division by a small temperature cannot make it
    # infinite.
    logits -= logits.max(axis=-1, keepdims=True)
    logits /= jnp.maximum(sampling.temperature, jnp.finfo(logits.dtype).tiny)
    if top_k is not None or sampling.top_p is not None:
        logits = keep_most_probable(logits, top_k=top_k, top_p=sampling.top_p)
    if sampling.min_p is not None:
        # The largest logit is 0, so the logit of a token is the logarithm of the token's
        # probability relative to the largest probability.
        logits = jnp.where(logits < jnp.log(sampling.min_p), -jnp.inf, logits)

    # A random key depends only on the example, the sample and the position, not on the rest of the
    # batch.
    fold = jax.random.fold_in
    keys = jax.vmap(fold, (None, 0))(sampling.key, sampling.examples)  # [b]
    by_sample = jax.vmap(fold, (None, 0))
    keys = jax.vmap(by_sample, (0, None))(keys, jnp.arange(samples)).reshape(-1)  # [b · samples]
    keys = jax.vmap(fold, (0, None))(keys, at)
    return jax.vmap(jax.random.categorical)(keys, logits)
