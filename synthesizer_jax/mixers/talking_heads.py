"""Talking-heads attention."""

from __future__ import annotations

import functools
from typing import Annotated, TypeAlias

import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import project
from synthesizer_jax.attention import Mask, Terms, drop_value_vectors, packed_logits
from synthesizer_jax.initializers import FanIn, Initializer
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.mixers.base import dropout_options
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register
from synthesizer_jax.typing import Choices, Length, NotNegative

DYNAMIC = ("x2l", "m2l", "x2w", "m2w")
Dynamic: TypeAlias = Annotated[str, Choices(DYNAMIC)]


@register
class TalkingHeads(AttentionBase):
    """Attention whose heads exchange logits before the softmax and weights after it.

    ``J = alignment``, ``L = J P_l + bias``, ``W = softmax(L)``, ``U = W P_w``, ``y = concat(U V) W_o``
    (Shazeer et al. 2020, section 3). Works over any alignment made of logits. All logits are held in
    memory: heads cannot be computed one by one.

    Attributes:
      num_heads: heads of the alignment, the paper's h_k.
      softmax_heads: the paper's h, of the softmax and of a position bias; None: as many.
      value_heads: the paper's h_v; None: as many as `softmax_heads`.
      project_logits: False leaves P_l out; then ``num_heads = softmax_heads``.
      project_weights: False leaves P_w out; then ``softmax_heads = value_heads``.
      dynamic: any of ``x2l``, ``m2l``, ``x2w``, ``m2w``: a linear function of the query's token (x)
        or of the key's (m) is added to P_l or P_w (section 6).
      talk_init: initializer of P_l ``[h_k, h]`` and P_w ``[h, h_v]``.
      dynamic_scale: variance of a dynamic projection's entries at unit tokens, times the number of
        heads that it sums over.
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
        """Makes the values and the memory's dynamic projections, ``[batch, k, from, to]``."""
        self._check_fields()
        projections = (self._dynamic(name, memory) for name in ("m2l", "m2w") if self._has(name))
        return self._project_values(memory), *projections

    def _attend(
        self,
        x: jax.Array,
        terms: Terms,
        values: tuple[jax.Array, ...],
        *,
        bias: Terms,
        mask: Mask,
    ) -> jax.Array:
        """Sums the values with weights P_w softmax(P_l logits)."""
        v, *dynamic = values
        m2l = dynamic.pop(0) if self._has("m2l") else None
        m2w = dynamic.pop(0) if self._has("m2w") else None
        x2l = self._dynamic("x2l", x) if self._has("x2l") else None
        x2w = self._dynamic("x2w", x) if self._has("x2w") else None
        q_length, k_length = x.shape[1], v.shape[1]
        logits_of = functools.partial(
            packed_logits, mask=mask, q_length=q_length, k_length=k_length
        )
        logits = logits_of(terms)
        if self.project_logits:
            logits = _mix_heads(logits, self._matrix("logits_projection"), x2l, by_key=m2l)
        if bias:
            logits = logits + logits_of(bias)
        pairs = mask.pairs(q_length, k_length)
        if pairs is None:
            weights = jax.nn.softmax(logits)
        else:  # with `where`, JAX has infinite numbers
            weights = jax.nn.softmax(jnp.where(pairs, logits, jnp.finfo(logits.dtype).min))
            weights = jnp.where(pairs, weights, 0)
        if self.project_weights:
            weights = _mix_heads(weights, self._matrix("weights_projection"), x2w, by_key=m2w)
        if self.is_sowing_weights:
            self.sow("intermediates", "attention_weights", weights)
        dropout = dropout_options(self, self.dropout_rate)
        v = drop_value_vectors(v, dropout["dropout_rate"], dropout["dropout_key"])
        weights = jnp.broadcast_to(weights, (v.shape[0], *weights.shape[1:]))
        y = jnp.einsum(
            "bhqk,bkhe->bqhe",
            weights.astype(v.dtype),
            v,
            preferred_element_type=weights.dtype,
        )
        return y.astype(v.dtype)

    def _has(self, name: str) -> bool:
        return name in self.dynamic

    def _num_heads_between(self, target: str) -> tuple[int, int]:
        """Returns the numbers of heads of P_l or P_w, as `target` is ``l`` or ``w``."""
        if target == "l":
            return self.num_heads, self.bias_heads
        return self.bias_heads, self.num_value_heads

    def _matrix(self, name: str) -> jax.Array:
        init = with_axes(self.talk_init, "talk_from", "talk_to")
        return self.param(name, init, self._num_heads_between(name[0]))

    def _dynamic(self, name: str, tokens: jax.Array) -> jax.Array:
        """Makes a dynamic projection of tokens, ``[batch, length, from, to]``."""
        source, target = self._num_heads_between(name[-1])
        init = FanIn(self.dynamic_scale / source)
        return project(
            tokens, heads=source, width=target, name=name, axis="talk_to", kernel_init=init
        )

    def _check_fields(self) -> None:
        """Raises a `ValueError` for fields that do not fit together."""
        unknown = [name for name in self.dynamic if name not in DYNAMIC]
        if unknown:
            raise ValueError(f"TalkingHeads: dynamic={unknown[0]!r}; allowed: {', '.join(DYNAMIC)}")
        for target, on, names in (
            ("l", self.project_logits, "project_logits=False needs softmax_heads = num_heads"),
            ("w", self.project_weights, "project_weights=False needs value_heads = softmax_heads"),
        ):
            source, to = self._num_heads_between(target)
            if not on and (source != to or any(d.endswith(target) for d in self.dynamic)):
                raise ValueError(
                    f"TalkingHeads: {names} and no dynamic projection there, but the numbers are "
                    f"{source} and {to} and dynamic={self.dynamic}"
                )


def _mix_heads(
    heads: jax.Array,
    matrix: jax.Array,
    by_query: jax.Array | None = None,
    *,
    by_key: jax.Array | None = None,
) -> jax.Array:
    """``heads · (P + P_x + P_m)`` over the heads' axis.

    Args:
      heads: ``[b or 1, h, q, k]``.
      matrix: ``[h, g]``.
      by_query: ``[b, q, h, g]``.
      by_key: ``[b, k, h, g]``.

    Returns:
      ``[b or 1, g, q, k]``.
    """
    out = jnp.einsum("bhqk,hg->bgqk", heads, matrix.astype(heads.dtype))
    if by_query is not None:
        out = out + jnp.einsum("bhqk,bqhg->bgqk", heads, by_query.astype(heads.dtype))
    if by_key is not None:
        out = out + jnp.einsum("bhqk,bkhg->bgqk", heads, by_key.astype(heads.dtype))
    return out
