"""Matrix products of the routes, with derivatives in the order that is fast everywhere."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from synthesizer_jax.attention.partition import axes_along, axes_of_type
from synthesizer_jax.attention.parts import vary_alike
from synthesizer_jax.attention.terms import wide


def dense_product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """A product with a kernel as one matrix product: a ``dot_general`` for Flax's dense layers.

    Args:
      x: ``[..., *contracted]``, with its last axes contracted.
      kernel: ``[*contracted, ...]``, with its first axes contracted.
      dimension_numbers: as Flax's layers give them, without batch axes.
      precision: as in `lax.dot_general`.
      preferred_element_type: as in `lax.dot_general`.
      out_sharding: where mesh axes are explicit, the layout of the result; None: that of `x`, and
        beyond its axes the kernel's.

    Returns:
      ``[..., ...]``. The kernel's gradient is then a matrix product too; left with several axes,
      XLA's CPU backend transposes a copy of `x` first.
    """
    count = len(dimension_numbers[0][1])
    if axes_of_type(AxisType.Explicit):
        return _explicit_product(
            x,
            kernel,
            count,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding,
        )
    size = math.prod(kernel.shape[:count])
    out = lax.dot_general(
        x.reshape(-1, size),
        kernel.reshape(size, -1),
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return out.reshape(*x.shape[: x.ndim - count], *kernel.shape[count:])


def _explicit_product(
    x: jax.Array, kernel: jax.Array, count: int, *, out_sharding: Any, **options: Any
) -> jax.Array:
    """`dense_product` of the last `count` axes where mesh axes are explicit.

    The kernel is gathered along axes that divide `x` otherwise (FSDP).
    """
    x_axes = [axes_along(x, i) for i in range(x.ndim)]
    lead, contracted = x_axes[: x.ndim - count], x_axes[x.ndim - count :]
    taken = {axis for axes in x_axes for axis in axes}
    rest = [
        tuple(axis for axis in axes_along(kernel, i) if axis not in taken)
        for i in range(count, kernel.ndim)
    ]
    kernel = jax.sharding.reshard(kernel, PartitionSpec(*contracted, *rest))
    dims = (tuple(range(x.ndim - count, x.ndim)), tuple(range(count)))
    return lax.dot_general(
        x,
        kernel,
        (dims, ((), ())),
        out_sharding=PartitionSpec(*lead, *rest) if out_sharding is None else out_sharding,
        **options,
    )


def product(x: jax.Array, y: jax.Array, precision: Any = None) -> jax.Array:
    """``x yᵀ`` of ``[q, r]`` and ``[k, r]``, float32 or wider, ``[q, k]``."""
    return _product(*vary_alike(x, y), precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, y: jax.Array, precision: Any) -> jax.Array:
    return plain_product(x, y, precision)


def _product_fwd(x: jax.Array, y: jax.Array, precision: Any):
    return _product(x, y, precision), (x, y)


def _product_bwd(precision: Any, residuals: tuple[jax.Array, jax.Array], g: jax.Array):
    x, y = residuals
    dx = jnp.matmul(g.astype(y.dtype), y, precision=precision, preferred_element_type=g.dtype)
    dy = transposed_product(g.astype(x.dtype), x, precision)
    return dx.astype(x.dtype), dy.astype(y.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def plain_product(x: jax.Array, y: jax.Array, precision: Any = None) -> jax.Array:
    """`product` with JAX's own derivatives."""
    return jnp.matmul(x, y.T, precision=precision, preferred_element_type=wide(x, y))


def transposed_product(x: jax.Array, y: jax.Array, precision: Any = None) -> jax.Array:
    """``xᵀ y`` of ``[q, k]`` and a narrow ``[q, e]``, float32 or wider, ``[k, e]``.

    XLA's CPU matrix product is two to three times slower when it has to transpose a large left
    factor. This forms ``(yᵀ x)ᵀ``; the barrier keeps the compiler from undoing that.
    """
    dims = (((0,), (0,)), ((), ()))
    narrow = lax.dot_general(y, x, dims, precision=precision, preferred_element_type=wide(x, y))
    return lax.optimization_barrier(narrow).T


def combine(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sums values with weights that all examples share, one matrix product per head.

    Args:
      weights: ``[h, q, k]``, rounded to the values' dtype.
      values: ``[h, k, b, e]``.

    Returns:
      ``[h, q, b, e]``, float32 or wider.
    """
    out = _by_head(weights.astype(values.dtype), _columns(values), (2, 1))
    return out.reshape(*out.shape[:2], *values.shape[2:])


def combine_back(
    weights: jax.Array, values: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of `combine`'s weights and values from its result's, ``[h, q, b, e]``."""
    g = _columns(g.astype(values.dtype))
    dvalues = _by_head(weights.astype(values.dtype), g, (1, 1))
    dweights = _by_head(g, _columns(values), (2, 2))
    return dweights.astype(weights.dtype), dvalues.reshape(values.shape).astype(values.dtype)


def _columns(x: jax.Array) -> jax.Array:
    """``[h, n, b, e]`` as ``[h, n, b e]``."""
    return x.reshape(*x.shape[:2], -1)


def _by_head(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """A matrix product for every head, over the given axes.

    Three axes, not four: XLA's CPU backend refuses some bfloat16 products with a split column axis.
    """
    dims = ((axes[:1], axes[1:]), ((0,), (0,)))
    return lax.dot_general(x, y, dims, preferred_element_type=wide(x, y))
