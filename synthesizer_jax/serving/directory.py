"""The directory of an exported model: its programs, parameters, vocabulary, and a loader."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
from collections.abc import Sequence

import jax
import numpy as np
from safetensors.numpy import save_file

from synthesizer_jax.data.vocabularies import (
    EOS,
    PAD,
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from synthesizer_jax.files import share_file
from synthesizer_jax.inference.decoder import START
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables
from synthesizer_jax.registry import JSON, fields_of
from synthesizer_jax.serving.programs import (
    PLATFORMS,
    Limits,
    Parameters,
    Program,
    Programs,
    export_programs,
    flatten_variables,
    format_shape,
)
from synthesizer_jax.typing import PyTree
from synthesizer_jax.version import __version__

LOADER = pathlib.Path(__file__).with_name("load.py")
DESCRIPTION, PARAMETERS, VOCABULARY = "model.json", "parameters.safetensors", "vocabulary.model"

LENGTHS = {
    True: "The programs accept inputs and targets of all lengths up to the limits.",
    False: "A part of the model must know lengths in advance: pad inputs and targets to the limits.",
}
"""What `Programs.has_symbolic_lengths` means for users."""


def write_directory(
    directory: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    vocabulary: Vocabulary,
    *,
    limits: Limits,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes a model as StableHLO programs with a loader, ``load.py``, that does not need this package.

    ``NAME.stablehlo`` are programs (`export_programs`), ``parameters.safetensors`` their first argument,
    ``vocabulary.model`` the SentencePiece model, if there is one, with its sentinels, and ``model.json``
    describes all of them, with checksums.

    Args:
      directory: an empty directory.
      model: an unbound model, with looped layers.
      variables: its variables.
      vocabulary: bytes, or SentencePiece's.
      limits: the largest lengths.
      platforms: the platforms of the programs.

    Raises:
      ValueError: the model has fewer positions than the limits, no programs, or parameters that are not
        float32; or the vocabulary is of another kind.
    """
    parameters = flatten_variables(variables)
    check_exportable(parameters, vocabulary)
    programs = export_programs(model, parameters, limits, platforms=platforms)
    for name, program in programs.by_name.items():
        (directory / f"{name}.stablehlo").write_bytes(program.exported.serialize())
    arrays = {name: np.ascontiguousarray(x) for name, x in parameters.items()}
    save_file(arrays, directory / PARAMETERS)
    share_file(directory / PARAMETERS)
    write_description(directory, model, vocabulary, programs=programs, limits=limits)
    shutil.copyfile(LOADER, directory / LOADER.name)


def check_exportable(parameters: Parameters, vocabulary: Vocabulary) -> None:
    """Raises a `ValueError` if parameters are not float32, or a vocabulary is of another kind."""
    for name, x in parameters.items():
        if x.dtype != np.float32:
            raise ValueError(f"{name} is {x.dtype}; only models of float32 parameters are exported")
    if not isinstance(vocabulary, ByteVocabulary | SentencePieceVocabulary):
        raise ValueError(
            f"a {type(vocabulary).__name__} cannot be exported; use bytes or a SentencePiece model"
        )


def write_description(
    directory: pathlib.Path,
    model: TokenModel,
    vocabulary: Vocabulary,
    *,
    programs: Programs,
    limits: Limits,
) -> None:
    """Writes ``model.json``, and ``vocabulary.model`` for a SentencePiece vocabulary.

    Args:
      directory: an existing directory.
      model: the model.
      vocabulary: see `check_exportable`.
      programs: the model's programs.
      limits: their limits.
    """
    symbolic = programs.has_symbolic_lengths
    parameters, *_ = next(iter(programs.by_name.values())).abstract_arguments
    description = {
        "model": type(model).__name__,
        "programs": {name: _signature(p) for name, p in programs.by_name.items()},
        "parameters": {name: _describe(x) for name, x in sorted(parameters.items())},
        "lengths": "symbolic" if symbolic else "fixed",
        "lengths_mean": LENGTHS[symbolic],
        "limits": fields_of(limits),
        "ids": {"padding": PAD, "end": EOS, "start": START},
        "vocabulary": _write_vocabulary(vocabulary, directory),
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.iterdir())
        },
        "versions": {"synthesizer_jax": __version__, "jax": jax.__version__},
    }
    text = json.dumps(description, indent=1, ensure_ascii=False)
    (directory / DESCRIPTION).write_text(text + "\n", encoding="utf-8")


def _signature(program: Program) -> JSON:
    """Describes a program: its platforms, arguments after the parameters, and results, in order."""
    _, *arguments = program.abstract_arguments
    results = program.abstract_results
    return {
        "platforms": list(program.exported.platforms),
        "calling_convention_version": program.exported.calling_convention_version,
        "arguments": dict(zip(program.arguments, map(_describe, arguments), strict=True)),
        "results": dict(zip(program.results, map(_describe, results), strict=True)),
    }


def _describe(arrays: PyTree) -> JSON:
    """Describes an abstract array, as in ``int32[b,n]``, or a list of them."""
    if isinstance(arrays, list):
        return [_describe(x) for x in arrays]
    return f"{arrays.dtype.name}[{format_shape(arrays.shape)}]"


def _write_vocabulary(vocabulary: Vocabulary, directory: pathlib.Path) -> JSON:
    """Writes a SentencePiece model; describes any vocabulary."""
    size = vocabulary.vocab_size
    if isinstance(vocabulary, SentencePieceVocabulary):
        proto = vocabulary.processor.serialized_model_proto()
        (directory / VOCABULARY).write_bytes(proto)
        return {"type": "sentencepiece", "file": VOCABULARY, "size": size}
    assert isinstance(vocabulary, ByteVocabulary)
    return {"type": "bytes", "size": size, "extra_ids": vocabulary.extra_ids}
