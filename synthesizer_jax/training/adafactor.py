"""T5's Adafactor, told the logical axes of every parameter.

optax's Adafactor factors the two largest dimensions of an array and takes block norms over all of
it. T5's attention kernels have three dimensions that form one matrix, scanned layers are stacked in
one array, and a Synthesizer's table holds one matrix per head. Here each parameter's axes say which
dimensions are a batch of separate matrices, which are rows and which are columns.
"""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from synthesizer_jax.parameters import Axes

BATCH = frozenset({"layers"})
"""Axes over which an array is a stack of separate parameters."""

TABLE = frozenset({"query_length", "key_length"})
"""With one of these, ``heads`` is a batch axis too: one table per head."""

NEVER_FACTORED = frozenset({"norm", "relpos_buckets", "parts"})

T5_AXES = frozenset({"layers", "vocab", "embed", "mlp", "heads", "kv"})
"""Axes of T5's own matrices, whose stacks T5X factors whatever their size."""

MERGED: types.MappingProxyType[str, str] = types.MappingProxyType(
    {"kv": "heads", "synth_hidden": "heads"}
)
"""A width that forms one matrix dimension together with the axis before it."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the dimensions of one parameter are used.

    Attributes:
      batch: dimensions over separate blocks.
      rows: dimensions that together are a matrix's rows; empty: not factored.
      columns: the same for its columns.
    """

    batch: tuple[int, ...]
    rows: tuple[int, ...] = ()
    columns: tuple[int, ...] = ()

    def inner(self, ndim: int) -> tuple[int, ...]:
        """All dimensions of one block."""
        return tuple(i for i in range(ndim) if i not in self.batch)


def blocks_of(axes: Axes, shape: tuple[int, ...], *, min_size: int = 128) -> Blocks:
    """The blocks of a parameter.

    As in T5X every layer of a scanned stack is a block, and a stack of T5's own matrices is factored
    whatever their size. The same matrices looped are factored if they are large enough. So both layouts
    make the same updates where rows and columns are `min_size` or more, which holds for all published
    sizes; smaller models keep full second moments when looped.

    Args:
      axes: logical names of its dimensions.
      shape: its shape.
      min_size: rows and columns must both be at least this many to be factored, except in stacks of
        T5's own matrices.
    """
    tables = bool(TABLE & set(axes))
    batch = tuple(
        i for i, a in enumerate(axes) if a in BATCH or (a == "heads" and tables and len(axes) > 2)
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
        return Blocks(batch)
    t5_stack = "layers" in axes and T5_AXES.issuperset(axes)
    if min(sizes) < min_size and not t5_stack:
        return Blocks(batch)
    return Blocks(batch, tuple(groups[0]), tuple(groups[1]))


class AdafactorState(NamedTuple):
    """A plain pytree.

    Attributes:
      updates: how many were made, int32.
      moments: like the parameters, with a dictionary for each: ``{"row": batch + rows, "col": batch
        + columns}`` of means of squared gradients where factored, else ``{"full": its shape}``.
    """

    updates: jax.Array
    moments: Any


def adafactor(
    learning_rate: optax.Schedule,
    axes: Any,
    *,
    decay_rate: float = 0.8,
    clip: float | None = 1.0,
    parameter_scale: bool = True,
    epsilon_square: float = 1e-30,
    epsilon_scale: float = 1e-3,
    min_size: int = 128,
) -> optax.GradientTransformation:
    """Adafactor as T5 uses it (Shazeer and Stern 2018, algorithms 4, 5 and 8), without momentum.

    ``β₂(t) = 1 − (t+1)^−decay_rate``; ``V ← β₂ V + (1 − β₂)(G² + ε₁)``, factored as row and column
    means where `blocks_of` says so; ``U = G / √V``, divided by ``max(1, RMS(U) / clip)``; the step is
    ``−learning_rate · max(ε₂, RMS(X)) · U``. RMS is that of a block.

    Args:
      learning_rate: function of the number of updates.
      axes: like the parameters, with a tuple of logical names for each.
      decay_rate: exponent of the second moment's decay.
      clip: largest RMS of a block's update; None: none.
      parameter_scale: multiply by the block's RMS.
      epsilon_square: ε₁.
      epsilon_scale: ε₂.
      min_size: see `blocks_of`.

    Returns:
      A transformation whose `update` needs the parameters.
    """

    def each(f: Any, tree: Any, *rest: Any) -> Any:
        return jax.tree.map(f, tree, axes, *rest)

    def init(params: Any) -> AdafactorState:
        def moments(p: jax.Array, names: Axes) -> dict[str, jax.Array]:
            blocks = blocks_of(names, p.shape, min_size=min_size)
            zeros = lambda dims: jnp.zeros([p.shape[i] for i in range(p.ndim) if i not in dims])
            if not blocks.rows:
                return {"full": zeros(())}
            return {"row": zeros(blocks.columns), "col": zeros(blocks.rows)}

        return AdafactorState(jnp.zeros((), jnp.int32), each(moments, params))

    def update(gradients: Any, state: AdafactorState, params: Any = None) -> Any:
        if params is None:
            raise ValueError("adafactor: update needs the parameters")
        decay = 1.0 - (state.updates + 1.0) ** -decay_rate
        rate = learning_rate(state.updates)

        def one(g: jax.Array, names: Axes, p: jax.Array, old: dict) -> tuple[jax.Array, dict]:
            g = g.astype(jnp.float32)
            blocks = blocks_of(names, g.shape, min_size=min_size)
            u, new = _precondition(g, old, blocks, decay, epsilon_square)
            inner = blocks.inner(g.ndim)
            if clip is not None:
                u = u / jnp.maximum(1.0, _rms(u, inner) / clip)
            if parameter_scale:
                u = u * jnp.maximum(epsilon_scale, _rms(p.astype(jnp.float32), inner))
            return (-rate * u).astype(p.dtype), new

        pairs = jax.tree.leaves(
            each(one, gradients, params, state.moments), is_leaf=lambda x: type(x) is tuple
        )
        updates, moments = (
            jax.tree.unflatten(jax.tree.structure(gradients), [pair[i] for pair in pairs])
            for i in (0, 1)
        )
        return updates, AdafactorState(state.updates + 1, moments)

    return optax.GradientTransformation(init, update)


def _precondition(
    g: jax.Array, old: dict, blocks: Blocks, decay: jax.Array, epsilon: float
) -> tuple[jax.Array, dict]:
    """``G / √V`` and the new moments."""
    square = g * g + epsilon
    if not blocks.rows:
        full = decay * old["full"] + (1.0 - decay) * square
        return g * jax.lax.rsqrt(full), {"full": full}
    row = decay * old["row"] + (1.0 - decay) * square.mean(axis=blocks.columns)
    col = decay * old["col"] + (1.0 - decay) * square.mean(axis=blocks.rows)
    wide_row = jnp.expand_dims(row, blocks.columns)
    wide_col = jnp.expand_dims(col, blocks.rows)
    mean = wide_row.mean(axis=blocks.rows, keepdims=True)
    return g * jax.lax.rsqrt(wide_row / mean) * jax.lax.rsqrt(wide_col), {"row": row, "col": col}


def _rms(x: jax.Array, dims: tuple[int, ...]) -> jax.Array:
    return jnp.sqrt(jnp.mean(x * x, axis=dims, keepdims=True))


def moment_axes(axes: Axes, shape: tuple[int, ...], *, min_size: int = 128) -> dict[str, Axes]:
    """Logical axes of one parameter's moments, for sharding the state like the parameters."""
    blocks = blocks_of(axes, shape, min_size=min_size)
    without = lambda dims: tuple(a for i, a in enumerate(axes) if i not in dims)
    if not blocks.rows:
        return {"full": axes}
    return {"row": without(blocks.columns), "col": without(blocks.rows)}
