"""Fits static alignments to the attention of a trained model.

The logits of a static alignment, such as a Random table, do not depend on the tokens. The best
logits maximize the likelihood of the teacher's attention. In other words, the best logits minimize
the mean of ``KL(teacher ‖ static)`` over queries, where ``teacher`` and ``static`` are the
attention weights of a query over the keys that it sees. A fit needs only two statistics, which one
pass over the data collects. The first statistic is the sum of the teacher's weights for every pair
of positions. The second statistic is the number of queries for each position and each number of
visible keys.
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
from synthesizer_jax.mixers.attention import Window, window_reach
from synthesizer_jax.models import EncoderDecoder, TokenModel, stacks_of
from synthesizer_jax.primitives.parameters import Variables, apply_method
from synthesizer_jax.sharding import gather_to_host
from synthesizer_jax.training.origins import resize
from synthesizer_jax.training.step import Batch, teacher_forced

ITERATIONS = 200
"""The number of iterations of L-BFGS."""

LOG_PRECISIONS = (-10.0, 10.0)
"""The range of the logarithm of a Gaussian's precision during a fit.

The precision is relative to the precision at which the fit begins.
"""

MIN_VARIANCE = 0.05
"""The smallest variance with which the fit of a Gaussian begins, in tokens squared.

The fit computes the variance of the distances from queries to the keys that they attend to.
"""

HIDDEN = -1e30
"""The logit of a key outside a window.

The logit is finite because it may be multiplied by zero. The weight of the key is still zero.
"""

MAX_OF_CAP = 0.95
"""The largest share of a soft cap that logits have when a fit begins.

Gradients vanish if logits are closer to the cap.
"""

MIN_SINK = 1e-3
"""The smallest weight of a sink that is assumed when a fit begins."""

PRIOR = 1.0
"""The number of queries that `_add_prior` adds at each position.

The weights of the added queries are the mean attention by distance. Added queries matter for pairs
of positions that occur rarely.
"""


class Statistics(NamedTuple):
    """Statistics about the attention of a layer, which one pass over the data collects.

    All arrays are sums over examples.

    Attributes:
      mass: the attention weight of each pair of a query and a key, ``[heads, n, n]``. If the
        weights of a query sum to less than one, the remaining weight belongs to the head's sink.
      negentropy: Σ p log p over all queries, in nats, as ``[heads]``. The sum includes the weights
        of sinks.
      queries: the number of queries, as ``[n, n + 1]``. The first axis is the position of a query,
        and the second axis is the number of keys that the query sees, counted from the first key.
    """

    mass: jax.Array
    negentropy: jax.Array
    queries: jax.Array


def is_static(alignment: Alignment) -> bool:
    """Returns whether an alignment can be fitted.

    An alignment can be fitted if its logits are trained and do not depend on tokens.
    """
    if isinstance(alignment, Mixture | PerHead):
        return all(is_static(part) for part in alignment.parts)
    if isinstance(alignment, Random | GaussianBias) and not alignment.trainable:
        return False
    return isinstance(alignment, Random | FactorizedRandom | RelativeBias | GaussianBias)


def is_softmax_of_logits(attention: Attention) -> bool:
    """Returns whether attention is a plain softmax, without sinks, soft cap, window or memory."""
    plain = not attention.sinks and attention.soft_cap is None and attention.window is None
    return plain and not attention.reads_memory


@functools.partial(jax.jit, static_argnames=("model", "students"))
def attention_statistics(
    variables: Variables,
    batch: Batch,
    *,
    model: EncoderDecoder,
    students: tuple[tuple[Layer, Attention], ...],
) -> dict[Layer, Statistics]:
    """Returns the statistics of self-attention in some layers, for one batch.

    A layer of the student may see fewer keys than the same layer of the teacher. The teacher's
    weights are therefore restricted to the student's window. If the teacher has sinks, the
    teacher's weights may sum to less than one. The teacher's weights are therefore normalized if
    the student has no sinks.

    Args:
      variables: the variables of the teacher.
      batch: rows that are not packed and are padded at the end.
      model: the teacher, with looped layers.
      students: the layers to fit, each with the student's attention in this layer.
    """
    _, sown = teacher_forced(model, variables, batch, collection="intermediates")
    statistics = {}
    for (stack, layer), student in students:
        causal = stack == "decoder"
        if causal:
            real = batch["decoder_loss_weights"] > 0
        else:
            real = batch["encoder_input_tokens"] != model.ids.padding
        mixer = sown["intermediates"][stack][f"layers_{layer}"][STACKS[stack]]
        (weights,) = mixer["attention_weights"]
        statistics[stack, layer] = _layer_statistics(weights, real, student, causal=causal)
    return statistics


def _layer_statistics(
    weights: jax.Array, real: jax.Array, student: Attention, *, causal: bool
) -> Statistics:
    """Returns the statistics of one layer; see `attention_statistics`.

    Args:
      weights: the teacher's attention weights, ``[b or 1, heads, n, n]``.
      real: a boolean array ``[b, n]`` that is true for tokens and false for padding.
      student: the attention that will be fitted to the layer.
      causal: whether a query sees only the keys up to its own position, as in decoders.
    """
    rows, n = real.shape
    # `weights` is ``[b, heads, q, k]``. The weights of queries at padding positions are set to
    # zero.
    weights = jnp.broadcast_to(weights, (rows, *weights.shape[1:])) * real[:, None, :, None]
    if student.window is not None:
        weights = weights * is_in_window(n, student.window)
    total = weights.sum(-1, keepdims=True)  # [b, heads, n, 1]
    if not student.sinks:
        weights = weights / jnp.where(total > 0, total, 1)

    # A query of the decoder sees the keys up to its own position. A query of the encoder sees all
    # keys that are not padding.
    if causal:
        seen = jnp.arange(1, n + 1)
    else:
        seen = real.sum(axis=1, keepdims=True)
    # For each query, `queries` ``[b, n, n + 1]`` has a one-hot vector of the number of visible
    # keys.
    queries = jax.nn.one_hot(jnp.broadcast_to(seen, (rows, n)), n + 1) * real[..., None]

    negentropy = jax.scipy.special.xlogy(weights, weights).sum((0, 2, 3))  # [heads]
    if student.sinks:
        # If the weights of the keys sum to less than one, the sink has the remaining weight.
        of_sinks = jnp.maximum(real[:, None, :] - total[..., 0], 0)  # [b, heads, n]
        negentropy += jax.scipy.special.xlogy(of_sinks, of_sinks).sum((0, 2))
    return Statistics(weights.sum(0), negentropy, queries.sum(0))


def is_in_window(length: int, window: Window) -> np.ndarray:
    """Returns a mask ``[q, k]`` of the pairs that an `Attention.window` allows."""
    before, after = window_reach(window)
    positions = np.arange(length)
    offsets = positions[None, :] - positions[:, None]
    return (-before <= offsets) & (offsets <= after)


def collect_statistics(
    model: EncoderDecoder,
    variables: Variables,
    batches: Iterable[Batch],
    students: Mapping[Layer, Attention],
) -> dict[Layer, Statistics]:
    """Returns the sums of `attention_statistics` over batches, as NumPy arrays.

    `batches` must contain at least one batch.
    """
    total = None
    for batch in batches:
        statistics = attention_statistics(
            variables, batch, model=model, students=tuple(students.items())
        )
        total = statistics if total is None else jax.tree.map(jnp.add, total, statistics)
    return jax.tree.map(gather_to_host, total)


@functools.partial(jax.jit, static_argnames=("soft_cap", "window"))
def divergence(
    logits: jax.Array,
    statistics: Statistics,
    *,
    soft_cap: float | None = None,
    window: Window | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Returns the mean over queries of ``KL(teacher ‖ student)``, in nats.

    The weights of the student are the softmax of its logits, as in `Attention`.

    Args:
      logits: the logits ``[heads, n, n]`` of the student, before a soft cap.
      statistics: the statistics of the teacher.
      soft_cap: the student's `Attention.soft_cap`.
      window: the student's `Attention.window`.
      sinks: the logits ``[heads]`` of the sinks, if the student has `Attention.sinks`. A sink acts
        like an additional key whose value is zero.

    Returns:
      The divergence of each head, as ``[heads]``.
    """
    # The mean of KL(teacher ‖ student) is (Σ p log p − Σ p log q) / queries. The log-likelihood
    # Σ p log q is the sum of the logits, weighted by p, minus the normalizer of every query.
    logits = cap_logits(logits, soft_cap)
    likelihood = (statistics.mass * logits).sum((1, 2))  # [heads]

    # `HIDDEN` is finite because rows without a visible key are multiplied by zero below.
    if window is not None:
        logits = jnp.where(is_in_window(logits.shape[-1], window), logits, HIDDEN)
    # `normalizers` is ``[heads, q, k]``. The entry at k is log Σ exp over the first k + 1 keys,
    # because queries at the same position may see different numbers of keys.
    normalizers = _cumulative_logsumexp(logits)
    if sinks is not None:
        normalizers = jnp.logaddexp(normalizers, sinks[:, None, None])
        likelihood += (sink_mass(statistics) * sinks[:, None]).sum(1)
    likelihood -= (statistics.queries[:, 1:] * normalizers).sum((1, 2))
    return (statistics.negentropy - likelihood) / statistics.queries.sum()


def _cumulative_logsumexp(logits: jax.Array) -> jax.Array:
    """Returns ``log Σ exp`` over the first k + 1 keys, for each k. The shape is ``[heads, q, k]``.

    A scan over the keys is compiled five times as fast as `jax.lax.cumlogsumexp`, and runs faster
    on CPUs.
    """

    def add_key(total: jax.Array, of_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Adds the logits ``[heads, q]`` of one key."""
        total = jnp.logaddexp(total, of_key)
        return total, total

    by_key = jnp.moveaxis(logits, 2, 0)
    _, sums = jax.lax.scan(add_key, jnp.full_like(by_key[0], -jnp.inf), by_key)
    return jnp.moveaxis(sums, 0, 2)


def sink_mass(statistics: Statistics) -> jax.Array:
    """Returns the summed weights ``[heads, n]`` of the sinks.

    For each query, the weight of the sink is one minus the weights of all keys.
    """
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
    """Fits the static alignment of an attention layer to the attention of a teacher.

    Args:
      attention: the attention layer, whose alignment must be static; see `is_static`.
      statistics: the statistics of the teacher's layer.
      d_model: the width of the tokens.
      causal: whether a query sees only the keys up to its own position, as in decoders.
      bias: logits ``[heads, n, n]`` that are added to the logits of the alignment. The bias is not
        changed.
      sinks: the logits ``[heads]`` of the layer's sinks, which are not changed. If `sinks` is
        `None`, the layer has no sinks.
      seed: the seed of the initial parameters, for alignments whose fit starts from initial
        parameters.

    Returns:
      The parameters of the alignment, and its logits ``[heads, n, n]`` without the bias.
    """
    alignment = attention.alignment
    length = statistics.mass.shape[-1]
    # `visible` is a mask ``[q, k]`` of the keys that a query may see.
    visible = np.tri(length, dtype=bool) if causal else np.ones((length, length), bool)
    if attention.window is not None:
        visible &= is_in_window(length, attention.window)
    smooth = _add_prior(statistics, visible=visible, causal=causal)

    # The initial values of tables are close to the best logits. The bias is subtracted from the
    # best logits, because the table and the bias are added.
    params = initial_parameters(attention, d_model, seed=seed)
    start = _best_logits(smooth, soft_cap=attention.soft_cap, visible=visible, sinks=sinks)
    start -= np.asarray(bias)
    if isinstance(alignment, Random):
        params = {"table": resize(jnp.asarray(start), params["table"], "distance")}
    elif isinstance(alignment, FactorizedRandom):
        params = _factorize(start, params, alignment.rank, visible=visible)
    elif isinstance(alignment, GaussianBias):
        params = _standard_gaussian(smooth)

    params = _minimize(
        params, smooth, jnp.asarray(bias), sinks, attention=attention, d_model=d_model
    )
    params = _to_params(alignment, params)
    logits = position_logits(
        alignment, params, num_heads=attention.num_heads, length=length, d_model=d_model
    )
    return params, logits


def _best_logits(
    statistics: Statistics, *, soft_cap: float | None, visible: np.ndarray, sinks: jax.Array | None
) -> np.ndarray:
    """Returns logits ``[heads, n, n]`` whose softmax is close to the teacher's mean attention.

    The result is optimal if all queries at a position see the same keys, and if no logit reaches
    the soft cap.
    """
    # `logits` is the logarithm of the mean weight of every key, over the queries that see the key.
    seen = np.maximum(times_seen(np.asarray(statistics.queries)), 1e-30)  # [q, k]
    logits = np.log(np.maximum(statistics.mass / seen, 1e-30))

    if sinks is not None:
        # Shift the logits of every query, so that the fixed logit of the sink gives the sink its
        # share of the weights.
        counts = np.asarray(statistics.queries).sum(1)  # [n]
        shares = np.asarray(sink_mass(statistics)) / np.maximum(counts, 1e-30)  # [heads, n]
        logits += (np.asarray(sinks)[:, None] - np.log(np.maximum(shares, MIN_SINK)))[..., None]

    if soft_cap is not None:
        # Without sinks, adding a constant to all logits of a query does not change the weights of
        # the query. Center the logits around zero, so that they stay within the range of the soft
        # cap.
        if sinks is None:
            logits -= (logits * visible).sum(-1, keepdims=True) / visible.sum(-1, keepdims=True)
        # Apply the inverse of the soft cap.
        logits = soft_cap * np.arctanh(np.clip(logits / soft_cap, -MAX_OF_CAP, MAX_OF_CAP))
    return logits


def fit_layers(
    student: EncoderDecoder, params: PyTree, statistics: Mapping[Layer, Statistics]
) -> tuple[PyTree, dict[Layer, np.ndarray]]:
    """Fits the static alignments of a student's layers to the statistics of the teacher's layers.

    Args:
      student: the student, with looped layers.
      params: the student's parameters. The parameters include the teacher's position bias and
        sinks, which are not changed.
      statistics: the statistics of the teacher, for each layer to be fitted.

    Returns:
      The parameters with the fitted alignments, and the `divergence` ``[heads]`` of each layer.
    """
    # The dictionaries are copied, because the code below changes them. The arrays are not copied.
    params = jax.tree.map(lambda x: x, params)
    divergences = {}
    for (stack, i), of_layer in statistics.items():
        attention = self_attention(student, (stack, i))
        of_mixer = params[stack][f"layers_{i}"][STACKS[stack]]
        bias = stack_bias_logits(student, params, (stack, i), length=of_layer.mass.shape[-1])
        sinks = None
        if attention.sinks:
            sinks = jnp.asarray(gather_to_host(of_mixer["sinks"]))

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

        of_heads = divergence(
            logits + bias,
            of_layer,
            soft_cap=attention.soft_cap,
            window=attention.window,
            sinks=sinks,
        )
        divergences[stack, i] = np.asarray(of_heads)
    return params, divergences


def stack_bias_logits(model: TokenModel, params: PyTree, layer: Layer, *, length: int) -> jax.Array:
    """Returns the logits ``[heads, n, n]`` of the position bias that the layers of a stack share.

    The logits are zeros if the stack has no position bias.
    """
    stack, _ = layer
    num_heads = self_attention(model, layer).num_heads
    shared = stacks_of(model)[stack].bias
    if shared is None:
        return jnp.zeros((num_heads, length, length))
    on_host = jax.tree.map(gather_to_host, params[stack]["relpos_bias"])
    return position_logits(
        shared, on_host, num_heads=num_heads, length=length, d_model=model.d_model
    )


def position_logits(
    alignment: Alignment, params: PyTree, *, num_heads: int, length: int, d_model: int
) -> jax.Array:
    """Returns the logits ``[heads, n, n]`` of an alignment that reads no tokens.

    The alignment may also be the position bias of a stack.
    """
    span = Span(0, length)
    context = AttentionContext(num_heads, max(d_model // num_heads, 1), span, span)
    # The logits do not depend on the tokens, so all tokens are zero.
    x = jnp.zeros((1, length, d_model))
    terms = apply_method(alignment.__call__, {"params": params}, x, x, context)
    return materialize(terms, q_length=length, k_length=length)[0]


def times_seen(queries: np.ndarray) -> np.ndarray:
    """Returns how many queries see each key, as ``[q, k]``.

    The entries of the argument ``[q, k + 1]`` are numbers of queries. The first axis is the
    position of a query, and the second axis is the number of keys that the query sees, counted from
    the first key.
    """
    # Key k is seen by all queries that see more than k keys, so the counts are summed from the
    # right.
    return np.cumsum(queries[:, ::-1], axis=1)[:, ::-1][:, 1:]


def sums_by_distance(x: np.ndarray) -> np.ndarray:
    """Returns the sums of `x` over all pairs of positions with the same distance.

    The argument `x` has the shape ``[q, k]``. The sums are sorted by the distance key − query,
    which is at least ``1 − q`` and at most ``k − 1``.
    """
    q, k = x.shape
    distance = np.arange(k)[None, :] - np.arange(q)[:, None] + q - 1
    return np.bincount(distance.ravel(), x.ravel(), q + k - 1)


def _add_prior(statistics: Statistics, *, visible: np.ndarray, causal: bool) -> Statistics:
    """Returns statistics with `PRIOR` additional queries at each position.

    The additional queries smooth the statistics. Their weights are the teacher's mean attention at
    each distance. If a distance does not occur in the data, the mean attention at the nearest
    distance that occurs is used. The additional queries see all keys that are `visible` ``[q, k]``.
    """
    mass, _, queries = map(np.asarray, statistics)
    heads, n, _ = mass.shape

    # `seen` has the shape ``[2 n − 1]`` and counts how often each distance from a query to a key
    # occurs.
    seen = sums_by_distance(times_seen(queries))
    # `by_distance` has the shape ``[heads, 2 n − 1]`` and contains the mean weight at each
    # distance.
    by_distance = np.stack(list(map(sums_by_distance, mass))) / np.maximum(seen, 1e-30)
    # `nearest` has the shape ``[2 n − 1]``. For each distance, `nearest` contains the index of the
    # nearest distance that occurs in the data.
    occurring = np.flatnonzero(seen > 0)
    nearest = occurring[np.abs(np.arange(2 * n - 1)[:, None] - occurring).argmin(1)]

    # `prior` has the shape ``[heads, n, n]`` and contains the mean weight at the distance of each
    # pair of positions.
    distance = np.arange(n)[None, :] - np.arange(n)[:, None] + n - 1
    prior = np.maximum(by_distance[:, nearest], 1e-6)[:, distance]
    prior = prior * visible
    # `of_keys` has the shape ``[heads]`` and contains the mean over queries of the summed weight of
    # all keys. The remaining weight belongs to the sink.
    of_keys = mass.sum((1, 2)) / np.maximum(queries.sum(), 1e-30)
    prior = PRIOR * of_keys[:, None, None] * prior / prior.sum(-1, keepdims=True)

    # In a decoder, each additional query sees the keys up to its own position. In an encoder, the
    # additional queries see all keys.
    last = np.arange(1, n + 1) if causal else np.full(n, n)
    added = queries + PRIOR * (np.arange(n + 1) == last[:, None])
    return Statistics(
        jnp.asarray(mass + prior, jnp.float32), jnp.zeros(heads), jnp.asarray(added, jnp.float32)
    )


def _factorize(start: np.ndarray, params: PyTree, rank: int, *, visible: np.ndarray) -> PyTree:
    """Returns the factors of the best approximation of a table whose rank is limited.

    Args:
      start: the table ``[heads, n, n]``.
      params: initial factors, which have the shapes of the result.
      rank: the largest rank.
      visible: a mask ``[n, n]`` of the elements of the table that are approximated.
    """
    # Adding a constant to a row does not change the softmax of the row, so rows are centered first.
    mean = (start * visible).sum(-1, keepdims=True) / visible.sum(-1, keepdims=True)
    u, s, v = np.linalg.svd(np.where(visible, start - mean, 0.0), full_matrices=False)
    # Each factor has the shape ``[heads, n, rank]`` and is multiplied by the square roots of the
    # singular values.
    roots = np.sqrt(s[:, None, :rank])
    factors = {
        "query_factor": u[:, :, :rank] * roots,
        "key_factor": v.swapaxes(1, 2)[:, :, :rank] * roots,
    }
    # If the table has fewer than `rank` singular values, the remaining columns of the factors are
    # zero.
    missing = max(rank - roots.shape[-1], 0)
    resized = {}
    for name, factor in factors.items():
        wider = jnp.pad(factor, ((0, 0), (0, 0), (0, missing)))
        resized[name] = resize(wider, params[name], "edge")
    return resized


def _standard_gaussian(statistics: Statistics) -> PyTree:
    """Returns the parameters of a Gaussian for each head, scaled for the fit with L-BFGS.

    A line search cannot fit a center and a width in tokens together, because their scales are too
    different. Both parameters are therefore relative to the distances between a query and the keys
    that the head attends to. A center of 0 stands for the mean of these distances, and a
    log-precision of 0 stands for the inverse of their variance.
    """
    mass = np.asarray(statistics.mass)
    weights = mass / mass.sum((1, 2), keepdims=True)
    n = mass.shape[-1]
    distance = np.arange(n)[None, :] - np.arange(n)[:, None]  # distance from a query to a key
    mean = (weights * distance).sum((1, 2))  # [heads]
    variance = (weights * (distance - mean[:, None, None]) ** 2).sum((1, 2))  # [heads]
    deviation = np.sqrt(np.maximum(variance, MIN_VARIANCE))
    zeros = jnp.zeros(len(mass))
    return {
        "mean": jnp.float32(mean),
        "deviation": jnp.float32(deviation),
        "center": zeros,
        "log_precision": zeros,
    }


def _to_params(alignment: Alignment, fitted: PyTree) -> PyTree:
    """Converts the values that `_minimize` changes to the parameters of an alignment.

    Only the parameters of a Gaussian differ from these values; see `_standard_gaussian`.
    """
    if not isinstance(alignment, GaussianBias):
        return fitted
    # The mean and the deviation, which are the units of the fit, stay constant.
    mean = jax.lax.stop_gradient(fitted["mean"])
    deviation = jax.lax.stop_gradient(fitted["deviation"])
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
    """Minimizes the divergence with L-BFGS.

    The function is compiled once for all layers that have the same configuration.
    """
    alignment = attention.alignment
    length = statistics.mass.shape[-1]
    optimizer = optax.lbfgs()

    def loss(fitted: PyTree) -> jax.Array:
        """Returns the sum of the divergences of all heads."""
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
        """Performs one iteration of L-BFGS."""
        params, state = carry
        value, gradient = value_and_grad(params, state=state)
        updates, state = optimizer.update(
            gradient, state, params, value=value, grad=gradient, value_fn=loss
        )
        return optax.apply_updates(params, updates), state

    result, _ = jax.lax.fori_loop(0, ITERATIONS, step, (params, optimizer.init(params)))
    return result
