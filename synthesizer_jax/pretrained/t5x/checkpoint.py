"""T5X's checkpoints: a msgpack file, TensorStore's arrays, or Orbax's directory; Mesh-TensorFlow's too.

They hold parameters and the optimizer's state, but no configuration: the architecture is read off the
names and shapes.
"""

from __future__ import annotations

import dataclasses
import gzip
import pathlib
import re
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tensorstore

from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.files import check_regular
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import MOST_LAYERS, Architecture, Pretrained
from synthesizer_jax.pretrained.t5x.mesh_tensorflow import find_checkpoint_prefix, open_variables
from synthesizer_jax.pretrained.t5x.moments import find_moments
from synthesizer_jax.pretrained.t5x.names import Names, count_layers, detect
from synthesizer_jax.pretrained.tensors import (
    Correspondence,
    Tensor,
    Tensors,
    match_tensors,
    named_arrays,
    read_msgpack,
)
from synthesizer_jax.typing import PyTree

CHECKPOINT = "checkpoint"
"""The msgpack file of a directory."""

OCDBT = "manifest.ocdbt"
"""The file of a directory in which TensorStore's arrays share a database."""

LARGEST_RATIO = 100
"""Of the sizes before and after compression; parameters compress to a half or so."""

_GZIP = b"\x1f\x8b"
_ARRAY = re.compile(
    r"(?P<name>_?(?:optimizer\.)?(?P<kind>target|state\.param_states|state)\.(?P<path>[A-Za-z0-9_.]+))"
    r"/(?P<about>\.zarray|zarr\.json)"
)
"""Keys of the files that describe arrays, ``target.encoder.layers_0.…/.zarray``."""

_DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}
"""TensorStore's driver of an array that a file of this name describes."""


class _Contents(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      parameters: by their names.
      moments: those of Adafactor, ``PARAMETER/v_row``, ``PARAMETER/v_col`` and ``PARAMETER/v``.
      step: one number; None: it is not there.
    """

    parameters: Tensors
    moments: Tensors
    step: Tensor | None

    def join(self, other: _Contents) -> _Contents:
        """Joins what two places hold; the second comes first where both have an array."""
        return _Contents(
            {**self.parameters, **other.parameters},
            {**self.moments, **other.moments},
            other.step or self.step,
        )


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Whether a directory, or the prefix of files, is a checkpoint of T5X or Mesh-TensorFlow."""
    return (
        (directory / CHECKPOINT).is_file()
        or find_checkpoint_prefix(directory) is not None
        or _orbax_item(directory) is not None
    )


def open_checkpoint(path: pathlib.Path) -> Pretrained:
    """Opens the parameters of a checkpoint, and the moments of Adafactor if they fit.

    A gated feed-forward layer is taken for T5 1.1's, with GELU, and the largest distance of the
    relative bias for 128, as in T5X's own T5s: the checkpoint does not tell. (UL2 has SiLU.)

    Args:
      path: ``checkpoint_STEP``, a file or a directory; ``model.ckpt-STEP`` of Mesh-TensorFlow.

    Raises:
      FileNotFoundError: there is no such checkpoint.
      ValueError: it is not a checkpoint of a T5; the message lists all tensors that do not fit.
    """
    contents = _open_arrays(path)
    names, architecture = _architecture(contents.parameters, path)
    model = architecture.build()
    wanted = names.find(model)
    params = match_tensors(contents.parameters, wanted, source=path)
    return Pretrained(model, params, None, _optimizer(contents, wanted, model))


def _optimizer(
    contents: _Contents, parameters: Sequence[Correspondence], model: TokenModel
) -> PyTree | None:
    """Returns the state of `Adafactor`; None if the checkpoint has none that fits."""
    step = contents.step
    if step is None or step.shape:
        return None
    moments = find_moments(contents.moments, parameters, model)
    updates = Unread((), lambda: np.asarray(step.read(None), np.int32), np.dtype(np.int32))
    return None if moments is None else {"updates": updates, "moments": moments}


def unsaid(architecture: Architecture) -> list[str]:
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


def _open_arrays(path: pathlib.Path) -> _Contents:
    """Returns the arrays of a file or a directory."""
    prefix = find_checkpoint_prefix(path)
    if prefix is not None:
        return _Contents(*open_variables(prefix))
    if not path.is_dir():
        return _open_msgpack(path)
    item = _orbax_item(path)
    if item is not None:
        return _open_stores(item)
    return _open_msgpack(path / CHECKPOINT).join(_open_stores(path))


def _open_msgpack(path: pathlib.Path) -> _Contents:
    """Returns the arrays in a msgpack file, gzipped or not.

    Raises:
      ValueError: the file is damaged, or is not a checkpoint.
    """
    data = path.read_bytes()
    if data[:2] == _GZIP:
        data = _decompress(path, len(data))
    tree = read_msgpack(data, path)
    tree = tree.get("optimizer", tree)
    target = tree.get("target") if isinstance(tree, dict) else None
    if not isinstance(target, dict):
        raise ValueError(
            f"{path} has no parameters under optimizer/target; give a checkpoint of T5X"
        )
    state = tree.get("state")
    state = state if isinstance(state, dict) else {}
    moments, step = state.get("param_states"), state.get("step")
    parameters, slots = (
        {name: Tensor.of(x) for name, x in named_arrays(part).items()}
        for part in (target, moments if isinstance(moments, dict) else {})
    )
    is_number = isinstance(step, int | np.integer | np.ndarray)
    return _Contents(parameters, slots, Tensor.of(np.asarray(step)) if is_number else None)


def _decompress(path: pathlib.Path, size: int) -> bytes:
    """Returns the contents of a gzipped file, at most `LARGEST_RATIO` times its size."""
    try:
        with gzip.open(path) as file:
            data = file.read(LARGEST_RATIO * size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a msgpack checkpoint ({one_line_error(error)}); copy or download it again"
        ) from None
    if len(data) > LARGEST_RATIO * size:
        raise ValueError(
            f"{path} is more than {LARGEST_RATIO} times as large unzipped; unzip it first"
        )
    return data


def _orbax_item(directory: pathlib.Path) -> pathlib.Path | None:
    """Returns the directory of an Orbax checkpoint that holds the arrays; None if it is none."""
    for item in (directory, directory / "state", directory / "default"):
        if (item / "_METADATA").is_file() or (item / OCDBT).is_file():
            return item
    return None


def _open_stores(directory: pathlib.Path) -> _Contents:
    """Opens TensorStore's arrays in a directory; the paths that other files name are not followed."""
    for file in directory.rglob("*"):
        if not file.is_dir():
            check_regular(file)
    place = f"{directory.resolve()}/"
    store = {"driver": "file", "path": place}
    if (directory / OCDBT).is_file():
        store = {"driver": "ocdbt", "base": f"file://{place}"}
    arrays: dict[str, dict[str, Tensor]] = {"target": {}, "state.param_states": {}, "state": {}}
    try:
        keys = tensorstore.KvStore.open(store).result().list().result()
        for key in sorted(key.decode() for key in keys):
            found = _ARRAY.fullmatch(key)
            if found:
                spec = {
                    "driver": _DRIVERS[found["about"]],
                    "kvstore": {**store, "path": f"{store.get('path', '')}{found['name']}/"},
                    "fill_missing_data_reads": False,  # a block that is not there was lost
                }
                array = tensorstore.open(spec, open=True, read=True).result()
                name = found["path"].replace(".", "/")
                arrays[found["kind"]][name] = _in_store(array, directory / found["name"])
    except (ValueError, OSError) as error:
        raise ValueError(
            f"{directory} cannot be read ({one_line_error(error)}); copy it again"
        ) from None
    parameters, moments, state = arrays.values()
    return _Contents(parameters, moments, state.get("step"))


def _in_store(store: Any, source: pathlib.Path) -> Tensor:
    """Returns an array of TensorStore; T5X once wrote bfloat16 as integers of 16 bits."""
    as_bits = store.dtype.name == "uint16"

    def read(layer: int | None) -> np.ndarray:
        part = store if layer is None else store[:, layer]
        try:
            array: np.ndarray = part.read().result()
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{source} cannot be read ({one_line_error(error)}); copy it again"
            ) from None
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
