"""Normalization layers, which save only their input and statistics for the backward pass."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Positive
from synthesizer_jax.primitives.parameters import with_axes

_save_statistics = functools.partial(
    jax.checkpoint,
    prevent_cse=False,
    static_argnums=1,
    policy=jax.checkpoint_policies.save_only_these_names("statistic"),
)
"""Limits the residuals of a normalization to its input and the statistics of each row.

Without this policy, JAX would also save copies of the input in float32.
"""


@_save_statistics
def _rms_norm(x: jax.Array, epsilon: float, scale: jax.Array) -> jax.Array:
    """Divides ``[..., d]`` by its root mean square, and multiplies by the scale ``[d]``."""
    x32 = x.astype(logits_dtype(x))
    # `checkpoint_name` marks the statistic [..., 1], which `_save_statistics` keeps for the
    # backward pass.
    inverse_rms = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + epsilon)
    scale = scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x32 * (checkpoint_name(inverse_rms, "statistic") * scale)).astype(x.dtype)


@_save_statistics
def _layer_norm(
    x: jax.Array, epsilon: float, scale_and_bias: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Normalizes ``[..., d]`` to mean 0 and variance 1, and applies the scale and the bias."""
    scale, bias = (p.reshape((1,) * (x.ndim - 1) + p.shape) for p in scale_and_bias)
    x32 = x.astype(logits_dtype(x))
    # The mean and the standard deviation have the shape [..., 1].
    x32 = x32 - checkpoint_name(x32.mean(-1, keepdims=True), "statistic")
    inverse_stddev = jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + epsilon)
    return (x32 * checkpoint_name(inverse_stddev, "statistic") * scale + bias).astype(x.dtype)


@register
class RMSNorm(nn.Module):
    """T5's normalization, ``x / √(mean x² + ε) · (offset + scale)``, without a bias.

    The statistics are computed in float32.

    Attributes:
      epsilon: the constant ε, which avoids a division by zero.
      offset: a constant that is added to the learned scale. T5 uses 0, and Gemma uses 1. The scale
        is initialized to ``1 − offset``, so that every feature is multiplied by 1 at the start of
        training.
    """

    epsilon: Positive = 1e-6
    offset: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., d]``."""
        init = nn.initializers.constant(1.0 - self.offset)
        scale = self.param("scale", with_axes(init, "norm"), x.shape[-1:])
        return _rms_norm(x, self.epsilon, scale + self.offset if self.offset else scale)


@register
class LayerNorm(nn.Module):
    """Layer normalization, ``(x − mean) / √(variance + ε) · scale + bias`` (Ba et al. 2016).

    The statistics are computed in float32.

    Attributes:
      epsilon: the constant ε, which avoids a division by zero.
    """

    epsilon: Positive = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalizes ``[..., d]``."""
        size = x.shape[-1:]
        scale = self.param("scale", with_axes(nn.initializers.ones_init(), "norm"), size)
        bias = self.param("bias", with_axes(nn.initializers.zeros_init(), "norm"), size)
        return _layer_norm(x, self.epsilon, (scale, bias))
