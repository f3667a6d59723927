"""Alignments whose logits are products of queries and keys, as in the Transformer."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import Alignment, AttentionContext, project
from synthesizer_jax.alignments.rotary import LinearScaling, YaRN, rotate
from synthesizer_jax.attention import Terms, low_rank
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length, Positive, PyTree, Share
from synthesizer_jax.primitives.initializers import FanIn, Initializer, Normal
from synthesizer_jax.primitives.norms import LayerNorm, RMSNorm


@register
class DotProduct(Alignment):
    """Scaled dot product of projected tokens, ``logits = scale · (x W_q)(y W_k)ᵀ``.

    The width of a head does not have to be d_model / heads. Bhojanapalli et al. 2020 show that a
    width of d_model / heads limits the rank of the logits ("low-rank bottleneck").

    Attributes:
      head_dim: width of queries and keys. None means the width of the values.
      scale: factor of the logits. None means 1/√head_dim (Vaswani et al. 2017). T5 sets `scale` to
        1 and puts the factor 1/√head_dim into the initializer of the query kernel.
      use_bias: whether the query and key projections have a bias, as in BERT.
      normalize_qk: whether the queries and keys of every head are divided by their root mean square
        and multiplied by a learned factor for each feature, as in Qwen 3. A norm can be given
        instead of True, for example ``RMSNorm(offset=1.0)`` as in Gemma 3. A `LayerNorm` has a
        bias, in contrast to the layer normalization of `normalize_qk` in Flax.
      rotary_base: base of rotary positions (Su et al. 2021, RoFormer). The paper uses 10,000.
        Features i and ``i + head_dim / 2`` form a pair, as in Llama, and each pair is rotated by
        ``position · base^(-2 i / head_dim)`` radians. None means no rotation.
      rotary_share: the share of every head's features that is rotated, as in GPT-NeoX. The rotated
        features come first.
      rotary_scaling: a `LinearScaling` or a `YaRN`, which changes the rotation for texts that are
        longer than the training texts. None means no change.
      query_init: initializer of the query kernel ``[d_model, heads · head_dim]``.
      key_init: initializer of the key kernel ``[d_model, kv_heads · head_dim]``.
    """

    head_dim: Length | None = None
    scale: float | None = None
    use_bias: bool = False
    normalize_qk: bool | RMSNorm | LayerNorm = False
    rotary_base: Positive | None = None
    rotary_share: Share = 1.0
    rotary_scaling: LinearScaling | YaRN | None = None
    query_init: Initializer = FanIn()
    key_init: Initializer = FanIn()
    linear_in = ("key_norm", "key")

    def scale_logits(self, params: PyTree, factor: float) -> PyTree:
        """Returns a copy of the parameters, scaled so that all logits are multiplied by a factor.

        See `Alignment.scale_logits`.
        """
        scaled = super().scale_logits(params, factor)
        offset = getattr(self.normalize_qk, "offset", 0.0)
        if not offset:
            return scaled
        # The norm multiplies keys by ``offset + scale``, so the offset must be scaled, too.
        added = (factor - 1.0) * offset
        return {**scaled, "key_norm": jax.tree.map(lambda x: x + added, scaled["key_norm"])}

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        width = self.head_dim or context.head_dim
        if queries.ndim == 3:
            queries = project(
                queries,
                heads=context.num_heads,
                width=width,
                name="query",
                kernel_init=self.query_init,
                use_bias=self.use_bias,
            )
        if self.normalize_qk:
            queries = self._norm("query_norm")(queries)
        keys = self._project_keys(keys, context)
        if self.rotary_base is not None:
            # Usually, the positions of the first query and of the first key determine all
            # positions. If rows are packed, `packed_positions` contains the positions of all
            # queries and keys instead.
            starts = (context.query_span.start, context.keys_start)
            query_positions, key_positions = context.packed_positions or starts
            turn = functools.partial(
                rotate, base=self.rotary_base, share=self.rotary_share, scaling=self.rotary_scaling
            )
            queries = turn(queries, query_positions)
            keys = turn(keys, key_positions)
        elif self.rotary_share < 1 or self.rotary_scaling is not None:
            raise ValueError(
                "DotProduct: rotary_share or rotary_scaling is set, but rotary_base is None. Set "
                "rotary_base too, for example to 10_000."
            )

        # The queries are scaled instead of the logits, because there are fewer queries than logits.
        scale = width**-0.5 if self.scale is None else self.scale
        if scale != 1.0:
            queries = queries * scale

        # The logits of a head are the product of [q, width] and [width, k], so their rank is at
        # most the width. `low_rank` keeps the two factors and does not multiply them.
        return (low_rank(queries, keys, token_keys=True),)

    @nn.compact
    def keys_without_positions(self, keys: jax.Array, context: AttentionContext) -> jax.Array:
        """Returns projected keys ``[batch, k, kv_heads, width]`` that are not rotated.

        `MergedAttention` uses such keys for the tokens of a memory, which share the projection and
        the norm with the decoder's own keys.

        Args:
          keys: as in `__call__`.
          context: the heads of the layer. The positions are not read.
        """
        return self._project_keys(keys, context)

    def _project_keys(self, keys: jax.Array, context: AttentionContext) -> jax.Array:
        """Projects and normalizes the keys. The method must be called in a compact method."""
        if keys.ndim == 3:
            shared = context.num_kv_heads is not None
            keys = project(
                keys,
                heads=context.num_kv_heads or context.num_heads,
                width=self.head_dim or context.head_dim,
                name="key",
                axes=("kv_heads" if shared else "heads", "kv"),
                kernel_init=self.key_init,
                use_bias=self.use_bias,
            )
        return self._norm("key_norm")(keys) if self.normalize_qk else keys

    def _norm(self, name: str) -> nn.Module:
        """Returns the norm of queries or keys. The method must be called in a compact method."""
        norm = self.normalize_qk
        if isinstance(norm, bool):
            norm = RMSNorm(parent=None)
        return norm.copy(name=name, parent=self)


@register
class Bilinear(Alignment):
    """An alignment with a full d × d matrix W_h for every head, ``logits_h = (x W_h) yᵀ``.

    An `Attention` with this alignment and ``project_values=False`` is general bilinear multi-head
    attention (Shazeer et al. 2020, section 3.3). General bilinear attention is multi-head attention
    whose heads are as wide as d_model. Because the heads are so wide, the key projection can be
    multiplied into the query projection, and the value projection can be multiplied into the output
    projection.

    Attributes:
      query_init: initializer of the query kernel, as ``[d_model, heads · d_model]``. None means a
        normal distribution with standard deviation 1 / d_model. With this initializer, the logits
        have a variance of about one if the features of tokens have unit variance.
    """

    query_init: Initializer | None = None
    linear_in = ("query",)

    @nn.compact
    def __call__(self, queries: jax.Array, keys: jax.Array, context: AttentionContext) -> Terms:
        width = queries.shape[-1]
        queries = project(
            queries,
            heads=context.num_heads,
            width=width,
            name="query",
            kernel_init=self.query_init or Normal(1.0 / width),
        )
        # [b, k, h, d]
        keys = jnp.broadcast_to(keys[:, :, None], (*keys.shape[:2], context.num_heads, width))
        return (low_rank(queries, keys, token_keys=True),)
