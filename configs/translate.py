"""English to German on Multi30k: every family of attention under one budget.

Command (data and vocabulary first, from the corpus' text files):

    synthesizer-jax data import multi30k --from MULTI30K_FILES --data-dir DATA
    synthesizer-jax data vocabulary multi30k_en_de --output spm.model --size 4000 --data-dir DATA
    synthesizer-jax train translate:vanilla --workdir runs/vanilla --data-dir DATA \\
        --set vocabulary.path=spm.model

Hardware and time: a recipe takes some minutes on two CPU cores. `benchmarks/translation.py` trains all of
them and writes the table of docs/results.md.

All recipes share everything but who looks at whom: pre-norm blocks, sinusoidal positions, d 128, two and
two layers, four heads of 32, dropout 0.1, label smoothing 0.1, AdamW. Wherever they have a dot product,
alone, in a mixture or across, it is T5's: no factor in the logits, 1/√32 in the query's initial values.
That is how Tay et al. 2021's released code adds it to a Random or Dense alignment; under AdamW a factor
in the logits learns at another rate, and the rows of a mixture and of its parts would differ in two
things.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn

from synthesizer_jax.alignments import Alignment, Gaussian
from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.initializers import Normal
from synthesizer_jax.mixers import Attention, LightweightConvolution, TalkingHeads
from synthesizer_jax.models import EncoderDecoder, Run, Size, alignment, t5, zoo
from synthesizer_jax.models.layers import SinusoidalPositions
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.optimizers import AdamW
from synthesizer_jax.training.schedules import Cosine

SIZE = Size(d_model=128, layers=2, d_ff=512, heads=4, head_dim=32)
LENGTH = 32  # tokens; longer sentences are cut
VOCAB_SIZE = 4096
STEPS = 2000
DROPOUT = 0.1


def default() -> Experiment:
    """The dot product."""
    return vanilla()


def vanilla() -> Experiment:
    """The dot product everywhere."""
    return _translate(_synthesizer("v"))


def random() -> Experiment:
    """Random Synthesizer (R)."""
    return _translate(_synthesizer("r"))


def dense() -> Experiment:
    """Dense Synthesizer (D)."""
    return _translate(_synthesizer("d"))


def factorized_random() -> Experiment:
    """Factorized Random Synthesizer (FR)."""
    return _translate(_synthesizer("fr"))


def factorized_dense() -> Experiment:
    """Factorized Dense Synthesizer (FD)."""
    return _translate(_synthesizer("fd"))


def random_vanilla() -> Experiment:
    """Random mixed with the dot product (R+V)."""
    return _translate(_synthesizer("rv"))


def dense_vanilla() -> Experiment:
    """Dense mixed with the dot product (D+V)."""
    return _translate(_synthesizer("dv"))


def hc_sa() -> Experiment:
    """Hard-coded Gaussian self-attention, learned cross-attention (HC-SA)."""
    return _translate(Gaussian((-1, 1)), Gaussian((-1, 0)))


def sh_x() -> Experiment:
    """Hard-coded self-attention and one learned cross-attention head in the last layer (SH-X)."""
    experiment = hc_sa()
    decoder = experiment.model.decoder
    (run,) = decoder.runs
    silent = Run(replace(run.block, cross_mixer=None), SIZE.layers - 1)
    dot = zoo.dot_product(SIZE.d_model)
    head = Attention(1, SIZE.d_model, alignment=dot, dropout_rate=DROPOUT)
    last = Run(replace(run.block, cross_mixer=head), 1)
    model = experiment.model.copy(decoder=decoder.copy(runs=(silent, last)))
    return replace(experiment, model=model)


def talking_heads() -> Experiment:
    """Talking heads in both stacks and across."""
    dot = zoo.dot_product(SIZE.head_dim)
    mixer = TalkingHeads(SIZE.heads, SIZE.head_dim, alignment=dot, dropout_rate=DROPOUT)
    return _translate(mixer, cross=mixer)


def lightweight_convolution() -> Experiment:
    """Lightweight convolution, seven taps and sixteen kernels."""
    return _translate(LightweightConvolution(width=7, groups=16, dropout_rate=DROPOUT))


def _synthesizer(variant: str) -> Alignment:
    return alignment(variant, head_dim=SIZE.head_dim, max_length=LENGTH)


def _translate(
    encoder: Alignment | nn.Module,
    decoder: Alignment | nn.Module | None = None,
    *,
    cross: nn.Module | None = None,
) -> Experiment:
    model: EncoderDecoder = t5(
        SIZE,
        gated=False,
        encoder=encoder,
        decoder=decoder,
        cross=cross,
        relative_bias=False,
        positions=SinusoidalPositions(),
        vocab_size=VOCAB_SIZE,
        dropout_rate=DROPOUT,
    ).copy(
        embedding_init=Normal(SIZE.d_model**-0.5),
        embedding_scale=SIZE.d_model**0.5,
        logits_scale=1.0,
    )
    return Experiment(
        model=model,
        vocabulary=SentencePiece("spm.model", extra_ids=0),
        data=DataConfig("multi30k_en_de", LENGTH, LENGTH, batch_size=64, shards=1),
        training=Training(
            steps=STEPS,
            optimizer=AdamW(learning_rate=Cosine(1e-3, total_steps=STEPS, warmup_steps=400)),
            label_smoothing=0.1,
            log_every=50,
            save_every=500,
        ),
        evaluation=Evaluation(method="greedy", batch_size=128, split="validation"),
    )


RECIPES: dict[str, Callable[[], Experiment]] = {
    "Dot product (vanilla)": vanilla,
    "Random (R)": random,
    "Dense (D)": dense,
    "Factorized Random (FR)": factorized_random,
    "Factorized Dense (FD)": factorized_dense,
    "R+V": random_vanilla,
    "D+V": dense_vanilla,
    "HC-SA": hc_sa,
    "SH-X": sh_x,
    "Talking heads": talking_heads,
    "Lightweight convolution": lightweight_convolution,
}
"""What the table of docs/results.md compares."""
