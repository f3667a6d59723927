"""Feed-forward networks that take the place of attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import check_length
from synthesizer_jax.attention import Mask, Span
from synthesizer_jax.attention.cache import advance_length, fill_invalid
from synthesizer_jax.attention.masks import zero_padding
from synthesizer_jax.attention.terms import logits_dtype
from synthesizer_jax.base.registry import register
from synthesizer_jax.base.typing import Length, Number
from synthesizer_jax.mixers.base import Mixer, MixerInput, TokenCount, merge_heads, query_ends
from synthesizer_jax.primitives.initializers import FanIn, Initializer, TorchUniform
from synthesizer_jax.primitives.parameters import with_axes

EPSILON = 1e-5
"""The epsilon of both normalizations, which is PyTorch's default."""

SLOPE = 0.01
"""The negative slope of the leaky ReLU."""


class Sums(NamedTuple):
    """What a network has read of a sentence, as sums over its tokens.

    The sums of two parts of a sentence can be added to get those of both.

    Attributes:
      total: ``[b, n, 1]`` sum of the inputs.
      squares: ``[b, n, 1]`` sum of the squares of the inputs.
      hidden: ``[b, n, nets, hidden]`` sum of the products of the inputs with the first layer.
    """

    total: jax.Array
    squares: jax.Array
    hidden: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SentenceCache(TokenCount):
    """The cache of a `SentenceFeedForward`; see `TokenCount` for the other attributes.

    Attributes:
      sums: the sums over all tokens that were read, with n = 1.
    """

    sums: Sums = dataclasses.field(kw_only=True)


class SentenceNetwork(nn.Module):
    """A two-layer network over a whole flattened sentence, padded with zeros to N tokens.

    ``LayerNorm(N·d) → Linear → LeakyReLU(0.01) → LayerNorm → Linear`` with biases (Bozic et al.
    2023, released code).

    This implementation neither pads nor flattens. The statistics of the first normalization and the
    first product are sums over tokens, so shorter inputs cost less. The decoder's replacement runs
    the network once for every prefix. These sums for all prefixes are one cumulative sum.

    Attributes:
      width: width d of a token.
      max_length: number of tokens N.
      hidden_dim: width of the hidden layer.
      features: width of the output at one position.
      nets: number of networks side by side. ALSR has one for each head.
      every_position: whether one pass gives the outputs at all N positions. If it is False, a pass
        gives the output at one position.
      inputs: number of sequences of N tokens that the network reads. It is 2 in cross-attention.
    """

    width: int
    max_length: int
    hidden_dim: int
    features: int
    nets: int = 1
    every_position: bool = True
    inputs: int = 1

    def setup(self) -> None:
        """Creates the parameters, with PyTorch's initial values."""

        def param(
            name: str, init: Callable[..., jax.Array], axes: tuple[str | None, ...], *shape: int
        ) -> jax.Array:
            """Creates a parameter whose axes have names."""
            value: jax.Array = self.param(name, with_axes(init, *axes), shape)
            return value

        nets = self.nets
        num_inputs = self.inputs * self.max_length
        num_outputs = self.max_length if self.every_position else 1
        ones = nn.initializers.ones_init()
        zeros = nn.initializers.zeros_init()

        # The first normalization, over all tokens and features, and the first linear layer.
        first = TorchUniform(fan_in=num_inputs * self.width)
        shape = (nets, num_inputs, self.width)
        axes = (None, "key_length", "embed")
        self.scale_0 = param("scale_0", ones, axes, *shape)
        self.shift_0 = param("shift_0", zeros, axes, *shape)
        self.kernel_0 = param("kernel_0", first, (*axes, "mlp"), *shape, self.hidden_dim)
        self.bias_0 = param("bias_0", first, (None, "mlp"), nets, self.hidden_dim)

        # The normalization of the hidden layer, and the second linear layer.
        second = TorchUniform(fan_in=self.hidden_dim)
        self.scale_1 = param("scale_1", ones, (None, "mlp"), nets, self.hidden_dim)
        self.shift_1 = param("shift_1", zeros, (None, "mlp"), nets, self.hidden_dim)
        out_shape = (nets, num_outputs, self.hidden_dim, self.features)
        out_axes = (None, "query_length", "mlp", None)
        self.kernel_1 = param("kernel_1", second, out_axes, *out_shape)
        bias_shape = (nets, num_outputs, self.features)
        self.bias_1 = param("bias_1", second, (None, "query_length", None), *bias_shape)

    def read(self, x: jax.Array, *, start: int | jax.Array = 0, which: int = 0) -> Sums:
        """Returns the sums that tokens ``[b, n, d]`` contribute. Padding must be zero.

        Args:
          x: the tokens.
          start: position of the first token in its sequence.
          which: index of the sequence: 1 for the queries in cross-attention, otherwise 0.

        Returns:
          Sums for each token by itself.
        """
        first = which * self.max_length + start
        scale, kernel = (
            jax.lax.dynamic_slice_in_dim(p, first, x.shape[1], axis=1)
            for p in (self.scale_0, self.kernel_0)
        )
        x = x.astype(logits_dtype(x))
        return Sums(
            total=x.sum(-1, keepdims=True),
            squares=jnp.square(x).sum(-1, keepdims=True),
            # [b, n, nets, hidden]
            hidden=jnp.einsum("bnd,gndf->bngf", x, scale[..., None] * kernel),
        )

    def hidden(self, sums: Sums) -> jax.Array:
        """Returns the normalized hidden layer ``[b, n, nets, hidden]``, float32 or wider."""
        size = self.inputs * self.max_length * self.width
        mean = sums.total / size
        variance = jnp.maximum(sums.squares / size - mean**2, 0)  # rounding can make it negative
        inverse = jax.lax.rsqrt(variance + EPSILON)
        # The normalization acts on N · d inputs that are never stored. Because it is linear given
        # its statistics, it moves behind the first product: `column` is the product of the scales
        # with the kernel, by which the mean is multiplied, and `shift` is the product of the
        # shifts. Both are [nets, hidden].
        column = jnp.einsum("gnd,gndf->gf", self.scale_0, self.kernel_0)
        shift = jnp.einsum("gnd,gndf->gf", self.shift_0, self.kernel_0) + self.bias_0
        product = inverse[..., None] * (sums.hidden - mean[..., None] * column[None, None])
        h = jax.nn.leaky_relu(product + shift[None, None], SLOPE)

        # The second normalization, over the features of the hidden layer.
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPSILON)
        return h * self.scale_1[None, None] + self.shift_1[None, None]

    def out(self, hidden: jax.Array, *, start: int | jax.Array = 0, length: int = 1) -> jax.Array:
        """Returns outputs ``[b, length, nets, features]``.

        Args:
          hidden: hidden layers, ``[b, length or 1, nets, hidden]``.
          start: the first output position, if the network has outputs at every position.
          length: number of output positions.
        """
        if not self.every_position:
            bias = self.bias_1[None, None, :, 0]
            return jnp.einsum("bngf,gfv->bngv", hidden, self.kernel_1[:, 0]) + bias
        kernel, bias = (
            jax.lax.dynamic_slice_in_dim(p, start, length, axis=1)
            for p in (self.kernel_1, self.bias_1)
        )
        bias = bias.swapaxes(0, 1)[None]  # [nets, n, v] → [1, n, nets, v]
        if hidden.shape[1] == 1:
            return jnp.einsum("bgf,gnfv->bngv", hidden[:, 0], kernel) + bias
        return jnp.einsum("bngf,gnfv->bngv", hidden, kernel) + bias


@register
class SentenceFeedForward(Mixer):
    """A feed-forward network over the whole sentence in the place of attention.

    Bozic et al. 2023. The fields select the paper's variants:

    - ALR, the default: the network computes the concatenated heads, and the output projection
      stays.
    - ALSR: the same with `separate_heads`.
    - ALRR: no `num_heads`, in a `Block` with ``self_residual=False``.
    - ELR: the same as ALRR in a block without a feed-forward layer.

    In decoders set `causal`. The output at a position is then computed from the tokens up to this
    position.

    As a `cross_mixer` it reads the encoder's output and the decoder's states up to the position.
    The released code trains this network on all decoder states but uses it on prefixes. Here both
    use prefixes, so that training and decoding agree.

    Attributes:
      max_length: number of tokens for which the network has weights, 50 in the paper.
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection. None means that there is no projection,
        and the output of the network is the output of the mixer.
      head_dim: width of one head.
      separate_heads: whether every head has a network of its own.
      causal: True for self-attention in decoders.
      out_init: initializer of the output kernel ``[heads, head_dim, d_model]``.
    """

    max_length: Length
    hidden_dim: Length
    num_heads: Length | None = None
    head_dim: Number = 0
    separate_heads: bool = False
    causal: bool = False
    out_init: Initializer = FanIn()

    has_cross_attention = True
    supports_packing = False
    shares_cross_cache = False  # its cache in cross-attention sums up the decoder's tokens
    supports_causal = property(lambda self: self.causal)
    supports_bidirectional = property(lambda self: not self.causal)

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, SentenceCache | None]:
        x, kv, mask, cache = inputs.x, inputs.kv, inputs.mask, inputs.cache
        n = x.shape[1]
        position = inputs.position
        network = self._make_network(x, kv, mask, position=position)
        real = mask.queries(n)

        # What the network has read at every position; n = 1 if all positions read everything.
        if kv is not None:
            # Cross-attention reads the queries so far and the memory. If there is a cache, it holds
            # the sums over the memory already.
            sums = _prefixes(network.read(zero_padding(x, real), start=position, which=1))
            if cache is None:
                sums = jax.tree.map(jnp.add, sums, _read_all(network, kv, mask))
        elif self.causal:
            sums = _prefixes(network.read(_real_tokens(x, mask, position), start=position))
        else:
            sums = _read_all(network, x, mask)
        if cache is not None:
            sums = jax.tree.map(jnp.add, sums, cache.sums)

        y = network.out(network.hidden(sums), start=position, length=n).astype(x.dtype)
        y = zero_padding(y, real)  # [b, n, nets, features]
        if self.num_heads is None:
            y = y[:, :, 0]
        else:
            y = y.reshape(*y.shape[:2], self.num_heads, self.head_dim)  # [b, n, h, e]
            y = merge_heads(self, y, x.shape[-1], kernel_init=self.out_init)
        if cache is None:
            return y, None

        ends = mask.key_lengths if kv is None else query_ends(mask, position)
        valid, length = advance_length(
            position,
            n,
            length=cache.length,
            lengths=ends,
            batch=x.shape[0],
            capacity=self.max_length,
            exact=True,
        )
        # The cache keeps the sums up to the last new token.
        sums = jax.tree.map(lambda x: x[:, -1:], sums)
        return fill_invalid(y, valid), dataclasses.replace(cache, sums=sums, length=length)

    @nn.compact
    def new_cache(
        self, x: jax.Array, kv: jax.Array | None, *, mask: Mask, max_length: int
    ) -> SentenceCache:
        check_length(self, self.max_length, Span(0, max_length))
        network = self._make_network(x, kv, mask)
        if kv is None:
            return SentenceCache(sums=_read_all(network, x, mask))
        return SentenceCache(sums=_read_all(network, kv, mask), empty_memory=kv[:, :0])

    def _make_network(
        self, x: jax.Array, kv: jax.Array | None, mask: Mask, *, position: int | jax.Array = 0
    ) -> SentenceNetwork:
        """Returns the network or networks after checking the fields, the mask and the lengths."""
        cross = kv is not None
        is_plain = mask.band == (None, 0) and mask.prefix_lengths is None and mask.allowed is None
        if not cross and self.causal and not is_plain:
            raise ValueError(
                "SentenceFeedForward: causal=True needs a plain causal mask, as decoders have it. "
                "In encoders, leave causal out."
            )
        if self.separate_heads and self.num_heads is None:
            raise ValueError(
                "SentenceFeedForward: separate_heads=True needs num_heads and head_dim."
            )
        num_keys = 0 if kv is None else kv.shape[1]
        check_length(self, self.max_length, Span(position, x.shape[1]), Span(0, num_keys))

        heads = self.num_heads or 1
        features = x.shape[-1] if self.num_heads is None else self.head_dim
        return SentenceNetwork(
            width=x.shape[-1],
            max_length=self.max_length,
            hidden_dim=self.hidden_dim,
            features=features if self.separate_heads else features * heads,
            nets=heads if self.separate_heads else 1,
            every_position=not self.causal or cross,
            inputs=2 if cross else 1,
            name="network",
            parent=self,
        )


def _prefixes(sums: Sums) -> Sums:
    """Returns the sums over each token and all tokens before it."""
    return jax.tree.map(lambda x: jnp.cumsum(x, axis=1), sums)


def _read_all(network: SentenceNetwork, x: jax.Array, mask: Mask) -> Sums:
    """Returns the sums over all real tokens, with n = 1."""
    sums = network.read(_real_tokens(x, mask, 0))
    return jax.tree.map(lambda x: x.sum(axis=1, keepdims=True), sums)


def _real_tokens(x: jax.Array, mask: Mask, start: int | jax.Array) -> jax.Array:
    """Returns the tokens ``[b, n, d]`` with zeros in the place of padding.

    Args:
      x: the tokens.
      mask: a mask of keys, which tells which are real.
      start: the position of the first token among these keys.
    """
    n = x.shape[1]
    if not n or (mask.key_lengths is None and mask.key_valid is None):
        return x
    return zero_padding(x, mask.slice_keys(start, n).keys(n))


@register
class TokenFeedForward(Mixer):
    """The same network on every token by itself, without any mixing, as a baseline for the others.

    Attributes:
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection.
      head_dim: width of one head.
      out_init: initializer of the output kernel ``[heads, head_dim, d_model]``.
    """

    hidden_dim: Length
    num_heads: Length
    head_dim: Length
    out_init: Initializer = FanIn()

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, TokenCount | None]:
        x, mask, cache = inputs.x, inputs.mask, inputs.cache
        network = SentenceNetwork(
            width=x.shape[-1],
            max_length=1,
            hidden_dim=self.hidden_dim,
            features=self.num_heads * self.head_dim,
            name="network",
            parent=self,
        )
        tokens = x.reshape(-1, 1, x.shape[-1])  # [b · n, 1, d], sentences of one token
        y = network.out(network.hidden(network.read(tokens))).astype(x.dtype)
        y = y.reshape(*x.shape[:2], self.num_heads, self.head_dim)  # [b, n, h, e]
        y = zero_padding(y, mask.queries(x.shape[1]))
        y = merge_heads(self, y, x.shape[-1], kernel_init=self.out_init)
        if cache is None:
            return y, None
        _, length = advance_length(
            inputs.position,
            x.shape[1],
            length=cache.length,
            lengths=mask.key_lengths,
            batch=x.shape[0],
        )
        return y, dataclasses.replace(cache, length=length)

    def new_cache(
        self, x: jax.Array, kv: jax.Array | None, *, mask: Mask, max_length: int
    ) -> TokenCount:
        """Returns a cache that counts tokens; see `Mixer.new_cache`."""
        return TokenCount()
