"""Times the training steps and the decoding of a recipe's model."""

from __future__ import annotations

import time

import jax
import numpy as np

from benchmarks.ledger.tables import Run
from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.data.batch import assemble_batch
from synthesizer_jax.data.examples import DrawnExample
from synthesizer_jax.inference import decode
from synthesizer_jax.training.trainer import Trainer


class Timer:
    """A compiled training step and decoder, which are timed on random tokens without padding.

    Attributes:
      memory_mb: the memory that the compiled step needs, including parameters and optimizer state.
    """

    def __init__(self, run: Run):
        experiment = load_recipe(run.recipe)
        trainer = Trainer(experiment, jax.devices()[:1])
        data = experiment.data
        tokens = np.random.default_rng(0).integers(3, 60, data.inputs_length + data.targets_length)
        inputs, targets = np.split(tokens.astype(np.int32), [data.inputs_length])
        row = [DrawnExample(inputs, targets % 2 if data.classes else targets, 0, 0)]
        batch = assemble_batch([row] * data.batch_size, data)
        self._batch = trainer.shard_batch(batch)
        self._inputs, self._targets_length = batch["encoder_input_tokens"], data.targets_length
        self._state = trainer.init()
        self._trainer = trainer
        self.step()
        memory = trainer.compile().memory_analysis()
        # On CPUs, `peak_memory_in_bytes` does not include temporary arrays.
        needed = (
            memory.argument_size_in_bytes
            + memory.temp_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
        )
        self.memory_mb = needed / 1e6

    def step(self) -> float:
        """Makes a training step, and returns its time in seconds."""
        begin = time.perf_counter()
        self._state, metrics = self._trainer.step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - begin

    def decode(self) -> float:
        """Decodes the inputs greedily to the full length, and returns the time in seconds."""
        params = self._state.params
        if "logits_kernel" in params:
            # Set the logit of EOS to zero, so that EOS is never the most probable token.
            params = params | {"logits_kernel": params["logits_kernel"].at[:, 1].set(0.0)}
        variables = {"params": params, "constants": self._state.constants}
        begin = time.perf_counter()
        model, length = self._trainer.model, self._targets_length
        tokens = np.asarray(decode(variables, self._inputs, model=model, max_length=length).tokens)
        assert (tokens != 0).all(), "a sequence ended early"
        return time.perf_counter() - begin
