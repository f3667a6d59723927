"""Folders of PEFT with the LoRA of a T5: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import functools
import json
import pathlib
import re

import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.registry import format_value
from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.models import Encoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface.config import read_json
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.hub import find_folder
from synthesizer_jax.pretrained.huggingface.names import is_in_encoder
from synthesizer_jax.pretrained.huggingface.weights import open_safetensors
from synthesizer_jax.pretrained.tensors import Correspondence, Tensor, correspondences, reading
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.training.adapters import LORA_A, LORA_B, LoRA

ADAPTER_CONFIG, ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."

_WRITTEN: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "SEQ_2_SEQ_LM",
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
}

_READ: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "alpha_pattern": (None, {}),
    "bias": (None, "none"),
    "init_lora_weights": (None, True, False, "gaussian"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "use_dora": (None, False),
}
"""Fields, and the values with which a folder holds W + alpha / rank · B · A of the base's own W."""


def is_adapter(source: pathlib.Path) -> bool:
    """Whether a path is a folder of PEFT."""
    return (source / ADAPTER_CONFIG).is_file()


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the model to which a folder's adapters belong.

    Raises:
      ValueError: the folder names none.
      FileNotFoundError: the model is not there; see `find_folder`.
    """
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str):
        raise ValueError(
            f"base_model_name_or_path is {format_value(name)} in {path}; name the folder of the model "
            "there, or its OWNER/NAME on the Hugging Face hub"
        )
    base = storage_path(name).expanduser()
    try:
        return find_folder(base, None if base.exists() else revision)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"base_model_name_or_path in {path}: {error}") from error


def with_adapters(folder: pathlib.Path, base: Pretrained) -> Pretrained:
    """Returns an open T5 whose parameters are read with a folder's low-rank updates added.

    Raises:
      ValueError: the adapters are of another kind or another model; all tensors that do not fit are listed.
    """
    name_of = kind_of(base.model).name_of
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    with describing(path, "merge the adapters into the model with PEFT, and give that folder"):
        for name, allowed in _READ.items():
            if (value := config.get(name)) not in allowed:
                raise ValueError(f"{name} is {format_value(value)}, which is not read")
        alpha, power = float(config["lora_alpha"]), 0.5 if config.get("use_rslora") else 1.0
    with reading(folder / ADAPTER_TENSORS):
        tensors = open_safetensors(folder / ADAPTER_TENSORS)
    if isinstance(base.model, Encoder):
        of_decoder = lambda name: not is_in_encoder(re.sub(r"\.lora_[AB]", "", name.removeprefix(_PREFIX)))
        tensors = {name: x for name, x in tensors.items() if not of_decoder(name)}
    params: dict[tuple[str, ...], Unread] = traverse_util.flatten_dict(base.params)
    updated, known, problems = dict[tuple[str, ...], Unread](), set[str](), list[str]()
    for c in correspondences(base.model, name_of):
        names = _names(c)
        if not any(name in tensors for name in names):
            continue
        known.update(names)
        outputs, inputs = c.layout.shape(c.shape)
        a, b = (tensors.get(name) for name in names)
        if a is None or b is None or (a.shape, b.shape) != ((a.shape[0], inputs), (outputs, a.shape[0])):
            problems.append(f"{c.name} is {(outputs, inputs)}, for which {' and '.join(names)} do not fit")
            continue
        scale = alpha / a.shape[0] ** power
        read = functools.partial(_read_updated, params[c.path], c, a, b, scale)
        updated[c.path] = Unread(c.shape, read)
    problems += [f"{name} is no update of a matrix there" for name in sorted(tensors.keys() - known)]
    if problems or not known:
        raise ValueError(f"{folder} does not fit its base: {'; '.join(problems) or 'it holds no LoRA'}")
    return base._replace(params=traverse_util.unflatten_dict(params | updated))


def _read_updated(base: Unread, c: Correspondence, a: Tensor, b: Tensor, scale: float) -> np.ndarray:
    """Reads a parameter of ours with its update added."""
    update = np.matmul(b.read(None).astype(np.float32), a.read(None).astype(np.float32))
    return base.read("float32") + c.layout.to_ours(scale * update, c.shape)


def write_adapters(folder: pathlib.Path, model: TokenModel, adapters: Variables, lora: LoRA) -> None:
    """Writes a run's adapters, with looped layers, to an empty directory as PEFT's of transformers' T5.

    Raises:
      ValueError: the model is not a T5; the message names what transformers lacks.
    """
    params = traverse_util.flatten_dict(adapters["params"])
    tensors, modules = dict[str, np.ndarray](), set[str]()
    found = correspondences(model, kind_of(model).name_of)
    for c in found:
        if (*c.path, LORA_A) in params:
            a, b = (np.asarray(params[*c.path, leaf]) for leaf in (LORA_A, LORA_B))
            if c.path == ("logits_kernel",):
                b = b * (model.logits_scale or 1.0)  # as in `with_output_of_t5`
            matrices = a.reshape(-1, lora.rank).T, b.reshape(lora.rank, -1).T
            tensors |= {n: np.ascontiguousarray(x) for n, x in zip(_names(c), matrices, strict=True)}
            modules.add(c.name.removesuffix(".weight"))
    leaves = {module.rpartition(".")[2] for module in modules}
    named = {c.name.removesuffix(".weight") for c in found}
    if modules == {module for module in named if module.rpartition(".")[2] in leaves}:
        modules = leaves  # such as q and v, everywhere
    config = {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": sorted(modules)}
    text = json.dumps(_WRITTEN | config, indent=1)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    (folder / ADAPTER_TENSORS).chmod(0o644)  # safetensors writes it for the owner alone


def _names(c: Correspondence) -> tuple[str, str]:
    """Returns the names of PEFT's A ``[rank, inputs]`` and B ``[outputs, rank]``."""
    module = _PREFIX + c.name.removesuffix(".weight")
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"
