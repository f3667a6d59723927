"""Adapters, which are updates that are trained instead of the parameters of a trained model.

A run with adapters trains and saves two kinds of variables:

- Updates of some parameters; see `models.updates`. For example, the paths of a low-rank update are
  ``KERNEL_PATH/lora_a`` and ``KERNEL_PATH/lora_b``.
- Complete arrays, under their usual paths. These are the parameters that `LoRA.whole` matches, and
  variables for which `Experiment.init_rules` draw new random values, such as a new classifier. No
  other checkpoint contains these values.

All other variables of the model come from the base, which is the checkpoint that the adapters
modify. `Adapted` decides which variables are trained by updates, and which as complete arrays.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from flax.core import meta

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.models.lora import INT8, LoRA
from synthesizer_jax.models.token_model import looped_paths
from synthesizer_jax.models.trainable import Trainable
from synthesizer_jax.models.updated import UpdatedParameter
from synthesizer_jax.models.updates import EmbeddingUpdate, LowRankUpdate, TokenEntries, Update
from synthesizer_jax.primitives.computed import abstract_int8
from synthesizer_jax.primitives.parameters import (
    Axes,
    Variables,
    check_patterns_decide,
    explain_no_match,
)

Model = TypeVar("Model", bound=nn.Module)

Keys = tuple[str, ...]
"""The collection of a variable and its path in the model, such as ``("params", "embedding")``."""


class Adapted(Trainable[Model]):
    """Describes the variables that a run with adapters trains and saves.

    Args:
      model: the unbound model to which the adapters are added.
      example: the shapes and dtypes of the arguments of the model's `__call__`.
      lora: selects the parameters that are trained, and the kinds of their updates.
      is_new: a function that takes the path of a variable, in the form of looped layers, and
        returns whether the values of the variable are new and not in the base. Such a variable is
        trained as a complete array.

    Attributes:
      lora: the configuration of the adapters.
      updates: the updates by the keys of their parameters, in sorted order.
      whole: the keys of the variables that are trained as complete arrays, in sorted order.

    Raises:
      ValueError: if a pattern of `lora` matches nothing, if it matches only some layers of a
        scanned stack, or if a parameter would have two updates.
    """

    has_base = True

    def __init__(
        self,
        model: Model,
        example: tuple[jax.ShapeDtypeStruct, ...],
        lora: LoRA,
        *,
        is_new: Callable[[str], bool] = lambda path: False,
    ):
        super().__init__(model, example)
        self.lora = lora
        self.updates: dict[Keys, Update] = {}
        self.whole: list[Keys] = []
        chooser = _UpdateChooser(lora)

        shapes, axes = map(traverse_util.flatten_dict, self.abstract_model())
        for keys in sorted(shapes):
            collection, *path = keys
            looped = looped_paths(model, tuple(path))
            if _matches_all("init_rules match", looped, is_new):
                self.whole.append(keys)
            elif collection != "params":
                continue
            elif chooser.matches("whole", looped):
                self.whole.append(keys)
            else:
                update = chooser.update_of(looped, shapes[keys], axes[keys])
                if update is not None:
                    self.updates[keys] = update
        chooser.check_patterns()

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
        """Returns the shapes and the logical axes of all variables of the model.

        With ``base="int8"``, kernels, embeddings and output projections are `Int8Array`, unless
        they are trained as complete arrays.
        """
        shapes, axes = map(traverse_util.flatten_dict, self.abstract_model())
        if self.lora.base == INT8:
            for keys in shapes.keys() - set(self.whole):
                if keys[0] == "params" and _is_rounded(keys[-1], axes[keys]):
                    shapes[keys], axes[keys] = abstract_int8(shapes[keys], axes[keys])
        return traverse_util.unflatten_dict(shapes), traverse_util.unflatten_dict(axes)

    def init(self, key: jax.Array, base: Variables) -> Variables:
        """Returns new updates, and copies of the variables that are trained completely.

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
            random = {leaf: random_keys[*keys, leaf] for leaf in update.leaves}
            arrays = update.init(random, meta.unbox(of_base[keys]))
            variables |= {(*keys, leaf): array for leaf, array in arrays.items()}
        return traverse_util.unflatten_dict(variables)

    def merge(self, variables: Variables, base: Variables) -> Variables:
        """Returns the variables for the model's `apply`.

        A parameter with an update becomes an `UpdatedParameter`, to which the update is applied
        when a module reads it. Variables that are trained completely replace the variables of the
        base, or are added if the base does not contain them.
        """
        return _merge(variables, base, tuple(self.updates.items()))

    def merge_for_evaluation(self, variables: Variables, base: Variables) -> Variables:
        """Returns the result of `merge_arrays`, or of `merge` if the base is in 8 bits."""
        if self.lora.base == INT8:
            return self.merge(variables, base)
        return self.merge_arrays(variables, base)

    def merge_arrays(self, variables: Variables, base: Variables) -> Variables:
        """Returns the result of `merge` as plain arrays, computed by a compiled program.

        All objects with equal updates share the compiled program.
        """
        merged: Variables = _compiled_merge(variables, base, tuple(self.updates.items()))
        return merged


class _UpdateChooser:
    """Chooses the update of every parameter, and remembers what the patterns of a `LoRA` match.

    Args:
      lora: the configuration of the adapters.
    """

    def __init__(self, lora: LoRA):
        self._lora = lora
        # For every field with a pattern, the paths that the pattern could match.
        self._candidates: dict[str, list[str]] = {}
        # The fields whose patterns matched at least one of these paths.
        self._matched: set[str] = set()
        # The paths of all parameters that have low-rank updates, for which the rules are meant.
        self._low_rank: list[str] = []

    def matches(self, field: str, looped: list[str]) -> bool:
        """Returns whether the pattern in a field of the `LoRA` matches a parameter.

        Args:
          field: the name of the field, whose value may be None.
          looped: the paths of the layers whose values are stacked in the parameter.
        """
        pattern: str | None = getattr(self._lora, field)
        if pattern is None:
            return False
        self._candidates.setdefault(field, []).extend(looped)

        def is_match(path: str) -> bool:
            """Returns whether the pattern matches the path of a layer's parameter."""
            return re.fullmatch(pattern, path) is not None

        found = _matches_all(f"training.adapters.{field}: {pattern!r} matches", looped, is_match)
        if found:
            self._matched.add(field)
        return found

    def update_of(
        self, looped: list[str], shape: jax.ShapeDtypeStruct, axes: Axes
    ) -> Update | None:
        """Returns the update of a parameter, or `None` if the parameter is not trained.

        Args:
          looped: the paths of the layers whose values are stacked in the parameter.
          shape: the shape and dtype of the parameter.
          axes: the logical axes of the parameter.
        """
        lora = self._lora
        update: Update | None = None
        field = _low_rank_field(looped[0], axes)
        if field is not None and self.matches(field, looped):
            rank, scale = self._rank_and_scale(looped)
            update = _LOW_RANK_KINDS[field](shape, axes, rank, scale, lora.dora)

        if lora.tokens and "vocab" in axes and self.matches("token_arrays", looped):
            if update is not None:
                raise ValueError(
                    f"training.adapters: {looped[0]} would have both a low-rank update and trained "
                    "entries of tokens. Exclude it from token_arrays, or from targets and "
                    "embeddings."
                )
            rows = shape.shape[axes.index("vocab")]
            if max(lora.tokens) >= rows:
                raise ValueError(
                    f"training.adapters.tokens contains {max(lora.tokens)}, but {looped[0]} has "
                    f"only the tokens 0 to {rows - 1}. Extend it with an init_rule whose action is "
                    "'resize', or correct the token."
                )
            update = TokenEntries(shape, axes, lora.tokens)
        return update

    def _rank_and_scale(self, looped: list[str]) -> tuple[int, float]:
        """Returns the rank and the scale of a low-rank update.

        Args:
          looped: the paths of the layers whose values are stacked in the parameter.

        Raises:
          ValueError: if the rules differ between layers of a scanned stack.
        """
        self._low_rank += looped
        first, *others = looped
        expected = self._lora.rank_and_scale(first)
        for path in others:
            if self._lora.rank_and_scale(path) != expected:
                raise ValueError(
                    f"training.adapters.rules give {first} and {path} different ranks or "
                    "scales, but they are layers of a scanned stack. Use the same rule for all "
                    "layers of the stack, or build the model with scan=False."
                )
        return expected

    def check_patterns(self) -> None:
        """Raises a `ValueError` if a pattern of the `LoRA` matches no parameter."""
        lora = self._lora
        for field, noun in _FIELDS.items():
            pattern = getattr(lora, field)
            if pattern is None or field in self._matched:
                continue
            if field == "token_arrays" and not lora.tokens:
                continue
            name = f"training.adapters.{field}"
            paths = self._candidates.get(field)
            if not paths:
                raise ValueError(
                    f"{name}: {pattern!r} matches no {noun}, because the model has none, or all of "
                    "them are trained as complete arrays."
                )
            raise ValueError(explain_no_match(name, pattern, noun, paths))
        if not self._matched:
            raise ValueError(
                "training.adapters trains nothing. Set targets, embeddings, tokens or whole."
            )
        if lora.rules:
            patterns = [rule.pattern for rule in lora.rules]
            if not self._low_rank:
                raise ValueError(
                    "training.adapters.rules have no effect, because there are no low-rank "
                    "updates. Set targets or embeddings, or leave rules out."
                )
            check_patterns_decide("training.adapters.rules", patterns, self._low_rank)


_LOW_RANK_KINDS = {"targets": LowRankUpdate, "embeddings": EmbeddingUpdate}
"""The fields of a `LoRA` that select parameters for low-rank updates, and the kinds of updates."""


def _low_rank_field(path: str, axes: Axes) -> str | None:
    """Returns the field of a `LoRA` that can select a parameter for a low-rank update.

    The field is `None` if parameters of this kind have no low-rank updates.
    """
    if path.endswith("kernel"):
        return "targets"
    # A table of relative biases is called an embedding, too, but it does not contain vectors. The
    # separate vector of an input is not a table.
    if path.endswith("embedding") and axes[-1] == "embed" and len(axes) > 1:
        return "embeddings"
    return None


_FIELDS = {
    "targets": "kernel",
    "embeddings": "embedding",
    "token_arrays": "embedding or output projection",
    "whole": "parameter",
}
"""The fields of a `LoRA` that hold patterns, and the parameters that the patterns can match."""


def _is_rounded(name: str, axes: Axes) -> bool:
    """Returns whether a parameter of the base is stored in 8 bits with ``base="int8"``.

    Kernels, embeddings and output projections are stored in 8 bits. Biases, scales and tables stay
    in float32.
    """
    return name.endswith("kernel") or axes == ("vocab", "embed")


def _merge(
    variables: Variables, base: Variables, updates: tuple[tuple[Keys, Update], ...]
) -> Variables:
    """Returns the variables of the adapted model; see `Adapted.merge`."""
    trained, merged = map(traverse_util.flatten_dict, (variables, base))
    for keys, update in updates:
        arrays = {leaf: trained.pop((*keys, leaf)) for leaf in update.leaves}
        merged[keys] = UpdatedParameter(merged[keys], arrays, update)
    # All arrays that are left in `trained` are variables that are trained completely.
    return traverse_util.unflatten_dict(merged | trained)


@functools.partial(jax.jit, static_argnums=2)
def _compiled_merge(
    variables: Variables, base: Variables, updates: tuple[tuple[Keys, Update], ...]
) -> Variables:
    """Returns the result of `_merge` as plain arrays."""
    merged: Variables = meta.unbox(_merge(variables, base, updates))
    return merged


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
