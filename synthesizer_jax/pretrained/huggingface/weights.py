"""Opens the tensors of a folder, from safetensors or PyTorch files.

Code in a file of tensors is never executed.
"""

from __future__ import annotations

import functools
import pathlib
import pickle
import re
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
"""The name of the safetensors file, if all weights are in one file."""
TORCH = "pytorch_model.bin"
"""The name of the file in PyTorch's format, if all weights are in one file."""


def with_variant(file: str, variant: str | None) -> str:
    """Returns the name that a file of weights, or their index, has in a variant of a model.

    For example, in the variant ``fp16``, the file ``model.safetensors`` has the name
    ``model.fp16.safetensors``. Transformers uses the name ``model.fp16.safetensors`` if a model is
    saved with ``variant="fp16"``. If the variant is `None`, the result is the unchanged name.
    """
    if variant is None:
        return file
    name, _, ending = file.rpartition(".")
    return f"{name}.{variant}.{ending}"


def open_weights(
    folder: pathlib.Path,
    wanted: Callable[[str], bool] = lambda _: True,
    *,
    variant: str | None = None,
) -> Tensors:
    """Returns the tensors of a folder, by their names in PyTorch.

    A tensor is read only when it is needed.

    Args:
      folder: the folder of the model.
      wanted: a function that takes the name of a tensor, and says whether to return the tensor. If
        the folder has an index, files that contain no wanted tensor are not opened.
      variant: the variant of the files to open; see `with_variant`.

    Raises:
      FileNotFoundError: if the folder has no weights, or a file is missing.
      ValueError: if a file cannot be read.
    """
    present = _find_files(folder, variant)
    if present is None:
        either = " or ".join(with_variant(file, variant) for file in _READERS)
        raise FileNotFoundError(f"{folder} contains no {either}. {_advice(folder, variant)}")
    file, path, index = present

    shards = {path}
    if not path.is_file():
        with describing(index, "Copy or download it again."):
            weight_map = read_json(index)["weight_map"]
            shards = set()
            for name in {shard for tensor, shard in weight_map.items() if wanted(tensor)}:
                # Open only files inside the folder, because an untrusted index could name any path.
                if pathlib.PurePath(name).name != name or "\\" in name:
                    raise ValueError(f"it names {name!r}, which is not a file of the folder")
                shards.add(folder / name)

    tensors: dict[str, Tensor] = {}
    for shard in sorted(shards):
        if not shard.is_file():
            raise FileNotFoundError(f"{shard} is missing. Copy or download it again.")
        with reading(shard, _REMEDIES[file]):
            tensors.update(_READERS[file](shard))
    return {name: tensor for name, tensor in tensors.items() if wanted(name)}


def _find_files(
    folder: pathlib.Path, variant: str | None
) -> tuple[str, pathlib.Path, pathlib.Path] | None:
    """Returns the first name in `_READERS` for which a folder has files, or `None`.

    Returns:
      The name, the path of a single file with all weights, and the path of an index. At least one
      of these two files exists.
    """
    for file in _READERS:
        path = folder / with_variant(file, variant)
        index = folder / with_variant(f"{file}.index.json", variant)
        if path.is_file() or index.is_file():
            return file, path, index
    return None


def _advice(folder: pathlib.Path, variant: str | None) -> str:
    """Returns a sentence that says what a user can do if a folder has no weights of a variant."""
    matches = [_VARIANT.fullmatch(path.name) for path in folder.iterdir()]
    found = {match[1] for match in matches if match is not None}
    choices = [f"give variant={name!r}" for name in sorted(found)]
    if variant is not None and _find_files(folder, None) is not None:
        choices.insert(0, "leave the variant out")
    if not choices:
        return "Save the model with save_pretrained."
    return f"You can {' or '.join(choices)}."


_VARIANT = re.compile(r"(?:model|pytorch_model)\.(\w+)(?:-\d+-of-\d+)?\.(?:safetensors|bin)")
"""Matches the name of a file of a variant. The group of the match is the variant."""


def open_safetensors(path: pathlib.Path) -> dict[str, Tensor]:
    """Opens a safetensors file, and reads only the header of the file."""

    def read(index: tuple[slice | int, ...], *, name: str) -> np.ndarray:
        """Reads a part of the tensor `name` of the file."""
        # Map the file again for every tensor. If one mapping stayed open, all pages that were read
        # would stay in memory.
        with safetensors.safe_open(path, framework="numpy") as file:
            array: np.ndarray = file.get_slice(name)[index] if index else file.get_tensor(name)
        return array

    tensors = {}
    with safetensors.safe_open(path, framework="numpy") as file:
        for name in file.keys():  # noqa: SIM118 - it is not a dictionary
            x = file.get_slice(name)
            tensors[name] = Tensor(
                tuple(x.get_shape()), str(x.get_dtype()), functools.partial(read, name=name)
            )
    return tensors


def _open_torch(path: pathlib.Path) -> dict[str, Tensor]:
    """Opens a PyTorch file with PyTorch's restricted loader, which can create only tensors."""
    if not is_installed("torch"):
        raise ModuleNotFoundError(
            f"{path} needs PyTorch, which is not installed. Install torch, or give a folder with "
            f"{SAFETENSORS}."
        )
    import torch

    # Files that were written by PyTorch before version 1.6 are not zip archives, so they cannot be
    # memory-mapped.
    mapped = zipfile.is_zipfile(path)
    try:
        loaded: Any = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ValueError(
            "it contains other objects than tensors, and loading them could run code, so nothing "
            "was loaded"
        ) from error
    entries = loaded.items() if isinstance(loaded, dict) else [("it", loaded)]
    for name, x in entries:
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name!r} is a {type(x).__name__} instead of a tensor")

    def tensor(x: Any) -> Tensor:
        """Returns a torch tensor as a `Tensor` that is read as float32."""
        dtype = str(x.dtype).removeprefix("torch.")
        return Tensor(tuple(x.shape), dtype, lambda index: x[index].float().numpy())

    return {str(name): tensor(x) for name, x in loaded.items()}


_READERS: dict[str, Callable[[pathlib.Path], dict[str, Tensor]]] = {
    SAFETENSORS: open_safetensors,
    TORCH: _open_torch,
}
"""Maps names of files to functions that open the files. Names are tried in this order."""

_REMEDIES = {
    SAFETENSORS: "Copy or download it again.",
    TORCH: f"Copy or download it again, or save the model as {SAFETENSORS} with save_pretrained.",
}
"""Tells users in error messages what to do if a file cannot be read, by the name of the file."""
