"""Turn a trained T5 into a Synthesizer without dot products in its encoder.

The teacher may be any run whose model is an encoder-decoder with attention. For example, it may be
converted from another library:

    synthesizer-jax distill synthesize:random --teacher runs/t5 --workdir runs/random \\
        --data-dir DATA --set replace.0.by.max_length=512

There are three phases:

1. The tables of attention logits are fitted to the teacher's mean attention on `fit_batches`
  batches, by maximum likelihood.
2. Each new attention layer is trained to return the same outputs as the teacher's layer for the
  same inputs.
3. The whole model is trained on the task, in the run `WORKDIR/fine_tuned`.

All other layers and parameters of the teacher are kept. A mixture that still contains the dot
product needs no distillation. For example, `synthesizer-jax convert RUN DIR --encoder rv` makes a
model with the same outputs as the model of RUN.

Hardware and time: distillation needs about as much as training the teacher for the same number of
steps.
"""

from __future__ import annotations

from synthesizer_jax.alignments import (
    Alignment,
    FactorizedRandom,
    GaussianBias,
    Random,
    RelativeBias,
)
from synthesizer_jax.distillation.distill import Distillation
from synthesizer_jax.distillation.replacement import Replacement
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.training.experiment import Training

LENGTH = 512
"""The number of positions of the tables, at least the teacher's `data.inputs_length`."""

DISTILL_STEPS = 1000
FINE_TUNE_STEPS = 2000
FIT_BATCHES = 50


def default() -> Distillation:
    """Replaces the encoder's self-attention with a Random Synthesizer."""
    return random()


def random() -> Distillation:
    """Replaces the encoder's self-attention with a table of logits for each head (R)."""
    return _synthesize(Random(max_length=LENGTH))


def factorized_random() -> Distillation:
    """Replaces the encoder's self-attention with a table of rank 8 for each head (FR)."""
    return _synthesize(FactorizedRandom(max_length=LENGTH))


def relative() -> Distillation:
    """Replaces the encoder's self-attention logits with a learned logit for each relative distance.

    As in T5's relative bias, long distances share a logit.

    The logits are added to the relative bias of the teacher, which is kept.
    """
    return _synthesize(RelativeBias())


def gaussian() -> Distillation:
    """Replaces the encoder's self-attention with Gaussians of learned center and width.

    Each head has a center and a width. The logits are added to the relative bias of the teacher,
    which is kept.
    """
    return _synthesize(GaussianBias((0.0,), trainable=True))


def _synthesize(alignment: Alignment) -> Distillation:
    """Returns a distillation that uses an alignment in all self-attention layers of the encoder."""
    return Distillation(
        replace=(Replacement(alignment),),
        training=_training(DISTILL_STEPS),
        fit_batches=FIT_BATCHES,
        fine_tune=_training(FINE_TUNE_STEPS),
    )


def _training(steps: int) -> Training:
    """Returns training settings: AdamW with a warm-up over 5% of the steps and a cosine decay."""
    schedule = Cosine(1e-3, total_steps=steps, warmup_steps=steps // 20)
    return Training(
        steps=steps, optimizer=AdamW(learning_rate=schedule), log_every=50, save_every=steps
    )
