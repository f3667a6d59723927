"""Restoring a trained model on other devices than those that trained it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import flax.linen as nn
import jax
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, Mesh

from synthesizer_jax.files import absolute
from synthesizer_jax.parameters import Variables, abstract_variables
from synthesizer_jax.sharding import MeshShape, make_mesh, shardings
from synthesizer_jax.typing import PyTree


def place_variables(
    model: nn.Module,
    tokens: tuple[jax.ShapeDtypeStruct, ...],
    shape: MeshShape,
    *,
    devices: list[jax.Device] | None = None,
) -> tuple[Mesh, Variables]:
    """Returns a mesh over all devices and the layout of a model's variables on it.

    The shape of the mesh is the first that fits: the given one; the same sharding of the model with
    another number of replicas; or ``fsdp`` over as many devices as the sizes of the parameters allow.

    Args:
      model: an unbound model.
      tokens: abstract arguments of the model.
      shape: shape of the mesh of the training.
      devices: the devices; None is all of them.

    Returns:
      The mesh, and ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      ValueError: the model fits no mesh of these devices.
    """
    devices = jax.devices() if devices is None else devices
    problem: ValueError | None = None
    for candidate in candidate_meshes(shape, len(devices)):
        try:
            mesh = make_mesh(candidate, devices)
            return mesh, layout_over(model, tokens, mesh)
        except ValueError as error:
            problem = error
    raise ValueError(f"the model fits no mesh of {len(devices)} devices: {problem}")


def layout_over(
    model: nn.Module, tokens: tuple[jax.ShapeDtypeStruct, ...], mesh: Mesh | AbstractMesh
) -> Variables:
    """Returns the shapes and shardings of a model's variables over a mesh.

    Args:
      model: an unbound model.
      tokens: abstract arguments of the model.
      mesh: the mesh.

    Returns:
      ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      ValueError: the mesh does not divide the shapes.
    """
    shapes, axes = abstract_variables(model, *tokens)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(axes, shapes, mesh),
    )


def candidate_meshes(shape: MeshShape, devices: int) -> Iterator[MeshShape]:
    """Yields the meshes to try for a model that was trained on a mesh of the given shape."""
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
    """A checkpoint belongs to another model."""


AVERAGE = "ema"
"""The entry of a checkpoint with averages of the parameters."""


def read_variables(
    checkpoint: pathlib.Path, layout: Variables | None, *, averaged: bool = True
) -> Variables:
    """Reads parameters and constants of a checkpoint, without synchronization of the processes.

    Args:
      checkpoint: directory of the step.
      layout: see `place_variables`; None reads the saved arrays to one device of this process.
      averaged: whether to read the averages of the parameters in their place, if there are any.

    Returns:
      ``{"params": ..., "constants": ...}``, or ``{"ema": ..., "constants": ...}``.

    Raises:
      OtherModelError: the arrays do not have the shapes of the layout.
      Exception: Orbax cannot read the files; the type of the error depends on the damage.
    """
    path = absolute(checkpoint / "state")
    reader = ocp.PyTreeCheckpointHandler()  # a checkpointer would synchronize the processes
    tree: PyTree = reader.metadata(path).tree
    params = AVERAGE if averaged and tree.get(AVERAGE) else "params"
    abstract = {k: tree[k] for k in (params, "constants") if tree.get(k)}
    if layout is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        abstract = jax.tree.map(
            lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device), abstract
        )
    else:
        wanted = {params if k == "params" else k: v for k, v in layout.items() if v}
        _check_same_arrays(checkpoint, abstract, wanted)
        abstract = wanted
    return _read(path, reader, abstract)


def check_same_model(checkpoint: pathlib.Path, state: PyTree) -> None:
    """Raises an `OtherModelError` if a checkpoint has other arrays than a state with the same fields."""
    saved = ocp.PyTreeCheckpointHandler().metadata(absolute(checkpoint / "state")).tree
    _check_same_arrays(checkpoint, saved, state)


def _check_same_arrays(checkpoint: pathlib.Path, saved: PyTree, wanted: PyTree) -> None:
    if different := _first_difference(saved, wanted):
        raise OtherModelError(f"{checkpoint} belongs to another model: {different}")


def read_optimizer_state(checkpoint: pathlib.Path, opt_state: PyTree) -> PyTree:
    """Reads the state of a checkpoint's optimizer.

    Args:
      checkpoint: directory of the step.
      opt_state: a state of the same optimizer, for shapes and shardings.

    Raises:
      OtherModelError: the checkpoint's has other arrays.
      Exception: Orbax cannot read the files; the type of the error depends on the damage.
    """
    path = absolute(checkpoint / "state")
    reader = ocp.PyTreeCheckpointHandler()
    saved = reader.metadata(path).tree.get("opt_state", {})
    if different := _first_difference(saved, opt_state):
        raise OtherModelError(
            f"{checkpoint} has no state of this optimizer and model: {different}; leave init_optimizer out"
        )
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), opt_state
    )
    return _read(path, reader, {"opt_state": abstract})["opt_state"]


def _read(path: pathlib.Path, reader: ocp.PyTreeCheckpointHandler, abstract: PyTree) -> PyTree:
    """Reads a part of a checkpoint."""
    arguments = ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    return reader.restore(path, args=arguments)


def _first_difference(saved: PyTree, wanted: PyTree) -> str | None:
    """Returns a clause about the first array that is missing or has another shape; None: there is none."""
    there, here = (_shapes(tree) for tree in (saved, wanted))
    different = sorted(name for name, _ in there.items() ^ here.items())
    if not different:
        return None
    name = different[0]
    return f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} in this run"


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of arrays by their paths."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape)
        for path, x in jax.tree.leaves_with_path(tree)
    }
