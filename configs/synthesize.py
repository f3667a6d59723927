"""Make a pure Synthesizer of a trained T5: fit its tables, distill layer by layer, fine-tune the whole.

Command (the teacher is any run of an encoder-decoder with attention, also a converted one):

    synthesizer-jax distill synthesize:random --teacher runs/t5 --workdir runs/random --data-dir DATA \\
        --set replace.0.by.max_length=512

In one pass over `fit_batches` batches the tables become the maximum-likelihood ones of the teacher's mean
attention; then each layer learns the outputs of the teacher's, whose inputs it reads; then the whole
model is trained on the task, in `WORKDIR/fine_tuned`. The rest of the teacher is taken as it is. Mixtures
with the dot product need none of this: `synthesizer-jax convert RUN DIR --encoder rv` computes what RUN
does.

Hardware and time: that of training the teacher for as many steps.
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
"""Positions of the tables; at least the teacher's `data.inputs_length`."""

DISTILL_STEPS = 1000
FINE_TUNE_STEPS = 2000
FIT_BATCHES = 50


def default() -> Distillation:
    """A Random Synthesizer in the encoder."""
    return random()


def random() -> Distillation:
    """A table of logits for every head (R)."""
    return _synthesize(Random(max_length=LENGTH))


def factorized_random() -> Distillation:
    """A table of rank 8 for every head (FR)."""
    return _synthesize(FactorizedRandom(max_length=LENGTH))


def relative() -> Distillation:
    """A logit for each bucket of the distance, beside the teacher's own relative bias."""
    return _synthesize(RelativeBias())


def gaussian() -> Distillation:
    """A center and a width for every head, beside the teacher's own relative bias."""
    return _synthesize(GaussianBias((0.0,), trainable=True))


def _synthesize(alignment: Alignment) -> Distillation:
    return Distillation(
        replace=(Replacement(alignment),),
        training=_training(DISTILL_STEPS),
        fit_batches=FIT_BATCHES,
        fine_tune=_training(FINE_TUNE_STEPS),
    )


def _training(steps: int) -> Training:
    schedule = Cosine(1e-3, total_steps=steps, warmup_steps=steps // 20)
    return Training(steps=steps, optimizer=AdamW(learning_rate=schedule), log_every=50, save_every=steps)
