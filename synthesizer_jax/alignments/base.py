"""The interface of an alignment, and functions that alignments share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from synthesizer_jax.attention import Span, Terms
from synthesizer_jax.attention.masks import is_concrete
from synthesizer_jax.attention.mesh_axes import axes_along, axes_of_type, mesh_of_arguments
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.primitives.initializers import FanIn, Initializer
from synthesizer_jax.primitives.parameters import with_axes


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """What an alignment knows of the attention that it is part of.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head, the default width of what an alignment projects to.
      query_span: in-sequence positions of the queries.
      key_span: in-sequence positions of all keys, cached ones included.
      keys_start: position of the first of the tokens that are given as keys: the queries' in
        self-attention, where cached ones are not given again, and 0 in cross-attention.
      num_kv_heads: number of heads of token-made keys, each shared by as many neighboring heads of the
        queries; None: every head has its own.
      packed_positions: in cross-attention of packed rows, the in-sequence positions of queries and keys,
        ``[batch, n]`` each; None: they count from the starts above, which suffices for distances.
    """

    num_heads: int
    head_dim: int
    query_span: Span
    key_span: Span
    keys_start: int | jax.Array = 0
    num_kv_heads: int | None = None
    packed_positions: tuple[jax.Array, jax.Array] | None = None

    @property
    def distance_range(self) -> tuple[int, int]:
        """The smallest and largest ``key − query``; over all steps if the query span is traced.

        Raises:
          ValueError: the start of the key span is traced.
        """
        queries, keys = self.query_span, self.key_span
        if not isinstance(keys.start, int):
            raise ValueError("the first key position must be known when the function is traced")
        last = keys.start + keys.length - 1
        if isinstance(queries.start, int):
            return keys.start - (queries.start + queries.length - 1), last - queries.start
        return -last if queries.limit is None else keys.start + 1 - queries.limit, last


class Alignment(nn.Module):
    """Who attends to whom: tokens and positions in, terms of the attention logits out.

    An alignment sees neither masks nor values, and never returns an array of
    ``[batch, heads, query, key]``.

    Attributes:
      makes_logits: False if the terms are weights, to which no position bias can be added.
      linear_in: names of parameters, or of submodules; multiplying the first that there is multiplies the
        logits.
    """

    makes_logits: ClassVar[bool] = True
    linear_in: ClassVar[tuple[str, ...]] = ()

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """Returns parameters with which all logits are multiplied by a factor.

        Args:
          params: the alignment's parameters.
          factor: the factor; with 0 the logits are zero and the gradients of some parameters are not.

        Raises:
          ValueError: no parameters do that.
        """
        name = next((name for name in self.linear_in if name in params), None)
        if name is None:
            raise ValueError(
                f"{type(self).__name__}: no parameters of it scale its logits, so a mixture with it cannot "
                "start as the model without it"
            )
        return {**params, name: jax.tree.map(lambda x: x * factor, params[name])}

    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        """Returns the terms whose sum is the logits.

        Args:
          queries: ``[batch, q, d_model]`` tokens, or ``[batch, q, heads, width]`` if they are
            already projected (shared projections of the released Mesh-TensorFlow code).
          keys: the same for the attended tokens; in self-attention these are the queries' tokens,
            and in a decoding step the new tokens only.
          context: heads and positions.

        Returns:
          Terms for q queries and ``context.key_span.length`` keys.
        """
        raise NotImplementedError


def dense_product(
    x: jax.Array,
    kernel: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    *,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> jax.Array:
    """Multiplies by a kernel as one matrix product: a ``dot_general`` for Flax's dense layers.

    The kernel's gradient is one matrix product too. With several contracted axes or features, XLA's CPU
    backend would first transpose a copy of `x`.

    Args:
      x: ``[..., *contracted]``; its last axes are contracted.
      kernel: ``[*contracted, ...]``; its first axes are contracted.
      dimension_numbers: as Flax's layers pass them, without batch axes.
      precision: as in `lax.dot_general`.
      preferred_element_type: as in `lax.dot_general`.
      out_sharding: the sharding of the result if mesh axes are explicit; None: that of `x`, followed by
        that of the kernel's other axes.

    Returns:
      ``[..., ...]``.
    """
    num_contracted = len(dimension_numbers[0][1])
    types: dict[str, Any] = {"precision": precision, "preferred_element_type": preferred_element_type}
    lead, features = x.shape[: x.ndim - num_contracted], kernel.shape[num_contracted:]
    with mesh_of_arguments(x, kernel):
        if not axes_of_type(AxisType.Explicit):
            contracted_size = math.prod(kernel.shape[:num_contracted])
            x, kernel = x.reshape(-1, contracted_size), kernel.reshape(contracted_size, -1)
            out = lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), **types)
            return out.reshape(*lead, *features)

        # Mesh axes that already divide `x` cannot also divide the kernel's features: the kernel is
        # gathered along them (FSDP).
        x_axes = [axes_along(x, i) for i in range(x.ndim)]
        used_axes = {axis for axes in x_axes for axis in axes}
        feature_axes = [
            tuple(axis for axis in axes_along(kernel, i) if axis not in used_axes)
            for i in range(num_contracted, kernel.ndim)
        ]
        kernel = jax.sharding.reshard(kernel, PartitionSpec(*x_axes[len(lead) :], *feature_axes))
        dims = (tuple(range(len(lead), x.ndim)), tuple(range(num_contracted)))
        if out_sharding is None:
            out_sharding = PartitionSpec(*x_axes[: len(lead)], *feature_axes)
        return lax.dot_general(x, kernel, (dims, ((), ())), out_sharding=out_sharding, **types)


def dense_layer(
    features: int | tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: DTypeLike,
    kernel_init: Initializer,
    use_bias: bool = False,
    contracted: int = 1,
    **module: Any,
) -> nn.DenseGeneral:
    """Returns a dense layer over the last dimensions of its input.

    Args:
      features: sizes of the output's last dimensions.
      axes: logical axis names of the kernel, those of the input first.
      dtype: dtype of the computation.
      kernel_init: initializer of the kernel.
      use_bias: add a bias.
      contracted: number of the input's dimensions that are summed over.
      **module: name and parent.
    """
    return nn.DenseGeneral(
        features,
        axis=tuple(range(-contracted, 0)),
        use_bias=use_bias,
        dtype=dtype,
        kernel_init=with_axes(kernel_init, *axes),
        bias_init=with_axes(nn.initializers.zeros_init(), *axes[contracted:]),
        dot_general=dense_product,
        **module,
    )


def project(
    x: jax.Array,
    *,
    heads: int,
    width: int,
    name: str,
    axes: tuple[str, str] = ("heads", "kv"),
    kernel_init: Initializer | None = None,
    use_bias: bool = False,
) -> jax.Array:
    """Projects tokens ``[batch, length, d_model]`` to heads ``[batch, length, heads, width]``.

    Args:
      x: tokens; their dtype is the dtype of the computation.
      heads: number of heads.
      width: width of one head.
      name: name of the submodule, which has ``kernel [d_model, heads, width]``.
      axes: logical axis names of heads and width.
      kernel_init: initializer of the kernel; None: variance 1 / d_model.
      use_bias: add ``name/bias [heads, width]``.
    """
    return dense_layer(
        (heads, width),
        ("embed", *axes),
        dtype=x.dtype,
        kernel_init=kernel_init or FanIn(),
        use_bias=use_bias,
        name=name,
    )(x)


def slice_positions(table: jax.Array, span: Span, *, axis: int) -> jax.Array:
    """Returns a span's part of a table of positions; NaN if a traced span exceeds the table."""
    if isinstance(span.start, int):
        return jax.lax.slice_in_dim(table, span.start, span.start + span.length, axis=axis)
    rows = jax.lax.dynamic_slice_in_dim(table, span.start, span.length, axis=axis)
    fits = (span.start >= 0) & (span.start + span.length <= table.shape[axis])
    return jnp.where(fits, rows, jnp.nan)


def check_length(module: nn.Module, max_length: int, *spans: Span) -> None:
    """Raises a `ValueError` if a span exceeds a table of `max_length` positions."""
    for span in spans:
        end = span.length + (int(np.asarray(span.start).max()) if is_concrete(span.start) else 0)
        if end > max_length:
            raise ValueError(
                f"{type(module).__name__}{'/'.join(('', *module.path))} has max_length="
                f"{max_length} but was given {end} positions; build it with max_length>={end} (and in a "
                "run that starts from a checkpoint, resize its tables by init_rules), or cut the input"
            )
