"""Talking-heads attention, in which heads exchange logits and weights."""

from __future__ import annotations

import functools
from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import project
from synthesizer_jax.attention import Mask, Terms, drop_value_vectors, materialize_logits
from synthesizer_jax.attention.masks import zero_padding
from synthesizer_jax.attention.reference_route import weigh_values
from synthesizer_jax.attention.terms import clear_padding
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Choices, Length, NotNegative
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.mixers.base import dropout_options
from synthesizer_jax.mixers.taps import LOGITS
from synthesizer_jax.primitives.initializers import FanIn, Initializer
from synthesizer_jax.primitives.parameters import with_axes

Dynamic: TypeAlias = Annotated[str, Choices(("x2l", "m2l", "x2w", "m2w"))]


@register
class TalkingHeads(AttentionBase):
    """Attention whose heads exchange logits before the softmax and weights after it.

    Talking-heads attention is described by Shazeer et al. 2020, section 3. The layer starts from
    the alignment's logits J, and computes ``L = J P_l + bias``, ``W = softmax(L)``, ``U = W P_w``
    and ``y = concat(U V) W_o``. Any alignment that computes logits can be used. The layer holds all
    logits in memory, because heads that exchange logits cannot be computed one by one.

    Attributes:
      num_heads: number of heads of the alignment, which the paper calls h_k.
      softmax_heads: number of heads of the softmax and of a position bias, which the paper calls h.
        None means `num_heads`.
      value_heads: number of heads of the values, which the paper calls h_v. None means
        `softmax_heads`.
      project_logits: whether the layer has a matrix P_l. If the layer has no P_l, `num_heads` must
        equal `softmax_heads`.
      project_weights: whether the layer has a matrix P_w. If the layer has no P_w, `softmax_heads`
        must equal `value_heads`.
      dynamic: the names of the dynamic projections, any of ``x2l``, ``m2l``, ``x2w`` and ``m2w``
        (section 6). Each dynamic projection adds a linear function of the query's token (x) or the
        key's token (m) to P_l or to P_w.
      talk_init: initializer of P_l ``[h_k, h]`` and P_w ``[h, h_v]``.
      dynamic_scale: sets the initial size of the dynamic projections. If the features of tokens
        have unit variance, the entries of a dynamic projection have a variance of `dynamic_scale`
        divided by the number of heads that the projection sums over.
    """

    softmax_heads: Length | None = None
    value_heads: Length | None = None
    project_logits: bool = True
    project_weights: bool = True
    dynamic: tuple[Dynamic, ...] = ()
    talk_init: Initializer = FanIn()
    dynamic_scale: NotNegative = 1e-2

    @property
    def bias_heads(self) -> int:
        """The number of heads of a position bias."""
        return self.softmax_heads or self.num_heads

    @property
    def num_value_heads(self) -> int:
        """The number of heads of the values."""
        return self.value_heads or self.bias_heads

    def _values(self, memory: jax.Array) -> tuple[jax.Array, ...]:
        """Returns the values and the memory's dynamic projections, ``[batch, k, from, to]``."""
        self._check_fields()
        projections = (
            self._dynamic(name, memory) for name in ("m2l", "m2w") if name in self.dynamic
        )
        return self._project_values(memory), *projections

    def _attend(
        self, x: jax.Array, terms: Terms, values: tuple[jax.Array, ...], *, bias: Terms, mask: Mask
    ) -> jax.Array:
        """Returns the sum of the values, weighted by ``softmax(logits P_l) P_w``."""
        queries, keys = mask.clearing_masks(x.shape[1], values[0].shape[1])
        terms, values = clear_padding(terms, values, None, keys)
        # `_values` returns the values [b, k, h_v, e] and the dynamic projections of the memory.
        v, *dynamic = values

        # For each key and each query, a dynamic projection is added to P_l or P_w.
        names = [name for name in ("m2l", "m2w") if name in self.dynamic]
        by_key = dict(zip(names, dynamic, strict=True))  # [b, k, from, to]
        by_query = {
            name: zero_padding(self._dynamic(name, x), queries)  # [b, q, from, to]
            for name in ("x2l", "x2w")
            if name in self.dynamic
        }

        q_length = x.shape[1]
        k_length = v.shape[1]
        logits_of = functools.partial(
            materialize_logits, mask=mask, q_length=q_length, k_length=k_length
        )
        logits = logits_of(terms)  # [b or 1, h_k, q, k]
        if self.project_logits:
            matrix = self._matrix("logits_projection")
            logits = _mix_heads(logits, matrix, by_query.get("x2l"), by_key.get("m2l"))
        if self.is_sowing_weights:
            self.sow(LOGITS, "attention_logits", logits)
        if bias:
            logits = logits + logits_of(bias)

        pairs = mask.pairs(q_length, k_length)
        if pairs is not None:
            # Masked logits are set to a finite number here. The argument `where` of
            # `jax.nn.softmax` is not used, because it would compute with infinities.
            logits = jnp.where(pairs, logits, jnp.finfo(logits.dtype).min)
        weights = jax.nn.softmax(logits)  # [b or 1, h, q, k]
        if pairs is not None:
            weights = jnp.where(pairs, weights, 0)

        if self.project_weights:
            matrix = self._matrix("weights_projection")
            weights = _mix_heads(weights, matrix, by_query.get("x2w"), by_key.get("m2w"))
        if self.is_sowing_weights:
            self.sow("intermediates", "attention_weights", weights)
        dropout = dropout_options(self, self.dropout_rate)
        v = drop_value_vectors(v, dropout["dropout_rate"], dropout["dropout_key"])
        return weigh_values(weights, v)

    def _num_heads_between(self, target: str) -> tuple[int, int]:
        """Returns the number of heads before a projection, and the number of heads after it.

        Args:
          target: ``l`` for P_l or ``w`` for P_w.
        """
        if target == "l":
            return self.num_heads, self.bias_heads
        return self.bias_heads, self.num_value_heads

    def _matrix(self, name: str) -> jax.Array:
        """Creates P_l or P_w."""
        init = with_axes(self.talk_init, "talk_from", "talk_to")
        return self.param(name, init, self._num_heads_between(name[0]))

    def _dynamic(self, name: str, tokens: jax.Array) -> jax.Array:
        """Returns a dynamic projection of tokens, ``[batch, length, from, to]``."""
        source, target = self._num_heads_between(name[-1])
        init = FanIn(self.dynamic_scale / source)
        return project(
            tokens,
            heads=source,
            width=target,
            name=name,
            axes=("heads", "talk_to"),
            kernel_init=init,
        )

    def _check_fields(self) -> None:
        """Raises a `ValueError` if the layer leaves out a matrix, P_l or P_w, that it needs.

        A matrix is needed if it changes the number of heads, or if a dynamic projection is added to
        it.
        """
        for name in ("logits", "weights"):
            source, to = self._num_heads_between(name[0])
            dynamic = any(d.endswith(name[0]) for d in self.dynamic)
            if not getattr(self, f"project_{name}") and (source != to or dynamic):
                raise ValueError(
                    f"TalkingHeads: project_{name}=False needs the same number of heads before and "
                    f"after the projection, and no dynamic projection of {name}. But there are "
                    f"{source} heads before and {to} heads after, and dynamic is {self.dynamic}."
                )


def _mix_heads(
    heads: jax.Array, matrix: jax.Array, by_query: jax.Array | None, by_key: jax.Array | None
) -> jax.Array:
    """Mixes h heads to g heads by ``heads · (P + P_x + P_m)``, ``[b or 1, g, q, k]``.

    Args:
      heads: logits or weights, ``[b or 1, h, q, k]``.
      matrix: P ``[h, g]``.
      by_query: P_x ``[b, q, h, g]``, or None.
      by_key: P_m ``[b, k, h, g]``, or None.
    """
    out = jnp.einsum("bhqk,hg->bgqk", heads, matrix.astype(heads.dtype))
    if by_query is not None:
        out = out + jnp.einsum("bhqk,bqhg->bgqk", heads, by_query.astype(heads.dtype))
    if by_key is not None:
        out = out + jnp.einsum("bhqk,bkhg->bgqk", heads, by_key.astype(heads.dtype))
    return out
