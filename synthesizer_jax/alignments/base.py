"""The contract of an alignment, and what all of them share."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention import Span, Terms
from synthesizer_jax.attention.cache import is_known
from synthesizer_jax.attention.products import dense_product
from synthesizer_jax.initializers import FanIn, Initializer
from synthesizer_jax.parameters import with_axes


class Alignment(nn.Module):
    """Who looks at whom: tokens and positions in, terms of the attention logits out.

    An alignment sees neither masks nor values, and never returns an array of
    ``[batch, heads, query, key]``.

    Attributes:
      makes_logits: False where the terms are weights, to which no position bias can be added.
    """

    makes_logits = True

    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array | None = None,
        *,
        num_heads: int,
        head_dim: int,
        query_span: Span,
        key_span: Span,
    ) -> Terms:
        """The terms whose sum is the logits.

        Args:
          queries: ``[batch, q, d_model]`` tokens, or ``[batch, q, heads, width]`` when they are
            projected already (shared projections of the released Mesh-TensorFlow code).
          keys: the same for the attended tokens; None means the queries' tokens. In a decoding step
            these are the new tokens only.
          num_heads: number of attention heads.
          head_dim: width of one head, the default width of what an alignment projects to.
          query_span: in-sequence positions of the queries.
          key_span: in-sequence positions of all keys, past ones included.

        Returns:
          Terms for q queries and ``key_span.length`` keys.
        """
        raise NotImplementedError


def project(
    x: jax.Array,
    *,
    heads: int,
    width: int,
    name: str,
    axis: str = "kv",
    kernel_init: Initializer | None = None,
    use_bias: bool = False,
) -> jax.Array:
    """Tokens ``[batch, length, d_model]`` to heads ``[batch, length, heads, width]``.

    Args:
      x: tokens; they set the computation's dtype.
      heads: number of heads.
      width: width of one head.
      name: name of the parameter's module, ``name/kernel [d_model, heads, width]``.
      axis: logical name of the width.
      kernel_init: defaults to variance 1 / d_model.
      use_bias: add ``name/bias [heads, width]``.
    """
    return nn.DenseGeneral(
        features=(heads, width),
        use_bias=use_bias,
        dtype=x.dtype,
        kernel_init=with_axes(kernel_init or FanIn(), "embed", "heads", axis),
        bias_init=with_axes(nn.initializers.zeros_init(), "heads", axis),
        dot_general=dense_product,
        name=name,
    )(x)


def check_alignment(value: Any, field: str) -> None:
    """Raises a `TypeError` for what is no alignment object; `field` says where it was given."""
    if isinstance(value, nn.Module):
        return
    what = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
    example = f"{value.__name__}(...)" if isinstance(value, type) else "Random(max_length=512)"
    raise TypeError(f"{field} is {what}; give an alignment object, such as {example}")


def take(table: jax.Array, span: Span, *, axis: int) -> jax.Array:
    """The rows of a table of positions that a span covers; NaN where a traced one leads beyond it."""
    if isinstance(span.start, int):
        return jax.lax.slice_in_dim(table, span.start, span.start + span.length, axis=axis)
    rows = jax.lax.dynamic_slice_in_dim(table, span.start, span.length, axis=axis)
    fits = (span.start >= 0) & (span.start + span.length <= table.shape[axis])
    return jnp.where(fits, rows, jnp.nan)


def check_length(module: nn.Module, max_length: int, *spans: Span) -> None:
    """Raises a `ValueError` when a span does not fit into a table of `max_length` positions."""
    for span in spans:
        end = span.length + (int(np.max(span.start)) if is_known(span.start) else 0)
        if end > max_length:
            raise ValueError(
                f"{type(module).__name__}{'/'.join(('', *module.path))} has max_length="
                f"{max_length} but was given {end} positions; build it with max_length>={end}, or "
                "cut the input"
            )
