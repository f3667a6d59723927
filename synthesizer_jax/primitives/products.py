"""The matrix product for logits over a vocabulary, with fast derivatives on every backend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from synthesizer_jax.attention.mesh_axes import match_varying_axes
from synthesizer_jax.attention.terms import logits_dtype


def output_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the product of ``x``, ``[..., d]``, and ``kernel``, ``[d, v]``, in float32 or wider.

    The factors of all matrix products have the dtype of `x`, also in the backward pass. JAX's own
    derivatives would multiply by cotangents in float32, which is slower.
    """
    return _output_product(*match_varying_axes(x, kernel.astype(x.dtype)))


def plain_output_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the same result as `output_product`, but with JAX's own derivatives."""
    return jnp.matmul(x, kernel, preferred_element_type=logits_dtype(x, kernel))


def _output_product_fwd(
    x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns the product, and the factors of the product as residuals."""
    return plain_output_product(x, kernel), (x, kernel)


def _output_product_bwd(
    inputs: tuple[jax.Array, jax.Array], dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of `x` and of the kernel."""
    x, kernel = inputs
    dout = dout.astype(x.dtype)
    rows = tuple(range(dout.ndim - 1))  # all axes except the last one
    return dout @ kernel.T, jnp.tensordot(x, dout, (rows, rows))


_output_product = jax.custom_vjp(plain_output_product)
_output_product.defvjp(_output_product_fwd, _output_product_bwd)
