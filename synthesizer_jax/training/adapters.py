"""Low-rank updates of a trained model's kernels: LoRA (Hu et al. 2022).

A kernel W ``[inputs, outputs]`` becomes W + (alpha / rank) · A · B, with A ``[inputs, rank]`` and B
``[rank, outputs]``. Both keep the kernel's axes: those of a query, ``[d_model, heads, head_dim]``, are
``[d_model, rank]`` and ``[rank, heads, head_dim]``; those of scanned layers keep the axis of the layers.

A run with adapters has two kinds of parameters. The low-rank updates are ``PATH OF THE KERNEL/lora_a`` and
``…/lora_b``. Parameters for which `Experiment.init_rules` make random values, such as a new classifier, are
in no other checkpoint: they are trained whole, under their own paths. `trained_variables` has both kinds.
The variables of the model are a function of them and of the base's, `adapted_variables`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, Positive, PyTree
from synthesizer_jax.optimizers.rules import looped_paths, merge_entries
from synthesizer_jax.primitives.initializers import TorchUniform
from synthesizer_jax.primitives.parameters import Axes, Variables, abstract_variables, check_path_pattern

if TYPE_CHECKING:
    from synthesizer_jax.training.experiment import Experiment

LORA_A, LORA_B = "lora_a", "lora_b"


@register
@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which kernels have low-rank updates; see the module.

    Attributes:
      rank: of the updates.
      alpha: the updates are multiplied by alpha / rank.
      targets: a regular expression for whole paths of kernels, with looped layers, which scanned layers
        have too; by default the queries and values of attention.
      base_checksum: of the checkpoint `Experiment.init_from`, the base; a run fills it in.
    """

    rank: Count = 8
    alpha: Positive = 16.0
    targets: str = ".*/(query|value)/kernel"
    base_checksum: int | None = None

    def __post_init__(self) -> None:
        check_path_pattern("training.adapters", self.targets)


def trained_variables(experiment: Experiment) -> tuple[Variables, PyTree]:
    """Returns the shapes and logical axes of the variables that a run trains and saves.

    Without adapters these are the model's; see `abstract_adapters` for its errors.
    """
    shapes, axes = abstract_variables(experiment.model, *experiment.example)
    lora = experiment.training.adapters
    if lora is None:
        return shapes, axes
    return abstract_adapters(lora, experiment.model, shapes, axes, is_whole=experiment.draws)


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
      lora: which kernels have low-rank updates.
      model: the model of the base.
      shapes: the shapes of its variables.
      axes: their logical axes. A kernel with ``embed`` last sums over all axes before it, others over one.
      is_whole: tells from the path of a variable, with looped layers, whether the run holds it whole. A
        kernel that it holds whole has no low-rank update.

    Raises:
      ValueError: no kernel has an update, or only some of the layers of a scanned stack would be changed.
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
        if not _matches_all(what, looped, lambda path: re.fullmatch(lora.targets, path) is not None):
            continue
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
            f"training.adapters: {lora.targets!r} matches no kernel{example}; a pattern matches whole paths"
        )
    return traverse_util.unflatten_dict(adapters), traverse_util.unflatten_dict(names_of)


def _matches_all(what: str, looped: list[str], is_match: Callable[[str], bool]) -> bool:
    """Returns whether all of the layers that are stacked in an array are matched, or none of them.

    Raises:
      ValueError: some are, and others are not. The message begins with `what`.
    """
    others = [path for path in looped if not is_match(path)]
    if others and len(others) < len(looped):
        raise ValueError(
            f"{what} layers of a scanned stack, but not {others[0]!r}; match all of them, or build the "
            "model with scan=False"
        )
    return not others


def is_update(keys: tuple[str, ...]) -> bool:
    """Returns whether a variable of a run with adapters is a part of a low-rank update."""
    return keys[-1] in (LORA_A, LORA_B)


def init_adapters(key: jax.Array, shapes: PyTree, axes: PyTree) -> PyTree:
    """Returns fresh low-rank updates: A is uniform in ±1/√inputs, as PEFT's, and B is zero.

    Args:
      key: a random key.
      shapes: the shapes of a run's parameters. Those that are trained whole are left out of the result.
      axes: their logical axes.
    """
    names = traverse_util.flatten_dict(axes)
    flat = {keys: x for keys, x in traverse_util.flatten_dict(shapes).items() if is_update(keys)}
    fresh = {}
    for new, (keys, x) in zip(jax.random.split(key, len(flat)), flat.items(), strict=True):
        fan_in = math.prod(x.shape[int(names[keys][0] == "layers") : -1])
        is_a = keys[-1] == LORA_A
        fresh[keys] = TorchUniform(fan_in)(new, x.shape, x.dtype) if is_a else jnp.zeros(x.shape, x.dtype)
    return traverse_util.unflatten_dict(fresh)


def adapted_variables(variables: Variables, base: Variables, lora: LoRA | None) -> Variables:
    """Returns what a model's `apply` takes, from a run's variables and those of its base.

    Without adapters it is the run's variables. Otherwise low-rank updates are added to kernels of the base,
    and variables that the run holds whole take the place of the base's, which need not have them.
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
    """Returns ``[inputs, outputs]``; in full precision, so that it is the same wherever it is computed."""
    return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
