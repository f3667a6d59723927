"""Parameter initializers, which are frozen dataclasses that can be printed and saved as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp
from flax.typing import Dtype, Shape

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, NotNegative


class Initializer(Protocol):
    """A function ``(key, shape, dtype) -> array``, as in Flax and `jax.nn.initializers`."""

    def __call__(self, key: jax.Array, shape: Shape, dtype: Dtype = ...) -> jax.Array: ...


@register
@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal distribution with mean zero and a fixed standard deviation.

    Attributes:
      stddev: the standard deviation.
    """

    stddev: NotNegative = 1.0

    def __call__(self, key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
        return self.stddev * jax.random.normal(key, shape, dtype)


@register
@dataclasses.dataclass(frozen=True)
class FanIn:
    """Normal distribution with mean zero and variance ``scale / fan_in``.

    The fan-in is the size of the parameter's second-to-last dimension.

    Attributes:
      scale: the variance of the outputs if the inputs have unit variance.
    """

    scale: NotNegative = 1.0

    def __call__(self, key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
        return math.sqrt(self.scale / shape[-2]) * jax.random.normal(key, shape, dtype)


@register
@dataclasses.dataclass(frozen=True)
class GlorotUniform:
    """Uniform distribution between ±√(6 / (fan-in + fan-out)).

    The fan-in and the fan-out are the sizes of the parameter's last two dimensions.
    """

    def __call__(self, key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
        limit = math.sqrt(6.0 / (shape[-2] + shape[-1]))
        return jax.random.uniform(key, shape, dtype, -limit, limit)


@register
@dataclasses.dataclass(frozen=True)
class MeshGlorotUniform:
    """TensorFlow's Glorot uniform distribution, as Mesh-TensorFlow applies it to a table of logits.

    In Mesh-TensorFlow, the table has the shape ``[query, heads, key]``, and TensorFlow treats the
    leading dimension as a receptive field. The limit is therefore
    ``√(6 / (query · (heads + key)))``, which is 0.00475 for a table of shape 512 × 8 × 512. With
    such small initial values, attention is almost uniform at the start of training. In this
    package, the table of logits has the shape ``[heads, query, key]``.
    """

    def __call__(self, key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
        heads, q_length, k_length = shape
        limit = math.sqrt(6.0 / (q_length * (heads + k_length)))
        return jax.random.uniform(key, shape, dtype, -limit, limit)


@register
@dataclasses.dataclass(frozen=True)
class TorchUniform:
    """Uniform distribution between ±1/√fan_in.

    PyTorch uses this distribution as the default for the kernels and biases of linear layers.

    Attributes:
      fan_in: the number of input features of the layer.
    """

    fan_in: Count

    def __call__(self, key: jax.Array, shape: Shape, dtype: Dtype = jnp.float32) -> jax.Array:
        limit = 1.0 / math.sqrt(self.fan_in)
        return jax.random.uniform(key, shape, dtype, -limit, limit)
