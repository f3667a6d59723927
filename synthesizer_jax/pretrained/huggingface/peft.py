"""Folders of PEFT with the LoRA of a T5: ``adapter_config.json`` and ``adapter_model.safetensors``.

They hold low-rank updates of matrices, and whole parameters of ``modules_to_save``.
"""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import traverse_util
from safetensors.numpy import save_file

from synthesizer_jax.base.files import describing, storage_path
from synthesizer_jax.base.registry import format_value
from synthesizer_jax.checkpoints.streamed import Unread
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface import t5gemma
from synthesizer_jax.pretrained.huggingface.config import ADAPTER_CONFIG, ADAPTER_TENSORS, read_json
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.hub import find_folder
from synthesizer_jax.pretrained.huggingface.names import EMBEDDINGS, OUTPUT
from synthesizer_jax.pretrained.huggingface.weights import open_safetensors
from synthesizer_jax.pretrained.tensors import FLOATS, Correspondence, Tensor, correspondences, reading
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.training.adapters import LORA_A, LORA_B, LoRA

_PREFIX = "base_model.model."

_WEIGHT, _BASE_LAYER = ".weight", ".base_layer.weight"
"""The ends of the names of a module's tensor, and of the one to which PEFT adds a low-rank update."""

_SHARED, *_EMBEDDINGS_OF_STACKS = (name.removesuffix(_WEIGHT) for name in EMBEDDINGS)

_TORCH_TENSORS = "adapter_model.bin"

_WRITTEN: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "SEQ_2_SEQ_LM",
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_dropout": 0.0,
}

OPTIONS: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "alora_invocation_tokens": (),
    "alpha_pattern": ({},),
    "arrow_config": (),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),
    "kasa_config": (),
    "layer_replication": (),
    "lora_bias": (False,),
    "megatron_config": (),
    "monteclora_config": (),
    "target_parameters": ([],),
    "trainable_token_indices": (),
    "use_bdlora": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (),
}
"""Options of PEFT that change what is computed or what is saved, and the values of each that are read.

With these values, and with null, a folder holds W + alpha / rank · B · A of the base's own W.
"""

IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""Options that may have any value.

Some are read elsewhere. Others say how the adapters were trained, or what the tensors and the other
options say too: the configurations of ways to start belong to a value of ``init_lora_weights``.
"""


def is_adapter(source: pathlib.Path) -> bool:
    """Whether a path is a folder of PEFT."""
    return (source / ADAPTER_CONFIG).is_file()


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the model, or of other adapters, to which a folder's adapters belong.

    Raises:
      ValueError: the folder names none, or the adapters belong to themselves.
      FileNotFoundError: the model is not there; see `find_folder`.
    """
    base = other = _named_base(folder)
    seen = {folder.resolve()}
    while other.resolve() not in seen:
        if not is_adapter(other):
            return base
        seen.add(other.resolve())
        other = _named_base(other)
    raise ValueError(
        f"base_model_name_or_path in {folder / ADAPTER_CONFIG} leads back to {other}, which holds "
        "adapters; name the folder of the model there"
    )


def _named_base(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder that ``base_model_name_or_path`` names; see `base_of` for errors."""
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


def _check_options(config: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names an option of PEFT with a value that is not implemented here."""
    for name, allowed in OPTIONS.items():
        value = config.get(name)
        if value not in allowed and (value is not None or name == "peft_type"):
            raise ValueError(f"{name} is {format_value(value)}, which is not read")
    for name in sorted(config.keys() - OPTIONS.keys() - IGNORED):
        if config[name] not in (None, False, [], {}):
            raise ValueError(f"{name} is {format_value(config[name])}, and this option is not known here")


def with_adapters(folder: pathlib.Path, base: Pretrained) -> Pretrained:
    """Returns an open T5 with a folder's adapters.

    Matrices are read with their low-rank updates added. Tensors of ``modules_to_save`` take the place of
    the base's. For an `Encoder`, tensors of a decoder are left out.

    Raises:
      FileNotFoundError: the folder has no safetensors.
      ValueError: the adapters are of another kind or another model; all tensors that do not fit are listed.
    """
    name_of = kind_of(base.model).name_of
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    with describing(path, "merge the adapters into the model with PEFT, and give that folder"):
        _check_options(config)
        alpha, power = float(config["lora_alpha"]), 0.5 if config.get("use_rslora") else 1.0
        wrapped = [str(name) for name in config.get("modules_to_save") or ()]
    saved = _open_tensors(folder)
    tensors = _of_encoder(saved) if isinstance(base.model, Encoder) else dict(saved)
    problems = _share_embedding(tensors, base.model, wrapped)

    params: dict[tuple[str, ...], Unread] = traverse_util.flatten_dict(base.params)
    updated, known = dict[tuple[str, ...], Unread](), set[str]()
    for c in correspondences(base.model, name_of):
        modules = _modules_of(c, base.model)
        whole = {name: tensors[name] for module in modules for name in _whole(module) if name in tensors}
        updates = _updates(modules[0])
        known.update(whole, updates)

        if whole:
            problem = _misfit(c, whole, modules)
            if problem is not None:
                problems.append(problem)
                continue
            updated[c.path] = Unread(c.shape, functools.partial(_read_whole, c, next(iter(whole.values()))))

        a, b = (tensors.get(name) for name in updates)
        if a is None and b is None:
            continue
        outputs, inputs = c.layout.shape(c.shape)
        if a is None or b is None or not _are_update(a, b, inputs, outputs):
            problems.append(
                f"{c.name} is {(outputs, inputs)}, for which {' and '.join(updates)} do not fit"
            )
            continue
        scale = alpha / a.shape[0] ** power
        matrix = updated.get(c.path, params[c.path])
        updated[c.path] = Unread(c.shape, functools.partial(_read_updated, matrix, c, a, b, scale))

    problems += [
        f"{name} is no update of a matrix there, and no parameter"
        for name in sorted(tensors.keys() - known)
    ]
    if problems or not saved:
        raise ValueError(f"{folder} does not fit its base: {'; '.join(problems) or 'it holds no LoRA'}")
    return base._replace(params=traverse_util.unflatten_dict(params | updated))


def _open_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder by their names in the model."""
    path = folder / ADAPTER_TENSORS
    if not path.is_file() and (folder / _TORCH_TENSORS).is_file():
        raise FileNotFoundError(
            f"{folder} holds {_TORCH_TENSORS}, a pickle, and no {ADAPTER_TENSORS}; load it with PEFT and "
            "save it again with save_pretrained(FOLDER, safe_serialization=True)"
        )
    with reading(path):
        return {name.removeprefix(_PREFIX): tensor for name, tensor in open_safetensors(path).items()}


def _of_encoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that are not of a decoder, under the names that they have in an encoder."""
    names = {name: name.removeprefix(t5gemma.PREFIX) for name in tensors}
    others = ("decoder", OUTPUT.partition(".")[0])
    return {of: tensors[name] for name, of in names.items() if of.partition(".")[0] not in others}


def _modules_of(c: Correspondence, model: TokenModel) -> list[str]:
    """Returns the modules of transformers that hold a parameter of ours; each computes with its own copy.

    Several modules hold the embedding of a T5, and a tied output projection, until PEFT wraps one of them.
    """
    module = c.name.removesuffix(_WEIGHT)
    if c.path != ("embedding",):
        return [module]
    is_gemma, whole = t5gemma.is_t5gemma(model), isinstance(model, EncoderDecoder)
    modules = [module] if is_gemma else [m for m in _EMBEDDINGS_OF_STACKS if whole or "decoder" not in m]
    output = t5gemma.OUTPUT if is_gemma else OUTPUT
    return modules + [output.removesuffix(_WEIGHT)] * (whole and model.tied)


def _share_embedding(tensors: dict[str, Tensor], model: TokenModel, wrapped: list[str]) -> list[str]:
    """Gives a T5's ``shared.weight``, where PEFT has saved it, to the modules that share it.

    PEFT saves it as a copy of the base's. As one of ``modules_to_save`` it is another matter: transformers
    computes with the embeddings of the stacks, so that such a tensor has no effect.

    Returns:
      A message if it has no effect, and otherwise none.
    """
    tensor = tensors.pop(_SHARED + _WEIGHT, None)
    if tensor is None:
        return []
    if any(_SHARED.endswith(name) for name in wrapped):
        return [
            f"modules_to_save has {_SHARED}, with which transformers computes nothing; train embed_tokens "
            "instead"
        ]
    for c in correspondences(model, kind_of(model).name_of):
        if c.path == ("embedding",):
            for module in _modules_of(c, model):
                tensors.setdefault(module + _WEIGHT, tensor)
    return []


def _whole(module: str) -> tuple[str, str]:
    """Returns the names that a module's own tensor may have in PEFT."""
    return module + _WEIGHT, module + _BASE_LAYER


def _updates(module: str) -> tuple[str, str]:
    """Returns the names of PEFT's A ``[rank, inputs]`` and B ``[outputs, rank]``."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _are_update(a: Tensor, b: Tensor, inputs: int, outputs: int) -> bool:
    """Returns whether tensors are A and B of a matrix ``[outputs, inputs]``."""
    rank = a.shape[:1]
    shapes = (*rank, inputs), (outputs, *rank)
    return (a.shape, b.shape) == shapes and a.dtype in FLOATS and b.dtype in FLOATS


def _misfit(c: Correspondence, whole: Mapping[str, Tensor], modules: list[str]) -> str | None:
    """Returns why tensors cannot take the place of a parameter; None: they can."""
    shape = c.layout.shape(c.shape)
    for name, tensor in whole.items():
        if tensor.shape != shape:
            return f"{name} is {tensor.shape}, and the base's is {shape}"
        if tensor.dtype not in FLOATS:
            return f"{name} is {tensor.dtype}, not a floating-point number"
    missing = [module for module in modules if not any(name in whole for name in _whole(module))]
    first, *others = (tensor.read(None) for tensor in whole.values())
    if missing or not all(np.array_equal(first, other) for other in others):
        names = " and ".join(module + _WEIGHT for module in modules)
        return f"{names} are one parameter of the model, so all of them must be saved, and be equal"
    return None


def _read_whole(c: Correspondence, tensor: Tensor) -> np.ndarray:
    """Reads a parameter of ours that a folder of PEFT holds whole."""
    return c.layout.to_ours(tensor.read(None), c.shape)


def _read_updated(base: Unread, c: Correspondence, a: Tensor, b: Tensor, scale: float) -> np.ndarray:
    """Reads a parameter of ours with its update added."""
    update = np.matmul(b.read(None).astype(np.float32), a.read(None).astype(np.float32))
    return base.read("float32") + c.layout.to_ours(scale * update, c.shape)


def write_adapters(folder: pathlib.Path, model: TokenModel, adapters: Variables, lora: LoRA) -> None:
    """Writes a run's adapters, with looped layers, to an empty directory as PEFT's of transformers' T5.

    Parameters that the run has trained whole become ``modules_to_save``.

    Raises:
      ValueError: the model is not a T5, such as a classifier; the message names what transformers lacks.
    """
    found = correspondences(model, kind_of(model).name_of)
    variables = traverse_util.flatten_dict(adapters)
    tensors, targets, saved = dict[str, np.ndarray](), set[str](), set[str]()
    for c in found:
        scale = model.logits_scale or 1.0 if c.path == ("logits_kernel",) else 1.0  # as `with_output_of_t5`
        if ("params", *c.path) in variables:
            array = c.layout.from_ours(np.asarray(variables["params", *c.path]) * np.float32(scale))
            for module in _modules_of(c, model):
                tensors[_PREFIX + module + _WEIGHT] = np.ascontiguousarray(array)
                saved.add(module)
        elif ("params", *c.path, LORA_A) in variables:
            module = c.name.removesuffix(_WEIGHT)
            a, b = (np.asarray(variables["params", *c.path, leaf]) for leaf in (LORA_A, LORA_B))
            matrices = a.reshape(-1, lora.rank).T, (b * np.float32(scale)).reshape(lora.rank, -1).T
            for name, matrix in zip(_updates(module), matrices, strict=True):
                tensors[_PREFIX + name] = np.ascontiguousarray(matrix)
            targets.add(module)

    leaves = {module.rpartition(".")[2] for module in targets}
    named = {c.name.removesuffix(_WEIGHT) for c in found}
    if targets == {module for module in named if module.rpartition(".")[2] in leaves}:
        targets = leaves  # such as q and v, everywhere
    config = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(saved) or None,
    }
    text = json.dumps(_WRITTEN | config, indent=1)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    (folder / ADAPTER_TENSORS).chmod(0o644)  # safetensors writes it for the owner alone
