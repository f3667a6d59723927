"""Feed-forward networks in the place of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from synthesizer_jax.alignments.base import check_length
from synthesizer_jax.ambient import on_any_mesh
from synthesizer_jax.attention import Mask, Span, Terms
from synthesizer_jax.attention.cache import poison, read_tokens
from synthesizer_jax.attention.terms import wide
from synthesizer_jax.initializers import FanIn, Initializer, TorchUniform
from synthesizer_jax.mixers.base import (
    NewCache,
    merge_heads,
    not_causal,
    not_packed,
    self_attention_only,
)
from synthesizer_jax.mixers.decoding import (
    query_lengths,
    query_position,
    ragged_step,
    step_mask,
)
from synthesizer_jax.parameters import with_axes
from synthesizer_jax.registry import register

EPSILON = 1e-5
"""Of both normalisations, PyTorch's default."""

SLOPE = 0.01
"""Of the leaky ReLU."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """What a network has read of a sentence. It adds up over tokens.

    Attributes:
      total: ``[b, n, 1]`` sum of the inputs.
      squares: ``[b, n, 1]`` sum of their squares.
      hidden: ``[b, n, nets, hidden]`` sum of their products with the first layer.
    """

    total: jax.Array
    squares: jax.Array
    hidden: jax.Array

    def __add__(self, other: Sums) -> Sums:
        return jax.tree.map(jnp.add, self, other)

    def whole(self) -> Sums:
        """The sum over all tokens, n = 1."""
        return jax.tree.map(lambda x: x.sum(axis=1, keepdims=True), self)

    def prefixes(self) -> Sums:
        """The sums over every token and those before it."""
        return jax.tree.map(lambda x: jnp.cumsum(x, axis=1), self)

    def last(self) -> Sums:
        """The last of the n sums."""
        return jax.tree.map(lambda x: x[:, -1:], self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SentenceCache:
    """What a `SentenceFeedForward` keeps while decoding.

    Attributes:
      sums: of all tokens read so far, n = 1.
      length: the position of the next token, as in `Cache`.
    """

    sums: Sums
    length: Any


class SentenceNetwork(nn.Module):
    """A two-layer network over a whole flattened sentence, padded with zeros to N tokens.

    ``LayerNorm(N·d) → Linear → LeakyReLU(0.01) → LayerNorm → Linear`` with biases (Bozic et al. 2023,
    released code). Nothing is padded or flattened here: the first normalisation's statistics and
    the first product are sums over tokens. So shorter inputs cost less, and running the network once
    for every prefix, as the decoder's replacement does, is one cumulative sum.

    Attributes:
      width: width d of a token.
      max_length: number of tokens N.
      hidden_dim: width of the hidden layer.
      features: width of the output at one position.
      nets: number of networks side by side, one per head in ALSR.
      every_position: True: one pass gives the output at all N positions; False: at one.
      inputs: number of sequences of N tokens that are read, two in cross-attention.
    """

    width: int
    max_length: int
    hidden_dim: int
    features: int
    nets: int = 1
    every_position: bool = True
    inputs: int = 1

    def setup(self) -> None:
        """Makes the parameters, PyTorch's initial values."""
        n, d, f = self.inputs * self.max_length, self.width, self.hidden_dim
        m, v = self.max_length if self.every_position else 1, self.features
        ones, zeros = nn.initializers.ones_init(), nn.initializers.zeros_init()
        first, second = TorchUniform(fan_in=n * d), TorchUniform(fan_in=f)
        place, hidden, out = (
            (None, "key_length", "embed"),
            (None, "mlp"),
            (None, "query_length", None),
        )
        self.scale_0 = self.param("scale_0", with_axes(ones, *place), (self.nets, n, d))
        self.shift_0 = self.param("shift_0", with_axes(zeros, *place), (self.nets, n, d))
        self.kernel_0 = self.param(
            "kernel_0", with_axes(first, *place, "mlp"), (self.nets, n, d, f)
        )
        self.bias_0 = self.param("bias_0", with_axes(first, *hidden), (self.nets, f))
        self.scale_1 = self.param("scale_1", with_axes(ones, *hidden), (self.nets, f))
        self.shift_1 = self.param("shift_1", with_axes(zeros, *hidden), (self.nets, f))
        self.kernel_1 = self.param(
            "kernel_1",
            with_axes(second, None, "query_length", "mlp", None),
            (self.nets, m, f, v),
        )
        self.bias_1 = self.param("bias_1", with_axes(second, *out), (self.nets, m, v))

    def read(self, x: jax.Array, *, start: int | jax.Array = 0, which: int = 0) -> Sums:
        """What every token adds.

        Args:
          x: ``[b, n, d]`` tokens, zero where they are not real.
          start: position of the first one.
          which: the sequence, below `inputs`.
        """
        place = which * self.max_length + start
        scale, kernel = (
            jax.lax.dynamic_slice_in_dim(p, place, x.shape[1], axis=1)
            for p in (self.scale_0, self.kernel_0)
        )
        x = x.astype(wide(x))
        return Sums(
            total=x.sum(-1, keepdims=True),
            squares=jnp.square(x).sum(-1, keepdims=True),
            hidden=jnp.einsum("bnd,gndf->bngf", x, scale[..., None] * kernel),
        )

    def hidden(self, sums: Sums) -> jax.Array:
        """The normalised hidden layer ``[b, n, nets, hidden]``, float32 or wider."""
        size = self.inputs * self.max_length * self.width
        mean = sums.total / size
        variance = jnp.maximum(sums.squares / size - mean**2, 0)  # where rounding made it negative
        inverse = jax.lax.rsqrt(variance + EPSILON)
        column = jnp.einsum("gnd,gndf->gf", self.scale_0, self.kernel_0)
        shift = jnp.einsum("gnd,gndf->gf", self.shift_0, self.kernel_0) + self.bias_0
        product = inverse[..., None] * (sums.hidden - mean[..., None] * column)
        h = jax.nn.leaky_relu(product + shift, SLOPE)
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + EPSILON)
        return h * self.scale_1 + self.shift_1

    def out(self, hidden: jax.Array, *, start: int | jax.Array = 0, length: int = 1) -> jax.Array:
        """The outputs of `length` positions from `start` on.

        Args:
          hidden: ``[b, length or 1, nets, hidden]``.
          start: the first position.
          length: number of positions.

        Returns:
          ``[b, length, nets, features]`` float32 or wider.
        """
        if not self.every_position:
            return jnp.einsum("bngf,gfv->bngv", hidden, self.kernel_1[:, 0]) + self.bias_1[:, 0]
        kernel, bias = (
            jax.lax.dynamic_slice_in_dim(p, start, length, axis=1)
            for p in (self.kernel_1, self.bias_1)
        )
        each = "bgf" if hidden.shape[1] == 1 else "bngf"
        hidden = hidden[:, 0] if hidden.shape[1] == 1 else hidden
        return jnp.einsum(f"{each},gnfv->bngv", hidden, kernel) + bias.swapaxes(0, 1)


@register
class SentenceFeedForward(nn.Module):
    """A feed-forward network over the whole sentence in the place of attention.

    Bozic et al. 2023: ALR with the defaults (the network makes the concatenated heads, the output
    projection stays), ALSR with `separate_heads`, ALRR and ELR without `num_heads` in a `Block` whose
    `self_residual` is off (ELR: and which has no feed-forward layer). In decoders `causal`: position
    i is what the network makes of the first i tokens. As a `cross_mixer` it reads the encoder's
    output and the first i decoder states; the released code trained that one on all decoder states
    and used it on prefixes, here both are prefixes, so that training and decoding agree.

    Attributes:
      max_length: number of tokens that the network addresses, the paper's 50.
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection; None: none, the network's output is the
        mixer's.
      head_dim: width of one head.
      separate_heads: one network per head.
      causal: for decoders' self-attention.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.
    """

    max_length: int
    hidden_dim: int
    num_heads: int | None = None
    head_dim: int = 0
    separate_heads: bool = False
    causal: bool = False
    out_init: Initializer = FanIn()

    cross_cache_changes = True
    """In cross-attention the cache sums up decoder tokens, so every beam needs its own."""

    @on_any_mesh
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Terms = (),
        cache: SentenceCache | NewCache | None = None,
        position: int | jax.Array | None = None,
    ):
        """Mixes tokens; arguments and results as in `Attention`, but without a position bias.

        A cache cannot be decoded again from an earlier position.
        """
        mask = Mask.of(mask)
        if cache is not None:
            ragged = ragged_step(self, x, kv, mask=mask, bias=bias, cache=cache, position=position)
            if ragged is not None:
                return ragged
        position = query_position(self, mask, cache, position, cross=kv is not None)
        n = x.shape[1]
        if cache is not None and kv is None:
            mask = step_mask(mask, position, n)
        self.check(kv, mask, bias, cache)
        spans = [Span(position, n)] + ([] if kv is None else [Span(0, kv.shape[1])])
        if isinstance(cache, NewCache):
            spans.append(Span(0, (cache.max_length if kv is None else cache.queries) or 0))
        check_length(self, self.max_length, *spans)
        network = self.make_network(x.shape[-1], inputs=1 if kv is None else 2)
        if kv is None and cache is None:
            mask = mask.for_self_attention()
        sums = self.read(network, x, kv, mask, position)
        if isinstance(cache, SentenceCache):
            sums = sums + cache.sums
        y = network.out(network.hidden(sums), start=position, length=n).astype(x.dtype)
        asking = mask.queries(n)
        if asking is not None:
            y = jnp.where(asking[..., None, None], y, 0)
        y = self.merged(y, x.shape[-1])
        if cache is None:
            return y
        right, length = read_tokens(
            position,
            n,
            length=cache.length if isinstance(cache, SentenceCache) else position,
            lengths=mask.key_lengths if kv is None else query_lengths(mask, position),
            batch=x.shape[0],
            room=self.max_length,
            exact=True,
        )
        return poison(y, right), SentenceCache(sums.last(), length)

    def read(
        self,
        network: SentenceNetwork,
        x: jax.Array,
        kv: jax.Array | None,
        mask: Mask,
        position: int | jax.Array,
    ) -> Sums:
        """What the network has read up to every position, or (n = 1) of the whole sentence."""
        memory, n = (x, x.shape[1]) if kv is None else (kv, kv.shape[1])
        start = position if kv is None else 0
        masked = mask.key_lengths is not None or mask.key_valid is not None
        real = mask.from_key(start, n).keys(n) if masked else None
        if real is not None and n:
            memory = jnp.where(real[..., None], memory, 0)
        sums = network.read(memory, start=start)
        if kv is not None:
            asking = mask.queries(x.shape[1])
            x = x if asking is None else jnp.where(asking[..., None], x, 0)
            queries = network.read(x, start=position, which=1).prefixes()
            return queries + sums.whole() if kv.shape[1] else queries
        return sums.prefixes() if self.causal else sums.whole()

    def make_network(self, width: int, *, inputs: int) -> SentenceNetwork:
        """The network, or one per head."""
        heads = self.num_heads or 1
        features = width if self.num_heads is None else self.head_dim
        if not self.separate_heads:
            features *= heads
        return SentenceNetwork(
            width=width,
            max_length=self.max_length,
            hidden_dim=self.hidden_dim,
            features=features,
            nets=heads if self.separate_heads else 1,
            every_position=not self.causal or inputs == 2,
            inputs=inputs,
            name="network",
            parent=self,
        )

    def merged(self, y: jax.Array, d_model: int) -> jax.Array:
        """``[b, n, nets, features]`` to ``[b, n, d_model]``."""
        if self.num_heads is None:
            return y[:, :, 0]
        y = y.reshape(*y.shape[:2], self.num_heads, self.head_dim)
        return merge_heads(self, y, d_model, kernel_init=self.out_init)

    def check(self, kv: object, mask: Mask, bias: Terms, cache: object) -> None:
        """Raises a `ValueError` for what the network's definition does not allow."""
        not_packed(self, mask)
        if kv is None:
            self_attention_only(self, None, bias, None if self.causal else cache)
            if not self.causal:
                not_causal(self, mask)
            elif not mask.causal or any(
                pattern is not None
                for pattern in (mask.window, mask.ahead, mask.prefix_lengths, mask.allowed)
            ):
                raise ValueError(
                    "SentenceFeedForward: causal=True is for decoders with a plain causal mask; in "
                    "encoders leave it out"
                )
        if self.separate_heads and self.num_heads is None:
            raise ValueError("SentenceFeedForward: separate_heads needs num_heads and head_dim")


@register
class TokenFeedForward(nn.Module):
    """The same network on every token by itself: no mixing at all, the baseline of the others.

    Attributes:
      hidden_dim: width of the hidden layer.
      num_heads: number of heads of the output projection.
      head_dim: width of one head.
      out_init: initialiser of the output kernel ``[heads, head_dim, d_model]``.
    """

    hidden_dim: int
    num_heads: int
    head_dim: int
    out_init: Initializer = FanIn()

    @on_any_mesh
    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        kv: jax.Array | None = None,
        *,
        mask: Mask | jax.Array | None = None,
        bias: Terms = (),
        cache: tuple[()] | NewCache | None = None,
        position: int | jax.Array | None = None,
    ):
        """As in `Attention`, for self-attention; nothing is kept while decoding."""
        del position
        self_attention_only(self, kv, bias)
        network = SentenceNetwork(
            width=x.shape[-1],
            max_length=1,
            hidden_dim=self.hidden_dim,
            features=self.num_heads * self.head_dim,
            name="network",
            parent=self,
        )
        tokens = x.reshape(-1, 1, x.shape[-1])
        y = network.out(network.hidden(network.read(tokens))).astype(x.dtype)
        y = y.reshape(*x.shape[:2], self.num_heads, self.head_dim)
        mask = Mask.of(mask)
        real = (mask.for_self_attention() if cache is None else mask).queries(x.shape[1])
        if real is not None:
            y = jnp.where(real[..., None, None], y, 0)
        y = merge_heads(self, y, x.shape[-1], kernel_init=self.out_init)
        return y if cache is None else (y, ())
