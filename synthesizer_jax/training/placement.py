"""A trained model on the devices that are here, which may be others than trained it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from synthesizer_jax.files import absolute
from synthesizer_jax.parameters import abstract_variables
from synthesizer_jax.sharding import MeshShape, make_mesh, shardings
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.storage import reads_ended


def place(experiment: Experiment, devices: list[jax.Device] | None = None) -> tuple[Mesh, Any]:
    """A mesh over all devices, and the layout of the run's variables on it.

    The run's own mesh is taken where it fits; else one with its parts of the model and another number of
    replicas; else one that divides the parameters, by `fsdp`, over as many devices as their sizes allow.

    Args:
      experiment: the run.
      devices: None uses all devices.

    Returns:
      The mesh, and ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with shardings.
    """
    devices = jax.devices() if devices is None else devices
    shapes, axes = abstract_variables(
        experiment.model,
        *experiment.model.example(experiment.data.inputs_length, experiment.data.targets_length),
    )
    problem: ValueError | None = None
    for shape in candidates(experiment.mesh, len(devices)):
        try:
            mesh = make_mesh(shape, devices)
            places = shardings(axes, shapes, mesh)
        except ValueError as error:
            problem = error
            continue
        layout = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, places
        )
        return mesh, layout
    raise ValueError(f"the model fits no mesh of {len(devices)} devices: {problem}")


def candidates(shape: MeshShape, devices: int) -> Iterator[MeshShape]:
    """Meshes to try in turn for a model that was trained on one of the given shape."""
    yield shape
    parts = (shape.fsdp, shape.tensor, shape.sequence)
    yield dataclasses.replace(
        MeshShape(),
        data=1 if -1 in parts else -1,
        fsdp=parts[0],
        tensor=parts[1],
        sequence=parts[2],
    )
    yield from (MeshShape(fsdp=n) for n in range(devices, 0, -1) if devices % n == 0)


class OtherModelError(ValueError):
    """A checkpoint holds the arrays of another model."""


def read_variables(checkpoint: pathlib.Path, layout: Any) -> Any:
    """Parameters and constants of one checkpoint, laid out while they are read, without waiting for others.

    Args:
      checkpoint: a step's directory.
      layout: see `place`; None: as saved, on one device of this machine.

    Raises:
      OtherModelError: its arrays are others than the layout's.
      Exception: whatever Orbax makes of damaged files.
    """
    path = absolute(checkpoint / "state")
    reader = ocp.PyTreeCheckpointHandler()  # a checkpointer would wait for all processes
    with reads_ended():
        tree: Any = reader.metadata(path).tree
    abstract = {k: tree[k] for k in ("params", "constants") if tree.get(k)}
    if layout is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), abstract
        )
    else:
        wanted = {k: v for k, v in layout.items() if v}
        check_shapes(abstract, wanted, checkpoint)
        abstract = wanted
    arguments = ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    with reads_ended():
        return reader.restore(path, args=arguments)


def check_shapes(saved: Any, wanted: Any, checkpoint: pathlib.Path) -> None:
    """Raises an `OtherModelError` that names the first array that is missing or has another shape."""
    there, here = (
        {
            jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape)
            for path, x in jax.tree.leaves_with_path(tree)
        }
        for tree in (saved, wanted)
    )
    if different := sorted(name for name, _ in there.items() ^ here.items()):
        name = different[0]
        raise OtherModelError(
            f"{checkpoint} is of another model: {name} is {there.get(name, 'absent')} there and "
            f"{here.get(name, 'absent')} in this run"
        )
