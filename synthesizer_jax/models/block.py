"""One layer of a model: mixers, a feed-forward layer, norms and residuals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.ambient import constrain
from synthesizer_jax.attention import Mask, Terms
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.mixers.base import MixerCache
from synthesizer_jax.mixers.taps import READ_ONLY, sow_tap, tap
from synthesizer_jax.models.layers import Dropout, RMSNorm
from synthesizer_jax.registry import register
from synthesizer_jax.typing import PyTree, Rate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Memory:
    """What a decoder attends to: the encoder's output and which of it is visible.

    If the decoder has n rows for each of these, as in beam search or when n answers to one input are
    scored, they stand one after the other.

    Attributes:
      encoded: ``[batch, k, d_model]``.
      mask: the cross-attention's mask.
    """

    encoded: jax.Array
    mask: Mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """The caches of one layer.

    Attributes:
      self_attention: the cache of the self mixer.
      cross_attention: the cache of the cross mixer; None without one.
      in_decoder: the layer belongs to a decoder that attends to a memory.
      shares_cross: several rows that attend to the same memory share the cross mixer's cache.
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
        """Applies a function to the arrays that every row of tokens has for itself."""

        def apply(cache: MixerCache) -> MixerCache:
            return jax.tree.map(lambda x: function(x) if jnp.ndim(x) else x, cache)

        cross = self.cross_attention
        return dataclasses.replace(
            self,
            self_attention=apply(self.self_attention),
            cross_attention=cross if self.shares_cross else apply(cross),
        )


@register
class Block(nn.Module):
    """Residual sub-layers: self-attention, cross-attention if any, feed-forward.

    A field holds a sub-layer's configuration; the sub-layer made from it carries T5X's name
    (``self_attention``, ``encoder_decoder_attention``, ``mlp``; ``attention`` in encoders).

    For distillation a block sows in the collection `TAPS` the inputs ``self_input`` and
    ``cross_input``, the mixers' outputs ``self_mixed`` and ``cross_mixed``, ``self_output`` (after the
    residual) and ``output``; given the collection ``overrides`` it takes those inputs from there.

    Attributes:
      self_mixer: the token mixer, such as `Attention`.
      feed_forward: the position-wise layer; None leaves it out.
      cross_mixer: the mixer over the encoder's output; None in encoders and language models, and in
        a decoder's layer that does not look at the encoder.
      dropout_rate: dropout of each sub-layer's output.
      norm: the normalization.
      post_norm: normalize after the residual, ``norm(x + f(x))`` (Vaswani et al. 2017, BERT), not
        before the sub-layer, ``x + f(norm(x))`` (T5).
      self_residual: False: the mixer stands for its norm and residual too (ALRR, and ELR where
        `feed_forward` is None; Bozic et al. 2023).
    """

    self_mixer: Mixer
    feed_forward: nn.Module | None
    cross_mixer: Mixer | None = None
    dropout_rate: Rate = 0.0
    norm: nn.Module = RMSNorm()
    post_norm: bool = False
    self_residual: bool = True

    def __call__(
        self,
        x: jax.Array,
        mask: Mask | None = None,
        bias: Terms = (),
        memory: Memory | None = None,
    ) -> tuple[jax.Array, None]:
        """Applies the layer; it has the form of a scan's body.

        Args:
          x: ``[batch, q, d_model]``.
          mask: the self-attention's mask.
          bias: the stack's position bias, for a self-attention that has logits; () for none.
          memory: the encoder's side, in decoders.

        Returns:
          ``[batch, q, d_model]``, and None: nothing to stack.
        """
        return self._run(x, mask, bias, memory)[0], None

    def init_cache(
        self, x: jax.Array, memory: Memory | None = None, *, max_length: int
    ) -> LayerCache:
        """Returns the layer's empty cache, with the keys and values of the memory.

        Args:
          x: ``[batch, any, d_model]``; only the shape and the dtype are read.
          memory: the encoder's side, in decoders.
          max_length: number of positions that `extend` may reach.
        """
        return self._run(x, None, (), memory, max_length=max_length)[1]

    def extend(
        self,
        x: jax.Array,
        cache: LayerCache,
        *,
        mask: Mask | None = None,
        bias: Terms = (),
        memory_mask: Mask | None = None,
        position: int | jax.Array | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Applies the layer to new tokens, see `Mixer.extend`.

        Args:
          x: ``[batch · n, q, d_model]``, n rows for each row of the memory.
          cache: from `init_cache` or the step before.
          mask: the self-attention's mask.
          bias: the stack's position bias.
          memory_mask: the cross-attention's mask, of ``batch`` rows.
          position: position of the first token; None: where the cache ends.

        Returns:
          ``[batch · n, q, d_model]`` and the new cache.
        """
        return self._run(
            x, mask, bias, None, cache=cache, memory_mask=memory_mask, position=position
        )

    @nn.compact
    def _run(
        self,
        x: jax.Array,
        mask: Mask | None,
        bias: Terms,
        memory: Memory | None,
        *,
        cache: LayerCache | None = None,
        memory_mask: Mask | None = None,
        position: int | jax.Array | None = None,
        max_length: int | None = None,
    ) -> tuple[jax.Array, PyTree]:
        """The compact method behind `__call__`, `init_cache` and `extend`."""
        _check_is_mixer("self_mixer", self.self_mixer)
        in_decoder = memory is not None if cache is None else cache.in_decoder
        name = "self_attention" if in_decoder else "attention"
        self_mixer = self.self_mixer.copy(name=name, parent=self)
        cross_mixer = None
        if self.cross_mixer is not None:
            _check_is_mixer("cross_mixer", self.cross_mixer)
            if not in_decoder:
                raise ValueError("Block: a cross_mixer needs the encoder's output as memory")
            cross_mixer = self.cross_mixer.copy(name="encoder_decoder_attention", parent=self)
        if max_length is not None:
            return x, _init_cache(self_mixer, cross_mixer, x, memory=memory, max_length=max_length)
        bias = bias if self_mixer.bias_heads else ()
        # Self-attention.
        x = tap(self, "self_input", constrain(x))
        h = self._pre_norm(x, name) if self.self_residual else x
        if cache is None:
            y = self_mixer(h, mask=mask, bias=bias)
        else:
            y, own = self_mixer.extend(
                h, cache.self_attention, mask=mask, bias=bias, position=position
            )
            cache = dataclasses.replace(cache, self_attention=own)
        sow_tap(self, "self_mixed", y)
        x = self._add(x, y, name, index=0) if self.self_residual else y
        sow_tap(self, "self_output", x)
        # Cross-attention.
        if cross_mixer is not None:
            x = tap(self, "cross_input", x)
            h = self._pre_norm(x, "cross_attention")
            if cache is None:
                assert memory is not None
                y = _attend_to_memory(cross_mixer, h, memory)
            else:
                y, cross = _extend_cross(cross_mixer, h, cache, mask=memory_mask, position=position)
                cache = dataclasses.replace(cache, cross_attention=cross)
            sow_tap(self, "cross_mixed", y)
            x = self._add(x, y, "cross_attention", index=1)
        # Feed-forward.
        if self.feed_forward is not None:
            y = self.feed_forward.copy(name="mlp", parent=self)(self._pre_norm(x, "mlp"))
            x = self._add(x, y, "mlp", index=2)
        sow_tap(self, "output", x)
        return x, cache

    def _pre_norm(self, x: jax.Array, name: str) -> jax.Array:
        """Returns a sub-layer's input: normalized, unless the block is post-norm."""
        if self.post_norm:
            return x
        return self.norm.copy(name=f"pre_{name}_layer_norm", parent=self)(x)

    def _add(self, x: jax.Array, y: jax.Array, name: str, *, index: int) -> jax.Array:
        """Adds a sub-layer's output to the residual stream, with dropout and post-norm."""
        x = x + Dropout(self.dropout_rate, name=f"dropout_{index}", parent=self)(y)
        if self.post_norm:
            x = self.norm.copy(name=f"post_{name}_layer_norm", parent=self)(x)
        return constrain(x)


def _check_is_mixer(field: str, module: nn.Module) -> None:
    """Raises a `TypeError` for a field that holds a module of another kind."""
    if not isinstance(module, Mixer):
        raise TypeError(
            f"Block: {field} is a {type(module).__name__}, which is not a Mixer; derive its class from "
            "synthesizer_jax.mixers.Mixer"
        )


def _init_cache(
    self_mixer: Mixer,
    cross_mixer: Mixer | None,
    x: jax.Array,
    *,
    memory: Memory | None,
    max_length: int,
) -> LayerCache:
    own, in_decoder = self_mixer.init_cache(x, max_length=max_length), memory is not None
    if cross_mixer is None or memory is None:
        return LayerCache(own, in_decoder=in_decoder)
    cross = cross_mixer.init_cache(x, memory.encoded, max_length=max_length, mask=memory.mask)
    return LayerCache(own, cross, in_decoder, shares_cross=cross_mixer.shares_cross_cache)


def _rows_per_memory(rows: int, batch: int) -> int:
    """Returns the number of rows of tokens for each row of the memory."""
    if rows % batch:
        raise ValueError(
            f"Block: {rows} rows of tokens for {batch} rows of memory; give the same number of rows for "
            "each row of memory"
        )
    return rows // batch


def _attend_to_memory(mixer: Mixer, x: jax.Array, memory: Memory) -> jax.Array:
    """Applies a cross mixer to ``[batch · n, q, d_model]`` and a memory of batch rows.

    Nothing is repeated: the products see n queries for the same keys.
    """
    batch = memory.encoded.shape[0]
    count = _rows_per_memory(x.shape[0], batch)
    if count == 1:
        return mixer(x, memory.encoded, mask=memory.mask)

    def attend(mixer: Mixer, x: jax.Array) -> jax.Array:
        return mixer(x, memory.encoded, mask=memory.mask)

    lifted = nn.vmap(attend, {READ_ONLY: None}, split_rngs={"dropout": True}, in_axes=1, out_axes=1)
    return lifted(mixer, x.reshape(batch, count, *x.shape[1:])).reshape(x.shape)


def _extend_cross(
    mixer: Mixer,
    x: jax.Array,
    cache: LayerCache,
    *,
    mask: Mask | None,
    position: int | jax.Array | None,
) -> tuple[jax.Array, MixerCache]:
    """Extends a cross mixer's cache for ``[batch · n, q, d_model]`` and a mask of batch rows.

    The rows share a cache of batch rows, unless it changes from step to step, when every row of tokens
    has one.
    """
    cross: MixerCache = cache.cross_attention
    if not cache.shares_cross:
        mask = _repeat_rows(mask, x.shape[0])
        return mixer.extend(x, cross, mask=mask, position=position)
    batch = cross.empty_memory.shape[0]
    count = _rows_per_memory(x.shape[0], batch)
    if count == 1:
        return mixer.extend(x, cross, mask=mask, position=position)
    if jnp.ndim(position if position is not None else cross.length):
        raise ValueError(
            "Block: rows that share a memory while decoding stand at one position; give a scalar"
        )

    def extend(mixer: Mixer, x: jax.Array) -> tuple[jax.Array, MixerCache]:
        return mixer.extend(x, cross, mask=mask, position=position)

    lifted = nn.vmap(
        extend, {READ_ONLY: None}, split_rngs={"dropout": True}, in_axes=1, out_axes=(1, None)
    )
    y, cross = lifted(mixer, x.reshape(batch, count, *x.shape[1:]))
    return y.reshape(x.shape), cross


def _repeat_rows(mask: Mask | None, rows: int) -> Mask | None:
    """Returns a mask with `rows` rows, each of its own repeated."""

    def repeat(x: jax.Array) -> jax.Array:
        if not jnp.ndim(x) or x.shape[0] in (1, rows):
            return x
        return jnp.repeat(x, rows // x.shape[0], axis=0)

    return jax.tree.map(repeat, mask)
