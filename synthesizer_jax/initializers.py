"""Parameter initialisers as frozen dataclasses: configuration that prints and saves as JSON."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from synthesizer_jax.registry import register


class Initializer(Protocol):
    """``(key, shape, dtype) -> array``, as Flax and `jax.nn.initializers` have it."""

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any = ...) -> jax.Array:
        """``(key, shape, dtype) -> array``."""
        ...


@register
@dataclasses.dataclass(frozen=True)
class Normal:
    """Normal with mean zero and a fixed standard deviation."""

    stddev: float = 1.0

    def __call__(
        self, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
    ) -> jax.Array:
        """``(key, shape, dtype) -> array``."""
        return self.stddev * jax.random.normal(key, shape, dtype)


@register
@dataclasses.dataclass(frozen=True)
class FanIn:
    """Normal with variance `scale` / fan-in (fan-in: the last dimension but one)."""

    scale: float = 1.0

    def __call__(
        self, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
    ) -> jax.Array:
        """``(key, shape, dtype) -> array``."""
        return math.sqrt(self.scale / shape[-2]) * jax.random.normal(key, shape, dtype)


@register
@dataclasses.dataclass(frozen=True)
class GlorotUniform:
    """Uniform in ±√(6 / (fan-in + fan-out)) over the last two dimensions."""

    def __call__(
        self, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
    ) -> jax.Array:
        """``(key, shape, dtype) -> array``."""
        limit = math.sqrt(6.0 / (shape[-2] + shape[-1]))
        return jax.random.uniform(key, shape, dtype, -limit, limit)


@register
@dataclasses.dataclass(frozen=True)
class MeshGlorotUniform:
    """TensorFlow's Glorot uniform as Mesh-TensorFlow applied it to a table of logits.

    Mesh-TensorFlow lays the table out as ``[query, heads, key]``, and TensorFlow counts the leading
    dimension as a receptive field, so the limit is ``√(6 / (query · (heads + key)))``: ±0.00475 for
    512 × 8 × 512. Attention starts almost uniform. Ours is laid out ``[heads, query, key]``.
    """

    def __call__(
        self, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
    ) -> jax.Array:
        """``(key, shape, dtype) -> array``."""
        heads, rows, columns = shape
        limit = math.sqrt(6.0 / (rows * (heads + columns)))
        return jax.random.uniform(key, shape, dtype, -limit, limit)


@register
@dataclasses.dataclass(frozen=True)
class TorchUniform:
    """Uniform in ±1/√fan-in, PyTorch's default for linear layers' kernels and biases.

    Attributes:
      fan_in: number of inputs of the layer.
    """

    fan_in: int

    def __call__(
        self, key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32
    ) -> jax.Array:
        """``(key, shape, dtype) -> array``."""
        limit = 1.0 / math.sqrt(self.fan_in)
        return jax.random.uniform(key, shape, dtype, -limit, limit)
