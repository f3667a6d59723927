"""The configuration of a T5 in transformers, ``config.json``."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from synthesizer_jax.pretrained.architecture import MOST_LAYERS, Architecture
from synthesizer_jax.pretrained.huggingface.json_files import Fields

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

FAMILIES = ("t5", "mt5", "umt5")
"""Values of ``model_type``."""

CLASSES = {"t5": "T5", "mt5": "MT5", "umt5": "UMT5"}
"""First part of the names of transformers' classes."""

ACTIVATIONS = {
    "relu": ("relu",),
    "gated-gelu": ("gelu", "linear"),
    "gated-silu": ("silu", "linear"),
    "gated-relu": ("relu", "linear"),
}
"""Values of ``feed_forward_proj``; transformers computes a gated GELU by tanh, as T5 does."""


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
    config = Fields(path)
    family = config.choice("model_type", FAMILIES, "t5")
    _check_ids(config)
    if (folder / GENERATION_CONFIG).is_file():
        _check_ids(Fields(folder / GENERATION_CONFIG))
    flag = config.flag("tie_word_embeddings", family != "mt5")
    tied = scaled = flag
    if _version(config) >= 5:
        tied = tied if output is None else not output
        scaled = family == "umt5" and tied
        if family == "t5":
            scaled = config.flag("scale_decoder_outputs", flag)
    kind = config.choice(
        "feed_forward_proj", ACTIVATIONS, "relu" if family == "t5" else "gated-gelu"
    )
    num_layers = config.integer("num_layers", most=MOST_LAYERS)
    num_decoder_layers = num_layers
    if config.fields.get("num_decoder_layers") is not None:
        num_decoder_layers = config.integer("num_decoder_layers", most=MOST_LAYERS)
    encoder_only = _is_encoder_only(config)
    return Architecture(
        vocab_size=config.integer("vocab_size"),
        d_model=config.integer("d_model"),
        num_heads=config.integer("num_heads"),
        head_dim=config.integer("d_kv"),
        d_ff=config.integer("d_ff"),
        num_layers=num_layers,
        num_decoder_layers=0 if encoder_only else num_decoder_layers,
        activations=ACTIVATIONS[kind],
        tied=tied or encoder_only,
        scaled=scaled or encoder_only,
        num_buckets=config.integer("relative_attention_num_buckets", 32),
        max_distance=config.integer("relative_attention_max_distance", 128),
        bias_per_layer=family == "umt5",
        epsilon=config.number("layer_norm_epsilon", 1e-6, low=1e-30, high=1.0),
        dropout_rate=config.number("dropout_rate", 0.1, low=0.0, high=1.0),
    )


def _check_ids(config: Fields) -> None:
    """Raises a `ValueError` if a file has other ids than T5's; version 5 may list the one EOS."""
    for name, expected in IDS.items():
        found = config.fields.get(name, expected)
        if found not in (expected, [expected]):
            raise ValueError(
                f"{config.path}: {name} is {found!r}, but models here have {json.dumps(expected)} as all "
                "published T5s do; change it if the model was trained so"
            )


def _is_encoder_only(config: Fields) -> bool:
    """Whether a folder holds a ``T5EncoderModel``."""
    names = config.fields.get("architectures")
    return isinstance(names, list) and [str(name)[-12:] for name in names] == ["EncoderModel"]


def _version(config: Fields) -> int:
    """Returns the major version of transformers that wrote a configuration; 4 if it does not tell."""
    unsaid = "5" if "scale_decoder_outputs" in config.fields else "4"
    major = str(config.fields.get("transformers_version", unsaid)).split(".")[0]
    return int(major) if major.isdecimal() else 4


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
