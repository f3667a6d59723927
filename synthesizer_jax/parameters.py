"""Logical axis names of parameters, given at the place where a parameter is made.

Layers hand plain arrays to their users. Inside `logical_axes()` the same initialisers return boxes
that carry axis names, which is how a model's sharding and its optimiser's factoring are derived
(`abstract_variables`) without a second table of parameters.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
from flax import struct

LOGICAL_AXES = (
    "vocab",  # rows of the embedding and columns of the output projection
    "embed",  # width of the model
    "heads",
    "kv",  # width of one head
    "mlp",  # width of the feed-forward layer
    "synth_hidden",  # width of a Dense or Factorized Dense alignment's hidden layer
    "query_length",  # rows of a table over positions
    "key_length",  # columns of a table over positions
    "rank",  # inner width of a Factorized Random table
    "length",  # rows of a table of absolute positions
    "norm",  # scale of a normalisation
    "relpos_buckets",
    "parts",  # parts of a mixture
    "talk_from",  # heads that a talking-heads projection reads
    "talk_to",  # heads that it makes
    "taps",  # taps of a convolution
    "layers",  # stacked layers, added by scan
)
"""Every axis name a parameter may carry; `sharding.rules` maps them to mesh axes."""

ACTIVATION_AXES = (
    "batch",  # examples
    "sequence",  # positions of a row, where every query may see every key
)
"""Axis names of activations besides ``heads``; see `ambient`."""

_NAMED = contextvars.ContextVar("logical_axes", default=False)

Axes = tuple[str | None, ...]


def is_axes(node: Any) -> bool:
    """Whether a node of a tree is a tuple of axis names, which `jax.tree.map` should not enter."""
    named = hasattr(node, "_fields")  # a named tuple such as an optimiser's empty state
    return isinstance(node, tuple) and not named and all(isinstance(a, str | None) for a in node)


@struct.dataclass
class NamedAxes(nn.LogicallyPartitioned):
    """A parameter with the names of its axes; a surrounding mesh lays nothing out by them."""

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The parameter."""
        del apply_constraint
        return self.value


@contextlib.contextmanager
def logical_axes() -> Iterator[None]:
    """Within this context `with_axes` initialisers box their values with axis names."""
    token = _NAMED.set(True)
    try:
        yield
    finally:
        _NAMED.reset(token)


def with_axes(init: Callable[..., jax.Array], *axes: str | None) -> Callable[..., Any]:
    """An initialiser whose value carries `axes` inside `logical_axes()` and nothing outside.

    Args:
      init: an initialiser ``(key, shape, dtype) -> array``.
      *axes: one name of `LOGICAL_AXES`, or None, for every dimension of the parameter.
    """
    unknown = set(axes) - {*LOGICAL_AXES, None}
    if unknown:
        raise ValueError(f"unknown logical axis {unknown.pop()!r}; allowed: {LOGICAL_AXES}")
    if not _NAMED.get():
        return init
    return lambda *args, **kwargs: NamedAxes(init(*args, **kwargs), axes)


def abstract_variables(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Shapes and logical axes of all variables of a module, allocating nothing.

    Args:
      module: an unbound module; the other arguments are those of its `__call__` (arrays or
        `jax.ShapeDtypeStruct`).

    Returns:
      Two trees of the same structure: `jax.ShapeDtypeStruct` leaves, and tuples of axis names.
    """
    with logical_axes():
        boxed = jax.eval_shape(
            lambda *a, **k: module.init(jax.random.key(0), *a, **k), *args, **kwargs
        )
    is_box = lambda x: isinstance(x, nn.Partitioned | nn.LogicallyPartitioned)
    axes = jax.tree.map(
        lambda x: tuple(x.names) if is_box(x) else (None,) * x.ndim, boxed, is_leaf=is_box
    )
    shapes = jax.tree.map(lambda x: x.value if is_box(x) else x, boxed, is_leaf=is_box)
    return shapes, axes
