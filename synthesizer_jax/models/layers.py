"""Small layers of a T5 that are not attention."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention.products import dense_product
from synthesizer_jax.initializers import FanIn, Initializer, Normal
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "linear": lambda x: x,
}


def rms_norm(x: jax.Array, *, name: str) -> jax.Array:
    """T5's normalisation, ``x / √(mean x² + 1e-6) · scale``, statistics in float32, no bias."""
    norm = nn.RMSNorm(
        epsilon=1e-6,
        dtype=x.dtype,
        scale_init=with_axes(nn.initializers.ones_init(), "norm"),
        name=name,
    )
    return norm(x)


class Dropout(nn.Module):
    """Dropout of whole features, one draw for all positions of an example, as in T5X.

    Active when the random stream ``dropout`` is given.
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[batch, length, d]`` in and out."""
        if self.rate == 0.0 or not self.has_rng("dropout"):
            return x
        keep = jax.random.bernoulli(
            self.make_rng("dropout"), 1.0 - self.rate, (x.shape[0], 1, x.shape[2])
        )
        return x * (keep / (1.0 - self.rate)).astype(x.dtype)


@register
class FeedForward(nn.Module):
    """T5's position-wise layer, ``(act₀(x W₀) ∘ act₁(x W₁) …) W_o`` without biases.

    Attributes:
      hidden_dim: width of the hidden layer.
      activations: one name of `ACTIVATIONS` per input matrix: ``("relu",)`` is T5 1.0,
        ``("gelu", "linear")`` the gated GELU of T5 1.1 (Shazeer 2020).
      dropout_rate: dropout of hidden features, broadcast over the length.
    """

    hidden_dim: int
    activations: tuple[str, ...] = ("gelu", "linear")
    dropout_rate: float = 0.0
    kernel_init: Initializer = FanIn()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[batch, length, d_model]`` in and out."""
        unknown = [a for a in self.activations if a not in ACTIVATIONS]
        if unknown:
            raise ValueError(
                f"FeedForward: activation {unknown[0]!r}; allowed: {', '.join(ACTIVATIONS)}"
            )

        def dense(features: int, name: str, *axes: str) -> nn.Dense:
            return nn.Dense(
                features,
                use_bias=False,
                dtype=x.dtype,
                kernel_init=with_axes(self.kernel_init, *axes),
                dot_general=dense_product,
                name=name,
            )

        gates = len(self.activations) > 1
        factors = [
            ACTIVATIONS[activation](
                dense(self.hidden_dim, f"wi_{i}" if gates else "wi", "embed", "mlp")(x)
            )
            for i, activation in enumerate(self.activations)
        ]
        hidden = Dropout(self.dropout_rate, name="dropout")(
            math.prod(factors[1:], start=factors[0])
        )
        return dense(x.shape[-1], "wo", "mlp", "embed")(hidden)


@register
class LearnedPositions(nn.Module):
    """A learned vector for every absolute position, ``embedding [max_length, d_model]``."""

    max_length: int
    embedding_init: Initializer = Normal(0.02)

    @nn.compact
    def __call__(self, positions: jax.Array, d_model: int) -> jax.Array:
        """Vectors ``[..., d_model]`` of integer positions ``[...]``."""
        if positions.shape[-1] > self.max_length:
            raise ValueError(
                f"LearnedPositions has max_length={self.max_length} but was given "
                f"{positions.shape[-1]} positions; build it with a larger max_length"
            )
        init = with_axes(self.embedding_init, "length", "embed")
        return self.param("embedding", init, (self.max_length, d_model))[positions]


@register
class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines of the position (Vaswani et al. 2017, section 3.5), no parameters."""

    @nn.compact
    def __call__(self, positions: jax.Array, d_model: int) -> jax.Array:
        """Vectors ``[..., d_model]`` of integer positions ``[...]``: sines, then cosines."""
        rates = 10_000.0 ** (-np.arange(0, d_model, 2) / d_model)
        angles = positions[..., None].astype(jnp.float32) * rates
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :d_model]
