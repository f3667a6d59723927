"""Cross-entropy with z-loss and label smoothing, as sums over real tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.mesh_axes import match_varying_axes
from synthesizer_jax.attention.terms import cap_logits
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.primitives.products import plain_output_product


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over a batch's real target tokens, so that micro-batches add up; float32 scalars.

    Only `total` and `penalty` have gradients.

    Attributes:
      total: `loss` and `z_loss` together.
      loss: cross-entropy in nats, without z-loss.
      z_loss: ``coefficient · Σ log² Z``.
      correct: tokens whose most probable value is the target.
      weight: number of real tokens (sum of the weights).
      penalty: what modules add to the loss of every token (a Universal Transformer's ponder cost).
    """

    total: jax.Array
    loss: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    weight: jax.Array
    penalty: jax.Array | float = 0.0


class _Settings(NamedTuple):
    z_loss: float
    smoothing: float
    scale: float = 1.0
    soft_cap: float | None = None


class _Sums(NamedTuple):
    total: jax.Array
    loss: jax.Array
    z_loss: jax.Array
    correct: jax.Array


class _Stats(NamedTuple):
    """Residuals of every token: whether its loss is NaN, the largest logit, ``Σ exp(logits − peak)``.

    ``log Z`` is two numbers, because its own rounding would be an error of all probabilities.
    """

    wrong: jax.Array
    peak: jax.Array
    total: jax.Array


@jax.named_scope("loss")
def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
) -> LossSums:
    """T5's loss of given logits.

    ``Σ_t w_t (H(y_t, softmax(l_t)) − H(y_t))``, and ``z_loss · Σ_t w_t log² Z_t``. ``y`` is the smoothed
    target: 1 − ε on the target, ε / (v − 1) elsewhere. Its own entropy is subtracted, as in T5X, so that
    the optimum is 0.

    Args:
      logits: ``[b, t, v]``, any float dtype; the loss is computed in float32. The backward pass
        recomputes the softmax from the logits, so that no float32 array of their size is a residual.
      targets: ``[b, t]`` integers. Where the weight is 0 they are ignored and may have any value, such as
        -100; elsewhere a target outside of ``0 … v − 1`` makes the loss NaN.
      weights: ``[b, t]`` float32, 0 at padding; without gradient.
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
    """
    arrays = match_varying_axes(logits, jnp.asarray(targets).astype(jnp.int32), jnp.asarray(weights))
    sums = _dense_losses(*arrays, _Settings(z_loss, label_smoothing))
    return LossSums(*sums, weights.sum())


@jax.named_scope("loss")
def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    *,
    targets: jax.Array,
    weights: jax.Array,
    scale: float = 1.0,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    soft_cap: float | None = None,
    chunk: int | None = None,
) -> LossSums:
    """`cross_entropy` of ``(scale · hidden) kernel`` without ever holding all logits.

    The tokens are processed in chunks. Under differentiation the gradient of a chunk is computed right
    after its loss, from the same logits, so that no product is computed twice; the backward pass only
    scales it.

    Args:
      hidden: ``[b, t, d]``; its dtype is that of the product.
      kernel: ``[d, v]`` float32.
      targets: ``[b, t]`` integers, as in `cross_entropy`.
      weights: ``[b, t]`` float32, as in `cross_entropy`.
      scale: factor of `hidden` (1/√d for tied embeddings).
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
      soft_cap: logits x become ``soft_cap · tanh(x / soft_cap)``; None: they stay.
      chunk: maximum number of tokens per chunk; None: an eighth of them, but 512 to 2,048. Every chunk
        reads and writes the kernel's whole gradient.
    """
    d = hidden.shape[-1]
    x, y, w = hidden.reshape(-1, d), targets.reshape(-1).astype(jnp.int32), weights.reshape(-1)
    chunk = chunk or min(max(512, x.shape[0] // 8), 2048)
    num_chunks = max(1, -(-x.shape[0] // chunk))
    size = -(-x.shape[0] // num_chunks)
    padding = num_chunks * size - x.shape[0]
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(num_chunks, size, d)
    y, w = (jnp.pad(a, (0, padding)).reshape(num_chunks, size) for a in (y, w))
    arrays = match_varying_axes(x, kernel, y, w)
    sums = _chunked_losses(*arrays, _Settings(z_loss, label_smoothing, scale, soft_cap))
    return LossSums(*sums, weights.sum())


def loss_denominator(weights: jax.Array, normalizer: float | str | None = None) -> jax.Array:
    """Returns what the summed loss is divided by.

    Args:
      weights: ``[b, t]`` of the whole batch.
      normalizer: None: the number of real target tokens. ``"tokens_with_padding"``: b·t, as models
        pretrained with Mesh-TensorFlow had it. A number: itself, such as T5's 2048 · 114 = 233,472,
        which keeps restored second moments of such models at their scale.
    """
    if normalizer is None:
        return jnp.maximum(weights.sum(), 1.0)
    if normalizer == "tokens_with_padding":
        return jnp.asarray(float(weights.size))
    return jnp.asarray(float(normalizer))


def _smoothed_target(vocab: int, smoothing: float) -> tuple[float, float, float]:
    """Returns what the target's probability has beyond the others', the others', and the entropy."""
    if smoothing == 0.0:
        return 1.0, 0.0, 0.0
    low = smoothing / (vocab - 1)
    high = 1.0 - smoothing
    entropy = -(high * math.log(high) + (vocab - 1) * low * math.log(low + 1e-20))
    return high - low, low, entropy


def _losses(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings
) -> tuple[_Sums, _Stats]:
    """Returns the sums, and the residuals of `_logits_gradient`."""
    extra, low, entropy = _smoothed_target(logits.shape[-1], settings.smoothing)
    logits32 = logits.astype(jnp.float32)
    peak = jax.lax.stop_gradient(logits32.max(axis=-1))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    total = jnp.exp(logits32 - peak[..., None]).sum(axis=-1)
    valid = (targets >= 0) & (targets < logits.shape[-1])
    target = jnp.where(valid, targets, 0)[..., None]
    at_target = jnp.take_along_axis(logits, target, axis=-1)[..., 0].astype(jnp.float32) - peak
    expected = extra * at_target
    if low:
        expected += low * (logits32.sum(axis=-1) - logits.shape[-1] * peak)
    loss = jnp.where(valid, jnp.log(total) - expected - entropy, 0.0)
    loss = jnp.where(valid | (weights == 0), loss, jnp.nan)
    # The target is the first maximum. On CPUs an argmax would take ten times as long.
    ids = jax.lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1)
    earlier = ((logits32 == peak[..., None]) & (ids < target)).any(axis=-1)
    correct = (valid & (at_target == 0) & ~earlier).astype(jnp.float32)
    log_z = peak + jnp.log(total)
    loss_sum, z, correct = (  # what has weight 0 is ignored, even NaN
        jnp.where(weights == 0, 0.0, weights * x).sum() for x in (loss, log_z**2, correct)
    )
    z = settings.z_loss * z
    return _Sums(loss_sum + z, loss_sum, z, correct), _Stats(jnp.isnan(loss), peak, total)


def _logits_gradient(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    stats: _Stats,
    settings: _Settings,
    g: jax.Array | float,
) -> jax.Array:
    """Returns ``g w (p − y + z_loss · 2 log Z · p)``, p = softmax(l), y the smoothed target, w a weight."""
    extra, low, _ = _smoothed_target(logits.shape[-1], settings.smoothing)
    # The barrier keeps XLA from storing the exponentials of the forward pass, in float32.
    peak = jax.lax.optimization_barrier(stats.peak)
    exponential = jnp.exp(logits.astype(jnp.float32) - peak[..., None])
    log_z = stats.peak + jnp.log(stats.total)
    factor = weights * (g + 2.0 * settings.z_loss * g * log_z) / stats.total
    is_target = targets[..., None] == jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    smoothed = jnp.where(is_target, extra + low, low)
    dlogits = factor[..., None] * exponential - (g * weights)[..., None] * smoothed
    dlogits = jnp.where(stats.wrong[..., None], jnp.nan, dlogits)
    return jnp.where((weights == 0)[..., None], 0.0, dlogits).astype(logits.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense_losses(logits: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings) -> _Sums:
    return _losses(logits, targets, weights, settings)[0]


def _dense_forward(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings
) -> tuple[_Sums, tuple[jax.Array, jax.Array, jax.Array, _Stats]]:
    sums, stats = _losses(logits, targets, weights, settings)
    return sums, (logits, targets, weights, stats)


def _dense_backward(
    settings: _Settings, saved: tuple[jax.Array, jax.Array, jax.Array, _Stats], g: _Sums
) -> tuple[jax.Array, None, None]:
    return _logits_gradient(*saved, settings, g.total), None, None


_dense_losses.defvjp(_dense_forward, _dense_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked_losses(
    hidden: jax.Array, kernel: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings
) -> _Sums:
    return _scan_chunks(hidden, kernel, targets, weights, settings, gradient=False)[0]


def _scan_chunks(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    settings: _Settings,
    *,
    gradient: bool = True,
) -> tuple[_Sums, PyTree]:
    """Returns the sums over chunks ``[chunks, n, d]`` and, from the same logits, the total's gradients."""
    cast_kernel = kernel.astype(hidden.dtype)

    def add_chunk(carry: PyTree, chunk: tuple[jax.Array, ...]) -> tuple[PyTree, jax.Array | None]:
        sums, dkernel = carry
        x, y, w = chunk
        x = x * jnp.asarray(settings.scale, x.dtype)
        logits = cap_logits(plain_output_product(x, cast_kernel), settings.soft_cap)
        chunk_sums, stats = _losses(logits, y, w, settings)
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        if not gradient:
            return (sums, None), None
        dlogits = _logits_gradient(logits, y, w, stats, settings, 1.0)
        if settings.soft_cap is not None:
            dlogits *= 1.0 - jnp.square(logits / settings.soft_cap)
        dlogits = dlogits.astype(x.dtype)
        dkernel += jax.lax.dot_general(  # dK += xᵀ dl
            x, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        dhidden = dlogits @ cast_kernel.T  # dx = dl Kᵀ
        return (sums, dkernel), dhidden * jnp.asarray(settings.scale, x.dtype)

    dkernel = jnp.zeros(kernel.shape, jnp.float32) if gradient else None
    start, rows = (_Sums(*[jnp.zeros(())] * 4), dkernel), (hidden, targets, weights)
    (sums, dkernel), dhidden = jax.lax.scan(add_chunk, *match_varying_axes(start, rows))
    return sums, (dhidden, dkernel.astype(kernel.dtype)) if gradient else None


def _chunked_backward(
    settings: _Settings, gradients: tuple[jax.Array, jax.Array], g: _Sums
) -> tuple[jax.Array, jax.Array, None, None]:
    dhidden, dkernel = ((x * g.total).astype(x.dtype) for x in gradients)
    return dhidden, dkernel, None, None


_chunked_losses.defvjp(_scan_chunks, _chunked_backward)
