"""The quickstart: two tiny models on the embedded co-training mixture.

Command: `make quickstart`, or one of the two alone:

    synthesizer-jax train quickstart:random_vanilla --workdir runs/rv

Hardware and time: two CPU cores, about two minutes a model. No file and no network is
needed: the mixture is generated, its vocabulary trained on it. After 6,000 steps both models are far
above the majority class on all eight tasks, with every seed that was tried (0 to 3); STS-B and MNLI
are those that some seeds have not finished learning by then.
"""

from __future__ import annotations

from synthesizer_jax.alignments import Alignment, Mixture, Random, RelativeBias
from synthesizer_jax.data import embedded
from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.initializers import Normal
from synthesizer_jax.models import Size, t5, zoo
from synthesizer_jax.registry import replace
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.optimizers import AdamW
from synthesizer_jax.training.schedules import Cosine

STEPS = 6000
INPUTS, TARGETS = 32, 4  # tokens; no row of the mixture is longer


def default() -> Experiment:
    """Random + Vanilla."""
    return random_vanilla()


def random_vanilla() -> Experiment:
    """A mixture of a learned table and the dot product in every self-attention."""
    table = Random(max_length=INPUTS, table_init=Normal(2.0))
    return _quickstart(Mixture((table, _DOT)))


def dot_product() -> Experiment:
    """The twin: dot product alone."""
    return _quickstart(_DOT)


_SIZE = Size(d_model=64, layers=2, d_ff=128, heads=4, head_dim=16)
_DOT = zoo.dot_product(_SIZE.head_dim)


def _quickstart(kind: Alignment) -> Experiment:
    model = t5(_SIZE, encoder=kind, vocab_size=embedded.VOCAB_SIZE)
    # Wide initial values let so small a model tell positions and words apart from the first step.
    bias = RelativeBias(table_init=Normal(2.0))
    decoder_run = replace(model.decoder.runs[0], repeats=1)
    model = model.copy(
        embedding_init=Normal(0.3),
        encoder=model.encoder.copy(bias=bias),
        decoder=model.decoder.copy(runs=(decoder_run,), bias=bias.copy(bidirectional=False)),
    )
    return Experiment(
        model=model,
        # 48 rows: more would push a step's temporaries over glibc's largest reusable block, 32 MiB.
        data=DataConfig(embedded.MIXTURE, INPUTS, TARGETS, batch_size=48, shards=1),
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
