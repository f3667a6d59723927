"""Parameters that are computed from smaller arrays whenever a module reads them.

Flax allows the value of a parameter to be a box, which a module opens when it reads the parameter.
`ComputedParameter` is a box that computes the parameter when it is opened. A module reads the
parameters of one layer at a time, and in a scan it reads them inside the scan. Therefore the
computed parameters of a whole stack never exist at the same time.

`Int8Array` is a parameter in 8 bits. `models.updated.UpdatedParameter` is a parameter to which an
update is applied.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax.core import meta

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.primitives.parameters import Axes, first_output_axis

INT8_MAX = 127
"""The largest absolute value of an `Int8Array`. −128 is not used, so that zero is in the middle."""


class ComputedParameter(meta.AxisMetadata[jax.Array]):
    """The base class of boxes that compute a parameter when a module reads it.

    A subclass is a pytree of arrays and defines `unbox`. If the parameter is stacked over scanned
    layers, all arrays have the axis of the layers first. `unbox` must also work for the slices of
    a single layer.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        raise NotImplementedError

    def replace_boxed(self, val: PyTree) -> PyTree:
        """Returns the new value, because it was not computed from the arrays of this box."""
        return val

    def add_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Returns the box unchanged, because the shapes of its arrays say whether it is stacked."""
        del index, params
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]) -> Self:
        """Returns the box unchanged; see `add_axis`."""
        del index, params
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Array(ComputedParameter):
    """A parameter in 8 bits, ``values · scale``, with one scale for each output channel.

    Attributes:
      values: the integers, with the shape of the parameter.
      scale: the scale of each channel, in the dtype of the parameter. All axes inside a channel
        have size 1.
    """

    values: PyTree
    scale: PyTree

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        shape: tuple[int, ...] = self.values.shape
        return shape

    def unbox(self) -> jax.Array:
        """Returns the parameter."""
        parameter: jax.Array = self.values.astype(self.scale.dtype) * self.scale
        return parameter


def quantize(x: jax.Array, axes: Axes) -> Int8Array:
    """Rounds a parameter to 8 bits.

    The scale of a channel is its largest absolute value, divided by 127. The rounding error of an
    element is at most half of its channel's scale. The scale of a channel of zeros is 0.

    Args:
      x: the parameter.
      axes: the logical axes of the parameter, which say what a channel is; see `is_channel_axis`.
    """
    inside = tuple(i for i, is_channel in enumerate(is_channel_axis(axes)) if not is_channel)
    scale = jnp.abs(x).max(axis=inside, keepdims=True) / INT8_MAX
    values = jnp.round(x / jnp.where(scale == 0, 1, scale)).astype(jnp.int8)
    return Int8Array(values, scale)


def abstract_int8(x: jax.ShapeDtypeStruct, axes: Axes) -> tuple[Int8Array, Int8Array]:
    """Returns the shapes and the logical axes of the arrays of `quantize(x, axes)`."""
    shapes: Int8Array = jax.eval_shape(functools.partial(quantize, axes=axes), x)
    pairs = zip(axes, is_channel_axis(axes), strict=True)
    scale_axes = tuple(axis if is_channel else None for axis, is_channel in pairs)
    return shapes, Int8Array(axes, scale_axes)


def is_channel_axis(axes: Axes) -> tuple[bool, ...]:
    """Returns, for each axis of a parameter, whether its entries belong to different channels.

    A channel of an embedding or of an output projection belongs to one token. A channel of any
    other kernel belongs to one output of its layer; see `first_output_axis`. Scanned layers have
    separate channels.
    """
    if "vocab" in axes:
        return tuple(axis == "vocab" for axis in axes)
    first_output = first_output_axis(axes)
    return tuple(axis == "layers" or i >= first_output for i, axis in enumerate(axes))
