"""An experiment laid over a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.sharding import batch_sharding, check_batch, make_mesh, partitioned
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.state import TrainState, example_tokens, init_state, make_layout
from synthesizer_jax.training.step import Batch, Metrics, make_train_step
from synthesizer_jax.training.utilisation import product_rate, step_flops


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
        self.model = partitioned(experiment.model, self.mesh)
        self.tokens = example_tokens(data.inputs_length, data.targets_length)
        # Planned and made with the model as it is: a partitioned one takes no batch of one.
        self.optimizer, self.layout = make_layout(
            experiment.model, training.optimizer, tokens=self.tokens, mesh=self.mesh
        )
        self._jitted = jax.jit(
            self.make_step(),
            donate_argnums=0,
            out_shardings=(self.layout.shardings, None),
            compiler_options=compiler_options(self.mesh),
        )
        self._compiled: Callable[..., tuple[TrainState, Metrics]] | None = None
        self._key = jax.random.key(training.seed)

    def make_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """The function to compile: state, batch, key and what `arguments` holds."""
        data, training = self.experiment.data, self.experiment.training
        return make_train_step(
            self.model,
            self.optimizer,
            z_loss=training.z_loss,
            label_smoothing=training.label_smoothing,
            loss_normalizer=training.loss_normalizer,
            micro_batches=training.micro_batches,
            max_segments=data.segments_per_row if data.pack else None,
        )

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What a step takes besides state, batch and key."""
        return ()

    def step_flops(self) -> float | None:
        """What a step computes, for MFU; None: not known."""
        data = self.experiment.data
        return step_flops(
            self.experiment.model,
            batch_size=data.batch_size,
            inputs=data.inputs_length,
            targets=data.targets_length,
        )

    def measure_utilisation(self) -> float | None:
        """MFU of a run that does one step a second; None: what a step computes is not known."""
        flops = self.step_flops()
        if flops is None:
            return None
        platform = self.mesh.devices.flat[0].platform
        rate = product_rate(platform, jnp.dtype(self.experiment.model.dtype))
        return flops / (rate * self.mesh.size)

    def init(self) -> TrainState:
        """Fresh parameters."""
        return init_state(
            self.experiment.model,
            self.optimizer,
            self.layout,
            seed=self.experiment.training.seed,
            tokens=self.tokens,
        )

    def put(self, batch: dict[str, np.ndarray]) -> Batch:
        """A host batch, spread over the mesh."""
        return jax.device_put(batch, batch_sharding(self.mesh))

    def trace(self) -> jax.stages.Traced:
        """The step for this experiment's shapes, to lower and compile; allocates nothing."""
        batch = abstract_batch(self.experiment.data, batch_sharding(self.mesh))
        return self._jitted.trace(self.layout.abstract, batch, self._key, *self.arguments)

    def compile(self) -> None:
        """Compiles the step; nothing is fetched or changed."""
        self._compiled = self.trace().lower().compile()

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step; the old state's buffers are reused."""
        if self._compiled is None:
            self.compile()
        assert self._compiled is not None
        return self._compiled(state, batch, self._key, *self.arguments)


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, str] | None:
    """Options for compiling a training step on that mesh.

    XLA's order of operations on CPUs is made for many at a time and keeps weight gradients waiting;
    the order that saves memory needs far less for temporaries and is no slower.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def abstract_batch(
    data: DataConfig, sharding: jax.sharding.Sharding | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a training batch."""
    kinds = {"encoder_input_tokens": data.inputs_length}
    names = ("decoder_input_tokens", "decoder_target_tokens", "decoder_loss_weights")
    kinds |= dict.fromkeys(names, data.targets_length)
    if data.pack:
        for suffix in ("segment_ids", "positions"):
            kinds |= {f"encoder_{suffix}": data.inputs_length}
            kinds |= {f"decoder_{suffix}": data.targets_length}
    return {
        name: jax.ShapeDtypeStruct(
            (data.batch_size, length),
            jnp.float32 if name.endswith("weights") else jnp.int32,
            sharding=sharding,
        )
        for name, length in kinds.items()
    }
