"""A layer of a model, with its mixers, feed-forward layer, norms and residual connections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.attention import Cache, Mask, Terms
from synthesizer_jax.attention.beams import can_share, reorder_beams, share_among_beams
from synthesizer_jax.attention.masks import MaskLike
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Rate
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.mixers.base import MixerCache, rows_per_memory
from synthesizer_jax.mixers.merged import MergedCache
from synthesizer_jax.mixers.taps import SHARED_BY_COPIES, sow_tap, tap
from synthesizer_jax.models.layers import Dropout
from synthesizer_jax.primitives.mesh import constrain
from synthesizer_jax.primitives.norms import RMSNorm


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """The outputs of the encoder to which a decoder attends, and the mask of cross-attention.

    The decoder may have n rows for each row of the memory, for example in beam search, or when n
    answers to one input are scored. The n rows of an input are adjacent.

    Attributes:
      encoded: ``[batch, k, d_model]`` the outputs of the encoder.
      mask: the mask of cross-attention.
    """

    encoded: jax.Array
    mask: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The caches of one layer.

    Attributes:
      self_attention: the cache of the self mixer.
      cross_attention: the cache of the cross mixer, or the keys and values of the memory if the
        self mixer attends to the memory. None if the layer does not attend to a memory.
      in_decoder: whether the layer belongs to a decoder that attends to a memory.
      shares_cross: whether rows that attend to the same memory share `cross_attention`.
    """

    self_attention: MixerCache
    cross_attention: MixerCache | None = None
    in_decoder: bool = dataclasses.field(default=False, metadata={"static": True})
    shares_cross: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def length(self) -> jax.Array:
        """The position of the next token, a scalar or ``[batch]``."""
        return self.self_attention.length

    def map_rows(self, function: Callable[[jax.Array], jax.Array]) -> LayerCache:
        """Applies a function to all arrays that have an entry for every row of tokens.

        Shared caches of cross-attention do not change.
        """
        return self._map_cross(function, _map_arrays(function, self.self_attention))

    def share_among_beams(self, beams: int) -> LayerCache:
        """Returns a cache with `beams` rows of tokens for each example.

        All beams of an example start with the past of the example. In the cache of self-attention,
        the beams of an example share a row if the cache supports it; see `attention.beams`.
        """
        own = self.self_attention

        def repeat(x: jax.Array) -> jax.Array:
            """Repeats the row of each example."""
            return jnp.repeat(x, beams, axis=0)

        if isinstance(own, Cache) and can_share(own):
            return self._map_cross(repeat, share_among_beams(own, beams))
        return self.map_rows(repeat)

    def reorder_beams(self, source: jax.Array) -> LayerCache:
        """Returns the cache after every beam has taken over the past of another beam.

        Args:
          source: ``[b, n]`` the beam whose past each beam takes over.
        """
        own = self.self_attention
        b, n = source.shape
        rows = (jnp.arange(b)[:, None] * n + source).reshape(-1)  # [b · n]

        def reorder(x: jax.Array) -> jax.Array:
            """Replaces each row by the row of the beam whose past it takes over."""
            return x[rows]

        if isinstance(own, Cache) and own.sources is not None:
            return self._map_cross(reorder, reorder_beams(own, source))
        return self.map_rows(reorder)

    def _map_cross(
        self, function: Callable[[jax.Array], jax.Array], self_attention: MixerCache
    ) -> LayerCache:
        """Replaces the cache of self-attention, and applies a function to that of cross-attention.

        The function is not applied to shared caches of cross-attention.
        """
        cross = self.cross_attention
        if not self.shares_cross:
            cross = _map_arrays(function, cross)
        return dataclasses.replace(self, self_attention=self_attention, cross_attention=cross)


def _map_arrays(function: Callable[[jax.Array], jax.Array], cache: MixerCache) -> MixerCache:
    """Applies a function to all arrays of a cache except scalars."""
    return jax.tree.map(lambda x: function(x) if jnp.ndim(x) else x, cache)


@register
class Block(nn.Module):
    """A layer that consists of self-attention, optional cross-attention, and a feed-forward layer.

    The fields hold the configurations of the sub-layers. Each bound sub-layer is a copy of a field
    with another name; see "The framework" in docs/design.md, which also explains why the class may
    have several compact methods. The bound sub-layers have the same names as in T5X:
    ``self_attention``, ``encoder_decoder_attention`` and ``mlp``. In encoders, self-attention is
    named ``attention``.

    For distillation, a block sows values in the collection `TAPS`. The mixers' inputs are sown as
    ``self_input`` and ``cross_input``, and the mixers' outputs as ``self_mixed`` and
    ``cross_mixed``. ``self_output`` is the state after the residual connection of self-attention,
    and ``output`` is the output of the block. If the collection ``overrides`` is given, the block
    takes ``self_input`` and ``cross_input`` from this collection.

    Attributes:
      self_mixer: the token mixer, such as `Attention`. A `MergedAttention` also attends to the
        encoder's outputs.
      feed_forward: the position-wise layer, or None to leave it out.
      cross_mixer: the mixer over the encoder's outputs. Encoders, language models, and decoder
        layers that do not attend to the encoder use None. Decoder layers with a `MergedAttention`
        use None as well.
      dropout_rate: probability of dropping a feature of a sub-layer's output.
      elementwise_dropout: whether every position has its own random draw, instead of one draw for
        all positions; see `Dropout`.
      norm: the normalization.
      post_norm: whether to normalize after the residual connection, ``norm(x + f(x))`` (Vaswani et
        al. 2017, BERT). False means that the input of the sub-layer is normalized,
        ``x + f(norm(x))`` (T5).
      output_norm: whether to normalize the output of a sub-layer as well, ``x + norm(f(norm(x)))``
        (Gemma 2).
      self_residual: whether self-attention has a norm and a residual connection. False means that
        the mixer also replaces the norm and the residual connection. A block without the norm and
        the residual connection is ALRR, or ELR if `feed_forward` is None (Bozic et al. 2023).
    """

    self_mixer: Mixer
    feed_forward: nn.Module | None
    cross_mixer: Mixer | None = None
    dropout_rate: Rate = 0.0
    elementwise_dropout: bool = False
    norm: nn.Module = RMSNorm(parent=None)
    post_norm: bool = False
    output_norm: bool = False
    self_residual: bool = True

    def __call__(
        self, x: jax.Array, mask: Mask | None = None, bias: Terms = (), memory: Memory | None = None
    ) -> tuple[jax.Array, None]:
        """Applies the layer. The method has the signature of a body of `nn.scan`.

        Args:
          x: ``[batch, q, d_model]``. In a decoder, `x` may have ``batch · n`` rows, which are n
            rows for each row of the memory.
          mask: the mask of self-attention.
          bias: the stack's position bias, which is used only if self-attention has logits. () means
            no bias.
          memory: the memory to which the decoder attends, or None in encoders.

        Returns:
          ``[batch, q, d_model]``, and None because a scan has no outputs to stack.
        """

        def attend_to_self(mixer: Mixer, x: jax.Array) -> jax.Array:
            """Calls the self mixer."""
            terms = bias if mixer.bias_heads else ()
            if memory is None or not mixer.reads_memory:
                return mixer(x, mask=mask, bias=terms)
            return mixer(x, memory.encoded, mask=mask, bias=terms, memory_mask=memory.mask)

        def attend_to_memory(mixer: Mixer, x: jax.Array) -> jax.Array:
            """Calls the cross mixer."""
            assert memory is not None

            def attend(mixer: Mixer, x: jax.Array) -> tuple[jax.Array, MixerCache]:
                """Calls the mixer with one row of tokens for each row of the memory."""
                return mixer(x, memory.encoded, mask=memory.mask), None

            y, _ = _share_memory(attend, mixer, x, memory.encoded.shape[0])
            return y

        return self._run(x, attend_to_self, attend_to_memory, in_decoder=memory is not None), None

    @nn.compact
    def init_cache(
        self, x: jax.Array, memory: Memory | None = None, *, max_length: int, whole: bool = True
    ) -> LayerCache:
        """Returns the layer's cache, which is empty except for the keys and values of the memory.

        See `Stack.init_cache` for the arguments, and `Mixer.init_cache` for `whole`.
        """
        in_decoder = memory is not None
        self_mixer = self._self_mixer(in_decoder)
        options: dict[str, Any] = {"max_length": max_length, "whole": whole}
        if self_mixer.reads_memory:
            assert memory is not None
            merged = self_mixer.init_cache(x, memory.encoded, mask=memory.mask, **options)
            return LayerCache(merged.own, merged.memory, in_decoder)
        self_cache = self_mixer.init_cache(x, **options)
        if self.cross_mixer is None:
            return LayerCache(self_cache, in_decoder=in_decoder)
        mixer = self._cross_mixer(in_decoder)
        assert memory is not None
        cross = mixer.init_cache(x, memory.encoded, max_length=max_length, mask=memory.mask)
        return LayerCache(self_cache, cross, in_decoder, shares_cross=mixer.shares_cross_cache)

    def extend(
        self,
        x: jax.Array,
        cache: LayerCache,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        memory_mask: MaskLike = None,
        position: int | jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the layer to new tokens.

        See `Stack.extend` for the arguments, and `__call__` for the bias.
        """
        self_cache: MixerCache = cache.self_attention
        cross: MixerCache = cache.cross_attention

        def attend_to_self(mixer: Mixer, x: jax.Array) -> jax.Array:
            """Extends the cache of the self mixer."""
            nonlocal self_cache
            options: dict[str, Any] = {
                "mask": mask,
                "bias": bias if mixer.bias_heads else (),
                "position": position,
            }
            if mixer.reads_memory:
                _check_positions(cache, x.shape[0], position)
                merged = MergedCache(self_cache, cross)
                y, merged = mixer.extend(x, merged, memory_mask=memory_mask, **options)
                self_cache = merged.own
            else:
                y, self_cache = mixer.extend(x, self_cache, **options)
            return y

        def attend_to_memory(mixer: Mixer, x: jax.Array) -> jax.Array:
            """Extends the cache of the cross mixer."""
            nonlocal cross
            old = cross
            mask = memory_mask
            batch = x.shape[0]
            if cache.shares_cross:
                batch = old.empty_memory.shape[0]
                _check_positions(cache, x.shape[0], position)
            else:
                # Every row of tokens has its own cache, and therefore needs its own row of the
                # mask.
                mask = jax.tree.map(lambda a: _repeat_rows(a, batch), mask)

            def extend(mixer: Mixer, x: jax.Array) -> tuple[jax.Array, MixerCache]:
                """Extends the mixer's cache, given one row of tokens for each row of the memory."""
                return mixer.extend(x, old, mask=mask, position=position)

            y, cross = _share_memory(extend, mixer, x, batch)
            return y

        x = self._run(x, attend_to_self, attend_to_memory, in_decoder=cache.in_decoder)
        return x, dataclasses.replace(cache, self_attention=self_cache, cross_attention=cross)

    @nn.compact
    def _run(
        self,
        x: jax.Array,
        attend_to_self: Callable[[Mixer, jax.Array], jax.Array],
        attend_to_memory: Callable[[Mixer, jax.Array], jax.Array],
        *,
        in_decoder: bool,
    ) -> jax.Array:
        """Applies all sub-layers, given functions that call self-attention and cross-attention.

        `__call__` and `extend` differ only in the two functions that they pass.
        """
        name = "self_attention" if in_decoder else "attention"
        x = tap(self, "self_input", constrain(x))
        h = self._pre_norm(x, name) if self.self_residual else x
        y = attend_to_self(self._self_mixer(in_decoder), h)
        sow_tap(self, "self_mixed", y)
        x = self._add(x, y, name, index=0) if self.self_residual else y
        sow_tap(self, "self_output", x)

        if self.cross_mixer is not None:
            x = tap(self, "cross_input", x)
            mixer = self._cross_mixer(in_decoder)
            y = attend_to_memory(mixer, self._pre_norm(x, "cross_attention"))
            sow_tap(self, "cross_mixed", y)
            x = self._add(x, y, "cross_attention", index=1)

        if self.feed_forward is not None:
            y = self.feed_forward.copy(name="mlp", parent=self)(self._pre_norm(x, "mlp"))
            x = self._add(x, y, "mlp", index=2)

        sow_tap(self, "output", x)
        return x

    def _self_mixer(self, in_decoder: bool) -> Mixer:
        """Returns the self mixer as a bound submodule."""
        name = "self_attention" if in_decoder else "attention"
        if self.self_mixer.reads_memory:
            kind = type(self.self_mixer).__name__
            if not in_decoder:
                raise ValueError(
                    f"Block: {kind} attends to the outputs of an encoder, but there is no encoder. "
                    "Use it in the decoder of an EncoderDecoder."
                )
            if self.cross_mixer is not None:
                raise ValueError(
                    f"Block: self_mixer is a {kind}, which already attends to the outputs of the "
                    "encoder. Set cross_mixer=None."
                )
        return self.self_mixer.copy(name=name, parent=self)

    def _cross_mixer(self, in_decoder: bool) -> Mixer:
        """Returns the cross mixer as a bound submodule."""
        if not in_decoder:
            raise ValueError("Block: a cross_mixer needs a memory, the output of the encoder.")
        assert self.cross_mixer is not None
        return self.cross_mixer.copy(name="encoder_decoder_attention", parent=self)

    def _pre_norm(self, x: jax.Array, name: str) -> jax.Array:
        """Returns the input of a sub-layer, which is normalized unless the block is post-norm."""
        if self.post_norm:
            return x
        return self.norm.copy(name=f"pre_{name}_layer_norm", parent=self)(x)

    def _add(self, x: jax.Array, y: jax.Array, name: str, *, index: int) -> jax.Array:
        """Adds a sub-layer's output to the residual stream, and applies dropout and the norms."""
        if self.output_norm:
            y = self.norm.copy(name=f"post_{name}_layer_norm", parent=self)(y)
        dropout = Dropout(
            self.dropout_rate, self.elementwise_dropout, name=f"dropout_{index}", parent=self
        )
        x = x + dropout(y)
        if self.post_norm:
            x = self.norm.copy(name=f"post_{name}_layer_norm", parent=self)(x)
        return constrain(x)


def _check_positions(cache: LayerCache, num_rows: int, position: int | jax.Array | None) -> None:
    """Raises a `ValueError` if rows that share a memory are at different positions."""
    memory: MixerCache = cache.cross_attention
    shares = memory.empty_memory.shape[0] < num_rows
    if shares and jnp.ndim(cache.length if position is None else position):
        raise ValueError(
            "Block: rows that share a memory must be at the same position while decoding. Pass a "
            "scalar position."
        )


def _share_memory(
    attend: Callable[[Mixer, jax.Array], tuple[jax.Array, MixerCache]],
    mixer: Mixer,
    x: jax.Array,
    batch: int,
) -> tuple[jax.Array, MixerCache]:
    """Calls a mixer with tokens ``[batch · n, q, d_model]`` and a memory of ``batch`` rows.

    The memory is not repeated for the n rows. Under `vmap` over n, each matrix product multiplies n
    times as many queries with the same keys.
    """
    count = rows_per_memory(x.shape[0], batch)
    if count == 1:
        return attend(mixer, x)

    # The mixer's cache has no axis for n, because all rows that share a memory also share the
    # cache.
    lifted = nn.vmap(
        attend,
        {SHARED_BY_COPIES: None},
        split_rngs={"dropout": True},
        in_axes=1,
        out_axes=(1, None),
    )
    y, cache = lifted(mixer, x.reshape(batch, count, *x.shape[1:]))  # [batch, n, q, d]
    return y.reshape(x.shape), cache


def _repeat_rows(x: jax.Array, rows: int) -> jax.Array:
    """Repeats each row of a mask's array equally often, so that the result has `rows` rows."""
    if not jnp.ndim(x) or x.shape[0] in (1, rows):
        return x
    return jnp.repeat(x, rows // x.shape[0], axis=0)
