"""Classify texts with an encoder, as Tay et al. 2021 do to compare Synthesizers with Linformer.

These commands import AG News, train a vocabulary on it, and train a model:

    synthesizer-jax data import ag_news_subset --from AG_NEWS_FILES --data-dir DATA \\
        --columns label,title,description --labels 1=World,2=Sports,3=Business,4=Sci/Tech
    synthesizer-jax data vocabulary ag_news_v100 --output spm.model --size 8000 --data-dir DATA
    synthesizer-jax train papers.classification:ag_news:frv --workdir runs/frv --data-dir DATA \\
        --set vocabulary.path=spm.model

Hardware and time: training makes about one pass over AG News, which takes less than an hour on two
CPU cores. To classify your own texts, set `data.mixture` to your task and `data.classes` to its
label words.
"""

from __future__ import annotations

from synthesizer_jax.recipes.papers import self_attentions, small_training

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Encoder, Size, t5
from synthesizer_jax.models.layers import SinusoidalPositions
from synthesizer_jax.primitives.initializers import Normal
from synthesizer_jax.training.experiment import Evaluation, Experiment

SIZE = Size(d_model=128, layers=2, d_ff=512, heads=4, head_dim=32)
DROPOUT = 0.1


def default() -> Experiment:
    """Trains FR+V to classify AG News."""
    return ag_news("frv")


def ag_news(system: str) -> Experiment:
    """Classifies news texts by topic."""
    return _classify(system, "ag_news_v100", ("World", "Sports", "Business", "Sci/Tech"), 128)


def imdb(system: str) -> Experiment:
    """Classifies film reviews as positive or negative."""
    return _classify(system, "imdb_reviews_v100", ("negative", "positive"), 512)


def _classify(system: str, task: str, classes: tuple[str, ...], length: int) -> Experiment:
    """Returns an experiment that trains a classifier.

    Args:
      system: one of `papers.SELF_ATTENTIONS`.
      task: the task.
      classes: the label words of the task.
      length: the maximum number of tokens of a text.
    """
    mixer, _ = self_attentions(system, SIZE, length, dropout=DROPOUT)
    whole = t5(
        SIZE,
        gated=False,
        encoder=mixer,
        relative_bias=False,
        positions=SinusoidalPositions(),
        dropout_rate=DROPOUT,
    )
    return Experiment(
        model=Encoder(
            vocab_size=8192,
            d_model=SIZE.d_model,
            encoder=whole.encoder,
            outputs=len(classes),
            dtype="auto",
            embedding_init=Normal(SIZE.d_model**-0.5),
            embedding_scale=SIZE.d_model**0.5,
        ),
        vocabulary=SentencePiece("spm.model", extra_ids=0),
        data=DataConfig(
            task,
            length,
            targets_length=1,
            batch_size=64,
            shards=1,
            buckets=((length // 2, 1),),
            classes=classes,
        ),
        training=small_training(2000),
        evaluation=Evaluation(batch_size=128, split="test"),
    )
