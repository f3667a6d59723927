"""Optimizers of optax, by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TypeAlias

import optax

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.optimizers.base import with_clipping
from synthesizer_jax.optimizers.schedules import Constant, Schedule
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Positive, PyTree

Argument: TypeAlias = float | int | bool | str | None

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: f
    for name, f in vars(optax).items()
    if inspect.isfunction(f) and next(iter(inspect.signature(f).parameters), "") == "learning_rate"
}


@register
@dataclasses.dataclass(frozen=True)
class Optax:
    """An optimizer of optax that takes a `learning_rate`; see `optax_optimizer`.

    Attributes:
      name: name of the function in `optax`, such as ``"lion"``.
      learning_rate: the schedule of the learning rate.
      arguments: names and values of the function's other arguments, sorted by name.
      clip_norm: maximum global norm of the gradient; None: no clipping.
    """

    name: str
    learning_rate: Schedule = Constant()
    arguments: tuple[tuple[str, Argument], ...] = ()
    clip_norm: Positive | None = None

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            suggestion = did_you_mean(self.name, OPTIMIZERS)
            raise ValueError(f"optax has no {self.name!r}{suggestion} to use here")
        try:
            signature = inspect.signature(OPTIMIZERS[self.name])
            signature.bind(learning_rate=None, **dict(self.arguments))
        except TypeError as error:
            raise ValueError(f"optax.{self.name}: {error}") from None

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """See `Optimizer.build`; the axes are not used."""
        del axes
        transformation = OPTIMIZERS[self.name](self.learning_rate.build(), **dict(self.arguments))
        return with_clipping(transformation, self.clip_norm)


def optax_optimizer(
    name: str,
    learning_rate: Schedule = Constant(),
    *,
    clip_norm: float | None = None,
    **arguments: Argument,
) -> Optax:
    """Returns the optimizer ``optax.NAME(learning_rate, **arguments)``, see `Optax`.

    Raises:
      ValueError: optax has no such optimizer, or it does not accept these arguments.
    """
    return Optax(name, learning_rate, tuple(sorted(arguments.items())), clip_norm)
