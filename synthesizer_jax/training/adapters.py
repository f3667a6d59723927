"""LoRA adapters: low-rank updates of a trained model's kernels (Hu et al. 2022).

A kernel W of shape ``[inputs, outputs]`` becomes ``W + (alpha / rank) · A · B``, where A is
``[inputs, rank]`` and B is ``[rank, outputs]``. Kernels with more than two dimensions keep them:
for a query kernel ``[d_model, heads, head_dim]``, A is ``[d_model, rank]`` and B is
``[rank, heads, head_dim]``. In scanned layers, A and B both have a leading axis of layers.

A run with adapters trains and saves two kinds of parameters:

- The low-rank updates. Their paths are ``KERNEL_PATH/lora_a`` and ``KERNEL_PATH/lora_b``.
- Whole parameters for which `Experiment.init_rules` draw new random values, such as a new
  classifier. No other checkpoint contains these values, so the run trains the complete arrays,
  under their usual paths.

`Experiment.trained_variables` describes both kinds. `adapted_variables` computes the model's
variables from them and from the variables of the base, which is the checkpoint that the adapters
modify.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, Positive, PyTree
from synthesizer_jax.models.token_model import looped_paths
from synthesizer_jax.primitives.initializers import TorchUniform
from synthesizer_jax.primitives.parameters import (
    Axes,
    Variables,
    check_path_pattern,
    merge_entries,
)

LORA_A, LORA_B = "lora_a", "lora_b"


@register
@dataclasses.dataclass(frozen=True)
class LoRA:
    """Selects the kernels that are trained by low-rank updates, and the size of the updates.

    The formula is in the docstring of this module.

    Attributes:
      rank: the rank of the updates.
      alpha: the updates are multiplied by ``alpha / rank``.
      targets: a regular expression that must match the whole path of a kernel. Paths have the form
        of looped layers (``encoder/layers_0/...``), even if the model scans its layers. The default
        matches the query and value projections of attention.
      base_checksum: the checksum of the base, the checkpoint in `Experiment.init_from`. A run sets
        it, so that the adapters are never applied to another base.
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: str = ".*/(query|value)/kernel"
    base_checksum: int | None = None

    def __post_init__(self) -> None:
        check_path_pattern("training.adapters", self.targets)


def abstract_adapters(
    lora: LoRA,
    model: nn.Module,
    shapes: Variables,
    axes: PyTree,
    *,
    is_whole: Callable[[str], bool] = lambda _: False,
) -> tuple[Variables, PyTree]:
    """Returns the shapes and logical axes of the variables of a run with adapters.

    Args:
      lora: selects the kernels that have low-rank updates.
      model: the model to which the adapters are added.
      shapes: the shapes of the model's variables.
      axes: the logical axes of the model's variables. They determine which axes of a kernel are
        inputs: all axes except the last if the last one is ``embed``, otherwise only the first. The
        axis of scanned layers does not count.
      is_whole: a function that takes the path of a variable, in the form of looped layers, and
        returns whether the run trains the whole variable. Such a kernel has no low-rank update.

    Raises:
      ValueError: no kernel has an update, or a pattern matches only some layers of a scanned stack.
    """
    adapters, names_of, paths = {}, {}, list[str]()
    flat_axes = traverse_util.flatten_dict(axes)
    for keys, kernel in traverse_util.flatten_dict(shapes).items():
        collection, *_ = keys
        names: Axes = flat_axes[keys]
        looped = looped_paths(model, keys[1:])
        if _matches_all("init_rules match", looped, is_whole):
            adapters[keys], names_of[keys] = kernel, names
            continue
        if collection != "params" or not keys[-1].endswith("kernel"):
            continue
        paths += looped
        what = f"training.adapters: {lora.targets!r} matches"
        if not _matches_all(
            what, looped, lambda path: re.fullmatch(lora.targets, path) is not None
        ):
            continue
        # `inputs` is the position of the first output axis, after the axis of layers and the input
        # axes.
        lead = int(names[0] == "layers")
        inputs = kernel.ndim - 1 if names[-1] == "embed" else lead + 1
        for leaf, shape, of_leaf in (
            (LORA_A, (*kernel.shape[:inputs], lora.rank), (*names[:inputs], None)),
            (
                LORA_B,
                (*kernel.shape[:lead], lora.rank, *kernel.shape[inputs:]),
                (*names[:lead], None, *names[inputs:]),
            ),
        ):
            adapters[*keys, leaf] = jax.ShapeDtypeStruct(shape, kernel.dtype)
            names_of[*keys, leaf] = of_leaf
    if not any(map(is_update, adapters)):
        example = did_you_mean(lora.targets, paths) or f", such as {min(paths)!r}"
        raise ValueError(
            f"training.adapters: {lora.targets!r} matches no kernel{example}; a pattern matches "
            "whole paths"
        )
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(names_of)


def _matches_all(what: str, looped: list[str], is_match: Callable[[str], bool]) -> bool:
    """Returns whether layers that are stacked in one array match: all of them or none of them.

    Raises:
      ValueError: some layers match and others do not. The message begins with `what`.
    """
    others = [path for path in looped if not is_match(path)]
    if others and len(others) < len(looped):
        raise ValueError(
            f"{what} layers of a scanned stack, but not {others[0]!r}; match all of them, or build "
            "the model with scan=False"
        )
    return not others


def is_update(keys: tuple[str, ...]) -> bool:
    """Returns whether a variable of a run with adapters is part of a low-rank update."""
    return keys[-1] in (LORA_A, LORA_B)


def init_adapters(key: jax.Array, shapes: PyTree, axes: PyTree) -> PyTree:
    """Returns new low-rank updates. As in PEFT, A is uniform in ±1/√inputs, and B is zero.

    B is zero so that the adapted model is equal to its base when training starts.

    Args:
      key: a random key.
      shapes: the shapes of the run's parameters. Parameters that are trained whole are ignored.
      axes: the logical axes of the parameters.
    """
    names = traverse_util.flatten_dict(axes)
    flat = {keys: x for keys, x in traverse_util.flatten_dict(shapes).items() if is_update(keys)}
    fresh = {}
    for new, (keys, x) in zip(jax.random.split(key, len(flat)), flat.items(), strict=True):
        # A is [layers?, *inputs, rank]: only the input axes count for the range of its values.
        fan_in = math.prod(x.shape[int(names[keys][0] == "layers") : -1])
        is_a = keys[-1] == LORA_A
        fresh[keys] = (
            TorchUniform(fan_in)(new, x.shape, x.dtype) if is_a else jnp.zeros(x.shape, x.dtype)
        )
    return traverse_util.unflatten_dict(fresh)


def adapted_variables(variables: Variables, base: Variables, lora: LoRA | None) -> Variables:
    """Returns the variables for the model's `apply`, from a run's variables and those of its base.

    Low-rank updates are added to the kernels of the base. Variables that the run trains whole
    replace those of the base, or are added if the base does not have them. If `lora` is `None`, the
    run's variables are returned unchanged.
    """
    if lora is None:
        return variables
    adapters, kernels = traverse_util.flatten_dict(variables), traverse_util.flatten_dict(base)
    changed = {keys: x for keys, x in adapters.items() if not is_update(keys)}
    for keys, a in adapters.items():
        if keys[-1] == LORA_A:
            kernel, b = kernels[keys[:-1]], adapters[*keys[:-1], LORA_B]
            is_scanned = a.ndim + b.ndim - 2 > kernel.ndim  # both have the axis of the layers
            update = (jax.vmap(_product) if is_scanned else _product)(a, b)
            changed[keys[:-1]] = kernel + lora.alpha / lora.rank * update
    merged: Variables = merge_entries(traverse_util.unflatten_dict(changed), base)
    return merged


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the product of A and B, ``[inputs, outputs]``.

    It is computed in full precision, so that it is the same wherever it is computed.
    """
    return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
