"""Saving a checkpoint whose arrays are read one at a time, as they are written."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import ArrayLike

from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.contents import CONTENTS, Contents
from synthesizer_jax.files import absolute
from synthesizer_jax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Unread:
    """An array that is read when it is needed; a leaf of a pytree.

    Attributes:
      shape: its shape.
      read: reads it; every call reads it anew.
      dtype: its dtype.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    dtype: np.dtype[np.generic] = dataclasses.field(default_factory=lambda: np.dtype(np.float32))

    @classmethod
    def of(cls, x: ArrayLike) -> Unread:
        """Returns an array in memory as one that is read."""
        return cls(np.shape(x), lambda: np.asarray(x), np.dtype(jnp.result_type(x)))

    def __mul__(self, factor: float) -> Unread:
        """Returns the array times a number, to be read as well."""
        return dataclasses.replace(self, read=lambda: self.read() * self.dtype.type(factor))

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


def save_streamed(directory: pathlib.Path, step: int, tree: PyTree) -> None:
    """Saves a checkpoint like `Checkpoints.save`, with two arrays in memory at a time.

    It is not atomic: give a directory that nobody reads yet.

    Args:
      directory: the ``checkpoints`` directory of a run.
      step: the step.
      tree: the state as nested dictionaries of `Unread`.
    """
    found: dict[str, int] = {}
    registry = ocp.type_handlers.create_type_handler_registry(
        (Unread, _Handler(found)), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    checkpoint = absolute(directory) / str(step)
    with ocp.CheckpointManager(
        absolute(directory),
        item_names=("state",),
        item_handlers={"state": handler},
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
    ) as manager:
        arguments = ocp.args.PyTreeSave(tree)
        manager.save(step, args=ocp.args.Composite(state=arguments))
    (checkpoint / CONTENTS).mkdir()
    for name, data in Contents(step, found, {}).to_files(0).items():
        (checkpoint / CONTENTS / name).write_bytes(data)


class _Handler(ocp.type_handlers.NumpyHandler):
    """Reads an array while the one before is written.

    Args:
      found: receives the checksum of each array by its path.
    """

    def __init__(self, found: dict[str, int]):
        super().__init__(deepcopy_host_arrays=False)
        self._found = found

    async def serialize(
        self,
        values: Sequence[Unread],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Reads all arrays and writes all but the last, for which the caller waits."""
        args = args or [ocp.type_handlers.SaveArgs()] * len(values)
        writing: Sequence[ocp.future.Future] = ()
        for value, info, arg in zip(values, infos, args, strict=True):
            try:
                # It makes scalars vectors, so the shape comes last.
                array = np.ascontiguousarray(value.read()).reshape(value.shape)
                self._found |= checksums.checksums({info.name.replace(".", "/"): array})
            finally:  # an error too must find nobody writing to the directory, which is removed
                for future in writing:
                    future.result()
            writing = await super().serialize([array], [info], [arg])
        return writing
