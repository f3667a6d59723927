"""LoRA adapters: low-rank updates of a trained model's kernels (Hu et al. 2022).

A kernel W of shape ``[inputs, outputs]`` becomes ``W + (alpha / rank) · A · B``, where A is
``[inputs, rank]`` and B is ``[rank, outputs]``. Kernels with more than two dimensions are not
flattened. For example, for a query kernel ``[d_model, heads, head_dim]``, A is ``[d_model, rank]``
and B is ``[rank, heads, head_dim]``. In scanned layers, A and B both have a leading axis of layers.

A run with adapters trains and saves two kinds of variables:

- The low-rank updates. The paths of an update are ``KERNEL_PATH/lora_a`` and
  ``KERNEL_PATH/lora_b``.
- Variables for which `Experiment.init_rules` draw new random values, such as a new classifier. No
  other checkpoint contains these values, so the run trains the complete arrays and saves them under
  their usual paths.

All other variables of the model come from the base, which is the checkpoint that the adapters
modify. `Adapted` decides which variables are trained by low-rank updates, and which as complete
arrays. `LowRankUpdate` describes the update of one kernel.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.models.lora import LoRA
from synthesizer_jax.models.token_model import looped_paths
from synthesizer_jax.models.trainable import Trainable
from synthesizer_jax.primitives.initializers import TorchUniform
from synthesizer_jax.primitives.parameters import Axes, Variables

Model = TypeVar("Model", bound=nn.Module)

Keys = tuple[str, ...]
"""The collection of a variable and its path in the model, such as ``("params", "embedding")``."""

LORA_A, LORA_B = "lora_a", "lora_b"


@dataclasses.dataclass(frozen=True)
class LowRankUpdate:
    """The low-rank update of one kernel, ``W + scale · A · B``.

    Attributes:
      kernel: the shape and dtype of the kernel W.
      axes: the logical axes of the kernel, which determine the kernel's input axes. If the last
        axis is ``embed``, all other axes are inputs. If the last axis is not ``embed``, only the
        first axis is an input. The axis of scanned layers is never an input axis.
      rank: the rank of the update.
      scale: the number by which the product A · B is multiplied.
    """

    kernel: jax.ShapeDtypeStruct
    axes: Axes
    rank: int
    scale: float

    leaves = (LORA_A, LORA_B)
    """The sorted names of the update's arrays, which are appended to the path of the kernel."""

    @property
    def is_scanned(self) -> bool:
        """Whether the first axis of the kernel is the axis of the layers of a scanned stack."""
        return self.axes[0] == "layers"

    def abstract(self) -> dict[str, tuple[jax.ShapeDtypeStruct, Axes]]:
        """Returns the shape and the logical axes of every array of the update, by name."""
        shape, axes = self.kernel.shape, self.axes
        first_input = int(self.is_scanned)
        first_output = len(shape) - 1 if axes[-1] == "embed" else first_input + 1

        a_shape = (*shape[:first_output], self.rank)
        a_axes = (*axes[:first_output], None)
        b_shape = (*shape[:first_input], self.rank, *shape[first_output:])
        b_axes = (*axes[:first_input], None, *axes[first_output:])
        return {
            LORA_A: (jax.ShapeDtypeStruct(a_shape, self.kernel.dtype), a_axes),
            LORA_B: (jax.ShapeDtypeStruct(b_shape, self.kernel.dtype), b_axes),
        }

    def init(self, keys: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns the initial arrays by name. As in PEFT, A is uniform in ±1/√inputs.

        B is zero, so the adapted model computes the same outputs as its base when training starts.

        Args:
          keys: a random key for every name in `leaves`.
        """
        abstract = self.abstract()
        a, _ = abstract[LORA_A]
        b, _ = abstract[LORA_B]
        # The shape of A is [layers?, *inputs, rank]. The range of the initial values depends only
        # on the sizes of the input axes.
        fan_in = math.prod(a.shape[int(self.is_scanned) : -1])
        return {
            LORA_A: TorchUniform(fan_in)(keys[LORA_A], a.shape, a.dtype),
            LORA_B: jnp.zeros(b.shape, b.dtype),
        }

    def apply(self, kernel: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Returns the updated kernel.

        Args:
          kernel: the kernel of the base.
          arrays: the arrays of the update by name.
        """
        product = jax.vmap(_product) if self.is_scanned else _product
        return kernel + self.scale * product(arrays[LORA_A], arrays[LORA_B])


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of A and B, ``[inputs, outputs]``.

    The product is computed in full precision, so that the result does not depend on a platform's
    default precision.
    """
    return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)


class Adapted(Trainable[Model]):
    """Describes the variables that a run with adapters trains and saves.

    Args:
      model: the unbound model to which the adapters are added.
      example: the shapes and dtypes of the arguments of the model's `__call__`.
      lora: selects the kernels that have low-rank updates.
      is_whole: a function that takes the path of a variable, in the form of looped layers, and
        returns whether the complete variable is trained. Such a kernel has no low-rank update.

    Attributes:
      lora: the configuration of the adapters.
      updates: the low-rank updates by the keys of their kernels, in sorted order.
      whole: the keys of the variables that are trained as complete arrays, in sorted order.

    Raises:
      ValueError: if no kernel has an update, or a pattern matches only some layers of a scanned
        stack.
    """

    has_base = True

    def __init__(
        self,
        model: Model,
        example: tuple[jax.ShapeDtypeStruct, ...],
        lora: LoRA,
        *,
        is_whole: Callable[[str], bool] = lambda path: False,
    ):
        super().__init__(model, example)
        self.lora = lora
        self.updates: dict[Keys, LowRankUpdate] = {}
        self.whole: list[Keys] = []

        def is_target(path: str) -> bool:
            """Returns whether the kernel at a path has a low-rank update."""
            return re.fullmatch(lora.targets, path) is not None

        shapes, axes = map(traverse_util.flatten_dict, self.abstract_model())
        paths: list[str] = []
        for keys in sorted(shapes):
            collection, *path = keys
            looped = looped_paths(model, tuple(path))
            if _matches_all("init_rules match", looped, is_whole):
                self.whole.append(keys)
            elif collection == "params" and path[-1].endswith("kernel"):
                paths += looped
                what = f"training.adapters: {lora.targets!r} matches"
                if _matches_all(what, looped, is_target):
                    scale = lora.alpha / lora.rank
                    self.updates[keys] = LowRankUpdate(shapes[keys], axes[keys], lora.rank, scale)

        if not self.updates:
            hint = did_you_mean(lora.targets, paths) or f". One of the paths is {min(paths)!r}."
            raise ValueError(
                f"training.adapters: {lora.targets!r} matches no kernel{hint} A pattern must match "
                "a whole path."
            )

    def abstract(self) -> tuple[Variables, PyTree]:
        """Returns the shapes and the logical axes of all variables that are trained."""
        shapes, axes = map(traverse_util.flatten_dict, self.abstract_model())
        found = {keys: (shapes[keys], axes[keys]) for keys in self.whole}
        for keys, update in self.updates.items():
            for leaf, shape_and_axes in update.abstract().items():
                found[*keys, leaf] = shape_and_axes

        return (
            traverse_util.unflatten_dict({keys: shape for keys, (shape, _) in found.items()}),
            traverse_util.unflatten_dict({keys: names for keys, (_, names) in found.items()}),
        )

    def abstract_base(self) -> tuple[Variables, PyTree]:
        """Returns the shapes and the logical axes of all variables of the model."""
        return self.abstract_model()

    def init(self, key: jax.Array, base: Variables) -> Variables:
        """Returns new low-rank updates, and copies of the variables that are trained completely.

        The variables are copied from the base because training steps donate the buffers of the
        trained variables, and the base must keep its buffers.

        Args:
          key: a random key.
          base: the variables of the base, and the initial values of the variables that are trained
            completely.
        """
        of_base = traverse_util.flatten_dict(base)
        variables = {keys: jnp.copy(of_base[keys]) for keys in self.whole}

        names = [(*keys, leaf) for keys, update in self.updates.items() for leaf in update.leaves]
        random_keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        for keys, update in self.updates.items():
            arrays = update.init({leaf: random_keys[*keys, leaf] for leaf in update.leaves})
            variables |= {(*keys, leaf): array for leaf, array in arrays.items()}
        return traverse_util.unflatten_dict(variables)

    def merge(self, variables: Variables, base: Variables) -> Variables:
        """Returns the variables for the model's `apply`.

        Low-rank updates are added to the kernels of the base. Variables that are trained completely
        replace the variables of the base, or are added if the base does not contain them.
        """
        return _merge(variables, base, tuple(self.updates.items()))

    def merge_arrays(self, variables: Variables, base: Variables) -> Variables:
        """Returns the result of `merge`, computed by a compiled program.

        All objects with equal updates share the compiled program.
        """
        merged: Variables = _compiled_merge(variables, base, tuple(self.updates.items()))
        return merged


def _merge(
    variables: Variables, base: Variables, updates: tuple[tuple[Keys, LowRankUpdate], ...]
) -> Variables:
    """Returns the variables of the adapted model; see `Adapted.merge`."""
    trained, merged = map(traverse_util.flatten_dict, (variables, base))
    for keys, update in updates:
        arrays = {leaf: trained.pop((*keys, leaf)) for leaf in update.leaves}
        merged[keys] = update.apply(merged[keys], arrays)
    # All arrays that are left in `trained` are variables that are trained completely.
    return traverse_util.unflatten_dict(merged | trained)


_compiled_merge = jax.jit(_merge, static_argnums=2)


def _matches_all(what: str, looped: list[str], is_match: Callable[[str], bool]) -> bool:
    """Returns whether all paths of the layers that are stacked in one array match.

    Raises:
      ValueError: if some layers match, but other layers do not. The error message begins with
        `what`.
    """
    others = [path for path in looped if not is_match(path)]
    if others and len(others) < len(looped):
        raise ValueError(
            f"{what} layers of a scanned stack, but not {others[0]!r}. Match all layers of the "
            "stack, or build the model with scan=False."
        )
    return not others
