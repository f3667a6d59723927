"""Training steps of this project's models."""

import time

import jax
import numpy as np
import racing

from synthesizer_jax.costs.summary import num_elements
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.models import Size, t5, zoo
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.training.experiment import Experiment, Training
from synthesizer_jax.training.trainer import Trainer

options = racing.options()
size = Size(*(options[k] for k in ("d_model", "layers", "d_ff", "heads", "head_dim")))
longest = max(options["inputs"], options["targets"])
kind = zoo.alignment(options["variant"], head_dim=size.head_dim, max_length=longest)
model = t5(
    size,
    encoder=kind,
    dropout_rate=options["dropout"],
    scan=options["small"],
    remat="dots" if options["small"] else None,
    dtype=options["dtype"],
)
data = DataConfig("none", options["inputs"], options["targets"], options["batch"], shards=1)
optimizer = AdamW(learning_rate=Constant(1e-3), weight_decay=0.0)
experiment = Experiment(
    model=model, data=data, training=Training(steps=1, optimizer=optimizer, z_loss=0.0)
)
trainer = Trainer(experiment)
rng = np.random.default_rng(0)
inputs, targets = (
    rng.integers(2, 32000, (options["batch"], options[k])).astype(np.int32)
    for k in ("inputs", "targets")
)
batch = trainer.shard_batch(
    {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones(targets.shape, np.float32),
    }
)
began = time.perf_counter()
trainer.compile()
compiling = time.perf_counter() - began
state = trainer.init()


def step() -> dict[str, float]:
    """One step, its loss read at the end."""
    global state
    began = time.perf_counter()
    state, metrics = trainer.step(state, batch)
    loss = float(metrics["loss"])
    return {"loss": loss, "seconds": time.perf_counter() - began}


racing.serve(
    {
        "parameters": num_elements(state.params),
        "versions": f"jax {jax.__version__}",
        "device": jax.devices()[0].device_kind,
        "dropout": "T5's: a draw per feature and per key" if options["dropout"] else "0",
        "flops": trainer.step_flops(),
        "utilization": trainer.measure_utilization()["product_utilization"],
        "compile_seconds": compiling,
    },
    step,
)
