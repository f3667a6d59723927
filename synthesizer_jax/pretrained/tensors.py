"""Describes how other libraries store the parameters of this package.

They use other names, and they reorder and merge axes.
"""

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
def reading(path: pathlib.Path, remedy: str = "Copy or download it again.") -> Iterator[None]:
    """Context manager like `describing`, for files of tensors.

    The readers of such files also raise errors of their own types, which become a `ValueError`
    here.

    Args:
      path: the path of the file, which the message contains.
      remedy: what the user can do, which ends the message.

    Raises:
      ValueError: if the contents of the file cannot be read.
    """
    with describing(path, remedy):
        try:
            yield
        except (EOFError, zlib.error, SafetensorError, pickle.UnpicklingError) as error:
            raise ValueError(str(error)) from error


@dataclasses.dataclass(frozen=True)
class Layout:
    """How another library stores the axes of a parameter.

    Attributes:
      rows: if given, the other library stores a matrix. Its rows are the first `rows` axes of this
        package's array, merged, and its columns are the other axes. If `None`, the axes are the
        same.
      transposed: whether the matrix is transposed. This needs `rows`.
    """

    rows: int | None = None
    transposed: bool = False

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape that a parameter of this package has in the other library."""
        if self.rows is None:
            return tuple(shape)
        matrix = math.prod(shape[: self.rows]), math.prod(shape[self.rows :])
        return matrix[::-1] if self.transposed else matrix

    def from_ours(self, x: np.ndarray) -> np.ndarray:
        """Converts an array of this package to the other library's shape."""
        shape = self.shape(x.shape)
        if self.transposed:
            return x.reshape(shape[::-1]).T
        return x.reshape(shape)

    def to_ours(self, x: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Converts an array of the other library to this package's `shape`."""
        if self.transposed:
            x = np.ascontiguousarray(x.T)
        return x.reshape(shape)


SAME = Layout()
"""The layout of a parameter whose axes are the same in both libraries."""


class Correspondence(NamedTuple):
    """A parameter of this package, and where another library has it.

    Attributes:
      path: its keys in ``params``, in this package.
      shape: its shape in this package.
      name: its name in the other library.
      layout: its layout in the other library.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    name: str
    layout: Layout


class Tensor(NamedTuple):
    """A tensor of a checkpoint, which is read when it is needed.

    Attributes:
      shape: its shape.
      dtype: the name of its dtype, in NumPy or in safetensors.
      read: reads the tensor if called with `None`, or one index of its axis 1 if called with a
        number.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[int | None], np.ndarray]

    @classmethod
    def of(cls, x: np.ndarray) -> Tensor:
        """Returns an array in memory as a `Tensor`."""
        return cls(x.shape, x.dtype.name, lambda layer: x if layer is None else x[:, layer])


Tensors: TypeAlias = Mapping[str, Tensor]
"""The tensors of a checkpoint by name."""

NameOf: TypeAlias = Callable[[tuple[str, ...]], tuple[str, Layout]]
"""Maps the keys of a parameter of this package to its name and layout in another library.

The layers are looped.
"""


def correspondences(model: TokenModel, name_of: NameOf) -> list[Correspondence]:
    """Returns the name and layout in another library for every parameter of a model.

    The keys are those of the model with looped layers, even if `model` has scanned ones.
    """
    looped = unroll(model)
    shapes, _ = abstract_variables(looped, *looped.example(1, 1))
    flat = traverse_util.flatten_dict(shapes["params"])
    return [Correspondence(path, x.shape, *name_of(path)) for path, x in sorted(flat.items())]


FLOATS = ("float64", "float32", "float16", "bfloat16", "F64", "F32", "F16", "BF16")
"""The names of the dtypes that parameters may have, in NumPy and in safetensors."""


def match_tensors(
    tensors: Tensors,
    parameters: Sequence[Correspondence],
    *,
    source: pathlib.Path,
    ignored: Collection[str] = (),
) -> dict[str, PyTree]:
    """Returns the parameters as nested dictionaries of `Unread`, if all names and shapes fit.

    The checkpoint must stay open until the parameters are read.

    Args:
      tensors: the tensors of the checkpoint, by name.
      parameters: the parameters of the model.
      source: the path of the checkpoint, for messages.
      ignored: names of tensors that may be present but are not parameters.

    Raises:
      ValueError: if tensors are missing or superfluous, or have another shape or dtype. The message
        lists all of them.
    """
    problems = []
    for parameter in parameters:
        name = parameter.name
        shape = parameter.layout.shape(parameter.shape)
        tensor = tensors.get(name)
        if tensor is None:
            problems.append(f"{name} is missing")
        elif tensor.shape != shape:
            problems.append(f"{name} has the shape {tensor.shape} instead of {shape}")
        elif tensor.dtype not in FLOATS:
            problems.append(f"{name} is {tensor.dtype}, which is not a floating-point dtype")
    superfluous = tensors.keys() - {parameter.name for parameter in parameters} - set(ignored)
    problems += [f"{name} is not part of the model" for name in sorted(superfluous)]
    if problems:
        raise ValueError(
            f"The tensors in {source} do not fit the model, so nothing was read: "
            f"{'; '.join(problems)}."
        )

    unread = {}
    for parameter in parameters:
        read = functools.partial(_read, tensors[parameter.name], parameter)
        unread[parameter.path] = Unread(parameter.shape, read)
    params: dict[str, PyTree] = traverse_util.unflatten_dict(unread)
    return params


def _read(tensor: Tensor, parameter: Correspondence) -> np.ndarray:
    """Reads a parameter in the dtype in which it is stored."""
    return parameter.layout.to_ours(tensor.read(None), parameter.shape)


def named_tensors(
    params: PyTree, parameters: Sequence[Correspondence]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the value that each parameter has in another library.

    The layers of `params` must be looped.
    """
    ours = traverse_util.flatten_dict(params)
    for parameter in parameters:
        yield parameter.name, parameter.layout.from_ours(np.asarray(ours[parameter.path]))
