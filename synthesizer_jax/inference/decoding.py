"""Greedy and beam decoding: one compiled loop, static shapes, cached keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import logsumexp

from synthesizer_jax.ambient import with_variables_on_any_mesh
from synthesizer_jax.models import TextToText, unroll, unroll_variables

EOS = 1
START = 0
"""T5's ids: end of sequence; the decoder's first input is padding."""

NEVER = -1e9
"""Log-probability of a sequence that is not there; what continues it stays below half of it."""

GROUP = 128
"""Neighbouring tokens whose maximum is looked at first where the best of many are searched."""


class Decoded(NamedTuple):
    """Decoded sequences.

    Attributes:
      tokens: ``[batch, max_length]``, EOS included, zeros after it.
      scores: ``[batch]`` log-probability in nats; with beams divided by the length penalty.
    """

    tokens: jax.Array
    scores: jax.Array


@functools.partial(
    jax.jit, static_argnames=("model", "max_length", "beams", "alpha", "logits_dtype")
)
@with_variables_on_any_mesh
def decode(
    variables: dict[str, Any],
    encoder_tokens: jax.Array,
    *,
    model: TextToText,
    max_length: int,
    beams: int = 1,
    alpha: float = 0.6,
    logits_dtype: str | None = None,
) -> Decoded:
    """Decodes a batch.

    Args:
      variables: the model's variables, scanned layout or not.
      encoder_tokens: ``[batch, k]`` integers; 0 is padding, on either side.
      model: an unbound model.
      max_length: number of tokens to decode at most, EOS included.
      beams: 1 is greedy.
      alpha: exponent of the length penalty ``((5 + n) / 6)^alpha`` (Wu et al. 2016; T5 uses 0.6 with
        4 beams); no effect on greedy decoding.
      logits_dtype: dtype of the output projection's factors, such as ``"bfloat16"``: half the bytes
        of what is most of a small model's step; None: the model's. The logits are float32.

    Returns:
      The best sequence of every example. As in T5X that of a beam search has ended, however improbable
      its end is, unless no sequence that was followed did.

    Raises:
      ValueError: among others, for a model whose positions end before `max_length`.
      TypeError: for a model that does not decode, or an NNX module.
    """
    if not isinstance(model, TextToText):
        raise TypeError(
            f"decode: a {type(model).__name__} does not decode; give an EncoderDecoder or a LanguageModel, "
            "for an NNX module its config, and linen_variables of it as variables"
        )
    if beams < 1 or max_length < 1:
        raise ValueError(f"decode: beams={beams}, max_length={max_length}; both must be at least 1")
    variables = unroll_variables(model, variables)
    step = Step(unroll(model), variables, encoder_tokens, max_length, logits_dtype)
    if beams == 1:
        return greedy(step)
    return beam_search(step, beams, alpha)


class Step:
    """The model as the decoding loops see it: tokens in, logits out.

    Args:
      model: a model with looped layers.
      variables: its variables.
      encoder_tokens: ``[batch, k]``.
      max_length: room in the caches.
      logits_dtype: see `decode`.
    """

    def __init__(
        self,
        model: TextToText,
        variables: dict[str, Any],
        encoder_tokens: jax.Array,
        max_length: int,
        logits_dtype: str | None = None,
    ):
        self.model, self.variables, self.max_length = model, variables, max_length
        self.encoder_tokens = encoder_tokens
        self.room = model.room(encoder_tokens.shape[1], max_length)
        self.lengths = (encoder_tokens != 0).sum(axis=-1, dtype=jnp.int32)
        projection: Any = model.apply(variables, method="output_kernel")
        kernel, self.scale = projection
        # Made once, before the loop.
        self.kernel = kernel.astype(model.dtype if logits_dtype is None else logits_dtype)

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.encoder_tokens.shape[0]

    def first(self) -> tuple[jax.Array, Any]:
        """``[batch, vocab]`` float32 logits of the first token, and the caches."""
        start = jnp.full((self.batch, 1), START, jnp.int32)
        hidden, caches = self.model.apply(
            self.variables, self.encoder_tokens, start, max_length=self.room, method="start"
        )
        return self.logits(hidden), caches

    def next(self, tokens: jax.Array, caches: Any, position: jax.Array) -> tuple[jax.Array, Any]:
        """Logits ``[rows, vocab]`` of what follows the tokens ``[rows]`` at `position`."""
        hidden, caches = self.model.apply(
            self.variables,
            tokens[:, None],
            self.lengths,
            caches=caches,
            position=position,
            max_length=self.room,
            method="step",
        )
        return self.logits(hidden), caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """``[rows, 1, d_model]`` to ``[rows, vocab]`` float32."""
        x = (hidden[:, 0] * jnp.asarray(self.scale, hidden.dtype)).astype(self.kernel.dtype)
        return jnp.matmul(x, self.kernel, preferred_element_type=jnp.float32)


def greedy(step: Step) -> Decoded:
    """The most probable token at every position, until every example has ended."""

    def choose(
        logits: jax.Array,
        tokens: jax.Array,
        scores: jax.Array,
        done: jax.Array,
        at: jax.Array | int,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        token = jnp.where(done, 0, jnp.argmax(logits, axis=-1)).astype(jnp.int32)
        logp = jnp.max(logits, axis=-1) - logsumexp(logits, axis=-1)
        scores = scores + jnp.where(done, 0.0, logp)
        return token, tokens.at[:, at].set(token), scores, done | (token == EOS)

    def body(carry: Any) -> Any:
        at, token, tokens, scores, done, caches = carry
        logits, caches = step.next(token, caches, at)
        return at + 1, *choose(logits, tokens, scores, done, at), caches

    def unfinished(carry: Any) -> jax.Array:
        return (carry[0] < step.max_length) & ~jnp.all(carry[4])

    logits, caches = step.first()
    tokens = jnp.zeros((step.batch, step.max_length), jnp.int32)
    scores, done = jnp.zeros(step.batch), jnp.zeros(step.batch, bool)
    begin = (jnp.asarray(1), *choose(logits, tokens, scores, done, 0), caches)
    _, _, tokens, scores, _, _ = jax.lax.while_loop(unfinished, body, begin)
    return Decoded(tokens, scores)


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array:
    """``((5 + length) / 6)^alpha`` (Wu et al. 2016, equation 14)."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


class Beams(NamedTuple):
    """State of a beam search; b examples, n beams, m positions.

    Attributes:
      at: number of positions decoded.
      live: ``[b, n]`` log-probabilities of unfinished sequences, best first.
      tokens: ``[b, n, m]`` those sequences.
      ended: ``[b, n]`` penalised scores of finished sequences, best first.
      ended_tokens: ``[b, n, m]`` those sequences.
      caches: self-attention caches have b·n rows; cross-attention ones b, shared by the beams of an
        example, unless they change from step to step.
    """

    at: jax.Array
    live: jax.Array
    tokens: jax.Array
    ended: jax.Array
    ended_tokens: jax.Array
    caches: Any


def beam_search(step: Step, beams: int, alpha: float) -> Decoded:
    """Keeps the `beams` best unfinished and finished sequences of every example.

    An example's search ends when no unfinished sequence can still beat its worst finished one. What is
    cut by the length limit is returned only where nothing has finished, as in T5X, whose score of it is
    the log-probability; here it is divided by the length penalty like any other.
    """
    b, n, m = step.batch, beams, step.max_length

    def advance(state: Beams, logits: jax.Array) -> tuple[Beams, jax.Array]:
        """Extends all beams by one token; also returns which beams the live ones came from."""
        own = state.live - logsumexp(logits, axis=-1).reshape(b, n)
        top, source, token = top_tokens(logits.reshape(b, n, -1), own, 2 * n)
        tokens = jnp.take_along_axis(state.tokens, source[:, :, None], axis=1)
        tokens = tokens.at[:, :, state.at].set(token)
        ends = token == EOS
        real = ends & (top > NEVER / 2)
        penalised = jnp.where(real, top / length_penalty(state.at + 1, alpha), NEVER)
        ended, ended_tokens = best(
            jnp.concatenate([state.ended, penalised], axis=1),
            jnp.concatenate([state.ended_tokens, tokens], axis=1),
            n,
        )
        live, order = jax.lax.top_k(jnp.where(ends, NEVER, top), n)
        tokens = jnp.take_along_axis(tokens, order[:, :, None], axis=1)
        source = jnp.take_along_axis(source, order, axis=1)
        return Beams(state.at + 1, live, tokens, ended, ended_tokens, state.caches), source

    def reorder(caches: Any, source: jax.Array) -> Any:
        rows = (jnp.arange(b)[:, None] * n + source).reshape(-1)
        return map_rows(step.model, caches, lambda x: x[rows])

    def body(state: Beams) -> Beams:
        token = jnp.take_along_axis(
            state.tokens, jnp.full((b, n, 1), state.at - 1), axis=2
        ).reshape(-1)
        logits, caches = step.next(token, state.caches, state.at)
        state, source = advance(state._replace(caches=caches), logits)
        return state._replace(caches=reorder(state.caches, source))

    def unfinished(state: Beams) -> jax.Array:
        hope = state.live[:, 0] / length_penalty(m, alpha)
        return (state.at < m) & jnp.any(hope > state.ended[:, -1])

    logits, caches = step.first()
    empty = jnp.zeros((b, n, m), jnp.int32)
    # All beams start equal: only the first may be extended.
    live = jnp.full((b, n), NEVER).at[:, 0].set(0.0)
    state = Beams(jnp.asarray(0), live, empty, jnp.full((b, n), NEVER), empty, None)
    state, _ = advance(state, jnp.repeat(logits, n, axis=0))
    caches = map_rows(step.model, caches, lambda x: jnp.repeat(x, n, axis=0))
    state = jax.lax.while_loop(unfinished, body, state._replace(caches=caches))
    has_ended = state.ended[:, 0] > NEVER
    cut = state.live[:, 0] / length_penalty(m, alpha)
    return Decoded(
        jnp.where(has_ended[:, None], state.ended_tokens[:, 0], state.tokens[:, 0]),
        jnp.where(has_ended, state.ended[:, 0], cut),
    )


def map_rows(model: TextToText, caches: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """Changes what every beam has for itself; a length that all rows share stays as it is."""
    own = functools.partial(jax.tree.map, lambda x: change(x) if jnp.ndim(x) else x)
    layers = zip(caches, model.decoder.changing_cross_caches, strict=True)
    return tuple((own(a), own(cross) if changing else cross) for (a, cross), changing in layers)


def top_tokens(
    logits: jax.Array, own: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The best continuations of an example's beams, as `jax.lax.top_k` over all of them finds them.

    The best `count` values lie in the `count` neighbourhoods with the largest maxima, so only those
    are sorted.

    Args:
      logits: ``[b, n, vocab]`` of n beams.
      own: ``[b, n]`` what is added to all of a beam's logits.
      count: how many to find.

    Returns:
      Scores, beams and tokens, ``[b, count]`` each, best first.
    """
    b, n, vocab = logits.shape
    groups = -(-vocab // GROUP)
    logits = jnp.pad(
        logits, ((0, 0), (0, 0), (0, groups * GROUP - vocab)), constant_values=-jnp.inf
    )
    logits = logits.reshape(b, n, groups, GROUP)
    peaks = (logits.max(axis=-1) + own[:, :, None]).reshape(b, n * groups)
    _, chosen = jax.lax.top_k(peaks, min(count, n * groups))
    chosen = jnp.sort(chosen)  # equal values in the order in which they stand
    near = jnp.take_along_axis(logits.reshape(b, n * groups, GROUP), chosen[:, :, None], axis=1)
    near += jnp.take_along_axis(own, chosen // groups, axis=1)[:, :, None]
    top, index = jax.lax.top_k(near.reshape(b, -1), count)
    group = jnp.take_along_axis(chosen, index // GROUP, axis=1)
    token = group % groups * GROUP + index % GROUP
    return top, group // groups, token.astype(jnp.int32)


def best(scores: jax.Array, tokens: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """The n best of ``[b, c]`` scored sequences ``[b, c, m]``."""
    scores, order = jax.lax.top_k(scores, n)
    return scores, jnp.take_along_axis(tokens, order[:, :, None], axis=1)
