"""Named models: published sizes times what makes the logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

from synthesizer_jax.alignments import (
    Alignment,
    Dense,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    Mixture,
    Random,
    RelativeBias,
)
from synthesizer_jax.mixers import (
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Mixer,
    TalkingHeads,
)
from synthesizer_jax.models.block import Block
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.language_model import LanguageModel
from synthesizer_jax.models.layers import FeedForward, LearnedPositions, PositionEmbedding
from synthesizer_jax.models.published import PUBLISHED
from synthesizer_jax.models.stack import Run, Stack
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.models.universal import UniversalStack
from synthesizer_jax.primitives.initializers import FanIn, MeshGlorotUniform, Normal

VOCAB_SIZE = 32_128
"""T5's 32,100 pieces, rounded up to a multiple of 128."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A published size; `layers` are those of each stack."""

    d_model: int
    layers: int
    d_ff: int
    heads: int
    head_dim: int


T5_1_0 = {
    "tiny": Size(32, 2, 64, 2, 64),
    "small": Size(512, 6, 2048, 8, 64),
    "base": Size(768, 12, 3072, 12, 64),
    "base_plus": Size(768, 12, 4944, 12, 64),
    "large": Size(1024, 24, 4096, 16, 64),
    "3b": Size(1024, 24, 16384, 32, 128),
    "11b": Size(1024, 24, 65536, 128, 128),
}
"""T5 1.0 (Raffel et al. 2020), and "T5 (Base+)" of Tay et al. 2021, as large as R+V: 292 M."""

T5_1_1 = {
    "tiny": Size(32, 2, 64, 2, 64),
    "small": Size(512, 8, 1024, 6, 64),
    "base": Size(768, 12, 2048, 12, 64),
    "large": Size(1024, 24, 2816, 16, 64),
    "xl": Size(2048, 24, 5120, 32, 64),
    "xxl": Size(4096, 24, 10240, 64, 64),
}
"""T5 1.1: gated GELU, untied output."""


def dot_product(head_dim: int) -> DotProduct:
    """T5's dot product: no scale in the logits, 1/√head_dim in the query's initializer instead."""
    return DotProduct(scale=1.0, query_init=FanIn(1.0 / head_dim))


def alignment(variant: str, *, head_dim: int, max_length: int = 512) -> Alignment:
    """The alignment of a variant, by the abbreviations of Tay et al. 2021's tables.

    Args:
      variant: a key of `VARIANTS`.
      head_dim: width of a head.
      max_length: number of positions of the tables.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; allowed: {', '.join(VARIANTS)}")
    return VARIANTS[variant](dot_product(head_dim), max_length)


VARIANTS: dict[str, Callable[[Alignment, int], Alignment]] = {
    "v": lambda dot, n: dot,
    "d": lambda dot, n: Dense(max_length=n),
    "r": lambda dot, n: Random(max_length=n),
    "fix": lambda dot, n: Random(max_length=n, trainable=False, table_init=Normal(1.0)),
    "fr": lambda dot, n: FactorizedRandom(max_length=n),
    "fd": lambda dot, n: FactorizedDense(max_length=n),
    "rd": lambda dot, n: Mixture((Random(max_length=n), Dense(max_length=n))),
    "dv": lambda dot, n: Mixture((Dense(max_length=n), dot)),
    "rv": lambda dot, n: Mixture((Random(max_length=n), dot)),
    "frv": lambda dot, n: Mixture((FactorizedRandom(max_length=n), dot)),
    "fdv": lambda dot, n: Mixture((FactorizedDense(max_length=n), dot)),
}
"""Vanilla, Dense, Random, Fixed Random, Factorized Random, Factorized Dense, and mixtures."""


def t5(
    size: Size,
    *,
    gated: bool = True,
    encoder: Alignment | Mixer | None = None,
    decoder: Alignment | Mixer | None = None,
    cross: Mixer | None = None,
    relative_bias: bool = True,
    positions: PositionEmbedding | None = None,
    vocab_size: int = VOCAB_SIZE,
    dropout_rate: float = 0.0,
    elementwise_dropout: bool = False,
    dtype: str = "float32",
    scan: bool = False,
    remat: str | None = None,
) -> EncoderDecoder:
    """A T5 of a given size with any alignment or mixer in its self-attention.

    Args:
      size: widths and depths.
      gated: True is T5 1.1 (gated GELU, untied output), False T5 1.0 (ReLU, tied).
      encoder: alignment of the encoder's self-attention, or a whole mixer; None is T5's dot product.
      decoder: the same of the decoder; None is as the encoder.
      cross: the mixer over the encoder's output; None is T5's attention.
      relative_bias: T5's bias, one table per stack; none where self-attention has no logits.
      positions: added to the embeddings, such as `SinusoidalPositions`.
      vocab_size: rows of the embedding.
      dropout_rate: one rate for all dropouts.
      elementwise_dropout: draws for every position, as Tensor2Tensor's, not one for all, as T5's.
      dtype: dtype of the computation.
      scan: scan over layers.
      remat: rematerialization policy, see `Stack`.
    """
    dropout: dict[str, Any] = {"dropout_rate": dropout_rate, "elementwise_dropout": elementwise_dropout}
    vanilla = dot_product(size.head_dim)
    encoder = vanilla if encoder is None else encoder
    decoder = encoder if decoder is None else decoder
    activations = ("gelu", "linear") if gated else ("relu",)
    feed_forward = FeedForward(size.d_ff, activations=activations, **dropout)

    def mixer(kind: Alignment | Mixer) -> Mixer:
        if not isinstance(kind, Alignment):
            return kind
        return Attention(size.heads, size.head_dim, alignment=kind, dropout_rate=dropout_rate)

    def stack(kind: Alignment | Mixer, cross: Mixer | None) -> Stack:
        block = Block(mixer(kind), feed_forward, cross_mixer=cross, **dropout)
        has_bias = relative_bias and block.self_mixer.bias_heads is not None
        bias = RelativeBias(bidirectional=cross is None) if has_bias else None
        return Stack(
            (Run(block, size.layers),), bias=bias, positions=positions, **dropout, scan=scan, remat=remat
        )

    return EncoderDecoder(
        vocab_size=vocab_size,
        d_model=size.d_model,
        encoder=stack(encoder, None),
        decoder=stack(decoder, mixer(vanilla) if cross is None else cross),
        tied=not gated,
        dtype=dtype,
    )


def _mesh_random() -> Random:
    return Random(max_length=512, table_init=MeshGlorotUniform())


def _mesh_dense() -> Dense:
    # Mesh-TensorFlow folds 1/√128 into the query projection of its dense modes too.
    return Dense(max_length=512, share_heads=True, hidden_init=FanIn(1.0 / 128))


def _mesh_random_plus(weights: str = "sum") -> Mixture:
    return Mixture((dot_product(128), _mesh_random()), weights=weights)


def _mesh_dense_plus(weights: str = "sum") -> Mixture:
    parts = dot_product(128), _mesh_dense()
    return Mixture(parts, weights=weights, share_query=True, query_init=FanIn(1.0 / 128))


MESH: dict[str, Callable[[], Alignment | None]] = {
    "vanilla": lambda: None,
    "random": _mesh_random,
    "factorized": lambda: FactorizedRandom(max_length=512, rank=16, factor_init=Normal(0.0155)),
    "dense": _mesh_dense,
    "random_plus": _mesh_random_plus,
    "random_plus_alpha": partial(_mesh_random_plus, "sigmoid"),
    "dense_plus": _mesh_dense_plus,
    "dense_plus_alpha": partial(_mesh_dense_plus, "sigmoid"),
}
"""The modes of the code that was released for the Synthesizer paper's C4 runs; None: T5's attention."""


def _mesh(variant: str, *, learned_positions: bool) -> EncoderDecoder:
    """A T5-base of the Synthesizer paper's C4 runs, as the released Mesh-TensorFlow code built it.

    Eight heads of 128 in the Synthesizers' self-attention (its constructor's defaults), one matrix of the
    dense alignment for all heads, Glorot tables of 512 positions, rank 16 in `factorized` (here with the
    paper's formula), 12 × 64 in cross-attention. Table 2 of Narang et al. 2021 has the paper's numbers.
    It gives the same whole millions of parameters for both kinds of positions: T5's relative bias, and a
    vector for each of 512 positions that both stacks share.
    """
    kind = MESH[variant]()
    mixer = None if kind is None else Attention(8, 128, alignment=kind)
    model = t5(T5_1_0["base"], gated=False, encoder=mixer, relative_bias=not learned_positions)
    return model.copy(positions=LearnedPositions(512, Normal(1.0)) if learned_positions else None)


def _synthesizer(variant: str, size: Size) -> EncoderDecoder:
    """A T5 1.1 with a variant in both stacks' self-attention."""
    return t5(size, encoder=alignment(variant, head_dim=size.head_dim))


def _talking_heads(size: Size) -> EncoderDecoder:
    """A T5 1.1 with twice the heads of half the width (Shazeer et al. 2020; T5's ``t5.1.th``)."""
    heads, width = 2 * size.heads, size.head_dim // 2
    mixer = TalkingHeads(heads, width, alignment=dot_product(width))
    return t5(size, encoder=mixer, decoder=mixer, cross=mixer)


def _convolution(kind: type[LightweightConvolution | DynamicConvolution]) -> EncoderDecoder:
    """A T5 1.0 whose self-attention is a convolution, as Mesh-TensorFlow built it.

    Nine taps, a dense layer after the convolution, learned positions (Narang et al. 2021). The
    lightweight one has one kernel a channel, 224 M parameters as published. The dynamic one is
    published with 257 M and 1.06 times the work of the vanilla model. One kernel a channel, as in the
    last released code, would make it 351 M and 1.49 times; a kernel for every four channels comes
    closest, with 256 M and 1.07 times.
    """
    groups = 192 if kind is DynamicConvolution else None
    mixer = kind(width=9, pointwise=True, groups=groups)
    positions = LearnedPositions(512)
    size = T5_1_0["base"]
    return t5(size, gated=False, encoder=mixer, relative_bias=False, positions=positions)


def _universal() -> EncoderDecoder:
    """A Universal Transformer with adaptive halting at 0.5 (Narang et al. 2021, appendix B).

    One block a stack, 41 M parameters and twice the work of the vanilla model. Published are 84 M and
    3.6 times: nothing that was released says with which settings of Mesh-TensorFlow's code.
    """
    base = t5(T5_1_0["base"], gated=False, relative_bias=False)
    shared = lambda stack: UniversalStack((Run(stack.runs[0].block, 24),), halting_threshold=0.5)
    return base.copy(encoder=shared(base.encoder), decoder=shared(base.decoder))


def language_model(
    variant: str, size: Size, *, prefix: bool = False, max_length: int = 1024
) -> LanguageModel:
    """A decoder-only T5 1.1.

    Args:
      variant: a key of `VARIANTS`.
      size: a size of `T5_1_1`; its layers are those of the one stack.
      prefix: a prefix language model.
      max_length: positions of a row, inputs and targets together, that tables of the alignment hold.
    """
    kind = alignment(variant, head_dim=size.head_dim, max_length=max_length)
    attention = Attention(size.heads, size.head_dim, alignment=kind)
    block = Block(attention, FeedForward(size.d_ff))
    return LanguageModel(
        vocab_size=VOCAB_SIZE,
        d_model=size.d_model,
        decoder=Stack((Run(block, size.layers),), bias=RelativeBias(bidirectional=prefix)),
        prefix=prefix,
    )


ZOO: dict[str, Callable[[], TokenModel]] = {
    **{f"t5_{name}": partial(t5, size, gated=False) for name, size in T5_1_0.items()},
    **{
        f"t5_1_1_{name}" if variant == "v" else f"synthesizer_{variant}_{name}": partial(
            _synthesizer, variant, size
        )
        for name, size in T5_1_1.items()
        for variant in VARIANTS
    },
    **{
        f"mesh_{kind}{variant}_base": partial(_mesh, variant, learned_positions=bool(kind))
        for variant in MESH
        for kind in ("", "learned_")
    },
    **{f"t5_1_1_th_{name}": partial(_talking_heads, T5_1_1[name]) for name in ("base", "large")},
    "lightweight_convolution_base": partial(_convolution, LightweightConvolution),
    "dynamic_convolution_base": partial(_convolution, DynamicConvolution),
    "universal_transformer_base": _universal,
    "lm_base": partial(language_model, "v", T5_1_1["base"]),
    "lm_r_base": partial(language_model, "r", T5_1_1["base"]),
    "lm_rv_base": partial(language_model, "rv", T5_1_1["base"]),
    "prefix_lm_base": partial(language_model, "v", T5_1_1["base"], prefix=True),
    **PUBLISHED,
}
"""Every named model; call the entry to get the configured module.

Modules made while this file is imported would be children of a caller whose compact method imports it.
"""
