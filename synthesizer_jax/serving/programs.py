"""Exports models as StableHLO programs for all batch sizes, lengths and platforms."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax import export
from jax.errors import ConcretizationTypeError, InconclusiveDimensionOperation
from safetensors.numpy import save_file

from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import check_types, fields_of, replace
from synthesizer_jax.base.typing import Length, PyTree
from synthesizer_jax.data.tokenizer_backend import TOKENIZER
from synthesizer_jax.data.vocabularies import Bytes, FileVocabulary, SentencePiece, Vocabulary
from synthesizer_jax.inference import decode, encode_tokens, score_targets
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.models import Encoder, EncoderDecoder, Run, TextToText, unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.version import __version__

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms on which each program can run, by their names in `jax.export`."""

LOADER = pathlib.Path(__file__).with_name("load.py")
DESCRIPTION = "model.json"
PARAMETERS = "parameters.safetensors"
VOCABULARY = "vocabulary.model"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of exported programs.

    Attributes:
      inputs_length: the largest number of tokens of an input, including EOS.
      targets_length: the largest number of tokens of a target, including EOS.
      beams: the number of beams with which programs generate. 1 means greedy decoding.
    """

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
    phase: Phase = silent_phase,
) -> None:
    """Writes a model as StableHLO programs, with a loader that does not need this package.

    The function writes these files to the directory:

    - ``NAME.stablehlo``: one file for each program; see `export_programs` for the names.
    - ``parameters.safetensors``: the parameters, which are the first argument of each program.
    - ``vocabulary.model``: the SentencePiece model with its sentinels, if the vocabulary has a
      SentencePiece model.
    - ``tokenizer.json``: the tokenizer, if the vocabulary needs the library ``tokenizers``.
    - ``model.json``: a description of the other files, with checksums.
    - ``load.py``: the loader, which runs the programs.

    Args:
      directory: an empty directory.
      model: the model, with looped layers.
      variables: the variables of the model.
      vocabulary: the vocabulary of the model.
      limits: the largest lengths of inputs and targets, and the number of beams.
      continues: whether the programs continue texts; see `export_programs`.
      phase: a function that reports progress.

    Raises:
      ValueError: the model has fewer positions than `limits` demands, cannot be exported, or has
        parameters that are not float32. The error is also raised if the type of the vocabulary is
        not supported.
    """
    parameters = traverse_util.flatten_dict(variables, sep="/")
    for name, x in parameters.items():
        if x.dtype != np.float32:
            raise ValueError(
                f"The parameter {name} is {x.dtype}, but only models whose parameters are float32 "
                "can be exported."
            )
    if not isinstance(vocabulary, Bytes | FileVocabulary):
        raise ValueError(
            f"A vocabulary of the kind {type(vocabulary).__name__} cannot be exported. Use bytes "
            "or the file of a tokenizer, or leave out --to."
        )
    kind: str = "bytes"
    special: list[int] = []
    if vocabulary.backend is not None:
        kind = "tokenizers"
        special = sorted(vocabulary.backend.special)
        (directory / TOKENIZER).write_text(vocabulary.backend.to_json(), encoding="utf-8")
    elif isinstance(vocabulary, SentencePiece):
        kind = "sentencepiece"
        (directory / VOCABULARY).write_bytes(vocabulary.contents())
    programs, lengths = export_programs(model, parameters, limits, continues=continues, phase=phase)
    advance = phase(f"writing {PARAMETERS}", 1)
    for name, program in programs.items():
        (directory / f"{name}.stablehlo").write_bytes(program.serialize())
    arrays = {name: np.ascontiguousarray(x) for name, x in parameters.items()}
    save_file(arrays, directory / PARAMETERS)
    # The safetensors library makes the file readable only for its owner.
    (directory / PARAMETERS).chmod(0o644)
    advance(1)

    description = {
        "model": type(model).__name__,
        "platforms": PLATFORMS,
        "lengths": lengths,
        "limits": fields_of(limits),
        "ids": fields_of(model.ids),
        "continues": continues,
        # If the model continues its inputs, neither BOS nor EOS is added to them.
        "around_inputs": ([], []) if continues else vocabulary.around_inputs,
        "vocabulary": kind,
        "special": special,
        "splits_special": vocabulary.backend is not None and vocabulary.backend.splits_special,
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
    continues: bool = False,
    phase: Phase = silent_phase,
) -> tuple[dict[str, export.Exported], str]:
    """Exports the programs of a model for all `PLATFORMS`.

    The first argument of every program is the parameters. The programs are:

    - ``encode`` takes inputs ``[b, n]`` and returns states ``[b, n, d_model]``; see
      `encode_tokens`.
    - ``score`` takes inputs and targets ``[b, t]`` and returns log-probabilities ``[b]``; see
      `score_targets`.
    - ``generate`` takes inputs and returns tokens ``[b, targets_length]`` and scores ``[b]``; see
      `decode`.

    An `EncoderDecoder` has all three programs, an `Encoder` has only ``encode``, and a
    `LanguageModel` has ``score`` and ``generate``. The programs take any batch size b, and any
    lengths n and t up to the limits. Attention runs on the reference route, because the other
    routes choose their tiles and kernels by the lengths, which are not known when the program is
    exported. Every attention layer therefore holds the logits of all pairs of tokens in memory.

    Args:
      model: the model.
      parameters: the parameters of the model with looped layers, by their keys joined by ``/``. The
        function reads only the shapes and dtypes.
      limits: the largest lengths of inputs and targets, and the number of beams.
      continues: whether inputs are texts to continue, for a `LanguageModel` that was trained only
        on targets. If `continues` is True, the inputs have no EOS and are the beginning of the
        targets, and inputs and targets share the positions of the model.
      phase: a function that reports progress.

    Returns:
      The programs by name, and the string ``"symbolic"`` or ``"fixed"``. ``"symbolic"`` means that
      the programs take any lengths up to the limits. ``"fixed"`` means that some module of the
      model must know all lengths when it is traced, so inputs and targets must be padded to the
      limits.

    Raises:
      ValueError: the model has fewer positions than `limits` demands, or cannot be exported.
    """
    if not isinstance(model, TextToText | Encoder):
        raise ValueError(
            f"A {type(model).__name__} has no programs to export. Use an EncoderDecoder, a "
            "LanguageModel or an Encoder."
        )
    reference = _on_reference_route(unroll(model))
    longest = {"n": limits.inputs_length, "t": limits.targets_length}

    def encode(variables: Variables, inputs: jax.Array) -> PyTree:
        """Returns the states of the inputs."""
        return encode_tokens(variables, inputs, model=reference)

    def score(variables: Variables, inputs: jax.Array, targets: jax.Array) -> PyTree:
        """Returns the log-probabilities of the targets."""
        return score_targets(
            variables, inputs, targets=targets, model=reference, continues=continues
        )

    def generate(variables: Variables, inputs: jax.Array) -> PyTree:
        """Returns the generated tokens and their scores."""
        return tuple(
            decode(
                variables,
                inputs,
                model=reference,
                continues=continues,
                max_length=limits.targets_length,
                beams=limits.beams,
            )
        )

    programs: dict[str, _Program] = {}
    if isinstance(model, Encoder | EncoderDecoder):
        programs["encode"] = _Program(encode, "n")
    if isinstance(model, TextToText):
        programs["score"] = _Program(score, "nt")
        programs["generate"] = _Program(generate, "n")

    def export_all(*, symbolic: bool) -> dict[str, export.Exported]:
        """Returns all programs of the model, with symbolic lengths or with the largest lengths."""
        lengths = "all lengths" if symbolic else "the largest lengths"
        advance = phase(f"exporting {', '.join(programs)} for {lengths}", len(programs))
        exported = {}
        for name, program in programs.items():
            exported[name] = _export(program, parameters, longest, symbolic=symbolic)
            advance(1)
        return exported

    try:
        try:
            return export_all(symbolic=True), "symbolic"
        except (ConcretizationTypeError, InconclusiveDimensionOperation):
            # Some module of the model needs a length as a concrete number, so the program cannot be
            # exported with symbolic lengths.
            return export_all(symbolic=False), "fixed"
    except ValueError as error:
        raise ValueError(
            f"Programs for inputs of {longest['n']} tokens and targets of {longest['t']} tokens "
            "cannot be exported. Choose smaller numbers with --inputs-length and --max-length. The "
            f"reason is: {error}"
        ) from None


class _Program(NamedTuple):
    """A function to export as a program, and the lengths of the function's arguments.

    Attributes:
      function: a function that takes the variables and arrays of tokens.
      lengths: a string with a letter for each array of tokens. The letter n stands for the length
        of inputs, and t for the length of targets.
    """

    function: Callable[..., PyTree]
    lengths: str


def _export(
    program: _Program,
    parameters: Mapping[str, jax.Array | jax.ShapeDtypeStruct],
    longest: Mapping[str, int],
    *,
    symbolic: bool,
) -> export.Exported:
    """Exports a program that takes any batch size.

    Args:
      program: the program.
      parameters: see `export_programs`.
      longest: the largest length for each letter in `_Program.lengths`.
      symbolic: whether the program takes all lengths up to the largest lengths. False means that
        the program takes only the largest lengths.
    """
    bounds = []
    # Each string names the axes of an array of tokens, such as "b,n" or "b,512".
    axes = []
    for letter in program.lengths:
        if symbolic:
            bounds.append(f"{letter} <= {longest[letter]}")
            axes.append(f"b,{letter}")
        else:
            axes.append(f"b,{longest[letter]}")
    scope = export.SymbolicScope(bounds)
    tokens = [
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), jnp.int32) for shape in axes
    ]
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in parameters.items()}

    @jax.jit
    def of_flat_parameters(flat: PyTree, *arrays: jax.Array) -> PyTree:
        """Runs the program, given parameters whose keys are joined by slashes."""
        return program.function(traverse_util.unflatten_dict(flat, sep="/"), *arrays)

    return export.export(of_flat_parameters, platforms=PLATFORMS)(shapes, *tokens)


def _on_reference_route(config: PyTree) -> PyTree:
    """Returns a copy of a model or of a module in which all attention uses the reference route."""
    if isinstance(config, tuple):
        return tuple(map(_on_reference_route, config))
    if not isinstance(config, nn.Module | Run):
        return config
    fields = {name: _on_reference_route(value) for name, value in fields_of(config).items()}
    if isinstance(config, AttentionBase):
        fields["implementation"] = "reference"
    return replace(config, **fields)
