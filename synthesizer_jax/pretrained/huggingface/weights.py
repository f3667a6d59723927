"""The tensors of a folder, from safetensors or PyTorch's files; nothing in them is executed."""

from __future__ import annotations

import functools
import pathlib
import zipfile
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 (makes bfloat16 a dtype of NumPy, which safetensors asks for)
import numpy as np
import safetensors

from synthesizer_jax.base.files import describing, is_installed
from synthesizer_jax.pretrained.huggingface.config import read_json
from synthesizer_jax.pretrained.tensors import Tensor, Tensors, reading

SAFETENSORS = "model.safetensors"
TORCH = "pytorch_model.bin"


def open_weights(folder: pathlib.Path, wanted: Callable[[str], bool] = lambda _: True) -> Tensors:
    """Returns the tensors of a folder by their names in PyTorch, those whose names are `wanted`.

    They are read one by one, when they are asked for; files without any are not opened.
    """
    indices = {file: folder / f"{file}.index.json" for file in _READERS}
    present = [f for f, index in indices.items() if (folder / f).is_file() or index.is_file()]
    if not present:
        raise FileNotFoundError(
            f"{folder} holds no {SAFETENSORS} or {TORCH}; save the model with save_pretrained"
        )
    file, index = present[0], indices[present[0]]
    shards = {folder / file}
    if not (folder / file).is_file():
        with describing(index, "copy or download it again"):
            names = {f for name, f in read_json(index)["weight_map"].items() if wanted(name)}
            if outside := [n for n in names if pathlib.PurePath(n).name != n or "\\" in n]:
                raise ValueError(f"{outside[0]!r} is not a file of the folder")
            shards = {folder / name for name in names}
    tensors: dict[str, Tensor] = {}
    for path in sorted(shards):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing; copy or download it again")
        with reading(path):
            tensors |= _READERS[file](path)
    return {name: tensor for name, tensor in tensors.items() if wanted(name)}


def open_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Reads the header of a file."""

    def read(_: int | None, *, name: str) -> np.ndarray:
        # The file is mapped anew for every tensor, because pages that were read stay mapped.
        with safetensors.safe_open(path, framework="numpy") as file:
            array: np.ndarray = file.get_tensor(name)
        return array

    with safetensors.safe_open(path, framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {
            name: Tensor(tuple(x.get_shape()), str(x.get_dtype()), functools.partial(read, name=name))
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


_READERS: dict[str, Callable[[pathlib.Path], dict[str, Tensor]]] = {
    SAFETENSORS: open_safetensors,
    TORCH: _open_torch,
}
"""How files are opened, in the order in which they are looked for."""
