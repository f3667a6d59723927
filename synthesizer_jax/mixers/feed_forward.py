"""Feed-forward networks that replace attention."""

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
"""The epsilon of both normalizations of a `SentenceNetwork`, which is PyTorch's default."""

SLOPE = 0.01
"""The negative slope of the leaky ReLU."""


class Sums(NamedTuple):
    """Sums over the tokens of a sentence that a `SentenceNetwork` has already read.

    The sums of two parts of a sentence can be added to get the sums of the whole sentence.

    Attributes:
      total: ``[b, n, 1]`` the sum of the inputs.
      squares: ``[b, n, 1]`` the sum of the squares of the inputs.
      hidden: ``[b, n, nets, hidden]`` the sum of the products of the inputs and the kernel of the
        first layer.
    """

    total: jax.Array
    squares: jax.Array
    hidden: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SentenceCache(TokenCount):
    """The cache of a `SentenceFeedForward`; see `TokenCount` for the other attributes.

    Attributes:
      sums: the sums over all tokens that have been read, where the axis n has size 1.
    """

    sums: Sums = dataclasses.field(kw_only=True)


class SentenceNetwork(nn.Module):
    """A two-layer network over a flattened sentence, which is padded with zeros to N tokens.

    The layers are ``LayerNorm(N·d) → Linear → LeakyReLU(0.01) → LayerNorm → Linear`` with biases
    (Bozic et al. 2023, released code).

    The implementation does not actually pad or flatten the sentence. The statistics of the first
    normalization and the first matrix product are sums over tokens, so shorter inputs cost less. In
    a decoder, the network runs once for every prefix of the sentence. The sums for all prefixes are
    computed by one cumulative sum.

    Attributes:
      width: width d of a token.
      max_length: number of tokens N.
      hidden_dim: width of the hidden layer.
      features: width of the output at one position.
      nets: number of parallel networks. ALSR has one network for each head.
      every_position: whether one pass computes the outputs at all N positions. False means that one
        pass computes the output at one position.
      inputs: number of sequences of N tokens that the network reads. In cross-attention, the
        network reads 2 sequences.
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
            """Creates a parameter with logical axis names."""
            value: jax.Array = self.param(name, with_axes(init, *axes), shape)
            return value

        nets = self.nets
        num_inputs = self.inputs * self.max_length
        num_outputs = self.max_length if self.every_position else 1
        ones = nn.initializers.ones_init()
        zeros = nn.initializers.zeros_init()

        # The following parameters belong to the first normalization, over all tokens and features,
        # and to the first linear layer.
        first = TorchUniform(fan_in=num_inputs * self.width)
        shape = (nets, num_inputs, self.width)
        axes = (None, "key_length", "embed")
        self.scale_0 = param("scale_0", ones, axes, *shape)
        self.shift_0 = param("shift_0", zeros, axes, *shape)
        self.kernel_0 = param("kernel_0", first, (*axes, "mlp"), *shape, self.hidden_dim)
        self.bias_0 = param("bias_0", first, (None, "mlp"), nets, self.hidden_dim)

        # The following parameters belong to the normalization of the hidden layer, and to the
        # second linear layer.
        second = TorchUniform(fan_in=self.hidden_dim)
        self.scale_1 = param("scale_1", ones, (None, "mlp"), nets, self.hidden_dim)
        self.shift_1 = param("shift_1", zeros, (None, "mlp"), nets, self.hidden_dim)
        out_shape = (nets, num_outputs, self.hidden_dim, self.features)
        out_axes = (None, "query_length", "mlp", None)
        self.kernel_1 = param("kernel_1", second, out_axes, *out_shape)
        bias_shape = (nets, num_outputs, self.features)
        self.bias_1 = param("bias_1", second, (None, "query_length", None), *bias_shape)

    def read(self, x: jax.Array, *, start: int | jax.Array = 0, which: int = 0) -> Sums:
        """Returns what each token contributes to the sums. The padding in `x` must be zero.

        Args:
          x: the tokens.
          start: position of the first token in its sequence.
          which: index of the sequence, which is 1 for the queries in cross-attention and 0
            otherwise.

        Returns:
          The contributions of all tokens, which are not yet added up.
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
        # Rounding errors could make the variance negative.
        variance = jnp.maximum(sums.squares / size - mean**2, 0)
        inverse = jax.lax.rsqrt(variance + EPSILON)
        # The normalization acts on N · d inputs that are never stored. Given its mean and variance,
        # the normalization is linear, so it can be applied after the first product. `column` is the
        # product of the normalization's scales and the kernel, and is multiplied by the mean.
        # `shift` is the product of the normalization's biases and the kernel, plus the bias of the
        # linear layer. `column` and `shift` have the shape [nets, hidden].
        column = jnp.einsum("gnd,gndf->gf", self.scale_0, self.kernel_0)
        shift = jnp.einsum("gnd,gndf->gf", self.shift_0, self.kernel_0) + self.bias_0
        product = inverse[..., None] * (sums.hidden - mean[..., None] * column[None, None])
        h = jax.nn.leaky_relu(product + shift[None, None], SLOPE)

        # The second normalization is over the features of the hidden layer.
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPSILON)
        return h * self.scale_1[None, None] + self.shift_1[None, None]

    def out(self, hidden: jax.Array, *, start: int | jax.Array = 0, length: int = 1) -> jax.Array:
        """Returns outputs ``[b, length, nets, features]``.

        Args:
          hidden: hidden layers, ``[b, length or 1, nets, hidden]``.
          start: the first output position, if `every_position` is True.
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
    """A feed-forward network over the whole sentence that replaces attention.

    The fields select the variants of Bozic et al. 2023:

    - ALR is the default. The network computes the concatenated heads, to which the output
      projection is then applied.
    - ALSR is ALR with ``separate_heads=True``.
    - ALRR has ``num_heads=None`` and is used in a `Block` with ``self_residual=False``.
    - ELR is ALRR in a block without a feed-forward layer.

    In decoders, set `causal` to True. If `causal` is True, the output at a position is computed
    only from the tokens up to this position.

    As a `cross_mixer`, the network reads the encoder's output, and the decoder's states up to the
    current position. The released code trains the cross-attention network on all decoder states but
    decodes with prefixes. This implementation uses prefixes in training and in decoding, so that
    both compute the same outputs.

    Attributes:
      max_length: number of tokens for which the network has weights. The paper uses 50.
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection. None means that the mixer has no output
        projection and returns the output of the network.
      head_dim: width of one head.
      separate_heads: whether every head has its own network.
      causal: whether an output depends only on tokens up to its position, as self-attention in
        decoders requires.
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
    # In cross-attention, the cache holds sums over the decoder's tokens, so different rows cannot
    # share a cache.
    shares_cross_cache = False
    supports_causal = property(lambda self: self.causal)
    supports_bidirectional = property(lambda self: not self.causal)

    @nn.compact
    def mix(self, inputs: MixerInput) -> tuple[jax.Array, SentenceCache | None]:
        x, kv, mask, cache = inputs.x, inputs.kv, inputs.mask, inputs.cache
        n = x.shape[1]
        position = inputs.position
        network = self._make_network(x, kv, mask, position=position)
        real = mask.queries(n)

        # For every position, `sums` holds the sums over the tokens that the network reads to
        # compute the output at this position. If all positions read the whole sentence, the axis n
        # of the sums has size 1.
        if kv is not None:
            # In cross-attention, each position reads the memory and the queries up to this
            # position. If there is a cache, the cache already holds the sums over the memory.
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
        # The cache stores the sums up to the last new token.
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
        """Returns the network after checking the fields, the mask and the lengths."""
        cross = kv is not None
        is_plain = mask.band == (None, 0) and mask.prefix_lengths is None and mask.allowed is None
        if not cross and self.causal and not is_plain:
            raise ValueError(
                "SentenceFeedForward: causal=True needs a plain causal mask, such as the mask of a "
                "decoder. In encoders, leave causal out."
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
    """Returns, for every token, the sums over the token and all earlier tokens."""
    return jax.tree.map(lambda x: jnp.cumsum(x, axis=1), sums)


def _read_all(network: SentenceNetwork, x: jax.Array, mask: Mask) -> Sums:
    """Returns the sums over all real tokens of each row, where the axis n has size 1."""
    sums = network.read(_real_tokens(x, mask, 0))
    return jax.tree.map(lambda x: x.sum(axis=1, keepdims=True), sums)


def _real_tokens(x: jax.Array, mask: Mask, start: int | jax.Array) -> jax.Array:
    """Returns the tokens ``[b, n, d]`` with the padding set to zero.

    Args:
      x: the tokens.
      mask: a mask that says which keys are real.
      start: the index of the first token among the keys of the mask.
    """
    n = x.shape[1]
    if not n or (mask.key_lengths is None and mask.key_valid is None):
        return x
    return zero_padding(x, mask.slice_keys(start, n).keys(n))


@register
class TokenFeedForward(Mixer):
    """A baseline for `SentenceFeedForward` that applies the same network to every token separately.

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
        # Every token becomes a sentence with a single token, [b · n, 1, d].
        tokens = x.reshape(-1, 1, x.shape[-1])
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
        """Returns a cache that only counts tokens; see `Mixer.new_cache`."""
        return TokenCount()
