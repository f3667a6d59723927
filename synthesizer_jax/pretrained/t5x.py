"""T5X's checkpoints in one msgpack file, ``checkpoint_STEP``, gzipped or not.

A file holds parameters and the optimizer's state, but no configuration: the architecture is read off
the names and shapes. The parameters that Mesh-TensorFlow's T5s have after T5X's conversion are the same.
"""

from __future__ import annotations

import gzip
import pathlib
import re
import zlib
from collections.abc import Iterator, Mapping, Set

import msgpack
import numpy as np
from flax import serialization

from synthesizer_jax.pretrained.architecture import Architecture, Pretrained
from synthesizer_jax.pretrained.tensors import (
    MATRIX,
    SAME,
    Layout,
    correspondences,
    read_params,
)
from synthesizer_jax.typing import PyTree

HEADS_OF_INPUTS = Layout((0, 1, 2), (1, 2))
"""``[d_model, heads · width]`` for ``[d_model, heads, width]``."""

HEADS_OF_OUTPUTS = Layout((0, 1, 2), (2, 1))
"""``[heads · width, d_model]`` for ``[heads, width, d_model]``."""

_LAYOUTS = {"query": HEADS_OF_INPUTS, "key": HEADS_OF_INPUTS, "value": HEADS_OF_INPUTS}
_GZIP = b"\x1f\x8b"


def their_name(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns T5X's name and layout of a parameter of ours.

    Args:
      path: the keys of the parameter, with looped layers.
    """
    if path == ("embedding",):
        return "token_embedder/embedding", MATRIX
    if path == ("logits_kernel",):
        return "decoder/logits_dense/kernel", MATRIX
    if path[1] == "final_norm":
        return f"{path[0]}/{path[0]}_norm/scale", SAME
    name = "/".join(key for key in path if key != "align")
    if "out" in path:
        return name, HEADS_OF_OUTPUTS
    if path[-1] == "scale":
        return name, SAME
    return name, _LAYOUTS.get(path[-2], MATRIX)


def read_file(path: pathlib.Path) -> Pretrained:
    """Reads the parameters of a checkpoint; its optimizer's state is left out.

    A gated feed-forward layer is taken for T5 1.1's, with GELU, and the largest distance of the
    relative bias for 128, as in every published T5: the file does not tell.

    Args:
      path: ``checkpoint_STEP``.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a checkpoint of a T5; the message lists all tensors that do not fit.
    """
    tensors = _Tensors(dict(_leaves(_read_target(path))))
    model = _architecture(tensors, path).build()
    params = read_params(tensors, correspondences(model, their_name))
    return Pretrained(model, {"params": params}, None)


class _Tensors:
    """The arrays of a tree, by names joined with ``/``."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._arrays = arrays

    @property
    def names(self) -> Set[str]:
        """The names of all arrays."""
        return self._arrays.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns an array's shape."""
        return self._arrays[name].shape

    def dtype(self, name: str) -> str:
        """Returns the name of an array's dtype."""
        return self._arrays[name].dtype.name

    def read(self, name: str) -> np.ndarray:
        """Returns an array."""
        return self._arrays[name]


def _read_target(path: pathlib.Path) -> PyTree:
    """Returns the tree of parameters in a file.

    Raises:
      ValueError: the file is damaged, or is not a checkpoint.
    """
    data = path.read_bytes()
    try:
        tree = serialization.msgpack_restore(gzip.decompress(data) if data[:2] == _GZIP else data)
    except (ValueError, TypeError, OSError, EOFError, zlib.error, msgpack.UnpackException) as error:
        raise ValueError(
            f"{path} is not a msgpack checkpoint of T5X ({error}); copy or download it again"
        ) from None
    for key in ("optimizer", "target"):
        tree = tree.get(key) if isinstance(tree, dict) else None
    if not isinstance(tree, dict):
        raise ValueError(
            f"{path} has no parameters under optimizer/target; give a checkpoint of T5X"
        )
    return tree


def _leaves(tree: PyTree, name: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Returns the arrays of nested dictionaries with their names."""
    if isinstance(tree, dict):
        for key, child in tree.items():
            yield from _leaves(child, f"{name}/{key}" if name else str(key))
    elif isinstance(tree, np.ndarray):
        yield name, tree


def _architecture(tensors: _Tensors, path: pathlib.Path) -> Architecture:
    """Returns the architecture that names and shapes imply.

    Raises:
      ValueError: parameters of every T5 are missing.
    """

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in tensors.names or len(tensors.shape(name)) != rank:
            raise ValueError(
                f"{path} has no array {name} of {rank} axes; only unscanned T5s are supported"
            )
        return tensors.shape(name)

    def num_layers(stack: str) -> int:
        numbers = (re.match(rf"{stack}/layers_(\d+)/", name) for name in tensors.names)
        return len({found.group(1) for found in numbers if found})

    heads, buckets = shape("encoder/relpos_bias/rel_embedding", 2)
    vocab_size, d_model = shape("token_embedder/embedding", 2)
    gated = "encoder/layers_0/mlp/wi_0/kernel" in tensors.names
    _, d_ff = shape(f"encoder/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel", 2)
    _, inner = shape("encoder/layers_0/attention/query/kernel", 2)
    return Architecture(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=heads,
        head_dim=max(inner // max(heads, 1), 1),
        d_ff=d_ff,
        num_layers=num_layers("encoder"),
        num_decoder_layers=num_layers("decoder"),
        activations=("gelu", "linear") if gated else ("relu",),
        tied="decoder/logits_dense/kernel" not in tensors.names,
        num_buckets=buckets,
    )
