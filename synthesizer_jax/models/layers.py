"""The layers of T5 except attention: feed-forward layers, dropout and position embeddings."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Annotated, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments.base import dense_layer
from synthesizer_jax.attention.masks import is_concrete
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Length, NotEmpty, Rate
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.parameters import with_axes

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "linear": lambda x: x,
}
Activation: TypeAlias = Annotated[str, Choices(tuple(ACTIVATIONS))]


class Dropout(nn.Module):
    """Dropout of whole features or of single elements.

    As in T5X, all positions of an example share one random draw for each feature. If `elementwise`
    is True, every position has its own draw. Dropout is active if the random stream ``dropout`` is
    given.

    Attributes:
      rate: probability of dropping a feature or an element.
      elementwise: whether every position has its own random draw.
    """

    rate: float
    elementwise: bool = False

    def __call__(self, x: jax.Array) -> jax.Array:
        """Applies dropout to ``[batch, length, d]``."""
        return x * self.factor(x)

    @nn.compact
    def factor(self, x: jax.Array) -> jax.Array | float:
        """Draws the factor by which dropout multiplies ``[batch, length, d]``.

        Only the shape and the dtype of `x` are read. If nothing is dropped, the factor is 1.0.
        """
        if self.rate == 0.0 or not self.has_rng("dropout"):
            return 1.0

        key = self.make_rng("dropout")
        probability = 1.0 - self.rate  # the probability of keeping a feature or an element
        if self.elementwise:
            # Drawing random bits takes most of the time. Each draw of 32 bits is therefore split
            # into two numbers of 16 bits, which are used for two positions.
            threshold = max(1, round(probability * 2**16))
            shape = (x.shape[0], (x.shape[1] + 1) // 2, x.shape[2])
            bits = jax.random.bits(key, shape)
            bits = jnp.concatenate([bits & 0xFFFF, bits >> 16], axis=1)[:, : x.shape[1]]
            keep = bits < threshold
            probability = threshold / 2**16
        else:
            keep = jax.random.bernoulli(key, probability, (x.shape[0], 1, x.shape[2]))
        return (keep.astype(jnp.float32) / probability).astype(x.dtype)


@register
class FeedForward(nn.Module):
    """T5's feed-forward layer, ``(act₀(x W₀) ∘ act₁(x W₁) …) W_o``, applied to each position.

    Attributes:
      hidden_dim: width of the hidden layer.
      activations: names from `ACTIVATIONS`, one for each input matrix. T5 1.0 uses ``("relu",)``.
        T5 1.1 uses the gated GELU ``("gelu", "linear")`` (Shazeer 2020).
      dropout_rate: probability of dropping a hidden feature.
      elementwise_dropout: whether every position has its own random draw, instead of one draw for
        all positions; see `Dropout`.
      use_bias: whether all matrices have a bias, as in BERT. T5 has no biases.
      kernel_init: initializer of all kernels.
    """

    hidden_dim: Length
    activations: Annotated[tuple[Activation, ...], NotEmpty()] = ("gelu", "linear")
    dropout_rate: Rate = 0.0
    elementwise_dropout: bool = False
    use_bias: bool = False
    kernel_init: Initializer = FanIn()

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Transforms ``[batch, length, d_model]`` into an array of the same shape."""
        dense = functools.partial(
            dense_layer, dtype=x.dtype, kernel_init=self.kernel_init, use_bias=self.use_bias
        )

        # The input matrices have the same names as in T5X. If there is only one input matrix, its
        # name has no number.
        names = ["wi"]
        if len(self.activations) > 1:
            names = [f"wi_{i}" for i in range(len(self.activations))]
        inputs = [dense(self.hidden_dim, ("embed", "mlp"), name=name)(x) for name in names]
        dropout = Dropout(self.dropout_rate, self.elementwise_dropout, name="dropout")
        factor = dropout.factor(inputs[0])

        # Recomputing the activations in the backward pass is cheaper than storing their residuals.
        @jax.checkpoint
        def activate(*inputs: jax.Array) -> jax.Array:
            """Multiplies the activated inputs, and applies dropout."""
            pairs = zip(self.activations, inputs, strict=True)
            activated = [ACTIVATIONS[name](x) for name, x in pairs]
            return functools.reduce(operator.mul, activated) * factor

        hidden = activate(*inputs)
        return dense(x.shape[-1], ("mlp", "embed"), name="wo")(hidden)


class PositionEmbedding(nn.Module):
    """The base class of modules that return a vector for every absolute position.

    The vectors are added to the embedded tokens. A subclass with a limited number of positions has
    a field `max_length`.
    """

    def __call__(self, positions: jax.Array | np.ndarray, d_model: int) -> jax.Array:
        """Returns vectors ``[..., d_model]`` for integer positions ``[...]``."""
        raise NotImplementedError


@register
class LearnedPositions(PositionEmbedding):
    """Learned vectors for all absolute positions, ``embedding [max_length, d_model]``.

    Attributes:
      max_length: number of positions.
      embedding_init: initializer of the vectors.
    """

    max_length: Length
    embedding_init: Initializer = Normal(0.02)

    @nn.compact
    def __call__(self, positions: jax.Array | np.ndarray, d_model: int) -> jax.Array:
        """Returns vectors ``[..., d_model]`` for integer positions ``[...]``.

        If the positions are traced, the vectors of positions from `max_length` on are NaN.

        Raises:
          ValueError: if a known position is not less than `max_length`.
        """
        init = with_axes(self.embedding_init, "length", "embed")
        table = self.param("embedding", init, (self.max_length, d_model))
        if not is_concrete(positions):
            return table.at[positions].get(mode="fill", fill_value=jnp.nan)
        last = int(np.max(positions, initial=0))
        if last >= self.max_length:
            raise ValueError(
                f"LearnedPositions has max_length={self.max_length}, but it was given {last + 1} "
                f"positions. Set max_length to {last + 1} or more."
            )
        return table[positions]


@register
class SinusoidalPositions(PositionEmbedding):
    """Fixed position vectors of sines and cosines, without parameters.

    Sinusoidal positions are described by Vaswani et al. 2017, section 3.5.

    Attributes:
      endpoint: whether the slowest rate is exactly 1/10,000, as in Tensor2Tensor and in the code of
        You et al. 2020. False means that the slowest rate is 10,000^(−(d − 2)/d), as in the paper's
        formula.
    """

    endpoint: bool = False

    @nn.compact
    def __call__(self, positions: jax.Array | np.ndarray, d_model: int) -> jax.Array:
        """Returns vectors ``[..., d_model]`` for integer positions ``[...]``.

        The first half of a vector holds the sines, and the second half holds the cosines.
        """
        positions = jnp.asarray(positions)
        last = d_model - 2 if self.endpoint else d_model
        rates = 10_000.0 ** (-np.arange(0, d_model, 2) / max(last, 1))  # [d_model / 2]
        rates = np.expand_dims(rates, tuple(range(positions.ndim)))
        angles = positions[..., None].astype(jnp.float32) * rates  # [..., d_model / 2]
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)[..., :d_model]
