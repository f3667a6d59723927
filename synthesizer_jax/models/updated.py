"""Parameters of a base with their updates, which are applied when a module reads the parameter."""

from __future__ import annotations

import dataclasses

import jax
from flax.core import meta

from synthesizer_jax.attention.derivatives import with_gradient
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.models.updates import Update
from synthesizer_jax.primitives.computed import ComputedParameter


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UpdatedParameter(ComputedParameter):
    """A parameter of the base and its update, which is applied when a module reads the parameter.

    Attributes:
      base: the parameter of the base, an array or an `Int8Array`.
      arrays: the arrays of the update by name.
      update: the update of the whole parameter. In a scanned stack, the arrays may be the slices
        of a single layer.
    """

    base: PyTree
    arrays: dict[str, jax.Array]
    update: Update = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        shape: tuple[int, ...] = self.base.shape
        return shape

    def unbox(self) -> jax.Array:
        """Returns the updated parameter."""
        update = self.update
        if len(self.shape) < len(update.axes):
            # The arrays are slices of a single layer, without the axis of the layers.
            update = update.of_one_layer()

        def forward(inputs: PyTree) -> tuple[jax.Array, PyTree]:
            """Returns the updated parameter, and no residuals."""
            return update.apply(*inputs), ()

        def backward(inputs: PyTree, out: PyTree, residuals: PyTree, dout: jax.Array) -> PyTree:
            """Returns the cotangents of the parameter and of the update's arrays."""
            del out, residuals
            return jax.vjp(update.apply, *inputs)[1](dout)

        # The product of A and B is as large as the kernel. `with_gradient` hides the product from
        # rematerialization policies, which would otherwise save it like other matrix products.
        apply = with_gradient(forward, backward, reads_output=False)
        return apply((meta.unbox(self.base), self.arrays))
