"""The trainer: an experiment's state and compiled step, laid out over a mesh of devices."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.placement import with_shardings
from synthesizer_jax.costs.utilization import step_flops, utilizations
from synthesizer_jax.data.batch import batch_fields
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.optimizers import OptimizerRule
from synthesizer_jax.optimizers.adafactor import state_axes
from synthesizer_jax.optimizers.rules import RuledOptimizer, build_optimizer
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.sharding import batch_sharding, check_batch, make_mesh, replicated, use_mesh
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import read_base
from synthesizer_jax.training.random_init import init_arrays
from synthesizer_jax.training.step import Batch, Metrics, TrainState, make_train_step


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes and shardings of a run's state, which are known before any array is allocated.

    Attributes:
      abstract: a `TrainState` whose leaves are `jax.ShapeDtypeStruct` with shardings.
      base: the variables that adapters modify, also as `jax.ShapeDtypeStruct` with shardings.
        Without adapters, `base` is empty.
    """

    abstract: TrainState
    base: Variables

    @property
    def shardings(self) -> TrainState:
        """A `TrainState` whose leaves are `NamedSharding`."""
        return jax.tree.map(lambda x: x.sharding, self.abstract)


def make_layout(
    experiment: Experiment, mesh: Mesh | AbstractMesh, *, rules: Sequence[OptimizerRule]
) -> tuple[RuledOptimizer, Layout]:
    """Builds the optimizer and the layout of the state on a mesh; see `build_optimizer` for errors.

    Args:
      experiment: the experiment.
      mesh: the mesh, which may be abstract.
      rules: the rules that say how parameters are optimized, by their paths.

    Returns:
      The optimizer and the layout.
    """
    trainable = experiment.trainable
    shapes, axes = trainable.abstract()
    optimizer = build_optimizer(
        experiment.training.optimizer,
        rules,
        model=experiment.model,
        params=shapes["params"],
        axes=axes["params"],
    )
    params = with_shardings(shapes["params"], axes["params"], mesh)
    opt_state = jax.eval_shape(optimizer.init, shapes["params"])
    # `state_axes` is defined next to Adafactor, but works for the states of all optimizers.
    opt_axes = state_axes(opt_state, axes["params"], shapes["params"])
    abstract = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh)),
        params=params,
        constants=with_shardings(shapes.get("constants", {}), axes.get("constants", {}), mesh),
        opt_state=with_shardings(opt_state, opt_axes, mesh),
        ema={} if experiment.training.ema is None else params,
    )
    return optimizer, Layout(abstract, base=with_shardings(*trainable.abstract_base(), mesh))


class BatchShards:
    """Assigns the virtual shards of a batch to the processes whose devices hold their examples.

    A batch of B examples has V shards, where V divides B. Shard s holds the examples from s · B/V
    to (s + 1) · B/V − 1. A process loads every shard that contains an example of its devices.
    Several processes may therefore load the same shard.

    Args:
      batch_size: number of examples B of the whole batch.
      shards: number of virtual shards V.
      sharding: the sharding of the batch over the devices.
    """

    def __init__(self, batch_size: int, shards: int, sharding: jax.sharding.Sharding):
        self._batch_size = batch_size
        self._sharding = sharding
        self._shard_size = batch_size // shards
        self._shards_of_process = collections.defaultdict[int, set[int]](set)
        indices: Mapping[jax.Device, PyTree] = sharding.devices_indices_map((batch_size,))
        for device, (rows,) in indices.items():
            shard_of_rows = {row // self._shard_size for row in range(batch_size)[rows]}
            self._shards_of_process[device.process_index] |= shard_of_rows

    def shards_of(self, process: int) -> list[int]:
        """Returns the shards that a process loads, in ascending order."""
        return sorted(self._shards_of_process[process])

    def saved_by(self, process: int) -> list[int]:
        """Returns the shards whose position in the data is saved by a process.

        If several processes load a shard, the process with the lowest index saves the shard's
        position.
        """
        saved_by_lower = {
            s for p, shards in self._shards_of_process.items() if p < process for s in shards
        }
        return sorted(self._shards_of_process[process] - saved_by_lower)

    def to_global_array(self, local: np.ndarray) -> jax.Array:
        """Returns the global batch, made from the examples of this process's shards.

        Args:
          local: ``[n, ...]``, the examples of all shards of this process, in the order of
            `shards_of`.
        """
        slot_of_shard = {s: i for i, s in enumerate(self.shards_of(jax.process_index()))}

        def examples_at(index: PyTree) -> np.ndarray:
            """Returns the local examples at an index of the global batch, for one device."""
            shards, offsets = np.divmod(np.arange(self._batch_size)[index[0]], self._shard_size)
            slots = np.array([slot_of_shard[s] for s in shards.tolist()])
            return local[slots * self._shard_size + offsets]

        shape = (self._batch_size, *local.shape[1:])
        return jax.make_array_from_callback(shape, self._sharding, examples_at)


class Trainer:
    """Holds the optimizer, the layout of the state, and the compiled step of an experiment.

    Args:
      experiment: the experiment to train. A model dtype of ``auto`` is replaced by the default
        dtype of the devices.
      devices: the devices to use. None means all devices.
    """

    def __init__(self, experiment: Experiment, devices: list[jax.Device] | None = None):
        self.mesh = make_mesh(experiment.mesh, devices)
        experiment = experiment.resolved(self.mesh.devices.flat[0].platform)
        self.experiment = experiment
        data, training = experiment.data, experiment.training
        check_batch(data.batch_size, self.mesh, micro_batches=training.micro_batches)
        self.model = experiment.model
        self.example = experiment.example
        self.trainable = experiment.trainable
        self.optimizer, self.layout = make_layout(experiment, self.mesh, rules=self.rules)
        self._base: Variables | None = None
        self._jitted = jax.jit(
            self.make_step(),
            donate_argnums=0,
            out_shardings=(self.layout.shardings, None),
            compiler_options=_compiler_options(self.mesh),
        )
        # `max_over_processes` explains the unused second argument.
        self._largest = jax.jit(
            lambda numbers, _: numbers.max(), out_shardings=replicated(self.mesh), keep_unused=True
        )
        self._batch_shards = BatchShards(data.batch_size, data.shards, batch_sharding(self.mesh))
        self._compiled: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._key = jax.random.key(training.seed)

    def make_step(self) -> Callable[..., tuple[TrainState, Metrics]]:
        """Returns the function to compile, which takes a state, a batch, a key and `arguments`."""
        data = self.experiment.data
        return make_train_step(
            self.trainable,
            self.optimizer,
            self.experiment.training,
            max_segments=data.segments_per_row if data.pack else None,
        )

    @property
    def rules(self) -> tuple[OptimizerRule, ...]:
        """The rules of the optimizer. Trainers of distillation override this property."""
        return self.experiment.training.rules

    @property
    def arguments(self) -> tuple[PyTree, ...]:
        """Arguments of a step besides the state, the batch and the key.

        The only argument is the base of the adapters. Trainers of distillation pass the teacher's
        variables instead.
        """
        return (self.base,)

    @property
    def abstract_arguments(self) -> tuple[PyTree, ...]:
        """The shapes and shardings of `arguments`, or the arguments themselves.

        The step is compiled for abstract arguments, so compilation does not need to read the base.
        """
        return (self.layout.base,)

    @property
    def base(self) -> Variables:
        """The variables that adapters modify, or an empty dictionary if the run has no adapters.

        The variables are read once, by the first call of `read_base` or the first use of this
        property.
        """
        return self.read_base()

    def read_base(self, report: Callable[[str], object] = lambda _: None) -> Variables:
        """Reads the `base`, unless it is already read, and returns it.

        A training run calls this method before anything is written, so that a missing base is
        reported early.

        Args:
          report: a function that is called with the table of `initial_parameters.read_base`.

        Raises:
          ValueError: see `initial_parameters.read_base`.
        """
        if self._base is None:
            self._base = read_base(self.experiment, self.mesh, report=report)
        return self._base

    def averaged_variables(self, state: TrainState) -> Variables:
        """Returns the variables of the whole model for evaluation and later use.

        The result contains the moving average of the parameters if the run has one. Adapters are
        merged into their base; see `Trainable.merge_for_evaluation`.
        """
        return self.trainable.merge_for_evaluation(state.averaged_variables, self.base)

    def step_flops(self) -> float | None:
        """Returns the floating-point operations of a step on all devices together.

        Returns None if the number of operations is unknown.
        """
        data = self.experiment.data
        return step_flops(
            self.experiment.model,
            batch_size=data.batch_size,
            inputs=data.inputs_length,
            targets=data.targets_length,
        )

    def measure_utilization(self) -> dict[str, float]:
        """Returns the `utilizations` of the devices at one step per second.

        The result is an empty dictionary if the FLOPs of a step are unknown, as with adapters. The
        result is also empty if the FLOPs differ between steps, as with buckets.
        """
        flops = self.step_flops()
        if flops is None or self.experiment.data.buckets or self.trainable.has_base:
            return {}
        return utilizations(flops, self.mesh, self.experiment.model.dtype)

    def init(self, variables: Variables | None = None) -> TrainState:
        """Returns the first state, with given or random variables.

        Random variables are made directly on the devices that hold them. The random values depend
        only on the seed and not on the mesh, because JAX's random bits are partitionable.

        Args:
          variables: the variables of the state. The buffers of these variables are donated and must
            not be used afterwards. If `variables` is None, `Trainable.init` makes random variables,
            or new adapters if the run has adapters.
        """

        def make(variables: Mapping[str, PyTree]) -> TrainState:
            """Returns the first state with the given variables."""
            return TrainState(
                step=jnp.zeros((), jnp.int32),
                params=variables["params"],
                constants=variables.get("constants", {}),
                opt_state=self.optimizer.init(variables["params"]),
                ema=variables["params"] if self.layout.abstract.ema else {},
            )

        if variables is None:
            variables = init_arrays(
                self.trainable.init,
                self._key,
                self.base,
                # `shardings` is a `TrainState` whose leaves are shardings instead of arrays.
                shardings=self.layout.shardings.variables,
            )
        state: TrainState = jax.jit(make, donate_argnums=0, out_shardings=self.layout.shardings)(
            variables
        )
        return state

    @property
    def description(self) -> str:
        """The number of parameters and the devices, such as ``1,234 parameters on 8 × TPU v5p``."""
        size = sum(x.size for x in jax.tree.leaves(self.layout.abstract.params))
        kinds = sorted({device.device_kind for device in self.mesh.devices.flat})
        return f"{size:,} parameters on {self.mesh.size} × {', '.join(kinds)}"

    @property
    def shards(self) -> list[int]:
        """The virtual shards of the data that this process loads for its devices."""
        return self._batch_shards.shards_of(jax.process_index())

    @property
    def saved_shards(self) -> list[int]:
        """The shards in `shards` whose position in the data this process saves.

        The position of each shard is saved by the first process that loads the shard.
        """
        return self._batch_shards.saved_by(jax.process_index())

    def shard_batch(self, batch: dict[str, np.ndarray]) -> Batch:
        """Places a batch on the devices of the mesh.

        Args:
          batch: host arrays with the examples of this process's `shards`.

        Returns:
          Global arrays, sharded by examples.
        """
        if jax.process_count() == 1:
            return jax.device_put(batch, batch_sharding(self.mesh))
        return {name: self._batch_shards.to_global_array(x) for name, x in batch.items()}

    def max_over_processes(self, number: int, *, after: jax.Array) -> jax.Array:
        """Returns the largest of the int32 numbers that the processes pass, as a replicated array.

        Args:
          number: the number of this process.
          after: an array that a step returns. The numbers are compared after this array is
            computed, because the compiled program takes the array as an unused argument.
        """
        sharding = NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))
        repeated = np.full(self.mesh.size, number, np.int32)
        numbers = jax.make_array_from_callback(
            repeated.shape, sharding, lambda where: repeated[where]
        )
        return self._largest(numbers, after)

    def trace(self, lengths: tuple[int, int] | None = None) -> jax.stages.Traced:
        """Returns the traced step. No array is allocated.

        Args:
          lengths: the lengths of inputs and targets in a bucket. None means the full lengths.
        """
        batch = abstract_batch(self.experiment.data, batch_sharding(self.mesh), lengths=lengths)
        # `use_mesh` also sets Flax's logical axis rules, which the layers read in
        # `primitives.mesh.mesh_axes`. The layers read them only while they are traced.
        with use_mesh(self.mesh):
            return self._jitted.trace(
                self.layout.abstract, batch, self._key, *self.abstract_arguments
            )

    def compile(
        self, batch: Batch | None = None, lowered: jax.stages.Lowered | None = None
    ) -> jax.stages.Compiled:
        """Returns the compiled step for the shape of a batch.

        The first call for a shape compiles the step. All later calls for the same shape return the
        same program.

        Args:
          batch: a batch with the shape for which the step is compiled. None means a batch with the
            full lengths.
          lowered: the lowered step for this shape, if it has been lowered already.
        """
        # The last of the shapes has the full lengths.
        lengths = self.experiment.data.shapes[-1] if batch is None else _lengths(batch)
        if lengths not in self._compiled:
            self._compiled[lengths] = (lowered or self.trace(lengths).lower()).compile()
        return self._compiled[lengths]

    @property
    def num_compiled(self) -> int:
        """The number of batch shapes for which the step has been compiled."""
        return len(self._compiled)

    def is_compiled(self, batch: Batch) -> bool:
        """Returns whether the step has been compiled for the shape of a batch."""
        return _lengths(batch) in self._compiled

    def step(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Performs one training step. The buffers of the old state are donated.

        The step is compiled when it is called for the first time with a batch of a new shape.
        """
        program = self.compile(batch)
        return program(state, batch, self._key, *self.arguments)


def _compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Returns the compiler options of a step on the devices of a mesh, or None for no options."""
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {
        # XLA's default schedule on CPUs favors parallelism and keeps weight gradients in memory for
        # a long time. The memory-optimized schedule needs far less memory and is not slower.
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        # The pass `all-reduce-promotion` aborts the process if a bfloat16 array is summed over
        # devices.
        "xla_disable_hlo_passes": "all-reduce-promotion",
    }


def _lengths(batch: Batch) -> tuple[int, int]:
    """Returns the lengths of the inputs and the targets in a batch."""
    return batch["encoder_input_tokens"].shape[1], batch["decoder_target_tokens"].shape[1]


def abstract_batch(
    data: DataConfig,
    sharding: jax.sharding.Sharding | None = None,
    *,
    lengths: tuple[int, int] | None = None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a training batch.

    Args:
      data: the settings of the data.
      sharding: the sharding of the batch, if any.
      lengths: the lengths of inputs and targets in a bucket. None means the full lengths.
    """
    return {
        name: jax.ShapeDtypeStruct(field.shape, field.dtype, sharding=sharding)
        for name, field in batch_fields(data, lengths=lengths).items()
    }
