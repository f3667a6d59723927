"""Asking which implementation of attention runs, and why not another."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from synthesizer_jax.attention.attend import attend
from synthesizer_jax.attention.explanations import Explanation, collect_explanations
from synthesizer_jax.attention.terms import Terms
from synthesizer_jax.typing import PyTree

_ARRAY_TYPES = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


def explain(
    function: Callable[..., PyTree] | Terms,
    *args: PyTree,
    platform: str | None = None,
    **kwargs: PyTree,
) -> tuple[Explanation, ...]:
    """Explains how every attention inside a function would be computed; nothing is computed.

    Args:
      function: is traced with the other arguments, such as ``layer.apply`` of a Linen layer, an NNX layer
        or `attend`; or terms, for which ``explain(terms, values, ...)`` explains `attend`. An NNX layer
        that a function closes over must have no dropout.
      *args: arrays or `jax.ShapeDtypeStruct`, and whatever else the function takes.
      platform: ``cpu``, ``gpu`` or ``tpu``; None: the one that JAX uses.
      **kwargs: as `args`.

    Returns:
      One explanation for each call of `attend`, in their order; a scanned layer counts once.
    """
    if isinstance(function, tuple):
        args, function = (function, *args), attend
    leaves, treedef = jax.tree.flatten((function, args, kwargs))  # an NNX layer is a tree, too
    is_array = [isinstance(x, _ARRAY_TYPES) for x in leaves]

    def call(arrays: list[jax.Array]) -> PyTree:
        remaining = iter(arrays)
        mixed = [next(remaining) if a else x for x, a in zip(leaves, is_array, strict=True)]
        function, args, kwargs = jax.tree.unflatten(treedef, mixed)
        out = function(*args, **kwargs)
        return jax.tree.map(lambda x: x if isinstance(x, _ARRAY_TYPES) else None, out)

    with collect_explanations(platform) as explanations:
        jax.eval_shape(call, [x for x, a in zip(leaves, is_array, strict=True) if a])
    return tuple(explanations)
