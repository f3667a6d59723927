"""T5's Adafactor, which factors parameters according to their logical axes.

optax's Adafactor factors the two largest dimensions of an array and computes norms over the whole array.
However, T5's attention kernels are matrices in three dimensions, scanned layers are stacked in one array,
and a Synthesizer's table is a stack of one matrix per head. Here the logical axes of a parameter determine
which of its dimensions form a batch of separate matrices, which are rows and which are columns.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.optimizers.base import with_clipping
from synthesizer_jax.optimizers.schedules import InverseSquareRoot, Schedule
from synthesizer_jax.parameters import Axes, is_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Count, KeyPath, Positive, PyTree

BATCH = frozenset({"layers"})
"""Axes along which separate parameters are stacked."""

TABLE = frozenset({"query_length", "key_length"})
"""Axes of tables; with one of these, ``heads`` is a batch axis too, as every head has its own table."""

NEVER_FACTORED = frozenset({"norm", "relpos_buckets", "parts"})
"""Axes of parameters that are never factored."""

T5_AXES = frozenset({"layers", "vocab", "embed", "mlp", "heads", "kv"})
"""Axes of T5's own matrices, whose stacks T5X factors regardless of their size."""

MERGED: types.MappingProxyType[str, str] = types.MappingProxyType(
    {"kv": "heads", "synth_hidden": "heads"}
)
"""Axes that form a single matrix dimension with the axis before them."""

EPSILON_SQUARE = 1e-30
"""ε₁, which is added to squares of gradients."""

EPSILON_SCALE = 1e-3
"""ε₂, the smallest scale of a parameter."""

Moments: TypeAlias = dict[str, jax.Array]
"""The second moment of a parameter: ``row`` and ``col``, or ``full``."""


@dataclasses.dataclass(frozen=True)
class FactoredDims:
    """The roles of a parameter's dimensions.

    Attributes:
      batch: dimensions along which separate blocks are stacked.
      rows: dimensions that together form the rows of a block's matrix; empty if it is not factored.
      columns: dimensions that together form the columns.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def inner(self, ndim: int) -> tuple[int, ...]:
        """Returns the dimensions of a block."""
        return tuple(i for i in range(ndim) if i not in self.batch)


def factored_dims(axes: Axes, shape: tuple[int, ...], *, min_size: int = 128) -> FactoredDims:
    """Returns the roles of a parameter's dimensions.

    As in T5X, every layer of a scanned stack is a block, and stacks of T5's own matrices are factored
    regardless of their size, while the matrices of unrolled layers are factored only if they are large
    enough. Both layouts therefore have the same updates if rows and columns are at least `min_size`,
    as in all published models; smaller unrolled models keep full second moments.

    Args:
      axes: logical axis names of the dimensions.
      shape: the parameter's shape.
      min_size: minimum number of rows and of columns for factoring, except in stacks of T5's own
        matrices.
    """
    is_table = bool(TABLE & set(axes))
    batch = tuple(
        i
        for i, axis in enumerate(axes)
        if axis in BATCH or (axis == "heads" and is_table and len(axes) > 2)
    )
    groups: list[list[int]] = []
    for i, axis in enumerate(axes):
        if i in batch:
            continue
        previous = axes[i - 1] if i and (i - 1) not in batch else None
        if axis is not None and MERGED.get(axis) == previous and previous is not None:
            groups[-1].append(i)
        else:
            groups.append([i])
    sizes = [math.prod(shape[i] for i in group) for group in groups]
    if NEVER_FACTORED & set(axes) or len(groups) != 2:
        return FactoredDims(batch)
    is_t5_stack = "layers" in axes and T5_AXES.issuperset(axes)
    if min(sizes) < min_size and not is_t5_stack:
        return FactoredDims(batch)
    return FactoredDims(batch, tuple(groups[0]), tuple(groups[1]))


@register
@dataclasses.dataclass(frozen=True)
class Adafactor:
    """T5's Adafactor, see `adafactor`.

    Attributes:
      learning_rate: the schedule of the learning rate; defaults to that of T5's pre-training.
      decay_rate: exponent of the second moment's decay.
      clip: maximum RMS of a block's update; None: no clipping.
      parameter_scale: whether to multiply the update by the RMS of the parameter.
      min_size: minimum number of rows and of columns for factoring; see `factored_dims`.
      clip_norm: maximum global norm of the gradient; None (as in T5): no clipping.
    """

    learning_rate: Schedule = InverseSquareRoot()
    decay_rate: Positive = 0.8
    clip: Positive | None = 1.0
    parameter_scale: bool = True
    min_size: Count = 128
    clip_norm: Positive | None = None

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """See `Optimizer.build`."""
        factored = adafactor(
            self.learning_rate.build(),
            axes,
            decay_rate=self.decay_rate,
            clip=self.clip,
            parameter_scale=self.parameter_scale,
            min_size=self.min_size,
        )
        return with_clipping(factored, self.clip_norm)


class AdafactorState(NamedTuple):
    """The state of `adafactor`.

    Attributes:
      updates: number of updates, int32.
      moments: like the parameters, with a dictionary for each: means of squared gradients
        ``{"row": [batch, rows], "col": [batch, columns]}`` if it is factored, else ``{"full": [...]}`` in
        the parameter's shape.
    """

    updates: jax.Array
    moments: PyTree


def adafactor(
    learning_rate: optax.Schedule,
    axes: PyTree,
    *,
    decay_rate: float = 0.8,
    clip: float | None = 1.0,
    parameter_scale: bool = True,
    min_size: int = 128,
) -> optax.GradientTransformation:
    """Adafactor as T5 uses it (Shazeer and Stern 2018, algorithms 4, 5 and 8), without momentum.

    ``β₂(t) = 1 − (t+1)^−decay_rate``; ``V ← β₂ V + (1 − β₂)(G² + ε₁)``, factored as row and column
    means according to `factored_dims`; ``U = G / √V``, divided by ``max(1, RMS(U) / clip)``; the update is
    ``−learning_rate · max(ε₂, RMS(X)) · U``. The RMS is computed per block.

    Args:
      learning_rate: the learning rate as a function of the number of updates.
      axes: like the parameters, with a tuple of logical axis names for each.
      decay_rate: exponent of the second moment's decay.
      clip: maximum RMS of a block's update; None: no clipping.
      parameter_scale: whether to multiply the update by the RMS of the parameter's block.
      min_size: see `factored_dims`.

    Returns:
      A transformation whose `update` requires the parameters.
    """

    def init(params: PyTree) -> AdafactorState:
        moments = jax.tree.map(functools.partial(_init_moments, min_size=min_size), params, axes)
        return AdafactorState(jnp.zeros((), jnp.int32), moments)

    def update(
        gradients: PyTree, state: AdafactorState, params: PyTree = None
    ) -> tuple[PyTree, AdafactorState]:
        if params is None:
            raise ValueError("adafactor: update needs the parameters")
        decay = 1.0 - (state.updates + 1.0) ** -decay_rate
        rate = learning_rate(state.updates)

        def update_parameter(
            g: jax.Array, names: Axes, p: jax.Array, moments: Moments
        ) -> tuple[jax.Array, Moments]:
            g = g.astype(jnp.float32)
            dims = factored_dims(names, g.shape, min_size=min_size)
            u, moments = _precondition(g, moments, dims, decay=decay, epsilon=EPSILON_SQUARE)
            inner = dims.inner(g.ndim)
            if clip is not None:
                u = u / jnp.maximum(1.0, _rms(u, inner) / clip)
            if parameter_scale:
                u = u * jnp.maximum(EPSILON_SCALE, _rms(p.astype(jnp.float32), inner))
            return (-rate * u).astype(p.dtype), moments

        tree = jax.tree.map(update_parameter, gradients, axes, params, state.moments)
        pairs = jax.tree.leaves(tree, is_leaf=lambda x: type(x) is tuple)
        updates, moments = (
            jax.tree.unflatten(jax.tree.structure(gradients), [pair[i] for pair in pairs])
            for i in (0, 1)
        )
        return updates, AdafactorState(state.updates + 1, moments)

    return optax.GradientTransformation(init, update)


def _init_moments(p: jax.Array, axes: Axes, *, min_size: int) -> Moments:
    """Zeros in the shapes of a parameter's second moment."""
    dims = factored_dims(axes, p.shape, min_size=min_size)

    def zeros_without(reduced: tuple[int, ...]) -> jax.Array:
        return jnp.zeros([p.shape[i] for i in range(p.ndim) if i not in reduced])

    if not dims.rows:
        return {"full": zeros_without(())}
    return {"row": zeros_without(dims.columns), "col": zeros_without(dims.rows)}


def _precondition(
    g: jax.Array, moments: Moments, dims: FactoredDims, *, decay: jax.Array, epsilon: float
) -> tuple[jax.Array, Moments]:
    """``G / √V`` and the new moments."""
    square = g * g + epsilon
    if not dims.rows:
        full = decay * moments["full"] + (1.0 - decay) * square
        return g * jax.lax.rsqrt(full), {"full": full}
    row = decay * moments["row"] + (1.0 - decay) * square.mean(axis=dims.columns)
    col = decay * moments["col"] + (1.0 - decay) * square.mean(axis=dims.rows)
    row_factor = jnp.expand_dims(row, dims.columns)
    col_factor = jnp.expand_dims(col, dims.rows)
    mean = row_factor.mean(axis=dims.rows, keepdims=True)
    preconditioned = g * jax.lax.rsqrt(row_factor / mean) * jax.lax.rsqrt(col_factor)
    return preconditioned, {"row": row, "col": col}


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(x * x, axis=dims, keepdims=True))


def _moment_axes(axes: Axes, shape: tuple[int, ...]) -> dict[str, Axes]:
    """The logical axes of the moments that a parameter may have: ``full``, or ``row`` and ``col``."""
    dims = factored_dims(axes, shape, min_size=0)
    without = lambda reduced: tuple(a for i, a in enumerate(axes) if i not in reduced)
    return {"full": axes, "row": without(dims.columns), "col": without(dims.rows)}


def state_axes(opt_state: PyTree, axes: PyTree, shapes: PyTree) -> PyTree:
    """Returns the logical axes of an optimizer's state.

    A leaf whose path consists of a parameter's path, such as a moment of Adam, has the parameter's axes.
    If the path continues with ``row``, ``col`` or ``full``, as in Adafactor, the leaf has the axes that
    remain after the reduction. All other leaves have no axes. Only dictionary keys of paths count.

    Args:
      opt_state: the state, or its shapes.
      axes: the parameters' axes.
      shapes: the parameters, or their shapes.
    """
    axes_by_keys: dict[tuple[str, ...], Axes] = {}
    nodes = jax.tree.leaves_with_path(axes, is_leaf=is_axes)
    for (path, names), param in zip(nodes, jax.tree.leaves(shapes), strict=True):
        keys = _dict_keys(path)
        axes_by_keys[keys] = names
        for moment, remaining in _moment_axes(names, param.shape).items():
            axes_by_keys[(*keys, moment)] = remaining

    def find_axes(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> Axes:
        return axes_by_keys.get(_dict_keys(path), (None,) * leaf.ndim)

    return jax.tree.map_with_path(find_axes, opt_state)


def _dict_keys(path: KeyPath) -> tuple[str, ...]:
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
