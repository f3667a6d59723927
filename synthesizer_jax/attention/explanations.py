"""Explanations of attention calls, which say which implementation runs and why.

`explain` traces a function. During this trace, every call of `attend` appends an `Explanation` to a
list in a context variable. Outside of `explain`, each call of `attend` only writes one line to the
log, at level DEBUG.
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
Without this context, `explain` would miss the attention inside of compiled functions.
"""

_calls = itertools.count()

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Describes how one call of `attend` is computed.

    Attributes:
      route: ``static``, ``fused``, ``banded`` or ``reference``; see `attend`. The route is ``flax``
        if `attention_fn` leaves the computation to Flax's function.
      kernel: a description of the code that runs the route on the platform.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      shape: the numbers of examples, queries, keys and heads, on all devices together.
      unpacked: whether packed rows are first unpacked to one row per example.
      divided: maps the array axes ``batch``, ``heads`` and ``sequence`` to the mesh axes that
        divide these array axes.
      kept_bytes: the number of bytes that are kept for the backward pass, on all devices together,
        or None if the number was not computed.
      obstacles: the reasons why other implementations do not run. A key is the name of a route, or
        ``kernels`` for the kernels of the chosen route. If the route is ``flax``, the key
        ``engine`` has the reason why this package does not compute the call.
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
    """Explains how each attention call inside a function would be computed, without running it.

    Args:
      function: the function to explain, such as the ``layer.apply`` of a Linen layer, an NNX layer,
        or `attend`. An NNX layer with dropout must be the function itself or an argument. If a
        function closes over an NNX layer with dropout, `explain` fails, because the trace cannot
        change the random state of the layer.
      *args: the arguments of the function. Arrays may be replaced by `jax.ShapeDtypeStruct`.
      platform: ``cpu``, ``gpu`` or ``tpu``. None means JAX's default platform.
      **kwargs: further arguments of the function.

    Returns:
      One explanation for each call of `attend`, in the order of the calls. A layer that runs inside
      of a scan has only one explanation.
    """
    leaves, treedef = jax.tree.flatten((function, args, kwargs))  # an NNX layer is also a pytree
    is_array = [isinstance(x, _ARRAY_TYPES) for x in leaves]

    def call(arrays: list[jax.Array]) -> PyTree:
        """Calls the function with traced arrays, and returns the arrays of its result."""
        # Only arrays are traced. Other arguments keep their Python values.
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
    """Records a call of an attention function from another library.

    Args:
      route: the name of the route in the explanation.
      kernel: a description of the code that computes the attention.
      function: the attention function, which takes ``(query, key, value, ...)``.
      *args: the arguments of the function. The query has the shape ``[b, q, h, e]``, and the key
        has the shape ``[b, k, h, e]``.
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
      make: a function that returns the explanation, without `kept_bytes`.
      residuals: a function that returns the arrays that are kept for the backward pass. The
        function traces the attention call and its gradient, which takes time, so it is called only
        inside of `explain`.
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

    Outside of `explain`, the result is JAX's default platform.
    """
    return _platform.get() or jax.default_backend()
