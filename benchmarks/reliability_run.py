"""Defines a recipe that starts quickly, for `reliability.py` and the multi-process tests."""

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training


def default() -> Experiment:
    """Trains Random + Vanilla on a sentiment task, with batches of 16 examples in 8 shards."""
    self_attention = alignment("rv", head_dim=8, max_length=32)
    return Experiment(
        model=t5(Size(16, 2, 32, 2, 8), encoder=self_attention, vocab_size=384, dropout_rate=0.1),
        data=DataConfig("synthetic_sst2", 32, 8, batch_size=16),
        training=Training(
            steps=6,
            optimizer=AdamW(learning_rate=Constant(1e-3)),
            log_every=1,
            save_every=5,
        ),
        evaluation=Evaluation(method="rank", max_examples=16, batch_size=16),
        vocabulary=Bytes(),
        mesh=MeshShape(fsdp=2),
    )
