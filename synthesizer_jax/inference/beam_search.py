"""Beam search with a length penalty, with the same rules as in T5X."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp
from jax.typing import ArrayLike

from synthesizer_jax.inference.decoder import Constraints, Decoder, Sequences
from synthesizer_jax.models import DecodingCache

NEVER = -1e9
"""The log-probability of an absent sequence.

A sequence counts as absent if its log-probability is below half of `NEVER`.
"""

GROUP = 128
"""The number of tokens in each group into which `top_tokens` divides the vocabulary."""


def length_penalty(length: ArrayLike, alpha: ArrayLike) -> jax.Array:
    """Returns ``((5 + length) / 6)^alpha`` (Wu et al. 2016, equation 14)."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


class _Beams(NamedTuple):
    """The state of a beam search over b examples with n beams and m positions.

    Attributes:
      at: number of decoded positions.
      live: ``[b, n]`` log-probabilities of the unfinished sequences, best first.
      tokens: ``[b, n, m]`` the unfinished sequences.
      ended: ``[b, n]`` log-probabilities of the finished sequences, divided by the length penalty,
        best first.
      ended_tokens: ``[b, n, m]`` the finished sequences.
      text: ``[b, n]`` the states of `Constraints.stops` for the unfinished sequences.
      cache: the model's cache for b · n rows. Where possible, the n beams of an example share a row
        of the arrays; see `attention.beams` and `LayerCache`.
    """

    at: jax.Array
    live: jax.Array
    tokens: jax.Array
    ended: jax.Array
    ended_tokens: jax.Array
    text: jax.Array
    cache: DecodingCache


class _Continuations(NamedTuple):
    """The best extensions of the unfinished sequences by a single token, best first.

    Attributes:
      scores: ``[b, count]`` log-probabilities.
      source: ``[b, count]`` the beam that each sequence continues.
      tokens: ``[b, count, m]`` the sequences with the new token.
      text: ``[b, count]`` the states of `Constraints.stops` after the new token.
      ends: ``[b, count]`` whether the new token ends the sequence.
    """

    scores: jax.Array
    source: jax.Array
    tokens: jax.Array
    text: jax.Array
    ends: jax.Array


def beam_search(
    decoder: Decoder, constraints: Constraints, *, beams: int, alpha: ArrayLike, samples: int = 1
) -> Sequences:
    """Searches for the most probable sequences of every example.

    The search keeps `beams` unfinished and `beams` finished sequences of each example. The search
    for an example ends at the maximum length of the example. The search ends earlier if no
    unfinished sequence can get a better score than the worst finished sequence.

    Args:
      decoder: the model and its inputs.
      constraints: the constraints on lengths and tokens of the sequences.
      beams: number of beams.
      alpha: exponent of the length penalty.
      samples: number of sequences to return per example, at most `beams`.
    """
    search = _Search(decoder, constraints, beams, alpha)
    b, n, m = search.shape
    logits, cache = decoder.next(*decoder.begin())  # [b, vocab]

    # All beams of an example are initially equal, so only the first beam may be extended.
    empty = jnp.full((b, n, m), decoder.ids.padding, jnp.int32)
    live = jnp.full((b, n), NEVER).at[:, 0].set(0.0)
    never = jnp.full((b, n), NEVER)
    text = jnp.zeros((b, n), jnp.int32)
    state = _Beams(
        at=jnp.asarray(0),
        live=live,
        tokens=empty,
        ended=never,
        ended_tokens=empty,
        text=text,
        cache=cache,
    )
    state, _ = search.advance(state, jnp.repeat(logits, n, axis=0))  # [b, vocab] → [b · n, vocab]

    # The first step has one row for each example. All later steps have n rows.
    state = state._replace(cache=cache.share_among_beams(n))
    state = jax.lax.while_loop(search.is_unfinished, search.step, state)
    return _best_of(state, constraints, alpha, samples=samples)


class _Search(NamedTuple):
    """The arguments of `beam_search`, and the steps of its loop.

    In shapes, b is the number of examples, n the number of beams, and m the number of positions.

    Attributes:
      decoder: the model and its inputs.
      constraints: the constraints on lengths and tokens of the sequences.
      beams: number of beams.
      alpha: exponent of the length penalty.
    """

    decoder: Decoder
    constraints: Constraints
    beams: int
    alpha: ArrayLike

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the sequences, ``[b, n, m]``."""
        return self.decoder.batch, self.beams, self.decoder.max_length

    def is_unfinished(self, state: _Beams) -> jax.Array:
        """Returns whether the search can still find a better sequence for any example."""
        # Log-probabilities can only decrease, so `hope` is the best score that the best beam can
        # reach.
        hope = state.live[:, 0] / length_penalty(self.constraints.longest, self.alpha)
        return jnp.any((state.at < self.constraints.longest) & (hope > state.ended[:, -1]))

    def step(self, state: _Beams) -> _Beams:
        """Decodes one position."""
        index = jnp.full((*state.live.shape, 1), state.at - 1)
        token = jnp.take_along_axis(state.tokens, index, axis=2).reshape(-1)  # [b · n]
        logits, cache = self.decoder.next(token, state.cache)
        state, source = self.advance(state._replace(cache=cache), logits)
        return state._replace(cache=state.cache.reorder_beams(source))

    def advance(self, state: _Beams, logits: jax.Array) -> tuple[_Beams, jax.Array]:
        """Extends all beams by one token.

        Args:
          state: the beams.
          logits: the logits of the next token, ``[b · n, vocab]``.

        Returns:
          The new beams, and the beam that each unfinished sequence continues, ``[b, n]``.
        """
        b, n, m = self.shape
        constraints = self.constraints
        if constraints.repetition_penalty is not None:
            # As in transformers, beam search applies the repetition penalty to log-probabilities.
            logits = jax.nn.log_softmax(logits)
        scores = state.live - logsumexp(logits, axis=-1).reshape(b, n)  # [b, n]
        allowed = constraints.apply(logits, state.tokens.reshape(b * n, m), state.at)
        allowed = allowed.reshape(b, n, -1)

        found = self._continuations(state, allowed, scores)
        ended, ended_tokens = self._best_ended(state, found)

        if constraints.stops is not None:
            # So many continuations may complete a stop string that fewer than n continuations do
            # not end. A second search therefore excludes tokens that complete a stop string.
            allowed = constraints.without_stops(allowed, state.text)
            found = self._continuations(state, allowed, scores)
        live, order = jax.lax.top_k(jnp.where(found.ends, NEVER, found.scores), n)  # [b, n]
        tokens = jnp.take_along_axis(found.tokens, order[:, :, None], axis=1)  # [b, n, m]
        source, text = (jnp.take_along_axis(x, order, axis=1) for x in (found.source, found.text))

        # If an example has reached its maximum length, its sequences do not change in later steps.
        is_open = (state.at < constraints.longest)[:, None]
        new = _Beams(
            at=state.at + 1,
            live=jnp.where(is_open, live, state.live),
            tokens=jnp.where(is_open[:, :, None], tokens, state.tokens),
            ended=jnp.where(is_open, ended, state.ended),
            ended_tokens=jnp.where(is_open[:, :, None], ended_tokens, state.ended_tokens),
            text=text,
            cache=state.cache,
        )
        return new, source

    def _continuations(self, state: _Beams, logits: jax.Array, scores: jax.Array) -> _Continuations:
        """Returns the best continuations of the beams.

        Args:
          state: the beams.
          logits: the logits of the next token, ``[b, n, vocab]``.
          scores: the numbers to add to the logits of each beam, ``[b, n]``.
        """
        # Every beam has one continuation for each id that ends a sequence. `count` is so large that
        # at least n of the best continuations do not end.
        count = (1 + len(set(self.constraints.ids.ends))) * self.beams
        top, source, token = top_tokens(logits, scores, count)
        tokens = jnp.take_along_axis(state.tokens, source[:, :, None], axis=1)
        tokens = tokens.at[:, :, state.at].set(token)
        text = jnp.take_along_axis(state.text, source, axis=1)
        text, ends = self.constraints.follow(text, token)
        return _Continuations(top, source, tokens, text, ends)

    def _best_ended(self, state: _Beams, found: _Continuations) -> tuple[jax.Array, jax.Array]:
        """Returns the scores ``[b, n]`` and tokens ``[b, n, m]`` of the best finished sequences.

        Sequences that end at this position compete with sequences that ended earlier.
        """
        real = found.ends & (found.scores > NEVER / 2)
        penalized = jnp.where(real, found.scores / length_penalty(state.at + 1, self.alpha), NEVER)
        ended, order = jax.lax.top_k(jnp.concatenate([state.ended, penalized], axis=1), self.beams)
        ended_tokens = jnp.concatenate([state.ended_tokens, found.tokens], axis=1)
        return ended, jnp.take_along_axis(ended_tokens, order[:, :, None], axis=1)


def _best_of(
    state: _Beams, constraints: Constraints, alpha: ArrayLike, *, samples: int
) -> Sequences:
    """Returns the best sequences of a search that has ended.

    As in T5X, finished sequences come before sequences that were cut at the maximum length, even if
    the finished sequences are less probable. The score of a cut sequence is its log-probability
    divided by the length penalty. In contrast, T5X returns the log-probability of a cut sequence.
    """
    n = state.live.shape[1]
    cut = state.live / length_penalty(constraints.longest, alpha)[:, None]

    # The finished sequences come first, followed by the best sequences that were cut. The finished
    # and the cut sequences are already sorted, so it is enough to count the finished sequences.
    num_ended = (state.ended > NEVER).sum(axis=1, keepdims=True)
    rank = jnp.arange(samples)[None]
    index = jnp.where(rank < num_ended, rank, n + rank - num_ended)
    tokens = jnp.concatenate([state.ended_tokens, state.tokens], axis=1)
    tokens = jnp.take_along_axis(tokens, index[:, :, None], axis=1)
    scores = jnp.take_along_axis(jnp.concatenate([state.ended, cut], axis=1), index, axis=1)

    # The score of a sequence is multiplied by its length penalty to get the log-probability.
    is_token = tokens != constraints.ids.padding
    end = tokens.shape[-1] - jnp.argmax(is_token[:, :, ::-1], axis=-1)
    length = jnp.where(rank < num_ended, end, constraints.longest[:, None])
    return Sequences(tokens, scores, scores * length_penalty(length, alpha))


def top_tokens(
    logits: jax.Array, scores: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the best continuations of an example's beams.

    The function returns the same result as `jax.lax.top_k` over all tokens of all beams, but it is
    faster. The vocabulary is divided into groups of `GROUP` tokens. The best `count` tokens must be
    in the `count` groups with the largest maxima, so only these groups are searched.

    Args:
      logits: ``[b, n, vocab]`` for n beams.
      scores: ``[b, n]`` numbers that are added to all logits of a beam.
      count: number of continuations.

    Returns:
      The scores, beams and tokens of the continuations, each ``[b, count]``, best first.
    """
    b, n, vocab = logits.shape
    groups = -(-vocab // GROUP)
    logits = jnp.pad(
        logits, ((0, 0), (0, 0), (0, groups * GROUP - vocab)), constant_values=-jnp.inf
    )
    logits = logits.reshape(b, n, groups, GROUP)

    # `peaks` holds the best logit of each group, [b, n · groups].
    peaks = (logits.max(axis=-1) + scores[:, :, None]).reshape(b, n * groups)
    _, chosen = jax.lax.top_k(peaks, min(count, n * groups))
    # As in `jax.lax.top_k`, the first of several equal values comes first.
    chosen = jnp.sort(chosen)

    # The logits of the chosen groups have the shape [b, count, GROUP]. The scores of the groups'
    # beams are added to the logits.
    near = jnp.take_along_axis(logits.reshape(b, n * groups, GROUP), chosen[:, :, None], axis=1)
    near += jnp.take_along_axis(scores, chosen // groups, axis=1)[:, :, None]
    top, index = jax.lax.top_k(near.reshape(b, -1), count)

    # The groups of all beams are numbered together, so number g is group g % groups of beam g //
    # groups.
    group = jnp.take_along_axis(chosen, index // GROUP, axis=1)
    token = group % groups * GROUP + index % GROUP
    return top, group // groups, token.astype(jnp.int32)
