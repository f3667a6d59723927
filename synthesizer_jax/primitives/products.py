"""Matrix products of layers, with derivatives that are fast on every backend."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from synthesizer_jax.attention.partition import axes_along, axes_of_type, match_varying_axes
from synthesizer_jax.attention.terms import logits_dtype

_OutSharding: TypeAlias = NamedSharding | PartitionSpec | None


def dense_product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: _OutSharding = None,
) -> jax.Array:
    """Multiplies by a kernel as one matrix product: a ``dot_general`` for Flax's dense layers.

    The kernel's gradient is one matrix product too. With several contracted axes or features, XLA's CPU
    backend would first transpose a copy of `x`.

    Args:
      x: ``[..., *contracted]``; its last axes are contracted.
      kernel: ``[*contracted, ...]``; its first axes are contracted.
      dimension_numbers: as Flax's layers pass them, without batch axes.
      precision: as in `lax.dot_general`.
      preferred_element_type: as in `lax.dot_general`.
      out_sharding: the sharding of the result if mesh axes are explicit; None: that of `x`, followed by
        that of the kernel's other axes.

    Returns:
      ``[..., ...]``.
    """
    num_contracted = len(dimension_numbers[0][1])
    types: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    lead, features = x.shape[: x.ndim - num_contracted], kernel.shape[num_contracted:]
    if not axes_of_type(AxisType.Explicit):
        contracted_size = math.prod(kernel.shape[:num_contracted])
        x, kernel = x.reshape(-1, contracted_size), kernel.reshape(contracted_size, -1)
        out = lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), **types)
        return out.reshape(*lead, *features)
    # Mesh axes that already divide `x` cannot also divide the kernel's features: the kernel is gathered
    # along them (FSDP).
    x_axes = [axes_along(x, i) for i in range(x.ndim)]
    used_axes = {axis for axes in x_axes for axis in axes}
    feature_axes = [
        tuple(axis for axis in axes_along(kernel, i) if axis not in used_axes)
        for i in range(num_contracted, kernel.ndim)
    ]
    kernel = jax.sharding.reshard(kernel, PartitionSpec(*x_axes[len(lead) :], *feature_axes))
    dims = (tuple(range(len(lead), x.ndim)), tuple(range(num_contracted)))
    if out_sharding is None:
        out_sharding = PartitionSpec(*x_axes[: len(lead)], *feature_axes)
    return lax.dot_general(x, kernel, (dims, ((), ())), out_sharding=out_sharding, **types)


def output_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the logits ``x kernel`` of ``[..., d]`` and ``[d, v]``, in float32 or wider.

    All factors are in `x`'s dtype; in the backward pass JAX would multiply float32 cotangents.
    """

    return _output_product(*match_varying_axes(x, kernel.astype(x.dtype)))


def plain_output_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the same as `output_product`, with JAX's own derivatives."""
    return jnp.matmul(x, kernel, preferred_element_type=logits_dtype(x, kernel))


def _output_product_bwd(
    inputs: tuple[jax.Array, jax.Array], dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (x, kernel), rows = inputs, tuple(range(dout.ndim - 1))
    dout = dout.astype(x.dtype)
    return dout @ kernel.T, jnp.tensordot(x, dout, (rows, rows))


_output_product = jax.custom_vjp(plain_output_product)
_output_product.defvjp(lambda *inputs: (plain_output_product(*inputs), inputs), _output_product_bwd)
