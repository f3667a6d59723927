"""Static alignments fitted to the attention of a trained model.

The logits of a static alignment, such as a Random table, do not depend on the tokens. The best ones
maximize the likelihood of the teacher's attention: they minimize the mean over queries
of ``KL(teacher ‖ static)``, between their weights of the keys that they see. The sum of the
teacher's weights, and how often a query sees how many keys, are sufficient statistics, so one pass over
data is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from synthesizer_jax.alignments import (
    Alignment,
    AttentionContext,
    FactorizedRandom,
    GaussianBias,
    Mixture,
    PerHead,
    Random,
    RelativeBias,
)
from synthesizer_jax.attention import Span
from synthesizer_jax.attention.terms import cap_logits, materialize
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.distillation.replacement import STACKS, Layer, self_attention
from synthesizer_jax.distillation.transplant import initial_parameters
from synthesizer_jax.mixers import Attention
from synthesizer_jax.models import EncoderDecoder, TokenModel, stacks_of
from synthesizer_jax.primitives.parameters import Variables, apply_method
from synthesizer_jax.sharding import gather_to_host
from synthesizer_jax.training.initial_parameters import resize
from synthesizer_jax.training.step import Batch, teacher_forced

ITERATIONS = 200
"""Most iterations of L-BFGS."""

LOG_PRECISIONS = (-10.0, 10.0)
"""Limits of the logarithm of a Gaussian's precision, in units of where its fit begins."""

MIN_VARIANCE = 0.05
"""Of the distance to the keys that a head attends to, where a Gaussian's fit begins."""

HIDDEN = -1e30
"""The logit of a key outside a window: its weight is zero, and no infinity is multiplied by zero."""

MAX_OF_CAP = 0.95
"""The largest share of a soft cap that logits have where a fit begins; beyond it gradients vanish."""

MIN_SINK = 1e-3
"""The smallest share of a sink that is assumed where a fit begins."""

PRIOR = 1.0
"""Rows of the mean attention by distance that are added to each query's, for pairs seen rarely."""


class Statistics(NamedTuple):
    """What is known of the attention of a layer after a pass over data; sums over examples.

    Attributes:
      mass: ``[heads, n, n]`` weights of queries and keys. What the weights of a query leave of one is the
        weight of the head's sink.
      negentropy: ``[heads]`` Σ p log p over all queries, in nats, with the sinks.
      queries: ``[n, n + 1]`` number of queries, by position and by how many of the first keys they see.
    """

    mass: jax.Array
    negentropy: jax.Array
    queries: jax.Array


def is_static(alignment: Alignment) -> bool:
    """Whether an alignment can be fitted: its logits are trained and read no tokens."""
    if isinstance(alignment, Mixture | PerHead):
        return all(is_static(part) for part in alignment.parts)
    if isinstance(alignment, Random | GaussianBias) and not alignment.trainable:
        return False
    return isinstance(alignment, Random | FactorizedRandom | RelativeBias | GaussianBias)


def is_softmax_of_logits(attention: Attention) -> bool:
    """Whether a layer's weights are the softmax of its logits over all keys that the mask lets it see."""
    return not attention.sinks and attention.soft_cap is None and attention.window is None


@functools.partial(jax.jit, static_argnames=("model", "students"))
def attention_statistics(
    variables: Variables,
    batch: Batch,
    *,
    model: EncoderDecoder,
    students: tuple[tuple[Layer, Attention], ...],
) -> dict[Layer, Statistics]:
    """Returns the statistics of the self-attention of some layers over a batch.

    A student's layer may see fewer keys than the teacher's, and its weights may have to sum to one where
    the teacher's do not, as with sinks. The teacher's weights are cut and scaled to what the student's can
    be.

    Args:
      variables: those of the teacher.
      batch: unpacked rows, padded at the end.
      model: the teacher, with looped layers.
      students: the layers, and for each the attention that is to be fitted to it.
    """
    _, sown = teacher_forced(model, variables, batch, collection="intermediates")
    statistics = {}
    for (stack, layer), student in students:
        causal = stack == "decoder"
        real = batch["encoder_input_tokens"] != model.ids.padding
        if causal:
            real = batch["decoder_loss_weights"] > 0
        mixer = sown["intermediates"][stack][f"layers_{layer}"][STACKS[stack]]
        (weights,) = mixer["attention_weights"]  # [b or 1, heads, n, n]
        rows, n = real.shape
        weights = jnp.broadcast_to(weights, (rows, *weights.shape[1:])) * real[:, None, :, None]
        if student.window is not None:
            weights = weights * is_in_window(n, student.window)
        total = weights.sum(-1, keepdims=True)  # [b, heads, n, 1]
        if not student.sinks:
            weights = weights / jnp.where(total > 0, total, 1)
        seen = jnp.arange(1, n + 1) if causal else real.sum(axis=1, keepdims=True)
        queries = jax.nn.one_hot(jnp.broadcast_to(seen, (rows, n)), n + 1) * real[..., None]
        negentropy = jax.scipy.special.xlogy(weights, weights).sum((0, 2, 3))
        if student.sinks:
            of_sinks = jnp.maximum(real[:, None, :] - total[..., 0], 0)
            negentropy += jax.scipy.special.xlogy(of_sinks, of_sinks).sum((0, 2))
        statistics[stack, layer] = Statistics(weights.sum(0), negentropy, queries.sum(0))
    return statistics


def is_in_window(length: int, window: int) -> np.ndarray:
    """Returns, as ``[q, k]``, whether a key is less than `window` positions away from a query."""
    positions = np.arange(length)
    return np.abs(positions[:, None] - positions[None, :]) < window


def collect_statistics(
    model: EncoderDecoder,
    variables: Variables,
    batches: Iterable[Batch],
    students: Mapping[Layer, Attention],
) -> dict[Layer, Statistics]:
    """Returns the sums of `attention_statistics` over batches, at least one, as NumPy arrays."""
    of_batch = functools.partial(
        attention_statistics, variables, model=model, students=tuple(students.items())
    )
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), map(of_batch, batches))
    return jax.tree.map(gather_to_host, total)


def divergence(
    logits: jax.Array,
    statistics: Statistics,
    *,
    soft_cap: float | None = None,
    window: int | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the mean over queries of ``KL(teacher ‖ student)`` in nats.

    The student's weights are the softmax of its logits, as `Attention` makes them.

    Args:
      logits: ``[heads, n, n]`` logits of the student, which are capped here.
      statistics: those of the teacher.
      soft_cap: the student's `Attention.soft_cap`.
      window: the student's `Attention.window`.
      sinks: ``[heads]`` logits of one more key, which the student has if it has `Attention.sinks`.

    Returns:
      ``[heads]``.
    """
    logits = cap_logits(logits, soft_cap)
    likelihood = (statistics.mass * logits).sum((1, 2))
    if window is not None:  # a finite number, because rows without a visible key are multiplied by zero
        logits = jnp.where(is_in_window(logits.shape[-1], window), logits, HIDDEN)
    normalizers = jax.lax.cumlogsumexp(logits, axis=2)  # log Σ exp over the first 1, 2, … keys
    if sinks is not None:
        normalizers = jnp.logaddexp(normalizers, sinks[:, None, None])
        likelihood += (sink_mass(statistics) * sinks[:, None]).sum(1)
    likelihood -= (statistics.queries[:, 1:] * normalizers).sum((1, 2))
    return (statistics.negentropy - likelihood) / statistics.queries.sum()


def sink_mass(statistics: Statistics) -> jax.Array:
    """Returns the weights ``[heads, n]`` of the sinks: what the weights of the keys leave of one."""
    return jnp.maximum(statistics.queries.sum(1) - statistics.mass.sum(2), 0)


def fit(
    attention: Attention,
    statistics: Statistics,
    *,
    d_model: int,
    causal: bool,
    bias: ArrayLike = 0.0,
    sinks: jax.Array | None = None,
    seed: int = 0,
) -> tuple[PyTree, jax.Array]:
    """Fits the parameters of an attention layer's static alignment to a teacher's attention.

    Args:
      attention: the layer, whose alignment `is_static`.
      statistics: those of the teacher's layer.
      d_model: width of the tokens.
      causal: a query sees the keys up to itself, as in decoders.
      bias: ``[heads, n, n]`` logits that are added to those of the alignment, and stay.
      sinks: ``[heads]`` logits of the layer's sinks, which stay; None if it has none.
      seed: seed of the initial parameters, where they matter.

    Returns:
      The parameters, and the logits ``[heads, n, n]`` that they make, without the bias.
    """
    alignment, length = attention.alignment, statistics.mass.shape[-1]
    visible = np.tri(length, dtype=bool) if causal else np.ones((length, length), bool)
    if attention.window is not None:
        visible &= is_in_window(length, attention.window)
    smooth = _add_prior(statistics, visible=visible, causal=causal)
    params = initial_parameters(attention, d_model, seed=seed)
    start = _best_logits(smooth, soft_cap=attention.soft_cap, visible=visible, sinks=sinks)
    start -= np.asarray(bias)
    if isinstance(alignment, Random):
        params = {"table": resize(jnp.asarray(start), params["table"], "distance")}
    elif isinstance(alignment, FactorizedRandom):
        params = _factorize(start, params, alignment.rank, visible=visible)
    elif isinstance(alignment, GaussianBias):
        params = _standard_gaussian(smooth)
    params = _minimize(params, smooth, jnp.asarray(bias), sinks, attention=attention, d_model=d_model)
    params = _to_params(alignment, params)
    return params, position_logits(
        alignment, params, num_heads=attention.num_heads, length=length, d_model=d_model
    )


def _best_logits(
    statistics: Statistics, *, soft_cap: float | None, visible: np.ndarray, sinks: jax.Array | None
) -> np.ndarray:
    """Returns logits ``[heads, n, n]`` whose weights are about the teacher's mean attention.

    They are the best ones if all queries at a position see the same keys, and no cap is reached.
    """
    seen = np.maximum(times_seen(np.asarray(statistics.queries)), 1e-30)
    logits = np.log(np.maximum(statistics.mass / seen, 1e-30))
    if sinks is not None:
        counts = np.asarray(statistics.queries).sum(1)
        shares = np.asarray(sink_mass(statistics)) / np.maximum(counts, 1e-30)  # [heads, n]
        logits += (np.asarray(sinks)[:, None] - np.log(np.maximum(shares, MIN_SINK)))[..., None]
    if soft_cap is not None:
        if sinks is None:  # a constant may be added to all logits of a query, so use the cap's middle
            logits -= (logits * visible).sum(-1, keepdims=True) / visible.sum(-1, keepdims=True)
        logits = soft_cap * np.arctanh(np.clip(logits / soft_cap, -MAX_OF_CAP, MAX_OF_CAP))
    return logits


def fit_layers(
    student: EncoderDecoder, params: PyTree, statistics: Mapping[Layer, Statistics]
) -> tuple[PyTree, dict[Layer, np.ndarray]]:
    """Fits the static alignments of a student's layers, looped, to the statistics of the teacher's.

    The parameters hold the teacher's position bias and sinks, which stay. Returns those with fitted
    alignments, and the `divergence` of each layer.
    """
    params = jax.tree.map(lambda x: x, params)  # a copy of the dictionaries
    divergences = {}
    for (stack, i), of_layer in statistics.items():
        attention = self_attention(student, (stack, i))
        of_mixer = params[stack][f"layers_{i}"][STACKS[stack]]
        bias = stack_bias_logits(student, params, (stack, i), length=of_layer.mass.shape[-1])
        sinks = jnp.asarray(gather_to_host(of_mixer["sinks"])) if attention.sinks else None
        fitted, logits = fit(
            attention,
            of_layer,
            d_model=student.d_model,
            causal=stack == "decoder",
            bias=bias,
            sinks=sinks,
            seed=i,
        )
        of_mixer["align"] = fitted
        distance = divergence(
            logits + bias, of_layer, soft_cap=attention.soft_cap, window=attention.window, sinks=sinks
        )
        divergences[stack, i] = np.asarray(distance)
    return params, divergences


def stack_bias_logits(model: TokenModel, params: PyTree, layer: Layer, *, length: int) -> jax.Array:
    """Returns the logits ``[heads, n, n]`` of the position bias of a layer's stack, zeros without one."""
    stack, num_heads = layer[0], self_attention(model, layer).num_heads
    shared = stacks_of(model)[stack].bias
    if shared is None:
        return jnp.zeros((num_heads, length, length))
    on_host = jax.tree.map(gather_to_host, params[stack]["relpos_bias"])
    return position_logits(shared, on_host, num_heads=num_heads, length=length, d_model=model.d_model)


def position_logits(
    alignment: Alignment, params: PyTree, *, num_heads: int, length: int, d_model: int
) -> jax.Array:
    """Returns the logits ``[heads, n, n]`` of an alignment or a position bias that reads no tokens."""
    span = Span(0, length)
    context = AttentionContext(num_heads, max(d_model // num_heads, 1), span, span)
    x = jnp.zeros((1, length, d_model))
    terms = apply_method(alignment.__call__, {"params": params}, x, x, context)
    return materialize(terms, q_length=length, k_length=length)[0]


def times_seen(queries: np.ndarray) -> np.ndarray:
    """Returns ``[q, k]``, what is counted in ``[q, k + 1]`` of the queries that see a key."""
    return np.cumsum(queries[:, ::-1], axis=1)[:, ::-1][:, 1:]


def sums_by_distance(x: np.ndarray) -> np.ndarray:
    """Returns the sums of ``[q, k]`` over pairs with the same k − q, from ``1 − q`` to ``k − 1``."""
    q, k = x.shape
    distance = np.arange(k)[None, :] - np.arange(q)[:, None] + q - 1
    return np.bincount(distance.ravel(), x.ravel(), q + k - 1)


def _add_prior(statistics: Statistics, *, visible: np.ndarray, causal: bool) -> Statistics:
    """Adds `PRIOR` queries with the mean attention by distance to those of each position.

    The added queries see all keys that are `visible` ``[q, k]``.
    """
    mass, _, queries = map(np.asarray, statistics)
    heads, n, _ = mass.shape
    distance = np.arange(n)[None, :] - np.arange(n)[:, None] + n - 1
    seen = sums_by_distance(times_seen(queries))
    by_distance = np.stack(list(map(sums_by_distance, mass))) / np.maximum(seen, 1e-30)
    where = np.flatnonzero(seen > 0)
    nearest = where[np.abs(np.arange(2 * n - 1)[:, None] - where).argmin(1)]
    prior = np.maximum(by_distance[:, nearest], 1e-6)[:, distance]
    last = np.arange(1, n + 1) if causal else np.full(n, n)
    prior = prior * visible
    of_keys = mass.sum((1, 2)) / np.maximum(queries.sum(), 1e-30)  # [heads], the rest is the sinks'
    prior = PRIOR * of_keys[:, None, None] * prior / prior.sum(-1, keepdims=True)
    added = queries + PRIOR * (np.arange(n + 1) == last[:, None])
    return Statistics(
        jnp.asarray(mass + prior, jnp.float32), jnp.zeros(heads), jnp.asarray(added, jnp.float32)
    )


def _factorize(start: np.ndarray, params: PyTree, rank: int, *, visible: np.ndarray) -> PyTree:
    """Returns the factors of the best approximation of a table by one of a rank."""
    mean = (start * visible).sum(-1, keepdims=True) / visible.sum(-1, keepdims=True)
    u, s, v = np.linalg.svd(np.where(visible, start - mean, 0.0), full_matrices=False)
    roots = np.sqrt(s[:, None, :rank])
    factors = {"query_factor": u[:, :, :rank] * roots, "key_factor": v.swapaxes(1, 2)[:, :, :rank] * roots}
    missing = max(rank - roots.shape[-1], 0)
    wider = {k: jnp.pad(x, ((0, 0), (0, 0), (0, missing))) for k, x in factors.items()}
    return {name: resize(x, params[name], "edge") for name, x in wider.items()}


def _standard_gaussian(statistics: Statistics) -> PyTree:
    """Returns a Gaussian for each head in units of the distances to the keys that it attends to.

    A center and a width in tokens differ too much in scale to be fitted by a line search. A center of 0
    is the mean distance here, and a logarithm of the precision of 0 the inverse of the distances' variance.
    """
    mass = np.asarray(statistics.mass)
    weights = mass / mass.sum((1, 2), keepdims=True)
    n = mass.shape[-1]
    distance = np.arange(n)[None, :] - np.arange(n)[:, None]
    mean = (weights * distance).sum((1, 2))
    variance = (weights * (distance - mean[:, None, None]) ** 2).sum((1, 2))
    deviation = np.sqrt(np.maximum(variance, MIN_VARIANCE))
    zeros = jnp.zeros(len(mass))
    units = {"mean": jnp.float32(mean), "deviation": jnp.float32(deviation)}
    return {**units, "center": zeros, "log_precision": zeros}


def _to_params(alignment: Alignment, fitted: PyTree) -> PyTree:
    """Returns the parameters of an alignment from what `_minimize` changes."""
    if not isinstance(alignment, GaussianBias):
        return fitted
    mean, deviation = (jax.lax.stop_gradient(fitted[name]) for name in ("mean", "deviation"))
    precision = jnp.exp(jnp.clip(fitted["log_precision"], *LOG_PRECISIONS)) / deviation**2
    return {"offset": mean + deviation * fitted["center"], "precision": precision}


@functools.partial(jax.jit, static_argnames=("attention", "d_model"))
def _minimize(
    params: PyTree,
    statistics: Statistics,
    bias: jax.Array,
    sinks: jax.Array | None,
    *,
    attention: Attention,
    d_model: int,
) -> PyTree:
    """Minimizes the divergence by L-BFGS; layers of the same configuration share the program."""
    alignment, length = attention.alignment, statistics.mass.shape[-1]
    optimizer = optax.lbfgs()

    def loss(fitted: PyTree) -> jax.Array:
        params = _to_params(alignment, fitted)
        logits = position_logits(
            alignment, params, num_heads=attention.num_heads, length=length, d_model=d_model
        )
        of_heads = divergence(
            logits + bias,
            statistics,
            soft_cap=attention.soft_cap,
            window=attention.window,
            sinks=sinks,
        )
        return of_heads.sum()

    value_and_grad = optax.value_and_grad_from_state(loss)

    def step(_: int, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        params, state = carry
        value, gradient = value_and_grad(params, state=state)
        updates, state = optimizer.update(
            gradient, state, params, value=value, grad=gradient, value_fn=loss
        )
        return optax.apply_updates(params, updates), state

    result, _ = jax.lax.fori_loop(0, ITERATIONS, step, (params, optimizer.init(params)))
    return result
