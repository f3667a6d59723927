"""Training steps of a small T5 on prepared batches, packed or not."""

import pathlib
import time

import racing

options = racing.options()

from synthesizer_jax.data.config import DataConfig  # noqa: E402
from synthesizer_jax.data.vocabularies import SentencePiece  # noqa: E402
from synthesizer_jax.models import t5  # noqa: E402
from synthesizer_jax.models.zoo import T5_1_1  # noqa: E402
from synthesizer_jax.optimizers import Adafactor, Constant  # noqa: E402
from synthesizer_jax.tasks import synthetic  # noqa: E402, F401 (knows the synthetic mixture)
from synthesizer_jax.tasks.streams import open_stream  # noqa: E402
from synthesizer_jax.training.experiment import Experiment, Training  # noqa: E402
from synthesizer_jax.training.trainer import Trainer  # noqa: E402

data = DataConfig(
    options["mixture"],
    options["inputs"],
    options["targets"],
    options["batch"],
    pack=options["pack"],
)
vocabulary = SentencePiece(**options["vocabulary"])
stream = open_stream(data, vocabulary.build(), data_dir=pathlib.Path(options["data_dir"]))
training = Training(steps=1, optimizer=Adafactor(learning_rate=Constant(1e-3)))
trainer = Trainer(
    Experiment(model=t5(T5_1_1[options["size"]], dropout_rate=0.1), data=data, training=training)
)
trainer.compile()
state = trainer.init()


def step() -> dict[str, float]:
    """Some steps, with their batches."""
    global state
    began, tokens = time.perf_counter(), 0.0
    for _ in range(options["steps"]):
        state, metrics = trainer.step(state, trainer.shard_batch(next(stream)))
        tokens += float(metrics["tokens"])
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "tokens_per_second": tokens / seconds}


racing.serve({}, step)
