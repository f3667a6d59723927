"""Optimizers and schedules of optax, by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias

import optax

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.optimizers.base import with_clipping
from synthesizer_jax.optimizers.schedules import Constant, Schedule
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Positive, PyTree

Argument: TypeAlias = float | int | bool | str | None
Arguments: TypeAlias = tuple[tuple[str, Argument], ...]
"""Names and values, sorted by name; a tuple, so that configurations are hashable."""


@register
@dataclasses.dataclass(frozen=True)
class Optax:
    """An optimizer of optax that takes a `learning_rate`; see `optax_optimizer`.

    Attributes:
      name: name of the function in `optax`, such as ``"lion"``.
      learning_rate: the schedule of the learning rate.
      arguments: arguments of the function, without the learning rate.
      clip_norm: maximum global norm of the gradient; None: no clipping.
    """

    name: str
    learning_rate: Schedule = Constant()
    arguments: Arguments = ()
    clip_norm: Positive | None = None

    def __post_init__(self) -> None:
        _check_call(self.name, OPTIMIZERS, {"learning_rate": None, **dict(self.arguments)})

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """See `Optimizer.build`; the axes are not used."""
        del axes
        transformation = OPTIMIZERS[self.name](self.learning_rate.build(), **dict(self.arguments))
        return with_clipping(transformation, self.clip_norm)


@register
@dataclasses.dataclass(frozen=True)
class OptaxSchedule:
    """A schedule of optax; see `optax_schedule`.

    Attributes:
      name: name of the function in `optax`, such as ``"warmup_cosine_decay_schedule"``.
      arguments: arguments of the function.
    """

    name: str
    arguments: Arguments = ()

    def __post_init__(self) -> None:
        _check_call(self.name, SCHEDULES, dict(self.arguments))

    def build(self) -> optax.Schedule:
        """See `Schedule.build`."""
        return SCHEDULES[self.name](**dict(self.arguments))


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


def optax_schedule(name: str, **arguments: Argument) -> OptaxSchedule:
    """Returns the schedule ``optax.NAME(**arguments)``.

    Raises:
      ValueError: optax has no such schedule, or it does not accept these arguments.
    """
    return OptaxSchedule(name, tuple(sorted(arguments.items())))


_FUNCTIONS: dict[str, Callable[..., PyTree]] = {
    name: f for name, f in vars(optax).items() if inspect.isfunction(f)
}
OPTIMIZERS = {
    name: f
    for name, f in _FUNCTIONS.items()
    if next(iter(inspect.signature(f).parameters), "") == "learning_rate"
}
SCHEDULES = {name: f for name, f in _FUNCTIONS.items() if name.endswith("_schedule")}


def _check_call(
    name: str, functions: Mapping[str, Callable[..., object]], arguments: Mapping[str, object]
) -> None:
    """Raises a `ValueError` unless the functions include one of that name with these arguments."""
    if name not in functions:
        raise ValueError(f"optax has no {name!r}{did_you_mean(name, functions)} to use here")
    try:
        inspect.signature(functions[name]).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"optax.{name}: {error}") from None
