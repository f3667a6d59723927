"""Reads and writes ``config.json``, the configuration of a T5 in transformers."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated, Any, TypeAlias

from synthesizer_jax.base.files import describing
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.base.registry import check_types, format_value
from synthesizer_jax.base.typing import Choices, Length, Range, Rate
from synthesizer_jax.pretrained.architecture import MOST_LAYERS, Architecture
from synthesizer_jax.runs.saved import EXPERIMENT_FILE

CARD = "README.md"
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"

IDS = {"pad_token_id": "padding", "eos_token_id": "end", "decoder_start_token_id": "start"}
"""Maps transformers' names of ids to fields of `SpecialIds`.

The files ``config.json`` and ``generation_config.json`` contain these ids.
"""

FORCED = ("forced_bos_token_id", "forced_eos_token_id")
"""Settings that force transformers' decoder to emit a token, which models here cannot do."""

TAKEN = "T5, FLAN-T5, ByT5, UL2, MADLAD, mT5, umT5, T5Gemma or T5Gemma 2"
"""The names of the models that can be read. Error messages list them."""
T5GEMMA = "t5gemma"
"""The ``model_type`` of T5Gemma."""
T5GEMMA2 = "t5gemma2"
"""The ``model_type`` of T5Gemma 2."""
T5GEMMA2_ENCODER = "t5gemma2_encoder"
"""The ``model_type`` of the encoder of T5Gemma 2, if a folder contains only the encoder."""

CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
"""Maps each ``model_type`` of a T5 to the first part of its class names in transformers."""

_OTHERS = {
    "LongT5, whose encoder attends locally or to summaries of blocks": ("longt5",),
    "Switch Transformers, a mixture of experts": ("switch_transformers",),
    "a vision tower, which reads images": ("siglip_vision_model", "siglip2_vision_model"),
    "an encoder of another architecture": (
        "bert",
        "roberta",
        "modernbert",
        "deberta-v2",
        "electra",
    ),
    "a language model without an encoder": (
        "llama",
        "mistral",
        "gemma2",
        "gemma3_text",
        "qwen3",
        "gpt2",
    ),
    "an encoder-decoder of another architecture": ("bart", "mbart", "marian", "pegasus", "m2m_100"),
}
"""Maps descriptions of unsupported models to their values of ``model_type``.

Error messages contain the descriptions.
"""

ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
    "gated-relu": ("relu", "linear"),
}
"""Maps values of ``feed_forward_proj`` to the activations of `FeedForward`.

For a gated GELU, transformers uses the approximation by tanh, as T5 does.
"""


FIELDS = {
    "vocab_size": "vocab_size",
    "d_model": "d_model",
    "head_dim": "d_kv",
    "d_ff": "d_ff",
    "num_layers": "num_layers",
    "num_heads": "num_heads",
    "num_buckets": "relative_attention_num_buckets",
    "max_distance": "relative_attention_max_distance",
    "dropout_rate": "dropout_rate",
    "epsilon": "layer_norm_epsilon",
}
"""Maps fields of `Architecture` to their names in transformers."""


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
      ValueError: if the file does not contain a JSON object.
    """
    with describing(path, "Copy or download it again."):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it contains no JSON object")
        return data


def read_config(
    folder: pathlib.Path, *, output: bool | None, encoder_only: bool = False
) -> Architecture:
    """Returns the architecture that a folder's ``config.json`` describes.

    Versions of transformers differ in how they choose the output projection, and in whether they
    scale the decoder's outputs. Up to version 4, the model has a separate output projection if
    ``tie_word_embeddings`` is false. If ``tie_word_embeddings`` is true, the model uses the
    embedding as its output projection, and scales the decoder's outputs.

    From version 5 on, the model has a separate output projection if the folder contains an output
    projection. A T5 then scales the decoder's outputs if ``scale_decoder_outputs`` is true. The
    default of ``scale_decoder_outputs`` is the value of ``tie_word_embeddings``. An mT5 does not
    scale the decoder's outputs. This package scales the decoder's outputs of a umT5 only if the
    model has no output projection of its own. Version 5 of transformers also scales the outputs of
    a umT5 that has its own output projection. The scaling is a bug of transformers, because umT5
    models with their own output projection were trained without scaling.

    Args:
      folder: the folder of the model.
      output: whether the folder contains an output projection that is not a copy of the embedding.
        `None` means that the tensors of the folder are not known yet.
      encoder_only: whether to return the architecture of only the encoder.

    Raises:
      ValueError: if the configuration does not describe a supported T5.
    """
    path = folder / CONFIG
    data = read_json(path)
    with describing(path, f"Give the folder of a {TAKEN}."):
        architecture = _architecture(data, output, encoder_only)
    return dataclasses.replace(architecture, ids=read_ids(folder, data))


def read_model_type(folder: pathlib.Path) -> str:
    """Returns the ``model_type`` in the configuration of a folder with a T5, T5Gemma or T5Gemma 2.

    Raises:
      FileNotFoundError: if the folder has no configuration.
      ValueError: if the folder contains a different kind of model. The message describes the model
        if its ``model_type`` is known.
    """
    path = folder / CONFIG
    if not path.is_file():
        named = sorted(str(path.parent) for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
        remedy = "Give a folder that transformers has saved."
        runs = sorted(str(path.parent) for path in folder.glob(f"*/{EXPERIMENT_FILE}"))
        if runs:
            remedy = f"Give a run, such as {runs[0]}."
        elif named:
            remedy = f"Give {named[0]}, which contains adapters."
        elif (folder / ADAPTER_TENSORS).is_file():
            raise FileNotFoundError(
                f"{folder} contains {ADAPTER_TENSORS}, but no {ADAPTER_CONFIG}, which says how the "
                "adapters are applied. Copy or download this file, too."
            )
        raise FileNotFoundError(f"{folder} contains no {CONFIG}. {remedy}")
    found = read_json(path).get("model_type", "t5")
    if found not in (*CLASSES, T5GEMMA, T5GEMMA2, T5GEMMA2_ENCODER):
        what = "another architecture"
        for description, names in _OTHERS.items():
            if found in names:
                what = description
        raise ValueError(
            f"The model_type in {path} is {format_value(found)}, which is {what}. Give the folder "
            f"of a {TAKEN}."
        )
    return str(found)


Layers: TypeAlias = Annotated[int, Range(1, MOST_LAYERS)]
"""The type of a field that is the number of layers of a stack."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """The fields of ``config.json`` that this package reads, with the defaults of transformers.

    The fields are checked in the order in which they are defined.
    """

    model_type: str = "t5"
    vocab_size: Length
    d_model: Length
    d_kv: Length
    d_ff: Length
    num_heads: Length
    num_layers: Layers
    num_decoder_layers: Layers | None = None
    feed_forward_proj: Annotated[str, Choices(tuple(ACTIVATIONS))] | None = None
    tie_word_embeddings: bool | None = None
    scale_decoder_outputs: bool | None = None
    relative_attention_num_buckets: Length = 32
    relative_attention_max_distance: Length = 128
    layer_norm_epsilon: Rate = 1e-6
    dropout_rate: Rate = 0.1
    architectures: object = None
    transformers_version: object = None


def _architecture(data: dict[str, Any], output: bool | None, encoder_only: bool) -> Architecture:
    """Returns the architecture of a configuration; see `read_config` for the rules."""
    values: dict[str, Any] = {
        f.name: data.get(f.name, None if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(_Config)
    }
    check_types(_Config, values)
    config = _Config(**values)
    family = config.model_type

    # Determine the output projection and the scale by the rules in `read_config`.
    flag = config.tie_word_embeddings
    if flag is None:
        flag = family != "mt5"
    tied = flag
    scaled = flag
    if _is_of_version_5(config):
        if output is not None:
            tied = not output
        if family == "t5":
            given = config.scale_decoder_outputs
            scaled = flag if given is None else given
        else:
            scaled = family == "umt5" and tied

    classes = config.architectures if isinstance(config.architectures, list) else []
    for name in map(str, classes):
        if name.endswith(("Classification", "Answering")):
            raise ValueError(f"a {name} is not supported")
    # If the only class is a class such as UMT5EncoderModel, the folder holds only an encoder.
    if len(classes) == 1 and str(classes[0]).endswith("EncoderModel"):
        encoder_only = True

    default_activations = "relu" if family == "t5" else "gated-gelu"
    return Architecture(
        **{ours: getattr(config, theirs) for ours, theirs in FIELDS.items()},
        num_decoder_layers=0 if encoder_only else config.num_decoder_layers or config.num_layers,
        activations=ACTIVATIONS[config.feed_forward_proj or default_activations],
        tied=tied or encoder_only,
        scaled=scaled or encoder_only,
        bias_per_layer=family == "umt5",
    )


def _is_of_version_5(config: _Config) -> bool:
    """Returns whether transformers 5 or a later version has written a configuration.

    If the file does not contain the version, the function looks for the field
    ``scale_decoder_outputs``, which older versions do not write.
    """
    if not config.transformers_version:
        return config.scale_decoder_outputs is not None
    major = str(config.transformers_version).split(".")[0]
    return major.isdecimal() and int(major) >= 5


def read_ids(
    folder: pathlib.Path, config: dict[str, Any], unsaid: SpecialIds = T5_IDS
) -> SpecialIds:
    """Returns the special ids in a folder's ``config.json`` and ``generation_config.json``.

    Args:
      folder: the folder of the model.
      config: the content of ``config.json``.
      unsaid: the special ids to use if neither file contains them.

    Raises:
      ValueError: if the files contradict each other, if a file has several ids for a special token
        other than EOS, or if a file forces the decoder to generate a certain token.
    """
    found: dict[str, int] = {}
    also_end: tuple[int, ...] = ()
    generation = folder / GENERATION_CONFIG
    files = {folder / CONFIG: config}
    if generation.is_file():
        files[generation] = read_json(generation)

    for file, values in files.items():
        with describing(file, "Change it, or use another model."):
            for name, value in values.items():
                if name in FORCED and value is not None:
                    raise ValueError(
                        f"{name} is {format_value(value)}, but models of this package cannot force "
                        "a token"
                    )
                if name not in IDS or value is None:
                    continue

                # Only EOS may have several ids.
                ids = value if isinstance(value, list) else [value]
                is_valid = len(ids) == 1 or (name == "eos_token_id" and len(ids) > 1)
                if not is_valid or any(type(i) is not int for i in ids):
                    raise ValueError(
                        f"{name} is {format_value(value)}, but models of this package have only "
                        "one such id"
                    )
                if name == "eos_token_id":
                    # The ids of EOS in `generation_config.json`, which is read last, override the
                    # ids in `config.json`. The method generate() of transformers does the same.
                    also_end = tuple(ids[1:])
                if found.setdefault(IDS[name], ids[0]) != ids[0]:
                    raise ValueError(
                        f"{name} is {ids[0]}, but it is {found[IDS[name]]} in {CONFIG}"
                    )
    return dataclasses.replace(unsaid, **found, also_end=also_end)


def write_ids(ids: SpecialIds) -> dict[str, object]:
    """Returns the fields of ``config.json`` and ``generation_config.json`` that contain ids."""
    fields: dict[str, object] = {theirs: getattr(ids, ours) for theirs, ours in IDS.items()}
    # The value null says that the model does not force the first or the last token of an output.
    fields.update(dict.fromkeys(FORCED))
    if ids.also_end:
        fields["eos_token_id"] = list(ids.ends)
    return fields


def write_config(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Returns the fields of a ``config.json`` from which transformers 4 and 5 build the same model.

    Args:
      architecture: the architecture of the model.
      dtype: the name of the dtype of the tensors in the folder.

    Raises:
      ValueError: if transformers does not support the activations.
    """
    a = architecture
    # This dictionary maps the activations of this package to their names in transformers.
    activations = {value: name for name, value in ACTIVATIONS.items()}
    if a.activations not in activations:
        raise ValueError(
            f"The activations of the model are {a.activations}, but transformers only has "
            f"{', '.join(map(str, activations))}."
        )
    family = "umt5" if a.bias_per_layer else "t5"
    kind = "ForConditionalGeneration" if a.num_decoder_layers else "EncoderModel"
    return {
        "architectures": [f"{CLASSES[family]}{kind}"],
        "model_type": family,
        **{theirs: getattr(a, ours) for ours, theirs in FIELDS.items()},
        "num_decoder_layers": a.num_decoder_layers or a.num_layers,
        "feed_forward_proj": activations[a.activations],
        "is_encoder_decoder": True,
        "tie_word_embeddings": a.tied,
        **write_ids(a.ids),
        "torch_dtype": dtype,
    }
