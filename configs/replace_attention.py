"""Replace the attention in the encoder of a trained translation model by distillation.

Command (the teacher is a run of a recipe in `translate`):

    synthesizer-jax distill replace_attention:alr --teacher runs/vanilla --workdir runs/alr \\
        --data-dir DATA

Hardware and time: one or two minutes on two CPU cores. Only the replacements are trained, with the
teacher's activations as targets; the result is a run that `eval` and `generate` can load.
"""

from __future__ import annotations

from synthesizer_jax.recipes.translate import LENGTH, SIZE

from synthesizer_jax.alignments import Random
from synthesizer_jax.distillation.distill import Distillation
from synthesizer_jax.distillation.replacement import Replacement
from synthesizer_jax.mixers import SentenceFeedForward, TokenFeedForward
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.training.experiment import Training

STEPS = 1500
HIDDEN = 256


def default() -> Distillation:
    """A feed-forward network over the sentence instead of every self-attention (ALR)."""
    return alr()


def alr() -> Distillation:
    """Attention layer replacement: the network replaces the heads, not the output projection."""
    network = SentenceFeedForward(LENGTH, HIDDEN, SIZE.heads, SIZE.head_dim)
    return _distill(Replacement(network))


def alrr() -> Distillation:
    """The network replaces norm, attention and residual connection."""
    return _distill(Replacement(SentenceFeedForward(LENGTH, HIDDEN), scope="sublayer"))


def elr() -> Distillation:
    """The network replaces the whole encoder layer."""
    return _distill(Replacement(SentenceFeedForward(LENGTH, HIDDEN), scope="layer"))


def token() -> Distillation:
    """A network on every token separately: the baseline without mixing."""
    return _distill(Replacement(TokenFeedForward(HIDDEN, SIZE.heads, SIZE.head_dim)))


def random() -> Distillation:
    """Random Synthesizer heads, with value projections initialized from the teacher."""
    return _distill(Replacement(Random(max_length=LENGTH)))


def _distill(*replacements: Replacement) -> Distillation:
    schedule = Cosine(1e-3, total_steps=STEPS, warmup_steps=STEPS // 20)
    training = Training(
        steps=STEPS, optimizer=AdamW(learning_rate=schedule), log_every=50, save_every=STEPS
    )
    return Distillation(replacements, training)
