"""What a training step needs of every chip, from shapes alone: no device, nothing allocated."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import AbstractMesh, AxisType

from synthesizer_jax.models import TextToText, stacks
from synthesizer_jax.models.stack import REMAT_POLICIES
from synthesizer_jax.parameters import abstract_variables, is_axes
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import BATCH_AXES, MESH_AXES, MeshShape, check_batch, on_whole_axes
from synthesizer_jax.sharding.chips import Topology, held_bytes
from synthesizer_jax.training.adafactor import TABLE
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.state import Layout, example_tokens, make_layout
from synthesizer_jax.training.step import loss_sums
from synthesizer_jax.training.trainer import abstract_batch
from synthesizer_jax.training.utilisation import step_flops

REMATS: tuple[str | None, ...] = (None, "dots", "dots_with_no_batch_dims", "full")
"""From the most memory and the least arithmetic to the opposite."""

assert set(REMATS) == {None, *REMAT_POLICIES}

Kinds = collections.Counter[tuple[tuple[int, ...], Any]]
"""How many arrays there are of every shape and dtype."""

USABLE = 0.95
"""The share of a chip's memory that a plan fills. Compiled steps needed 0.89 to 1.01 of their plans
(docs/tpu.md)."""


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes on one device; of arrays between steps with what their tiles fill up (`held_bytes`).

    Attributes:
      parameters: and constants.
      optimizer: its state.
      gradients: float32, laid out like the parameters; with micro-batches their sum besides.
      gathered: of the parameters that ``fsdp`` shares, the largest layer, embedding or output projection,
        gathered, and its gradient before it is cut.
      copies: of parameters, in the precision of the computation, kept for the backward pass.
      activations: kept for the backward pass, of one micro-batch, and what its rows share; what
        ``tensor`` and ``sequence`` divide of them is not taken off.
    """

    parameters: int
    optimizer: int
    gradients: int
    gathered: int
    copies: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Plan:
    """An experiment on a topology.

    Attributes:
      topology: the chips.
      mesh: size of every mesh axis.
      whole_axes: whether the axes take whole dimensions of a slice, and so all of their links.
      rows: of a micro-batch on one device.
      needs: of one device, for the recipe as it is.
      capacity: bytes of memory that one device has.
      flops: of a step, on all devices together.
    """

    topology: Topology
    mesh: dict[str, int]
    whole_axes: bool
    rows: int
    needs: Needs
    capacity: int
    flops: float

    @property
    def fits(self) -> bool:
        """Whether the needs leave a twentieth of the memory free."""
        return self.needs.total <= USABLE * self.capacity

    @property
    def seconds(self) -> float:
        """Of a step whose arithmetic runs at the chips' peak."""
        return self.flops / (self.topology.chips * self.topology.chip.flops)


def make_plan(experiment: Experiment, topology: Topology) -> Plan:
    """Plans an experiment as it is.

    Raises:
      ValueError: mesh or batch do not fit the topology.
    """
    mesh = abstract_mesh(experiment.mesh, topology)
    data, training = experiment.data, experiment.training
    check_batch(data.batch_size, mesh, micro_batches=training.micro_batches)
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    rows = data.batch_size // ways // training.micro_batches
    tokens = example_tokens(data.inputs_length, data.targets_length)
    _, layout = make_layout(experiment.model, training.optimizer, tokens=tokens, mesh=mesh)
    state = layout.abstract
    parameters = shard_bytes(state.params)
    # Meshes that leave a device as many rows share a trace.
    copies, activations = kept(replace(experiment, mesh=MeshShape()), rows)
    return Plan(
        topology=topology,
        mesh=dict(mesh.shape),
        whole_axes=on_whole_axes(
            experiment.mesh.sizes(topology.devices, topology.slices)[0], topology
        ),
        rows=rows,
        needs=Needs(
            parameters=parameters + shard_bytes(state.constants),
            optimizer=shard_bytes(state.opt_state),
            gradients=parameters * (1 if training.micro_batches == 1 else 2),
            gathered=gathered_bytes(layout, experiment.model),
            copies=copies // (mesh.shape["fsdp"] * mesh.shape["tensor"]),
            activations=activations,
        ),
        capacity=topology.chip.memory // topology.chip.devices,
        flops=step_flops(
            experiment.model,
            batch_size=data.batch_size,
            inputs=data.inputs_length,
            targets=data.targets_length,
        ),
    )


def whole_sizes(topology: Topology) -> list[tuple[int, int]]:
    """Sizes of `fsdp` and `tensor`, of all devices of a slice, that split none of its dimensions."""
    devices = topology.devices // topology.slices
    pairs = ((devices // t, t) for t in range(1, devices + 1) if devices % t == 0)
    return [(f, t) for f, t in pairs if on_whole_axes((1, f, t, 1), topology)]


def abstract_mesh(shape: MeshShape, topology: Topology) -> AbstractMesh:
    """The mesh of a topology, without devices."""
    within, between = shape.sizes(topology.devices, topology.slices)
    sizes = tuple(a * b for a, b in zip(within, between, strict=True))
    return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def shard_bytes(tree: Any) -> int:
    """Bytes that one device's part of abstract arrays with shardings takes in its memory."""
    return sum(
        held_bytes(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree)
    )


def gathered_bytes(layout: Layout, model: TextToText) -> int:
    """See `Needs.gathered`.

    A layer's tables are gathered and have gradients in float32, its kernels in the computation's
    precision; embedding and output projection have gradients in float32.
    """
    size, layered = jnp.dtype(model.dtype).itemsize, stacks(model)
    found = collections.Counter[tuple[Any, ...]]()
    axes = jax.tree.leaves(layout.axes, is_leaf=is_axes)
    leaves = jax.tree.leaves_with_path(layout.abstract.params)
    for (path, x), names in zip(leaves, axes, strict=True):
        sharding: Any = x.sharding
        if "fsdp" not in sharding.spec:
            continue
        whole = math.prod(sharding.shard_shape(x.shape)) * sharding.mesh.shape["fsdp"]
        if path[0].key in layered:
            layers = x.shape[0] if names[0] == "layers" else 1
            found[path[:2]] += 2 * (4 if TABLE & set(names) else size) * whole // layers
        else:
            found[path[:1]] += (size + 4) * whole
    return max(found.values(), default=0)


def collective_bytes(experiment: Experiment, topology: Topology) -> dict[str, float]:
    """Bytes that one device's collectives make in a step, by what they are for.

    ``gathers``: every parameter that ``fsdp`` shares, for the forward and again for the backward pass;
    embedding and output projection once. ``gradients``: summed whole over ``fsdp``, shards over ``data``;
    an encoder-decoder's embedding has two. ``activations``: with ``tensor``, the rows' sums after every
    sub-layer and before it, over the encoder's output for keys and for values, and where embedding and
    output projection meet the vocabulary. Remat makes some of them again.
    """
    plan = make_plan(experiment, topology)
    mesh = abstract_mesh(experiment.mesh, topology)
    model, data, training = experiment.model, experiment.data, experiment.training
    tokens = example_tokens(data.inputs_length, data.targets_length)
    _, layout = make_layout(model, training.optimizer, tokens=tokens, mesh=mesh)
    size = jnp.dtype(model.dtype).itemsize
    gathers = gradients = 0.0
    for path, x in jax.tree.leaves_with_path(layout.abstract.params):
        shared = mesh.shape["fsdp"] > 1 and "fsdp" in x.sharding.spec
        own = math.prod(x.sharding.shard_shape(x.shape)) * size
        whole = own * (mesh.shape["fsdp"] if shared else 1)
        name = path[0].key
        times = 2 if name == "embedding" and len(stacks(model)) > 1 else 1
        if shared:
            gathers += whole * (1 if name in ("embedding", "logits_kernel") else 2)
            gradients += whole * times
        if mesh.shape["data"] > 1:
            gradients += own * times
    found = {"gathers": gathers, "gradients": gradients, "activations": 0.0}
    if mesh.shape["tensor"] > 1:
        row = plan.rows * model.d_model * size
        sums = {"encoder": data.inputs_length * row, "decoder": data.targets_length * row}
        for name, stack in stacks(model).items():
            for run in stack.runs:
                layers, block = run.repeats, run.block
                parts = 1 + (block.feed_forward is not None) + (block.cross_mixer is not None)
                found["activations"] += layers * 2 * parts * sums[name]
                if block.cross_mixer is not None:
                    found["activations"] += layers * 2 * sums["encoder"]
            found["activations"] += sums[name]
        found["activations"] += sums["decoder"]
    return {name: value * training.micro_batches for name, value in found.items()}


@functools.lru_cache(maxsize=32)
def kept(experiment: Experiment, rows: int) -> tuple[int, int]:
    """Bytes that the forward pass of so many rows leaves to the backward pass.

    Returns:
      Those of copies of parameters, which a mesh divides, and those of all else: activations, and what is
      made of embeddings and of tables over positions. Parameters themselves are in neither.
    """
    model, data = experiment.model, experiment.data
    tokens = example_tokens(data.inputs_length, data.targets_length)
    variables, axes = abstract_variables(model, *tokens)
    names = jax.tree.leaves(axes["params"], is_leaf=is_axes)
    params = zip(jax.tree.leaves_with_path(variables["params"]), names, strict=True)
    own = stacks(model)
    kernels = [x for (path, x), n in params if path[0].key in own and not TABLE & set(n)]

    def is_copy(shape: tuple[int, ...], dtype: Any) -> bool:
        """Whether an array is a layer's kernel, or one with neighbouring axes merged."""
        return dtype == jnp.dtype(model.dtype) and any(
            math.prod(shape) == x.size and leading(shape) <= leading(x.shape) for x in kernels
        )

    found, more = (residuals(experiment, variables, n) for n in (rows, rows + 1))
    fixed = found & more  # activations may look like a kernel, but grow with the rows
    copies = bytes_of(collections.Counter({k: n for k, n in fixed.items() if is_copy(*k)}))
    return copies, bytes_of(found) - copies


def leading(shape: tuple[int, ...]) -> set[int]:
    """The sizes of a shape's first axis, of its first two together, and so on."""
    return set(itertools.accumulate(shape, operator.mul))


def residuals(experiment: Experiment, variables: Any, rows: int) -> Kinds:
    """The arrays that the forward pass of so many rows leaves, of abstract variables."""
    model, data, training = experiment.model, experiment.data, experiment.training
    config = dataclasses.replace(data, batch_size=rows, shards=1)
    batch = abstract_batch(config)
    params, constants = variables["params"], variables.get("constants", {})

    def forward(params: Any, constants: Any, batch: Any, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            own = {"params": params, **({"constants": constants} if constants else {})}
            sums = loss_sums(
                model,
                own,
                batch,
                z_loss=training.z_loss,
                label_smoothing=training.label_smoothing,
                dropout_key=key,
                max_segments=data.segments_per_row if data.pack else None,
            )
            return sums.total + sums.penalty

        return jax.vjp(loss, params)[1]

    key = jax.eval_shape(lambda: jax.random.key(0))
    jaxpr = jax.make_jaxpr(forward)(params, constants, batch, key).jaxpr
    left = {v for v in jaxpr.outvars if isinstance(v, jex_core.Var)} - set(jaxpr.invars)
    kinds: list[Any] = [v.aval for v in left]
    return collections.Counter((kind.shape, kind.dtype) for kind in kinds)


def bytes_of(kinds: Kinds) -> int:
    """Bytes of arrays; random keys are two words."""

    def size(dtype: Any) -> int:
        return 8 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize

    return sum(n * math.prod(shape) * size(dtype) for (shape, dtype), n in kinds.items())


def advise(experiment: Experiment, topology: Topology) -> list[tuple[Experiment, Plan]]:
    """Ways to fit an experiment onto a topology, the least costly first.

    Tried are: replicas alone, parameters shared by all devices of a slice, or as many as divide the
    model's width, and besides products shared by 2, 4 and 8; for each the `REMATS` in their order. The
    first that fits of every mesh is returned.
    """
    found = []
    for mesh in meshes(topology, experiment.model.d_model):
        for remat in REMATS:
            changed = replace(with_remat(experiment, remat), mesh=mesh)
            try:
                plan = make_plan(changed, topology)
            except ValueError:  # does not divide
                break
            if plan.fits:
                found.append((changed, plan))
                break
    return found


def meshes(topology: Topology, width: int) -> list[MeshShape]:
    """Meshes worth trying for a model's width, in the order of what they cost."""
    found = [MeshShape()]
    devices = topology.devices // topology.slices
    for tensor in (1, 2, 4, 8):
        left = devices // tensor
        fsdp = math.gcd(left, width)
        if devices % tensor == 0 and fsdp * tensor > 1:
            shape = (1, -1) if fsdp == left else (-1, fsdp)
            found.append(MeshShape(*shape, tensor=tensor))
    return found


def with_remat(experiment: Experiment, remat: str | None) -> Experiment:
    """The experiment with another `Stack.remat`."""
    model = experiment.model
    changed = {name: replace(stack, remat=remat) for name, stack in stacks(model).items()}
    return replace(experiment, model=replace(model, **changed))
