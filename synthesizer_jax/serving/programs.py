"""Models as StableHLO programs, exported by `jax.export` for all batches, lengths and platforms."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import export
from jax.errors import ConcretizationTypeError, InconclusiveDimensionOperation
from safetensors.numpy import save_file

from synthesizer_jax.data.vocabularies import (
    ByteVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
)
from synthesizer_jax.inference import decode, score_targets
from synthesizer_jax.inference.encoding import encode_tokens
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.models import Encoder, EncoderDecoder, Run, TextToText, unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables
from synthesizer_jax.registry import fields_of, replace
from synthesizer_jax.typing import PyTree
from synthesizer_jax.version import __version__

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms that one program is lowered for, by the names of `jax.export`."""

LOADER = pathlib.Path(__file__).with_name("load.py")
DESCRIPTION, PARAMETERS, VOCABULARY = "model.json", "parameters.safetensors", "vocabulary.model"

Parameters: TypeAlias = Mapping[str, jax.Array]
"""A model's variables by the keys of `Variables`, joined by ``/``; the first argument of a program."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What the programs of a model accept.

    Attributes:
      inputs_length: maximum number of tokens of an input, EOS included.
      targets_length: maximum number of tokens of a target, EOS included.
      beams: number of beams of the decoding loop; 1 is greedy decoding.
    """

    inputs_length: int
    targets_length: int
    beams: int = 1

    def __post_init__(self) -> None:
        for name, value in fields_of(self).items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


class Programs(NamedTuple):
    """The programs of a model.

    Attributes:
      by_name: the programs, see `export_programs`.
      has_symbolic_lengths: whether they accept all lengths up to the limits; otherwise a part of the model
        must know lengths when it is traced, and inputs and targets are padded to the limits.
    """

    by_name: Mapping[str, export.Exported]
    has_symbolic_lengths: bool


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
    parameters = traverse_util.flatten_dict(variables, sep="/")
    for name, x in parameters.items():
        if x.dtype != np.float32:
            raise ValueError(f"{name} is {x.dtype}; only models of float32 parameters are exported")
    if isinstance(vocabulary, SentencePieceVocabulary):
        proto = vocabulary.processor.serialized_model_proto()
        (directory / VOCABULARY).write_bytes(proto)
    elif not isinstance(vocabulary, ByteVocabulary):
        raise ValueError(
            f"a {type(vocabulary).__name__} cannot be exported; use bytes or a SentencePiece model"
        )
    programs = export_programs(model, parameters, limits, platforms=platforms)
    for name, program in programs.by_name.items():
        (directory / f"{name}.stablehlo").write_bytes(program.serialize())
    arrays = {name: np.ascontiguousarray(x) for name, x in parameters.items()}
    save_file(arrays, directory / PARAMETERS)
    (directory / PARAMETERS).chmod(0o644)  # safetensors writes it for the owner alone
    description = {
        "model": type(model).__name__,
        "platforms": list(platforms),
        "lengths": "symbolic" if programs.has_symbolic_lengths else "fixed",
        "limits": fields_of(limits),
        "vocabulary": "bytes" if isinstance(vocabulary, ByteVocabulary) else "sentencepiece",
        "sha256": {
            path.name: hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(directory.iterdir())
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
    platforms: Sequence[str] = PLATFORMS,
) -> Programs:
    """Exports the programs that a model has.

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

    Args:
      model: an unbound model.
      parameters: those of looped layers; only shapes are read.
      limits: the largest lengths.
      platforms: names of `PLATFORMS`.

    Raises:
      ValueError: the model has fewer positions than the limits, or no programs.
    """
    if not isinstance(model, TextToText | Encoder):
        raise ValueError(
            f"a {type(model).__name__} has no programs to export; give an EncoderDecoder, a LanguageModel "
            "or an Encoder"
        )
    functions = _functions(_on_reference_route(unroll(model)), limits)
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in parameters.items()}
    longest = {"n": limits.inputs_length, "t": limits.targets_length}

    def export_all(*, symbolic: bool) -> Programs:
        programs = {}
        for name, (function, lengths) in functions.items():
            bounds = [f"{n} <= {longest[n]}" for n in lengths] if symbolic else []
            scope = export.SymbolicScope(bounds)
            tokens = [
                jax.ShapeDtypeStruct(
                    export.symbolic_shape(f"b,{n if symbolic else longest[n]}", scope=scope),
                    jnp.int32,
                )
                for n in lengths
            ]
            exported = export.export(jax.jit(function), platforms=platforms)(shapes, *tokens)
            programs[name] = exported
        return Programs(programs, symbolic)

    try:
        for function, lengths in functions.values():
            tokens = [jax.ShapeDtypeStruct((1, longest[n]), jnp.int32) for n in lengths]
            jax.eval_shape(function, shapes, *tokens)
    except ValueError as error:
        raise ValueError(
            f"programs for inputs of {longest['n']} and targets of {longest['t']} tokens cannot be "
            f"exported, choose fewer with --inputs-length and --max-length: {error}"
        ) from None
    try:
        return export_all(symbolic=True)
    except (ConcretizationTypeError, InconclusiveDimensionOperation):
        # A module has asked for the number behind a length, which a symbol does not have.
        return export_all(symbolic=False)


def _functions(
    model: TokenModel, limits: Limits
) -> dict[str, tuple[Callable[..., PyTree], tuple[str, ...]]]:
    """Returns the functions to export, see `export_programs`, and the lengths of their arguments."""

    def encode(parameters: Parameters, inputs: jax.Array) -> jax.Array:
        return encode_tokens(_variables(parameters), inputs, model=model)

    def score(parameters: Parameters, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        assert isinstance(model, TextToText)
        return score_targets(_variables(parameters), inputs, targets=targets, model=model)

    def generate(parameters: Parameters, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert isinstance(model, TextToText)
        decoded = decode(
            _variables(parameters),
            inputs,
            model=model,
            max_length=limits.targets_length,
            beams=limits.beams,
        )
        return decoded.tokens, decoded.scores

    functions: dict[str, tuple[Callable[..., PyTree], tuple[str, ...]]] = {}
    if isinstance(model, Encoder | EncoderDecoder):
        functions["encode"] = encode, ("n",)
    if isinstance(model, TextToText):
        functions |= {"score": (score, ("n", "t")), "generate": (generate, ("n",))}
    return functions


def _variables(parameters: Parameters) -> Variables:
    variables: Variables = traverse_util.unflatten_dict(parameters, sep="/")
    return variables


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
