"""Defines `Change`, which applies the adapters of PEFT to one parameter when it is read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from synthesizer_jax.checkpoints.streamed import Part, Unread
from synthesizer_jax.pretrained.tensors import Correspondence, Tensor, read_parameter


class Change(NamedTuple):
    """The change that PEFT makes to the tensor W ``[rows, columns]`` of a module of transformers.

    The attributes are in the order in which they apply.

    Attributes:
      whole: a tensor that replaces W, or None.
      tokens: the ids of tokens whose rows are replaced.
      rows: the new rows of the tokens, or None.
      factors: the factors L ``[rows, rank]`` and R ``[rank, columns]`` of an update
        ``W + scale · L · R``, or None.
      scale: the scale of the update.
      magnitude: the new norms of the rows or columns of the updated tensor, or None.
      norm_axis: the axis over which the norms are taken.
    """

    whole: Tensor | None = None
    tokens: tuple[int, ...] = ()
    rows: Tensor | None = None
    factors: tuple[Tensor, Tensor] | None = None
    scale: float = 1.0
    magnitude: Tensor | None = None
    norm_axis: int = 1

    def is_same(self, other: Change) -> bool:
        """Returns whether two changes have the same effect."""
        tensors = [(self.whole, other.whole), (self.magnitude, other.magnitude)]
        tensors += zip(self.factors or (None, None), other.factors or (None, None), strict=True)
        return (
            self.scale == other.scale
            and (self.magnitude is None or self.norm_axis == other.norm_axis)
            and all(_are_same(x, y) for x, y in tensors)
            and _rows_by_token(self) == _rows_by_token(other)
        )

    def read_with(self, params: Mapping[tuple[str, ...], Unread], site: Site) -> Unread:
        """Returns the changed parameter, which is not read yet.

        Args:
          params: the parameters of the base model.
          site: describes the changed parameter.
        """
        base = params[site.base]
        if site.is_transposed:
            read = base.stored
            base = Unread(site.shape, lambda part: read(part[::-1]).T, base.dtype)
        if self.whole is not None:
            base = Unread(
                site.shape, functools.partial(read_parameter, self.whole, site.correspondence)
            )
        return Unread(site.shape, functools.partial(self._read, base, site))

    def _read(self, base: Unread, site: Site, part: Part) -> np.ndarray:
        """Reads a part of the changed parameter.

        Args:
          base: the parameter without the change.
          site: describes the changed parameter.
          part: the part to read.
        """
        layout = site.correspondence.layout
        # The norms need the whole tensor.
        needed: Part = part if self.magnitude is None else ()
        x = base.read("float32", needed)
        if self.rows is not None:
            x = self._with_rows(x, self.rows, site, needed)
        if self.factors is not None:
            left, right = (_read_floats(tensor) for tensor in self.factors)
            x = x + layout.to_ours(self.scale * (left @ right), site.shape)[needed]
        if self.magnitude is not None:
            matrix = layout.from_ours(x)
            norm = np.linalg.norm(matrix, axis=self.norm_axis)
            factor = _read_floats(self.magnitude) / np.where(norm == 0, 1, norm)
            matrix = matrix * np.expand_dims(factor, self.norm_axis)
            x = np.ascontiguousarray(layout.to_ours(matrix, site.shape)[part])
        return x

    def _with_rows(self, x: np.ndarray, rows: Tensor, site: Site, part: Part) -> np.ndarray:
        """Returns a part of the parameter with the new rows of the tokens.

        Args:
          x: the part without the new rows.
          rows: the new rows ``[tokens, columns]``.
          site: describes the changed parameter.
          part: the position of `x` in the parameter.
        """
        # The rows of the tensor are the columns of an output projection of this package.
        axis = 1 if site.correspondence.layout.transposed else 0
        start, stop = (part[axis] if part else slice(None)).indices(site.shape[axis])[:2]
        columns = part[1 - axis] if part else slice(None)
        x = np.moveaxis(x.copy(), axis, 0)
        for token, row in zip(self.tokens, _read_floats(rows), strict=True):
            if start <= token < stop:
                x[token - start] = row[columns]
        return np.ascontiguousarray(np.moveaxis(x, 0, axis))


def _read_floats(tensor: Tensor) -> np.ndarray:
    """Reads a whole tensor as float32."""
    return tensor.read(()).astype(np.float32)


def _are_same(x: Tensor | None, y: Tensor | None) -> bool:
    """Returns whether two tensors are equal, or both are missing."""
    if x is None or y is None:
        return x is y
    return x is y or np.array_equal(x.read(()), y.read(()))


def _rows_by_token(change: Change) -> dict[int, list[float]]:
    """Returns the new rows of a change by token, because the order of the tokens is arbitrary."""
    if change.rows is None:
        return {}
    return dict(zip(change.tokens, change.rows.read(()).astype(np.float32).tolist(), strict=True))


def transposed(tensor: Tensor) -> Tensor:
    """Returns the transpose of a matrix."""
    return Tensor(tensor.shape[::-1], tensor.dtype, lambda index: tensor.read(()).T[index])


@dataclasses.dataclass(frozen=True)
class Site:
    """A changed parameter, and the parameter of the base model from which it is made.

    Attributes:
      correspondence: the changed parameter and its tensor in transformers.
      base: the path of the parameter of the base model.
      is_transposed: whether the changed parameter has the transposed shape.
    """

    correspondence: Correspondence
    base: tuple[str, ...]
    is_transposed: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """The path of the changed parameter in ``params``."""
        return self.correspondence.path

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the changed parameter."""
        return self.correspondence.shape
