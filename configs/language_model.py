"""Train language models of one stack on WikiText-2: the dot product, and Synthesizers in its place.

Command (requires T5's vocabulary file, and data from `synthesizer-jax data import wikitext --from DIR`):

    synthesizer-jax train language_model:random_vanilla --workdir runs/rv --data-dir DATA \\
        --set vocabulary.path=spiece.model

Hardware: a CPU suffices. Rows hold 256 tokens of the articles one after another, each with EOS at its end
(`OBJECTIVES["full_lm"]`); there are no inputs. The held-out articles are evaluated in windows of 256
tokens: perplexity per token and per word, bits per byte. `--set data.mixture=TASK` names other texts, such
as an imported task.
"""

from __future__ import annotations

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import Size
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training

SIZE = Size(d_model=256, layers=4, d_ff=512, heads=4, head_dim=64)
STEPS = 2000


def default() -> Experiment:
    """Random + Vanilla (R+V)."""
    return random_vanilla()


def vanilla() -> Experiment:
    """The dot product (V)."""
    return _language_model("v")


def random() -> Experiment:
    """Random Synthesizer (R)."""
    return _language_model("r")


def factorized_random() -> Experiment:
    """Factorized Random Synthesizer (FR)."""
    return _language_model("fr")


def random_vanilla() -> Experiment:
    """Random + Vanilla (R+V)."""
    return _language_model("rv")


def _language_model(variant: str) -> Experiment:
    model = language_model(variant, SIZE)
    return Experiment(
        model=model.copy(decoder=model.decoder.copy(dropout_rate=0.1)),
        vocabulary=SentencePiece("spiece.model"),
        data=DataConfig(
            "wikitext_2_raw_v1_full_lm",
            inputs_length=0,
            targets_length=256,
            batch_size=32,
            shards=1,
            objective=OBJECTIVES["full_lm"],
        ),
        training=Training(
            steps=STEPS,
            optimizer=AdamW(learning_rate=Cosine(1e-3, total_steps=STEPS, warmup_steps=100)),
            save_every=500,
        ),
        evaluation=Evaluation(every=500),
    )
