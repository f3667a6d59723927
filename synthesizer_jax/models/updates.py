"""The kinds of updates with which adapters change a parameter of their base.

An update has a few small arrays, which are trained instead of the parameter. The paths of these
arrays are the path of the parameter, followed by the names in `Update.leaves`.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp

from synthesizer_jax.primitives.initializers import TorchUniform
from synthesizer_jax.primitives.parameters import Axes, first_output_axis

LORA_A, LORA_B, MAGNITUDE, ENTRIES = "lora_a", "lora_b", "lora_magnitude", "token_entries"


@dataclasses.dataclass(frozen=True)
class Update(abc.ABC):
    """The update of one parameter. Updates are immutable and hashable.

    Attributes:
      parameter: the shape and dtype of the parameter.
      axes: the logical axes of the parameter.
    """

    parameter: jax.ShapeDtypeStruct
    axes: Axes

    @property
    @abc.abstractmethod
    def leaves(self) -> tuple[str, ...]:
        """The sorted names of the update's arrays, which are appended to the parameter's path."""

    def of_one_layer(self) -> Self:
        """Returns the update of the parameter of a single layer of a scanned stack."""
        parameter = jax.ShapeDtypeStruct(self.parameter.shape[1:], self.parameter.dtype)
        return dataclasses.replace(self, parameter=parameter, axes=self.axes[1:])

    @abc.abstractmethod
    def abstract(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes]]:
        """Returns the shape and the logical axes of every array of the update, by name."""

    @abc.abstractmethod
    def init(self, keys: Mapping[str, jax.Array], base: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial arrays by name.

        With the initial arrays, `apply` returns the parameter of the base.

        Args:
          keys: a random key for every name in `leaves`.
          base: the parameter of the base.
        """

    @abc.abstractmethod
    def apply(self, base: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the updated parameter.

        Args:
          base: the parameter of the base.
          arrays: the arrays of the update by name.
        """


@dataclasses.dataclass(frozen=True)
class LowRankUpdate(Update):
    """The low-rank update of one kernel W, ``V = W + scale · A · B`` (Hu et al. 2022).

    With a magnitude m, the updated kernel is ``m · V / ‖V‖`` instead of V (DoRA, Liu et al. 2024).
    The norm ‖V‖ of each output is taken over the inputs.

    Kernels with more than two dimensions are not flattened. For example, for a query kernel
    ``[d_model, heads, head_dim]``, A is ``[d_model, rank]``, B is ``[rank, heads, head_dim]`` and m
    is ``[heads, head_dim]``. In scanned layers, all of them have a leading axis of layers.

    Attributes:
      parameter: the shape and dtype of the kernel W.
      axes: the logical axes of the kernel, which determine the kernel's inputs; see
        `first_output_axis`.
      rank: the rank of the update.
      scale: the number by which the product A · B is multiplied.
      has_magnitude: whether the update has a magnitude.
    """

    rank: int
    scale: float
    has_magnitude: bool = False

    @property
    def leaves(self) -> tuple[str, ...]:
        """The sorted names of the update's arrays, which are appended to the kernel's path."""
        return (LORA_A, LORA_B, MAGNITUDE) if self.has_magnitude else (LORA_A, LORA_B)

    @property
    def is_scanned(self) -> bool:
        """Whether the first axis of the kernel is the axis of the layers of a scanned stack."""
        return self.axes[0] == "layers"

    @property
    def _first_input(self) -> int:
        """The index of the first input axis of the kernel."""
        return int(self.is_scanned)

    @property
    def _first_output(self) -> int:
        """The index of the first output axis of the kernel. The axes before it are inputs."""
        return first_output_axis(self.axes)

    def abstract(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes]]:
        """Returns the shape and the logical axes of every array of the update, by name."""
        shape, axes, dtype = self.parameter.shape, self.axes, self.parameter.dtype
        layers = slice(self._first_input)
        outputs = slice(self._first_output, None)

        a_shape = (*shape[: self._first_output], self.rank)
        a_axes = (*axes[: self._first_output], None)
        b_shape = (*shape[layers], self.rank, *shape[outputs])
        b_axes = (*axes[layers], None, *axes[outputs])
        arrays = {
            LORA_A: (jax.ShapeDtypeStruct(a_shape, dtype), a_axes),
            LORA_B: (jax.ShapeDtypeStruct(b_shape, dtype), b_axes),
        }
        if self.has_magnitude:
            m_shape = (*shape[layers], *shape[outputs])
            m_axes = (*axes[layers], *axes[outputs])
            arrays[MAGNITUDE] = (jax.ShapeDtypeStruct(m_shape, dtype), m_axes)
        return arrays

    def init(self, keys: Mapping[str, jax.Array], base: jax.Array) -> dict[str, jax.Array]:
        """Returns the initial arrays by name. As in PEFT, A is uniform in ±1/√inputs.

        B is zero and the magnitude is ‖W‖, so the adapted model computes the same outputs as its
        base when training starts.

        Args:
          keys: a random key for every name in `leaves`.
          base: the kernel W of the base.
        """
        arrays = self._init_factors(keys)
        if self.has_magnitude:
            arrays[MAGNITUDE] = self._norm(base).reshape(self.abstract()[MAGNITUDE][0].shape)
        return arrays

    def _init_factors(self, keys: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the initial A and B by name."""
        abstract = self.abstract()
        a, _ = abstract[LORA_A]
        b, _ = abstract[LORA_B]
        # The shape of A is [layers?, *inputs, rank]. The range of the initial values depends only
        # on the sizes of the input axes.
        fan_in = math.prod(a.shape[self._first_input : -1])
        return {
            LORA_A: TorchUniform(fan_in)(keys[LORA_A], a.shape, a.dtype),
            LORA_B: jnp.zeros(b.shape, b.dtype),
        }

    def apply(self, base: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the updated kernel.

        Args:
          base: the kernel W of the base.
          arrays: the arrays of the update by name.
        """
        product = jax.vmap(_product) if self.is_scanned else _product
        updated = base + self.scale * product(arrays[LORA_A], arrays[LORA_B])
        if not self.has_magnitude:
            return updated

        # The norm is a constant in the backward pass (Liu et al. 2024, section 4.3), which saves
        # memory.
        norm = jax.lax.stop_gradient(self._norm(updated))
        # An output whose weights are all zero has no direction, so its magnitude has no effect.
        factor = arrays[MAGNITUDE].reshape(norm.shape) / jnp.where(norm == 0, 1, norm)
        return factor * updated

    def _norm(self, kernel: jax.Array) -> jax.Array:
        """Returns the norm of every output over the inputs, which become axes of size 1."""
        inputs = tuple(range(self._first_input, self._first_output))
        return jnp.sqrt(jnp.sum(jnp.square(kernel), inputs, keepdims=True))


@dataclasses.dataclass(frozen=True)
class EmbeddingUpdate(LowRankUpdate):
    """The low-rank update of an embedding ``[vocab, d_model]``.

    A is ``[vocab, rank]`` and B is ``[rank, d_model]``. Only their initial values differ from those
    of a kernel.
    """

    def _init_factors(self, keys: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the initial A and B by name. As in PEFT, A is zero, and B is normal."""
        abstract = self.abstract()
        a, _ = abstract[LORA_A]
        b, _ = abstract[LORA_B]
        return {
            LORA_A: jnp.zeros(a.shape, a.dtype),
            LORA_B: jax.random.normal(keys[LORA_B], b.shape, b.dtype),
        }


@dataclasses.dataclass(frozen=True)
class TokenEntries(Update):
    """Trains the entries of some tokens in an embedding or an output projection.

    The trained entries replace the entries of the base. They are rows of an embedding
    ``[vocab, d_model]``, or columns of an output projection ``[d_model, vocab]``.

    Attributes:
      parameter: the shape and dtype of the embedding or the output projection.
      axes: the logical axes of the array. One of them is ``vocab``.
      tokens: the ids of the tokens.
    """

    tokens: tuple[int, ...]

    @property
    def leaves(self) -> tuple[str, ...]:
        """The name of the only array, which is appended to the parameter's path."""
        return (ENTRIES,)

    @property
    def _index(self) -> tuple[slice | jax.Array, ...]:
        """The index of the entries in the array."""
        before = (slice(None),) * self.axes.index("vocab")
        return (*before, jnp.array(self.tokens, jnp.int32))

    def abstract(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes]]:
        """Returns the shape and the logical axes of the entries."""
        pairs = list(zip(self.parameter.shape, self.axes, strict=True))
        shape = tuple(len(self.tokens) if axis == "vocab" else size for size, axis in pairs)
        # The entries are few, and their number is usually not divisible by the size of a mesh axis,
        # so they are not sharded by token.
        axes = tuple(None if axis == "vocab" else axis for _, axis in pairs)
        return {ENTRIES: (jax.ShapeDtypeStruct(shape, self.parameter.dtype), axes)}

    def init(self, keys: Mapping[str, jax.Array], base: jax.Array) -> dict[str, jax.Array]:
        """Returns a copy of the entries of the base."""
        del keys
        return {ENTRIES: base[self._index]}

    def apply(self, base: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the array of the base with the trained entries."""
        return base.at[self._index].set(arrays[ENTRIES])


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of A and B, ``[inputs, outputs]``.

    The product is computed in full precision, so that the result does not depend on a platform's
    default precision.
    """
    return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
