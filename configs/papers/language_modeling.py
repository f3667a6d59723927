"""Train decoder-only language models, as two papers do on LM1B.

The papers are Tay et al. 2021 (the table for LM1B) and Bhojanapalli et al. 2020 (the figures for
LM1B).

These commands import WikiText-2 and train a model on it:

    synthesizer-jax data import wikitext/wikitext-2-raw-v1 --data-dir DATA \\
        --from train=wiki.train.raw,validation=wiki.valid.raw,test=wiki.test.raw
    synthesizer-jax train papers.language_modeling:wikitext:rv --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spiece.model

The language models are decoders with the blocks of T5 1.1. A language model has T5's relative bias,
unless its self-attention does not compute logits. The papers used Tensor2Tensor's decoder, which
has sinusoidal positions. The recipe `wikitext` can use sinusoidal positions instead of the relative
bias.

For training, all texts are joined, with EOS at the end of each text, and cut into rows of 256
tokens. Held-out texts are evaluated in windows of 256 tokens. The metrics are perplexity per token,
perplexity per word, and bits per byte.

Hardware and time: `wikitext` takes some minutes on two CPU cores.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from synthesizer_jax.recipes.papers import (
    SCALED,
    Dot,
    dot_product_of,
    self_attentions,
    small_training,
)

from synthesizer_jax.alignments import Alignment
from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import Length
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Encoder, LanguageModel, Size
from synthesizer_jax.models.layers import SinusoidalPositions
from synthesizer_jax.models.published import bert
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.optimizers import AdamW, Linear
from synthesizer_jax.training.experiment import Evaluation, Experiment

Positions: TypeAlias = Literal["relative", "sinusoidal"]

LENGTH = 256
VOCAB_SIZE = 32_128
WIKITEXT = "wikitext_2_raw_v1_full_lm"
SMALL = Size(d_model=256, layers=4, d_ff=512, heads=4, head_dim=64)
PUBLISHED = Size(d_model=512, layers=6, d_ff=2048, heads=8, head_dim=64)


def default() -> Experiment:
    """Trains R+V on WikiText-2."""
    return wikitext("rv")


def wikitext(system: str, dot: Dot = "scaled", positions: Positions = "relative") -> Experiment:
    """Trains a language model with four layers and d_model 256 on WikiText-2.

    Args:
      system: one of `papers.SELF_ATTENTIONS`.
      dot: ``scaled`` for the dot product divided by √d_k, or ``t5`` for T5's dot product.
      positions: ``relative`` for T5's relative bias, or ``sinusoidal`` for the sinusoids of
        Tensor2Tensor's models.
    """
    model = _model(system, SMALL, dot_product_of(dot, SMALL))
    if positions == "sinusoidal":
        model = model.copy(decoder=model.decoder.copy(bias=None, positions=SinusoidalPositions()))
    return _train(model, WIKITEXT)


def heads(head_dim: Length, number: Length = 4) -> Experiment:
    """Trains on WikiText-2 with attention heads of any width (Bhojanapalli et al. 2020).

    The product of the number of heads and their width need not be d_model.
    """
    return _train(_model("v", _with_heads(number, head_dim)), WIKITEXT)


def talking_heads(head_dim: Length, number: Length) -> Experiment:
    """Trains on WikiText-2 with talking heads of any width and number (Shazeer et al. 2020)."""
    return _train(_model("heads", _with_heads(number, head_dim)), WIKITEXT)


def masked(head_dim: Length, number: Length = 4) -> Experiment:
    """Trains BERT as a masked language model on WikiText-2, with heads of any width.

    The product of the number of heads and their width need not be d_model (Bhojanapalli et al.
    2020).
    """
    model = bert(SMALL.d_model, number, head_dim, layers=SMALL.layers, dropout_rate=0.1)
    model = model.copy(vocab_size=VOCAB_SIZE, pooler=False)
    experiment = _train(model, WIKITEXT, objective="masked_lm", inputs=LENGTH)
    schedule = Linear(1e-4, total_steps=2000, warmup_steps=200)
    optimizer = AdamW(schedule, weight_decay=0.01)
    return replace(experiment, training=replace(experiment.training, optimizer=optimizer))


def lm1b(system: str) -> Experiment:
    """Trains a language model with six layers and d_model 512 on the One Billion Word Benchmark.

    The model is trained for 2,000 steps. The published models are trained for 300,000 steps.
    """
    return _train(_model(system, PUBLISHED), "lm1b_v100_full_lm")


def _with_heads(number: int, head_dim: int) -> Size:
    """Returns the size `SMALL` with a given number and width of heads."""
    return Size(SMALL.d_model, SMALL.layers, SMALL.d_ff, number, head_dim)


def _model(system: str, size: Size, dot: Alignment = SCALED) -> LanguageModel:
    """Returns a language model with the self-attention of a system."""
    model = language_model("v", size)
    _, mixer = self_attentions(system, size, LENGTH, dot=dot, dropout=0.1)
    (run,) = model.decoder.runs
    block = run.block.copy(self_mixer=mixer, dropout_rate=0.1)
    # The relative bias is added to attention logits. Leave it out if the mixer, such as a
    # convolution, has no logits.
    bias = None if mixer.bias_heads is None else model.decoder.bias
    decoder = model.decoder.copy(runs=(replace(run, block=block),), bias=bias, dropout_rate=0.1)
    return model.copy(decoder=decoder, vocab_size=VOCAB_SIZE)


def _train(
    model: LanguageModel | Encoder, task: str, *, objective: str = "full_lm", inputs: int = 0
) -> Experiment:
    """Returns an experiment that trains a model on the texts of a task.

    Each row has `inputs` tokens of input.
    """
    return Experiment(
        model=model.copy(dtype="auto"),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig(
            task,
            inputs_length=inputs,
            targets_length=LENGTH,
            batch_size=32,
            shards=1,
            objective=OBJECTIVES[objective],
        ),
        training=small_training(2000),
        evaluation=Evaluation(every=500),
    )
