"""Alignments made of others: mixtures inside one softmax, and different ones for different heads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import Alignment, AttentionContext, project
from synthesizer_jax.attention import Split, Terms, add, scale
from synthesizer_jax.attention.terms import repeat_heads
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Length, NotEmpty, PyTree
from synthesizer_jax.primitives.initializers import FanIn, Initializer
from synthesizer_jax.primitives.parameters import with_axes

Weights: TypeAlias = Annotated[str, Choices(("softmax", "sigmoid", "sum"))]


class Parts(Alignment):
    """An alignment made of others, whose parameters are in ``part_0``, ``part_1``, …

    Attributes:
      parts: the alignments.
    """

    parts: Annotated[tuple[Alignment, ...], NotEmpty()]

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """See `Alignment.scale_logits`."""
        return self._scale_parts(params, dict.fromkeys(range(len(self.parts)), factor))

    def _scale_parts(self, params: PyTree, factors: Mapping[int, float]) -> PyTree:
        """Returns the parameters with the logits of the numbered parts multiplied by their factors."""
        scaled = {
            f"part_{i}": self.parts[i].scale_logits(params.get(f"part_{i}", {}), factor)
            for i, factor in factors.items()
        }
        return {**params, **scaled}


@register
class Mixture(Parts):
    """A weighted sum of alignments' logits, ``Σ_s α_s S_s(X)`` inside one softmax.

    Tay et al. 2021, section 3.4. A part that occurs twice has its own parameters each time.

    Attributes:
      parts: the alignments.
      weights: ``"softmax"``: α is a softmax over the parts for every head (parameters
        ``[heads, parts]``, zero at first, so all parts weigh the same). ``"sigmoid"``: the released
        Mesh-TensorFlow gate, one number per layer and two parts, ``(1 − σ(a), σ(a))``. ``"sum"``:
        no weights, Mesh-TensorFlow's ``random_plus`` and ``dense_plus``.
      share_query: one projection of the queries for all parts, as in Mesh-TensorFlow's
        ``dense_plus`` where the same query meets the keys and, through a relu, the dense table.
      query_init: initializer of that shared projection.
    """

    weights: Weights = "softmax"
    share_query: bool = False
    query_init: Initializer = FanIn()

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        if self.weights == "sigmoid" and len(self.parts) != 2:
            raise ValueError(
                f"Mixture: weights='sigmoid' gates two parts, not {len(self.parts)}; use 'softmax'"
            )
        if self.share_query:
            queries = project(
                queries,
                heads=context.num_heads,
                width=context.head_dim,
                name="query",
                kernel_init=self.query_init,
            )
        parts = [
            part.copy(name=f"part_{i}", parent=self)(queries, keys, context)
            for i, part in enumerate(self.parts)
        ]
        if self.weights != "sum":
            shape = (context.num_heads, len(parts))
            zeros = nn.initializers.zeros_init()
            if self.weights == "softmax":
                weights = self.param("weights", with_axes(zeros, "heads", "parts"), shape)
                alpha = self.alpha({"weights": weights})
            else:
                gate = self.param("gate", with_axes(zeros, "parts"), (1,))
                alpha = jnp.broadcast_to(self.alpha({"gate": gate}), shape)
            parts = [scale(terms, alpha[:, i]) for i, terms in enumerate(parts)]  # by α_i [h]
        return add(*(term for terms in parts for term in terms))

    def alpha(self, params: Mapping[str, Any]) -> jax.Array:
        """Returns the parts' weights, ``[heads, parts]`` float32; ``[1, parts]`` if heads share them.

        Args:
          params: the mixture's parameters; in a layer's, those named ``align``.

        Raises:
          ValueError: the parts have no weights.
        """
        if self.weights == "sum":
            raise ValueError("Mixture: parts that are summed up have no weights α")
        if self.weights == "softmax":
            return jax.nn.softmax(params["weights"])
        gate = jax.nn.sigmoid(params["gate"])
        return jnp.concatenate([1.0 - gate, gate])[None]

    def start_as(self, part: int, params: PyTree, fresh: PyTree) -> PyTree:
        """Returns parameters with which the mixture makes the logits of one of its parts alone.

        Args:
          part: the number of the part.
          params: the parameters of that part as an alignment of its own.
          fresh: initial parameters of the mixture, in which all parts weigh the same. The logits of the
            other parts become zero; they have gradients.

        Raises:
          ValueError: the logits of another part cannot be made zero by parameters.
        """
        result = dict(fresh)
        if self.share_query:
            params = dict(params)
            result["query"] = params.pop("query")
        result[f"part_{part}"] = params
        factors = dict.fromkeys(range(len(self.parts)), 0.0)
        factors[part] = 1.0 if self.weights == "sum" else float(len(self.parts))
        return self._scale_parts(result, factors)


@register
class PerHead(Parts):
    """Gives some heads to each part: the first to the first part, and so on.

    Where a `Mixture` adds logits up, this keeps them apart; so it also takes alignments that are
    weights, such as some `Gaussian` and some learned heads (You et al. 2020, released code).

    Attributes:
      parts: the alignments.
      heads: number of heads of every part; None: the same number for all.
    """

    heads: tuple[Length, ...] | None = None

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        counts = self.counts(context.num_heads)
        if keys.ndim == 4:  # the layer's, of which each may serve several heads
            keys = repeat_heads(keys, context.num_heads)
        groups, start = [], 0
        for i, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            heads = slice(start, start + count)
            groups.append(
                part.copy(name=f"part_{i}", parent=self)(
                    queries if queries.ndim == 3 else queries[:, :, heads],
                    keys if keys.ndim == 3 else keys[:, :, heads],
                    dataclasses.replace(context, num_heads=count, num_kv_heads=None),
                )
            )
            start += count
        return (Split(tuple(groups)),)

    def counts(self, num_heads: int) -> tuple[int, ...]:
        """The number of heads of every part; raises a `ValueError` when they do not add up."""
        if self.heads is not None:
            if len(self.heads) != len(self.parts) or sum(self.heads) != num_heads:
                raise ValueError(
                    f"PerHead: heads={self.heads} for {len(self.parts)} parts and {num_heads} heads; "
                    "give one number a part, adding up to the layer's num_heads"
                )
            return self.heads
        if num_heads % len(self.parts):
            raise ValueError(
                f"PerHead: {num_heads} heads do not divide among {len(self.parts)} parts; say how "
                "many each gets with heads=(…)"
            )
        return (num_heads // len(self.parts),) * len(self.parts)
