"""Pre-train a T5 or a Synthesizer on unlabeled text, optionally mixed with T5's supervised tasks.

The following commands require T5's vocabulary file and C4. C4 can come from TFDS or from
`synthesizer-jax data import c4/en`. The first command prepares C4. The second command trains a
model:

    synthesizer-jax data prepare c4_v220_span_corruption --vocabulary spiece.model --data-dir DATA
    synthesizer-jax train pretrain:t5_1_1_base --workdir runs/pretrained --data-dir DATA \\
        --set vocabulary.path=spiece.model

Hardware: see docs/pretrain.md. The recipe `laptop` needs only two CPU cores and WikiText-2.

The settings are those of T5 (Raffel et al. 2020, section 3.1). Training takes 524,288 steps. A
batch has 128 rows of 512 tokens, which are 65,536 tokens. The optimizer is Adafactor with the
learning rate 1/√max(step, 10⁴). The corrupted spans have a mean length of 3 tokens and contain 15%
of all tokens. The targets therefore have 114 tokens.

To train on other texts, for example on a task that you have imported, add `--set
data.mixture=TASK`. If a task does not define an objective, choose one with `--set
data.objective=NAME`.
"""

from __future__ import annotations

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import EncoderDecoder, Size, alignment, t5
from synthesizer_jax.models.zoo import T5_1_0, T5_1_1
from synthesizer_jax.optimizers import Adafactor, InverseSquareRoot
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

STEPS = 2**19
INPUTS, TARGETS = 512, 114
"""The numbers of tokens in the inputs and targets of a row, including sentinels and EOS."""
LAPTOP = Size(d_model=256, layers=2, d_ff=512, heads=4, head_dim=64)
"""The size of a T5 that can be pre-trained on two CPU cores."""


def default() -> Experiment:
    """Pre-trains T5 1.1 base on C4."""
    return t5_1_1_base()


def t5_1_0_base() -> Experiment:
    """Pre-trains T5 1.0 base, with ungated feed-forward layers and tied embeddings, on C4."""
    return _pretrain(t5(T5_1_0["base"], gated=False, dtype="auto", scan=True))


def t5_1_1_base() -> Experiment:
    """Pre-trains T5 1.1 base on C4."""
    return _pretrain(_synthesizer("v"))


def rv_base() -> Experiment:
    """Pre-trains a Random + Vanilla Synthesizer with the size of T5 1.1 base on C4."""
    return _pretrain(_synthesizer("rv"))


def laptop() -> Experiment:
    """Pre-trains a T5 1.1 with 2 + 2 layers and d_model 256 on WikiText-2."""
    return _laptop("v")


def rv_laptop() -> Experiment:
    """Pre-trains a small Random + Vanilla Synthesizer with the sizes of `laptop` on WikiText-2."""
    return _laptop("rv")


def _synthesizer(variant: str) -> EncoderDecoder:
    """Returns a T5 1.1 base whose self-attention is a variant, such as ``rv``."""
    size = T5_1_1["base"]
    self_attention = alignment(variant, head_dim=size.head_dim)
    return t5(size, encoder=self_attention, dtype="auto", scan=True)


def _laptop(variant: str) -> Experiment:
    """Returns an experiment that pre-trains a small model with a variant, such as ``rv``."""
    self_attention = alignment(variant, head_dim=LAPTOP.head_dim, max_length=128)
    return Experiment(
        model=t5(LAPTOP, encoder=self_attention, dtype="auto"),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig(
            "wikitext_2_raw_v1_full_lm",
            inputs_length=128,
            targets_length=32,
            batch_size=32,
            shards=1,
            objective=OBJECTIVES["span_3_15_u_u"],
        ),
        training=Training(
            steps=1000,
            optimizer=Adafactor(learning_rate=InverseSquareRoot(0.1, warmup_steps=100)),
            save_every=250,
        ),
        evaluation=Evaluation(every=250),
    )


def _pretrain(model: EncoderDecoder) -> Experiment:
    """Returns an experiment that pre-trains a model on C4 with the settings of T5."""
    return Experiment(
        model=model,
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("c4_v220_span_corruption", INPUTS, TARGETS, batch_size=128),
        training=Training(steps=STEPS, optimizer=Adafactor(), save_every=5000),
        evaluation=Evaluation(every=20_000, max_examples=4096),
    )
