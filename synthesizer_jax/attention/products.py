"""Matrix products whose derivatives run in the order that is fast everywhere."""

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
