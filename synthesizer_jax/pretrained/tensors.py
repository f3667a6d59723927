"""Parameters as other libraries store them: under other names, with axes reordered and merged."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.models import TextToText, unroll
from synthesizer_jax.typing import PyTree


@dataclasses.dataclass(frozen=True)
class Layout:
    """An order of axes, of which neighbors may be merged.

    Attributes:
      order: our axes in the other library's order.
      merged: how many of these, in this order, make each of its axes.
    """

    order: tuple[int, ...]
    merged: tuple[int, ...]

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the other library's shape of a parameter of ours."""
        lengths = (shape[axis] for axis in self.order)
        return tuple(math.prod(itertools.islice(lengths, n)) for n in self.merged)

    def from_ours(self, x: np.ndarray) -> np.ndarray:
        """Converts a parameter of ours to the other library's."""
        return x.transpose(self.order).reshape(self.shape(x.shape))

    def to_ours(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Converts a parameter of the other library to ours, of the given shape."""
        return x.reshape([shape[axis] for axis in self.order]).transpose(np.argsort(self.order))


SAME = Layout((0,), (1,))
MATRIX = Layout((0, 1), (1, 1))
TRANSPOSED = Layout((1, 0), (1, 1))


class Correspondence(NamedTuple):
    """A parameter here and elsewhere.

    Attributes:
      path: the keys of our parameter in ``params``.
      shape: our shape.
      name: the name in the other library.
      layout: its layout there.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    name: str
    layout: Layout

    @property
    def their_shape(self) -> tuple[int, ...]:
        """The shape in the other library."""
        return self.layout.shape(self.shape)


def correspondences(
    model: TextToText, their_name: Callable[[tuple[str, ...]], tuple[str, Layout]]
) -> list[Correspondence]:
    """Returns where every parameter of a model, with looped layers, is found in another library.

    Args:
      model: the model.
      their_name: maps the keys of a parameter of ours to its name and layout there.
    """
    looped = unroll(model)
    shapes = jax.eval_shape(looped.init, jax.random.key(0), *looped.example(1, 1))["params"]
    found = []
    for path, x in jax.tree.leaves_with_path(shapes):
        keys = tuple(entry.key for entry in path)
        name, layout = their_name(keys)
        found.append(Correspondence(keys, x.shape, name, layout))
    return found


class Tensors(Protocol):
    """The tensors of a checkpoint, read one by one."""

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape without reading it."""
        ...

    def dtype(self, name: str) -> str:
        """Returns the name of a tensor's dtype without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """Reads a tensor."""
        ...


FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
"""Names of the dtypes that parameters may have, NumPy's and those of safetensors."""


def read_params(
    tensors: Tensors, wanted: Sequence[Correspondence], *, ignored: Collection[str] = ()
) -> dict[str, PyTree]:
    """Reads every parameter as float32, once all names, shapes and dtypes fit.

    Args:
      tensors: the checkpoint.
      wanted: where every parameter is.
      ignored: names of tensors that are not parameters.

    Raises:
      ValueError: tensors are missing, superfluous, or of another shape or dtype; all are listed.
    """
    names = set(tensors.names)
    problems = []
    for c in wanted:
        if c.name not in names:
            problems.append(f"{c.name} is missing")
        elif tensors.shape(c.name) != c.their_shape:
            problems.append(f"{c.name} is {tensors.shape(c.name)}, not {c.their_shape}")
        elif tensors.dtype(c.name) not in FLOATS:
            problems.append(f"{c.name} is {tensors.dtype(c.name)}, not a floating-point number")
    superfluous = names - {c.name for c in wanted} - set(ignored)
    problems += [f"{name} is not part of the model" for name in sorted(superfluous)]
    if problems:
        raise ValueError(f"the tensors do not fit: {'; '.join(problems)}; nothing was read")
    params: dict[str, PyTree] = {}
    for c in wanted:
        array = c.layout.to_ours(tensors.read(c.name).astype(np.float32, copy=False), c.shape)
        branch = params
        for key in c.path[:-1]:
            branch = branch.setdefault(key, {})
        branch[c.path[-1]] = jnp.asarray(array)
    return params
