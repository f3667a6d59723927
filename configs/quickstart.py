"""Quickstart: two small models on the synthetic co-training mixture.

Command: `make quickstart` for both, or for one of them:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: about two minutes per model on two CPU cores. No files and no network access are needed:
the mixture is generated, and its vocabulary is trained on it. After 6,000 steps both models exceed the
majority class by far on all eight tasks, for all seeds tried (0 to 3); for some seeds, STS-B and MNLI are
still improving.
"""

from __future__ import annotations

from synthesizer_jax.alignments import Alignment, Mixture, Random, RelativeBias
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.initializers import Normal
from synthesizer_jax.models import Size, t5, zoo
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.registry import replace
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

STEPS = 6000
INPUTS, TARGETS = 32, 4  # tokens; no example of the mixture is longer


def default() -> Experiment:
    """Random + Vanilla."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """A mixture of a learned table and the dot product in every self-attention layer."""
    table = Random(max_length=INPUTS, table_init=Normal(2.0))
    return _quickstart(Mixture((table, _DOT)))


def dot_product() -> Experiment:
    """The baseline: the dot product alone."""
    return _quickstart(_DOT)


_SIZE = Size(d_model=64, layers=2, d_ff=128, heads=4, head_dim=16)
_DOT = zoo.dot_product(_SIZE.head_dim)


def _quickstart(self_attention: Alignment) -> Experiment:
    model = t5(_SIZE, encoder=self_attention, vocab_size=synthetic.VOCAB_SIZE)
    # A large initial variance lets such a small model distinguish positions and words from the start.
    bias = RelativeBias(table_init=Normal(2.0))
    decoder_run = replace(model.decoder.runs[0], repeats=1)
    model = model.copy(
        embedding_init=Normal(0.3),
        encoder=model.encoder.copy(bias=bias),
        decoder=model.decoder.copy(runs=(decoder_run,), bias=bias.copy(bidirectional=False)),
    )
    return Experiment(
        model=model,
        # With more than 48 examples, a step's temporary buffers exceed 32 MiB, the size up to which glibc
        # reuses memory.
        data=DataConfig(synthetic.MIXTURE, INPUTS, TARGETS, batch_size=48, shards=1),
        training=Training(
            steps=STEPS,
            optimizer=AdamW(
                learning_rate=Cosine(1e-3, total_steps=STEPS, warmup_steps=STEPS // 20, final=2e-5),
                b2=0.99,
            ),
            log_every=25,
            save_every=STEPS,
        ),
        evaluation=Evaluation(method="greedy", batch_size=150),
    )
