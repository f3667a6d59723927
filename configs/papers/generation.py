"""Generate summaries and dialogue, as Tay et al. 2021 do for CNN/DailyMail and PersonaChat.

These commands import CNN/DailyMail and train a model on it:

    synthesizer-jax data import cnn_dailymail --from CNN_DAILYMAIL_FILES --data-dir DATA
    synthesizer-jax train papers.generation:cnn_dailymail:dv --workdir runs/dv --data-dir DATA \\
        --set vocabulary.path=spm.model

The model has the size of Tensor2Tensor's base model. The model is trained with AdamW and a cosine
schedule, and evaluated by greedy decoding.

Hardware: eight accelerators. A smaller model runs on two CPU cores. To choose the smaller model,
write ``small`` at the end of the recipe's name, as in ``papers.generation:personachat:d:small``.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from synthesizer_jax.recipes.papers import small_training, transformer, translation

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.training.experiment import Evaluation, Experiment

Scale: TypeAlias = Literal["base", "small"]


def default() -> Experiment:
    """Trains D+V on CNN/DailyMail."""
    return cnn_dailymail("dv")


def cnn_dailymail(system: str, scale: Scale = "base") -> Experiment:
    """Trains a model to write the highlights of news articles."""
    return _generate(system, scale, "cnn_dailymail_v002", (512, 128))


def personachat(system: str, scale: Scale = "base") -> Experiment:
    """Trains a model to write the next utterance of a conversation.

    As in Tensor2Tensor, the inputs do not contain the personas of the speakers.
    """
    return _generate(system, scale, "convai2_none_original", (256, 32))


def _generate(system: str, scale: Scale, task: str, lengths: tuple[int, int]) -> Experiment:
    """Returns an experiment for a system, a task, and the given lengths of inputs and targets."""
    size = {"base": translation.BASE, "small": translation.SIZE}[scale]
    steps, rows = (250_000, 128) if scale == "base" else (1000, 32)
    vocab_size = 32_768 if scale == "base" else 4096
    model = transformer(system, size, max(lengths), vocab_size=vocab_size, dropout=0.1)
    return Experiment(
        model=model,
        vocabulary=SentencePiece("spm.model", extra_ids=0),
        data=DataConfig(task, *lengths, batch_size=rows, shards=1),
        training=small_training(steps, label_smoothing=0.1),
        evaluation=Evaluation(method="greedy"),
    )
