"""Co-train on GLUE and SuperGLUE: the Synthesizer paper's variants T5, D, R, D+V and R+V.

Command (requires T5's vocabulary file, and data from `synthesizer-jax data import glue --from DIR` and the
same with super_glue):

    synthesizer-jax train cotrain_glue_super_glue:rv_small --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spiece.model

Hardware: the small models fit on an accelerator with 16 GB, the base models on one with 40 GB or on a
mesh with fsdp. The mixture has T5's proportional GLUE and SuperGLUE rates, with the rate of both RTE
tasks halved. Rows are packed: one of 512 + 84 tokens holds about five examples. Unlike the paper (Tay et
al. 2021, GLUE and SuperGLUE tables), whose mixture also contains C4, these recipes do not pre-train.
"""

from __future__ import annotations

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.models.zoo import T5_1_1
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant, Cosine
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training


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
    """R+V with 2+2 layers and d_model 256; 300 steps take minutes on two CPU cores."""
    size = Size(d_model=256, layers=2, d_ff=512, heads=4, head_dim=64)
    self_attention = alignment("rv", head_dim=size.head_dim, max_length=128)
    return Experiment(
        model=t5(size, encoder=self_attention, dropout_rate=0.1),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig(
            "glue_super_glue_proportional", 128, 16, batch_size=32, shards=1, pack=True
        ),
        training=Training(
            steps=300,
            optimizer=AdamW(learning_rate=Cosine(1e-3, total_steps=300, warmup_steps=30)),
            save_every=100,
        ),
        evaluation=Evaluation(max_examples=200, method="rank", batch_size=32),
    )


def _cotrain(variant: str, size_name: str) -> Experiment:
    size = T5_1_1[size_name]
    self_attention = alignment(variant, head_dim=size.head_dim)
    return Experiment(
        model=t5(size, encoder=self_attention, dropout_rate=0.1, dtype="bfloat16", scan=True),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("glue_super_glue_proportional", 512, 84, batch_size=128, pack=True),
        training=Training(
            steps=65_536,
            optimizer=Adafactor(learning_rate=Constant(1e-3)),
            save_every=1000,
        ),
        evaluation=Evaluation(every=5000, method="greedy"),
    )
