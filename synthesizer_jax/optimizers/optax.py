"""Optimizers and schedules of optax, selected by name."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import optax

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import from_json, register, to_json
from synthesizer_jax.base.typing import Positive, PyTree
from synthesizer_jax.optimizers.base import with_clipping
from synthesizer_jax.optimizers.schedules import Constant, LearningRate, build_schedule

Argument: TypeAlias = float | int | bool | str | None
"""An argument of a function of optax, which can be saved as JSON."""

OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: f
    for name, f in vars(optax).items()
    if inspect.isfunction(f)
    and next(iter(inspect.signature(f).parameters), "") == "learning_rate"
    # rprop, sm3 and lbfgs are excluded because they take no schedule or need more than gradients.
    and not name.startswith(("_", "scale_by_"))
    and name not in ("rprop", "sm3", "lbfgs")
}
"""The functions of optax that make an optimizer from a learning rate, by name."""

SCHEDULES: dict[str, Callable[..., optax.Schedule]] = {
    name: f
    for name, f in vars(optax.schedules).items()
    # Functions named ``inject_…`` change optimizers instead of making schedules.
    if inspect.isfunction(f) and not name.startswith("inject_")
}
"""The functions of optax that make a schedule, by name."""


@register
@dataclasses.dataclass(frozen=True)
class Optax:
    """An optimizer of optax that takes a `learning_rate`; see `optax_optimizer`.

    Attributes:
      name: name of the function in `optax`, such as ``"lion"``.
      learning_rate: the schedule of the learning rate.
      arguments: names and values of the function's other arguments, sorted by name.
      clip_norm: maximum global norm of the gradient. None means no clipping.
    """

    name: str
    learning_rate: LearningRate = Constant()
    arguments: tuple[tuple[str, Argument], ...] = ()
    clip_norm: Positive | None = None

    def __post_init__(self) -> None:
        _check_call(self.name, OPTIMIZERS, {"learning_rate": None, **dict(self.arguments)})

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        del axes  # only Adafactor and AdamW use the logical axes of parameters
        learning_rate = build_schedule(self.learning_rate)
        transformation = OPTIMIZERS[self.name](learning_rate, **dict(self.arguments))
        return with_clipping(transformation, self.clip_norm)


@register
@dataclasses.dataclass(frozen=True)
class OptaxSchedule:
    """A schedule of optax; see `optax_schedule`.

    Attributes:
      name: name of the function in `optax.schedules`.
      arguments: names and values of the function's arguments.
    """

    name: str
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        _check_call(self.name, SCHEDULES, self.arguments)

    def build(self) -> optax.Schedule:
        return SCHEDULES[self.name](**{name: _thaw(x) for name, x in self.arguments.items()})


def _thaw(value: Any) -> Any:
    """Returns an argument in the form that optax expects.

    Configurations store lists as tuples and integer keys as strings. This function restores the
    lists and the integers, and builds schedules.
    """
    if isinstance(value, dict):
        return {int(key) if key.isdigit() else key: x for key, x in value.items()}
    if isinstance(value, tuple):
        return [_thaw(x) for x in value]
    if hasattr(value, "build"):
        return value.build()
    return value


def _check_call(name: str, functions: Mapping[str, Callable[..., Any]], arguments: Any) -> None:
    """Raises a `ValueError` if there is no such function, or if it does not take the arguments."""
    if name not in functions:
        raise ValueError(
            f"optax has no function {name!r} that can be used here"
            f"{did_you_mean(name, functions) or '.'}"
        )
    try:
        inspect.signature(functions[name]).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"optax.{name} cannot be called with these arguments: {error}.") from None


def optax_optimizer(
    name: str,
    learning_rate: LearningRate = Constant(),
    *,
    clip_norm: float | None = None,
    **arguments: Argument,
) -> Optax:
    """Returns the optimizer ``optax.NAME(learning_rate, **arguments)``.

    Args:
      name: name of the function in `optax`, such as ``"lion"``.
      learning_rate: a number or a schedule.
      clip_norm: maximum global norm of the gradient. None means no clipping.
      **arguments: the function's other arguments.

    Raises:
      ValueError: if optax has no optimizer of this name, or the arguments do not fit the optimizer.
    """
    return Optax(name, learning_rate, tuple(sorted(arguments.items())), clip_norm)


def optax_schedule(name: str, **arguments: Any) -> OptaxSchedule:
    """Returns the schedule ``optax.NAME(**arguments)``.

    Args:
      name: name of the function in `optax.schedules`.
      **arguments: the function's arguments.

    Raises:
      ValueError: if optax has no schedule of this name, or the arguments do not fit the schedule.
    """
    return OptaxSchedule(name, from_json(to_json(arguments)))
