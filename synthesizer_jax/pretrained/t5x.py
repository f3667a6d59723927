"""Reads and writes the checkpoints of T5X.

A checkpoint of T5X is a msgpack file, a directory of TensorStore arrays, or a directory of Orbax.
Only the parameters are read, and not the state of the optimizer. A T5X checkpoint contains no
configuration, so the architecture is derived from the names and shapes of the arrays.
"""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore
from flax import serialization, traverse_util

from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import format_value
from synthesizer_jax.models import Encoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import (
    MOST_LAYERS,
    Architecture,
    Pretrained,
    with_output_of_t5,
)
from synthesizer_jax.pretrained.tensors import (
    SAME,
    Layout,
    Tensor,
    Tensors,
    correspondences,
    match_tensors,
    named_tensors,
    reading,
)
from synthesizer_jax.primitives.parameters import Variables

CHECKPOINT = "checkpoint"
"""The name of the msgpack file in a checkpoint's directory."""

OCDBT = "manifest.ocdbt"
"""The file that marks a directory in which TensorStore's arrays share one database."""

_GZIP = b"\x1f\x8b"
_ARRAY = re.compile(
    r"(?P<name>_?(?:optimizer\.)?target\.(?P<path>[A-Za-z0-9_.]+))/(?P<about>\.zarray|zarr\.json)"
)
"""Matches the names of files that describe arrays.

For example, the pattern matches ``target.encoder.layers_0.…/.zarray``.
"""

_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
"""Maps the name of the file that describes an array to TensorStore's driver for the array."""


_HEADS = {"query": Layout(1), "key": Layout(1), "value": Layout(1), "out": Layout(2)}
"""The layouts in T5X of kernels that have an axis of heads in this package.

T5X merges the axes of ``[d_model, heads, width]`` and ``[heads, width, d_model]``, so that the
kernels are matrices.
"""


_ASSUMED = {
    "activations": (("relu",), ("gelu", "linear")),
    "max_distance": (128,),
    "epsilon": (1e-6,),
}
"""The values that `open_checkpoint` assumes for fields that a checkpoint does not contain."""


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Returns whether a directory is a T5X checkpoint."""
    return (directory / CHECKPOINT).is_file() or _orbax_item(directory) is not None


def open_checkpoint(path: pathlib.Path) -> Pretrained:
    """Opens the parameters of a T5X checkpoint.

    The checkpoint does not contain all settings of the model. A gated feed-forward layer is assumed
    to use GELU, as in T5 1.1, and the maximum distance of the relative bias is assumed to be 128,
    as in T5X's own T5s. For some models, these assumptions are wrong. For example, UL2 uses SiLU.

    Args:
      path: a file, or a directory ``checkpoint_STEP``.

    Raises:
      ValueError: if the path does not contain a T5. The message lists all tensors that do not fit.
    """
    item = _orbax_item(path) if path.is_dir() else None
    if item is not None:
        tensors = _open_stores(item)
    elif path.is_dir():
        # Large arrays are stored by TensorStore, and small arrays in the msgpack file.
        tensors = {**_open_msgpack(path / CHECKPOINT), **_open_stores(path)}
    else:
        tensors = _open_msgpack(path)
    tensors = _looped(tensors, path)
    model = _architecture(tensors, path).build()
    parameters = correspondences(model, t5x_name)
    return Pretrained(model, match_tensors(tensors, parameters, source=path), None)


def write_checkpoint(
    directory: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    *,
    step: int = 0,
    scanned: bool = False,
    phase: Phase = silent_phase,
) -> None:
    """Writes the parameters as the msgpack file ``checkpoint`` of T5X.

    The state of an optimizer is not written.

    Args:
      directory: an empty directory. T5X expects the name ``checkpoint_STEP`` for the directory.
      model: the model, with looped layers.
      variables: the variables of the model.
      step: the training step to record.
      scanned: whether to stack the layers of each stack on axis 1, as T5X's scalable T5 does.
      phase: a function that reports progress.

    Raises:
      ValueError: if T5X does not support the model. The message names the part of the model that
        T5X does not support.
    """
    if isinstance(model, Encoder):
        raise ValueError("T5X has no models with only an encoder. Export an EncoderDecoder.")
    model, params = with_output_of_t5(model, variables["params"])
    fields = dataclasses.asdict(Architecture.of(model))
    for name, assumed in _ASSUMED.items():
        if fields[name] not in assumed:
            raise ValueError(
                f"The model has {name} {fields[name]}, but T5X's files do not record this field, "
                "so they would be read as another model. Use --to huggingface instead."
            )

    arrays = dict(named_tensors(params, correspondences(model, t5x_name), phase=phase))
    advance = phase(f"writing {CHECKPOINT}", 1)
    if scanned:
        arrays = _scanned(arrays)
    leaves = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    target = traverse_util.unflatten_dict(leaves, sep="/")
    state = {"step": np.asarray(step, np.int32), "param_states": {}}
    data = serialization.msgpack_serialize(
        {"version": 3, "optimizer": {"target": target, "state": state}}
    )
    (directory / CHECKPOINT).write_bytes(data)
    advance(1)


def _open_msgpack(path: pathlib.Path) -> dict[str, Tensor]:
    """Returns the arrays in a msgpack file, which may be gzipped, without executing any code."""
    data = path.read_bytes()
    with reading(path):
        if data[:2] == _GZIP:
            data = gzip.decompress(data)
        try:
            tree = serialization.msgpack_restore(data)
        except ValueError as error:
            raise ValueError(
                f"it is not a complete msgpack file, such as T5X writes ({error})"
            ) from error
        if isinstance(tree, dict):
            tree = tree.get("optimizer", tree)
        target = tree.get("target") if isinstance(tree, dict) else None
        if not isinstance(target, dict):
            raise ValueError(
                "it has no parameters under optimizer/target, where checkpoints of T5X have them"
            )
        return {
            "/".join(map(str, keys)): Tensor.of(x)
            for keys, x in traverse_util.flatten_dict(target).items()
            if isinstance(x, np.ndarray)  # other leaves may be paths of TensorStore
        }


def _orbax_item(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory with the arrays of an Orbax checkpoint, or `None`.

    The result is `None` if the directory is not an Orbax checkpoint.
    """
    for item in (directory, directory / "state", directory / "default"):
        if (item / "_METADATA").is_file() or (item / OCDBT).is_file():
            return item
    return None


def _open_stores(directory: pathlib.Path) -> dict[str, Tensor]:
    """Opens the arrays that TensorStore has written into a directory.

    Other files of a checkpoint, such as the msgpack file, may contain paths of arrays. The function
    does not follow these paths, because an untrusted file could contain any path.
    """
    path = f"{directory.resolve()}/"
    store = {"driver": "file", "path": path}
    if (directory / OCDBT).is_file():
        store = {"driver": "ocdbt", "base": f"file://{path}"}
    arrays = {}
    with reading(directory):
        files = tensorstore.KvStore.open(store).result()
        for key in sorted(key.decode() for key in files.list().result()):
            match = _ARRAY.fullmatch(key)
            if match is not None:
                with reading(directory / match["name"]):
                    array = _open_store(files, store, match)
                name = match["path"].replace(".", "/")
                arrays[name] = _in_store(array, directory / match["name"])
    return arrays


def _open_store(files: Any, store: Mapping[str, str], match: re.Match[str]) -> Any:
    """Opens an array that TensorStore has written.

    Args:
      files: the files of the checkpoint, as a `KvStore` of TensorStore.
      store: the specification of `files`.
      match: the match of the pattern `_ARRAY` in the name of the file that describes the array.

    Raises:
      ValueError: if the file does not describe an array of numbers.
    """
    # TensorStore accepts structured dtypes, and ignores bytes after the JSON. Check here that the
    # file contains only JSON, and that its dtype is the name of a dtype of numbers.
    about = json.loads(files.read(match[0]).result().value)
    dtype = about.get("dtype", about.get("data_type"))
    if not isinstance(dtype, str):
        raise ValueError(f"its dtype is {format_value(dtype)}, which is not a dtype of numbers")

    spec = {
        "driver": _DRIVERS[match["about"]],
        "kvstore": {**store, "path": f"{store.get('path', '')}{match['name']}/"},
        # By default, TensorStore silently fills a missing chunk with zeros.
        "fill_missing_data_reads": False,
    }
    array: Any = tensorstore.open(spec, open=True, read=True).result()
    chunks = array.chunk_layout.write_chunk.shape
    if any(chunk > max(n, 1) for chunk, n in zip(chunks, array.shape, strict=True)):
        # TensorStore allocates memory for whole chunks, so a damaged file with a huge chunk size
        # would make the process run out of memory.
        raise ValueError(
            f"its chunks have the shape {chunks}, but the array has only the shape {array.shape}"
        )
    return array


def _in_store(store: Any, source: pathlib.Path) -> Tensor:
    """Returns an array of TensorStore as a `Tensor`.

    Arrays of uint16 are read as bfloat16, because old versions of T5X wrote bfloat16 as uint16.
    """
    as_bits = store.dtype.name == "uint16"

    def read(index: tuple[slice | int, ...]) -> np.ndarray:
        """Reads the part of the array that an index selects."""
        with reading(source):
            array: np.ndarray = store[index].read().result()
        return array.view(ml_dtypes.bfloat16) if as_bits else array

    return Tensor(tuple(store.shape), "bfloat16" if as_bits else store.dtype.name, read)


def t5x_name(path: tuple[str, ...]) -> tuple[str, Layout]:
    """Returns the name and the layout that a parameter of this package has in T5X.

    The path must be the path of the parameter in a model with looped layers. The name is the
    parameter's name in T5X's minimal T5, which has looped layers too.
    """
    if path == ("embedding",):
        return "token_embedder/embedding", SAME
    if path == ("logits_kernel",):
        return "decoder/logits_dense/kernel", SAME
    if path[1] == "final_norm":
        return f"{path[0]}/{path[0]}_norm/scale", SAME
    if path[-1] == "rel_embedding":
        # A shared relative bias has the name ``encoder/relpos_bias``. A relative bias of only one
        # layer has a name such as ``encoder/layers_0/relpos_bias``.
        is_shared = path[1] == "relpos_bias"
        parent = path[:1] if is_shared else path[:2]
        return "/".join((*parent, "relpos_bias", "rel_embedding")), SAME
    # Skip the keys for the alignment and for the parts of a mixture, because names in T5X do not
    # contain them.
    name = "/".join(key for key in path if key not in ("align", "part_0"))
    return name, _HEADS.get(path[-2], SAME)


def _looped(tensors: Tensors, path: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors with the names and shapes that they have in T5X's minimal T5.

    The minimal T5 has looped layers, and its kernels have no axis of heads. The function therefore
    splits scanned layers, and merges axes of heads.
    """
    looped = {}
    for name, x in tensors.items():
        stack, *rest = name.split("/")
        # The names of scanned layers begin with ``encoder/encoder`` or ``encoder/layers``. The
        # names of looped layers begin with ``encoder/layers_0``.
        if len(rest) < 2 or rest[0] not in (stack, "layers"):
            looped[name] = x
            continue
        count = x.shape[1] if len(x.shape) > 1 else 0
        if not 0 < count <= MOST_LAYERS:
            raise ValueError(
                f"{name} in {path} has {count} layers, but it must have 1 to {MOST_LAYERS}. Copy "
                "or download the checkpoint again."
            )
        for i in range(count):
            looped["/".join([stack, f"layers_{i}", *rest[1:]])] = _layer(x, i)
    # Some checkpoints call the relative bias ``relative_posemb``.
    return {
        name.replace("/relative_posemb/", "/relpos_bias/"): _without_heads(name, x)
        for name, x in looped.items()
    }


def _layer(x: Tensor, i: int) -> Tensor:
    """Returns one layer of a tensor whose layers are stacked on axis 1."""

    def read(index: tuple[slice | int, ...]) -> np.ndarray:
        """Reads a part of the layer."""
        first, *others = index or (slice(None),)
        return x.read((first, i, *others))

    return Tensor((x.shape[0], *x.shape[2:]), x.dtype, read)


def _without_heads(name: str, x: Tensor) -> Tensor:
    """Merges the axis of heads of a tensor, if it has such an axis, with a neighboring axis."""
    # For example, the parent of "encoder/layers_0/attention/query/kernel" is "query".
    parent = pathlib.PurePosixPath(name).parent.name
    layout = _HEADS.get(parent)
    if layout is None or len(x.shape) != 3:
        return x
    shape = layout.shape(x.shape)
    return Tensor(shape, x.dtype, lambda index: x.read(()).reshape(shape)[index])


def _scanned(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stacks the layers of each encoder or decoder on axis 1, as in T5X's scalable T5."""
    scanned: dict[str, np.ndarray] = {}
    layers: dict[str, dict[int, np.ndarray]] = collections.defaultdict(dict)
    for name, x in arrays.items():
        match = re.fullmatch(r"(\w+)/layers_(\d+)/(.*)", name)
        if match is None:
            scanned[name] = x
        else:
            layers[f"{match[1]}/{match[1]}/{match[3]}"][int(match[2])] = x
    for name, parts in layers.items():
        scanned[name] = np.stack([parts[i] for i in range(len(parts))], axis=1)
    return scanned


def _architecture(tensors: Tensors, path: pathlib.Path) -> Architecture:
    """Returns the architecture that the names and shapes of the tensors imply.

    Raises:
      ValueError: if the names or shapes do not belong to an encoder-decoder of T5X.
    """

    def shape(name: str) -> tuple[int, int]:
        """Returns the shape of a matrix, or raises a `ValueError`."""
        if name not in tensors or len(tensors[name].shape) != 2 or 0 in tensors[name].shape:
            raise ValueError(
                f"{path} has no matrix {name}, so it is not a checkpoint of T5X's encoder-decoder."
            )
        rows, columns = tensors[name].shape
        return rows, columns

    def num_layers(stack: str) -> int:
        """Returns the number of layers of a stack."""
        matches = [re.match(rf"{stack}/layers_(\d+)/", name) for name in tensors]
        return len({match[1] for match in matches if match is not None})

    # Look at the tensors of the encoder's first layer, which show what kind of T5 the checkpoint
    # contains.
    layer = "encoder/layers_0"
    own_bias = f"{layer}/relpos_bias/rel_embedding" in tensors
    _, width = shape(f"{layer}/attention/query/kernel")
    heads, buckets = shape(f"{layer if own_bias else 'encoder'}/relpos_bias/rel_embedding")
    vocab_size, d_model = shape("token_embedder/embedding")
    gated = f"{layer}/mlp/wi_0/kernel" in tensors
    tied = "decoder/logits_dense/kernel" not in tensors
    return Architecture(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=heads,
        head_dim=width // heads,
        d_ff=shape(f"{layer}/mlp/{'wi_0' if gated else 'wi'}/kernel")[1],
        num_layers=num_layers("encoder"),
        num_decoder_layers=num_layers("decoder"),
        activations=("gelu", "linear") if gated else ("relu",),
        tied=tied,
        scaled=tied,
        num_buckets=buckets,
        bias_per_layer=own_bias,
    )
