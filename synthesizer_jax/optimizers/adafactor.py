"""T5's Adafactor, which factors parameters according to their logical axes.

Optax's Adafactor factors the two largest dimensions of an array and computes norms over the whole
array. Optax's choice does not fit the parameters of T5 and of Synthesizers. T5's attention kernels
are matrices in three dimensions, scanned layers are stacked in one array, and a Synthesizer's table
is a stack of one matrix per head. In this module, the logical axes of a parameter determine the
roles of its dimensions: some dimensions number separate matrices, and the others form the rows and
the columns of each matrix.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Count, KeyPath, Positive, PyTree
from synthesizer_jax.optimizers.base import with_clipping
from synthesizer_jax.optimizers.schedules import InverseSquareRoot, LearningRate, build_schedule
from synthesizer_jax.primitives.parameters import Axes, is_axes

BATCH = frozenset({"layers"})
"""Axes along which separate parameters are stacked."""

TABLE = frozenset({"query_length", "key_length"})
"""Axes of tables over positions.

If a parameter has one of these axes, ``heads`` is a batch axis too, because every head has its own
table.
"""

NEVER_FACTORED = frozenset({"norm", "relpos_buckets", "parts"})
"""Axes of parameters that are never factored."""

T5_AXES = frozenset({"layers", "vocab", "embed", "mlp", "heads", "kv_heads", "kv"})
"""Axes of T5's own matrices. T5X factors stacks of these matrices regardless of their size."""

HEAD_FEATURES = frozenset({"kv", "synth_hidden"})
"""Axes of a head's features, which form one matrix dimension with the heads before them."""

EPSILON_SQUARE = 1e-30
"""ε₁, which is added to squares of gradients."""

EPSILON_SCALE = 1e-3
"""ε₂, the smallest scale of a parameter."""

Moments: TypeAlias = dict[str, jax.Array]
"""The second moment of a parameter, in the entries ``row`` and ``col``, or in ``full``."""


@dataclasses.dataclass(frozen=True)
class FactoredDims:
    """The roles of a parameter's dimensions.

    A parameter may be a stack of *slices*, such as the layers of a scanned stack. Every slice is
    updated like a separate parameter.

    Attributes:
      batch: the dimensions along which slices are stacked.
      rows: the dimensions that form the rows of a slice's matrix. If the parameter is not factored,
        there are no rows.
      columns: the dimensions that form the columns of a slice's matrix. If the parameter is not
        factored, there are no columns.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()


def factored_dims(axes: Axes, shape: tuple[int, ...], *, min_size: int = 128) -> FactoredDims:
    """Returns the roles of a parameter's dimensions.

    As in T5X, every layer of a scanned stack is a slice. Stacks of matrices that exist in T5 are
    factored regardless of their size. The matrices of unrolled layers are factored only if they
    have at least `min_size` rows and columns. The matrices of all published models are large
    enough, so scanned and unrolled layers have the same updates. Smaller unrolled models keep full
    second moments.

    Args:
      axes: logical axis names of the parameter's dimensions.
      shape: the shape of the parameter.
      min_size: the minimum number of rows and of columns for factoring.
    """
    is_table = bool(TABLE & set(axes)) and len(axes) > 2
    batch = tuple(
        i for i, axis in enumerate(axes) if axis in BATCH or (axis == "heads" and is_table)
    )

    # Each group lists the dimensions that together form the rows or the columns of a slice's
    # matrix.
    groups: list[list[int]] = []
    for i, axis in enumerate(axes):
        if i in batch:
            continue
        after_heads = i > 0 and i - 1 not in batch and axes[i - 1] in ("heads", "kv_heads")
        if axis in HEAD_FEATURES and after_heads:
            groups[-1].append(i)
        else:
            groups.append([i])

    if NEVER_FACTORED & set(axes) or len(groups) != 2:
        return FactoredDims(batch)
    sizes = [math.prod(shape[i] for i in group) for group in groups]
    is_t5_stack = "layers" in axes and T5_AXES.issuperset(axes)
    if min(sizes) < min_size and not is_t5_stack:
        return FactoredDims(batch)
    rows, columns = groups
    return FactoredDims(batch, tuple(rows), tuple(columns))


class AdafactorState(NamedTuple):
    """The state of `Adafactor`.

    Attributes:
      updates: number of updates, int32.
      moments: a pytree like the parameters, with a dictionary of means of squared gradients for
        each parameter. If the parameter is factored, the dictionary is
        ``{"row": [batch, rows], "col": [batch, columns]}``. Otherwise, the dictionary is
        ``{"full": [...]}`` in the shape of the parameter.
    """

    updates: jax.Array
    moments: PyTree


@register
@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor as T5 uses it, without momentum (Shazeer and Stern 2018, algorithms 4, 5 and 8).

    Let G be the gradient of a parameter X at update t, counted from 0. The update is computed in
    four steps:

    1. ``β₂(t) = 1 − (t+1)^−decay_rate``.
    2. ``V ← β₂ V + (1 − β₂)(G² + ε₁)``. If X is factored, V is stored as row and column means.
    3. ``U = G / √V``, divided by ``max(1, RMS(U) / clip)``.
    4. The update is ``−learning_rate · max(ε₂, RMS(X)) · U``.

    Each RMS is computed over a slice of the parameter; see `FactoredDims`.

    Attributes:
      learning_rate: the schedule of the learning rate. The default is the schedule of T5's
        pre-training.
      decay_rate: exponent of the second moment's decay.
      clip: maximum RMS of a slice's update. None means no clipping.
      parameter_scale: whether to multiply the update by the RMS of the parameter's slice.
      min_size: minimum number of rows and of columns for factoring; see `factored_dims`.
      clip_norm: maximum global norm of the gradient. None means no clipping, as in T5.
    """

    learning_rate: LearningRate = InverseSquareRoot()
    decay_rate: Positive = 0.8
    clip: Positive | None = 1.0
    parameter_scale: bool = True
    min_size: Count = 128
    clip_norm: Positive | None = None

    def build(self, axes: PyTree) -> optax.GradientTransformation:
        """Returns the optax transformation; see `Optimizer.build`.

        The `update` of the transformation requires the parameters as its third argument.
        """
        learning_rate = build_schedule(self.learning_rate)

        def init(params: PyTree) -> AdafactorState:
            """Returns a state with moments of zero."""

            def zeros(p: jax.Array, names: Axes) -> Moments:
                """Returns the initial moments of a parameter."""
                dims = factored_dims(names, p.shape, min_size=self.min_size)
                return {
                    moment: jnp.zeros([p.shape[i] for i in kept])
                    for moment, kept in _moment_dims(dims, p.ndim).items()
                }

            return AdafactorState(jnp.zeros((), jnp.int32), jax.tree.map(zeros, params, axes))

        def update(
            gradients: PyTree, state: AdafactorState, params: PyTree = None
        ) -> tuple[PyTree, AdafactorState]:
            """Returns the updates and the new state."""
            decay = 1.0 - (state.updates + 1.0) ** -self.decay_rate
            rate = learning_rate(state.updates)

            def update_parameter(
                g: jax.Array, names: Axes, p: jax.Array, moments: Moments
            ) -> tuple[jax.Array, Moments]:
                """Returns the update of a parameter and its new moments."""
                g = g.astype(jnp.float32)
                dims = factored_dims(names, g.shape, min_size=self.min_size)
                u, moments = _precondition(g, moments, dims, decay=decay)
                # Each RMS is computed over the dimensions `inner` of one slice.
                inner = tuple(i for i in range(g.ndim) if i not in dims.batch)
                if self.clip is not None:
                    u = u / jnp.maximum(1.0, _rms(u, inner) / self.clip)
                if self.parameter_scale:
                    u = u * jnp.maximum(EPSILON_SCALE, _rms(p.astype(jnp.float32), inner))
                return (-rate * u).astype(p.dtype), moments

            tree = jax.tree.map(update_parameter, gradients, axes, params, state.moments)
            # For each parameter, `tree` contains a pair of an update and moments. The pairs are
            # split into a tree of updates and a tree of moments.
            pairs = jax.tree.leaves(tree, is_leaf=lambda x: type(x) is tuple)
            structure = jax.tree.structure(gradients)
            updates = jax.tree.unflatten(structure, [update for update, _ in pairs])
            moments = jax.tree.unflatten(structure, [moments for _, moments in pairs])
            return updates, AdafactorState(state.updates + 1, moments)

        return with_clipping(optax.GradientTransformation(init, update), self.clip_norm)


def _moment_dims(dims: FactoredDims, ndim: int) -> dict[str, list[int]]:
    """Returns the dimensions of a parameter that each of its moments keeps."""
    if not dims.rows:
        return {"full": list(range(ndim))}
    # The row means are averages over the columns, and the column means are averages over the rows.
    return {
        "row": [i for i in range(ndim) if i not in dims.columns],
        "col": [i for i in range(ndim) if i not in dims.rows],
    }


def _precondition(
    g: jax.Array, moments: Moments, dims: FactoredDims, *, decay: jax.Array
) -> tuple[jax.Array, Moments]:
    """Returns ``G / √V`` and the new moments."""
    square = g * g + EPSILON_SQUARE
    if not dims.rows:
        full = decay * moments["full"] + (1.0 - decay) * square
        return g * jax.lax.rsqrt(full), {"full": full}

    row = decay * moments["row"] + (1.0 - decay) * square.mean(axis=dims.columns)
    col = decay * moments["col"] + (1.0 - decay) * square.mean(axis=dims.rows)
    # V is the outer product of the row and column means, divided by the mean of the row means.
    row_factor = jnp.expand_dims(row, dims.columns)
    col_factor = jnp.expand_dims(col, dims.rows)
    mean = row_factor.mean(axis=dims.rows, keepdims=True)
    preconditioned = g * jax.lax.rsqrt(row_factor / mean) * jax.lax.rsqrt(col_factor)
    return preconditioned, {"row": row, "col": col}


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    """Returns the root mean square over some dimensions, which are kept with size 1."""
    return jnp.sqrt(jnp.mean(x * x, axis=dims, keepdims=True))


def state_axes(opt_state: PyTree, axes: PyTree, shapes: PyTree) -> PyTree:
    """Returns the logical axes of an optimizer's state.

    A leaf with the path and shape of a parameter, such as a moment of Adam, has the parameter's
    axes. In Adafactor, the path of a moment continues with ``row``, ``col`` or ``full``. Such a
    moment has the axes of the parameter over which no mean was taken, if it also has the sizes of
    these axes. All other leaves have no axes. Only the dictionary keys of a path are compared.

    Args:
      opt_state: the state of an optimizer.
      axes: the logical axes of the parameters.
      shapes: the shapes of the parameters.
    """
    # A key consists of the path and the shape of a leaf. The dictionary contains all leaves that
    # the state of any optimizer might have.
    axes_by_leaf: dict[tuple[tuple[str, ...], tuple[int, ...]], Axes] = {}
    nodes = jax.tree.leaves_with_path(axes, is_leaf=is_axes)
    for (path, names), param in zip(nodes, jax.tree.leaves(shapes), strict=True):
        keys = _dict_keys(path)
        axes_by_leaf[keys, param.shape] = names
        # Moments may be factored or full, depending on the optimizer's `min_size`. This function
        # does not know `min_size`, so it adds the axes of factored moments and of full moments.
        factored = factored_dims(names, param.shape, min_size=0)
        full = FactoredDims(())
        for dims in (factored, full):
            for moment, kept in _moment_dims(dims, len(names)).items():
                shape = tuple(param.shape[i] for i in kept)
                axes_by_leaf[(*keys, moment), shape] = tuple(names[i] for i in kept)

    def find_axes(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> Axes:
        """Returns the axes of a leaf of the state."""
        return axes_by_leaf.get((_dict_keys(path), leaf.shape), (None,) * leaf.ndim)

    return jax.tree.map_with_path(find_axes, opt_state)


def _dict_keys(path: KeyPath) -> tuple[str, ...]:
    """Returns the dictionary keys of a path."""
    return tuple(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))
