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
from synthesizer_jax.primitives.computed import ComputedParameter
from synthesizer_jax.primitives.initializers import FanIn, Initializer
from synthesizer_jax.primitives.parameters import with_axes


@dataclasses.dataclass(frozen=True)
class AttentionContext:
    """Describes an attention layer to its alignment: the heads and the positions of its tokens.

    Attributes:
      num_heads: number of heads.
      head_dim: width of one head. By default, alignments project tokens to `head_dim` features per
        head.
      query_span: in-sequence positions of the queries.
      key_span: in-sequence positions of all keys, including cached keys.
      keys_start: position of the first token that is passed as a key. In self-attention, the first
        key is at the position of the first query, because tokens in the cache are not passed again.
        In cross-attention, the first key is at position 0.
      num_kv_heads: number of heads of the keys that are projected from tokens. Each key head is
        shared by a group of ``num_heads / num_kv_heads`` neighboring query heads. None means that
        every query head has its own key head.
      packed_positions: the in-sequence positions of the queries and of the keys, each
        ``[batch, n]``. `Attention` gives the positions only in cross-attention of packed rows.
        `MultiHeadAttention` gives them in self-attention of packed rows, too. None means that the
        positions of queries count up from `query_span.start`, and the positions of keys from
        `keys_start`. In self-attention of packed rows, these positions have the right distances
        within a segment.
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
        """The smallest and the largest distance ``key − query`` of any query and key.

        If the start of the query span is traced, as in a decoding loop, the range covers the
        distances of all decoding steps.

        Raises:
          ValueError: if the start of the key span is traced.
        """
        queries = self.query_span
        keys = self.key_span
        if not isinstance(keys.start, int):
            raise ValueError(
                "The position of the first key must not be traced, because it determines the "
                "shapes of arrays."
            )

        last_key = keys.start + keys.length - 1
        if isinstance(queries.start, int):
            last_query = queries.start + queries.length - 1
            return keys.start - last_query, last_key - queries.start

        # In self-attention, every query is at the position of a key. In cross-attention, `limit`
        # bounds the positions of the queries.
        last_query = last_key if queries.limit is None else queries.limit - 1
        return keys.start - last_query, last_key


class Alignment(nn.Module):
    """Maps tokens and positions to the terms of the attention logits.

    An alignment decides which token attends to which. An alignment does not see masks or values. An
    alignment never returns an array of shape ``[batch, heads, query, key]``, so `attend` can
    compute the logits tile by tile.

    Attributes:
      makes_logits: whether the alignment returns terms of logits. False means that the terms are
        attention weights, to which no position bias can be added.
      linear_in: names of parameters or submodules in which the logits are linear. To multiply all
        logits by a factor, multiply the first parameter or submodule in `linear_in` that exists.
    """

    makes_logits: ClassVar[bool] = True
    linear_in: ClassVar[tuple[str, ...]] = ()

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """Returns a copy of the parameters, scaled so that all logits are multiplied by a factor.

        `Mixture.start_as` uses this method to scale the initial logits of the parts of a mixture.
        If the factor is 0, the logits are zero, but some parameters still have nonzero gradients,
        so the alignment can be learned.

        Args:
          params: the alignment's parameters.
          factor: the number by which all logits are multiplied.

        Raises:
          ValueError: if the alignment has no parameters in which its logits are linear.
        """
        name = next((name for name in self.linear_in if name in params), None)
        if name is None:
            raise ValueError(
                f"{type(self).__name__} has no parameter that scales its logits. A mixture that "
                "contains it would therefore change the results of the model from the start."
            )
        return {**params, name: jax.tree.map(lambda x: x * factor, params[name])}

    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        """Returns the terms that add up to the logits.

        Args:
          queries: ``[batch, q, d_model]`` tokens, or ``[batch, q, heads, width]`` if the tokens are
            already projected. In the released Mesh-TensorFlow code, several parts of a mixture
            share a projection of the queries.
          keys: the tokens to attend to, as ``[batch, k, d_model]`` or ``[batch, k, heads, width]``.
            In self-attention, the keys are the same tokens as the queries. In a decoding step, the
            keys are only the new tokens.
          context: the layer's heads, and the positions of queries and keys.

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
    """Multiplies `x` by a kernel as a single matrix product.

    Flax's dense layers call this function instead of `lax.dot_general`. The contracted axes are
    flattened into one axis, and the features are flattened into another axis. Without flattening,
    XLA's CPU backend would transpose a copy of `x` first. With flattening, the kernel's gradient is
    a single matrix product too.

    Args:
      x: ``[..., *contracted]``. The last axes of `x` are contracted.
      kernel: ``[*contracted, *features]``. The first axes of the kernel are contracted.
      dimension_numbers: the dimension numbers of `lax.dot_general`, in the form that Flax's layers
        pass. Batch axes are not supported.
      precision: see `lax.dot_general`.
      preferred_element_type: see `lax.dot_general`.
      out_sharding: the sharding of the result if mesh axes are explicit. None means that the
        leading axes of the result are sharded like the leading axes of `x`, and the features like
        the kernel's features.

    Returns:
      ``[..., *features]``.
    """
    num_contracted = len(dimension_numbers[0][1])
    types: dict[str, Any] = {
        "precision": precision,
        "preferred_element_type": preferred_element_type,
    }
    lead = x.shape[: x.ndim - num_contracted]
    features = kernel.shape[num_contracted:]
    with mesh_of_arguments(x, kernel):
        if not axes_of_type(AxisType.Explicit):
            # [tokens, contracted] · [contracted, features]
            contracted_size = math.prod(kernel.shape[:num_contracted])
            x = x.reshape(-1, contracted_size)
            kernel = kernel.reshape(contracted_size, -1)
            out = lax.dot_general(x, kernel, (((1,), (0,)), ((), ())), **types)
            return out.reshape(*lead, *features)

        # If mesh axes are explicit, the axes of the arrays are not flattened, because each array
        # axis has its own sharding. A mesh axis that already divides `x` cannot also divide the
        # kernel's features. The kernel is therefore gathered along such mesh axes, as in FSDP.
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


class DenseLayer(nn.DenseGeneral):
    """Flax's dense layer, which does not keep a computed kernel for the backward pass.

    If the kernel is a `ComputedParameter`, the backward pass computes it again. Otherwise, a scan
    would keep the kernels of all layers.
    """

    @nn.nowrap
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Multiplies the last dimensions of the inputs by the kernel."""
        if isinstance(self.get_variable("params", "kernel"), ComputedParameter):
            recomputed: jax.Array = nn.remat(nn.DenseGeneral.__call__)(self, inputs)
            return recomputed
        return super().__call__(inputs)


def dense_layer(
    features: int | tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: DTypeLike,
    kernel_init: Initializer,
    use_bias: bool = False,
    contracted: int = 1,
    **module: Any,
) -> DenseLayer:
    """Returns a dense layer that contracts the last dimensions of its input.

    Args:
      features: sizes of the output's last dimensions.
      axes: logical axis names of the kernel's dimensions. The names of the contracted dimensions
        come first, and the names of the features follow.
      dtype: dtype of the computation.
      kernel_init: initializer of the kernel.
      use_bias: whether to add a bias.
      contracted: how many of the input's last dimensions are contracted.
      **module: the arguments `name` and `parent` of the Flax module.
    """
    return DenseLayer(
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

    Call this function in a compact method, because it creates a submodule.

    Args:
      x: the tokens. The dtype of `x` is the dtype of the computation.
      heads: number of heads.
      width: width of one head.
      name: name of the submodule. The kernel of the submodule has the shape
        ``[d_model, heads, width]``.
      axes: logical axis names of the heads and of the width.
      kernel_init: initializer of the kernel. The default, None, is a normal distribution with
        variance 1 / d_model.
      use_bias: whether to add a bias ``[heads, width]``.
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
    """Returns the entries of a table for the positions of a span.

    If the start of the span is traced and the span exceeds the table, the result is NaN, because a
    compiled program cannot raise an error.
    """
    if isinstance(span.start, int):
        return jax.lax.slice_in_dim(table, span.start, span.start + span.length, axis=axis)
    rows = jax.lax.dynamic_slice_in_dim(table, span.start, span.length, axis=axis)
    fits = (span.start >= 0) & (span.start + span.length <= table.shape[axis])
    return jnp.where(fits, rows, jnp.nan)


def check_length(module: nn.Module, max_length: int, *spans: Span) -> None:
    """Raises a `ValueError` if a span reaches beyond a table of `max_length` positions."""
    for span in spans:
        # If the start of a span is traced, only the length of the span can be checked.
        start = int(np.asarray(span.start).max()) if is_concrete(span.start) else 0
        end = start + span.length
        if end > max_length:
            path = "/".join((type(module).__name__, *module.path))
            raise ValueError(
                f"{path} has max_length={max_length}, but it was given {end} positions. Set "
                f"max_length to {end} or more, or shorten the input. If a run starts from a "
                "checkpoint, also resize its tables with init_rules."
            )
