"""Saves a checkpoint while reading its arrays one at a time.

The conversion of pre-trained models uses this module, because all arrays of a large model together
may not fit into memory.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import ArrayLike, DTypeLike

from synthesizer_jax.base.files import absolute
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints import checksums
from synthesizer_jax.checkpoints.contents import CONTENTS, CONTENTS_FILE, Contents

Part: TypeAlias = tuple[slice, ...]
"""A part of an array, with one slice for each axis. The empty tuple is the whole array."""


@dataclasses.dataclass(frozen=True)
class Unread:
    """An array that is not read before it is needed. An `Unread` is a leaf of a pytree.

    Attributes:
      shape: the shape of the array.
      stored: a function that reads a part of the array in the dtype in which the array is stored.
        Every call reads the part again.
      dtype: the dtype of the array that `read` returns.
    """

    shape: tuple[int, ...]
    stored: Callable[[Part], np.ndarray]
    dtype: np.dtype[np.generic] = dataclasses.field(default_factory=lambda: np.dtype(np.float32))

    @classmethod
    def of(cls, x: ArrayLike) -> Unread:
        """Returns an `Unread` for an array that is already in memory."""
        return cls(np.shape(x), lambda part: np.asarray(x)[part], np.dtype(jnp.result_type(x)))

    def __add__(self, summand: float) -> Unread:
        """Returns the array plus a number. The result is also an array that is not read yet."""
        return dataclasses.replace(
            self, stored=lambda part: self.read(part=part) + self.dtype.type(summand)
        )

    def __mul__(self, factor: float) -> Unread:
        """Returns the array times a number. The result is also an array that is not read yet."""
        return dataclasses.replace(
            self, stored=lambda part: self.read(part=part) * self.dtype.type(factor)
        )

    def read(self, dtype: str | None = None, part: Part = ()) -> np.ndarray:
        """Reads the array, or a part of the array.

        Args:
          dtype: the dtype of the result. None means the attribute `dtype`.
          part: the part to read. The default reads the whole array.
        """
        target = self.dtype if dtype is None else jnp.dtype(dtype)
        x = self.stored(part)
        if x.dtype == target:
            return x
        converted = aligned_empty(x.shape, target)
        converted[...] = x
        return converted

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        return self.size * self.dtype.itemsize


_ALIGNMENT = 64
"""The number of bytes of which the address of an array must be a multiple for JAX to share it."""


def aligned_empty(shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    """Returns an array like `np.empty`, whose memory JAX can use on a CPU without copying it."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def save_streamed(
    directory: pathlib.Path, step: int, tree: PyTree, *, phase: Phase = silent_phase
) -> None:
    """Saves a state as a checkpoint, with only one array in memory at a time.

    The checkpoint has the same format as the checkpoints of `Checkpoints.save`, but it contains no
    position in the data. Writing is not atomic, so no other process may read the directory before
    this function has returned.

    Args:
      directory: the ``checkpoints`` directory of a run.
      step: the step of the checkpoint.
      tree: the state, as nested dictionaries of `Unread`.
      phase: a function that reports progress.
    """
    count = len(jax.tree.leaves(tree))
    arrays = _Handler(phase(f"writing a checkpoint of {count:,} arrays", count))
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

    # Write the file of contents separately, because the checksums are known only after all arrays
    # are written.
    contents = absolute(directory) / str(step) / CONTENTS
    contents.mkdir()
    text = json.dumps(Contents(step, arrays.checksums, {}).to_json())
    (contents / CONTENTS_FILE).write_text(text, encoding="utf-8")


class _Handler(ocp.type_handlers.NumpyHandler):
    """Orbax's handler of NumPy arrays, changed to have only one array in memory at a time.

    Args:
      advance: a function that is called with the number 1 after every array, to report progress.

    Attributes:
      checksums: the checksums of the arrays by path.
    """

    def __init__(self, advance: Callable[[int], object]) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._advance = advance
        self.checksums: dict[str, int] = {}

    async def serialize(
        self,
        values: Sequence[Unread],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Reads and writes all arrays.

        The list of futures is empty, because all writing is finished.
        """
        args = args or [ocp.type_handlers.SaveArgs()] * len(values)
        for value, info, arg in zip(values, infos, args, strict=True):
            # `ascontiguousarray` turns a scalar into a vector, so `reshape` restores the shape.
            array = np.ascontiguousarray(value.read()).reshape(value.shape)
            (self.checksums[info.name.replace(".", "/")],) = checksums.checksums(array).values()
            (written,) = await super().serialize([array], [info], [arg])
            written.result()  # wait, so that only one array is in memory
            self._advance(1)
        return []
