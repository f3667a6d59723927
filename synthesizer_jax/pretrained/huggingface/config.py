"""The configuration of a T5 in transformers, ``config.json``."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from synthesizer_jax.files import describing
from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.pretrained.architecture import MOST_LAYERS, Architecture
from synthesizer_jax.registry import format_value

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

IDS: dict[str, object] = {
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}
"""Ids of both files, and T5's values, which models here have."""

CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
"""Values of ``model_type``, and the first part of the names of transformers' classes."""

ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
    "gated-relu": ("relu", "linear"),
}
"""Values of ``feed_forward_proj``; transformers computes a gated GELU by tanh, as T5 does."""


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


def read_config(folder: pathlib.Path, *, output: bool | None) -> Architecture:
    """Returns the architecture that a folder's ``config.json`` describes.

    Up to version 4, transformers has an output projection of its own if ``tie_word_embeddings`` is
    false, and otherwise uses the embedding and scales the decoder's outputs. From version 5 on the
    projection is the model's own if the folder has one; a T5 scales if ``scale_decoder_outputs`` is
    true, by default the value of ``tie_word_embeddings``, and an mT5 does not.
    (Version 5 scales also a umT5 with its own projection, in error: they were trained without.)

    Args:
      folder: the folder.
      output: whether it holds an output projection that is not a copy of the embedding; None: not known.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it describes another architecture.
    """
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {CONFIG}; give a folder that transformers has saved"
        )
    for file in (path, folder / GENERATION_CONFIG):
        if file.is_file():
            config = read_json(file)
            with describing(file, "change it if the model was trained with T5's ids"):
                _check_ids(config)
    with describing(path, "give the folder of a T5"):
        return _architecture(read_json(path), output)


def _architecture(config: dict[str, Any], output: bool | None) -> Architecture:
    """Returns the architecture of a configuration; see `read_config`."""
    family = _choice(config, "model_type", CLASSES, "t5")
    flag = _flag(config, "tie_word_embeddings", family != "mt5")
    tied = scaled = flag
    if _version(config) >= 5:
        tied = tied if output is None else not output
        scaled = family == "umt5" and tied
        if family == "t5":
            scaled = _flag(config, "scale_decoder_outputs", flag)
    plain = "relu" if family == "t5" else "gated-gelu"
    num_layers = _integer(config, "num_layers", most=MOST_LAYERS)
    num_decoder_layers = num_layers
    if config.get("num_decoder_layers") is not None:
        num_decoder_layers = _integer(config, "num_decoder_layers", most=MOST_LAYERS)
    classes = config.get("architectures")
    encoder_only = isinstance(classes, list) and [str(c)[-12:] for c in classes] == ["EncoderModel"]
    return Architecture(
        vocab_size=_integer(config, "vocab_size"),
        d_model=_integer(config, "d_model"),
        num_heads=_integer(config, "num_heads"),
        head_dim=_integer(config, "d_kv"),
        d_ff=_integer(config, "d_ff"),
        num_layers=num_layers,
        num_decoder_layers=0 if encoder_only else num_decoder_layers,
        activations=ACTIVATIONS[_choice(config, "feed_forward_proj", ACTIVATIONS, plain)],
        tied=tied or encoder_only,
        scaled=scaled or encoder_only,
        num_buckets=_integer(config, "relative_attention_num_buckets", 32),
        max_distance=_integer(config, "relative_attention_max_distance", 128),
        bias_per_layer=family == "umt5",
        epsilon=_fraction(config, "layer_norm_epsilon", 1e-6),
        dropout_rate=_fraction(config, "dropout_rate", 0.1),
    )


def _check_ids(config: dict[str, Any]) -> None:
    """Raises a `ValueError` if a file has other ids than T5's; version 5 may list the one EOS."""
    for name, expected in IDS.items():
        found = config.get(name, expected)
        if found not in (expected, [expected]):
            raise ValueError(
                f"{name} is {format_value(found)}, but models here have {json.dumps(expected)}"
            )


def _version(config: dict[str, Any]) -> int:
    """Returns the major version of transformers that wrote a configuration; 4 if it does not tell."""
    unsaid = "5" if "scale_decoder_outputs" in config else "4"
    major = str(config.get("transformers_version", unsaid)).split(".")[0]
    return int(major) if major.isdecimal() else 4


def _integer(
    config: dict[str, Any], name: str, default: int | None = None, *, most: int = 2**20
) -> int:
    value = config.get(name, default)
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(
            f"{name} is {format_value(value)}; expected a positive integer up to {most:,}"
        )
    return value


def _fraction(config: dict[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(
            f"{name} is {format_value(value)}; expected a number from 0 to less than 1"
        )
    return float(value)


def _choice(config: dict[str, Any], name: str, choices: Iterable[str], default: str) -> str:
    value, choices = config.get(name, default), tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{name} is {format_value(value)}{did_you_mean(str(value), choices)}; supported: "
            f"{', '.join(choices)}"
        )
    return str(value)


def _flag(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {format_value(value)}; expected true or false")
    return value


def write_config(architecture: Architecture, dtype: str) -> dict[str, Any]:
    """Returns the fields of ``config.json``, which versions 4 and 5 of transformers read alike.

    Raises:
      ValueError: transformers has no model with these fields.
    """
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
        "vocab_size": a.vocab_size,
        "d_model": a.d_model,
        "d_kv": a.head_dim,
        "d_ff": a.d_ff,
        "num_layers": a.num_layers,
        "num_decoder_layers": a.num_decoder_layers or a.num_layers,
        "num_heads": a.num_heads,
        "relative_attention_num_buckets": a.num_buckets,
        "relative_attention_max_distance": a.max_distance,
        "dropout_rate": a.dropout_rate,
        "layer_norm_epsilon": a.epsilon,
        "feed_forward_proj": activations[a.activations],
        "is_encoder_decoder": True,
        "tie_word_embeddings": a.tied,
        **IDS,
        "torch_dtype": dtype,
    }
