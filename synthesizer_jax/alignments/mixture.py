"""Alignments that combine several alignments, either in one softmax or in different heads."""

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
    """The base class of alignments that combine several other alignments.

    The parameters of the combined alignments are in the submodules ``part_0``, ``part_1``, and so
    on.

    Attributes:
      parts: the alignments to combine.
    """

    parts: Annotated[tuple[Alignment, ...], NotEmpty()]

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """Returns parameters with which the logits of all parts are multiplied by a factor.

        See `Alignment.scale_logits` for the arguments and errors.
        """
        return self._scale_parts(params, dict.fromkeys(range(len(self.parts)), factor))

    def _scale_parts(self, params: PyTree, factors: Mapping[int, float]) -> PyTree:
        """Returns parameters with which the logits of some parts are multiplied by factors.

        Args:
          params: the parameters of the alignment.
          factors: a dictionary from the number of a part to the factor of its logits.
        """
        scaled = {
            f"part_{i}": self.parts[i].scale_logits(params.get(f"part_{i}", {}), factor)
            for i, factor in factors.items()
        }
        return {**params, **scaled}


@register
class Mixture(Parts):
    """A weighted sum of the logits of several alignments, ``Σ_s α_s S_s(X)`` inside one softmax.

    Mixtures are described by Tay et al. 2021, section 3.4. If the same alignment occurs twice, each
    occurrence has its own parameters.

    Attributes:
      parts: the alignments to combine.
      weights: how the weights α of the parts are computed. With ``"softmax"``, every head has a
        softmax over the parts, and its parameters ``[heads, parts]`` are initially zero, so that
        all parts have the same weight. With ``"sigmoid"``, every layer has a gate over two parts,
        ``(1 − σ(a), σ(a))``, with one parameter a, as in the released Mesh-TensorFlow code. With
        ``"sum"``, there are no weights, as in Mesh-TensorFlow's ``random_plus`` and ``dense_plus``.
      share_query: whether all parts share one projection of the queries. In Mesh-TensorFlow's
        ``dense_plus``, the dot product uses the shared queries directly, and the dense part applies
        a relu to the shared queries first.
      query_init: initializer of the shared projection.
    """

    weights: Weights = "softmax"
    share_query: bool = False
    query_init: Initializer = FanIn()

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        if self.weights == "sigmoid" and len(self.parts) != 2:
            raise ValueError(
                f"Mixture: weights='sigmoid' needs two parts, but it has {len(self.parts)}. Use "
                "weights='softmax'."
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
                alpha = self.alpha({"weights": weights})  # [h, parts]
            else:
                gate = self.param("gate", with_axes(zeros, "parts"), (1,))
                alpha = jnp.broadcast_to(self.alpha({"gate": gate}), shape)
            parts = [scale(terms, alpha[:, i]) for i, terms in enumerate(parts)]
        return add(*(term for terms in parts for term in terms))

    def alpha(self, params: Mapping[str, Any]) -> jax.Array:
        """Returns the weights α of the parts in float32, ``[heads, parts]``.

        If all heads share the weights, the shape is ``[1, parts]``.

        Args:
          params: the mixture's parameters. A layer stores the parameters of its alignment under the
            name ``align``.

        Raises:
          ValueError: if the mixture has no weights because it adds the parts.
        """
        if self.weights == "sum":
            raise ValueError("A Mixture with weights='sum' adds its parts and has no weights α.")
        if self.weights == "softmax":
            return jax.nn.softmax(params["weights"])
        gate = jax.nn.sigmoid(params["gate"])
        return jnp.concatenate([1.0 - gate, gate])[None]

    def start_as(self, part: int, params: PyTree, fresh: PyTree) -> PyTree:
        """Returns parameters with which the mixture computes the same logits as one of its parts.

        A training run can therefore start from a model that has only this part instead of the
        mixture. The logits of the other parts are initially zero, but the other parts have nonzero
        gradients and can be learned.

        Args:
          part: the number of the part.
          params: the parameters of the same alignment outside a mixture.
          fresh: initial parameters of the mixture, in which all parts have the same weight.

        Raises:
          ValueError: if the logits of another part cannot be set to zero by scaling its parameters.
        """
        result = dict(fresh)
        if self.share_query:
            params = dict(params)
            result["query"] = params.pop("query")
        result[f"part_{part}"] = params
        factors = dict.fromkeys(range(len(self.parts)), 0.0)
        # All weights α are initially 1 / parts, so the part's logits are multiplied by the number
        # of parts.
        factors[part] = 1.0 if self.weights == "sum" else float(len(self.parts))
        return self._scale_parts(result, factors)


@register
class PerHead(Parts):
    """An alignment that assigns some of the heads to each part, in the order of the parts.

    A `Mixture` adds the logits of its parts. A `PerHead` does not add the logits of its parts, so
    the parts may also be alignments that compute attention weights instead of logits. For example,
    some heads can be `Gaussian` while other heads are learned (You et al. 2020, released code).

    Attributes:
      parts: the alignments to combine.
      heads: number of heads of each part. None means that all parts have the same number of heads.
    """

    heads: tuple[Length, ...] | None = None

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        counts = self.counts(context.num_heads)
        if keys.ndim == 4:
            # The layer has already projected the keys. A group of query heads may share a key head,
            # so the key heads are repeated here until every query head has its own.
            keys = repeat_heads(keys, context.num_heads)

        groups = []
        start = 0
        for i, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            # All parts get the same tokens [b, n, d], but each part gets only the projections
            # [b, n, heads, width] of its own heads.
            heads = slice(start, start + count)
            part_queries = queries if queries.ndim == 3 else queries[:, :, heads]
            part_keys = keys if keys.ndim == 3 else keys[:, :, heads]
            part_context = dataclasses.replace(context, num_heads=count, num_kv_heads=None)
            alignment = part.copy(name=f"part_{i}", parent=self)
            groups.append(alignment(part_queries, part_keys, part_context))
            start += count
        return (Split(tuple(groups)),)

    def counts(self, num_heads: int) -> tuple[int, ...]:
        """Returns the number of heads of every part.

        Raises:
          ValueError: if the numbers in `heads` do not add up to `num_heads`, or `num_heads` is not
            divisible by the number of parts.
        """
        if self.heads is not None:
            if len(self.heads) != len(self.parts) or sum(self.heads) != num_heads:
                raise ValueError(
                    f"PerHead: heads is {self.heads}, but there are {len(self.parts)} parts and "
                    f"{num_heads} heads. Give one number for each part. The sum of the numbers "
                    "must be the layer's num_heads."
                )
            return self.heads
        if num_heads % len(self.parts):
            raise ValueError(
                f"PerHead: {num_heads} heads cannot be divided evenly among {len(self.parts)} "
                "parts. Set heads=(…) to the number of heads of each part."
            )
        return (num_heads // len(self.parts),) * len(self.parts)
