"""Reading arrays of a checkpoint, also on other devices than those that trained them."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator

import flax.linen as nn
import jax
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, Mesh

from synthesizer_jax.base.files import absolute
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.primitives.parameters import Variables, abstract_variables
from synthesizer_jax.sharding import MeshShape, make_mesh, shardings


def place_variables(
    model: nn.Module,
    tokens: tuple[jax.ShapeDtypeStruct, ...],
    shape: MeshShape,
    *,
    devices: list[jax.Device] | None = None,
) -> tuple[Mesh, Variables]:
    """Returns a mesh over all devices and the layout of a model's variables on it.

    The shape of the mesh is the first that fits. The given one, of the training, comes first; then the same
    sharding of the model with another number of replicas; then ``fsdp`` over as many devices as the sizes
    of the parameters allow. The tokens are abstract arguments of the model. `devices` None is all of them.

    Returns:
      The mesh, and ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct` with shardings.

    Raises:
      ValueError: the model fits no mesh of these devices.
    """
    devices = jax.devices() if devices is None else devices
    problem: ValueError | None = None
    for candidate in _candidate_meshes(shape, len(devices)):
        try:
            mesh = make_mesh(candidate, devices)
            return mesh, layout_over(model, tokens, mesh)
        except ValueError as error:
            problem = error
    raise ValueError(f"the model fits no mesh of {len(devices)} devices: {problem}")


def layout_over(
    model: nn.Module, tokens: tuple[jax.ShapeDtypeStruct, ...], mesh: Mesh | AbstractMesh
) -> Variables:
    """Returns the shapes and shardings of a model's variables over a mesh, see `place_variables`.

    Raises:
      ValueError: the mesh does not divide the shapes.
    """
    return with_shardings(*abstract_variables(model, *tokens), mesh)


def with_shardings(shapes: Variables, axes: PyTree, mesh: Mesh | AbstractMesh) -> Variables:
    """Returns abstract variables with their shardings over a mesh, from their logical axes."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(axes, shapes, mesh),
    )


def _candidate_meshes(shape: MeshShape, devices: int) -> Iterator[MeshShape]:
    """Yields the meshes to try for a model that was trained on a mesh of the given shape."""
    yield shape
    inferred = -1 in (shape.fsdp, shape.tensor, shape.sequence)  # one axis at most may be
    yield MeshShape(1 if inferred else -1, shape.fsdp, shape.tensor, shape.sequence)
    yield from (MeshShape(fsdp=n) for n in range(devices, 0, -1) if devices % n == 0)


class OtherModelError(ValueError):
    """A checkpoint belongs to another model."""


AVERAGE = "ema"
"""The entry of a checkpoint with averages of the parameters."""


def read_variables(checkpoint: pathlib.Path, layout: Variables | None) -> Variables:
    """Reads parameters, or their averages as ``ema``, and constants of a checkpoint; see `read_arrays`.

    For the layout see `place_variables`; None reads the saved arrays to one device of this process.
    """
    saved = _metadata(checkpoint)
    names = (AVERAGE if saved.get(AVERAGE) else "params"), "constants"
    if layout is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        entries = jax.tree.map(
            lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device),
            {name: saved[name] for name in names if saved.get(name)},
        )
    else:
        entries = {names[0] if k == "params" else k: v for k, v in layout.items() if v}
    return read_arrays(checkpoint, entries, names)


def read_arrays(checkpoint: pathlib.Path, entries: PyTree, names: tuple[str, ...]) -> PyTree:
    """Reads entries of a checkpoint, the directory of a step, without synchronization of the processes.

    Args:
      checkpoint: the directory.
      entries: the entries, with arrays or `jax.ShapeDtypeStruct` for shapes and shardings.
      names: entries whose saved arrays must all be among them.

    Raises:
      OtherModelError: the checkpoint has other arrays.
      Exception: Orbax cannot read the files; the type of the error depends on the damage.
    """
    metadata = _metadata(checkpoint)
    saved = _shapes({name: metadata.get(name, {}) for name in names})
    expected = _shapes(entries)
    if different := sorted(name for name, _ in saved.items() ^ expected.items()):
        name = different[0]
        raise OtherModelError(
            f"{checkpoint} belongs to another model or optimizer: {name} is {saved.get(name, 'absent')} "
            f"there and {expected.get(name, 'absent')} in this run"
        )
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), entries)
    arguments = ocp.args.PyTreeRestore(
        item=abstract,
        restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
        partial_restore=True,
    )
    # A checkpointer would synchronize the processes.
    return ocp.PyTreeCheckpointHandler().restore(absolute(checkpoint / "state"), args=arguments)


def count_parameters(checkpoint: pathlib.Path) -> int:
    """Returns the number of parameters that a checkpoint holds; no array is read."""
    return sum(math.prod(shape) for shape in _shapes(_metadata(checkpoint)["params"]).values())


def _metadata(checkpoint: pathlib.Path) -> PyTree:
    """Returns the tree of a checkpoint's arrays, with their shapes."""
    # By default it asks for JAX's platform, and so would take the devices of a training.
    handler = ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
    return handler.metadata(absolute(checkpoint / "state")).tree


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of arrays by their paths."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): tuple(x.shape)
        for path, x in jax.tree.leaves_with_path(tree)
    }
