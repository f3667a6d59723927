"""Named models, which combine published sizes with different alignments and mixers."""

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
from synthesizer_jax.models.t5gemma2 import SIZES as T5GEMMA2
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.models.universal import UniversalStack
from synthesizer_jax.primitives.initializers import FanIn, MeshGlorotUniform, Normal

VOCAB_SIZE = 32_128
"""The size of T5's vocabulary of 32,100 pieces, rounded up to a multiple of 128."""


@dataclasses.dataclass(frozen=True)
class Size:
    """The widths and numbers of layers of a published T5.

    Attributes:
      d_model: width of the model.
      layers: number of layers of each stack.
      d_ff: width of the feed-forward layers.
      heads: number of heads.
      head_dim: width of one head.
    """

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
"""The sizes of T5 1.0 (Raffel et al. 2020).

The size ``base_plus`` is "T5 (Base+)" of Tay et al. 2021, which has as many parameters as R+V (292
M).
"""

T5_1_1 = {
    "tiny": Size(32, 2, 64, 2, 64),
    "small": Size(512, 8, 1024, 6, 64),
    "base": Size(768, 12, 2048, 12, 64),
    "large": Size(1024, 24, 2816, 16, 64),
    "xl": Size(2048, 24, 5120, 32, 64),
    "xxl": Size(4096, 24, 10240, 64, 64),
}
"""The sizes of T5 1.1, which has gated GELU and an untied output projection."""


def dot_product(head_dim: int) -> DotProduct:
    """Returns T5's dot product.

    T5 does not scale the logits. The initializer of the query kernel has the factor 1/√head_dim
    instead.
    """
    return DotProduct(scale=1.0, query_init=FanIn(1.0 / head_dim))


def alignment(variant: str, *, head_dim: int, max_length: int = 512) -> Alignment:
    """Returns the alignment of a variant. The variants have the names of Tay et al. 2021.

    Args:
      variant: a key of `VARIANTS`.
      head_dim: width of a head.
      max_length: number of positions of the tables.

    Raises:
      ValueError: if the variant is unknown.
    """
    if variant not in VARIANTS:
        raise ValueError(
            f"There is no variant {variant!r}. The variants are {', '.join(VARIANTS)}."
        )
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
"""Functions that make the alignment of a variant from a dot product and a number of positions.

The variant ``v`` is the vanilla dot product, ``d`` is Dense, ``r`` is Random, ``fix`` is Fixed
Random, ``fr`` is Factorized Random, and ``fd`` is Factorized Dense. All other variants are mixtures
of two alignments.
"""


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
    """Returns a T5 of a given size, with any alignment or mixer in its self-attention.

    Args:
      size: widths and numbers of layers.
      gated: True means T5 1.1 (gated GELU, untied output), and False means T5 1.0 (ReLU, tied
        output).
      encoder: the alignment of the encoder's self-attention, or a mixer that replaces the
        self-attention. None means T5's dot product.
      decoder: the alignment or mixer of the decoder's self-attention. None means that the decoder
        uses the alignment or mixer of the encoder.
      cross: the mixer over the encoder's outputs. None means T5's attention.
      relative_bias: whether to use T5's position bias, with one table per stack. A stack whose
        self-attention has no logits gets no position bias.
      positions: a module whose vectors are added to the embeddings, such as `SinusoidalPositions`.
      vocab_size: number of rows of the embedding.
      dropout_rate: the rate of all dropouts.
      elementwise_dropout: whether every position has its own random draw, as in Tensor2Tensor.
        False means that all positions share one draw, as in T5.
      dtype: dtype of the computation.
      scan: whether to scan over layers; see `Stack`.
      remat: the rematerialization policy; see `Stack`.
    """
    dropout: dict[str, Any] = {
        "dropout_rate": dropout_rate,
        "elementwise_dropout": elementwise_dropout,
    }
    vanilla = dot_product(size.head_dim)
    encoder = vanilla if encoder is None else encoder
    decoder = encoder if decoder is None else decoder
    activations = ("gelu", "linear") if gated else ("relu",)
    feed_forward = FeedForward(size.d_ff, activations=activations, **dropout)

    def mixer(kind: Alignment | Mixer) -> Mixer:
        """Returns attention with an alignment, or the mixer itself."""
        if not isinstance(kind, Alignment):
            return kind
        return Attention(size.heads, size.head_dim, alignment=kind, dropout_rate=dropout_rate)

    def stack(kind: Alignment | Mixer, cross: Mixer | None) -> Stack:
        """Returns the encoder's stack, or the decoder's stack if there is a cross mixer."""
        block = Block(mixer(kind), feed_forward, cross_mixer=cross, **dropout)
        has_bias = relative_bias and block.self_mixer.bias_heads is not None
        bias = RelativeBias(bidirectional=cross is None) if has_bias else None
        return Stack(
            (Run(block, size.layers),),
            bias=bias,
            positions=positions,
            **dropout,
            scan=scan,
            remat=remat,
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
    """Returns Mesh-TensorFlow's mode ``random``."""
    return Random(max_length=512, table_init=MeshGlorotUniform())


def _mesh_dense() -> Dense:
    """Returns Mesh-TensorFlow's mode ``dense``."""
    # As in its other modes, Mesh-TensorFlow folds the factor 1/√128 into the query projection of
    # its dense modes.
    return Dense(max_length=512, share_heads=True, hidden_init=FanIn(1.0 / 128))


def _mesh_random_plus(weights: str = "sum") -> Mixture:
    """Returns Mesh-TensorFlow's mode ``random_plus``, or ``random_plus_alpha`` with a gate."""
    return Mixture((dot_product(128), _mesh_random()), weights=weights)


def _mesh_dense_plus(weights: str = "sum") -> Mixture:
    """Returns Mesh-TensorFlow's mode ``dense_plus``, or ``dense_plus_alpha`` with a gate."""
    parts = (dot_product(128), _mesh_dense())
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
"""The modes of the code that was released for the Synthesizer paper's C4 runs.

None means T5's attention.
"""


def _mesh(variant: str, *, learned_positions: bool) -> EncoderDecoder:
    """Returns a T5-base from the Synthesizer paper's C4 runs, as built by the released code.

    The self-attention of the Synthesizers has eight heads of width 128, which are the defaults of
    the released Mesh-TensorFlow code. Cross-attention has 12 heads of width 64. In the dense
    alignment, all heads share one matrix. Tables are for 512 positions and are initialized with a
    Glorot distribution. The variant `factorized` has rank 16 and uses the formula in the paper
    instead of the formula in the code.

    Table 2 of Narang et al. 2021 contains the results. The published parameter counts, which are
    rounded to millions, fit two kinds of position information. The first kind is T5's relative
    bias. The second kind is a vector for each of 512 positions, which both stacks share. The
    argument `learned_positions` selects the kind.

    Args:
      variant: a key of `MESH`.
      learned_positions: whether to use a vector for each position instead of the relative bias.
    """
    kind = MESH[variant]()
    mixer = None if kind is None else Attention(8, 128, alignment=kind)
    model = t5(T5_1_0["base"], gated=False, encoder=mixer, relative_bias=not learned_positions)
    return model.copy(positions=LearnedPositions(512, Normal(1.0)) if learned_positions else None)


def _synthesizer(variant: str, size: Size) -> EncoderDecoder:
    """Returns a T5 1.1 with a variant in the self-attention of both stacks."""
    return t5(size, encoder=alignment(variant, head_dim=size.head_dim))


def _talking_heads(size: Size) -> EncoderDecoder:
    """Returns a T5 1.1 with twice as many heads of half the width.

    The model is described by Shazeer et al. 2020, and corresponds to T5's configuration
    ``t5.1.th``.
    """
    width = size.head_dim // 2
    mixer = TalkingHeads(2 * size.heads, width, alignment=dot_product(width))
    return t5(size, encoder=mixer, decoder=mixer, cross=mixer)


def _convolution(kind: type[LightweightConvolution | DynamicConvolution]) -> EncoderDecoder:
    """Returns a T5 1.0 whose self-attention is a convolution, as in Mesh-TensorFlow.

    The convolution has nine taps and is followed by a dense layer. The model has learned positions
    (Narang et al. 2021).

    The model with lightweight convolutions has one kernel per channel, and 224 M parameters, as
    published. The model with dynamic convolutions was published with 257 M parameters and 1.06
    times the FLOPs of the vanilla model. With one kernel per channel, as in the last released code,
    the model with dynamic convolutions would have 351 M parameters and 1.49 times the FLOPs. One
    kernel for every four channels gives the closest numbers, which are 256 M parameters and 1.07
    times the FLOPs.
    """
    groups = 192 if kind is DynamicConvolution else None
    mixer = kind(width=9, pointwise=True, groups=groups)
    positions = LearnedPositions(512)
    size = T5_1_0["base"]
    return t5(size, gated=False, encoder=mixer, relative_bias=False, positions=positions)


def _universal() -> EncoderDecoder:
    """Returns a Universal Transformer with adaptive halting at 0.5.

    The model is described in appendix B of Narang et al. 2021.

    Each stack has one block. The model has 41 M parameters and twice the FLOPs of the vanilla
    model. The paper reports 84 M parameters and 3.6 times the FLOPs, but no released file contains
    the settings of Mesh-TensorFlow's code for this model.
    """

    def shared(stack: Stack) -> UniversalStack:
        """Returns a stack that applies the first block of another stack 24 times."""
        return UniversalStack((Run(stack.runs[0].block, 24),), halting_threshold=0.5)

    base = t5(T5_1_0["base"], gated=False, relative_bias=False)
    return base.copy(encoder=shared(base.encoder), decoder=shared(base.decoder))


def language_model(
    variant: str, size: Size, *, prefix: bool = False, max_length: int = 1024
) -> LanguageModel:
    """Returns a decoder-only T5 1.1.

    Args:
      variant: a key of `VARIANTS`.
      size: a size from `T5_1_1`. The model has a single stack with `Size.layers` layers.
      prefix: whether the model is a prefix language model.
      max_length: number of positions in the tables of the alignment, for inputs and targets
        together.
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
    **{f"t5gemma2_{name}": size.build for name, size in T5GEMMA2.items()},
    **PUBLISHED,
}
"""All named models. Call an entry to get the configured model.

The entries are functions instead of modules. If a compact method of a module imported this file,
modules that are made during the import would become children of that module.
"""
