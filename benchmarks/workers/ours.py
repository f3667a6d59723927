"""A worker of `peers.py` that times training steps or decoding of this package's models."""

import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np
import racing

from synthesizer_jax.alignments import Gaussian
from synthesizer_jax.costs.summary import num_elements, summarize
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.inference import decode
from synthesizer_jax.models import Size, t5, zoo
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.training.experiment import Experiment, Training
from synthesizer_jax.training.trainer import Trainer

options = racing.options()
size = Size(*(options[k] for k in ("d_model", "layers", "d_ff", "heads", "head_dim")))
rows, length = options["batch"], options["inputs"]
num_targets = options["new_tokens"] if options["decode"] else options["targets"]
if options["system"] == "hc_sa":  # You et al. 2020
    alignments = {"encoder": Gaussian(offsets=(-1, 1)), "decoder": Gaussian(offsets=(-1, 0))}
else:
    make = functools.partial(zoo.alignment, options["system"], head_dim=size.head_dim)
    alignments = {"encoder": make(max_length=length), "decoder": make(max_length=num_targets)}
model = t5(
    size,
    **alignments,
    dropout_rate=0.0 if options["decode"] else options["dropout"],
    scan=options["scan"],
    remat=options["remat"],
    dtype=options["dtype"],
)
inputs, targets = (
    np.random.default_rng(0).integers(2, 32000, (rows, n)).astype(np.int32)
    for n in (length, num_targets)
)
facts: dict[str, Any] = {"versions": f"jax {jax.__version__}"}
began = time.perf_counter()

if options["decode"]:
    variables = jax.jit(model.init)(jax.random.key(0), inputs[:1, :8], inputs[:1, :8])
    # Set the logit of EOS to zero, so that EOS is never the most probable token.
    kernel = variables["params"]["logits_kernel"]
    variables["params"]["logits_kernel"] = kernel.at[:, 1].set(0.0)
    parameters = variables["params"]
    summary = summarize(model, inputs_length=length, targets_length=num_targets)
    facts["cache_bytes"] = summary.cache_bytes_per_token
else:
    training = Training(steps=1, optimizer=AdamW(Constant(1e-3), weight_decay=0.0), z_loss=0.0)
    training = dataclasses.replace(training, micro_batches=options.get("micro_batches", 1))
    data = DataConfig("none", length, num_targets, rows, shards=1)
    trainer = Trainer(Experiment(model=model, data=data, training=training))
    batch = trainer.shard_batch(
        {
            "encoder_input_tokens": inputs,
            "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": np.ones(targets.shape, np.float32),
        }
    )
    trainer.compile()
    facts["compile_seconds"] = time.perf_counter() - began
    facts["flops"] = trainer.step_flops()
    facts["utilization"] = trainer.measure_utilization()["product_utilization"]
    state = trainer.init()
    parameters = state.params


def device_peak() -> dict[str, float]:
    """Returns the peak of the device's memory, if the device reports it."""
    statistics = jax.devices()[0].memory_stats()
    if not statistics:
        return {}
    return {"device_gb": statistics["peak_bytes_in_use"] / 1e9}


def run() -> dict[str, float]:
    """Makes a training step and reads its loss, or decodes a batch."""
    global state
    began = time.perf_counter()
    if not options["decode"]:
        state, metrics = trainer.step(state, batch)
        loss = float(metrics["loss"])  # reading the loss waits for the step
        return {"loss": loss, "seconds": time.perf_counter() - began, **device_peak()}
    found = decode(variables, inputs, model=model, max_length=num_targets, beams=options["beams"])
    decoded = np.asarray(found.tokens)
    seconds = time.perf_counter() - began
    assert (decoded != 0).all(), "a sequence ended early"
    speed = rows * num_targets / seconds
    return {"seconds": seconds, "tokens_per_second": speed, **device_peak()}


if options["decode"]:
    facts["compile_seconds"] = run()["seconds"]  # compiles on the first batch
racing.serve({"parameters": num_elements(parameters), **facts}, run)
