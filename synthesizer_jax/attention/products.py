"""Matrix products of the routes, with derivatives in the order that is fast everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from synthesizer_jax.attention.terms import wide


@jax.custom_vjp
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x yᵀ`` of ``[q, r]`` and ``[k, r]``, float32 or wider, ``[q, k]``."""
    return jnp.matmul(x, y.T, preferred_element_type=wide(x, y))


def _product_fwd(x: jax.Array, y: jax.Array):
    return product(x, y), (x, y)


def _product_bwd(residuals: tuple[jax.Array, jax.Array], g: jax.Array):
    x, y = residuals
    dx = jnp.matmul(g.astype(y.dtype), y, preferred_element_type=g.dtype)
    return dx.astype(x.dtype), transposed_product(g.astype(x.dtype), x).astype(y.dtype)


product.defvjp(_product_fwd, _product_bwd)


def transposed_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """``xᵀ y`` of ``[q, k]`` and a narrow ``[q, e]``, float32 or wider, ``[k, e]``.

    XLA's CPU matrix product is two to three times slower when it has to transpose a large left
    factor. This forms ``(yᵀ x)ᵀ``; the barrier keeps the compiler from undoing that.
    """
    narrow = lax.dot_general(y, x, (((0,), (0,)), ((), ())), preferred_element_type=wide(x, y))
    return lax.optimization_barrier(narrow).T


@jax.custom_vjp
def combine(weights: jax.Array, values: jax.Array) -> jax.Array:
    """Sums values with weights that all examples share, one matrix product per head.

    Args:
      weights: ``[h, q, k]``, rounded to the values' dtype.
      values: ``[b, k, h, e]``.

    Returns:
      ``[h, q, b, e]``, float32 or wider.
    """
    dtype = wide(values)
    weights = weights.astype(values.dtype)
    return jnp.einsum("hqk,bkhe->hqbe", weights, values, preferred_element_type=dtype)


def _combine_fwd(weights: jax.Array, values: jax.Array):
    return combine(weights, values), (weights, values)


def combine_back(
    residuals: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of `combine`'s weights and values from its result's, ``[h, q, b, e]``."""
    weights, values = residuals
    dtype = wide(values)
    heads, queries = g.shape[:2]
    g = g.astype(values.dtype)
    flat = values.transpose(2, 1, 0, 3).reshape(heads, values.shape[1], -1)
    dweights = lax.dot_general(
        g.reshape(heads, queries, -1),
        flat,
        (((2,), (2,)), ((0,), (0,))),
        preferred_element_type=dtype,
    )
    dvalues = jnp.einsum(
        "hqk,hqbe->bkhe", weights.astype(values.dtype), g, preferred_element_type=dtype
    )
    return dweights.astype(weights.dtype), dvalues.astype(values.dtype)


combine.defvjp(_combine_fwd, combine_back)
