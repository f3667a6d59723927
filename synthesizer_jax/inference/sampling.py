"""Greedy decoding and sampling, one token after the other, with several rows per example."""

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
      key: ``[]`` random key.
      examples: ``[batch]`` integers that identify the examples.
      temperature: ``[]`` T, by which logits are divided.
      top_p: ``[]`` the probability that the tokens to draw from must have together. None means all
        tokens.
      min_p: ``[]`` the smallest probability of a token to draw, relative to the largest. None means
        0.
    """

    key: jax.Array
    examples: jax.Array
    temperature: ArrayLike
    top_p: ArrayLike | None = None
    min_p: ArrayLike | None = None


def keep_most_probable(
    logits: jax.Array, *, top_k: int | None = None, top_p: ArrayLike | None = None
) -> jax.Array:
    """Returns logits with −∞ for all tokens except the most probable ones.

    If several tokens have equal logits, the first of them are kept.

    Args:
      logits: ``[rows, vocab]``.
      top_k: number of tokens to keep. None means all.
      top_p: after `top_k`, keeps the smallest number of tokens whose total probability is at least
        this value. Probabilities are computed among the tokens that `top_k` kept. None means all.
    """
    vocab = logits.shape[-1]
    values, tokens = jax.lax.top_k(logits, vocab if top_k is None else min(top_k, vocab))
    count = jnp.full(logits.shape[:-1], values.shape[-1])
    if top_p is not None:
        sums = jnp.cumsum(jax.nn.softmax(values, axis=-1), axis=-1)
        # Rounded sums may reach 1 before the last token.
        reached = (sums[..., :-1] >= top_p) & (jnp.asarray(top_p) < 1)
        count = 1 + jnp.sum(~reached, axis=-1)

    # The last token that is kept, and its logit, [rows, 1] each.
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
      done: ``[r]`` whether a row has ended, by EOS, a stop string or the maximum number of tokens.
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
    """Decodes token after token until every row has ended.

    Args:
      decoder: the model and its inputs.
      constraints: what the sequences may hold.
      samples: number of rows of each example.
      sampling: the settings of sampling. None takes the most probable token at every position.
      top_k: number of tokens to draw from. None means all.
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

        # The scores are the model's own, so they come from the logits without constraints.
        logp = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]  # [rows]
        logp -= logsumexp(logits, axis=-1)

        # Rows that have ended go on with padding.
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
    # The first token is decoded in the loop too, so that a step is compiled only once.
    state = jax.lax.while_loop(unfinished, body, state)
    tokens = state.tokens.reshape(decoder.batch, samples, -1)  # [b, samples, m]
    scores = state.scores.reshape(decoder.batch, samples)
    return Sequences(tokens, scores, scores)


def _first_maximum(x: jax.Array) -> jax.Array:
    """Returns ``argmax(x, axis=-1)``.

    XLA's CPU backend computes `jnp.argmax` element by element, which is slow.
    """
    ids = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    last = x.shape[-1] - 1  # the result if x has NaNs, which are equal to nothing
    return jnp.where(x == x.max(axis=-1, keepdims=True), ids, last).min(axis=-1)


def _draw(
    sampling: Sampling, logits: jax.Array, at: jax.Array, *, samples: int, top_k: int | None
) -> jax.Array:
    """Draws the tokens ``[rows]`` of position `at`, given the logits ``[rows, vocab]``."""
    # The largest logit becomes 0, so that division by a small temperature cannot make it infinite.
    logits -= logits.max(axis=-1, keepdims=True)
    logits /= jnp.maximum(sampling.temperature, jnp.finfo(logits.dtype).tiny)
    if top_k is not None or sampling.top_p is not None:
        logits = keep_most_probable(logits, top_k=top_k, top_p=sampling.top_p)
    if sampling.min_p is not None:
        # The largest logit is 0, so a token's logit is the logarithm of its relative probability.
        logits = jnp.where(logits < jnp.log(sampling.min_p), -jnp.inf, logits)

    # A key depends only on the example, the sample and the position, not on the rest of the batch.
    fold = jax.random.fold_in
    keys = jax.vmap(fold, (None, 0))(sampling.key, sampling.examples)  # [b]
    by_sample = jax.vmap(fold, (None, 0))
    keys = jax.vmap(by_sample, (0, None))(keys, jnp.arange(samples)).reshape(-1)  # [b · samples]
    keys = jax.vmap(fold, (0, None))(keys, at)
    return jax.vmap(jax.random.categorical)(keys, logits)
