"""Explanations of attention calls: which implementation runs, and why others do not.

`explain` traces a function. While it does, every call of attention appends an `Explanation` to a
list in a context variable. Without `explain`, calls only write a line to the log, at level DEBUG.
"""

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
"""A user context that is part of JAX's tracing caches.

A compiled function that was traced before is traced again if this context has a new value.
Otherwise `explain` would miss the attention in it.
"""

_calls = itertools.count()

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """How one call of `attend` is computed.

    Attributes:
      route: ``static``, ``fused``, ``banded`` or ``reference``; see `attend`. It is ``flax`` if
        `attention_fn` leaves the computation to Flax's function.
      kernel: what runs the route on the platform, in words.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      shape: the numbers of examples, queries, keys and heads, on all devices together.
      unpacked: whether the examples of packed rows become rows of their own first.
      divided: the mesh axes that divide batch, heads and sequence, by these names.
      kept_bytes: the number of bytes that the backward pass keeps, on all devices together. None if
        it was not computed.
      obstacles: why other routes, or kernels, do not run, by name.
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
        parts = [
            f"{self.route} route on {self.platform}, computed by {self.kernel}: batch {batch}, "
            f"{heads} heads, {queries} queries, {keys} keys"
        ]
        if self.unpacked:
            parts.append("packed rows are unpacked")
        if self.divided:
            over = [f"{name} divided over {'+'.join(axes)}" for name, axes in self.divided.items()]
            parts.append(", ".join(over))
        if self.kept_bytes is not None:
            parts.append(f"keeps {self.kept_bytes / 2**20:.1f} MiB for the backward pass")
        reasons = [f"  not {name}: {why}" for name, why in self.obstacles.items()]
        return "\n".join(["; ".join(parts), *reasons])


def explain(
    function: Callable[..., PyTree], *args: PyTree, platform: str | None = None, **kwargs: PyTree
) -> tuple[Explanation, ...]:
    """Explains how every attention inside a function would be computed, without computing anything.

    Args:
      function: the function to explain. It may be the ``layer.apply`` of a Linen layer, an NNX
        layer, or `attend`. An NNX layer with dropout must be the function itself or an argument. A
        function that closes over it fails, because its random state cannot change inside the trace.
      *args: the arguments of the function. Arrays may be replaced by `jax.ShapeDtypeStruct`.
      platform: ``cpu``, ``gpu`` or ``tpu``. None stands for the platform that JAX uses.
      **kwargs: further arguments of the function.

    Returns:
      One explanation for each call of `attend`, in the order of the calls. A layer that is scanned
      counts once.
    """
    leaves, treedef = jax.tree.flatten((function, args, kwargs))  # an NNX layer is a tree, too
    is_array = [isinstance(x, _ARRAY_TYPES) for x in leaves]

    def call(arrays: list[jax.Array]) -> PyTree:
        """Calls the function with traced arrays, and returns the arrays of its result."""
        # Only arrays are traced. Everything else keeps its Python value.
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


def log_external_call(
    route: str, kernel: str, function: Callable[..., jax.Array], *args: PyTree
) -> None:
    """Records a call of another library's attention.

    Args:
      route: the name of the route in the explanation.
      kernel: what computes it, in words.
      function: the attention function, which takes ``(query, key, value, ...)``.
      *args: its arguments. Query and key are ``[b, q, h, e]`` and ``[b, k, h, e]``.
    """
    query, key, value, *rest = args
    batch, queries, heads, _ = query.shape
    shape = batch, queries, key.shape[1], heads
    why = "This package does not support dropout of single weights, a precision or custom einsums."
    log_call(
        lambda: Explanation(route, kernel, explained_platform(), shape, obstacles={"engine": why}),
        lambda: jax.vjp(lambda *x: function(*x, *rest), query, key, value)[1],
    )


def log_call(make: Callable[[], Explanation], residuals: Callable[[], PyTree]) -> None:
    """Records how a call is computed, in the log and in the list of `explain`.

    Args:
      make: returns the explanation, without `kept_bytes`.
      residuals: returns the arrays that the backward pass keeps. Only `explain` calls it, because
        it traces the call and its gradient.
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
    """Logs a warning. The same message is logged only once in a process."""
    _log.warning(message)


def explained_platform() -> str:
    """Returns the platform that `explain` asks about.

    Outside of `explain`, it is the platform that JAX uses.
    """
    return _platform.get() or jax.default_backend()
