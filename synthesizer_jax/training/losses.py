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
      targets: ``[b, t]`` integers. Where the weight is 0 they are ignored and may be any, such as
        -100; elsewhere one outside of ``0 … v − 1`` makes the loss NaN.
      weights: ``[b, t]`` float32, 0 at padding; differentiable like the logits.
      z_loss: coefficient.
      label_smoothing: ε.
    """
    total, parts = _losses(logits, targets, weights, z_loss, label_smoothing)
    return LossSums(total, *parts, weight=weights.sum())


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
    from the same logits, so that no product is computed twice; the backward pass only scales it. Only
    the gradient of `loss` or `z_loss` by itself makes the logits again.

    Args:
      hidden: ``[b, t, d]``; its dtype is that of the product.
      kernel: ``[d, v]`` float32.
      targets: ``[b, t]`` integers, as in `cross_entropy`.
      weights: ``[b, t]`` float32, as in `cross_entropy`.
      scale: factor of `hidden` (1/√d for tied embeddings).
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
      chunk: most tokens per chunk.
    """
    d = hidden.shape[-1]
    x, y, w = hidden.reshape(-1, d), targets.reshape(-1), weights.reshape(-1)
    chunks = max(1, -(-x.shape[0] // chunk))
    size = -(-x.shape[0] // chunks)
    pad = chunks * size - x.shape[0]
    x = jnp.pad(x, ((0, pad), (0, 0))).reshape(chunks, size, d)
    y, w = (jnp.pad(a, (0, pad)).reshape(chunks, size) for a in (y, w))
    total, parts = _chunks(x, kernel, y, w, scale, z_loss, label_smoothing)
    parts = _parts(parts, x, kernel, y, w, scale, z_loss, label_smoothing)
    return LossSums(total, *parts, weight=weights.sum())


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
    known = (targets >= 0) & (targets < logits.shape[-1])
    at_target = jnp.take_along_axis(wide, jnp.where(known, targets, 0)[..., None], axis=-1)[..., 0]
    expected = extra * at_target + (low * wide.sum(axis=-1) if low else 0.0)
    wrong = jnp.where(weights == 0, 0.0, jnp.nan)
    loss = jnp.where(known, log_z - expected - entropy, wrong)
    z = z_loss * log_z**2
    correct = (wide.argmax(axis=-1) == targets).astype(jnp.float32)
    sums = _weigh(weights, loss), _weigh(weights, z), _weigh(weights, correct)
    saved = (logits, targets, weights, log_z, (loss, z, correct))
    return (sums[0] + sums[1], sums), saved


def _weigh(weights: jax.Array, losses: jax.Array) -> jax.Array:
    """The weighted sum; what has weight 0 is ignored, whatever it is."""
    return jnp.where(weights == 0, 0.0, weights * losses).sum()


def _losses_backward(z_loss: float, smoothing: float, saved: Any, cotangents: Any) -> Any:
    logits, targets, weights, log_z, each = saved
    total, (loss, z, correct) = cotangents
    loss, z = total + loss, total + z
    extra, low, _ = _smoothing(logits.shape[-1], smoothing)
    probability = jnp.exp(logits.astype(jnp.float32) - log_z[..., None])
    factor = weights * (loss + 2.0 * z_loss * z * log_z)
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    wanted = jnp.where(is_target, extra + low, low)
    gradient = factor[..., None] * probability - (loss * weights)[..., None] * wanted
    gradient = jnp.where((weights == 0)[..., None], 0.0, gradient)
    return gradient.astype(logits.dtype), None, _for_weights(weights, each, (loss, z, correct))


def _for_weights(weights: jax.Array, each: Parts, cotangents: Parts) -> jax.Array | None:
    """The weights' gradient, from every token's loss, z-loss and hit."""
    if not jnp.issubdtype(weights.dtype, jnp.floating):
        return None
    products = [c * x for c, x in zip(cotangents, each, strict=True)]
    return sum(products, start=jnp.zeros(())).astype(weights.dtype)


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
    sums, saved = _with_gradients(x, kernel, targets, weights, scale, z_loss, smoothing, _TOTAL)
    return sums, (*saved, weights)


def _with_gradients(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    scale: float,
    z_loss: float,
    smoothing: float,
    cotangents: Any,
) -> Any:
    """The sums of all chunks; the gradients of the tokens and the kernel, and every token's parts."""
    narrow = kernel.astype(x.dtype)

    def body(carry: Any, part: Any) -> tuple[Any, Any]:
        sums, dk = carry
        x, y, w = part
        x = _scaled(x, scale)
        found, kept = _losses_forward(x @ narrow, y, w, z_loss, smoothing)
        g, _, _ = _losses_backward(z_loss, smoothing, kept, cotangents)
        dk += jax.lax.dot_general(
            x, g, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return (jax.tree.map(jnp.add, sums, found), dk), (_scaled(g @ narrow.T, scale), kept[-1])

    zero = jnp.zeros(())
    start = (zero, (zero,) * 3), jnp.zeros(kernel.shape, jnp.float32)
    (sums, dk), (dx, each) = jax.lax.scan(body, start, (x, targets, weights))
    return sums, (dx, dk.astype(kernel.dtype), each)


_TOTAL = (1.0, (0.0, 0.0, 0.0))
"""Cotangents for the gradient of the total alone."""


def _chunks_backward(
    scale: float, z_loss: float, smoothing: float, saved: Any, cotangents: Any
) -> Any:
    """The total's gradient; that of the parts belongs to `_parts`."""
    del scale, z_loss, smoothing
    g, _ = cotangents
    dx, dk, each, weights = saved
    dw = _for_weights(weights, each, (g, g, jnp.zeros(())))
    return (dx * g).astype(dx.dtype), (dk * g).astype(dk.dtype), None, dw


_chunks.defvjp(_chunks_forward, _chunks_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _parts(
    parts: Parts,
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    scale: float,
    z_loss: float,
    smoothing: float,
) -> Parts:
    """The parts as `_chunks` found them, with their gradient."""
    del x, kernel, targets, weights, scale, z_loss, smoothing
    return parts


def _parts_forward(parts: Parts, *arguments: Any) -> Any:
    return parts, arguments[:4]


def _parts_backward(
    scale: float, z_loss: float, smoothing: float, saved: Any, cotangents: Parts
) -> Any:
    x, kernel, targets, weights = saved
    _, (dx, dk, each) = _with_gradients(
        x, kernel, targets, weights, scale, z_loss, smoothing, (0.0, cotangents)
    )
    none = jax.tree.map(jnp.zeros_like, cotangents)
    return none, dx, dk, None, _for_weights(weights, each, cotangents)


_parts.defvjp(_parts_forward, _parts_backward)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x * jnp.asarray(scale, x.dtype)
