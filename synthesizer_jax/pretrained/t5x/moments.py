"""The moments of T5X's Adafactor as those of `optimizers.Adafactor`."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from flax import traverse_util

from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.optimizers.adafactor import factored_dims
from synthesizer_jax.parameters import abstract_variables
from synthesizer_jax.pretrained.tensors import FLOATS, Correspondence, Tensor, Tensors
from synthesizer_jax.typing import PyTree


def find_moments(
    slots: Tensors, parameters: Sequence[Correspondence], model: TokenModel
) -> PyTree | None:
    """Returns the moments of all parameters as nested dictionaries of `Unread`.

    T5X has ``v`` for a parameter that is not factored, and otherwise ``v_row`` without the larger of the
    matrix's dimensions, and ``v_col`` without the smaller.

    Args:
      slots: the checkpoint's moments, ``PARAMETER/v`` and so on.
      parameters: where the parameters are.
      model: the model, with looped layers.

    Returns:
      None if there are none, or they are factored otherwise, as those of scanned layers are.
    """
    _, axes = abstract_variables(model, *model.example(1, 1))
    axes_by_path = traverse_util.flatten_dict(axes["params"])
    found: dict[tuple[str, ...], Unread] = {}
    for c in parameters:
        moments = _find(slots, c, axes_by_path[c.path])
        if moments is None:
            return None
        found |= {(*c.path, name): x for name, x in moments.items()}
    tree: PyTree = traverse_util.unflatten_dict(found)
    return tree


def _find(
    slots: Tensors, c: Correspondence, axes: tuple[str | None, ...]
) -> dict[str, Unread] | None:
    """Returns the moments of one parameter, ``full`` or ``row`` and ``col``; None if they do not fit."""
    dims = factored_dims(axes, c.shape)
    if c.layer is not None or (dims.rows and len(c.their_shape) != 2):
        return None
    if not dims.rows:
        return _to_unread({"full": slots.get(f"{c.name}/v")}, {"full": c.shape}, c.their_shape)
    rows, columns = c.their_shape
    names = ("v_row", "v_col") if rows <= columns else ("v_col", "v_row")
    tensors = {
        key: slots.get(f"{c.name}/{name}") for key, name in zip(("row", "col"), names, strict=True)
    }
    shapes = {
        "row": tuple(c.shape[i] for i in dims.rows),
        "col": tuple(c.shape[i] for i in dims.columns),
    }
    return _to_unread(tensors, shapes, None)


def _to_unread(
    tensors: dict[str, Tensor | None],
    shapes: dict[str, tuple[int, ...]],
    their_shape: tuple[int, ...] | None,
) -> dict[str, Unread] | None:
    """Returns tensors to be read in our shapes; None if one is missing, or of another shape.

    Args:
      tensors: by our name.
      shapes: our shapes.
      their_shape: the shape that the tensors must have; None: they are vectors of as many numbers.
    """
    found = {}
    for name, tensor in tensors.items():
        shape = shapes[name]
        expected = (math.prod(shape),) if their_shape is None else their_shape
        if tensor is None or tensor.shape != expected or tensor.dtype not in FLOATS:
            return None
        found[name] = Unread(shape, functools.partial(_read, tensor, shape))
    return found


def _read(tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    return tensor.read(None).astype(np.float32, copy=False).reshape(shape)
