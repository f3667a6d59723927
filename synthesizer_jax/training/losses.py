"""Cross-entropy with z-loss and label smoothing, as sums over real tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.partition import match_varying_axes
from synthesizer_jax.attention.products import plain_output_product


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
      logits: ``[b, t, v]``, any float dtype; the loss is computed in float32. The backward pass
        recomputes the softmax from the logits, so that no float32 array of their size is a residual.
      targets: ``[b, t]`` integers. Where the weight is 0 they are ignored and may have any value, such as
        -100; elsewhere a target outside of ``0 … v − 1`` makes the loss NaN.
      weights: ``[b, t]`` float32, 0 at padding; differentiable like the logits.
      z_loss: coefficient; a number or a scalar, differentiable too.
      label_smoothing: ε.
    """

    @jax.custom_vjp
    def losses(tokens: Tokens) -> Sums:
        return _losses(tokens, label_smoothing)[0]

    def forward(tokens: Tokens) -> tuple[Sums, tuple[Tokens, _TokenStats]]:
        sums, stats = _losses(tokens, label_smoothing)
        return sums, (tokens, stats)

    def backward(saved: tuple[Tokens, _TokenStats], cotangents: Sums) -> tuple[Tokens]:
        g = _part_cotangents(cotangents)
        return (_losses_backward(*saved, g, smoothing=label_smoothing),)

    losses.defvjp(forward, backward)
    tokens = Tokens(logits, jnp.asarray(targets), jnp.asarray(weights), jnp.float32(z_loss))
    total, parts = losses(Tokens(*match_varying_axes(*tokens)))
    return LossSums(total, *parts, weights.sum())


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

    The tokens are processed in chunks. Under differentiation the gradient of a chunk is computed right
    after its loss, from the same logits, so that no product is computed twice; the backward pass only
    scales it. Only the gradient of `loss` or `z_loss` by itself recomputes the logits.

    Args:
      hidden: ``[b, t, d]``; its dtype is that of the product.
      kernel: ``[d, v]`` float32.
      targets: ``[b, t]`` integers, as in `cross_entropy`.
      weights: ``[b, t]`` float32, as in `cross_entropy`.
      scale: factor of `hidden` (1/√d for tied embeddings).
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
      chunk: maximum number of tokens per chunk.
    """
    d = hidden.shape[-1]
    x, y, w = hidden.reshape(-1, d), targets.reshape(-1), weights.reshape(-1)
    num_chunks = max(1, -(-x.shape[0] // chunk))
    size = -(-x.shape[0] // num_chunks)
    padding = num_chunks * size - x.shape[0]
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(num_chunks, size, d)
    y, w = (jnp.pad(a, (0, padding)).reshape(num_chunks, size) for a in (y, w))
    chunks = _Chunks(*match_varying_axes(x, kernel, y, w, jnp.float32(z_loss)))
    total, parts = _chunked_losses(chunks, scale, label_smoothing)
    return LossSums(total, *parts, weights.sum())


def loss_denominator(weights: jax.Array, normalizer: float | str | None = None) -> jax.Array:
    """Returns what the summed loss is divided by.

    Args:
      weights: ``[b, t]`` of the whole batch.
      normalizer: None: the number of real target tokens. ``"tokens_with_padding"``: b·t, as models
        pretrained with Mesh-TensorFlow had it. A number: itself, such as T5's 2048 · 114 = 233,472,
        which keeps restored second moments of such models at their scale.

    Raises:
      ValueError: `normalizer` is any other string.
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


def _smoothed_target(vocab: int, smoothing: float) -> tuple[float, float, float]:
    """Returns label smoothing's target distribution.

    Returns:
      What the target's probability has beyond the others', the others' probability, the entropy.
    """
    if smoothing == 0.0:
        return 1.0, 0.0, 0.0
    low = smoothing / (vocab - 1)
    high = 1.0 - smoothing
    entropy = -(high * math.log(high) + (vocab - 1) * low * math.log(low + 1e-20))
    return high - low, low, entropy


_Number = TypeVar("_Number", bound=jax.Array | float, covariant=True)


class Parts(NamedTuple, Generic[_Number]):
    """The parts of the loss: of single tokens, summed, or the cotangents of the sums.

    Attributes:
      loss: cross-entropy.
      z_loss: ``log² Z``; the sum is multiplied by the coefficient.
      correct: 1 where the most probable token is the target.
    """

    loss: _Number
    z_loss: _Number
    correct: _Number


Sums: TypeAlias = tuple[jax.Array, Parts[jax.Array]]
"""The total and its parts."""

_PartCotangents: TypeAlias = Parts[jax.Array | float]


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


class _TokenStats(NamedTuple):
    """The residuals of every token, ``[…]`` each.

    ``log Z`` is kept as two numbers: where it is large, its own rounding would be an error of all
    probabilities.

    Attributes:
      loss: the cross-entropy.
      correct: 1 where the most probable token is the target.
      peak: the largest logit.
      total: ``Σ exp(logits − peak)``.
    """

    loss: jax.Array
    correct: jax.Array
    peak: jax.Array
    total: jax.Array

    def log_z(self) -> jax.Array:
        """Returns ``log Z``."""
        return self.peak + jnp.log(self.total)

    def parts(self) -> Parts[jax.Array]:
        """Returns the parts of every token."""
        return Parts(self.loss, self.log_z() ** 2, self.correct)


def _losses(tokens: Tokens, smoothing: float) -> tuple[Sums, _TokenStats]:
    """Returns the sums, and the residuals of `_losses_backward`."""
    logits, targets, weights, z_loss = tokens
    extra, low, entropy = _smoothed_target(logits.shape[-1], smoothing)
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
    correct = (logits32.argmax(axis=-1) == targets).astype(jnp.float32)
    stats = _TokenStats(loss, correct, peak, total)
    loss, z, correct = (_weighted_sum(weights, x) for x in stats.parts())
    return (loss + z_loss * z, Parts(loss, z_loss * z, correct)), stats


def _weighted_sum(weights: jax.Array, losses: jax.Array | float) -> jax.Array:
    """Returns the weighted sum; what has weight 0 is ignored, even NaN."""
    return jnp.where(weights == 0, 0.0, weights * losses).sum()


def _part_cotangents(cotangents: Sums) -> Parts[jax.Array]:
    """Returns the cotangents of the parts; the total is the sum of the first two."""
    total, parts = cotangents
    return Parts(total + parts.loss, total + parts.z_loss, parts.correct)


def _losses_backward(
    tokens: Tokens, stats: _TokenStats, g: _PartCotangents, *, smoothing: float
) -> Tokens:
    """Returns the inputs' cotangents.

    With p = softmax(l), y the smoothed target and w the weight of a token,
    ``dl = w (g_loss (p − y) + g_z · z_loss · 2 log Z · p)``.
    """
    logits, targets, weights, z_loss = tokens
    extra, low, _ = _smoothed_target(logits.shape[-1], smoothing)
    # The barrier keeps XLA from storing the exponentials of the forward pass, in float32.
    peak = jax.lax.optimization_barrier(stats.peak)
    exponential = jnp.exp(logits.astype(jnp.float32) - peak[..., None])
    factor = weights * (g.loss + 2.0 * z_loss * g.z_loss * stats.log_z()) / stats.total
    is_target = targets[..., None] == jax.lax.broadcasted_iota(
        targets.dtype, logits.shape, logits.ndim - 1
    )
    smoothed = jnp.where(is_target, extra + low, low)
    dlogits = factor[..., None] * exponential - (g.loss * weights)[..., None] * smoothed
    dlogits = jnp.where(jnp.isnan(stats.loss)[..., None], jnp.nan, dlogits)
    dlogits = jnp.where((weights == 0)[..., None], 0.0, dlogits).astype(logits.dtype)
    return Tokens(dlogits, targets, *_weight_cotangents(weights, stats.parts(), g, z_loss=z_loss))


def _weight_cotangents(
    weights: jax.Array, token_parts: Parts[jax.Array], g: _PartCotangents, *, z_loss: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of the weights and of the coefficient `z_loss`."""
    loss, z, correct = token_parts
    products = g.loss * loss + g.z_loss * z_loss * z + g.correct * correct
    return jnp.asarray(products).astype(weights.dtype), g.z_loss * _weighted_sum(weights, z)


class _Chunks(NamedTuple):
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


class _ChunkGradients(NamedTuple):
    """What is computed beside the sums of chunks.

    Attributes:
      dhidden: ``[chunks, n, d]``.
      dkernel: ``[d, v]``.
      token_parts: of every token, ``[chunks, n]`` each.
    """

    dhidden: jax.Array
    dkernel: jax.Array
    token_parts: Parts[jax.Array]


_Chunk: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
"""Hidden states ``[n, d]``, targets ``[n]`` and weights ``[n]`` of a chunk."""


def _chunked_losses(chunks: _Chunks, scale: float, smoothing: float) -> Sums:
    """Returns the sums. The total's gradient is computed with it, a part's alone from new logits."""

    @jax.custom_vjp
    def losses(chunks: _Chunks) -> Sums:
        return _sums(chunks, scale, smoothing)

    def forward(chunks: _Chunks) -> tuple[Sums, tuple[_Chunks, _ChunkGradients]]:
        sums, gradients = _sums_and_gradients(chunks, scale, smoothing, g=Parts(1.0, 1.0, 0.0))
        return sums, (chunks, gradients)

    def backward(saved: tuple[_Chunks, _ChunkGradients], cotangents: Sums) -> tuple[_Chunks]:
        (chunks, gradients), g = saved, cotangents[0]
        dweights = _weight_cotangents(
            chunks.weights, gradients.token_parts, Parts(g, g, 0.0), z_loss=chunks.z_loss
        )
        dhidden, dkernel = ((x * g).astype(x.dtype) for x in gradients[:2])
        return (_Chunks(dhidden, dkernel, chunks.targets, *dweights),)

    losses.defvjp(forward, backward)
    total, parts = losses(chunks)
    return total, _with_own_gradients(chunks, parts, scale=scale, smoothing=smoothing)


def _with_own_gradients(
    chunks: _Chunks, parts: Parts[jax.Array], *, scale: float, smoothing: float
) -> Parts[jax.Array]:
    """Returns parts that are computed already, with the gradients that each has by itself."""

    @jax.custom_vjp
    def losses(chunks: _Chunks, parts: Parts[jax.Array]) -> Parts[jax.Array]:
        del chunks
        return parts

    def backward(chunks: _Chunks, g: Parts[jax.Array]) -> tuple[_Chunks, Parts[jax.Array]]:
        _, gradients = _sums_and_gradients(chunks, scale, smoothing, g=g)
        dweights = _weight_cotangents(
            chunks.weights, gradients.token_parts, g, z_loss=chunks.z_loss
        )
        dchunks = _Chunks(gradients.dhidden, gradients.dkernel, chunks.targets, *dweights)
        return dchunks, jax.tree.map(jnp.zeros_like, g)

    losses.defvjp(lambda chunks, parts: (parts, chunks), backward)
    return losses(chunks, parts)


def _zero_sums() -> Sums:
    zero = jnp.zeros(())
    return zero, Parts(zero, zero, zero)


def _sums(chunks: _Chunks, scale: float, smoothing: float) -> Sums:
    """Returns the sums over all chunks."""
    kernel = chunks.kernel.astype(chunks.hidden.dtype)

    def add_chunk(sums: Sums, chunk: _Chunk) -> tuple[Sums, None]:
        x, y, w = chunk
        tokens = Tokens(plain_output_product(_scale(x, scale), kernel), y, w, chunks.z_loss)
        chunk_sums, _ = _losses(tokens, smoothing)
        return jax.tree.map(jnp.add, sums, chunk_sums), None

    rows = chunks.hidden, chunks.targets, chunks.weights
    return jax.lax.scan(add_chunk, *match_varying_axes(_zero_sums(), rows))[0]


def _sums_and_gradients(
    chunks: _Chunks, scale: float, smoothing: float, *, g: _PartCotangents
) -> tuple[Sums, _ChunkGradients]:
    """Returns the sums over all chunks and, from the same logits, the gradients."""
    kernel = chunks.kernel.astype(chunks.hidden.dtype)

    def add_chunk(
        carry: tuple[Sums, jax.Array], chunk: _Chunk
    ) -> tuple[tuple[Sums, jax.Array], tuple[jax.Array, Parts[jax.Array]]]:
        sums, dkernel = carry
        x, y, w = chunk
        x = _scale(x, scale)
        tokens = Tokens(plain_output_product(x, kernel), y, w, chunks.z_loss)
        chunk_sums, stats = _losses(tokens, smoothing)
        dlogits = _losses_backward(tokens, stats, g, smoothing=smoothing).logits.astype(x.dtype)
        dkernel += jax.lax.dot_general(  # dK += xᵀ dl
            x, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        dhidden = _scale(dlogits @ kernel.T, scale)  # dx = dl Kᵀ
        return (jax.tree.map(jnp.add, sums, chunk_sums), dkernel), (dhidden, stats.parts())

    start = _zero_sums(), jnp.zeros(chunks.kernel.shape, jnp.float32)
    rows = chunks.hidden, chunks.targets, chunks.weights
    (sums, dkernel), (dhidden, token_parts) = jax.lax.scan(
        add_chunk, *match_varying_axes(start, rows)
    )
    gradients = _ChunkGradients(dhidden, dkernel.astype(chunks.kernel.dtype), token_parts)
    return sums, gradients


def _scale(x: jax.Array, scale: float) -> jax.Array:
    return x * jnp.asarray(scale, x.dtype)
