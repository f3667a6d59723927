"""Replace attention with feed-forward networks, as in Bozic et al. 2023, or with simpler controls.

The first command trains a teacher. The second command trains the networks that replace the
teacher's attention:

    synthesizer-jax train papers.translation:multi30k:v --workdir runs/v --data-dir DATA \\
        --set vocabulary.path=spm.model
    synthesizer-jax distill papers.replacement:alr:encoder:s --teacher runs/v --workdir runs/alr \\
        --data-dir DATA

A recipe takes up to three arguments: the attention to replace (``encoder``, ``decoder``, ``cross``
or ``everything``), one of the paper's sizes (``xs`` to ``xl``), and the scale of the teacher. Use
the scale ``published`` if the teacher is a run of the recipe `teacher`, which has the size of the
paper's model, and otherwise ``small``. The recipes for ALRR and ELR do not take the first argument,
because these networks can replace attention only in encoders. Only the networks that replace
attention are trained. They learn to reproduce the activations of the teacher.

Hardware and time: training at the small scale takes minutes on two CPU cores.
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
"""The size of the teacher and the maximum number of tokens of a sentence, by scale.

A network reads all positions of a sentence at once, so its size depends on the number of tokens.
"""
PLACES: tuple[Place, ...] = ("encoder", "decoder", "cross")
WIDTHS: dict[Width, int] = {"xs": 25, "s": 50, "m": 800, "l": 3200, "xl": 12_800}
SEPARATE_WIDTHS = {"xs": 200, "s": 400, "m": 800, "l": 1600, "xl": 1600}
"""The numbers of hidden units of a network, by the name of the network's size.

`WIDTHS` are for a network that computes all heads, and `SEPARATE_WIDTHS` for a network that
computes one head. In cross-attention, a network has twice as many hidden units.
"""


def default() -> Distillation:
    """Replaces the attention of the encoder with ALR."""
    return alr()


def teacher() -> Experiment:
    """Trains a teacher of the paper's size on IWSLT 2017, with 6 + 6 layers and d_model 128.

    Unlike the paper's teacher, it has the blocks and the training settings of
    `translation.multi30k`, and a single embedding for both languages and the output.
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
    """Replaces attention with one network that computes the outputs of all heads (ALR)."""
    return _distill("alr", place, size, scale)


def alsr(place: Places = "encoder", size: Width = "xs", scale: Scale = "small") -> Distillation:
    """Replaces attention with a separate network for each head (ALSR)."""
    return _distill("alsr", place, size, scale)


def alrr(size: Width = "s", scale: Scale = "small") -> Distillation:
    """Replaces attention, its norm and its residual connection with one network (ALRR)."""
    return _distill("alrr", "encoder", size, scale)


def elr(size: Width = "s", scale: Scale = "small") -> Distillation:
    """Replaces whole encoder layers with networks (ELR)."""
    return _distill("elr", "encoder", size, scale)


def token(scale: Scale = "small") -> Distillation:
    """Replaces attention with a network that processes each token by itself, as a control."""
    shape, _ = SCALES[scale]
    return _training(Replacement(TokenFeedForward(256, shape.heads, shape.head_dim)))


def random(scale: Scale = "small") -> Distillation:
    """Replaces attention with Random Synthesizer heads, as a control.

    The attention weights of Random Synthesizer heads do not depend on the tokens.
    """
    return _training(Replacement(Random(max_length=SCALES[scale][1])))


def untrained(place: Places = "encoder", size: Width = "s", scale: Scale = "small") -> Distillation:
    """Replaces attention with ALR networks that are not trained, as a control."""
    # Train for a single step with a learning rate of 0, so that the parameters do not change.
    schedule = Cosine(1e-3, total_steps=1, warmup_steps=1)
    training = Training(steps=1, optimizer=AdamW(learning_rate=schedule), save_every=1)
    return replace(alr(place, size, scale), training=training)


def _distill(kind: str, place: Places, size: Width, scale: Scale) -> Distillation:
    """Returns the distillation for a kind of network (``alr``, ``alsr``, ``alrr`` or ``elr``)."""
    scopes: dict[str, Scope] = {"alrr": "sublayer", "elr": "layer"}
    places = PLACES if place == "everything" else [p for p in PLACES if p == place]
    return _training(
        *(Replacement(_network(kind, p, size, scale), p, scopes.get(kind, "mixer")) for p in places)
    )


def _network(kind: str, place: Place, size: Width, scale: Scale) -> Mixer | Alignment:
    """Returns the network that replaces one kind of attention, such as the encoder's."""
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
    """Returns a distillation with the given replacements.

    The training settings are those of small models.
    """
    return Distillation(replacements, small_training(STEPS))
