"""Reads and writes folders of PEFT that hold LoRA adapters of a T5 or T5Gemma.

A folder of PEFT contains ``adapter_config.json`` and ``adapter_model.safetensors``. The tensors are
low-rank updates of matrices, and complete parameters of the modules that ``modules_to_save`` names.
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
from synthesizer_jax.checkpoints.streamed import Part, Unread
from synthesizer_jax.models import Encoder, EncoderDecoder
from synthesizer_jax.models.adapters import Adapted
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.models.updates import LORA_A, LORA_B
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.pretrained.huggingface import t5gemma
from synthesizer_jax.pretrained.huggingface.config import ADAPTER_CONFIG, ADAPTER_TENSORS, read_json
from synthesizer_jax.pretrained.huggingface.export import kind_of
from synthesizer_jax.pretrained.huggingface.hub import find_folder
from synthesizer_jax.pretrained.huggingface.names import EMBEDDINGS, OUTPUT
from synthesizer_jax.pretrained.huggingface.weights import open_safetensors
from synthesizer_jax.pretrained.tensors import (
    FLOATS,
    Correspondence,
    Tensor,
    correspondences,
    read_parameter,
    reading,
)
from synthesizer_jax.primitives.parameters import Variables

_PREFIX = "base_model.model."
"""The prefix of every tensor's name in a folder of PEFT."""

_WEIGHT, _BASE_LAYER = ".weight", ".base_layer.weight"
"""The suffixes of the names of tensors without an update and with an update by PEFT."""

_SHARED, *_EMBEDDINGS_OF_STACKS = (name.removesuffix(_WEIGHT) for name in EMBEDDINGS)
"""The modules of a T5 that hold the embedding: the shared module, and a module in each stack."""

_TORCH_TENSORS = "adapter_model.bin"
"""The file name of older adapters. The file is a pickle, so it is not read."""

_WRITTEN: dict[str, object] = {
    "peft_type": "LORA",
    "task_type": "SEQ_2_SEQ_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "lora_dropout": 0.0,
}
"""The options that have the same values in every folder that `write_adapters` writes."""

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
"""The supported values of PEFT's options that change what is computed or saved.

With the supported values, a matrix with adapters is W + (alpha / rank) · B · A, where W is the
unchanged matrix of the base model. Null is supported for all options except ``peft_type``.
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
"""The options of PEFT that may have any value.

Other functions of this module read some of these options. The remaining options only describe how
the adapters were trained, or repeat information from the tensors and other options. For example,
the configurations of initializers only matter for certain values of ``init_lora_weights``, which
`OPTIONS` checks.
"""


def is_adapter(source: pathlib.Path) -> bool:
    """Returns whether a path is a folder of PEFT."""
    return (source / ADAPTER_CONFIG).is_file()


def base_of(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the base model to which the adapters in a folder belong.

    The base model may itself be a folder of adapters.

    Raises:
      ValueError: if the folder does not name a base model, or if the chain of base models leads
        back to the same adapters.
      FileNotFoundError: if the base model does not exist; see `find_folder`.
    """
    base = other = _named_base(folder)
    seen = {folder.resolve()}
    # Follow the chain of base models to a folder without adapters, so that a circular chain is
    # found before any tensor is read.
    while other.resolve() not in seen:
        if not is_adapter(other):
            return base
        seen.add(other.resolve())
        other = _named_base(other)
    raise ValueError(
        f"base_model_name_or_path in {folder / ADAPTER_CONFIG} leads back to {other}, which "
        "contains adapters. Write the folder of the model there."
    )


def _named_base(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder that ``base_model_name_or_path`` names; see `base_of` for the errors."""
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str):
        raise ValueError(
            f"base_model_name_or_path in {path} is {format_value(name)}, but it must be the folder "
            "of the model, or its OWNER/NAME on the Hugging Face Hub. Write one of these there."
        )
    base = storage_path(name).expanduser()
    try:
        return find_folder(base, None if base.exists() else revision)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"base_model_name_or_path in {path}: {error}") from error


def _check_options(config: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names an option of PEFT whose value is not supported."""
    for name, allowed in OPTIONS.items():
        value = config.get(name)
        if value not in allowed and (value is not None or name == "peft_type"):
            raise ValueError(f"{name} is {format_value(value)}, which is not supported")
    for name in sorted(config.keys() - OPTIONS.keys() - IGNORED):
        if config[name] not in (None, False, [], {}):
            raise ValueError(
                f"{name} is {format_value(config[name])}, but this option is not known"
            )


def with_adapters(folder: pathlib.Path, base: Pretrained) -> Pretrained:
    """Adds the adapters in a folder to the parameters of a base model, and returns the model.

    A low-rank update is added to its matrix when the matrix is read. Tensors of ``modules_to_save``
    replace the tensors of the base model. If the base model is an `Encoder`, tensors of the decoder
    are ignored.

    Raises:
      FileNotFoundError: if the folder has no safetensors file.
      ValueError: if the adapters are not LoRA adapters of a supported form, or belong to a
        different model. The message lists all tensors that do not fit.
    """
    name_of = kind_of(base.model).name_of
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    with describing(path, "Merge the adapters into the model with PEFT, and give that folder."):
        _check_options(config)
        alpha = float(config["lora_alpha"])
        # The update is scaled by alpha / rank, or by alpha / √rank with rank-stabilized LoRA.
        power = 0.5 if config.get("use_rslora") else 1.0
        wrapped = [str(name) for name in config.get("modules_to_save") or ()]
    saved = _open_tensors(folder)
    tensors = _of_encoder(saved) if isinstance(base.model, Encoder) else dict(saved)
    problems = _share_embedding(tensors, base.model, wrapped)

    params: dict[tuple[str, ...], Unread] = traverse_util.flatten_dict(base.params)
    updated: dict[tuple[str, ...], Unread] = {}
    known: set[str] = set()
    for c in correspondences(base.model, name_of):
        modules = _modules_of(c, base.model)
        # Collect the tensors that replace the parameter. The folder contains tensors that replace a
        # parameter only if `modules_to_save` names the parameter.
        whole = {
            name: tensors[name] for module in modules for name in _whole(module) if name in tensors
        }
        updates = _updates(modules[0])
        known.update(whole, updates)

        if whole:
            problem = _misfit(c, whole, modules)
            if problem is not None:
                problems.append(problem)
                continue
            updated[c.path] = Unread(
                c.shape, functools.partial(read_parameter, next(iter(whole.values())), c)
            )

        a, b = (tensors.get(name) for name in updates)
        if a is None and b is None:
            continue
        # The matrix of the torch module has the shape ``[outputs, inputs]``.
        outputs, inputs = c.layout.shape(c.shape)
        if a is None or b is None or not _are_update(a, b, inputs, outputs):
            problems.append(
                f"{' and '.join(updates)} do not fit {c.name}, which has the shape "
                f"{(outputs, inputs)}"
            )
            continue
        scale = alpha / a.shape[0] ** power
        # If `modules_to_save` replaces the matrix, the update is added to the replacement.
        matrix = updated.get(c.path, params[c.path])
        updated[c.path] = Unread(c.shape, functools.partial(_read_updated, matrix, c, a, b, scale))

    problems += [
        f"{name} is neither an update of a matrix of the base nor one of its parameters"
        for name in sorted(tensors.keys() - known)
    ]
    if problems or not saved:
        reason = "; ".join(problems) or "it contains no LoRA adapters"
        raise ValueError(f"{folder} does not fit its base: {reason}.")
    return base._replace(params=traverse_util.unflatten_dict(params | updated))


def _open_tensors(folder: pathlib.Path) -> dict[str, Tensor]:
    """Returns the tensors of a folder by their names without PEFT's prefix."""
    path = folder / ADAPTER_TENSORS
    if not path.is_file() and (folder / _TORCH_TENSORS).is_file():
        raise FileNotFoundError(
            f"{folder} contains {_TORCH_TENSORS}, which is a pickle, and no {ADAPTER_TENSORS}. "
            "Load it with PEFT, and save it again with save_pretrained(FOLDER, "
            "safe_serialization=True)."
        )
    with reading(path):
        return {
            name.removeprefix(_PREFIX): tensor for name, tensor in open_safetensors(path).items()
        }


def _of_encoder(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the encoder, by their names in a model without a decoder."""
    others = ("decoder", OUTPUT.partition(".")[0])
    of_encoder = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(t5gemma.PREFIX)
        if short.partition(".")[0] not in others:
            of_encoder[short] = tensor
    return of_encoder


def _modules_of(c: Correspondence, model: TokenModel) -> list[str]:
    """Returns the names of the modules of transformers that hold a parameter of this package.

    In transformers, several modules of a T5 hold the embedding, including a tied output projection.
    All modules that hold the embedding initially share one tensor. If PEFT wraps one of the
    modules, each module has its own copy of the tensor.
    """
    module = c.name.removesuffix(_WEIGHT)
    if c.path != ("embedding",):
        return [module]

    has_decoder = isinstance(model, EncoderDecoder)
    if t5gemma.is_t5gemma(model):
        modules, output = [module], t5gemma.OUTPUT
    else:
        modules, output = list(_EMBEDDINGS_OF_STACKS), OUTPUT
        if not has_decoder:
            modules = [name for name in modules if "decoder" not in name]
    if has_decoder and model.tied:
        modules.append(output.removesuffix(_WEIGHT))
    return modules


def _share_embedding(
    tensors: dict[str, Tensor], model: TokenModel, wrapped: list[str]
) -> list[str]:
    """Copies the tensor ``shared.weight`` of a T5 to the modules that share the embedding.

    If a folder of PEFT contains ``shared.weight``, the tensor is usually a copy of the base model's
    tensor. However, if ``modules_to_save`` names the module ``shared``, the tensor has no effect,
    because transformers computes with the embeddings of the stacks. The function reports a tensor
    without an effect as a problem.

    Args:
      tensors: the tensors by name. The dictionary is changed in place.
      model: the base model.
      wrapped: the names in ``modules_to_save``.

    Returns:
      A list with an error message if the tensor has no effect, and an empty list if there is no
      problem.
    """
    tensor = tensors.pop(_SHARED + _WEIGHT, None)
    if tensor is None:
        return []
    if any(_SHARED.endswith(name) for name in wrapped):
        return [
            f"modules_to_save contains {_SHARED}, but transformers does not compute with it (train "
            "embed_tokens instead)"
        ]
    for c in correspondences(model, kind_of(model).name_of):
        if c.path == ("embedding",):
            for module in _modules_of(c, model):
                tensors.setdefault(module + _WEIGHT, tensor)
    return []


def _whole(module: str) -> tuple[str, str]:
    """Returns the two names that the complete tensor of a module may have in a folder of PEFT."""
    return module + _WEIGHT, module + _BASE_LAYER


def _updates(module: str) -> tuple[str, str]:
    """Returns PEFT's names of the matrices A ``[rank, inputs]`` and B ``[outputs, rank]``."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def _are_update(a: Tensor, b: Tensor, inputs: int, outputs: int) -> bool:
    """Returns whether two tensors can be the factors A and B of a matrix's low-rank update."""
    rank = a.shape[:1]
    shapes = (*rank, inputs), (outputs, *rank)
    return (a.shape, b.shape) == shapes and a.dtype in FLOATS and b.dtype in FLOATS


def _misfit(c: Correspondence, whole: Mapping[str, Tensor], modules: list[str]) -> str | None:
    """Returns the reason why tensors cannot replace a parameter, or `None` if they can replace it.

    Args:
      c: the parameter, as a `Correspondence`.
      whole: the tensors that replace the parameter, by name.
      modules: the modules that share the parameter. Equal tensors must replace the parameter in all
        of these modules.
    """
    shape = c.layout.shape(c.shape)
    for name, tensor in whole.items():
        if tensor.shape != shape:
            return f"{name} has the shape {tensor.shape}, but that of the base is {shape}"
        if tensor.dtype not in FLOATS:
            return f"{name} is {tensor.dtype}, which is not a floating-point dtype"
    missing = [module for module in modules if not any(name in whole for name in _whole(module))]
    first, *others = (tensor.read(()) for tensor in whole.values())
    if missing or not all(np.array_equal(first, other) for other in others):
        names = " and ".join(module + _WEIGHT for module in modules)
        return f"{names} are one parameter of the model, so all of them must be saved and be equal"
    return None


def _read_updated(
    base: Unread, c: Correspondence, a: Tensor, b: Tensor, scale: float, part: Part
) -> np.ndarray:
    """Reads a part of a parameter, and adds the low-rank update of the parameter."""
    update = np.matmul(b.read(()).astype(np.float32), a.read(()).astype(np.float32))
    return base.read("float32", part) + c.layout.to_ours(scale * update, c.shape)[part]


def write_adapters(
    folder: pathlib.Path,
    adapted: Adapted[TokenModel],
    variables: Variables,
    *,
    base: str | None = None,
) -> None:
    """Writes the adapters of a run to an empty directory, in the format of PEFT.

    The adapters have the names and shapes that fit the T5 of transformers. If the run has trained a
    complete parameter, its module is named in ``modules_to_save``.

    Args:
      folder: the empty directory.
      adapted: the model with looped layers, and the adapters of the model.
      variables: the variables that the run has trained.
      base: the name of the base model on the hub, or `None` if it is not known.

    Raises:
      ValueError: if the model is not a T5, for example if it is a classifier. The message names a
        part of the model that transformers does not support.
    """
    model = adapted.model
    rank = adapted.lora.rank
    found = correspondences(model, kind_of(model).name_of)
    arrays = traverse_util.flatten_dict(variables)
    tensors: dict[str, np.ndarray] = {}
    targets: set[str] = set()
    saved: set[str] = set()
    for c in found:
        # Multiply the scale of the logits into the output projection, as `with_output_of_t5` does.
        keys = ("params", *c.path)
        scale = np.float32(1.0)
        if c.path == ("logits_kernel",):
            scale = np.float32(model.logits_scale or 1.0)
        if keys in adapted.whole:
            array = c.layout.from_ours(np.asarray(arrays[keys]) * scale)
            for module in _modules_of(c, model):
                tensors[_PREFIX + module + _WEIGHT] = np.ascontiguousarray(array)
                saved.add(module)
        elif keys in adapted.updates:
            module = c.name.removesuffix(_WEIGHT)
            # Reshape A to ``[rank, inputs]`` and B to ``[outputs, rank]``.
            a = np.asarray(arrays[*keys, LORA_A]).reshape(-1, rank).T
            b = (np.asarray(arrays[*keys, LORA_B]) * scale).reshape(rank, -1).T
            for name, matrix in zip(_updates(module), (a, b), strict=True):
                tensors[_PREFIX + name] = np.ascontiguousarray(matrix)
            targets.add(module)

    # If all modules whose names end with the same part, such as q or v, are adapted, write only the
    # last parts of the names.
    leaves = {module.rpartition(".")[2] for module in targets}
    named = {c.name.removesuffix(_WEIGHT) for c in found}
    if targets == {module for module in named if module.rpartition(".")[2] in leaves}:
        targets = leaves
    config = {
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": adapted.lora.alpha,
        "target_modules": sorted(targets),
        "modules_to_save": sorted(saved) or None,
    }
    text = json.dumps(_WRITTEN | config, indent=1)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
    save_file(tensors, folder / ADAPTER_TENSORS, metadata={"format": "pt"})
    # The library safetensors creates files that only their owner can read, so change the
    # permissions.
    (folder / ADAPTER_TENSORS).chmod(0o644)
