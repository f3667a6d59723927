"""Cross-entropy with z-loss and label smoothing, summed over real target tokens.

`cross_entropy` and `chunked_cross_entropy` have custom gradients, which recompute the softmax
instead of storing it in float32. `cross_entropy` takes logits. `chunked_cross_entropy` takes the
states before the output projection and computes the logits of a few tokens at a time.
"""

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
    """Sums over the real target tokens of a batch, as float32 scalars.

    The fields are sums rather than means, so that the values of micro-batches can be added. Only
    `total` and `penalty` have gradients.

    Attributes:
      total: `loss` plus `z_loss`.
      loss: cross-entropy in nats, without z-loss.
      z_loss: ``coefficient · Σ log² Z``.
      num_correct: number of tokens whose most probable value is the target.
      weight: number of real tokens, which is the sum of the weights.
      penalty: the sum of the losses that modules add, such as the ponder cost of a Universal
        Transformer. Modules sow means in the collection `LOSSES`. `step.loss_sums` multiplies the
        means by the number of real targets, so that the penalty is a sum like the other fields.
    """

    total: jax.Array
    loss: jax.Array
    z_loss: jax.Array
    num_correct: jax.Array
    weight: jax.Array
    penalty: jax.Array | float = 0.0


class _Settings(NamedTuple):
    """The settings of the loss.

    The settings are a static argument of the custom gradients, so they must be hashable.
    """

    z_loss: float
    smoothing: float
    scale: float = 1.0
    soft_cap: float | None = None


class _Sums(NamedTuple):
    """The sums that the custom gradients return; see `LossSums`."""

    total: jax.Array
    loss: jax.Array
    z_loss: jax.Array
    num_correct: jax.Array


class _Residuals(NamedTuple):
    """The residuals of every token, from which the backward pass recomputes the softmax.

    The residuals contain ``log Z`` as the two numbers `peak` and `denominator`. If ``log Z`` was
    rounded to a single number, the rounding error would change all probabilities.

    Attributes:
      is_nan: whether the loss of the token is NaN, because of its target or its logits.
      peak: the largest logit.
      denominator: ``Σ exp(logits − peak)``, the denominator of the softmax divided by
        ``exp(peak)``.
    """

    is_nan: jax.Array
    peak: jax.Array
    denominator: jax.Array


@jax.named_scope("loss")
def cross_entropy(
    logits: jax.Array,
    targets: jax.Array,
    *,
    weights: jax.Array,
    z_loss: float = 1e-4,
    label_smoothing: float = 0.0,
) -> LossSums:
    """Returns T5's loss of given logits: cross-entropy with label smoothing, and z-loss.

    The cross-entropy is ``Σ_t w_t (H(y_t, softmax(l_t)) − H(y_t))``. The z-loss is
    ``z_loss · Σ_t w_t log² Z_t``. The smoothed target distribution ``y_t`` gives the target the
    probability 1 − ε and every other value the probability ε / (v − 1). As in T5X, the entropy of
    ``y_t`` is subtracted, so that the optimal loss is 0.

    Args:
      logits: ``[b, t, v]``, of any float dtype. The loss is computed in float32. The backward pass
        recomputes the softmax from the logits, so no float32 array of the logits' size is stored.
      targets: ``[b, t]`` integers. Targets with weight 0 are ignored and may have any value, such
        as -100. Any other target outside of ``0 … v − 1`` makes the loss NaN.
      weights: ``[b, t]`` float32, which is 0 for padding. The weights have no gradient.
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
    """
    arrays = match_varying_axes(
        logits, jnp.asarray(targets).astype(jnp.int32), jnp.asarray(weights)
    )
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
    """Returns `cross_entropy` of the logits ``(scale · hidden) kernel`` without storing all logits.

    The tokens are processed in chunks. When gradients are computed, the gradient of a chunk follows
    directly after its loss and uses the same logits, so no matrix product is computed twice. The
    backward pass only multiplies the stored gradients by the incoming gradient.

    Args:
      hidden: ``[b, t, d]``. The dtype of `hidden` is also the dtype of the matrix product.
      kernel: ``[d, v]``. The kernel is cast to the dtype of `hidden`.
      targets: ``[b, t]`` integers, as in `cross_entropy`.
      weights: ``[b, t]`` float32, as in `cross_entropy`.
      scale: factor of `hidden`, such as 1/√d for tied embeddings.
      z_loss: coefficient of log² Z.
      label_smoothing: ε.
      soft_cap: the cap of the logits. Each logit x is replaced by
        ``soft_cap · tanh(x / soft_cap)``. None leaves the logits unchanged.
      chunk: maximum number of tokens per chunk. The default is an eighth of all tokens, but at
        least 512 and at most 2,048. Smaller chunks need less memory for logits, but every chunk
        reads and writes the whole gradient of the kernel.
    """
    d = hidden.shape[-1]
    x = hidden.reshape(-1, d)
    y = targets.reshape(-1).astype(jnp.int32)
    w = weights.reshape(-1)
    num_tokens = x.shape[0]

    # The tokens are divided into chunks of equal size. Padding tokens at the end have weight 0.
    chunk = chunk or min(max(512, num_tokens // 8), 2048)
    num_chunks = max(1, math.ceil(num_tokens / chunk))
    size = math.ceil(num_tokens / num_chunks)
    padding = num_chunks * size - num_tokens
    x = jnp.pad(x, ((0, padding), (0, 0))).reshape(num_chunks, size, d)
    y = jnp.pad(y, (0, padding)).reshape(num_chunks, size)
    w = jnp.pad(w, (0, padding)).reshape(num_chunks, size)

    arrays = match_varying_axes(x, kernel, y, w)
    sums = _chunked_losses(*arrays, _Settings(z_loss, label_smoothing, scale, soft_cap))
    return LossSums(*sums, weights.sum())


def loss_denominator(weights: jax.Array, normalizer: float | str | None = None) -> jax.Array:
    """Returns the number by which the summed loss is divided.

    Args:
      weights: ``[b, t]`` of the whole batch.
      normalizer: None returns the number of real target tokens. ``"tokens_with_padding"`` returns
        b·t, as in the training of models that were pretrained with Mesh-TensorFlow. If the
        normalizer is a number, it is returned unchanged. For example, T5's 2048 · 114 = 233,472
        matches the scale of the second moments in the optimizer states of T5 models.
    """
    if normalizer is None:
        return jnp.maximum(weights.sum(), 1.0)
    if normalizer == "tokens_with_padding":
        return jnp.asarray(float(weights.size))
    return jnp.asarray(float(normalizer))


def _smoothed_target(vocab: int, smoothing: float) -> tuple[float, float, float]:
    """Returns three numbers that describe the smoothed target distribution.

    Returns:
      A tuple of three numbers. The first number is the probability of the target minus the
      probability of any other value. The second number is the probability of any other value. The
      third number is the entropy of the distribution.
    """
    if smoothing == 0.0:
        return 1.0, 0.0, 0.0
    low = smoothing / (vocab - 1)
    high = 1.0 - smoothing
    # T5X adds 1e-20 so that the logarithm is finite without smoothing. Here, it only keeps the
    # entropy equal to T5X's.
    entropy = -(high * math.log(high) + (vocab - 1) * low * math.log(low + 1e-20))
    return high - low, low, entropy


def _losses(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings
) -> tuple[_Sums, _Residuals]:
    """Returns the sums over all tokens, and the residuals for `_logits_gradient`."""
    extra, low, entropy = _smoothed_target(logits.shape[-1], settings.smoothing)
    logits32 = logits.astype(jnp.float32)

    # Compute `denominator`, the denominator of the softmax divided by exp(peak).
    peak = jax.lax.stop_gradient(logits32.max(axis=-1))
    # If all logits of a token are −∞, subtracting the peak would give NaN.
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    denominator = jnp.exp(logits32 - peak[..., None]).sum(axis=-1)

    valid = (targets >= 0) & (targets < logits.shape[-1])
    target = jnp.where(valid, targets, 0)[..., None]
    # `at_target` is the logit of the target minus the peak. An invalid target reads the logit at 0.
    at_target = jnp.take_along_axis(logits, target, axis=-1)[..., 0].astype(jnp.float32) - peak
    # `expected` is the mean of (logit − peak) under the smoothed target distribution.
    expected = extra * at_target
    if low:
        expected += low * (logits32.sum(axis=-1) - logits.shape[-1] * peak)
    loss = jnp.where(valid, jnp.log(denominator) - expected - entropy, 0.0)
    loss = jnp.where(valid | (weights == 0), loss, jnp.nan)

    # A prediction is correct if the target is the first of the largest logits. On CPUs, an argmax
    # would take ten times as long as the comparisons below.
    ids = jax.lax.broadcasted_iota(target.dtype, logits.shape, logits.ndim - 1)
    earlier = ((logits32 == peak[..., None]) & (ids < target)).any(axis=-1)
    is_correct = (valid & (at_target == 0) & ~earlier).astype(jnp.float32)

    def weighted_sum(x: jax.Array) -> jax.Array:
        """Returns the sum over tokens of `x`, multiplied by the weights of the tokens."""
        # The product of a NaN loss and the weight 0 would be NaN, so `where` selects 0 instead.
        return jnp.where(weights == 0, 0.0, weights * x).sum()

    log_z = peak + jnp.log(denominator)
    loss_sum = weighted_sum(loss)
    z_loss = settings.z_loss * weighted_sum(log_z**2)
    sums = _Sums(
        total=loss_sum + z_loss, loss=loss_sum, z_loss=z_loss, num_correct=weighted_sum(is_correct)
    )
    return sums, _Residuals(is_nan=jnp.isnan(loss), peak=peak, denominator=denominator)


def _logits_gradient(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    residuals: _Residuals,
    settings: _Settings,
    g: jax.Array | float,
) -> jax.Array:
    """Returns the gradient of the total loss with respect to the logits, in their dtype and shape.

    The gradient is ``g w (p − y + z_loss · 2 log Z · p)``. In this formula, g is the gradient of
    the total, w is the weight of a token, p is the softmax of its logits, and y is its smoothed
    target.
    """
    extra, low, _ = _smoothed_target(logits.shape[-1], settings.smoothing)
    # Without the barrier, XLA would store the float32 exponentials of the forward pass for this
    # function instead of computing them again from the logits.
    peak = jax.lax.optimization_barrier(residuals.peak)
    exponential = jnp.exp(logits.astype(jnp.float32) - peak[..., None])
    log_z = residuals.peak + jnp.log(residuals.denominator)
    # `factor` is the sum of all coefficients of p, divided by the softmax's denominator.
    factor = weights * (g + 2.0 * settings.z_loss * g * log_z) / residuals.denominator

    is_target = targets[..., None] == jax.lax.broadcasted_iota(
        targets.dtype, logits.shape, logits.ndim - 1
    )
    smoothed = jnp.where(is_target, extra + low, low)
    dlogits = factor[..., None] * exponential - (g * weights)[..., None] * smoothed
    dlogits = jnp.where(residuals.is_nan[..., None], jnp.nan, dlogits)
    return jnp.where((weights == 0)[..., None], 0.0, dlogits).astype(logits.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense_losses(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings
) -> _Sums:
    """Returns the sums of `cross_entropy`, differentiable by `_dense_backward`."""
    return _losses(logits, targets, weights, settings)[0]


def _dense_forward(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, settings: _Settings
) -> tuple[_Sums, tuple[jax.Array, jax.Array, jax.Array, _Residuals]]:
    """Returns the sums, and the residuals of the backward pass."""
    sums, residuals = _losses(logits, targets, weights, settings)
    return sums, (logits, targets, weights, residuals)


def _dense_backward(
    settings: _Settings, saved: tuple[jax.Array, jax.Array, jax.Array, _Residuals], g: _Sums
) -> tuple[jax.Array, None, None]:
    """Returns the gradient of the logits, and None for arguments without a gradient."""
    return _logits_gradient(*saved, settings, g.total), None, None


_dense_losses.defvjp(_dense_forward, _dense_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked_losses(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    settings: _Settings,
) -> _Sums:
    """Returns the sums of `chunked_cross_entropy`, differentiable by `_chunked_backward`."""
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
    """Returns the sums over all chunks and, if `gradient` is true, the gradients of the total loss.

    If `gradient` is true, this function is the forward pass of the custom gradient. The logits of
    each chunk are then used for both the loss and the gradients of the chunk.

    Args:
      hidden: ``[chunks, n, d]``.
      kernel: ``[d, v]``.
      targets: ``[chunks, n]``.
      weights: ``[chunks, n]``.
      settings: the settings of the loss.
      gradient: whether to compute gradients.

    Returns:
      The sums, and a pair with the gradients of `hidden` and `kernel`. The pair is `None` if
      `gradient` is false.
    """
    cast_kernel = kernel.astype(hidden.dtype)

    def add_chunk(carry: PyTree, chunk: tuple[jax.Array, ...]) -> tuple[PyTree, jax.Array | None]:
        """Adds a chunk to the sums and to `dkernel`, and returns the chunk's part of `dhidden`."""
        sums, dkernel = carry
        x, y, w = chunk
        # x is [n, d], and the logits are [n, v].
        x = x * jnp.asarray(settings.scale, x.dtype)
        logits = cap_logits(plain_output_product(x, cast_kernel), settings.soft_cap)
        chunk_sums, residuals = _losses(logits, y, w, settings)
        sums = jax.tree.map(jnp.add, sums, chunk_sums)
        if not gradient:
            return (sums, None), None
        dlogits = _logits_gradient(logits, y, w, residuals, settings, 1.0)
        if settings.soft_cap is not None:
            # The derivative of soft_cap · tanh(x / soft_cap) is 1 − tanh², and `logits` are already
            # capped.
            dlogits *= 1.0 - jnp.square(logits / settings.soft_cap)
        dlogits = dlogits.astype(x.dtype)
        dkernel += jax.lax.dot_general(  # dK += xᵀ dl
            x, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        dhidden = dlogits @ cast_kernel.T  # dx = dl Kᵀ
        return (sums, dkernel), dhidden * jnp.asarray(settings.scale, x.dtype)

    zero = jnp.zeros(())
    sums = _Sums(total=zero, loss=zero, z_loss=zero, num_correct=zero)
    dkernel = jnp.zeros(kernel.shape, jnp.float32) if gradient else None
    carry, chunks = match_varying_axes((sums, dkernel), (hidden, targets, weights))
    (sums, dkernel), dhidden = jax.lax.scan(add_chunk, carry, chunks)
    if dkernel is None:
        return sums, None
    return sums, (dhidden, dkernel.astype(kernel.dtype))


def _chunked_backward(
    settings: _Settings, gradients: tuple[jax.Array, jax.Array], g: _Sums
) -> tuple[jax.Array, jax.Array, None, None]:
    """Scales the gradients of the forward pass by the incoming gradient `g.total`."""
    dhidden, dkernel = gradients
    dhidden = (dhidden * g.total).astype(dhidden.dtype)
    dkernel = (dkernel * g.total).astype(dkernel.dtype)
    return dhidden, dkernel, None, None


_chunked_losses.defvjp(_scan_chunks, _chunked_backward)
