"""Checkpoints of Mesh-TensorFlow's T5, under the names that T5X's converter gives to the variables."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from synthesizer_jax.files import is_installed
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.pretrained.tensors import Tensor

INDEX = ".index"
"""The end of the name of the file that lists a checkpoint's variables."""

_NORMS = {
    "encoder": ("pre_attention_layer_norm", "pre_mlp_layer_norm"),
    "decoder": (
        "pre_self_attention_layer_norm",
        "pre_cross_attention_layer_norm",
        "pre_mlp_layer_norm",
    ),
}
_READ_ERRORS = (RuntimeError, ValueError, IndexError)
"""What TensorFlow's reader raises besides its own errors; an IndexError where a file is too short."""

_KERNELS = {"q": "query", "k": "key", "v": "value", "o": "out"}
_STEP = "global_step"
_MOMENT = re.compile(r"(?P<name>.*)_slot_(?P<slot>vr|vc|v)")
_SLOTS = {"vr": "v_row", "vc": "v_col", "v": "v"}

_LAYER = re.compile(
    r"(?P<stack>encoder|decoder)/block_(?P<block>\d+)/layer_(?P<sublayer>\d+)/(?P<rest>.+)"
)
_FINAL_NORM = re.compile(r"(encoder|decoder)/(?:final_layer|rms)_norm/scale")
_BIAS = "SelfAttention/relative_attention_bias"


def find_checkpoint_prefix(path: pathlib.Path) -> pathlib.Path | None:
    """Returns ``DIR/model.ckpt-STEP`` for that path, its index file, or a directory with one checkpoint.

    Returns None if there is no such checkpoint.

    Raises:
      ValueError: a directory holds several.
    """
    if path.name.endswith(INDEX) and path.is_file():
        return path.with_name(path.name.removesuffix(INDEX))
    if path.name and path.with_name(path.name + INDEX).is_file():
        return path
    found = sorted(path.glob(f"*{INDEX}")) if path.is_dir() else []
    if len(found) > 1:
        names = ", ".join(file.name.removesuffix(INDEX) for file in found)
        raise ValueError(
            f"{path} holds several checkpoints ({names}); name one, such as {found[0]}"
        )
    return found[0].with_name(found[0].name.removesuffix(INDEX)) if found else None


def open_variables(
    prefix: pathlib.Path,
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor | None]:
    """Returns a checkpoint's parameters, Adafactor's moments and step, by their names in T5X.

    Args:
      prefix: ``DIR/model.ckpt-STEP``.

    Raises:
      ValueError: TensorFlow is not installed, or cannot read the files.
    """
    if not is_installed("tensorflow"):
        raise ValueError(
            f"{prefix} is a checkpoint of TensorFlow; run pip install 'synthesizer_jax[data]' to read it"
        )
    import tensorflow as tf

    try:
        reader: Any = tf.train.load_checkpoint(str(prefix))
        shapes = reader.get_variable_to_shape_map()
        dtypes = reader.get_variable_to_dtype_map()
    except (tf.errors.OpError, *_READ_ERRORS) as error:
        raise _unreadable(prefix, error) from None

    def read(layer: int | None, *, name: str) -> np.ndarray:
        assert layer is None, "Mesh-TensorFlow stacks no layers"
        try:
            array: np.ndarray = reader.get_tensor(name)
        except (tf.errors.OpError, *_READ_ERRORS) as error:
            raise _unreadable(prefix, error) from None
        return array

    variables = {
        name: Tensor(tuple(shape), dtypes[name].name, functools.partial(read, name=name))
        for name, shape in shapes.items()
    }
    step = variables.pop(_STEP, None)
    rename = _renaming(variables)
    parameters, moments = {}, {}
    for name, variable in variables.items():
        if match := _MOMENT.fullmatch(name):
            moments[f"{rename(match['name'])}/{_SLOTS[match['slot']]}"] = variable
        else:
            parameters[rename(name)] = variable
    return parameters, moments, step


def _unreadable(prefix: pathlib.Path, error: Exception) -> ValueError:
    return ValueError(f"{prefix} cannot be read ({one_line_error(error)}); copy it again")


def _renaming(names: Iterable[str]) -> Callable[[str], str]:
    """Returns the function from a variable's name to that in T5X; other names stay.

    A stack's relative bias is that of its first block, unless every block has its own.
    """
    per_layer = any(name.endswith(_BIAS) and "/block_000/" not in name for name in names)

    def rename(name: str) -> str:
        if name == "shared/embedding":
            return "token_embedder/embedding"
        if name == "decoder/logits/kernel":
            return "decoder/logits_dense/kernel"
        if match := _FINAL_NORM.fullmatch(name):
            return f"{match[1]}/{match[1]}_norm/scale"
        match = _LAYER.fullmatch(name)
        return _rename_in_layer(match, per_layer=per_layer) if match else name

    return rename


def _rename_in_layer(match: re.Match[str], *, per_layer: bool) -> str:
    """Returns the name in T5X of a variable of a block."""
    stack, rest = match["stack"], match["rest"]
    layer = f"{stack}/layers_{int(match['block'])}"
    norms, sublayer = _NORMS[stack], int(match["sublayer"])
    if rest == _BIAS:
        return f"{layer if per_layer else stack}/relpos_bias/rel_embedding"
    if rest in ("layer_norm/scale", "rms_norm/scale") and sublayer < len(norms):
        return f"{layer}/{norms[sublayer]}/scale"
    if kernel := re.fullmatch(r"(SelfAttention|EncDecAttention)/([qkvo])", rest):
        own = "attention" if stack == "encoder" else "self_attention"
        mixer = own if kernel[1] == "SelfAttention" else "encoder_decoder_attention"
        return f"{layer}/{mixer}/{_KERNELS[kernel[2]]}/kernel"
    if kernel := re.fullmatch(r"DenseReluDense/(w[io](?:_\d)?)/kernel", rest):
        return f"{layer}/mlp/{kernel[1]}/kernel"
    return match.string
