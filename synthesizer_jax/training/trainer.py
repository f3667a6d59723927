"""An experiment laid over a mesh."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.costs.utilization import step_flops, utilizations
from synthesizer_jax.data.batch import batch_fields
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.sharding import (
    BatchShards,
    batch_sharding,
    check_batch,
    make_mesh,
    replicated,
    use_mesh,
)
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.state import TrainState, init_state, make_layout
from synthesizer_jax.training.step import Batch, Metrics, make_train_step


class Trainer:
    """The compiled step of an experiment and its state's layout.

    Args:
      experiment: what to train.
      devices: None uses all devices.
    """

    def __init__(self, experiment: Experiment, devices: list[jax.Device] | None = None):
        data, training = experiment.data, experiment.training
        self.experiment = experiment
        self.mesh = make_mesh(experiment.mesh, devices)
        check_batch(data.batch_size, self.mesh, micro_batches=training.micro_batches)
        self.model = experiment.model
        self.example = experiment.example
        self.optimizer, self.layout = make_layout(
            experiment.model,
            training.optimizer,
            tokens=self.example,
            mesh=self.mesh,
            rules=self.rules,
            ema=training.ema is not None,
        )
        # XLA's default order on CPUs favors parallelism and keeps weight gradients alive for long; the
        # order that saves memory needs far less for temporaries and is no slower.
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
        self._jitted = jax.jit(
            self.make_step(),
            donate_argnums=0,
            out_shardings=(self.layout.shardings, None),
            compiler_options=options if on_cpu else None,
        )
        self._largest = jax.jit(
            lambda numbers, _: numbers.max(), out_shardings=replicated(self.mesh), keep_unused=True
        )
        self._rows = BatchShards(data.batch_size, data.shards, batch_sharding(self.mesh))
        self._compiled: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._key = jax.random.key(training.seed)

    def make_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """The function to compile: state, batch, key and what `arguments` holds."""
        data = self.experiment.data
        return make_train_step(
            self.model,
            self.optimizer,
            self.experiment.training,
            max_segments=data.segments_per_row if data.pack else None,
        )

    @property
    def rules(self) -> tuple[OptimizerRule, ...]:
        """How parameters are optimized, by their paths."""
        return self.experiment.training.rules

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """What a step takes besides state, batch and key."""
        return ()

    def step_flops(self) -> float | None:
        """What a step computes; None: not known."""
        data = self.experiment.data
        return step_flops(
            self.experiment.model,
            batch_size=data.batch_size,
            inputs=data.inputs_length,
            targets=data.targets_length,
        )

    def measure_utilization(self) -> dict[str, float]:
        """`utilizations` of a run that does one step a second.

        Empty where its FLOPs are not known, or are not those of every step, as with buckets.
        """
        flops = self.step_flops()
        if flops is None or self.experiment.data.buckets:
            return {}
        return utilizations(flops, self.mesh, self.experiment.model.dtype)

    def init(self) -> TrainState:
        """Fresh parameters."""
        seed = self.experiment.training.seed
        return init_state(self.model, self.optimizer, self.layout, seed=seed, tokens=self.example)

    @property
    def description(self) -> str:
        """The number of parameters, and number and kind of the devices, such as ``8 × TPU v5 lite``."""
        size = sum(x.size for x in jax.tree.leaves(self.layout.abstract.params))
        kinds = sorted({device.device_kind for device in self.mesh.devices.flat})
        return f"{size:,} parameters on {self.mesh.size} × {', '.join(kinds)}"

    @property
    def shards(self) -> list[int]:
        """The data's virtual shards whose rows this process' devices take."""
        return self._rows.shards_of(jax.process_index())

    @property
    def saved_shards(self) -> list[int]:
        """Those of `shards` that no earlier process also reads: their positions it saves."""
        return self._rows.saved_by(jax.process_index())

    def shard_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """A host batch with the rows of `shards`, spread over the mesh."""
        if jax.process_count() == 1:
            return jax.device_put(batch, batch_sharding(self.mesh))
        return {name: self._rows.to_global_array(x) for name, x in batch.items()}

    def max_over_processes(self, number: int, *, after: jax.Array) -> jax.Array:
        """The largest of the processes' int32 numbers, compared when a step has made the array `after`."""
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        own = np.full(self.mesh.size, number, np.int32)
        numbers = jax.make_array_from_callback(own.shape, sharding, lambda where: own[where])
        return self._largest(numbers, after)

    def trace(self, lengths: tuple[int, int] | None = None) -> jax.stages.Traced:
        """The step for a bucket's lengths of inputs and targets, or the full ones; allocates nothing."""
        batch = abstract_batch(self.experiment.data, batch_sharding(self.mesh), lengths=lengths)
        with use_mesh(self.mesh):
            return self._jitted.trace(self.layout.abstract, batch, self._key, *self.arguments)

    def compile(self, batch: Batch | None = None) -> jax.stages.Compiled:
        """Returns the step compiled, once, for a batch's shape; None: for the full lengths."""
        lengths = self.experiment.data.shapes[-1] if batch is None else _lengths(batch)
        if lengths not in self._compiled:
            self._compiled[lengths] = self.trace(lengths).lower().compile()
        return self._compiled[lengths]

    @property
    def num_compiled(self) -> int:
        """Number of shapes of batches for which the step has been compiled."""
        return len(self._compiled)

    def is_compiled(self, batch: Batch) -> bool:
        """Returns whether the step has been compiled for a batch's shape."""
        return _lengths(batch) in self._compiled

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step; the old state's buffers are reused. The first one of a shape compiles it."""
        return self.compile(batch)(state, batch, self._key, *self.arguments)


def _lengths(batch: Batch) -> tuple[int, int]:
    """Returns the lengths of a batch's inputs and targets."""
    return batch["encoder_input_tokens"].shape[1], batch["decoder_target_tokens"].shape[1]


def abstract_batch(
    data: DataConfig,
    sharding: jax.sharding.Sharding | None = None,
    *,
    lengths: tuple[int, int] | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a training batch, with the full lengths or those of a bucket."""
    return {
        name: jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=sharding)
        for name, field in batch_fields(data, lengths=lengths).items()
    }
