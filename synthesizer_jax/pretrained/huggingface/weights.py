"""The tensors of a folder, from safetensors, PyTorch's files or Flax's; nothing in them is executed."""

from __future__ import annotations

import functools
import pathlib
import pickle
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 (makes bfloat16 a dtype of NumPy, which safetensors asks for)
import numpy as np
import safetensors

from synthesizer_jax.files import is_installed
from synthesizer_jax.messages import one_line_error
from synthesizer_jax.pretrained.huggingface.json_files import read_json
from synthesizer_jax.pretrained.tensors import Tensor, Tensors, named_arrays, read_msgpack

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"
FLAX = "flax_model.msgpack"


def open_weights(folder: pathlib.Path) -> Tensors:
    """Returns the tensors of a folder by their names in PyTorch.

    Safetensors, and PyTorch's files, are read tensor by tensor, when they are asked for.

    Raises:
      FileNotFoundError: there are none, or a file is missing.
      ValueError: a file is damaged, or files contradict each other.
    """
    indices = {file: folder / f"{file}.index.json" for file in _READERS}
    found = [f for f, index in indices.items() if (folder / f).is_file() or index.is_file()]
    if not found:
        raise FileNotFoundError(
            f"{folder} holds no {SAFETENSORS}, {TORCH} or {FLAX}; save the model with save_pretrained"
        )
    file, index = found[0], indices[found[0]]
    tensors: dict[str, Tensor] = {}
    for path, names in _shards(folder / file, index).items():
        held = _READERS[file](path)
        if names is not None and held.keys() != names:
            wrong = sorted(held.keys() ^ names)
            raise ValueError(
                f"{path} and {index.name} disagree about {len(wrong)} tensors, such as {wrong[0]!r}; "
                "copy or download the folder again"
            )
        tensors |= held
    return tensors


def _shards(file: pathlib.Path, index: pathlib.Path) -> dict[pathlib.Path, set[str] | None]:
    """Returns the files with a folder's tensors, and the names that the index lists for each.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: the index names files outside of the folder.
    """
    if not index.is_file():
        return {file: None}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map; copy or download it again")
    shards: dict[pathlib.Path, set[str]] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard or "\\" in shard:
            raise ValueError(f"{index}: {name} is in {shard!r}, which is not a file of the folder")
        path = index.parent / shard
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; copy or download it again")
        shards.setdefault(path, set()).add(name)
    return dict(shards)


def _open_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads the header of a file."""

    def read(layer: int | None, *, name: str) -> np.ndarray:
        assert layer is None, "transformers stacks no layers"
        # The file is mapped anew for every tensor, because pages that were read stay mapped.
        with safetensors.safe_open(path, framework="numpy") as file:
            array: np.ndarray = file.get_tensor(name)
        return array

    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: Tensor(
                    tuple(x.get_shape()), str(x.get_dtype()), functools.partial(read, name=name)
                )
                for name, x in slices.items()
            }
    except (safetensors.SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or download it again") from None


def _open_torch(path: pathlib.Path) -> dict[str, Tensor]:
    """Maps a file by torch's loader that builds nothing but tensors."""
    if not is_installed("torch"):
        raise ValueError(
            f"{path} needs PyTorch to be read; install torch, or give a folder with {SAFETENSORS} "
            "(save_pretrained writes one)"
        )
    import torch

    try:  # files of versions before 1.6 are no archives and cannot be mapped
        mapped = zipfile.is_zipfile(path)
        loaded: Any = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError, KeyError) as error:
        raise ValueError(
            f"{path} is not a file of tensors alone ({one_line_error(error)}); nothing in it was "
            f"executed; give a folder with {SAFETENSORS}"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(x, torch.Tensor) for x in loaded.values()
    ):
        raise ValueError(f"{path} is not a dictionary of tensors; give a folder with {SAFETENSORS}")

    def tensor(x: Any) -> Tensor:
        dtype = str(x.dtype).removeprefix("torch.")
        return Tensor(tuple(x.shape), dtype, lambda _: x.float().numpy())

    return {str(name): tensor(x) for name, x in loaded.items()}


def _open_flax(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads a file of Flax's T5, whose kernels are transposed."""
    tree = read_msgpack(path.read_bytes(), path)
    tensors = {}
    for name, x in named_arrays(tree).items():
        *keys, last = name.split("/")
        tensors[".".join([*keys, "weight"])] = Tensor.of(x.T if last == "kernel" else x)
    return tensors


_READERS: dict[str, Callable[[pathlib.Path], dict[str, Tensor]]] = {
    SAFETENSORS: _open_safetensors,
    TORCH: _open_torch,
    FLAX: _open_flax,
}
"""How files are opened, in the order in which they are looked for."""
