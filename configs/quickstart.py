"""The quickstart: two tiny models on the embedded co-training mixture.

Command: `make quickstart`, or one of the two alone:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: two CPU cores, about two minutes a model. No file and no network is needed: the
mixture is generated, its vocabulary trained on it. Expect at least 10 points above the majority
class on six of the eight tasks.
"""

from __future__ import annotations

from synthesizer_jax.data import embedded
from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.optimizers import AdamW
from synthesizer_jax.training.schedules import Cosine

STEPS = 3000
LENGTH = 48


def default() -> Experiment:
    """Random + Vanilla."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """A mixture of a learned table and the dot product in every self-attention."""
    return _quickstart("rv")


def dot_product() -> Experiment:
    """The twin: dot product alone."""
    return _quickstart("v")


def _quickstart(variant: str) -> Experiment:
    size = Size(d_model=96, layers=2, d_ff=192, heads=4, head_dim=24)
    kind = alignment(variant, head_dim=size.head_dim, max_length=LENGTH)
    return Experiment(
        model=t5(size, encoder=kind, vocab_size=embedded.VOCAB_SIZE),
        data=DataConfig(embedded.MIXTURE, LENGTH, 8, batch_size=64, shards=1),
        training=Training(
            steps=STEPS,
            optimizer=AdamW(
                learning_rate=Cosine(2e-3, total_steps=STEPS, warmup_steps=STEPS // 20)
            ),
            log_every=25,
            save_every=STEPS,
        ),
        evaluation=Evaluation(method="greedy", batch_size=125),
    )
