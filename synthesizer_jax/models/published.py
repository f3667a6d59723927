"""Models from papers whose architectures differ from T5.

The module defines models with hard-coded attention, BERT with any head size, Linformer, and models
in which feed-forward networks replace attention.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from synthesizer_jax.alignments import DotProduct, Gaussian
from synthesizer_jax.mixers import Attention, Linformer, Mixer, SentenceFeedForward
from synthesizer_jax.models.block import Block
from synthesizer_jax.models.encoder import Encoder
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.layers import FeedForward, LearnedPositions, SinusoidalPositions
from synthesizer_jax.models.stack import Run, Stack
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.initializers import GlorotUniform, Normal
from synthesizer_jax.primitives.norms import LayerNorm

RATIO_WMT = 1.02305
RATIO_IWSLT = 1.03606
"""The number of source words per target word in WMT and IWSLT 2016, English to German.

The ratios are from the code of You et al. 2020.
"""


def hard_coded(
    variant: str,
    *,
    d_model: int = 512,
    layers: int = 6,
    heads: int = 8,
    d_ff: int = 2048,
    ratio: float = RATIO_WMT,
    prefix: int = 0,
    dropout_rate: float = 0.0,
) -> EncoderDecoder:
    """Returns the Transformer of You et al. 2020.

    The model is post-norm, uses sinusoidal positions, and has one embedding for both stacks and the
    output. As in the released code, dropout acts on the elements of embeddings and of sub-layers'
    outputs. The matrices start from Xavier's uniform distribution.

    Args:
      variant: the kind of attention. ``base`` has dot products everywhere. ``hc_sa`` has hard-coded
        self-attention. ``hc_all`` has hard-coded self-attention and cross-attention. ``sh_x`` has
        hard-coded self-attention and a single cross-attention head of full width, which is learned
        and in the last decoder layer.
      d_model: width of the model.
      layers: number of layers of each stack.
      heads: number of heads.
      d_ff: width of the feed-forward layers.
      ratio: the number of source words per target word, for hard-coded cross-attention.
      prefix: number of source tokens before the sentence, such as the tokens of "translate English
        to German:". Hard-coded cross-attention skips the prefix. The paper's texts have no prefix.
      dropout_rate: probability of dropping an element.
    """
    init = GlorotUniform()
    attention = partial(
        Attention, num_heads=heads, head_dim=d_model // heads, value_init=init, out_init=init
    )
    product = DotProduct(query_init=init, key_init=init)
    learned = attention(alignment=product)
    dropout: dict[str, Any] = {"dropout_rate": dropout_rate, "elementwise_dropout": True}

    def stack(mixer: Mixer, cross: Mixer | None, first: int = 0) -> Stack:
        """Returns a stack whose layers have a cross mixer, except in the first `first` layers."""
        block = Block(
            mixer,
            FeedForward(d_ff, ("relu",), use_bias=True, kernel_init=init),
            norm=LayerNorm(),
            post_norm=True,
            **dropout,
        )
        runs = [Run(block.copy(cross_mixer=cross), layers - first)]
        if first:
            runs.insert(0, Run(block, first))
        return Stack(
            tuple(runs),
            positions=SinusoidalPositions(endpoint=True),
            norm=None,
            **dropout,
            drop_output=False,
        )

    # Self-attention is hard-coded in all variants except ``base``.
    encoder_mixer = attention(alignment=Gaussian((-1, 1)))
    decoder_mixer = attention(alignment=Gaussian((-1, 0)))
    if variant == "base":
        encoder_mixer = decoder_mixer = learned

    # `cross` is the mixer of cross-attention, and the first `first` layers of the decoder have no
    # cross-attention.
    cross, first = {
        "base": (learned, 0),
        "hc_sa": (learned, 0),
        "hc_all": (attention(alignment=Gaussian((prefix - 1, prefix + 1), ratio=ratio)), 0),
        "sh_x": (attention(num_heads=1, head_dim=d_model, alignment=product), layers - 1),
    }[variant]
    return EncoderDecoder(
        vocab_size=32_000,
        d_model=d_model,
        encoder=stack(encoder_mixer, None),
        decoder=stack(decoder_mixer, cross, first),
        tied=True,
        embedding_scale=d_model**0.5,
        logits_scale=1.0,
        embedding_init=Normal(d_model**-0.5),
    )


def bert(
    d_model: int,
    heads: int,
    head_dim: int,
    *,
    layers: int = 24,
    mixer: Mixer | None = None,
    dropout_rate: float = 0.0,
) -> Encoder:
    """Returns BERT with any head size, including its pooler and its masked language model head.

    The model is from Bhojanapalli et al. 2020, section 4. All kernels and embeddings are
    initialized with a standard deviation of 0.02, as in BERT.

    Args:
      d_model: width of the model. Feed-forward layers have a width of 3,072 if `d_model` is 768,
        and of 4,096 otherwise. The widths 3,072 and 4,096 give the published parameter counts.
      heads: number of heads. `d_model` does not have to be divisible by the number of heads.
      head_dim: width of a head, which the paper calls d_p.
      layers: number of layers.
      mixer: a mixer to use instead of attention.
      dropout_rate: the rate of all dropouts. BERT was trained with a dropout rate of 0.1.
    """
    init = Normal(0.02)
    norm = LayerNorm(epsilon=1e-12)
    dropout: dict[str, Any] = {"dropout_rate": dropout_rate, "elementwise_dropout": True}
    dot = DotProduct(head_dim, use_bias=True, query_init=init, key_init=init)
    attention = Attention(
        heads,
        head_dim,
        alignment=dot,
        dropout_rate=dropout_rate,
        use_bias=True,
        value_init=init,
        out_init=init,
    )
    width = 3072 if d_model == 768 else 4096
    block = Block(
        mixer or attention,
        FeedForward(width, ("gelu",), use_bias=True, kernel_init=init, **dropout),
        norm=norm,
        post_norm=True,
        **dropout,
    )
    return Encoder(
        vocab_size=30_522,
        d_model=d_model,
        encoder=Stack(
            (Run(block, layers),),
            positions=LearnedPositions(512, init),
            input_norm=norm,
            norm=None,
            **dropout,
        ),
        pooling="first",
        pooler=True,
        masked_lm=True,
        token_types=2,
        embedding_init=init,
        head_init=init,
    )


def attention_replaced(kind: str, hidden_dim: int) -> EncoderDecoder:
    """Returns a small Transformer for 50 tokens whose encoder has no attention (Bozic et al. 2023).

    The model is pre-norm, with a width of 128, 6 + 6 layers, 8 heads of width 16, and feed-forward
    layers of width 512.

    Args:
      kind: the kind of replacement: ``alr``, ``alsr``, ``alrr`` or ``elr``; see
        `SentenceFeedForward`.
      hidden_dim: width of the hidden layer of the network that replaces attention.
    """
    feed_forward = FeedForward(512, ("relu",), use_bias=True)
    # ALRR and ELR have neither an output projection nor a residual connection.
    has_projection = kind in ("alr", "alsr")
    network = SentenceFeedForward(
        50,
        hidden_dim,
        num_heads=8 if has_projection else None,
        head_dim=16 if has_projection else 0,
        separate_heads=kind == "alsr",
    )
    block = Block(
        network,
        None if kind == "elr" else feed_forward,
        norm=LayerNorm(),
        self_residual=has_projection,
    )
    attention = Attention(8, 16)
    decoder = Block(attention, feed_forward, cross_mixer=attention, norm=LayerNorm())
    sines = SinusoidalPositions()
    return EncoderDecoder(
        vocab_size=32_000,
        d_model=128,
        encoder=Stack((Run(block, 6),), positions=sines, norm=LayerNorm()),
        decoder=Stack((Run(decoder, 6),), positions=sines, norm=LayerNorm()),
        embedding_scale=128**0.5,
        embedding_init=Normal(128**-0.5),
    )


def linformer_base() -> Encoder:
    """Returns a BERT-base with Linformer's attention (Wang et al. 2020).

    The keys and values are projected to 256 positions.
    """
    mixer = Linformer(12, 64, max_length=512, projected_length=256)
    return bert(768, 12, 64, layers=12, mixer=mixer)


_WIDTHS = {"xs": 25, "s": 50, "m": 800, "l": 3200, "xl": 12_800}
_SMALL: dict[str, Any] = {
    "d_model": 288,
    "layers": 5,
    "heads": 4,
    "d_ff": 507,
    "ratio": RATIO_IWSLT,
}
FIXED_HEADS = (
    *((512, heads, 128) for heads in (8, 12, 16, 32)),
    *((512, 8, width) for width in (32, 64, 256)),
    *((768, heads, 128) for heads in (8, 12, 16, 20)),
    *((1024, heads, 1024 // heads) for heads in (8, 32)),
)
"""The width, the number of heads and the head size of the models of Bhojanapalli et al."""

PUBLISHED: dict[str, Callable[[], TokenModel]] = {
    **{
        f"hard_coded_{variant}{size}": partial(hard_coded, variant, **options)
        for variant in ("base", "hc_sa", "hc_all", "sh_x")
        for size, options in (("", {}), ("_small", _SMALL))
    },
    "bert_large": partial(bert, 1024, 16, 64),
    **{
        f"bert_{d}_{heads}x{width}": partial(bert, d, heads, width)
        for d, heads, width in FIXED_HEADS
    },
    "linformer_base": linformer_base,
    **{
        f"{kind}_{size}": partial(attention_replaced, kind, hidden)
        for kind, sizes in {
            **dict.fromkeys(("alr", "alrr", "elr"), _WIDTHS),
            "alsr": {"xs": 200, "s": 400, "m": 800, "l": 1600},  # The paper has no ALSR of size xl.
        }.items()
        for size, hidden in sizes.items()
    },
}
"""The named models of this module. Call an entry to get the configured model."""
