"""Parameters as other libraries store them: under other names, with axes reordered and merged."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
import pickle
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from flax import traverse_util
from safetensors import SafetensorError

from synthesizer_jax.base.files import describing
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.models import unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.parameters import abstract_variables


@contextlib.contextmanager
def reading(path: pathlib.Path, remedy: str = "copy or download it again") -> Iterator[None]:
    """`describing` for files of tensors, whose readers also raise errors of their own."""
    with describing(path, remedy):
        try:
            yield
        except (EOFError, zlib.error, SafetensorError, pickle.UnpicklingError) as error:
            raise ValueError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Layout:
    """How another library stores a parameter.

    With the same axes, or as a matrix, perhaps transposed, whose rows are our first `rows` axes merged.
    """

    rows: int | None = None
    transposed: bool = False

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the other library's shape of a parameter of ours."""
        if self.rows is None:
            return tuple(shape)
        matrix = math.prod(shape[: self.rows]), math.prod(shape[self.rows :])
        return matrix[::-1] if self.transposed else matrix

    def from_ours(self, x: np.ndarray) -> np.ndarray:
        """Converts a parameter of ours to the other library's."""
        shape = self.shape(x.shape)
        return x.reshape(shape[::-1]).T if self.transposed else x.reshape(shape)

    def to_ours(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Converts a parameter of the other library to ours, of the given shape."""
        return (np.ascontiguousarray(x.T) if self.transposed else x).reshape(shape)


SAME = Layout()


class Correspondence(NamedTuple):
    """A parameter: its keys in ``params`` and its shape here, its name and layout in another library."""

    path: tuple[str, ...]
    shape: tuple[int, ...]
    name: str
    layout: Layout


class Tensor(NamedTuple):
    """A tensor of a checkpoint; it is read, or one index of its axis 1, when it is asked for."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int | None], np.ndarray]

    @classmethod
    def of(cls, x: np.ndarray) -> Tensor:
        """Returns an array in memory as a tensor."""
        return cls(x.shape, x.dtype.name, lambda layer: x if layer is None else x[:, layer])


Tensors: TypeAlias = Mapping[str, Tensor]
"""The tensors of a checkpoint by name."""

NameOf: TypeAlias = Callable[[tuple[str, ...]], tuple[str, Layout]]
"""Maps the keys of a parameter of ours, with looped layers, to its name and layout in another library."""


def correspondences(model: TokenModel, name_of: NameOf) -> list[Correspondence]:
    """Returns where every parameter of a model, with looped layers, is found in another library."""
    looped = unroll(model)
    shapes = abstract_variables(looped, *looped.example(1, 1))[0]["params"]
    flat = traverse_util.flatten_dict(shapes)
    return [Correspondence(path, x.shape, *name_of(path)) for path, x in sorted(flat.items())]


FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
"""Names of the dtypes that parameters may have, NumPy's and those of safetensors."""


def match_tensors(
    tensors: Tensors,
    parameters: Sequence[Correspondence],
    *,
    source: pathlib.Path,
    ignored: Collection[str] = (),
) -> dict[str, PyTree]:
    """Returns the parameters as nested dictionaries of `Unread`, once all names and shapes fit.

    The checkpoint stays open until they are read; `ignored` tensors are not parameters.

    Raises:
      ValueError: tensors are missing, superfluous, or of another shape or dtype; all are listed.
    """
    problems = []
    for c in parameters:
        name, shape, tensor = c.name, c.layout.shape(c.shape), tensors.get(c.name)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif tensor.shape != shape:
            problems.append(f"{name} is {tensor.shape}, not {shape}")
        elif tensor.dtype not in FLOATS:
            problems.append(f"{name} is {tensor.dtype}, not a floating-point number")
    superfluous = tensors.keys() - {c.name for c in parameters} - set(ignored)
    problems += [f"{name} is not part of the model" for name in sorted(superfluous)]
    if problems:
        raise ValueError(f"{source}: the tensors do not fit: {'; '.join(problems)}; nothing was read")
    unread = {c.path: Unread(c.shape, functools.partial(_read, tensors[c.name], c)) for c in parameters}
    params: dict[str, PyTree] = traverse_util.unflatten_dict(unread)
    return params


def _read(tensor: Tensor, c: Correspondence) -> np.ndarray:
    """Reads a parameter in the dtype in which it is stored."""
    return c.layout.to_ours(tensor.read(None), c.shape)


def named_tensors(params: PyTree, parameters: Sequence[Correspondence]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the names and values that parameters, with looped layers, have in another library."""
    ours = traverse_util.flatten_dict(params)
    for c in parameters:
        yield c.name, c.layout.from_ours(np.asarray(ours[c.path]))
