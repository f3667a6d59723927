"""Replace the attention of a trained translation model's encoder, by distillation.

Command (the teacher is a run of the recipe `translate`):

    synthesizer-jax distill replace_attention:alr --teacher runs/vanilla --workdir runs/alr \\
        --data-dir DATA

Hardware and time: two CPU cores, a minute or two. Only the replacements are trained, on the teacher's
activations; the result is an ordinary run that `eval` and `generate` load.
"""

from __future__ import annotations

from synthesizer_jax.recipes.translate import LENGTH, SIZE

from synthesizer_jax.alignments import Random
from synthesizer_jax.mixers import SentenceFeedForward, TokenFeedForward
from synthesizer_jax.training.distillation import Distillation
from synthesizer_jax.training.experiment import Training
from synthesizer_jax.training.optimizers import AdamW
from synthesizer_jax.training.replacement import Replacement
from synthesizer_jax.training.schedules import Cosine

STEPS = 1500
HIDDEN = 256


def default() -> Distillation:
    """A feed-forward network over the sentence for every attention (ALR)."""
    return alr()


def alr() -> Distillation:
    """Attention layer replacement: the network makes the heads, the output projection stays."""
    network = SentenceFeedForward(LENGTH, HIDDEN, SIZE.heads, SIZE.head_dim)
    return _distill(Replacement(network))


def alrr() -> Distillation:
    """The network stands for norm, attention and residual."""
    return _distill(Replacement(SentenceFeedForward(LENGTH, HIDDEN), scope="sublayer"))


def elr() -> Distillation:
    """The network stands for the whole encoder layer."""
    return _distill(Replacement(SentenceFeedForward(LENGTH, HIDDEN), scope="layer"))


def token() -> Distillation:
    """The same kind of network on every token by itself: what is left without mixing."""
    return _distill(Replacement(TokenFeedForward(HIDDEN, SIZE.heads, SIZE.head_dim)))


def random() -> Distillation:
    """Random Synthesizer heads with the teacher's values to start from."""
    return _distill(Replacement(Random(max_length=LENGTH)))


def _distill(*replacements: Replacement) -> Distillation:
    schedule = Cosine(1e-3, total_steps=STEPS, warmup_steps=STEPS // 20)
    training = Training(
        steps=STEPS, optimizer=AdamW(learning_rate=schedule), log_every=50, save_every=STEPS
    )
    return Distillation(replacements, training)
