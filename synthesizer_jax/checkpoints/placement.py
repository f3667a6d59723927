"""Reads the arrays of a checkpoint, even if they were saved on different devices."""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as nn
import jax
import orbax.checkpoint as ocp
from flax import traverse_util
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
    """Returns a mesh over the devices, and the layout of a model's variables on this mesh.

    The function tries the following shapes in order, and uses the first shape that fits the devices
    and the model:

    1. The shape that is given, which is usually the shape that was used for training.
    2. A shape that shards the model in the same way, but with a different number of replicas.
    3. A shape that shards only over ``fsdp``, with as many devices as the sizes of the parameters
      allow.

    Args:
      model: the model.
      tokens: abstract arguments of the model.
      shape: the shape of the mesh to try first.
      devices: the devices. None means all devices.

    Returns:
      The mesh, and a dictionary ``{"params": ..., "constants": ...}`` of `jax.ShapeDtypeStruct`
      with shardings.

    Raises:
      ValueError: the model cannot be sharded over any mesh of these devices.
    """
    if devices is None:
        devices = jax.devices()
    problem: ValueError | None = None
    for candidate in _candidate_meshes(shape, len(devices)):
        try:
            mesh = make_mesh(candidate, devices)
            return mesh, layout_over(model, tokens, mesh)
        except ValueError as error:
            problem = error
    raise ValueError(f"The model fits no mesh of {len(devices)} devices: {problem}")


def layout_over(
    model: nn.Module, tokens: tuple[jax.ShapeDtypeStruct, ...], mesh: Mesh | AbstractMesh
) -> Variables:
    """Returns the shapes, dtypes and shardings of a model's variables on a mesh.

    The result has the same form as the layout that `place_variables` returns.

    Raises:
      ValueError: a size in a shape is not divisible by the mesh axes that shard it.
    """
    return with_shardings(*abstract_variables(model, *tokens), mesh)


def with_shardings(shapes: Variables, axes: PyTree, mesh: Mesh | AbstractMesh) -> Variables:
    """Returns abstract variables, with shardings that are derived from their logical axes.

    Args:
      shapes: a pytree of arrays, or of `jax.ShapeDtypeStruct`.
      axes: a pytree with the logical axes of each array.
      mesh: the mesh.
    """
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(axes, shapes, mesh),
    )


def _candidate_meshes(shape: MeshShape, devices: int) -> Iterator[MeshShape]:
    """Yields the mesh shapes to try for a model that was trained on a mesh of a given shape."""
    yield shape
    # At most one size of a mesh shape may be −1. The number of replicas is −1, unless one of the
    # other sizes is −1.
    inferred = -1 in (shape.fsdp, shape.tensor, shape.sequence)
    yield MeshShape(1 if inferred else -1, shape.fsdp, shape.tensor, shape.sequence)
    yield from (MeshShape(fsdp=n) for n in range(devices, 0, -1) if devices % n == 0)


class OtherModelError(ValueError):
    """The error that is raised if a checkpoint has the arrays of a different model or optimizer."""


AVERAGE = "ema"
"""The entry of a checkpoint that holds the moving averages of the parameters."""


def read_variables(
    checkpoint: pathlib.Path, layout: Variables | None, *, singly: bool = False
) -> Iterator[Variables]:
    """Reads the parameters and constants of a checkpoint, and yields them in one or several parts.

    If the checkpoint has moving averages of the parameters, the function reads the averages instead
    of the parameters, and yields them as the entry ``ema``. See `read_arrays` for errors.

    Args:
      checkpoint: the directory of a step.
      layout: see `place_variables`. If `layout` is None, the saved arrays are read onto one device
        of this process.
      singly: whether each part has a single array. The largest array is read first.
    """
    saved = _metadata(checkpoint)
    parameters = AVERAGE if saved.get(AVERAGE) else "params"
    names = (parameters, "constants")
    if layout is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        entries = jax.tree.map(
            lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device),
            {name: saved[name] for name in names if saved.get(name)},
        )
    else:
        entries = {
            parameters if name == "params" else name: tree for name, tree in layout.items() if tree
        }
    if not singly:
        yield read_arrays(checkpoint, entries, names)
        return

    # This call raises an error if the checkpoint does not contain exactly these arrays.
    _saved_entries(checkpoint, entries, names)
    arrays = traverse_util.flatten_dict(entries)

    def size(keys: tuple[str, ...]) -> int:
        """Returns the number of elements of an array."""
        return math.prod(arrays[keys].shape)

    # The largest array is read before converted arrays take memory.
    for keys in sorted(arrays, key=size, reverse=True):
        entry = traverse_util.unflatten_dict({keys: arrays[keys]})
        yield _read_checked(checkpoint, entry, complete={})


def read_arrays(checkpoint: pathlib.Path, entries: PyTree, names: tuple[str, ...]) -> PyTree:
    """Reads entries of a checkpoint, without synchronizing the processes.

    Args:
      checkpoint: the directory of a step.
      entries: the entries to read, as pytrees of arrays or of `jax.ShapeDtypeStruct` with
        shardings.
      names: names of entries that must be read completely. If the saved entry contains arrays that
        are not in `entries`, an error is raised.

    Raises:
      OtherModelError: the arrays of the checkpoint differ from the arrays in `entries`.
      Exception: Orbax cannot read the files. The type of the error depends on the damage.
    """
    return _read_checked(checkpoint, entries, _saved_entries(checkpoint, entries, names))


def _saved_entries(checkpoint: pathlib.Path, entries: PyTree, names: tuple[str, ...]) -> PyTree:
    """Returns a tree with the shapes and dtypes of a checkpoint's entries with the given names.

    Raises:
      OtherModelError: the arrays of the checkpoint differ from the arrays in `entries`.
    """
    metadata = _metadata(checkpoint)
    complete = {name: metadata.get(name, {}) for name in names}
    saved = _shapes(complete)
    expected = _shapes(entries)
    different = sorted(name for name, _ in saved.items() ^ expected.items())
    if different:
        name = different[0]
        raise OtherModelError(
            f"{checkpoint} belongs to another model or optimizer. For example, {name} "
            f"{_describe_shape(saved, name)} in the checkpoint and "
            f"{_describe_shape(expected, name)} in this run."
        )
    return complete


def _read_checked(checkpoint: pathlib.Path, entries: PyTree, complete: PyTree) -> PyTree:
    """Reads entries that a checkpoint is known to contain; see `read_arrays`.

    Args:
      checkpoint: the directory of a step.
      entries: the entries to read.
      complete: the result of `_saved_entries` for those entries that are read completely.
    """
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), entries
    )
    # The states of two optimizers with the same arrays can differ in parts that hold no array.
    # Orbax would not accept such a difference, so complete entries are read with the tree structure
    # in which they were saved.
    by_path = {_path_name(path): x for path, x in jax.tree.leaves_with_path(abstract)}
    in_saved_structure = abstract | jax.tree.map_with_path(
        lambda path, _: by_path[_path_name(path)], complete
    )
    arguments = ocp.args.PyTreeRestore(
        item=in_saved_structure,
        restore_args=ocp.checkpoint_utils.construct_restore_args(in_saved_structure),
        partial_restore=True,
    )
    # Call Orbax's handler directly, because a checkpointer would synchronize the processes.
    restored = ocp.PyTreeCheckpointHandler().restore(absolute(checkpoint / "state"), args=arguments)
    arrays = {_path_name(path): x for path, x in jax.tree.leaves_with_path(restored)}
    return jax.tree.map_with_path(lambda path, _: arrays[_path_name(path)], entries)


def count_parameters(checkpoint: pathlib.Path) -> int:
    """Returns the number of parameters in a checkpoint, without reading any array."""
    return sum(math.prod(shape) for shape in _shapes(_metadata(checkpoint)["params"]).values())


def _metadata(checkpoint: pathlib.Path) -> PyTree:
    """Returns a tree with the shapes and dtypes of a checkpoint's arrays."""
    # By default, Orbax's handler looks up JAX's platform. This look-up would initialize the
    # devices, which a training process on the same machine may need.
    handler = ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
    return handler.metadata(absolute(checkpoint / "state")).tree


def _describe_shape(shapes: Mapping[str, tuple[int, ...]], name: str) -> str:
    """Returns the part of an error message that says which shape an array has, if any."""
    if name not in shapes:
        return "is absent"
    return f"has the shape {shapes[name]}"


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    """Returns a dictionary from the path of every array in a tree to the array's shape."""
    return {_path_name(path): tuple(x.shape) for path, x in jax.tree.leaves_with_path(tree)}


def _path_name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf as a name, such as ``opt_state/1/0/count``."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
