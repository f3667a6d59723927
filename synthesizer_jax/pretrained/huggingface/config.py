"""The configuration of a T5 in transformers, ``config.json``."""

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

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"

IDS = {"pad_token_id": "padding", "eos_token_id": "end", "decoder_start_token_id": "start"}
"""Ids of both files, and the fields of `SpecialIds`."""

FORCED = ("forced_bos_token_id", "forced_eos_token_id")
"""Tokens that transformers can force, and models here cannot."""

TAKEN = "T5, FLAN-T5, ByT5, UL2, MADLAD, mT5, umT5 or T5Gemma"
T5GEMMA = "t5gemma"

CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
"""Values of ``model_type``, and the first part of the names of transformers' classes."""

_OTHERS = {
    "T5Gemma 2, whose decoder attends to itself and to the encoder at once": ("t5gemma2",),
    "LongT5, whose encoder attends locally or to summaries of blocks": ("longt5",),
    "Switch Transformers, a mixture of experts": ("switch_transformers",),
    "an encoder of another architecture": ("bert", "roberta", "modernbert", "deberta-v2", "electra"),
    "a language model without an encoder": ("llama", "mistral", "gemma2", "gemma3_text", "qwen3", "gpt2"),
    "an encoder-decoder of another architecture": ("bart", "mbart", "marian", "pegasus", "m2m_100"),
}
"""Values of ``model_type`` that are not taken, by what they are."""

ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
    "gated-relu": ("relu", "linear"),
}
"""Values of ``feed_forward_proj``; transformers computes a gated GELU by tanh, as T5 does."""


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
"""Fields of `Architecture`, and transformers' names of them."""


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
      ValueError: the file is not one.
    """
    with describing(path, "copy or download it again"):
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict):
            raise ValueError("it holds no JSON object")
        return data


def read_config(folder: pathlib.Path, *, output: bool | None, encoder_only: bool = False) -> Architecture:
    """Returns the architecture that a folder's ``config.json`` describes.

    Up to version 4, transformers has an output projection of its own if ``tie_word_embeddings`` is
    false, and otherwise uses the embedding and scales the decoder's outputs. From version 5 on the
    projection is the model's own if the folder has one. A T5 scales if ``scale_decoder_outputs`` is true,
    by default the value of ``tie_word_embeddings``. An mT5 does not scale. (Version 5 scales also a umT5
    with its own projection, in error: they were trained without.)

    `output` tells whether the folder holds an output projection that is not a copy of the embedding; None:
    that is not known. `encoder_only` makes the architecture that of the encoder alone.
    """
    path = folder / CONFIG
    data = read_json(path)
    with describing(path, f"give the folder of a {TAKEN}"):
        architecture = _architecture(data, output, encoder_only)
    return dataclasses.replace(architecture, ids=read_ids(folder, data))


def read_model_type(folder: pathlib.Path) -> str:
    """Returns the ``model_type`` of a folder, which is taken here.

    Raises:
      FileNotFoundError: the folder holds no configuration.
      ValueError: it is another; the message says what it is, if that is known.
    """
    path = folder / CONFIG
    if not path.is_file():
        named = sorted(str(path.parent) for path in folder.glob(f"*/{ADAPTER_CONFIG}"))
        remedy = (
            f"give {named[0]}, which holds adapters"
            if named
            else "give a folder that transformers has saved"
        )
        raise FileNotFoundError(f"{folder} holds no {CONFIG}; {remedy}")
    found = read_json(path).get("model_type", "t5")
    if found not in (*CLASSES, T5GEMMA):
        what = next((kind for kind, names in _OTHERS.items() if found in names), "another architecture")
        raise ValueError(
            f"{path}: model_type is {format_value(found)}, {what}; give the folder of a {TAKEN}"
        )
    return str(found)


Layers: TypeAlias = Annotated[int, Range(1, MOST_LAYERS)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Config:
    """The fields of ``config.json`` that are read, in the order of checks, with transformers' defaults."""

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
    """Returns the architecture of a configuration; see `read_config`."""
    values: dict[str, Any] = {
        f.name: data.get(f.name, None if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(_Config)
    }
    check_types(_Config, values)
    config = _Config(**values)
    family = config.model_type
    flag = config.tie_word_embeddings
    flag = family != "mt5" if flag is None else flag
    tied = scaled = flag
    unsaid = "4" if config.scale_decoder_outputs is None else "5"
    major = str(config.transformers_version or unsaid).split(".")[0]  # of the version that wrote it
    if major.isdecimal() and int(major) >= 5:
        tied = tied if output is None else not output
        scaled = family == "umt5" and tied
        if family == "t5":
            given = config.scale_decoder_outputs
            scaled = flag if given is None else given
    plain = "relu" if family == "t5" else "gated-gelu"
    classes = config.architectures if isinstance(config.architectures, list) else []
    for name in map(str, classes):
        if name.endswith(("Classification", "Answering")):
            raise ValueError(f"a {name} is not read")
    encoder_only = encoder_only or [str(c)[-12:] for c in classes] == ["EncoderModel"]
    return Architecture(
        **{ours: getattr(config, theirs) for ours, theirs in FIELDS.items()},
        num_decoder_layers=0 if encoder_only else config.num_decoder_layers or config.num_layers,
        activations=ACTIVATIONS[config.feed_forward_proj or plain],
        tied=tied or encoder_only,
        scaled=scaled or encoder_only,
        bias_per_layer=family == "umt5",
    )


def read_ids(folder: pathlib.Path, config: dict[str, Any], unsaid: SpecialIds = T5_IDS) -> SpecialIds:
    """Returns the ids that a folder's two files name, and those of `unsaid` where they do not.

    Raises:
      ValueError: they name different ones, several but of EOS, or a token that is forced.
    """
    found: dict[str, int] = {}
    also_end: tuple[int, ...] = ()
    generation = folder / GENERATION_CONFIG
    files = {folder / CONFIG: config}
    if generation.is_file():
        files[generation] = read_json(generation)
    for file, values in files.items():
        with describing(file, "change it, or take another model"):
            for name, value in values.items():
                if name in FORCED and value is not None:
                    raise ValueError(f"{name} is {format_value(value)}, but models here force no token")
                if name not in IDS or value is None:
                    continue
                ids = value if isinstance(value, list) else [value]
                one = len(ids) == 1 or (ids and name == "eos_token_id")
                if not one or any(type(i) is not int for i in ids):
                    raise ValueError(f"{name} is {format_value(value)}, but models here have one id")
                also_end = tuple(ids[1:]) if name == "eos_token_id" else also_end  # as generate() has it
                if found.setdefault(IDS[name], ids[0]) != ids[0]:
                    raise ValueError(f"{name} is {ids[0]}, but {CONFIG} has {found[IDS[name]]}")
    return dataclasses.replace(unsaid, **found, also_end=also_end)


def write_ids(ids: SpecialIds) -> dict[str, object]:
    """Returns the fields of both files that name ids."""
    fields = {theirs: getattr(ids, ours) for theirs, ours in IDS.items()} | dict.fromkeys(FORCED)
    return fields | ({"eos_token_id": list(ids.ends)} if ids.also_end else {})


def write_config(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Returns the fields of ``config.json``, which versions 4 and 5 of transformers read alike."""
    a = architecture
    activations = {value: name for name, value in ACTIVATIONS.items()}
    if a.activations not in activations:
        raise ValueError(
            f"activations is {a.activations}; transformers has {', '.join(map(str, activations))}"
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
