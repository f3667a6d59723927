"""T5X's checkpoints: a msgpack file, TensorStore's arrays, or Orbax's directory; also written.

Parameters are read, the optimizer's state is not. There is no configuration: the architecture is read off
names and shapes.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore
from flax import serialization, traverse_util

from synthesizer_jax.models import Encoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables
from synthesizer_jax.pretrained.architecture import (
    MOST_LAYERS,
    Architecture,
    Pretrained,
    with_output_of_t5,
)
from synthesizer_jax.pretrained.t5x.names import Names, count_layers, detect
from synthesizer_jax.pretrained.tensors import (
    Tensor,
    Tensors,
    match_tensors,
    named_arrays,
    named_tensors,
    read_msgpack,
    reading,
)

CHECKPOINT = "checkpoint"
"""The msgpack file of a directory."""

OCDBT = "manifest.ocdbt"
"""The file of a directory in which TensorStore's arrays share a database."""

LARGEST_RATIO = 100
"""Of the sizes before and after compression; parameters compress to a half or so."""

_GZIP = b"\x1f\x8b"
_ARRAY = re.compile(
    r"(?P<name>_?(?:optimizer\.)?target\.(?P<path>[A-Za-z0-9_.]+))/(?P<about>\.zarray|zarr\.json)"
)
"""Keys of the files that describe arrays, ``target.encoder.layers_0.…/.zarray``."""

_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
"""TensorStore's driver of an array that a file of this name describes."""


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Whether a directory is a checkpoint of T5X."""
    return (directory / CHECKPOINT).is_file() or _orbax_item(directory) is not None


def open_checkpoint(path: pathlib.Path) -> Pretrained:
    """Opens the parameters of a checkpoint.

    A gated feed-forward layer is taken for T5 1.1's, with GELU, and the largest distance of the
    relative bias for 128, as in T5X's own T5s: the checkpoint does not tell. (UL2 has SiLU.)

    Args:
      path: ``checkpoint_STEP``, a file or a directory.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is not a checkpoint of a T5; the message lists all tensors that do not fit.
    """
    item = _orbax_item(path) if path.is_dir() else None
    if item is not None:
        tensors = _open_stores(item)
    elif path.is_dir():
        tensors = _open_msgpack(path / CHECKPOINT) | _open_stores(path)
    else:
        tensors = _open_msgpack(path)
    names, architecture = _architecture(tensors, path)
    model = architecture.build()
    return Pretrained(model, match_tensors(tensors, names.find(model), source=path), None)


def write_checkpoint(
    directory: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    *,
    step: int = 0,
    scanned: bool = False,
) -> None:
    """Writes the parameters as T5X's msgpack file, ``checkpoint``, without an optimizer's state.

    Args:
      directory: an empty directory; T5X expects the name ``checkpoint_STEP``.
      model: the model, with looped layers.
      variables: its variables.
      step: the step.
      scanned: stack the layers of each stack on axis 1, as T5X's scalable T5 does.

    Raises:
      ValueError: T5X has no such model; the message names what it lacks.
    """
    if isinstance(model, Encoder):
        raise ValueError("T5X has no encoder alone; export an EncoderDecoder")
    model, params = with_output_of_t5(model, variables["params"])
    architecture = Architecture.of(model)
    if differing := _unsaid(architecture):
        raise ValueError(
            f"T5X's files do not say {' and '.join(differing)}, so they would be read as another model; "
            "export to huggingface"
        )
    names = Names(
        scanned="{stack}" if scanned else None,
        layer_bias="relpos_bias" if architecture.bias_per_layer else None,
    )
    arrays = named_tensors(params, names.find(model))
    target = traverse_util.unflatten_dict({n: np.ascontiguousarray(x) for n, x in arrays}, sep="/")
    state = {"step": np.asarray(step, np.int32), "param_states": {}}
    data = serialization.msgpack_serialize(
        {"version": 3, "optimizer": {"target": target, "state": state}}
    )
    (directory / CHECKPOINT).write_bytes(data)


def _unsaid(architecture: Architecture) -> list[str]:
    """Returns what an architecture has otherwise than `open_checkpoint` assumes, as the file is silent."""
    assumed = {
        "activations": (("relu",), ("gelu", "linear")),
        "max_distance": (128,),
        "epsilon": (1e-6,),
    }
    fields = dataclasses.asdict(architecture)
    return [
        f"{name} {fields[name]}" for name, known in assumed.items() if fields[name] not in known
    ]


def _open_msgpack(path: pathlib.Path) -> dict[str, Tensor]:
    """Returns the arrays in a msgpack file, gzipped or not."""
    data = path.read_bytes()
    with reading(path):
        if data[:2] == _GZIP:
            unzip, size = zlib.decompressobj(wbits=31), len(data)
            data = unzip.decompress(data, LARGEST_RATIO * size)
            if unzip.unconsumed_tail:
                raise ValueError(f"unzipped it is more than {LARGEST_RATIO} times as large")
        tree = read_msgpack(data)
        tree = tree.get("optimizer", tree)
        target = tree.get("target") if isinstance(tree, dict) else None
        if not isinstance(target, dict):
            raise ValueError(
                "it has no parameters under optimizer/target, as checkpoints of T5X do"
            )
        return {name: Tensor.of(x) for name, x in named_arrays(target).items()}


def _orbax_item(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory of an Orbax checkpoint that holds the arrays; None if it is none."""
    for item in (directory, directory / "state", directory / "default"):
        if (item / "_METADATA").is_file() or (item / OCDBT).is_file():
            return item
    return None


def _open_stores(directory: pathlib.Path) -> dict[str, Tensor]:
    """Opens TensorStore's arrays in a directory; the paths that other files name are not followed."""
    place = f"{directory.resolve()}/"
    store = {"driver": "file", "path": place}
    if (directory / OCDBT).is_file():
        store = {"driver": "ocdbt", "base": f"file://{place}"}
    arrays = {}
    with reading(directory):
        keys = tensorstore.KvStore.open(store).result().list().result()
        for found in map(_ARRAY.fullmatch, sorted(key.decode() for key in keys)):
            if found:
                spec = {
                    "driver": _DRIVERS[found["about"]],
                    "kvstore": {**store, "path": f"{store.get('path', '')}{found['name']}/"},
                    "fill_missing_data_reads": False,  # a block that is not there was lost
                }
                array = tensorstore.open(spec, open=True, read=True).result()
                name = found["path"].replace(".", "/")
                arrays[name] = _in_store(array, directory / found["name"])
    return arrays


def _in_store(store: Any, source: pathlib.Path) -> Tensor:
    """Returns an array of TensorStore; T5X once wrote bfloat16 as integers of 16 bits."""
    as_bits = store.dtype.name == "uint16"

    def read(layer: int | None) -> np.ndarray:
        with reading(source):
            part = store if layer is None else store[:, layer]
            array: np.ndarray = part.read().result()
        return array.view(ml_dtypes.bfloat16) if as_bits else array

    return Tensor(tuple(store.shape), "bfloat16" if as_bits else store.dtype.name, read)


def _architecture(tensors: Tensors, path: pathlib.Path) -> tuple[Names, Architecture]:
    """Returns how parameters are named, and the architecture that names and shapes imply.

    Raises:
      ValueError: parameters of every T5 are missing.
    """

    def shape(name: str, *ranks: int) -> tuple[int, ...]:
        if name not in tensors or len(tensors[name].shape) not in ranks or 0 in tensors[name].shape:
            raise ValueError(
                f"{path} has no array {name} of {' or '.join(map(str, ranks))} axes; it is not a "
                "checkpoint of T5X's encoder-decoder"
            )
        return tensors[name].shape

    names = detect(tensors.keys(), 2)
    layer, extra = names.layer("encoder", 0), int(names.scanned is not None)

    def of_layer(name: str, *ranks: int) -> tuple[int, ...]:
        whole = shape(f"{layer}/{name}", *(rank + extra for rank in ranks))
        return (whole[0], *whole[1 + extra :])

    query = of_layer("attention/query/kernel", 2, 3)
    names = detect(tensors.keys(), len(query))
    if names.layer_bias is None:
        heads, buckets = shape("encoder/relpos_bias/rel_embedding", 2)
    else:
        heads, buckets = of_layer(f"{names.layer_bias}/rel_embedding", 2)
    vocab_size, d_model = shape("token_embedder/embedding", 2)
    gated = f"{layer}/mlp/wi_0/kernel" in tensors
    _, d_ff = of_layer(f"mlp/{'wi_0' if gated else 'wi'}/kernel", 2)
    tied = "decoder/logits_dense/kernel" not in tensors

    def num_layers(stack: str) -> int:
        if names.scanned is None:
            return count_layers(tensors.keys(), stack)
        count = shape(f"{names.layer(stack, 0)}/pre_mlp_layer_norm/scale", 2)[1]
        if count > MOST_LAYERS:
            raise ValueError(f"{path} has {count} layers in the {stack}; copy or download it again")
        return count

    return names, Architecture(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=heads,
        head_dim=query[2] if len(query) == 3 else query[1] // heads,
        d_ff=d_ff,
        num_layers=num_layers("encoder"),
        num_decoder_layers=num_layers("decoder"),
        activations=("gelu", "linear") if gated else ("relu",),
        tied=tied,
        scaled=tied,
        num_buckets=buckets,
        bias_per_layer=names.layer_bias is not None,
    )
