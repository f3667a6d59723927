"""Saving a checkpoint whose arrays are read as they are written."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import ArrayLike

from synthesizer_jax.base.files import absolute
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.contents import CONTENTS, CONTENTS_FILE, Contents


@dataclasses.dataclass(frozen=True)
class Unread:
    """An array that is read when it is needed; a leaf of a pytree.

    Attributes:
      shape: its shape.
      stored: reads it in the dtype in which it is stored; every call reads it anew.
      dtype: its dtype.
    """

    shape: tuple[int, ...]
    stored: Callable[[], np.ndarray]
    dtype: np.dtype[np.generic] = dataclasses.field(default_factory=lambda: np.dtype(np.float32))

    @classmethod
    def of(cls, x: ArrayLike) -> Unread:
        """Returns an array in memory as one that is read."""
        return cls(np.shape(x), lambda: np.asarray(x), np.dtype(jnp.result_type(x)))

    def __mul__(self, factor: float) -> Unread:
        """Returns the array times a number, to be read as well."""
        return dataclasses.replace(self, stored=lambda: self.read() * self.dtype.type(factor))

    def read(self, dtype: str | None = None) -> np.ndarray:
        """Reads the array, in its dtype unless another is given."""
        return self.stored().astype(self.dtype if dtype is None else jnp.dtype(dtype), copy=False)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * self.dtype.itemsize


def save_streamed(directory: pathlib.Path, step: int, tree: PyTree) -> None:
    """Saves a state, nested dictionaries of `Unread`, with one array in memory.

    The checkpoint is that of `Checkpoints.save`, in the ``checkpoints`` directory of a run. Writing it is
    not atomic: give a directory that nobody reads yet.
    """
    arrays = _Handler()
    registry = ocp.type_handlers.create_type_handler_registry(
        (Unread, arrays), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False)
    with ocp.CheckpointManager(
        absolute(directory),
        item_names=("state",),
        item_handlers={"state": handler},
        options=ocp.CheckpointManagerOptions(enable_async_checkpointing=False),
    ) as manager:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.PyTreeSave(tree)))
    contents = absolute(directory) / str(step) / CONTENTS
    contents.mkdir()
    text = json.dumps(Contents(step, arrays.checksums, {}).to_json())
    (contents / CONTENTS_FILE).write_text(text, encoding="utf-8")


class _Handler(ocp.type_handlers.NumpyHandler):
    """Reads an array when the one before is written, and has their checksums by path."""

    def __init__(self) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self.checksums: dict[str, int] = {}

    async def serialize(
        self,
        values: Sequence[Unread],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Reads and writes all arrays; nothing is left to wait for."""
        args = args or [ocp.type_handlers.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            # ascontiguousarray makes scalars vectors, so the shape comes last.
            array = np.ascontiguousarray(value.read()).reshape(value.shape)
            (self.checksums[info.name.replace(".", "/")],) = checksums.checksums(array).values()
            (written,) = await super().serialize([array], [info], [arg])
            written.result()  # before the next is read: one array is in memory
        return []
