"""Describes how other libraries store the parameters of this package.

Other libraries use different names for the parameters, and transpose or merge axes.
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
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.checkpoints.streamed import Part, Unread, aligned_empty
from synthesizer_jax.models import unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.parameters import abstract_variables


@contextlib.contextmanager
def reading(path: pathlib.Path, remedy: str = "Copy or download it again.") -> Iterator[None]:
    """Context manager that turns errors in a file of tensors into a `ValueError`.

    Unlike `describing`, this context manager also handles the errors of libraries that read
    tensors.

    Args:
      path: the path of the file, for the error message.
      remedy: a sentence that says what the user can do. The sentence is added at the end of the
        error message.

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
    """Describes how another library stores the axes of a parameter.

    Attributes:
      rows: the number of leading axes that the other library merges into the rows of a matrix. The
        remaining axes are merged into the columns. `None` means that the axes are the same in both
        libraries.
      transposed: whether the matrix is transposed. A transposed layout needs `rows`.
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
            x = _transposed(x)
        return x.reshape(shape)

    def locate(self, shape: Sequence[int], part: Part) -> tuple[Part, tuple[int, ...], Part]:
        """Returns how to read a part of a parameter from the other library's array.

        Consecutive entries of the parameter are consecutive in the other library's array only along
        the first of several merged axes. Along the other merged axes, whole ranges are read and cut
        afterwards.

        Args:
          shape: the shape of the whole parameter in this package.
          part: a part of the parameter.

        Returns:
          The part of the other library's array to read, the shape that it has in this package, and
          the part of it that was asked for.
        """
        if not part:
            return (), tuple(shape), ()
        bounds = [axis.indices(n)[:2] for axis, n in zip(part, shape, strict=True)]
        if self.rows is None:
            return part, tuple(stop - start for start, stop in bounds), ()
        outer = []
        read_shape = list(shape)
        for first, end in ((0, self.rows), (self.rows, len(shape))):
            if first == end:
                outer.append(slice(None))
                continue
            inner = math.prod(shape[first + 1 : end])
            start, stop = bounds[first]
            outer.append(slice(start * inner, stop * inner))
            read_shape[first] = stop - start
            bounds[first] = (0, stop - start)
        cut = tuple(slice(*bound) for bound in bounds)
        return tuple(outer[::-1] if self.transposed else outer), tuple(read_shape), cut


_STRIPE = 16
"""The number of rows that `_transposed` copies at once, so that they stay in the cache."""


def _transposed(x: np.ndarray) -> np.ndarray:
    """Returns the transpose of a matrix, in contiguous memory.

    NumPy would copy the columns of a large matrix one after another, and every column touches all
    rows. It is ten times as fast to transpose a few rows at a time. NumPy also copies bfloat16 one
    number at a time, but copies integers of the same size in bulk.
    """
    out = aligned_empty(x.shape[::-1], x.dtype)
    bits = np.dtype(f"u{x.dtype.itemsize}")
    source, target = x.view(bits), out.view(bits)
    for start in range(0, len(source), _STRIPE):
        stripe = slice(start, start + _STRIPE)
        target[:, stripe] = source[stripe].T
    return out


SAME = Layout()
"""The layout of a parameter whose axes are the same in both libraries."""


class Correspondence(NamedTuple):
    """A parameter of this package, and how another library stores the parameter.

    Attributes:
      path: the keys of the parameter in ``params``, in this package.
      shape: the shape of the parameter in this package.
      name: the name of the parameter in the other library.
      layout: the layout of the parameter in the other library.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    name: str
    layout: Layout


class Tensor(NamedTuple):
    """A tensor of a checkpoint, which is read when it is needed.

    Attributes:
      shape: the shape of the tensor.
      dtype: the name of the tensor's dtype, in NumPy or in safetensors.
      read: a function that reads what an index of NumPy selects. The index ``()`` selects the whole
        tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[tuple[slice | int, ...]], np.ndarray]

    @classmethod
    def of(cls, x: np.ndarray) -> Tensor:
        """Returns an array in memory as a `Tensor`."""
        return cls(x.shape, x.dtype.name, lambda index: x[index])


Tensors: TypeAlias = Mapping[str, Tensor]
"""The type of a dictionary of a checkpoint's tensors by name."""

NameOf: TypeAlias = Callable[[tuple[str, ...]], tuple[str, Layout]]
"""Maps the keys of a parameter here to the parameter's name and layout in another library.

The keys are the path of the parameter in a model with looped layers.
"""


def correspondences(model: TokenModel, name_of: NameOf) -> list[Correspondence]:
    """Returns the name and layout in another library for every parameter of a model.

    The names and layouts are for looped layers, even if the layers of `model` are scanned.
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
    """Returns the parameters as nested dictionaries of `Unread`, after checking the tensors.

    The checkpoint must stay open until all parameters have been read.

    Args:
      tensors: the tensors of the checkpoint, by name.
      parameters: the parameters of the model.
      source: the path of the checkpoint, for error messages.
      ignored: the names of tensors that the checkpoint may contain although they are not
        parameters.

    Raises:
      ValueError: if tensors are missing, do not belong to the model, or have the wrong shape or
        dtype. The message lists all tensors that do not fit.
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
        read = functools.partial(read_parameter, tensors[parameter.name], parameter)
        unread[parameter.path] = Unread(parameter.shape, read)
    params: dict[str, PyTree] = traverse_util.unflatten_dict(unread)
    return params


def read_parameter(tensor: Tensor, parameter: Correspondence, part: Part) -> np.ndarray:
    """Reads a part of a parameter from the tensor that stores the parameter.

    The result has the dtype of the tensor.
    """
    outer, shape, cut = parameter.layout.locate(parameter.shape, part)
    return parameter.layout.to_ours(tensor.read(outer), shape)[cut]


def named_tensors(
    params: PyTree, parameters: Sequence[Correspondence], *, phase: Phase = silent_phase
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the name and the array that each parameter has in another library.

    Args:
      params: the parameters of a model with looped layers.
      parameters: the names and layouts of the parameters in the other library.
      phase: a function that reports progress.
    """
    ours = traverse_util.flatten_dict(params)
    advance = phase(f"converting {len(parameters):,} arrays", len(parameters))
    for parameter in parameters:
        yield parameter.name, parameter.layout.from_ours(np.asarray(ours[parameter.path]))
        advance(1)
