"""Explanations of attention calls: which implementation runs, and why not another."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable

import jax
import numpy as np

from synthesizer_jax.base.typing import PyTree

_log = logging.getLogger("synthesizer_jax.attention")

_explanations: contextvars.ContextVar[list[Explanation] | None] = contextvars.ContextVar(
    "explanations", default=None
)
_platform: contextvars.ContextVar[str | None] = contextvars.ContextVar("platform", default=None)

_retraced = jax.make_user_context(default_value=None)
"""Compiled functions that have run already are traced again where its value is new."""

_calls = itertools.count()

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How one call of `attend` is computed.

    Attributes:
      route: ``static``, ``fused``, ``banded`` or ``reference``, see `attend`; ``flax`` where
        `attention_fn` leaves the computation to Flax's function.
      kernel: what runs it on the platform.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      shape: batch, queries, keys and heads, on all devices.
      unpacked: the examples of packed rows become rows of their own first.
      divided: the mesh axes that divide batch, heads and sequence.
      kept_bytes: what the backward pass keeps, on all devices; None where it was not asked for.
      obstacles: why other routes and kernels do not run, by name.
    """

    route: str
    kernel: str
    platform: str
    shape: tuple[int, int, int, int]
    unpacked: bool = False
    divided: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    kept_bytes: int | None = None
    obstacles: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        batch, queries, keys, heads = self.shape
        over = ", ".join(f"{name} over {'+'.join(axes)}" for name, axes in self.divided.items())
        kept = "" if self.kept_bytes is None else f"; keeps {self.kept_bytes / 2**20:.1f} MiB"
        lines = [
            f"{self.route} route on {self.platform}, {self.kernel}: batch {batch}, {heads} heads, "
            f"{queries} queries, {keys} keys"
            + (", unpacked" if self.unpacked else "")
            + (f"; {over}" if over else "")
            + kept
        ]
        return "\n".join(lines + [f"  not {name}: {why}" for name, why in self.obstacles.items()])


def explain(
    function: Callable[..., PyTree], *args: PyTree, platform: str | None = None, **kwargs: PyTree
) -> tuple[Explanation, ...]:
    """Explains how every attention inside a function would be computed; nothing is computed.

    Args:
      function: is traced with the other arguments: ``layer.apply`` of a Linen layer, an NNX layer, or
        `attend`. An NNX layer that a function closes over must have no dropout.
      *args: arrays or `jax.ShapeDtypeStruct`, and whatever else the function takes.
      platform: ``cpu``, ``gpu`` or ``tpu``; None: the one that JAX uses.
      **kwargs: as `args`.

    Returns:
      One explanation for each call of `attend`, in their order; a scanned layer counts once.
    """
    leaves, treedef = jax.tree.flatten((function, args, kwargs))  # an NNX layer is a tree, too
    is_array = [isinstance(x, _ARRAY_TYPES) for x in leaves]

    def call(arrays: list[jax.Array]) -> PyTree:
        remaining = iter(arrays)
        mixed = [next(remaining) if a else x for x, a in zip(leaves, is_array, strict=True)]
        function, args, kwargs = jax.tree.unflatten(treedef, mixed)
        out = function(*args, **kwargs)
        return jax.tree.map(lambda x: x if isinstance(x, _ARRAY_TYPES) else None, out)

    explanations: list[Explanation] = []
    tokens = _explanations.set(explanations), _platform.set(platform)
    try:
        with _retraced(next(_calls)):
            jax.eval_shape(call, [x for x, a in zip(leaves, is_array, strict=True) if a])
    finally:
        _explanations.reset(tokens[0])
        _platform.reset(tokens[1])
    return tuple(explanations)


def log_external_call(route: str, kernel: str, function: Callable[..., jax.Array], *args: PyTree) -> None:
    """Records a call of another library's attention, ``function(query, key, value, ...)``."""
    query, key, value, *rest = args
    batch, queries, heads, _ = query.shape
    shape = batch, queries, key.shape[1], heads
    why = "it has no dropout of single weights, no precision and no other einsums"
    log_call(
        lambda: Explanation(route, kernel, explained_platform(), shape, obstacles={"engine": why}),
        lambda: jax.vjp(lambda *x: function(*x, *rest), query, key, value)[1],
    )


def log_call(make: Callable[[], Explanation], residuals: Callable[[], PyTree]) -> None:
    """Records how a call is computed: a line in the log, and an entry of what `explain` returns.

    `make` returns the explanation without `kept_bytes`, `residuals` what the backward pass keeps;
    `explain` alone calls that.
    """
    explanations = _explanations.get()
    if explanations is None and not _log.isEnabledFor(logging.DEBUG):
        return
    explanation = make()
    _log.debug("attend: %s", str(explanation).partition("\n")[0])
    if explanations is not None:
        leaves = jax.tree.leaves(jax.eval_shape(residuals))
        size = sum(x.size * x.dtype.itemsize for x in leaves)
        explanations.append(dataclasses.replace(explanation, kept_bytes=size))


@functools.cache
def warn_once(message: str) -> None:
    """Logs a warning; the same one only once in a process."""
    _log.warning(message)


def explained_platform() -> str:
    """Returns the platform that `explain` asks about, by default the one that JAX uses."""
    return _platform.get() or jax.default_backend()
