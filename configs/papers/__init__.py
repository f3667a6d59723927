"""The papers' experiments as recipes: what their tables compare, by the abbreviations of the tables.

A recipe is named with the system after it: ``papers.translation:multi30k:rv``. The systems of a table have
the same kind of dot product, and everything else in common. This file makes their mixers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from synthesizer_jax.recipes import pretrain

from synthesizer_jax.alignments import Alignment, DotProduct, Gaussian
from synthesizer_jax.base.registry import replace
from synthesizer_jax.mixers import (
    Attention,
    DynamicConvolution,
    LightweightConvolution,
    Linformer,
    Mixer,
    TalkingHeads,
)
from synthesizer_jax.models import EncoderDecoder, Run, Size, t5
from synthesizer_jax.models.layers import LearnedPositions, SinusoidalPositions
from synthesizer_jax.models.zoo import VARIANTS, dot_product
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.primitives.initializers import Normal
from synthesizer_jax.training.experiment import Training

Dot: TypeAlias = Literal["scaled", "t5"]
SCALED = DotProduct(parent=None)
"""The dot product over √d_k."""


MIXERS: dict[str, Callable[[Size, int, Alignment], Mixer]] = {
    "light": lambda size, n, dot: LightweightConvolution(width=7, groups=size.d_model // 4),
    "dynamic": lambda size, n, dot: DynamicConvolution(width=7, groups=size.d_model // 4),
    "dynamic_full": lambda size, n, dot: DynamicConvolution(width=7),
    "linformer": lambda size, n, dot: Linformer(
        size.heads, size.head_dim, max_length=n, projected_length=n // 4
    ),
    "heads": lambda size, n, dot: TalkingHeads(size.heads, size.head_dim, alignment=dot),
    "local": lambda size, n, dot: Attention(size.heads, size.head_dim, alignment=dot, window=4),
}
"""Self-attentions that are no alignment: convolutions with a kernel for every four channels and with one
for each, narrower than the zoo's and without a point-wise layer after them, Linformer with a quarter of the
positions, talking heads; and dot products of the seven tokens that the convolutions see."""

SELF_ATTENTIONS = (*VARIANTS, *MIXERS, "hc_sa")
"""The systems that differ in their self-attention alone, but for talking heads in cross-attention."""
SYSTEMS = (*SELF_ATTENTIONS, "hc_all", "sh_x")


def dot_product_of(kind: Dot, size: Size) -> Alignment:
    """Returns the dot product over √d_k, or T5's, which has its scale in the query's initializer."""
    return SCALED if kind == "scaled" else dot_product(size.head_dim)


def self_attentions(
    system: str,
    size: Size,
    length: int,
    *,
    dot: Alignment = SCALED,
    dropout: float = 0.0,
    systems: Sequence[str] = SELF_ATTENTIONS,
) -> tuple[Mixer, Mixer]:
    """Returns the self-attention of an encoder and that of a decoder.

    Args:
      system: one of `systems`.
      size: widths.
      length: positions of the tables.
      dot: the dot product, alone, in mixtures and of talking heads.
      dropout: rate.
      systems: those that the recipe has.

    Raises:
      ValueError: there is no such system.
    """
    if system not in systems:
        raise ValueError(f"there is no system {system!r}; there are {', '.join(systems)}")
    attention = Attention(size.heads, size.head_dim, alignment=dot, dropout_rate=dropout)
    if system in ("hc_sa", "hc_all", "sh_x"):
        places = Gaussian((-1, 1)), Gaussian((-1, 0))  # of the heads: You et al. 2020
        return attention.copy(alignment=places[0]), attention.copy(alignment=places[1])
    if system in MIXERS:
        mixer: Mixer = MIXERS[system](size, length, dot).copy(dropout_rate=dropout)
    else:
        mixer = attention.copy(alignment=VARIANTS[system](dot, length))
    return mixer, mixer


def transformer(
    system: str, size: Size, length: int, *, vocab_size: int, dropout: float, prefix: int = 0
) -> EncoderDecoder:
    """Returns an encoder-decoder as Tensor2Tensor's: pre-norm, sinusoids, one embedding for everything.

    Unlike there, norms are root-mean-square norms, and the sinusoids those of the Transformer's paper.

    Args:
      system: one of `SYSTEMS`. Those of You et al. 2020 are ``hc_sa`` (hard-coded self-attention),
        ``hc_all`` (cross-attention too, around the query's own position in the source) and ``sh_x``
        (hard-coded self-attention, and one learned cross-attention head of full width in the last
        decoder layer alone).
      size: widths and depths.
      length: positions of the tables.
      vocab_size: rows of the embedding.
      dropout: rate of all dropouts.
      prefix: source tokens before the sentence, see `hard_coded`.
    """
    encoder, decoder = self_attentions(system, size, length, dropout=dropout, systems=SYSTEMS)
    cross: Mixer = Attention(size.heads, size.head_dim, alignment=SCALED, dropout_rate=dropout)
    if system == "heads":
        cross = encoder
    if system == "hc_all":
        cross = cross.copy(alignment=Gaussian((prefix - 1, prefix + 1)))
    model = t5(
        size,
        gated=False,
        encoder=encoder,
        decoder=decoder,
        cross=cross,
        relative_bias=False,
        positions=SinusoidalPositions(),
        vocab_size=vocab_size,
        dropout_rate=dropout,
        elementwise_dropout=True,
        dtype="auto",
    ).copy(
        embedding_init=Normal(size.d_model**-0.5),
        embedding_scale=size.d_model**0.5,
        logits_scale=1.0,
    )
    if system != "sh_x":
        return model
    (run,) = model.decoder.runs
    head = Attention(1, size.d_model, alignment=SCALED, dropout_rate=dropout)
    runs = (
        Run(replace(run.block, cross_mixer=None), size.layers - 1),
        Run(replace(run.block, cross_mixer=head), 1),
    )
    return model.copy(decoder=model.decoder.copy(runs=runs))


def laptop_model(system: str, length: int, dropout: float = 0.0) -> EncoderDecoder:
    """Returns a T5 1.1 with 2 + 2 layers of d 256 and learned positions, as the paper's on C4 had them.

    Args:
      system: one of `SELF_ATTENTIONS`, or ``hc_all``.
      length: positions.
      dropout: rate of all dropouts.
    """
    size = pretrain.LAPTOP
    dot = dot_product(size.head_dim)
    systems = (*SELF_ATTENTIONS, "hc_all")
    encoder, decoder = self_attentions(system, size, length, dot=dot, dropout=dropout, systems=systems)
    return t5(
        size,
        encoder=encoder,
        decoder=decoder,
        cross=encoder if system in ("hc_all", "heads") else None,
        relative_bias=False,
        positions=LearnedPositions(length),
        dropout_rate=dropout,
        dtype="auto",
    )


def small_training(steps: int, *, label_smoothing: float = 0.0) -> Training:
    """Returns AdamW with a warm-up of a tenth of the steps and a cosine to zero, saved at the end."""
    schedule = Cosine(1e-3, total_steps=steps, warmup_steps=steps // 10)
    return Training(
        steps=steps,
        optimizer=AdamW(learning_rate=schedule),
        label_smoothing=label_smoothing,
        log_every=50,
        save_every=steps,
    )
