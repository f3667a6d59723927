"""Plans training for chips that are not present: memory, time, and compilation ahead of time.

`make_plan` computes the memory needs of a step from the shapes of its arrays. `advise` searches for
a mesh and a rematerialization with which a step fits. `compile_step` compiles the step with XLA for
the chips, and XLA then decides whether the step fits.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType

from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.placement import with_shardings
from synthesizer_jax.costs.chips import HOST, Chip, Topology, tiled_bytes
from synthesizer_jax.costs.utilization import step_flops
from synthesizer_jax.models import stacks_of
from synthesizer_jax.models.stack import REMAT_POLICIES
from synthesizer_jax.optimizers.adafactor import TABLE
from synthesizer_jax.optimizers.rules import resolve_rules, trained_entries
from synthesizer_jax.primitives.parameters import (
    Variables,
    abstract_variables,
    is_axes,
    merge_entries,
)
from synthesizer_jax.sharding import MeshShape, batch_shards, check_batch
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.step import loss_sums
from synthesizer_jax.training.trainer import Trainer, abstract_batch, make_layout

REMATS: tuple[str | None, ...] = (None, "dots", "dots_with_no_batch_dims", "full")
"""Values of `Stack.remat`, sorted from the most memory to the most recomputation."""

assert set(REMATS) == {None, *REMAT_POLICIES}

ArrayCounts = collections.Counter[tuple[tuple[int, ...], np.dtype]]
"""Number of arrays by shape and dtype."""

USABLE = 0.95
"""The fraction of a chip's memory that a plan may fill.

The rest of the memory is a margin for errors of the plan. Compiled steps needed 0.89 to 1.01 times
the planned memory (docs/tpu.md).
"""

UTILIZATION = 0.4
"""The fraction of the chips' peak rate that `MemoryPlan.chip_hours` assumes."""

GPU_FIELDS = """
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_block_limit: 65536 registers_per_core_limit: 65536 shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
"""
"""Fields of XLA's ``GpuDeviceInfoProto`` that are equal for all NVIDIA GPUs."""

CUDNN = "dnn_version_info { major: 9 minor: 10 patch: 0 }"
"""A cuDNN version that is installed with JAX's plugins. XLA only uses calls of this version."""

GPU_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
"""Compiler options for GPUs that are not present.

XLA chooses the tiles of Triton's matrix products by timing them. Without a GPU, XLA cannot time
tiles, and it finds no tiles for some products. With this option, XLA uses cuBLAS, which needs no
tiles.
"""


@dataclasses.dataclass(frozen=True)
class MemoryNeeds:
    """The memory that a training step needs on one device, in bytes.

    On TPUs, the sizes of arrays that exist between steps include the padding of their tiles; see
    `tiled_bytes`.

    Attributes:
      parameters: the parameters, the constants, and the moving average of the parameters if it is
        enabled. In a run with adapters, the base is included.
      optimizer: the state of the optimizer.
      gradients: float32 gradients of the trained parameters, sharded like the parameters. With
        micro-batches, the sum of the gradients is included as well.
      gathered: the largest layer, embedding or output projection that ``fsdp`` shards, in gathered
        form, and its gradient before the reduce-scatter.
      copies: parameters in the dtype of the computation that are kept for the backward pass.
      activations: all other residuals of one micro-batch. The plan ignores that ``tensor`` and
        ``sequence`` shard some residuals.
    """

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    copies: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all fields."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory and time that a training step needs on a topology.

    Attributes:
      topology: the chips.
      mesh: the sizes of the mesh axes by name.
      rows: number of rows of a micro-batch on one device.
      needs: the memory that one device needs.
      capacity: the memory of one device, in bytes.
      flops: floating-point operations of a step on all devices together.
      peak: peak rate of one chip in FLOP/s, in the dtype of the computation.
    """

    topology: Topology
    mesh: dict[str, int]
    rows: int
    needs: MemoryNeeds
    capacity: int
    flops: float
    peak: float

    @property
    def fits(self) -> bool:
        """Whether the step needs at most the fraction `USABLE` of the memory."""
        return self.needs.total <= USABLE * self.capacity

    @property
    def seconds(self) -> float:
        """The duration of a step in seconds if the chips compute at their peak rate."""
        return self.flops / (self.topology.chips * self.peak)

    def chip_hours(self, steps: int) -> float:
        """Returns the chip-hours of `steps` steps, at the fraction `UTILIZATION` of the peak."""
        return steps * self.seconds / UTILIZATION * self.topology.chips / 3600


def make_plan(experiment: Experiment, topology: Topology) -> MemoryPlan:
    """Returns the plan of an experiment on a topology.

    A model dtype of ``auto`` is replaced by the default for the topology's chips.

    Raises:
      ValueError: the mesh does not fit the topology, or the batch cannot be divided over the mesh.
    """
    experiment = experiment.resolved("gpu" if topology.chip.is_gpu else "tpu")
    within, between = experiment.mesh.sizes(topology.devices, topology.slices)
    sizes = tuple(a * b for a, b in zip(within, between, strict=True))
    mesh = AbstractMesh(sizes, experiment.mesh.axis_names, axis_types=(AxisType.Auto,) * len(sizes))
    data, training = experiment.data, experiment.training
    check_batch(data.batch_size, mesh, micro_batches=training.micro_batches)
    rows = data.batch_size // batch_shards(mesh) // training.micro_batches
    optimizer, layout = make_layout(experiment, mesh, rules=training.rules)
    state = layout.abstract
    chip = topology.chip
    gradients = _shard_bytes(optimizer.trained(state.params), chip)
    # The default mesh makes the arguments equal for all meshes with the same number of rows per
    # device. All meshes with the same number of rows therefore share one cached trace.
    copies, activations = _residual_bytes(replace(experiment, mesh=MeshShape()), rows)
    return MemoryPlan(
        topology=topology,
        mesh=dict(mesh.shape),
        rows=rows,
        needs=MemoryNeeds(
            parameters=_shard_bytes((state.params, state.ema, state.constants, layout.base), chip),
            optimizer=_shard_bytes(state.opt_state, chip),
            gradients=gradients * (1 if training.micro_batches == 1 else 2),
            gathered=_gathered_bytes(experiment, mesh),
            copies=copies // (mesh.shape["fsdp"] * mesh.shape["tensor"]),
            activations=activations,
        ),
        capacity=chip.memory // chip.devices,
        flops=step_flops(
            experiment.model,
            batch_size=data.batch_size,
            inputs=data.inputs_length,
            targets=data.targets_length,
        ),
        peak=chip.peak(experiment.model.dtype),
    )


def _shard_bytes(tree: PyTree, chip: Chip) -> int:
    """Returns the size in bytes of one device's shards of abstract arrays with shardings."""
    total = 0
    for x in jax.tree.leaves(tree):
        shape, itemsize = x.sharding.shard_shape(x.shape), x.dtype.itemsize
        total += math.prod(shape) * itemsize if chip.is_gpu else tiled_bytes(shape, itemsize)
    return total


def _gathered_bytes(experiment: Experiment, mesh: AbstractMesh) -> int:
    """Returns `MemoryNeeds.gathered` in bytes.

    The tables of a layer and their gradients are counted in float32. The kernels of a layer and
    their gradients are counted in the dtype of the computation. Embeddings and output projections
    are counted in the dtype of the computation, and their gradients in float32.
    """
    model = experiment.model
    size = jnp.dtype(model.dtype).itemsize
    stacks = stacks_of(model)
    shapes, axes = abstract_variables(model, *experiment.example)
    params = with_shardings(shapes["params"], axes["params"], mesh)

    gathered = collections.Counter[tuple[object, ...]]()
    leaves = jax.tree.leaves_with_path(params)
    names_of_leaves = jax.tree.leaves(axes["params"], is_leaf=is_axes)
    for (path, x), names in zip(leaves, names_of_leaves, strict=True):
        if "fsdp" not in x.sharding.spec:
            continue
        # `whole` is the size after gathering over `fsdp`. The array is still sharded over other
        # mesh axes.
        whole = math.prod(x.sharding.shard_shape(x.shape)) * x.sharding.mesh.shape["fsdp"]
        if path[0].key in stacks:
            layers = x.shape[0] if names[0] == "layers" else 1
            # The factor 2 counts the kernel or table and its gradient.
            itemsize = 4 if TABLE & set(names) else size
            gathered[path[:2]] += 2 * itemsize * whole // layers
        else:
            gathered[path[:1]] += (size + 4) * whole
    return max(gathered.values(), default=0)


@functools.lru_cache(maxsize=32)
def _residual_bytes(experiment: Experiment, rows: int) -> tuple[int, int]:
    """Returns how many bytes the forward pass of `rows` rows keeps for the backward pass.

    The parameters themselves are not included.

    Returns:
      The bytes of copies of parameters, which a mesh shards, and the bytes of all other residuals.
      The other residuals are activations, and values computed from embeddings and from tables over
      positions.
    """
    model = experiment.model
    variables, axes = abstract_variables(model, *experiment.example)
    stacks = stacks_of(model)
    leaves = jax.tree.leaves_with_path(variables["params"])
    names_of_leaves = jax.tree.leaves(axes["params"], is_leaf=is_axes)
    kernels = [
        x
        for (path, x), names in zip(leaves, names_of_leaves, strict=True)
        if path[0].key in stacks and not TABLE & set(names)
    ]

    def is_copy(shape: tuple[int, ...], dtype: np.dtype) -> bool:
        """Returns whether an array is a layer's kernel, possibly with adjacent axes merged."""
        return dtype == jnp.dtype(model.dtype) and any(
            math.prod(shape) == x.size and _prefix_sizes(shape) <= _prefix_sizes(x.shape)
            for x in kernels
        )

    residuals = _residuals(experiment, rows)
    # An activation may have the shape of a kernel, but the shape of an activation depends on the
    # number of rows.
    fixed = residuals & _residuals(experiment, rows + 1)
    copies = _num_bytes(
        collections.Counter({array: n for array, n in fixed.items() if is_copy(*array)})
    )
    return copies, _num_bytes(residuals) - copies


def _prefix_sizes(shape: tuple[int, ...]) -> set[int]:
    """Returns the products of the first n sizes of a shape, for every n.

    Merging adjacent axes removes some of the products and keeps the others.
    """
    return set(itertools.accumulate(shape, operator.mul))


def _residuals(experiment: Experiment, rows: int) -> ArrayCounts:
    """Counts the arrays that the forward pass of `rows` rows keeps for the backward pass.

    The function traces `jax.vjp` abstractly. The arrays in the backward function that `jax.vjp`
    returns are the residuals.
    """
    model, data, training = experiment.model, experiment.data, experiment.training
    batch = abstract_batch(dataclasses.replace(data, batch_size=rows, shards=1))
    trainable = experiment.trainable
    used, _ = trainable.abstract()
    base, _ = trainable.abstract_base()
    rates = resolve_rules(model, used["params"], training.rules)
    trained = trained_entries(rates, used["params"])

    def forward(
        trained: PyTree,
        variables: Variables,
        base: Variables,
        batch: dict[str, jax.Array],
        key: jax.Array,
    ) -> PyTree:
        """Returns the backward function of the loss, a pytree whose leaves are the residuals."""

        def loss(trained: PyTree) -> jax.Array:
            """Returns the loss as a function of the trained parameters."""
            merged = {**variables, "params": merge_entries(trained, variables["params"])}
            sums = loss_sums(
                model,
                trainable.merge(merged, base),
                batch,
                z_loss=training.z_loss,
                label_smoothing=training.label_smoothing,
                dropout_key=key,
                max_segments=data.segments_per_row if data.pack else None,
            )
            return sums.total + sums.penalty

        return jax.vjp(loss, trained)[1]

    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(forward)(trained, used, base, batch, key).jaxpr
    # Residuals that are arguments of `forward` are parameters or the batch, which exist anyway.
    left = {v for v in jaxpr.outvars if isinstance(v, jex_core.Var)} - set(jaxpr.invars)
    arrays = [v.aval for v in left if isinstance(v.aval, jax.core.ShapedArray)]
    return collections.Counter((array.shape, array.dtype) for array in arrays)


def _num_bytes(counts: ArrayCounts) -> int:
    """Returns the total size in bytes of the counted arrays."""
    return sum(n * math.prod(shape) * dtype.itemsize for (shape, dtype), n in counts.items())


def advise(
    experiment: Experiment, topology: Topology, *, phase: Phase = silent_phase
) -> list[tuple[Experiment, MemoryPlan]]:
    """Returns variants of an experiment that fit into a topology's memory, the cheapest first.

    `advise` tries the meshes of `candidate_meshes` in order. The first mesh uses data parallelism
    only. The next mesh shards parameters over all devices of a slice, or over as many devices as
    divide the model's width. The last meshes add tensor parallelism over 2, 4 and 8 devices. For
    each mesh, `advise` tries the values of `REMATS` in order.

    Args:
      experiment: the experiment.
      topology: the chips.
      phase: a function that reports progress.

    Returns:
      A list with one entry for each mesh with which the experiment fits. The entry is the first
      variant that fits, and its plan.
    """
    variants = []
    meshes = candidate_meshes(topology, experiment.model.d_model)
    total = len(meshes) * len(REMATS)
    advance = phase(f"trying up to {total} settings of the mesh and of remat", total)
    for mesh in meshes:
        for remat in REMATS:
            changed = replace(with_remat(experiment, remat), mesh=mesh)
            try:
                plan = make_plan(changed, topology)
            except ValueError:
                # The mesh cannot divide the batch or a parameter, and other values of `remat`
                # cannot help.
                break
            advance(1)
            if plan.fits:
                variants.append((changed, plan))
                break
    return variants


def candidate_meshes(topology: Topology, width: int) -> list[MeshShape]:
    """Returns the meshes to try for a model of the given width.

    Meshes with less communication come first.
    """
    meshes = [MeshShape()]
    devices = topology.devices // topology.slices
    for tensor in (1, 2, 4, 8):
        left = devices // tensor
        fsdp = math.gcd(left, width)
        if devices % tensor == 0 and fsdp * tensor > 1:
            shape = (1, -1) if fsdp == left else (-1, fsdp)
            meshes.append(MeshShape(*shape, tensor=tensor))
    return meshes


def with_remat(experiment: Experiment, remat: str | None) -> Experiment:
    """Returns the experiment with `Stack.remat` set to `remat` in all stacks of the model."""
    model = experiment.model
    changed = {name: replace(stack, remat=remat) for name, stack in stacks_of(model).items()}
    return replace(experiment, model=replace(model, **changed))


class TooLargeError(ValueError):
    """The compiler reports that a step does not fit into the memory of a device."""


def compile_step(experiment: Experiment, topology: Topology) -> jax.stages.Compiled:
    """Compiles the training step for a topology whose devices need not be present.

    Raises:
      TooLargeError: the step does not fit into memory.
      ValueError: the compiler is not installed, or it does not support the topology or the mesh.
    """
    trainer = Trainer(experiment, devices=devices_of(topology))
    # The mesh tells Pallas for which chip it lowers.
    with jax.set_mesh(trainer.mesh):
        lowered = trainer.trace().lower()
    try:
        return lowered.compile(GPU_OPTIONS if topology.chip.is_gpu else None)
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r"RESOURCE_EXHAUSTED: ([^\n]*)", str(error))
        # A kernel that exhausts on-chip memory also raises RESOURCE_EXHAUSTED, although it does not
        # lack HBM.
        if refused is None or "hbm" not in refused[1].lower():
            raise
        raise TooLargeError(f"The compiler rejects the step: {refused[1]}") from error


def devices_of(topology: Topology) -> list[jax.Device]:
    """Returns the devices of a topology, which can only be used for compilation.

    Raises:
      ValueError: the compiler is not installed, or it does not support the topology.
    """
    chip = topology.chip
    options: dict[str, int | str | list[int]] = {}
    if chip.is_gpu:
        platform, remedy = "cuda", "Run pip install 'synthesizer-jax[cuda]'."
        hosts = max(1, topology.chips // HOST)
        options["target_config"] = _gpu_config(chip)
        options["topology"] = f"1x{hosts}x{topology.chips // hosts}"
    else:
        platform = "tpu"
        remedy = "Run pip install 'jax[tpu]', and choose a topology that exists."
        if topology.slices > 1:
            options["num_slices"] = topology.slices
        if chip.config is not None:
            options["chip_config_name"] = chip.config
        if math.prod(topology.shape) == 1:
            # By default, libtpu assumes hosts with four chips.
            options["chips_per_host_bounds"] = [1, 1, 1]
        # Without a TPU there is no metadata server that libtpu could ask.
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        found = topologies.get_topology_desc(
            platform=platform, topology_name=topology.name, **options
        )
    except (RuntimeError, NotImplementedError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"Programs for {topology.name} cannot be compiled: {reason}. {remedy}"
        ) from error
    return list(found.devices)


def _gpu_config(chip: Chip) -> str:
    """Returns the text of XLA's ``GpuTargetConfigProto`` for a chip."""
    return f"""
      gpu_device_info {{
        {GPU_FIELDS} {chip.config}
        device_memory_size: {chip.memory} memory_bandwidth: {chip.bandwidth:.0f}
      }}
      platform_name: "CUDA" {CUDNN} device_description_str: "{chip.kinds[0]}"
    """
