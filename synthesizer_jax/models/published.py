"""Published models that are no T5: hard-coded attention, BERT with free head sizes, Linformer,
attention replacements."""

from __future__ import annotations

import functools
from collections.abc import Callable

from synthesizer_jax.alignments import Alignment, DotProduct, Gaussian
from synthesizer_jax.initializers import Normal
from synthesizer_jax.mixers import Attention, Linformer, Mixer, SentenceFeedForward
from synthesizer_jax.models.block import Block
from synthesizer_jax.models.encoder import Encoder
from synthesizer_jax.models.encoder_decoder import EncoderDecoder
from synthesizer_jax.models.layers import (
    FeedForward,
    LayerNorm,
    LearnedPositions,
    SinusoidalPositions,
)
from synthesizer_jax.models.stack import Run, Stack
from synthesizer_jax.models.token_model import TokenModel

HARD_CODED = ("base", "hc_sa", "hc_all", "sh_x")
RATIO_WMT = 1.02305
"""Source words per target word of WMT En-De, for hard-coded cross-attention."""
RATIO_IWSLT = 1.03606
"""The same of IWSLT 2016 En-De."""

BERT_VOCAB_SIZE = 30_522


def hard_coded(
    variant: str,
    *,
    d_model: int = 512,
    layers: int = 6,
    heads: int = 8,
    d_ff: int = 2048,
    vocab_size: int = 32_000,
    ratio: float = RATIO_WMT,
    dropout_rate: float = 0.0,
) -> EncoderDecoder:
    """The Transformer of You et al. 2020: post-norm, sinusoids, one embedding for everything.

    Dropout acts where the released code has it. Theirs is drawn for every element, `Dropout` for whole
    features, and their matrices start from Xavier's uniform values.

    Args:
      variant: ``base`` (dot product everywhere), ``hc_sa`` (self-attention hard-coded), ``hc_all``
        (cross-attention too), ``sh_x`` (self-attention hard-coded, one learned head of full width in
        the last decoder layer and no cross-attention elsewhere).
      d_model: width; their small model has 288.
      layers: of each stack; 5 in the small model.
      heads: 4 in the small model.
      d_ff: 507 in the small model.
      vocab_size: of the joint vocabulary.
      ratio: source words per target word.
      dropout_rate: of embeddings and of sub-layers' outputs, of nothing else.
    """
    if variant not in HARD_CODED:
        raise ValueError(f"unknown variant {variant!r}; allowed: {', '.join(HARD_CODED)}")
    width = d_model // heads
    feed_forward = FeedForward(d_ff, ("relu",), use_bias=True)

    def attention(kind: Alignment) -> Attention:
        return Attention(heads, width, alignment=kind)

    def stack(mixer: Mixer, crosses: list[Mixer | None]) -> Stack:
        block = functools.partial(
            Block,
            mixer,
            feed_forward,
            norm=LayerNorm(),
            post_norm=True,
            dropout_rate=dropout_rate,
        )
        runs = [Run(block(cross_mixer=cross), 1) for cross in crosses]
        if all(cross == crosses[0] for cross in crosses):
            runs = [Run(block(cross_mixer=crosses[0]), len(crosses))]
        return Stack(
            tuple(runs),
            positions=SinusoidalPositions(endpoint=True),
            norm=None,
            dropout_rate=dropout_rate,
            drop_output=False,
        )

    learned = variant == "base"
    encoder = attention(DotProduct() if learned else Gaussian((-1, 1)))
    decoder = attention(DotProduct() if learned else Gaussian((-1, 0)))
    if variant == "sh_x":
        crosses: list[Mixer | None] = [None] * (layers - 1)
        crosses.append(Attention(1, d_model, alignment=DotProduct()))
    else:
        hard = variant == "hc_all"
        cross = attention(Gaussian((-1, 1), ratio=ratio) if hard else DotProduct())
        crosses = [cross] * layers
    return EncoderDecoder(
        vocab_size=vocab_size,
        d_model=d_model,
        encoder=stack(encoder, [None] * layers),
        decoder=stack(decoder, crosses),
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
    d_ff: int | None = None,
    mixer: Mixer | None = None,
) -> Encoder:
    """BERT with any head size (Bhojanapalli et al. 2020, section 4), pooler and MLM head included.

    Args:
      d_model: width.
      heads: number of heads; it need not divide d_model.
      head_dim: the paper's d_p.
      layers: number of layers.
      d_ff: width of the feed-forward layers. The published counts need 4,096 at d_model 512 and
        1,024, and 3,072 at 768; None is that.
      mixer: something else than attention.
    """
    d_ff = {768: 3072}.get(d_model, 4096) if d_ff is None else d_ff
    dot = DotProduct(head_dim, use_bias=True)
    norm = LayerNorm(epsilon=1e-12)
    block = Block(
        mixer or Attention(heads, head_dim, alignment=dot, use_bias=True),
        FeedForward(d_ff, ("gelu",), use_bias=True),
        norm=norm,
        post_norm=True,
    )
    return Encoder(
        vocab_size=BERT_VOCAB_SIZE,
        d_model=d_model,
        encoder=Stack(
            (Run(block, layers),), positions=LearnedPositions(512), input_norm=norm, norm=None
        ),
        pooling="first",
        pooler=True,
        masked_lm=True,
        token_types=2,
        embedding_init=Normal(0.02),
    )


def attention_replaced(kind: str, hidden_dim: int, *, max_length: int = 50) -> EncoderDecoder:
    """A small Transformer whose encoder has no attention (Bozic et al. 2023).

    Pre-norm, d 128, 6 + 6 layers, 8 heads of 16, feed-forward 512.

    Args:
      kind: ``alr``, ``alsr``, ``alrr`` or ``elr``, see `SentenceFeedForward`.
      hidden_dim: a width of `REPLACEMENTS`.
      max_length: longest input.
    """
    feed_forward = FeedForward(512, ("relu",), use_bias=True)
    attention = Attention(8, 16, alignment=DotProduct())
    projected = kind in ("alr", "alsr")
    network = SentenceFeedForward(
        max_length,
        hidden_dim,
        num_heads=8 if projected else None,
        head_dim=16 if projected else 0,
        separate_heads=kind == "alsr",
    )
    block = Block(
        network,
        None if kind == "elr" else feed_forward,
        norm=LayerNorm(),
        self_residual=projected,
    )
    decoder = Block(attention, feed_forward, cross_mixer=attention, norm=LayerNorm())
    sines = SinusoidalPositions(endpoint=True)
    return EncoderDecoder(
        vocab_size=32_000,
        d_model=128,
        encoder=Stack((Run(block, 6),), positions=sines, norm=LayerNorm()),
        decoder=Stack((Run(decoder, 6),), positions=sines, norm=LayerNorm()),
        embedding_scale=128**0.5,
        embedding_init=Normal(128**-0.5),
    )


REPLACEMENTS = {
    **{k: {"xs": 25, "s": 50, "m": 800, "l": 3200, "xl": 12_800} for k in ("alr", "alrr", "elr")},
    "alsr": {"xs": 200, "s": 400, "m": 800, "l": 1600},
}
"""Hidden widths of the released code; its largest ALSR is its L."""

FIXED_HEADS = (
    *((512, heads, 128) for heads in (8, 12, 16, 32)),
    *((512, 8, width) for width in (32, 64, 256)),
    *((768, heads, 128) for heads in (8, 12, 16, 20)),
)
"""Width, heads and head size of the published models."""


def _linformer() -> Encoder:
    mixer = Linformer(12, 64, max_length=512, projected_length=256)
    return bert(768, 12, 64, layers=12, mixer=mixer)


def _published() -> dict[str, Callable[[], TokenModel]]:
    models: dict[str, Callable[[], TokenModel]] = {}
    small = functools.partial(
        hard_coded, d_model=288, layers=5, heads=4, d_ff=507, ratio=RATIO_IWSLT
    )
    for variant in HARD_CODED:
        models[f"hard_coded_{variant}"] = functools.partial(hard_coded, variant)
        models[f"hard_coded_{variant}_small"] = functools.partial(small, variant)
    models["bert_large"] = functools.partial(bert, 1024, 16, 64)
    for d_model, heads, width in FIXED_HEADS:
        name = f"bert_{d_model}_{heads}x{width}"
        models[name] = functools.partial(bert, d_model, heads, width)
    models["linformer_base"] = _linformer
    for kind, sizes in REPLACEMENTS.items():
        for size, hidden in sizes.items():
            models[f"{kind}_{size}"] = functools.partial(attention_replaced, kind, hidden)
    return models


PUBLISHED = _published()
"""Named models; call the entry to get the configured module."""
