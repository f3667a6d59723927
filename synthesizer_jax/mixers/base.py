"""The interface of a mixer, and functions that mixers share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar, Never, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.alignments.base import dense_layer
from synthesizer_jax.attention import Explanation, Mask, Terms, explain
from synthesizer_jax.attention.masks import CROSS_ATTENTION, MaskLike, is_concrete
from synthesizer_jax.attention.routes import check_terms
from synthesizer_jax.base.registry import check_fields
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.mixers.taps import SHARED_BY_COPIES, sow_tap
from synthesizer_jax.primitives.initializers import Initializer
from synthesizer_jax.primitives.mesh import on_any_mesh

MixerCache: TypeAlias = PyTree
"""The cache of a mixer, a pytree with the attributes of a `TokenCount`.

Every mixer has its own type of cache.
"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenCount:
    """The cache of a mixer that stores only the number of past tokens.

    Attributes:
      length: the position of the next token, int32. The length is a scalar, or ``[batch]`` if the
        examples have different positions. In cross-attention, the length counts queries.
      empty_memory: an array without tokens, ``[batch, 0, width]``, with the width and dtype of the
        memory in cross-attention. None means self-attention.
    """

    length: int | jax.Array | np.int32 = dataclasses.field(default_factory=lambda: np.int32(0))
    empty_memory: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixerInput:
    """The input of `Mixer.mix`, which holds all tokens, or the new tokens if there is a cache.

    Attributes:
      x: ``[batch, q, d_model]`` the tokens to mix. In attention, they are the queries.
      mask: the mask that says which keys each query may attend to. It has already been prepared for
        self-attention or for a decoding step.
      kv: ``[batch, k, width]`` the tokens to attend to in cross-attention, or the memory of a mixer
        with `Mixer.reads_memory`. If the cache already holds the keys and values, `kv` has no
        tokens (k = 0). None means self-attention.
      bias: terms that are added to the logits.
      cache: the cache to extend, or None.
      position: the position of the first token of `x` in its sequence, a scalar.
      memory_mask: for a mixer with `Mixer.reads_memory`, the mask that says which tokens of the
        memory each query may attend to. For other mixers, it is empty.
    """

    x: jax.Array
    mask: Mask
    kv: jax.Array | None = None
    bias: Terms = ()
    cache: MixerCache | None = None
    position: int | jax.Array = 0
    memory_mask: Mask = dataclasses.field(default_factory=Mask)


class Mixer(nn.Module):
    """The base class of layers that mix tokens, such as attention and its replacements.

    The inputs and outputs of a mixer are ``[batch, length, d_model]``. A subclass defines the
    compact method `mix`, which all public methods call. To support decoding, a subclass also
    defines `new_cache`. A subclass sets the following attributes if they differ from the defaults.

    Attributes:
      has_cross_attention: whether the mixer can attend to the tokens of a memory, such as the
        outputs of an encoder.
      supports_causal: whether the mixer can hide later tokens, as decoders require.
      supports_bidirectional: whether a position can attend to later positions, as encoders require.
      supports_packing: whether a row may hold several sequences.
      shares_cross_cache: whether all rows that attend to the same memory can share one cache in
        cross-attention. A cache that depends on the queries, as in `SentenceFeedForward`, cannot be
        shared.
      reads_memory: whether the mixer is self-attention that also attends to a memory, as
        `MergedAttention` does. Such a mixer always takes `kv`, which is the memory, and a second
        mask for it. In a decoder block, it replaces both self-attention and cross-attention.
    """

    has_cross_attention: ClassVar[bool] = False
    supports_causal: ClassVar[bool] = True
    supports_bidirectional: ClassVar[bool] = True
    supports_packing: ClassVar[bool] = True
    shares_cross_cache: ClassVar[bool] = True
    reads_memory: ClassVar[bool] = False

    @property
    def bias_heads(self) -> int | None:
        """The number of heads of a position bias, or None if the mixer has no logits."""
        return None

    @on_any_mesh
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: MaskLike = None,
        bias: Terms = (),
        memory_mask: MaskLike = None,
        **unknown: Never,
    ) -> jax.Array:
        """Mixes tokens.

        Args:
          x: ``[batch, q, d_model]``. The dtype of `x` is the dtype of the computation.
          kv: ``[batch, k, width]`` tokens to attend to. None means `x`, which is self-attention. If
            `reads_memory` is True, `kv` is the memory, to which the queries attend in addition to
            `x`.
          mask: the mask that says which keys each query may attend to, and which queries are real.
            In self-attention, the real queries are the same tokens as the real keys. If the mask is
            an array, all queries count as real; see `Mask.of`.
          bias: terms that are added to the logits. If the alignment is a mixture, the terms are
            added to the weighted sum. A `Stack` passes T5's relative bias as `bias`.
          memory_mask: if `reads_memory` is True, the mask that says which tokens of the memory each
            query may attend to. `mask` is then the mask of self-attention. Padding queries of
            `mask` are also padding queries of `memory_mask`.

        Returns:
          ``[batch, q, d_model]``.

        Raises:
          ValueError: if the mixer does not support one of the arguments, or if there are more
            tokens than the mixer has positions.
          TypeError: if an argument is unknown.
        """
        name = type(self).__name__
        if unknown:
            raise TypeError(
                f"{name} has no argument {', '.join(unknown)}. For causal attention, pass "
                "mask=Mask(causal=True). For dropout, pass rngs with a key 'dropout' to `apply`."
            )
        for tokens in (x, kv):
            if tokens is not None and jnp.ndim(tokens) != 3:
                shape = jnp.shape(tokens)
                raise ValueError(
                    f"{name}: tokens have shape {shape}, but they must be [batch, length, width]."
                )
        mask = Mask.of(mask)
        cross = self._is_cross(kv)
        self._check_support(mask, bias, cross=cross)
        self._check_memory(kv, memory_mask)
        offset = mask.query_offset
        if not cross and isinstance(offset, int) and offset != 0:
            raise ValueError(
                f"{name}: Mask.query_offset is {offset}, but in self-attention without a cache the "
                "queries and keys are the same tokens. Leave it out, or pass the cache of the "
                "earlier tokens to extend."
            )
        # In self-attention, queries and keys are the same tokens, so a padding key is also a
        # padding query.
        mask = mask if cross else mask.for_self_attention()
        return self.mix(MixerInput(x, mask, kv, bias, memory_mask=Mask.of(memory_mask)))[0]

    @nn.nowrap
    def explain(
        self,
        x: jax.Array | jax.ShapeDtypeStruct,
        kv: jax.Array | jax.ShapeDtypeStruct | None = None,
        *,
        mask: MaskLike = None,
        bias: Terms = (),
        memory_mask: MaskLike = None,
        platform: str | None = None,
    ) -> tuple[Explanation, ...]:
        """Explains which implementation computes the layer, and why other implementations do not.

        The method traces the layer but computes nothing.

        Args:
          x: as in `__call__`. A `jax.ShapeDtypeStruct` is enough.
          kv: as in `__call__`. A `jax.ShapeDtypeStruct` is enough.
          mask: as in `__call__`.
          bias: as in `__call__`.
          memory_mask: as in `__call__`.
          platform: ``cpu``, ``gpu`` or ``tpu``. None means the platform that JAX uses.

        Returns:
          A tuple with one explanation for each call of `attend`.
        """
        key = jax.random.key(0)
        masks: dict[str, Any] = {"mask": mask, "memory_mask": memory_mask}
        return explain(self.init, key, x, kv, **masks, bias=bias, platform=platform)

    @on_any_mesh
    def init_cache(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        max_length: int,
        mask: MaskLike = None,
        whole: bool = True,
    ) -> MixerCache:
        """Returns a new cache. In cross-attention, it already holds the memory's keys and values.

        Args:
          x: ``[batch, any, d_model]``. The method reads only the shape and the dtype of `x`.
          kv: ``[batch, k, width]`` the memory in cross-attention, or the memory of a mixer with
            `reads_memory`. None means self-attention.
          max_length: the largest number of positions that `extend` can fill.
          mask: if there is a memory, the mask that says which tokens of the memory are real.
            Padding tokens have no effect, even if they contain NaN.
          whole: whether the cache keeps all positions. If `whole` is False, attention with a window
            keeps only the positions that the window can still reach, provided that its logits are
            products of queries and keys that are both computed from tokens. If the cache keeps only
            a window, `extend` accepts no bias, and if the mask has a prefix, queries can attend
            only to the positions of the prefix that are still in the cache. Models without a
            position bias set `whole` to False.

        Raises:
          ValueError: if the mixer cannot decode, or if it has fewer than `max_length` positions.
        """
        mask = Mask.of(mask)
        cross = self._is_cross(kv)
        self._check_memory(kv, mask if self.reads_memory else None)
        if kv is None:
            mask = decoding_mask(mask, 0, 0)
        self._check_support(mask, (), cross=cross)
        cache = self.new_cache(x[:, :0], kv, mask=mask, max_length=max_length)
        return cache if whole or cross else self.shorten(cache)

    @on_any_mesh
    def extend(
        self,
        x: jax.Array,
        cache: MixerCache,
        *,
        mask: MaskLike = None,
        bias: Terms = (),
        memory_mask: MaskLike = None,
        position: int | jax.Array | None = None,
    ) -> tuple[jax.Array, MixerCache]:
        """Mixes new tokens with the tokens in a cache, for one decoding step or for a whole prompt.

        In this method, self-attention is always causal. A query can attend to later tokens only if
        the mask has `prefix_lengths`.

        The mask says which tokens of each prompt are real. Use `key_lengths` if all padding is at
        the end, or `key_valid` ``[batch, q]`` if padding can be anywhere. If `key_lengths` or
        `key_valid` is given, the position of a token is the number of real tokens before it, and
        every example continues at its own position. The contents of padding have no effect. The
        outputs at padding positions are the same as in `__call__`.

        Args:
          x: ``[batch, q, d_model]`` the tokens from `position` on.
          cache: the cache from `init_cache` or from the previous step.
          mask: as in `__call__`, for all positions of the cache, except that `key_valid` is only
            for the new tokens.
          bias: as in `__call__`, for the new queries and all positions of the cache.
          memory_mask: as in `__call__`. Pass the same mask of keys as to `init_cache`.
          position: the position of the first token in its sequence, a scalar or ``[batch]``. None
            means the end of the cache. To decode again from an earlier position, pass the earlier
            position. Earlier positions are not allowed if the cache holds only sums or a window.

        Returns:
          ``[batch, q, d_model]`` and the extended cache.

        Raises:
          ValueError: if an argument is not allowed, for example because the tokens do not fit into
            the cache. If the position is traced, as in a compiled loop, the outputs are NaN
            instead.
        """
        mask = Mask.of(mask)
        kv = cache.empty_memory
        self._check_memory(kv, memory_mask)
        position = resolve_position(position, cache.length)
        order = None
        if not self._is_cross(kv) and mask.key_valid is not None:
            x, mask, order = move_padding_last(x, mask, position=position)
        inputs = MixerInput(x, mask, kv, bias, cache, position, Mask.of(memory_mask))
        y, cache = self._extend_rows(inputs)
        if order is not None:
            # The inverse permutation moves the outputs back to the original positions of their
            # tokens.
            y = take_positions(y, jnp.argsort(order, axis=1))
        return y, cache

    def _extend_rows(self, inputs: MixerInput) -> tuple[jax.Array, MixerCache]:
        """Extends the cache for rows in which all padding is at the end.

        The mask in `inputs` is the mask that the caller passed to `extend`. This method converts it
        to the mask of a decoding step.
        """
        position = inputs.position
        cross = self._is_cross(inputs.kv)
        if jnp.ndim(position):
            return self._extend_each(inputs)
        if cross:
            mask = dataclasses.replace(inputs.mask, query_offset=position)
        else:
            mask = decoding_mask(inputs.mask, position, inputs.x.shape[1])
            mask = _with_real_queries(mask, position)
        self._check_support(mask, inputs.bias, cross=cross)
        memory_mask = inputs.memory_mask
        if self.reads_memory:
            memory_mask = dataclasses.replace(memory_mask, query_offset=position)
        return self.mix(dataclasses.replace(inputs, mask=mask, memory_mask=memory_mask))

    def _extend_each(self, inputs: MixerInput) -> tuple[jax.Array, MixerCache]:
        """Extends the cache with `jax.vmap`, so that every example has its own position."""
        cache: MixerCache = inputs.cache
        batch = inputs.x.shape[0]
        positions, lengths = (jnp.broadcast_to(p, batch) for p in (inputs.position, cache.length))
        # The query offset is set again for every example, from the position of the example.
        mask, memory_mask = (
            dataclasses.replace(m, query_offset=0) for m in (inputs.mask, inputs.memory_mask)
        )

        def row(x: jax.Array, index: jax.Array) -> jax.Array:
            """Returns the row of one example from an array of the mask, as a batch of size 1."""
            return jax.lax.dynamic_slice_in_dim(x, 0 if x.shape[0] == 1 else index, 1, axis=0)

        def extend_row(
            mixer: Mixer, index: jax.Array, position: jax.Array, length: jax.Array, example: PyTree
        ) -> tuple[PyTree, jax.Array]:
            """Extends the cache of one example.

            The length of the cache is passed and returned separately, because the cache of a single
            example has a scalar length.
            """
            x, cache = jax.tree.map(lambda a: a[None], example)
            cache = mixer.with_length(cache, length)
            masks = jax.tree.map(lambda a: row(a, index), (mask, memory_mask))
            own_mask, own_memory_mask = masks
            kv = cache.empty_memory
            y, cache = mixer._extend_rows(
                MixerInput(x, own_mask, kv, inputs.bias, cache, position, own_memory_mask)
            )
            length = jnp.reshape(cache.length, ())
            cache = mixer.with_length(cache, None)
            return jax.tree.map(lambda a: a[0], (y, cache)), length

        # All examples share the variables, but every example has its own dropout key.
        lifted = nn.vmap(
            extend_row, variable_axes={SHARED_BY_COPIES: None}, split_rngs={"dropout": True}
        )
        examples = (inputs.x, self.with_length(cache, None))
        (y, cache), length = lifted(self, jnp.arange(batch), positions, lengths, examples)
        return y, self.with_length(cache, length)

    def with_length(
        self, cache: MixerCache, length: int | jax.Array | np.int32 | None
    ) -> MixerCache:
        """Returns the cache with another length.

        None removes the length, so that all remaining arrays have an axis of examples.
        """
        return dataclasses.replace(cache, length=length)

    def mix(self, inputs: MixerInput) -> tuple[jax.Array, MixerCache | None]:
        """Mixes tokens. Both `__call__` and `extend` call this compact method.

        Returns:
          ``[batch, q, d_model]`` and the extended cache, or None if there is no cache.
        """
        raise NotImplementedError

    def new_cache(
        self, x: jax.Array, kv: jax.Array | None, *, mask: Mask, max_length: int
    ) -> MixerCache:
        """Returns a new cache. This compact method is called by `init_cache`.

        The arguments are the same as those of `init_cache`, except that `x` has no tokens.
        """
        raise NotImplementedError

    def shorten(self, cache: MixerCache) -> MixerCache:
        """Returns an empty self-attention cache without room for positions that are out of reach.

        `init_cache` calls this method if its argument `whole` is False. This default returns the
        cache unchanged. Attention layers override the method, and shorten the cache if they have a
        window.
        """
        return cache

    def _is_cross(self, kv: jax.Array | None) -> bool:
        """Returns whether the mixer computes cross-attention, given the argument `kv`."""
        return kv is not None and not self.reads_memory

    def _check_memory(self, kv: jax.Array | None, memory_mask: MaskLike) -> None:
        """Raises a `ValueError` if a memory or its mask is missing or not supported."""
        name = type(self).__name__
        if not self.reads_memory:
            if memory_mask is not None:
                raise ValueError(
                    f"{name} attends to one sequence of tokens, so memory_mask cannot be used. "
                    "Pass the mask of these tokens as mask."
                )
        elif kv is None:
            raise ValueError(
                f"{name} attends to its own tokens and to a memory, but kv is None. Pass the "
                "outputs of an encoder as kv, or use Attention."
            )
        elif Mask.of(memory_mask).self_attention:
            raise ValueError(
                f"{name}: memory_mask was made for self-attention, but its keys are the tokens of "
                f"kv. {CROSS_ATTENTION}"
            )

    def _check_support(self, mask: Mask, bias: Terms, *, cross: bool) -> None:
        """Raises a `ValueError` if the mixer's attributes say that an argument is not supported."""
        name = type(self).__name__
        check_fields(self, name)
        if not isinstance(bias, tuple) or bias:
            check_terms(bias, f"{name}: bias")
        if cross and not self.has_cross_attention:
            raise ValueError(
                f"{name} mixes only the tokens of one sequence. Use Attention as cross_mixer."
            )
        if cross and mask.self_attention:
            raise ValueError(
                f"{name}: the mask was made for self-attention, but kv is given. {CROSS_ATTENTION}"
            )
        if bias and self.bias_heads is None:
            raise ValueError(
                f"{name} has no logits to which a position bias can be added. Set bias=None in the "
                "stack."
            )
        if mask.key_segments is not None and not self.supports_packing:
            raise ValueError(
                f"{name} reads a row as one sequence, so rows must not be packed. Turn packing off "
                "with data.pack=false."
            )
        is_partial = mask.has_band or mask.allowed is not None
        if not cross and is_partial and not self.supports_causal:
            if hasattr(self, "causal"):
                remedy = "Set its field causal=True in decoders, or use it in encoders only."
            else:
                remedy = "It has no causal form, so use another mixer in decoders."
            raise ValueError(
                f"{name} mixes all positions, and the mask hides some of them. {remedy}"
            )

    @property
    def is_sowing_weights(self) -> bool:
        """Whether the caller collects attention weights in the collection ``intermediates``."""
        return self.is_mutable_collection("intermediates") and not self.is_initializing()


def rows_per_memory(rows: int, batch: int) -> int:
    """Returns the number of rows of tokens for each row of a memory.

    Args:
      rows: the number of rows of tokens.
      batch: the number of rows of the memory.

    Raises:
      ValueError: if the rows of tokens cannot be divided evenly among the rows of the memory.
    """
    if rows == batch:  # also if both are zero, or symbolic sizes of `jax.export`
        return 1
    count, rest = divmod(rows, batch)
    if rest:
        raise ValueError(
            f"There are {rows} rows of tokens for {batch} rows of memory. Pass the same number of "
            "rows of tokens for each row of memory."
        )
    return count


def merge_heads(
    module: nn.Module,
    heads: jax.Array,
    d_model: int,
    *,
    kernel_init: Initializer,
    use_bias: bool = False,
) -> jax.Array:
    """Projects heads ``[batch, q, heads, head_dim]`` to ``[batch, q, d_model]``.

    The kernel of the projection is the mixer's parameter ``out/kernel``,
    ``[heads, head_dim, d_model]``. The input of the projection is sown in `TAPS` under the name
    ``heads``.
    """
    sow_tap(module, "heads", heads)
    dense = functools.partial(dense_layer, dtype=heads.dtype, kernel_init=kernel_init)
    axes = "heads", "kv", "embed"
    out = dense(d_model, axes, contracted=2, use_bias=use_bias, name="out", parent=module)
    return out(heads)


def dropout_options(module: nn.Module, rate: float) -> dict[str, Any]:
    """Returns the arguments of `attend` that control dropout.

    The arguments are the dropout rate and a PRNG key. If the PRNG stream ``dropout`` has no key,
    the arguments turn dropout off.
    """
    if rate == 0.0 or not module.has_rng("dropout"):
        return {"dropout_rate": 0.0, "dropout_key": None}
    return {"dropout_rate": rate, "dropout_key": module.make_rng("dropout")}


def decoding_mask(mask: Mask, position: int | jax.Array, n: int) -> Mask:
    """Returns the mask of n new tokens in self-attention, which is always causal.

    If the mask has a prefix, all new tokens attend to the prefix up to the last new token.
    """
    prefix = mask.prefix_lengths
    if prefix is not None:
        prefix = jnp.minimum(prefix, position + n)
    return dataclasses.replace(mask, causal=True, prefix_lengths=prefix, query_offset=position)


def _with_real_queries(mask: Mask, position: int | jax.Array) -> Mask:
    """Returns the mask of new tokens, in which padding keys are also padding queries.

    The first new token is at `position`.
    """
    if mask.key_lengths is None or mask.query_lengths is not None or mask.query_valid is not None:
        return mask
    return dataclasses.replace(
        mask, query_lengths=jnp.asarray(mask.key_lengths, jnp.int32) - position
    )


def resolve_position(position: int | jax.Array | None, length: int | jax.Array) -> int | jax.Array:
    """Returns the position of a decoding step.

    None means the end of the cache. If the position is known to be 0, the result is the integer 0,
    so that the first step of decoding does not trace the position.
    """
    position = length if position is None else position
    is_start = is_concrete(position) and np.ndim(position) == 0 and int(position) == 0
    return 0 if is_start else position


def query_ends(mask: Mask, position: int | jax.Array) -> jax.Array | None:
    """Returns the position after the last real query, ``[b]``, or None if all queries are real."""
    return None if mask.query_lengths is None else mask.query_lengths + position


def move_padding_last(
    x: jax.Array, mask: Mask, *, position: int | jax.Array = 0
) -> tuple[jax.Array, Mask, jax.Array]:
    """Moves the padding of new tokens ``[b, n, ...]`` to the end of each row.

    After the move, the position of a real token is the number of real tokens before it.

    Args:
      x: the new tokens.
      mask: a mask whose `key_valid` ``[b or 1, n]`` says which tokens are real.
      position: the position of the first token in its sequence.

    Returns:
      The tokens in their new order, the mask with `key_lengths` instead of `key_valid`, and the old
      index of each token, ``[b, n]``.
    """
    if mask.allowed is not None or mask.key_segments is not None:
        raise ValueError(
            "Mask.key_valid of new tokens cannot be combined with Mask.allowed or segments, "
            "because the padding is moved to the end. Pad at the end instead, and set key_lengths."
        )
    n = x.shape[1]
    assert mask.key_valid is not None
    if mask.key_valid.shape[-1] != n:
        raise ValueError(
            "Mask.key_valid says which of the new tokens are real, but it has "
            f"{mask.key_valid.shape[-1]} entries for {n} tokens. Leave it out if all are real."
        )
    real = jnp.broadcast_to(jnp.asarray(mask.keys(n), bool), x.shape[:2])  # [b, n]

    # The sort is stable, so the real tokens of a row keep their order.
    order = jnp.argsort(~real, axis=1, stable=True)
    mask = dataclasses.replace(
        mask,
        key_lengths=real.sum(axis=1, dtype=jnp.int32) + position,
        key_valid=None,
        query_lengths=None,
        query_valid=None,
    )
    return take_positions(x, order), mask, order


def take_positions(x: jax.Array, index: jax.Array) -> jax.Array:
    """Gathers the entries of ``[b, n, ...]`` at positions ``[b, m]``, as ``[b, m, ...]``."""
    index = jnp.reshape(index, (*index.shape, *(1,) * (x.ndim - 2)))  # [b, m, 1, ...]
    return jnp.take_along_axis(x, index, axis=1)
