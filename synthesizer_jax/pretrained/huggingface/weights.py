"""The tensors of a folder, from safetensors, PyTorch's files or Flax's; nothing in them is executed."""

from __future__ import annotations

import functools
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 (makes bfloat16 a dtype of NumPy, which safetensors asks for)
import numpy as np
import safetensors

from synthesizer_jax.files import describing, is_installed
from synthesizer_jax.pretrained.huggingface.config import read_json
from synthesizer_jax.pretrained.tensors import Tensor, Tensors, named_arrays, read_msgpack, reading

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
        with reading(path):
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
    """Returns the files with a folder's tensors, and the names that the index lists for each."""
    if not index.is_file():
        return {file: None}
    shards: dict[pathlib.Path, set[str]] = {}
    with describing(index, "copy or download it again"):
        for name, shard in read_json(index)["weight_map"].items():
            if pathlib.PurePath(shard).name != shard or "\\" in shard:
                raise ValueError(f"{name} is in {shard!r}, which is not a file of the folder")
            path = index.parent / shard
            if not path.is_file():
                raise FileNotFoundError(f"{path} is missing; copy or download it again")
            shards.setdefault(path, set()).add(name)
    return dict(shards)


def _open_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads the header of a file."""

    def read(_: int | None, *, name: str) -> np.ndarray:
        # The file is mapped anew for every tensor, because pages that were read stay mapped.
        with safetensors.safe_open(path, framework="numpy") as file:
            array: np.ndarray = file.get_tensor(name)
        return array

    with safetensors.safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Tensor(
                tuple(x.get_shape()), str(x.get_dtype()), functools.partial(read, name=name)
            )
            for name, x in slices.items()
        }


def _open_torch(path: pathlib.Path) -> dict[str, Tensor]:
    """Maps a file by torch's loader that builds nothing but tensors."""
    if not is_installed("torch"):
        raise ValueError(f"it needs PyTorch; install torch, or give a folder with {SAFETENSORS}")
    import torch

    mapped = zipfile.is_zipfile(path)  # files of versions before 1.6 cannot be mapped
    loaded: Any = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)

    def tensor(x: Any) -> Tensor:
        dtype = str(x.dtype).removeprefix("torch.")
        return Tensor(tuple(x.shape), dtype, lambda _: x.float().numpy())

    return {str(name): tensor(x) for name, x in loaded.items()}


def _open_flax(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads a file of Flax's T5, whose kernels are transposed."""
    tensors = {}
    for name, x in named_arrays(read_msgpack(path.read_bytes())).items():
        *keys, last = name.split("/")
        tensors[".".join([*keys, "weight"])] = Tensor.of(x.T if last == "kernel" else x)
    return tensors


_READERS: dict[str, Callable[[pathlib.Path], dict[str, Tensor]]] = {
    SAFETENSORS: _open_safetensors,
    TORCH: _open_torch,
    FLAX: _open_flax,
}
"""How files are opened, in the order in which they are looked for."""
