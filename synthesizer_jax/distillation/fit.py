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
from synthesizer_jax.attention.terms import materialize
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

PRIOR = 1.0
"""Rows of the mean attention by distance that are added to each query's, for pairs seen rarely."""


class Statistics(NamedTuple):
    """What is known of the attention of a layer after a pass over data; sums over examples.

    Attributes:
      mass: ``[heads, n, n]`` weights of queries and keys.
      negentropy: ``[heads]`` Σ p log p over all queries, in nats.
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


@functools.partial(jax.jit, static_argnames=("model", "layers"))
def attention_statistics(
    variables: Variables, batch: Batch, *, model: EncoderDecoder, layers: tuple[Layer, ...]
) -> dict[Layer, Statistics]:
    """Returns the statistics of the self-attention of some layers over a batch.

    The model has looped layers; the batch has unpacked rows, padded at the end.
    """
    _, sown = teacher_forced(model, variables, batch, collection="intermediates")
    statistics = {}
    for stack, layer in layers:
        causal = stack == "decoder"
        real = batch["encoder_input_tokens"] != model.ids.padding
        if causal:
            real = batch["decoder_loss_weights"] > 0
        mixer = sown["intermediates"][stack][f"layers_{layer}"][STACKS[stack]]
        (weights,) = mixer["attention_weights"]  # [b or 1, heads, n, n]
        rows, n = real.shape
        weights = jnp.broadcast_to(weights, (rows, *weights.shape[1:])) * real[:, None, :, None]
        seen = jnp.arange(1, n + 1) if causal else real.sum(axis=1, keepdims=True)
        queries = jax.nn.one_hot(jnp.broadcast_to(seen, (rows, n)), n + 1) * real[..., None]
        negentropy = jax.scipy.special.xlogy(weights, weights).sum((0, 2, 3))
        statistics[stack, layer] = Statistics(weights.sum(0), negentropy, queries.sum(0))
    return statistics


def collect_statistics(
    model: EncoderDecoder, variables: Variables, batches: Iterable[Batch], layers: Iterable[Layer]
) -> dict[Layer, Statistics]:
    """Returns the sums of `attention_statistics` over batches, at least one, as NumPy arrays."""
    of_batch = functools.partial(attention_statistics, variables, model=model, layers=tuple(layers))
    total = functools.reduce(functools.partial(jax.tree.map, jnp.add), map(of_batch, batches))
    return jax.tree.map(gather_to_host, total)


def divergence(logits: jax.Array, statistics: Statistics) -> jax.Array:
    """Returns the mean over queries of ``KL(teacher ‖ softmax(logits))``, ``[heads]`` in nats.

    The logits are ``[heads, n, n]``, the statistics those of the teacher.
    """
    # log Σ exp over the first 1, 2, … keys.
    normalizers = jax.lax.cumlogsumexp(logits, axis=2)
    likelihood = (statistics.mass * logits).sum((1, 2))
    likelihood -= (statistics.queries[:, 1:] * normalizers).sum((1, 2))
    return (statistics.negentropy - likelihood) / statistics.queries.sum()


def fit(
    attention: Attention,
    statistics: Statistics,
    *,
    d_model: int,
    causal: bool,
    bias: ArrayLike = 0.0,
    seed: int = 0,
) -> tuple[PyTree, jax.Array]:
    """Fits the parameters of an attention layer's static alignment to a teacher's attention.

    Args:
      attention: the layer, whose alignment `is_static` and which `is_softmax_of_logits`.
      statistics: those of the teacher's layer.
      d_model: width of the tokens.
      causal: a query sees the keys up to itself, as in decoders.
      bias: ``[heads, n, n]`` logits that are added to those of the alignment, and stay.
      seed: seed of the initial parameters, where they matter.

    Returns:
      The parameters, and the logits ``[heads, n, n]`` that they make, without the bias.
    """
    alignment, length = attention.alignment, statistics.mass.shape[-1]
    smooth = _add_prior(statistics, causal=causal)
    params = initial_parameters(attention, d_model, seed=seed)
    mean = smooth.mass / np.maximum(times_seen(np.asarray(smooth.queries)), 1e-30)
    start = np.log(np.maximum(mean, 1e-30)) - np.asarray(bias)
    if isinstance(alignment, Random):
        params = {"table": resize(jnp.asarray(start), params["table"], "distance")}
    elif isinstance(alignment, FactorizedRandom):
        params = _factorize(start, params, alignment.rank, causal=causal)
    elif isinstance(alignment, GaussianBias):
        params = _standard_gaussian(smooth)
    params = _minimize(params, smooth, jnp.asarray(bias), attention=attention, d_model=d_model)
    params = _to_params(alignment, params)
    return params, position_logits(
        alignment, params, num_heads=attention.num_heads, length=length, d_model=d_model
    )


def fit_layers(
    student: EncoderDecoder, params: PyTree, statistics: Mapping[Layer, Statistics]
) -> tuple[PyTree, dict[Layer, np.ndarray]]:
    """Fits the static alignments of a student's layers, looped, to the statistics of the teacher's.

    The parameters hold the teacher's position bias, which stays. Returns those with fitted alignments, and
    the `divergence` of each layer.
    """
    params, divergences = jax.tree.map(lambda x: x, params), {}
    for (stack, i), of_layer in statistics.items():
        attention = self_attention(student, (stack, i))
        bias = stack_bias_logits(student, params, (stack, i), length=of_layer.mass.shape[-1])
        causal = stack == "decoder"
        fitted, logits = fit(attention, of_layer, d_model=student.d_model, causal=causal, bias=bias, seed=i)
        params[stack][f"layers_{i}"][STACKS[stack]]["align"] = fitted
        divergences[stack, i] = np.asarray(divergence(logits + bias, of_layer))
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


def _add_prior(statistics: Statistics, *, causal: bool) -> Statistics:
    """Adds `PRIOR` queries with the mean attention by distance to those of each position."""
    mass, _, queries = map(np.asarray, statistics)
    heads, n, _ = mass.shape
    distance = np.arange(n)[None, :] - np.arange(n)[:, None] + n - 1
    seen = sums_by_distance(times_seen(queries))
    by_distance = np.stack(list(map(sums_by_distance, mass))) / np.maximum(seen, 1e-30)
    where = np.flatnonzero(seen > 0)
    nearest = where[np.abs(np.arange(2 * n - 1)[:, None] - where).argmin(1)]
    prior = np.maximum(by_distance[:, nearest], 1e-6)[:, distance]
    last = np.arange(1, n + 1) if causal else np.full(n, n)
    prior = prior * (np.arange(n) < last[:, None])
    prior = PRIOR * prior / prior.sum(-1, keepdims=True)
    added = queries + PRIOR * (np.arange(n + 1) == last[:, None])
    return Statistics(
        jnp.asarray(mass + prior, jnp.float32), jnp.zeros(heads), jnp.asarray(added, jnp.float32)
    )


def _factorize(start: np.ndarray, params: PyTree, rank: int, *, causal: bool) -> PyTree:
    """Returns the factors of the best approximation of a table by one of a rank."""
    visible = np.tri(start.shape[-1]) if causal else np.ones(start.shape[1:])
    mean = (start * visible).sum(-1, keepdims=True) / visible.sum(-1, keepdims=True)
    u, s, v = np.linalg.svd(np.where(visible > 0, start - mean, 0.0), full_matrices=False)
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
    params: PyTree, statistics: Statistics, bias: jax.Array, *, attention: Attention, d_model: int
) -> PyTree:
    """Minimizes the divergence by L-BFGS; layers of the same configuration share the program."""
    alignment, length = attention.alignment, statistics.mass.shape[-1]
    optimizer = optax.lbfgs()

    def loss(fitted: PyTree) -> jax.Array:
        params = _to_params(alignment, fitted)
        logits = position_logits(
            alignment, params, num_heads=attention.num_heads, length=length, d_model=d_model
        )
        return divergence(logits + bias, statistics).sum()

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
