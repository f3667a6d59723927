"""Models as StableHLO programs, exported by `jax.export` for all batches, lengths and platforms."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import export
from jax.errors import ConcretizationTypeError, InconclusiveDimensionOperation
from safetensors.numpy import save_file

from synthesizer_jax.base.registry import check_types, fields_of, replace
from synthesizer_jax.base.typing import Length, PyTree
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, Vocabulary
from synthesizer_jax.inference import decode, encode_tokens, score_targets
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.models import Encoder, EncoderDecoder, Run, TextToText, unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.version import __version__

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms that one program is lowered for, by the names of `jax.export`."""

LOADER = pathlib.Path(__file__).with_name("load.py")
DESCRIPTION, PARAMETERS, VOCABULARY = "model.json", "parameters.safetensors", "vocabulary.model"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most tokens of the inputs and targets of programs, EOS included, and their number of beams."""

    inputs_length: Length
    targets_length: Length
    beams: Length = 1

    def __post_init__(self) -> None:
        check_types(Limits, fields_of(self))


def write_directory(
    directory: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    vocabulary: Vocabulary,
    *,
    limits: Limits,
    continues: bool = False,
) -> None:
    """Writes a model as StableHLO programs with a loader, ``load.py``, that does not need this package.

    ``NAME.stablehlo`` are programs (`export_programs`), ``parameters.safetensors`` their first argument,
    ``vocabulary.model`` the SentencePiece model, if there is one, with its sentinels, and ``model.json``
    describes all of them, with checksums.

    The directory is empty, and the model has looped layers. With `continues` the programs, and the loader,
    continue texts; see `export_programs`.

    Raises:
      ValueError: the model has fewer positions than the limits, no programs, or parameters that are not
        float32; or the vocabulary is neither bytes nor SentencePiece's.
    """
    parameters = traverse_util.flatten_dict(variables, sep="/")
    for name, x in parameters.items():
        if x.dtype != np.float32:
            raise ValueError(f"{name} is {x.dtype}; only models of float32 parameters are exported")
    of_bytes = isinstance(vocabulary, SentencePiece) and vocabulary.byte_level
    if of_bytes or not isinstance(vocabulary, Bytes | SentencePiece):
        kind = "BPE of bytes" if of_bytes else type(vocabulary).__name__
        remedy = "use bytes or a SentencePiece model, or leave out --to"
        raise ValueError(f"a {kind} cannot be exported; {remedy}")
    if isinstance(vocabulary, SentencePiece):
        (directory / VOCABULARY).write_bytes(vocabulary.contents())
    programs, lengths = export_programs(model, parameters, limits, continues=continues)
    for name, program in programs.items():
        (directory / f"{name}.stablehlo").write_bytes(program.serialize())
    arrays = {name: np.ascontiguousarray(x) for name, x in parameters.items()}
    save_file(arrays, directory / PARAMETERS)
    (directory / PARAMETERS).chmod(0o644)  # safetensors writes it for the owner alone
    description = {
        "model": type(model).__name__,
        "platforms": PLATFORMS,
        "lengths": lengths,
        "limits": fields_of(limits),
        "ids": fields_of(model.ids),
        "continues": continues,
        "around_inputs": ([], []) if continues else vocabulary.around_inputs,
        "vocabulary": "bytes" if isinstance(vocabulary, Bytes) else "sentencepiece",
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())
        },
        "versions": {"synthesizer_jax": __version__, "jax": jax.__version__},
    }
    (directory / DESCRIPTION).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(LOADER, directory / LOADER.name)


def export_programs(
    model: TokenModel,
    parameters: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    limits: Limits,
    *,
    continues: bool = False,
) -> tuple[dict[str, export.Exported], str]:
    """Exports the programs that a model has, for all `PLATFORMS`.

    ========== ================================== =======================================================
    program    arguments after the parameters     results
    ========== ================================== =======================================================
    encode     inputs ``[b, n]``                  states ``[b, n, d_model]``: `encode_tokens`
    score      inputs, targets ``[b, t]``         log-probabilities ``[b]``: `score_targets`
    generate   inputs                             tokens ``[b, targets_length]``, scores ``[b]``: `decode`
    ========== ================================== =======================================================

    An `Encoder` has the first only, a `LanguageModel` all others. b is any batch, and n and t are any
    lengths up to the limits. Attention runs on the reference route, because the others choose blocks and
    kernels by lengths: a layer holds the logits of all pairs of tokens in memory.

    With `continues` the inputs, without EOS, are the beginning of the targets, which a `LanguageModel` that
    was trained on targets alone continues. Inputs and targets then share the model's positions.

    Parameters are those of looped layers by their keys, joined by ``/``; only shapes are read.

    Returns:
      The programs by name, and ``"symbolic"``; or ``"fixed"`` where a part of the model must know lengths
      when it is traced: then inputs and targets are to be padded to the limits.

    Raises:
      ValueError: the model has fewer positions than the limits, or no programs.
    """
    if not isinstance(model, TextToText | Encoder):
        raise ValueError(
            f"a {type(model).__name__} has no programs to export; give an EncoderDecoder, a LanguageModel "
            "or an Encoder"
        )
    on: PyTree = {"model": _on_reference_route(unroll(model))}
    of_targets = on | {"continues": continues}
    how = of_targets | {"max_length": limits.targets_length, "beams": limits.beams}
    table: dict[str, tuple[Any, str, Callable[..., PyTree]]] = {  # with the lengths of arguments
        "encode": (Encoder | EncoderDecoder, "n", lambda v, x: encode_tokens(v, x, **on)),
        "score": (TextToText, "nt", lambda v, x, y: score_targets(v, x, targets=y, **of_targets)),
        "generate": (TextToText, "n", lambda v, x: tuple(decode(v, x, **how))),
    }
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in parameters.items()}
    longest = {"n": limits.inputs_length, "t": limits.targets_length}

    def export_all(*, symbolic: bool) -> dict[str, export.Exported]:
        programs = {}
        for name, (kinds, lengths, function) in table.items():
            if not isinstance(model, kinds):
                continue
            bounds = [f"{n} <= {longest[n]}" for n in lengths] if symbolic else []
            scope = export.SymbolicScope(bounds)
            axes = [f"b,{n if symbolic else longest[n]}" for n in lengths]
            sizes = [export.symbolic_shape(axis, scope=scope) for axis in axes]
            tokens = [jax.ShapeDtypeStruct(size, jnp.int32) for size in sizes]
            program = jax.jit(
                lambda flat, *x, f=function: f(traverse_util.unflatten_dict(flat, sep="/"), *x)
            )
            programs[name] = export.export(program, platforms=PLATFORMS)(shapes, *tokens)
        return programs

    try:
        try:
            return export_all(symbolic=True), "symbolic"
        except (ConcretizationTypeError, InconclusiveDimensionOperation):
            # A module has asked for the number behind a length, which a symbol does not have.
            return export_all(symbolic=False), "fixed"
    except ValueError as error:
        raise ValueError(
            f"programs for inputs of {longest['n']} and targets of {longest['t']} tokens cannot be "
            f"exported, choose fewer with --inputs-length and --max-length: {error}"
        ) from None


def _on_reference_route(config: PyTree) -> PyTree:
    """Returns a model, or a part of one, with all attention on the reference route."""
    if isinstance(config, tuple):
        return tuple(map(_on_reference_route, config))
    if not isinstance(config, nn.Module | Run):
        return config
    fields = {name: _on_reference_route(value) for name, value in fields_of(config).items()}
    if isinstance(config, AttentionBase):
        fields["implementation"] = "reference"
    return replace(config, **fields)
