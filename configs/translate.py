"""English-German translation on Multi30k: every family of attention with the same budget.

Commands (data and vocabulary are made from the text files of the corpus):

    synthesizer-jax data import multi30k --from MULTI30K_FILES --data-dir DATA
    synthesizer-jax data vocabulary multi30k_en_de --output spm.model --size 4000 --data-dir DATA
    synthesizer-jax train translate:vanilla --workdir runs/vanilla --data-dir DATA \\
        --set vocabulary.path=spm.model

Hardware and time: some minutes per recipe on two CPU cores. `benchmarks/results.py` trains all of
them and writes the table in docs/results.md.

The recipes differ in attention only: all have pre-norm blocks, sinusoidal positions, d_model 128, 2+2
layers, four heads of size 32, dropout 0.1, label smoothing 0.1 and AdamW. Dot products, whether alone, in
a mixture or in cross-attention, are those of T5: the logits are not scaled, and the query kernel is
initialized with an additional factor of 1/√32. The released code of Tay et al. 2021 adds the dot product
to a Random or Dense alignment in the same way. With AdamW, scaled logits would have another effective
learning rate, so that mixtures and their parts would differ in more than one respect.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn

from synthesizer_jax.alignments import Alignment, Gaussian
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.initializers import Normal
from synthesizer_jax.mixers import Attention, LightweightConvolution, TalkingHeads
from synthesizer_jax.models import EncoderDecoder, Run, Size, alignment, t5, zoo
from synthesizer_jax.models.layers import SinusoidalPositions
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

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
    without_cross = Run(replace(run.block, cross_mixer=None), SIZE.layers - 1)
    dot = zoo.dot_product(SIZE.d_model)
    cross_mixer = Attention(1, SIZE.d_model, alignment=dot, dropout_rate=DROPOUT)
    last = Run(replace(run.block, cross_mixer=cross_mixer), 1)
    model = experiment.model.copy(decoder=decoder.copy(runs=(without_cross, last)))
    return replace(experiment, model=model)


def talking_heads() -> Experiment:
    """Talking heads in self-attention and cross-attention."""
    dot = zoo.dot_product(SIZE.head_dim)
    mixer = TalkingHeads(SIZE.heads, SIZE.head_dim, alignment=dot, dropout_rate=DROPOUT)
    return _translate(mixer, cross=mixer)


def lightweight_convolution() -> Experiment:
    """Lightweight convolution with seven taps and sixteen kernels."""
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
"""The recipes that docs/results.md compares, by their names in its table."""
