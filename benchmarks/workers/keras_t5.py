"""A worker of `peers.py` that times training steps of keras-hub's T5 on JAX.

In keras-hub, the output projection is part of the backbone's embedding layer.
"""

import os
import time

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import keras_hub
import numpy as np
import racing

VOCAB_SIZE = 32128
options = racing.options()
rows, lengths = options["batch"], (options["inputs"], options["targets"])
keras.utils.set_random_seed(0)
backbone = keras_hub.models.T5Backbone(
    vocabulary_size=VOCAB_SIZE,
    num_layers=options["layers"],
    num_heads=options["heads"],
    hidden_dim=options["d_model"],
    intermediate_dim=options["d_ff"],
    key_value_dim=options["head_dim"],
    dropout=options["dropout"],
    activation="gelu",
    use_gated_activation=True,
    tie_embedding_weights=False,
    dtype=options["dtype"],
)
logits = backbone.token_embedding(backbone.output["decoder_sequence_output"], reverse=True)
model = keras.Model(backbone.input, logits)
model.compile(
    optimizer=keras.optimizers.AdamW(1e-3, weight_decay=0.0),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
inputs, targets = (
    np.random.default_rng(0).integers(2, 32000, (rows, n)).astype(np.int32) for n in lengths
)
batch = {
    "encoder_token_ids": inputs,
    "encoder_padding_mask": np.ones_like(inputs),
    "decoder_token_ids": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
    "decoder_padding_mask": np.ones_like(targets),
}
began = time.perf_counter()
model.train_on_batch(batch, targets)
compiled = time.perf_counter() - began


def step() -> dict[str, float]:
    """Makes a training step and reads its loss."""
    began = time.perf_counter()
    loss = float(model.train_on_batch(batch, targets))
    return {"loss": loss, "seconds": time.perf_counter() - began}


versions = f"keras-hub {keras_hub.__version__}, keras {keras.__version__}, jax {jax.__version__}"
racing.serve(
    {"parameters": model.count_params(), "versions": versions, "compile_seconds": compiled}, step
)
