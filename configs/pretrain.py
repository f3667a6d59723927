"""Pre-train a T5 or a Synthesizer on unlabeled text, or on text and T5's supervised tasks together.

Command (requires T5's vocabulary file, and C4 from TFDS or `synthesizer-jax data import c4/en`, which
is prepared first):

    synthesizer-jax data prepare c4_v220_span_corruption --vocabulary spiece.model --data-dir DATA
    synthesizer-jax train pretrain:t5_1_1_base --workdir runs/pretrained --data-dir DATA \\
        --set vocabulary.path=spiece.model

Hardware: see docs/pretrain.md; `laptop` needs two CPU cores and WikiText-2. The settings are T5's
(Raffel et al. 2020, section 3.1): 524,288 steps of 128 rows of 512 tokens (65,536 a batch), Adafactor with
the learning rate 1/√max(step, 10⁴), and spans of a mean of 3 tokens at a density of 15 %, whose targets
take 114 tokens. `--set data.mixture=TASK` names other texts, such as an imported task, and
`--set data.objective=NAME` the objective of texts that have none of their own.
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
"""The numbers of tokens of a row whose spans are corrupted, with sentinels and EOS."""
LAPTOP = Size(d_model=256, layers=2, d_ff=512, heads=4, head_dim=64)


def default() -> Experiment:
    """T5 1.1 base on C4."""
    return t5_1_1_base()


def t5_1_0_base() -> Experiment:
    """T5 1.0 base on C4: one feed-forward projection, tied embeddings."""
    return _pretrain(t5(T5_1_0["base"], gated=False, dtype="auto", scan=True))


def t5_1_1_base() -> Experiment:
    """T5 1.1 base on C4."""
    return _pretrain(_synthesizer("v"))


def rv_base() -> Experiment:
    """The Random + Vanilla Synthesizer of T5 1.1's base size on C4."""
    return _pretrain(_synthesizer("rv"))


def laptop() -> Experiment:
    """T5 1.1 with 2+2 layers and d_model 256 on WikiText-2."""
    return _laptop("v")


def rv_laptop() -> Experiment:
    """The same size with Random + Vanilla."""
    return _laptop("rv")


def _synthesizer(variant: str) -> EncoderDecoder:
    size = T5_1_1["base"]
    self_attention = alignment(variant, head_dim=size.head_dim)
    return t5(size, encoder=self_attention, dtype="auto", scan=True)


def _laptop(variant: str) -> Experiment:
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
    return Experiment(
        model=model,
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig("c4_v220_span_corruption", INPUTS, TARGETS, batch_size=128),
        training=Training(steps=STEPS, optimizer=Adafactor(), save_every=5000),
        evaluation=Evaluation(every=20_000, max_examples=4096),
    )
