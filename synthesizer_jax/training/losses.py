"""Cross-entropy with z-loss and label smoothing, as sums over real tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.attention.parts import vary_alike


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
    z_loss: float | jax.Array = 1e-4,
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
      z_loss: coefficient; a number or a scalar, differentiable too.
      label_smoothing: ε.
    """
    losses = with_gradient(
        lambda tokens: _losses(tokens, label_smoothing),
        lambda tokens, _, kept, g: _losses_backward(tokens, kept, _of_parts(g), label_smoothing),
        lambda tokens: _plain_losses(tokens, label_smoothing),
    )
    tokens = Tokens(logits, jnp.asarray(targets), jnp.asarray(weights), jnp.float32(z_loss))
    total, parts = losses(Tokens(*vary_alike(*tokens)))
    loss, z, correct = parts
    return LossSums(total, loss, z, correct, weights.sum())


def chunked_cross_entropy(
    hidden: jax.Array,
    kernel: jax.Array,
    *,
    targets: jax.Array,
    weights: jax.Array,
    scale: float = 1.0,
    z_loss: float | jax.Array = 1e-4,
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
    given = Chunks(*vary_alike(x, kernel, y, w, jnp.float32(z_loss)))
    total, parts = _chunked_losses(given, scale, label_smoothing)
    loss, z, correct = parts
    return LossSums(total, loss, z, correct, weights.sum())


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


Parts = tuple[Any, Any, Any]
"""Cross-entropy, z-loss (of single tokens ``log² Z`` alone) and correct tokens."""

Sums = tuple[jax.Array, Parts]
"""The total and its parts."""


class Tokens(NamedTuple):
    """What losses depend on, given logits.

    Attributes:
      logits: ``[…, v]``.
      targets: ``[…]`` integers.
      weights: ``[…]``.
      z_loss: coefficient of ``log² Z``, a float32 scalar.
    """

    logits: jax.Array
    targets: jax.Array
    weights: jax.Array
    z_loss: jax.Array


class Kept(NamedTuple):
    """What is kept of every token, ``[…]`` each.

    ``log Z`` is kept as two numbers: where it is large, its own rounding would be an error of all
    probabilities.

    Attributes:
      loss: the cross-entropy.
      correct: 1 where the most probable value is the target.
      peak: the largest logit.
      total: ``Σ exp(logits − peak)``.
    """

    loss: jax.Array
    correct: jax.Array
    peak: jax.Array
    total: jax.Array

    def log_z(self) -> jax.Array:
        """``log Z``."""
        return self.peak + jnp.log(self.total)

    def parts(self) -> Parts:
        """Every token's parts."""
        return self.loss, self.log_z() ** 2, self.correct


def _losses(tokens: Tokens, smoothing: float) -> tuple[Sums, Kept]:
    """The sums, and what `_losses_backward` needs."""
    logits, targets, weights, z_loss = tokens
    extra, low, entropy = _smoothing(logits.shape[-1], smoothing)
    wide = logits.astype(jnp.float32)
    peak = jax.lax.stop_gradient(wide.max(axis=-1))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    total = jnp.exp(wide - peak[..., None]).sum(axis=-1)
    known = (targets >= 0) & (targets < logits.shape[-1])
    target = jnp.where(known, targets, 0)[..., None]
    at_target = jnp.take_along_axis(logits, target, axis=-1)[..., 0].astype(jnp.float32) - peak
    expected = extra * at_target
    if low:
        expected += low * (wide.sum(axis=-1) - logits.shape[-1] * peak)
    wrong = jnp.where(weights == 0, 0.0, jnp.nan)
    loss = jnp.where(known, jnp.log(total) - expected - entropy, wrong)
    correct = (wide.argmax(axis=-1) == targets).astype(jnp.float32)
    kept = Kept(loss, correct, peak, total)
    loss, z, correct = (_weigh(weights, x) for x in kept.parts())
    return (loss + z_loss * z, (loss, z_loss * z, correct)), kept


def _weigh(weights: jax.Array, losses: jax.Array) -> jax.Array:
    """The weighted sum; what has weight 0 is ignored, whatever it is."""
    return jnp.where(weights == 0, 0.0, weights * losses).sum()


def _of_parts(cotangents: Sums) -> Parts:
    """The parts' cotangents, those of the total among them."""
    total, (loss, z, correct) = cotangents
    return total + loss, total + z, correct


def _losses_backward(tokens: Tokens, kept: Kept, g: Parts, smoothing: float) -> Tokens:
    """The inputs' cotangents from those of the parts."""
    logits, targets, weights, z_loss = tokens
    extra, low, _ = _smoothing(logits.shape[-1], smoothing)
    # The barrier keeps XLA from storing the exponentials of the forward pass, in float32.
    peak = jax.lax.optimization_barrier(kept.peak)
    exponential = jnp.exp(logits.astype(jnp.float32) - peak[..., None])
    factor = weights * (g[0] + 2.0 * z_loss * g[1] * kept.log_z()) / kept.total
    is_target = targets[..., None] == jnp.arange(logits.shape[-1])
    wanted = jnp.where(is_target, extra + low, low)
    gradient = factor[..., None] * exponential - (g[0] * weights)[..., None] * wanted
    gradient = jnp.where(jnp.isnan(kept.loss)[..., None], jnp.nan, gradient)  # as the loss
    gradient = jnp.where((weights == 0)[..., None], 0.0, gradient).astype(logits.dtype)
    return Tokens(gradient, targets, *_for_weights(weights, kept.parts(), g, z_loss))


def _for_weights(
    weights: jax.Array, each: Parts, g: Parts, z_loss: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of the weights and of `z_loss`, from every token's parts."""
    loss, z, correct = each
    products = g[0] * loss + g[1] * z_loss * z + g[2] * correct
    return products.astype(weights.dtype), g[1] * _weigh(weights, z)


def _plain_losses(tokens: Tokens, smoothing: float) -> Sums:
    """The sums for JAX to differentiate; logits of weight 0 may be NaN and have no gradient."""
    ignored = (tokens.weights == 0)[..., None]
    logits = jnp.where(ignored, 0.0, tokens.logits)
    return _losses(tokens._replace(logits=logits), smoothing)[0]


class Chunks(NamedTuple):
    """What the losses of chunks depend on.

    Attributes:
      hidden: ``[chunks, n, d]``.
      kernel: ``[d, v]``.
      targets: ``[chunks, n]`` integers.
      weights: ``[chunks, n]``.
      z_loss: as in `Tokens`.
    """

    hidden: jax.Array
    kernel: jax.Array
    targets: jax.Array
    weights: jax.Array
    z_loss: jax.Array


def _chunked_losses(chunks: Chunks, scale: float, smoothing: float) -> Sums:
    """The sums; the gradient of the total is made with it, that of a part alone from new logits."""

    def forward(chunks: Chunks) -> tuple[Sums, Any]:
        return _sums_and_gradients(chunks, scale, smoothing, (1.0, 1.0, 0.0))

    def backward(chunks: Chunks, _: Sums, kept: Any, g: Sums) -> Chunks:
        dx, dk, each = kept
        small = _for_weights(chunks.weights, each, (g[0], g[0], 0.0), chunks.z_loss)
        dx, dk = ((x * g[0]).astype(x.dtype) for x in (dx, dk))
        return Chunks(dx, dk, chunks.targets, *small)

    def plain(chunks: Chunks) -> Sums:
        total, parts = _sums(chunks, scale, smoothing, _plain_losses)
        return total, jax.lax.stop_gradient(parts)

    def backward_of_parts(given: Any, _: Parts, kept: None, g: Parts) -> Any:
        del kept
        chunks, parts = given
        _, (dx, dk, each) = _sums_and_gradients(chunks, scale, smoothing, g)
        small = _for_weights(chunks.weights, each, g, chunks.z_loss)
        return Chunks(dx, dk, chunks.targets, *small), jax.tree.map(jnp.zeros_like, parts)

    def primal(chunks: Chunks) -> Sums:
        return _sums(chunks, scale, smoothing, lambda *x: _losses(*x)[0])

    total, parts = with_gradient(forward, backward, plain, primal=primal)(chunks)
    with_their_gradient = with_gradient(
        lambda given: (given[1], None),
        backward_of_parts,
        lambda given: _sums(given[0], scale, smoothing, _plain_losses)[1],
    )
    return total, with_their_gradient((chunks, parts))


def _sums(
    chunks: Chunks, scale: float, smoothing: float, losses: Callable[[Tokens, float], Sums]
) -> Sums:
    narrow = chunks.kernel.astype(chunks.hidden.dtype)

    def body(sums: Sums, part: Any) -> tuple[Sums, None]:
        x, y, w = part
        found = losses(Tokens(_scaled(x, scale) @ narrow, y, w, chunks.z_loss), smoothing)
        return jax.tree.map(jnp.add, sums, found), None

    zero = jnp.zeros(())
    rows = chunks.hidden, chunks.targets, chunks.weights
    return jax.lax.scan(body, *vary_alike((zero, (zero,) * 3), rows))[0]


def _sums_and_gradients(chunks: Chunks, scale: float, smoothing: float, g: Parts) -> Any:
    """The sums; the gradients of hidden states and kernel, given the parts'; every token's parts."""
    narrow = chunks.kernel.astype(chunks.hidden.dtype)

    def body(carry: Any, part: Any) -> tuple[Any, Any]:
        sums, dk = carry
        x, y, w = part
        x = _scaled(x, scale)
        tokens = Tokens(x @ narrow, y, w, chunks.z_loss)
        found, kept = _losses(tokens, smoothing)
        dlogits = _losses_backward(tokens, kept, g, smoothing).logits
        dk += jax.lax.dot_general(
            x, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        dx = _scaled(dlogits @ narrow.T, scale)
        return (jax.tree.map(jnp.add, sums, found), dk), (dx, kept.parts())

    zero = jnp.zeros(())
    start = (zero, (zero,) * 3), jnp.zeros(chunks.kernel.shape, jnp.float32)
    rows = chunks.hidden, chunks.targets, chunks.weights
    (sums, dk), (dx, each) = jax.lax.scan(body, *vary_alike(start, rows))
    return sums, (dx, dk.astype(chunks.kernel.dtype), each)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    return x * jnp.asarray(scale, x.dtype)
