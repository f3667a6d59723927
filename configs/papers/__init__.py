"""Contains recipes for the experiments of papers.

The tables in the papers compare models that differ only in their attention. We call these models
systems. Every system has an abbreviation, such as ``rv`` for Random + Vanilla. To choose a system,
write its abbreviation after the name of the recipe, as in ``papers.translation:multi30k:rv``. All
systems of a table use the same kind of dot product. This file makes the mixers and models of the
systems.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from synthesizer_jax.recipes import pretrain

from synthesizer_jax.alignments import Alignment, DotProduct, Gaussian
from synthesizer_jax.base.messages import did_you_mean
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
"""The alignment by the dot product, divided by √d_k."""

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
"""Functions from a size, a length and a dot product to self-attention that is no alignment.

- ``light`` and ``dynamic`` are convolutions with a kernel for every four channels, and
  ``dynamic_full`` has a kernel for each channel. The kernels are narrower than the kernels of the
  models in the zoo, and no point-wise layer follows a convolution.
- ``linformer`` projects the keys and values to a quarter of the positions.
- ``heads`` are talking heads.
- ``local`` is dot-product attention to the seven tokens that the convolutions see.
"""

SELF_ATTENTIONS = (*VARIANTS, *MIXERS, "hc_sa")
"""The names of the systems that differ only in their self-attention.

The system ``heads`` (talking heads) is an exception. A model with this system may have talking
heads in cross-attention, too.
"""
SYSTEMS = (*SELF_ATTENTIONS, "hc_all", "sh_x")
"""The names of all systems, including systems that change cross-attention."""


def dot_product_of(kind: Dot, size: Size) -> Alignment:
    """Returns the dot-product alignment of one of two kinds.

    The ``scaled`` dot product is divided by √d_k. T5's dot product is not divided. Instead, T5's
    initializer for the query projection includes the factor 1/√d_k.
    """
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
    """Returns the self-attention mixers of a system, first for the encoder, then for the decoder.

    Args:
      system: one of `systems`.
      size: the widths of the model.
      length: the number of positions in learned tables of attention logits.
      dot: the dot product that the system uses, alone, in mixtures or in talking heads.
      dropout: the dropout rate.
      systems: the systems between which the recipe lets users choose.

    Raises:
      ValueError: the system does not exist.
    """
    if system not in systems:
        hint = did_you_mean(system, systems) or "."
        raise ValueError(
            f"There is no system {system!r}{hint} The systems are {', '.join(systems)}."
        )
    attention = Attention(size.heads, size.head_dim, alignment=dot, dropout_rate=dropout)
    if system in ("hc_sa", "hc_all", "sh_x"):
        # In the encoder, some heads attend to the token before the query, and others to the token
        # after it. In the decoder, some heads attend to the token before the query, and others to
        # the query's own token (You et al. 2020).
        return (
            attention.copy(alignment=Gaussian((-1, 1))),
            attention.copy(alignment=Gaussian((-1, 0))),
        )
    if system in MIXERS:
        mixer: Mixer = MIXERS[system](size, length, dot).copy(dropout_rate=dropout)
    else:
        mixer = attention.copy(alignment=VARIANTS[system](dot, length))
    return mixer, mixer


def transformer(
    system: str, size: Size, length: int, *, vocab_size: int, dropout: float, prefix: int = 0
) -> EncoderDecoder:
    """Returns an encoder-decoder like Tensor2Tensor's Transformer.

    The model has norms before its sub-layers, sinusoidal positions, and one embedding for inputs,
    targets and outputs. It differs from Tensor2Tensor's model in two points: the norms are
    root-mean-square norms, and the sinusoids follow the Transformer paper.

    Args:
      system: one of `SYSTEMS`. Three systems are from You et al. 2020. All three have hard-coded
        self-attention. ``hc_all`` also has hard-coded cross-attention, which looks at source
        positions near the position of the query. In ``sh_x``, only the last decoder layer has
        cross-attention, with a single learned head of full width.
      size: the widths and depths of the model.
      length: the number of positions in learned tables of attention logits.
      vocab_size: the size of the vocabulary, which is the number of rows of the embedding.
      dropout: the dropout rate of all layers.
      prefix: the number of source tokens before the sentence itself; see `hard_coded`.
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
    # Split the decoder into two runs of layers: all layers but the last have no cross-attention,
    # and the last layer has cross-attention.
    (run,) = model.decoder.runs
    head = Attention(1, size.d_model, alignment=SCALED, dropout_rate=dropout)
    runs = (
        Run(replace(run.block, cross_mixer=None), size.layers - 1),
        Run(replace(run.block, cross_mixer=head), 1),
    )
    return model.copy(decoder=model.decoder.copy(runs=runs))


def laptop_model(system: str, length: int, dropout: float = 0.0) -> EncoderDecoder:
    """Returns a T5 1.1 with 2 + 2 layers, d_model 256 and learned positions.

    Tay et al. 2021 also used learned positions in the models that they trained on C4.

    Args:
      system: one of `SELF_ATTENTIONS`, or ``hc_all``.
      length: the number of positions.
      dropout: the dropout rate of all layers.
    """
    size = pretrain.LAPTOP
    dot = dot_product(size.head_dim)
    systems = (*SELF_ATTENTIONS, "hc_all")
    encoder, decoder = self_attentions(
        system, size, length, dot=dot, dropout=dropout, systems=systems
    )
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
    """Returns the settings for training a small model, with one checkpoint at the end.

    The optimizer is AdamW. The learning rate rises to 0.001 during the first tenth of the steps,
    and then decays to zero along a cosine.
    """
    schedule = Cosine(1e-3, total_steps=steps, warmup_steps=steps // 10)
    return Training(
        steps=steps,
        optimizer=AdamW(learning_rate=schedule),
        label_smoothing=label_smoothing,
        log_every=50,
        save_every=steps,
    )
