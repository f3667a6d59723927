"""The training step of a recipe, to be timed in turns with others."""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
from ledger_tables import Run

from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.costs.summary import summarize
from synthesizer_jax.data.batch import assemble_batch
from synthesizer_jax.data.task_streams import DrawnExample
from synthesizer_jax.training.trainer import Trainer


class StepTimer:
    """A compiled training step with a batch of made-up tokens without padding.

    Attributes:
      costs: parameters, operations of a forward pass per token, and the compiled step's peak memory in MB.
    """

    def __init__(self, run: Run, args: argparse.Namespace):
        experiment = load_recipe(run.recipe)
        trainer = Trainer(experiment, jax.devices()[:1])
        data = experiment.data
        tokens = np.random.default_rng(0).integers(3, 60, data.inputs_length + data.targets_length)
        inputs, targets = np.split(tokens.astype(np.int32), [data.inputs_length])
        row = [DrawnExample(inputs, targets % 2 if data.classes else targets, 0, 0)]
        batch = assemble_batch([row] * data.batch_size, data)
        self._batch = trainer.shard_batch(batch)
        self._state = trainer.init()
        self._trainer = trainer
        self.step()
        summary = summarize(
            experiment.model, inputs_length=data.inputs_length, targets_length=data.targets_length
        )
        memory = trainer.trace().lower().compile().memory_analysis()
        self.costs: dict[str, Any] = {
            "parameters": summary.parameters,
            "flops": summary.flops_per_token,
            "peak_mb": round(memory.peak_memory_in_bytes / 1e6, 1),
        }

    def step(self) -> float:
        """Makes a step, and returns its time in seconds."""
        begin = time.perf_counter()
        self._state, metrics = self._trainer.step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - begin
