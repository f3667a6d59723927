"""Cross-entropy with z-loss and label smoothing, as sums over real tokens."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossSums:
    """Sums over a batch's real target tokens, so that micro-batches add up; float32 scalars.

    Attributes:
      loss: cross-entropy in nats, without z-loss.
      z_loss: ``coefficient · Σ log² Z``.
      correct: tokens whose most probable value is the target.
      weight: number of real tokens (sum of the weights).
      penalty: what modules add to the loss of every token (a Universal Transformer's ponder cost).
    """

    loss: jax.Array
    z_loss: jax.Array
    correct: jax.Array
    weight: jax.Array
    penalty: jax.Array | float = 0.0


def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
) -> LossSums:
    """T5's loss of given logits.

    ``Σ_t w_t (H(y_t, softmax(l_t)) − H(y_t))`` with ``y`` the smoothed target (1 − ε on the target,
    ε / (v − 1) elsewhere; its own entropy is subtracted, as in T5X, so that the optimum is 0), and
    ``z_loss · Σ_t w_t log² Z_t``.

    Args:
      logits: ``[b, t, v]``, any float dtype; computed in float32. Its gradient has the same dtype and
        is made from the logits again, so that no float32 array of its size is kept.
      targets: ``[b, t]`` integers.
      weights: ``[b, t]`` float32, 0 at padding.
      z_loss: coefficient.
      label_smoothing: ε.
    """
    loss, z, correct = _losses(logits, targets, weights, z_loss, label_smoothing)
    return LossSums(loss, z, correct, weights.sum())


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    *,
    targets: jax.Array,
    weights: jax.Array,
    scale: float = 1.0,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    chunk: int = 1024,
) -> LossSums:
    """`cross_entropy` of ``(scale · hidden) kernel`` without ever holding all logits.

    Tokens are taken in chunks, in the forward and in the backward pass, which computes the chunk's
    logits again.

    Args:
      hidden: ``[b, t, d]``; its dtype is that of the product.
      kernel: ``[d, v]`` float32.
      targets: ``[b, t]`` integers.
      weights: ``[b, t]`` float32.
      scale: factor of `hidden` (1/√d for tied embeddings).
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
      chunk: tokens per chunk.
    """
    d = hidden.shape[-1]
    x, y, w = hidden.reshape(-1, d), targets.reshape(-1), weights.reshape(-1)
    chunks = -(-x.shape[0] // chunk)
    pad = chunks * chunk - x.shape[0]
    x = jnp.pad(x, ((0, pad), (0, 0))).reshape(chunks, chunk, d)
    y, w = (jnp.pad(a, (0, pad)).reshape(chunks, chunk) for a in (y, w))
    sums = _chunks(x, kernel, y, w, scale, z_loss, label_smoothing)
    return LossSums(*sums, weights.sum())


def loss_denominator(weights: jax.Array, normalizer: float | str | None = None) -> jax.Array:
    """What the summed loss is divided by.

    Args:
      weights: ``[b, t]`` of the whole batch.
      normalizer: None: the number of real target tokens. ``"tokens_with_padding"``: b·t, as models
        pretrained with Mesh-TensorFlow had it. A number: itself, such as T5's 2048 · 114 = 233,472,
        which keeps restored second moments of such models at their scale.

    Raises:
      ValueError: any other word.
    """
    if normalizer is None:
        return jnp.maximum(weights.sum(), 1.0)
    if normalizer == "tokens_with_padding":
        return jnp.asarray(float(weights.size))
    if isinstance(normalizer, str):
        raise ValueError(
            f"loss_normalizer={normalizer!r}; allowed: none, 'tokens_with_padding' or a number"
        )
    return jnp.asarray(float(normalizer))


def _smoothing(vocab: int, smoothing: float) -> tuple[float, float, float]:
    """Weight of the target beyond the others', weight of every value, entropy of the target."""
    if smoothing == 0.0:
        return 1.0, 0.0, 0.0
    low = smoothing / (vocab - 1)
    high = 1.0 - smoothing
    entropy = -(high * math.log(high) + (vocab - 1) * low * math.log(low + 1e-20))
    return high - low, low, entropy


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _losses(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float, smoothing: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _losses_forward(logits, targets, weights, z_loss, smoothing)[0]


def _losses_forward(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float, smoothing: float
) -> Any:
    extra, low, entropy = _smoothing(logits.shape[-1], smoothing)
    wide = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(wide, axis=-1)
    at_target = jnp.take_along_axis(wide, targets[..., None], axis=-1)[..., 0]
    expected = extra * at_target + (low * wide.sum(axis=-1) if low else 0.0)
    loss = (weights * (log_z - expected - entropy)).sum()
    z = z_loss * (weights * log_z**2).sum()
    correct = (weights * (wide.argmax(axis=-1) == targets)).sum()
    return (loss, z, correct), (logits, targets, weights, log_z)


def _losses_backward(z_loss: float, smoothing: float, saved: Any, cotangents: Any) -> Any:
    logits, targets, weights, log_z = saved
    g, g_z, _ = cotangents
    extra, low, _ = _smoothing(logits.shape[-1], smoothing)
    probability = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    factor = weights * (g + g_z * 2.0 * z_loss * log_z)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    wanted = jnp.where(is_target, extra + low, low)
    gradient = factor[..., None] * probability - (weights * g)[..., None] * wanted
    return gradient.astype(logits.dtype), None, None


_losses.defvjp(_losses_forward, _losses_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _chunks(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    scale: float,
    z_loss: float,
    smoothing: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _chunks_forward(x, kernel, targets, weights, scale, z_loss, smoothing)[0]


def _chunk_logits(x: jax.Array, kernel: jax.Array, scale: float) -> jax.Array:
    return (x * jnp.asarray(scale, x.dtype)) @ kernel.astype(x.dtype)


def _chunks_forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    scale: float,
    z_loss: float,
    smoothing: float,
) -> Any:
    def body(total: Any, part: Any) -> tuple[Any, None]:
        x, y, w = part
        sums, _ = _losses_forward(_chunk_logits(x, kernel, scale), y, w, z_loss, smoothing)
        return jax.tree.map(jnp.add, total, sums), None

    zeros = (jnp.zeros(()),) * 3
    sums, _ = jax.lax.scan(body, zeros, (x, targets, weights))
    return sums, (x, kernel, targets, weights)


def _chunks_backward(
    scale: float, z_loss: float, smoothing: float, saved: Any, cotangents: Any
) -> Any:
    x, kernel, targets, weights = saved

    def body(total: jax.Array, part: Any) -> tuple[jax.Array, jax.Array]:
        x, y, w = part
        _, kept = _losses_forward(_chunk_logits(x, kernel, scale), y, w, z_loss, smoothing)
        g, _, _ = _losses_backward(z_loss, smoothing, kept, cotangents)
        dx = (g @ kernel.astype(x.dtype).T) * jnp.asarray(scale, x.dtype)
        dk = jax.lax.dot_general(
            x * jnp.asarray(scale, x.dtype),
            g,
            (((0,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        return total + dk, dx

    dk, dx = jax.lax.scan(body, jnp.zeros(kernel.shape, jnp.float32), (x, targets, weights))
    return dx, dk.astype(kernel.dtype), None, None


_chunks.defvjp(_chunks_forward, _chunks_backward)
