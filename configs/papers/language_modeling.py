"""Language models of one stack: Tay et al. 2021, table of LM1B; Bhojanapalli et al. 2020, figures of LM1B.

    synthesizer-jax data import wikitext --from WIKITEXT_FILES --data-dir DATA
    synthesizer-jax train papers.language_modeling:wikitext:rv --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spiece.model

Hardware and time: `wikitext` takes some minutes on two CPU cores. Rows hold 256 tokens of the texts one
after another, each with EOS at its end; held-out texts are evaluated in windows of 256 tokens: perplexity
per token and per word, bits per byte.
"""

from __future__ import annotations

from synthesizer_jax.recipes.papers import small_training

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Size
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.training.experiment import Evaluation, Experiment

LENGTH = 256
SMALL = Size(d_model=256, layers=4, d_ff=512, heads=4, head_dim=64)
PUBLISHED = Size(d_model=512, layers=6, d_ff=2048, heads=8, head_dim=64)


def default() -> Experiment:
    """R+V on WikiText-2."""
    return wikitext("rv")


def wikitext(system: str) -> Experiment:
    """WikiText-2, four layers of d 256."""
    return _model(system, SMALL, "wikitext_2_raw_v1_full_lm")


def heads(head_dim: str, number: str = "4") -> Experiment:
    """WikiText-2 with heads of a free size at equal width (Bhojanapalli et al. 2020)."""
    size = Size(SMALL.d_model, SMALL.layers, SMALL.d_ff, int(number), int(head_dim))
    return _model("v", size, "wikitext_2_raw_v1_full_lm")


def lm1b(system: str) -> Experiment:
    """The One Billion Word Benchmark, six layers of d 512."""
    return _model(system, PUBLISHED, "lm1b_v100_full_lm")


def _model(system: str, size: Size, task: str) -> Experiment:
    model = language_model(system, size, max_length=LENGTH)
    return Experiment(
        model=model.copy(decoder=model.decoder.copy(dropout_rate=0.1)),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig(
            task,
            inputs_length=0,
            targets_length=LENGTH,
            batch_size=32,
            shards=1,
            objective=OBJECTIVES["full_lm"],
        ),
        training=small_training(2000),
        evaluation=Evaluation(every=500),
    )
