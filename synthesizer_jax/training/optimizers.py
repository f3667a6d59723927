"""Optimisers as frozen configurations that recipes hold."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import optax

from synthesizer_jax.parameters import Axes, is_axes
from synthesizer_jax.registry import register
from synthesizer_jax.training.adafactor import NEVER_FACTORED, adafactor, moment_axes
from synthesizer_jax.training.schedules import Constant, InverseSquareRoot, Schedule


class Optimizer(Protocol):
    """An optimiser's configuration; one of your own is a frozen dataclass with `register`."""

    def build(self, axes: Any) -> optax.GradientTransformation:
        """The optax transformation for parameters of these logical axes."""
        ...


@register
@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), from optax.

    Attributes:
      learning_rate: a schedule.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: not applied to norm scales, relative buckets and mixture weights.
      clip_norm: largest global norm of the gradient; None: none.
    """

    learning_rate: Schedule = Constant()
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def build(self, axes: Any) -> optax.GradientTransformation:
        """The optax transformation for parameters of these logical axes."""
        decays = jax.tree.map(lambda a: not NEVER_FACTORED & set(a), axes, is_leaf=is_axes)
        adam = optax.adamw(
            self.learning_rate.build(),
            b1=self.b1,
            b2=self.b2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            mask=decays if self.weight_decay else None,
        )
        return clipped(adam, self.clip_norm)


@register
@dataclasses.dataclass(frozen=True)
class Adafactor:
    """T5's Adafactor, see `adafactor.adafactor`.

    Attributes:
      learning_rate: a schedule; T5's pre-training by default.
      decay_rate: exponent of the second moment's decay.
      clip: largest RMS of a block's update; None: none.
      parameter_scale: multiply the step by the RMS of the parameter.
      min_size: smallest number of rows and columns that are factored; see `adafactor.blocks_of`.
      clip_norm: largest global norm of the gradient; None (T5): none.
    """

    learning_rate: Schedule = InverseSquareRoot()
    decay_rate: float = 0.8
    clip: float | None = 1.0
    parameter_scale: bool = True
    min_size: int = 128
    clip_norm: float | None = None

    def build(self, axes: Any) -> optax.GradientTransformation:
        """The optax transformation for parameters of these logical axes."""
        factored = adafactor(
            self.learning_rate.build(),
            axes,
            decay_rate=self.decay_rate,
            clip=self.clip,
            parameter_scale=self.parameter_scale,
            min_size=self.min_size,
        )
        return clipped(factored, self.clip_norm)


def clipped(
    transformation: optax.GradientTransformation, clip_norm: float | None
) -> optax.GradientTransformation:
    """Clips the gradient's global norm first."""
    if clip_norm is None:
        return transformation
    return optax.chain(optax.clip_by_global_norm(clip_norm), transformation)


def state_axes(opt_state: Any, axes: Any, shapes: Any, *, min_size: int = 128) -> Any:
    """Logical axes of an optimiser's state, found by the names of the parameters.

    A leaf whose path ends with a parameter's path (Adam's moments) has that parameter's axes, one
    with ``row``, ``col`` or ``full`` after it (Adafactor's) those that remain; others have none.

    Args:
      opt_state: the state, or its shapes.
      axes: the parameters' axes.
      shapes: the parameters, or their shapes.
      min_size: as given to `Adafactor`.
    """
    known: dict[tuple[str, ...], Axes] = {}
    paths = jax.tree.leaves_with_path(axes, is_leaf=is_axes)
    for (path, names), leaf in zip(paths, jax.tree.leaves(shapes), strict=True):
        name = keys_of(path)
        known[name] = names
        for kind, left in moment_axes(names, leaf.shape, min_size=min_size).items():
            known[(*name, kind)] = left

    def find(path: Any, leaf: Any) -> Axes:
        return known.get(keys_of(path), (None,) * leaf.ndim)

    return jax.tree.map_with_path(find, opt_state)


def keys_of(path: Any) -> tuple[str, ...]:
    """The dictionary keys of a path; a state's own attributes and indices are left out."""
    return tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey))
