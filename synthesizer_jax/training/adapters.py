"""Low-rank updates of a trained model's kernels: LoRA (Hu et al. 2022).

A kernel W ``[inputs, outputs]`` becomes W + (alpha / rank) · A · B, with A ``[inputs, rank]`` and B
``[rank, outputs]``. Both keep the kernel's axes: those of a query, ``[d_model, heads, head_dim]``, are
``[d_model, rank]`` and ``[rank, heads, head_dim]``; those of scanned layers keep the axis of the layers.

The adapters are all parameters of a run, ``PATH OF THE KERNEL/lora_a`` and ``…/lora_b``. Those of the model
are a function of the base's and of them, `adapted_variables`.
"""

from __future__ import annotations

import dataclasses
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, Positive, PyTree
from synthesizer_jax.optimizers.rules import looped_paths, merge_entries
from synthesizer_jax.primitives.initializers import TorchUniform
from synthesizer_jax.primitives.parameters import Axes, Variables, check_path_pattern

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


def abstract_adapters(
    lora: LoRA, model: nn.Module, shapes: Variables, axes: PyTree
) -> tuple[Variables, PyTree]:
    """Returns the shapes and logical axes of the adapters' variables.

    Args:
      lora: which kernels they change.
      model: the model of the base.
      shapes: the shapes of its variables.
      axes: their logical axes. A kernel with ``embed`` last sums over all axes before it, others over one.

    Raises:
      ValueError: no kernel is changed, or only some of the layers of a scanned stack.
    """
    adapters, names_of, paths = {}, {}, list[str]()
    flat_axes = traverse_util.flatten_dict(axes["params"])
    for keys, kernel in traverse_util.flatten_dict(shapes["params"]).items():
        if not keys[-1].endswith("kernel"):
            continue
        looped = looped_paths(model, keys)
        others = [path for path in looped if not re.fullmatch(lora.targets, path)]
        paths += looped
        if len(others) == len(looped):
            continue
        if others:
            raise ValueError(
                f"training.adapters: {lora.targets!r} matches layers of a scanned stack, but not "
                f"{others[0]!r}; match all of them, or build the model with scan=False"
            )
        names: Axes = flat_axes[keys]
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
    if not adapters:
        example = did_you_mean(lora.targets, paths) or f", such as {min(paths)!r}"
        raise ValueError(
            f"training.adapters: {lora.targets!r} matches no kernel{example}; a pattern matches whole paths"
        )
    return (
        {"params": traverse_util.unflatten_dict(adapters)},
        {"params": traverse_util.unflatten_dict(names_of)},
    )


def init_adapters(key: jax.Array, shapes: PyTree, axes: PyTree) -> PyTree:
    """Returns fresh adapters: A is uniform in ±1/√inputs, as PEFT's, and B is zero."""
    flat, names = traverse_util.flatten_dict(shapes), traverse_util.flatten_dict(axes)
    fresh = {}
    for new, (keys, x) in zip(jax.random.split(key, len(flat)), flat.items(), strict=True):
        fan_in = math.prod(x.shape[int(names[keys][0] == "layers") : -1])
        is_a = keys[-1] == LORA_A
        fresh[keys] = TorchUniform(fan_in)(new, x.shape, x.dtype) if is_a else jnp.zeros(x.shape, x.dtype)
    return traverse_util.unflatten_dict(fresh)


def adapted_variables(variables: Variables, base: Variables, lora: LoRA | None) -> Variables:
    """Returns what a model's `apply` takes, from a run's variables and those of its base.

    Without adapters it is the run's variables; otherwise those of the base with the adapters added.
    """
    if lora is None:
        return variables
    adapters = traverse_util.flatten_dict(variables["params"])
    kernels = traverse_util.flatten_dict(base["params"])
    changed = {}
    for keys, a in adapters.items():
        if keys[-1] == LORA_A:
            kernel, b = kernels[keys[:-1]], adapters[*keys[:-1], LORA_B]
            is_scanned = a.ndim + b.ndim - 2 > kernel.ndim  # both have the axis of the layers
            update = (jax.vmap(_product) if is_scanned else _product)(a, b)
            changed[keys[:-1]] = kernel + lora.alpha / lora.rank * update
    return {**base, "params": merge_entries(traverse_util.unflatten_dict(changed), base["params"])}


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns ``[inputs, outputs]``; in full precision, so that it is the same wherever it is computed."""
    return jnp.tensordot(a, b, 1, precision=jax.lax.Precision.HIGHEST)
