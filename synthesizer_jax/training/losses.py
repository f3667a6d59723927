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
      total: `loss` and `z_loss` together; of the three, the only one with a gradient.
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
    total, parts = _losses(logits, targets, weights, z_loss, label_smoothing)
    return LossSums(total, *jax.lax.stop_gradient(parts), weight=weights.sum())


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    *,
    targets: jax.Array,
    weights: jax.Array,
    scale: float = 1.0,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
    chunk: int = 512,
) -> LossSums:
    """`cross_entropy` of ``(scale · hidden) kernel`` without ever holding all logits.

    Tokens are taken in chunks. Where a gradient is asked for, it is made right after a chunk's loss,
    from the same logits, so that no product is computed twice; the backward pass only scales it.

    Args:
      hidden: ``[b, t, d]``; its dtype is that of the product.
      kernel: ``[d, v]`` float32.
      targets: ``[b, t]`` integers.
      weights: ``[b, t]`` float32.
      scale: factor of `hidden` (1/√d for tied embeddings).
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
      chunk: most tokens per chunk.
    """
    d = hidden.shape[-1]
    x, y, w = hidden.reshape(-1, d), targets.reshape(-1), weights.reshape(-1)
    chunks = -(-x.shape[0] // chunk)
    size = -(-x.shape[0] // chunks)
    pad = chunks * size - x.shape[0]
    x = jnp.pad(x, ((0, pad), (0, 0))).reshape(chunks, size, d)
    y, w = (jnp.pad(a, (0, pad)).reshape(chunks, size) for a in (y, w))
    total, parts = _chunks(x, kernel, y, w, scale, z_loss, label_smoothing)
    return LossSums(total, *jax.lax.stop_gradient(parts), weight=weights.sum())


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


Parts = tuple[jax.Array, jax.Array, jax.Array]
"""Loss, z-loss and correct tokens."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _losses(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float, smoothing: float
) -> tuple[jax.Array, Parts]:
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
    return (loss + z, (loss, z, correct)), (logits, targets, weights, log_z)


def _losses_backward(z_loss: float, smoothing: float, saved: Any, cotangents: Any) -> Any:
    logits, targets, weights, log_z = saved
    g, _ = cotangents
    extra, low, _ = _smoothing(logits.shape[-1], smoothing)
    probability = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    factor = g * weights * (1.0 + 2.0 * z_loss * log_z)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    wanted = jnp.where(is_target, extra + low, low)
    gradient = factor[..., None] * probability - (g * weights)[..., None] * wanted
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
) -> tuple[jax.Array, Parts]:
    def body(sums: Any, part: Any) -> tuple[Any, None]:
        x, y, w = part
        logits = _scaled(x, scale) @ kernel.astype(x.dtype)
        found, _ = _losses_forward(logits, y, w, z_loss, smoothing)
        return jax.tree.map(jnp.add, sums, found), None

    zero = jnp.zeros(())
    return jax.lax.scan(body, (zero, (zero,) * 3), (x, targets, weights))[0]


def _chunks_forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    scale: float,
    z_loss: float,
    smoothing: float,
) -> Any:
    narrow = kernel.astype(x.dtype)

    def body(carry: Any, part: Any) -> tuple[Any, jax.Array]:
        sums, dk = carry
        x, y, w = part
        x = _scaled(x, scale)
        found, kept = _losses_forward(x @ narrow, y, w, z_loss, smoothing)
        g, _, _ = _losses_backward(z_loss, smoothing, kept, (1.0, None))
        dk += jax.lax.dot_general(
            x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (jax.tree.map(jnp.add, sums, found), dk), _scaled(g @ narrow.T, scale)

    zero = jnp.zeros(())
    start = (zero, (zero,) * 3), jnp.zeros(kernel.shape, jnp.float32)
    (sums, dk), dx = jax.lax.scan(body, start, (x, targets, weights))
    return sums, (dx, dk.astype(kernel.dtype))


def _chunks_backward(
    scale: float, z_loss: float, smoothing: float, saved: Any, cotangents: Any
) -> Any:
    del scale, z_loss, smoothing
    g, _ = cotangents
    dx, dk = saved
    return (dx * g).astype(dx.dtype), (dk * g).astype(dk.dtype), None, None


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x * jnp.asarray(scale, x.dtype)
