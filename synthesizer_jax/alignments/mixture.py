"""Mixtures of alignments inside one softmax."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import (
    Alignment,
    AttentionContext,
    check_alignment,
    project,
    scale_parts,
)
from synthesizer_jax.attention import Terms, add, scale
from synthesizer_jax.initializers import FanIn, Initializer
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Choices, NotEmpty, PyTree

WEIGHTS = ("softmax", "sigmoid", "sum")
Weights: TypeAlias = Annotated[str, Choices(WEIGHTS)]


@register
class Mixture(Alignment):
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

    parts: Annotated[tuple[Alignment, ...], NotEmpty()]
    weights: Weights = "softmax"
    share_query: bool = False
    query_init: Initializer = FanIn()

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        self.check()
        if self.share_query:
            queries = project(
                queries,
                heads=context.num_heads,
                width=context.head_dim,
                name="query",
                kernel_init=self.query_init,
            )
        for part in self.parts:
            check_alignment(part, "Mixture: an entry of parts")
        parts = [
            part.copy(name=f"part_{i}", parent=self)(queries, keys, context)
            for i, part in enumerate(self.parts)
        ]
        if self.weights != "sum":
            alpha = self.alpha(context.num_heads)
            parts = [scale(terms, alpha[:, i]) for i, terms in enumerate(parts)]
        return add(*(term for terms in parts for term in terms))

    def alpha(self, num_heads: int) -> jax.Array:
        """The parts' weights for every head, ``[heads, parts]`` float32, rows summing to one."""
        zeros = nn.initializers.zeros_init()
        if self.weights == "softmax":
            shape = (num_heads, len(self.parts))
            return jax.nn.softmax(self.param("weights", with_axes(zeros, "heads", "parts"), shape))
        gate = jax.nn.sigmoid(self.param("gate", with_axes(zeros, "parts"), (1,)))
        return jnp.broadcast_to(jnp.concatenate([1.0 - gate, gate]), (num_heads, 2))

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """See `Alignment.scale_logits`."""
        return scale_parts(self.parts, params, dict.fromkeys(range(len(self.parts)), factor))

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
        return scale_parts(self.parts, result, factors)

    def check(self) -> None:
        """Raises a `ValueError` for weights that are not offered or do not fit the parts."""
        if not self.parts:
            raise ValueError("Mixture: parts is empty; give it at least one alignment")
        if self.weights not in WEIGHTS:
            raise ValueError(f"Mixture: weights={self.weights!r}; allowed: {', '.join(WEIGHTS)}")
        if self.weights == "sigmoid" and len(self.parts) != 2:
            raise ValueError(
                f"Mixture: weights='sigmoid' gates two parts, not {len(self.parts)}; use 'softmax'"
            )
