"""Writes models of this package as folders of transformers."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.data.tokenizer_backend import TOKENIZER, TOKENIZER_CONFIG
from synthesizer_jax.data.tokenizer_json import Tokenizer
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, Vocabulary
from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.architecture import Architecture, with_output_of_t5
from synthesizer_jax.pretrained.huggingface import t5gemma, t5gemma2
from synthesizer_jax.pretrained.huggingface.config import (
    CONFIG,
    GENERATION_CONFIG,
    write_config,
    write_ids,
)
from synthesizer_jax.pretrained.huggingface.names import torch_name
from synthesizer_jax.pretrained.huggingface.tokenizer import (
    GEMMA,
    SENTENCEPIECE,
)
from synthesizer_jax.pretrained.huggingface.weights import SAFETENSORS
from synthesizer_jax.pretrained.tensors import NameOf, correspondences, named_tensors
from synthesizer_jax.primitives.parameters import Variables

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
"""Maps the names of dtypes to the dtypes in which tensors can be written."""


class Kind(NamedTuple):
    """Describes how transformers stores a model.

    Attributes:
      family: the name of the family of models to which the model belongs.
      config: a function that takes the name of the tensors' dtype, and returns the fields of
        ``config.json``.
      name_of: a function that returns the name and layout that a parameter has in transformers.
    """

    family: str
    config: Callable[[str], dict[str, Any]]
    name_of: NameOf


def kind_of(model: TokenModel) -> Kind:
    """Returns how transformers stores a model. The model must have looped layers.

    Raises:
      ValueError: if transformers does not support the model. The message names the part of the
        model that is not supported.
    """
    is_whole = isinstance(model, EncoderDecoder)
    if t5gemma2.is_t5gemma2(model):
        name_of = t5gemma2.torch_name if is_whole else t5gemma2.torch_name_in_encoder
        return Kind("T5Gemma 2", t5gemma2.T5Gemma2.of(model).write, name_of)
    if t5gemma.has_output_norm(model):
        name_of = t5gemma.torch_name if is_whole else t5gemma.torch_name_in_encoder
        return Kind("T5Gemma", t5gemma.T5Gemma.of(model).write, name_of)
    return Kind("T5", functools.partial(write_config, Architecture.of(model)), torch_name)


def write_folder(
    folder: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    vocabulary: Vocabulary | None,
    *,
    dtype: str = "float32",
    phase: Phase = silent_phase,
) -> None:
    """Writes a model to an empty directory as a folder of transformers.

    Versions 4 and 5 of transformers build the same model from the folder. T5Gemma 2 needs version
    5, which adds a small vision tower with random parameters, because the folder has none.

    Args:
      folder: the empty directory.
      model: the model, with looped layers.
      variables: the variables of the model.
      vocabulary: the vocabulary, which is written as a tokenizer. If the vocabulary is `None`, no
        tokenizer is written.
      dtype: the name of the tensors' dtype, which is a key of `DTYPES`.
      phase: a function that reports progress.

    Raises:
      OSError: if the tensors cannot be written.
      ValueError: if transformers does not support the model, or if the dtype is unknown. The
        message names the unsupported part of the model.
    """
    if dtype not in DTYPES:
        raise ValueError(f"The dtype is {dtype!r}, but it must be {' or '.join(DTYPES)}.")
    params = variables["params"]
    if not t5gemma.has_output_norm(model):
        model, params = with_output_of_t5(model, params)
    kind = kind_of(model)

    _write_json(folder / CONFIG, kind.config(dtype))
    _write_json(folder / GENERATION_CONFIG, write_ids(model.ids))
    tensors = named_tensors(params, correspondences(model, kind.name_of), phase=phase)
    arrays = {name: np.ascontiguousarray(x.astype(DTYPES[dtype])) for name, x in tensors}
    path = folder / SAFETENSORS
    advance = phase(f"writing {path.name}", 1)
    try:
        save_file(arrays, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error}). Nothing was exported.") from None
    # The library safetensors creates files that only their owner can read, so change the
    # permissions.
    path.chmod(0o644)
    advance(1)

    if vocabulary is not None:
        _write_tokenizer(folder, vocabulary, model.ids)


def _write_tokenizer(folder: pathlib.Path, vocabulary: Vocabulary, ids: SpecialIds) -> None:
    """Writes files from which `AutoTokenizer` makes a tokenizer with the ids of the vocabulary.

    The files of a `Tokenizer` are copied unchanged.

    Sentinels are written as pieces of the SentencePiece file, as in mT5's file. If they were
    written as added tokens, transformers would not recognize sentinels at the same places as
    SentencePiece. SentencePiece recognizes a sentinel at the beginning of a word, and needs no
    space after it.
    """
    if isinstance(vocabulary, Tokenizer):
        for name, content in vocabulary.files().items():
            (folder / name).write_bytes(content)
        return

    fields: dict[str, object] = {
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "split_special_tokens": True,  # read "</s>" in a text as four characters
        "legacy": True,
    }

    if isinstance(vocabulary, Bytes):
        fields["tokenizer_class"] = "ByT5Tokenizer"
        fields["extra_ids"] = vocabulary.extra_ids
        fields["additional_special_tokens"] = [
            f"<extra_id_{i}>" for i in range(vocabulary.extra_ids)
        ]
    elif isinstance(vocabulary, SentencePiece) and vocabulary.backend:
        fields["tokenizer_class"] = "RobertaTokenizer"
        fields["bos_token"] = "<s>"
        fields["cls_token"] = "<s>"
        fields["sep_token"] = "</s>"
        fields["mask_token"] = "<mask>"
        del fields["split_special_tokens"]  # the option would split sentinels
        (folder / TOKENIZER).write_text(vocabulary.backend.to_json(), encoding="utf-8")
    elif isinstance(vocabulary, SentencePiece):
        processor = vocabulary.processor
        special = {"pad_token": ids.padding, "eos_token": ids.end, "unk_token": processor.unk_id()}
        fields["extra_ids"] = 0
        if vocabulary.bos:
            file = GEMMA
            fields["tokenizer_class"] = "GemmaTokenizer"
            fields["add_bos_token"] = True
            fields["add_eos_token"] = False
            special["bos_token"] = processor.bos_id()
        else:
            file = SENTENCEPIECE[0]
            fields["tokenizer_class"] = "T5Tokenizer"
        for name, i in special.items():
            fields[name] = processor.id_to_piece(i)
        (folder / file).write_bytes(processor.serialized_model_proto())
    else:
        raise ValueError(
            f"A {type(vocabulary).__name__} cannot be written as a tokenizer of transformers. Use "
            "Bytes, SentencePiece or Tokenizer."
        )

    _write_json(folder / TOKENIZER_CONFIG, fields)


def _write_json(path: pathlib.Path, fields: Mapping[str, object]) -> None:
    """Writes a JSON object to a file."""
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
