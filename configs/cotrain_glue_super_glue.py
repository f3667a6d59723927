"""Co-train on GLUE and SuperGLUE: the Synthesizer paper's variants T5, D, R, D+V and R+V.

Command (T5's vocabulary file is yours to give; the data: `synthesizer-jax data import glue --from
DIR` and the same with super_glue):

    synthesizer-jax train cotrain_glue_super_glue:rv_small --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spiece.model

Hardware and time: small fits one accelerator of 16 GB, base one of 40 GB or a mesh with fsdp. The
mixture is ours: T5's proportional GLUE and SuperGLUE rates, each RTE halved. The paper (Tay et al.
2021, GLUE and SuperGLUE tables) pre-trains on C4 within the same mixture, which these recipes do not.
"""

from __future__ import annotations

from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.models.zoo import T5_1_1
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.optimizers import Adafactor, AdamW
from synthesizer_jax.training.schedules import Constant, Cosine


def default() -> Experiment:
    """R+V, small."""
    return rv_small()


def t5_small() -> Experiment:
    """The dot-product baseline."""
    return _cotrain("v", "small")


def d_small() -> Experiment:
    """Dense."""
    return _cotrain("d", "small")


def r_small() -> Experiment:
    """Random."""
    return _cotrain("r", "small")


def dv_small() -> Experiment:
    """Dense + Vanilla."""
    return _cotrain("dv", "small")


def rv_small() -> Experiment:
    """Random + Vanilla."""
    return _cotrain("rv", "small")


def t5_base() -> Experiment:
    """The dot-product baseline."""
    return _cotrain("v", "base")


def d_base() -> Experiment:
    """Dense."""
    return _cotrain("d", "base")


def r_base() -> Experiment:
    """Random."""
    return _cotrain("r", "base")


def dv_base() -> Experiment:
    """Dense + Vanilla."""
    return _cotrain("dv", "base")


def rv_base() -> Experiment:
    """Random + Vanilla."""
    return _cotrain("rv", "base")


def rv_laptop() -> Experiment:
    """R+V cut down to 2+2 layers of width 256, for two CPU cores: 300 steps in about ten minutes."""
    size = Size(d_model=256, layers=2, d_ff=512, heads=4, head_dim=64)
    kind = alignment("rv", head_dim=size.head_dim, max_length=128)
    return Experiment(
        model=t5(size, encoder=kind, dropout_rate=0.1),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("glue_super_glue_proportional", 128, 16, batch_size=32, shards=1),
        training=Training(
            steps=300,
            optimizer=AdamW(learning_rate=Cosine(1e-3, total_steps=300, warmup_steps=30)),
            save_every=100,
        ),
        evaluation=Evaluation(max_examples=200, method="rank", batch_size=32),
    )


def _cotrain(variant: str, size: str) -> Experiment:
    shape = T5_1_1[size]
    kind = alignment(variant, head_dim=shape.head_dim)
    return Experiment(
        model=t5(shape, encoder=kind, dropout_rate=0.1, dtype="bfloat16", scan=True),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("glue_super_glue_proportional", 512, 84, batch_size=128),
        training=Training(
            steps=65_536,
            optimizer=Adafactor(learning_rate=Constant(1e-3)),
            save_every=1000,
        ),
        evaluation=Evaluation(every=5000, method="greedy"),
    )
