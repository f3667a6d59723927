"""Language models of one stack: Tay et al. 2021, table of LM1B; Bhojanapalli et al. 2020, figures of LM1B.

    synthesizer-jax data import wikitext/wikitext-2-raw-v1 --data-dir DATA \\
        --from train=wiki.train.raw,validation=wiki.valid.raw,test=wiki.test.raw
    synthesizer-jax train papers.language_modeling:wikitext:rv --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spiece.model

The language models have T5 1.1's blocks, and its relative bias wherever there are logits; the papers used
Tensor2Tensor's decoder, whose sinusoids `wikitext` can have instead.

Hardware and time: `wikitext` takes some minutes on two CPU cores. Rows hold 256 tokens of the texts one
after another, each with EOS at its end; held-out texts are evaluated in windows of 256 tokens: perplexity
per token and per word, bits per byte.
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
    """R+V on WikiText-2."""
    return wikitext("rv")


def wikitext(system: str, dot: Dot = "scaled", positions: Positions = "relative") -> Experiment:
    """WikiText-2, four layers of d 256.

    Args:
      system: the kind of attention.
      dot: the dot product over √d, or T5's.
      positions: T5's relative bias, or the sinusoids of Tensor2Tensor's models in its place.
    """
    model = _model(system, SMALL, dot_product_of(dot, SMALL))
    if positions == "sinusoidal":
        model = model.copy(decoder=model.decoder.copy(bias=None, positions=SinusoidalPositions()))
    return _train(model, WIKITEXT)


def heads(head_dim: Length, number: Length = 4) -> Experiment:
    """Dot products of a free head size at equal width on WikiText-2 (Bhojanapalli et al. 2020)."""
    return _train(_model("v", _with_heads(number, head_dim)), WIKITEXT)


def talking_heads(head_dim: Length, number: Length) -> Experiment:
    """Talking heads of a size and number on WikiText-2 (Shazeer et al. 2020)."""
    return _train(_model("heads", _with_heads(number, head_dim)), WIKITEXT)


def masked(head_dim: Length, number: Length = 4) -> Experiment:
    """BERT's masked language model on WikiText-2, with heads of a free size (Bhojanapalli et al. 2020)."""
    model = bert(SMALL.d_model, number, head_dim, layers=SMALL.layers, dropout_rate=0.1)
    model = model.copy(vocab_size=VOCAB_SIZE, pooler=False)
    experiment = _train(model, WIKITEXT, objective="masked_lm", inputs=LENGTH)
    schedule = Linear(1e-4, total_steps=2000, warmup_steps=200)
    optimizer = AdamW(schedule, weight_decay=0.01)
    return replace(experiment, training=replace(experiment.training, optimizer=optimizer))


def lm1b(system: str) -> Experiment:
    """The One Billion Word Benchmark, six layers of d 512; 2,000 steps, where the paper's are 300,000."""
    return _train(_model(system, PUBLISHED), "lm1b_v100_full_lm")


def _with_heads(number: int, head_dim: int) -> Size:
    return Size(SMALL.d_model, SMALL.layers, SMALL.d_ff, number, head_dim)


def _model(system: str, size: Size, dot: Alignment = SCALED) -> LanguageModel:
    model = language_model("v", size)
    _, mixer = self_attentions(system, size, LENGTH, dot=dot, dropout=0.1)
    (run,) = model.decoder.runs
    block = run.block.copy(self_mixer=mixer, dropout_rate=0.1)
    bias = None if mixer.bias_heads is None else model.decoder.bias
    decoder = model.decoder.copy(runs=(replace(run, block=block),), bias=bias, dropout_rate=0.1)
    return model.copy(decoder=decoder, vocab_size=VOCAB_SIZE)


def _train(
    model: LanguageModel | Encoder, task: str, *, objective: str = "full_lm", inputs: int = 0
) -> Experiment:
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
