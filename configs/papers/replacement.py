"""Attention replaced by feed-forward networks: Bozic et al. 2023, and controls.

    synthesizer-jax train papers.translation:multi30k:v --workdir runs/v --data-dir DATA \\
        --set vocabulary.path=spm.model
    synthesizer-jax distill papers.replacement:alr:encoder:s --teacher runs/v --workdir runs/alr \\
        --data-dir DATA

A recipe takes a place (``encoder``, ``decoder``, ``cross`` or ``everything``), one of the paper's sizes
(``xs`` to ``xl``) and the teacher's scale, ``small`` or ``published``, the latter for `teacher`, of the
paper's size. ALRR and ELR are for encoders. Only the replacements are trained, on the teacher's
activations.

Hardware and time: minutes on two CPU cores at the small scale.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from synthesizer_jax.recipes.papers import small_training, transformer, translation

from synthesizer_jax.alignments import Alignment, Random
from synthesizer_jax.base.registry import replace
from synthesizer_jax.distillation.distill import Distillation
from synthesizer_jax.distillation.replacement import Replacement
from synthesizer_jax.mixers import Mixer, SentenceFeedForward, TokenFeedForward
from synthesizer_jax.models import Size
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.training.experiment import Experiment, Training

Place: TypeAlias = Literal["encoder", "decoder", "cross"]
Places: TypeAlias = Place | Literal["everything"]
Width: TypeAlias = Literal["xs", "s", "m", "l", "xl"]
Scale: TypeAlias = Literal["small", "published"]
Scope: TypeAlias = Literal["mixer", "sublayer", "layer"]

STEPS = 1500
SCALES: dict[Scale, tuple[Size, int]] = {
    "small": (translation.SIZE, translation.LENGTH),
    "published": (Size(d_model=128, layers=6, d_ff=512, heads=8, head_dim=16), 50),
}
"""The teacher's size, and the tokens of the longest sentence, which the networks read at once."""
PLACES: tuple[Place, ...] = ("encoder", "decoder", "cross")
WIDTHS: dict[Width, int] = {"xs": 25, "s": 50, "m": 800, "l": 3200, "xl": 12_800}
SEPARATE_WIDTHS = {"xs": 200, "s": 400, "m": 800, "l": 1600, "xl": 1600}
"""Hidden units of a network, and of each head's; twice as many in cross-attention."""


def default() -> Distillation:
    """ALR in the encoder."""
    return alr()


def teacher() -> Experiment:
    """A teacher of the paper's size, 6 + 6 layers of d 128, on IWSLT 2017.

    Unlike the paper's, it has the blocks and the training of `translation.multi30k`, and one embedding for
    both languages and the output.
    """
    size, length = SCALES["published"]
    experiment = translation.multi30k("v")
    data = replace(
        experiment.data,
        mixture="iwslt2017_de_en",
        inputs_length=length,
        targets_length=length,
        buckets=((25, 25),),
    )
    model = transformer("v", size, length, vocab_size=32_000, dropout=0.1)
    return replace(experiment, model=model, data=data)


def alr(place: Places = "encoder", size: Width = "s", scale: Scale = "small") -> Distillation:
    """Attention layer replacement: a network makes all heads of a sentence."""
    return _distill("alr", place, size, scale)


def alsr(place: Places = "encoder", size: Width = "xs", scale: Scale = "small") -> Distillation:
    """A network of its own for each head."""
    return _distill("alsr", place, size, scale)


def alrr(size: Width = "s", scale: Scale = "small") -> Distillation:
    """The network replaces norm, attention and residual connection."""
    return _distill("alrr", "encoder", size, scale)


def elr(size: Width = "s", scale: Scale = "small") -> Distillation:
    """The network replaces the whole encoder layer."""
    return _distill("elr", "encoder", size, scale)


def token(scale: Scale = "small") -> Distillation:
    """Control: a network on every token by itself."""
    shape, _ = SCALES[scale]
    return _training(Replacement(TokenFeedForward(256, shape.heads, shape.head_dim)))


def random(scale: Scale = "small") -> Distillation:
    """Control: Random Synthesizer heads, which do not read the tokens to attend."""
    return _training(Replacement(Random(max_length=SCALES[scale][1])))


def untrained(place: Places = "encoder", size: Width = "s", scale: Scale = "small") -> Distillation:
    """Control: ALR as it was initialized."""
    schedule = Cosine(1e-3, total_steps=1, warmup_steps=1)  # its first learning rate is 0
    training = Training(steps=1, optimizer=AdamW(learning_rate=schedule), save_every=1)
    return replace(alr(place, size, scale), training=training)


def _distill(kind: str, place: Places, size: Width, scale: Scale) -> Distillation:
    scopes: dict[str, Scope] = {"alrr": "sublayer", "elr": "layer"}
    places = PLACES if place == "everything" else [p for p in PLACES if p == place]
    return _training(
        *(Replacement(_network(kind, p, size, scale), p, scopes.get(kind, "mixer")) for p in places)
    )


def _network(kind: str, place: Place, size: Width, scale: Scale) -> Mixer | Alignment:
    shape, length = SCALES[scale]
    separate = kind == "alsr"
    width = (SEPARATE_WIDTHS if separate else WIDTHS)[size]
    has_heads = kind in ("alr", "alsr")
    return SentenceFeedForward(
        length,
        2 * width if place == "cross" else width,
        shape.heads if has_heads else None,
        shape.head_dim if has_heads else 0,
        separate_heads=separate,
        causal=place == "decoder",
    )


def _training(*replacements: Replacement) -> Distillation:
    return Distillation(replacements, small_training(STEPS))
