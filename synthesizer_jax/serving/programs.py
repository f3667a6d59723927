"""The programs of a model, exported by `jax.export` for any batch and length, and several platforms."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jax import export
from jax.errors import ConcretizationTypeError, InconclusiveDimensionOperation

from synthesizer_jax.inference import decode, score_targets
from synthesizer_jax.inference.decoder import Decoder
from synthesizer_jax.inference.encoding import encode_tokens
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.models import DecodingCache, Encoder, EncoderDecoder, Run, TextToText, unroll
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables
from synthesizer_jax.registry import fields_of, replace
from synthesizer_jax.typing import PyTree

PLATFORMS = ("cpu", "cuda", "tpu")
"""The platforms that one program is lowered for, by the names of `jax.export`."""

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


class Program(NamedTuple):
    """An exported program.

    Attributes:
      arguments: the names of the arguments after the parameters.
      results: the names of the results.
      exported: the StableHLO, with the shapes of all arguments and results.
    """

    arguments: tuple[str, ...]
    results: tuple[str, ...]
    exported: export.Exported

    @property
    def abstract_arguments(self) -> Sequence[PyTree]:
        """The abstract arguments, parameters first."""
        arguments, _ = jax.tree.unflatten(self.exported.in_tree, self.exported.in_avals)
        return cast(Sequence[PyTree], arguments)

    @property
    def abstract_results(self) -> Sequence[PyTree]:
        """The abstract results."""
        results = jax.tree.unflatten(self.exported.out_tree, self.exported.out_avals)
        return cast(Sequence[PyTree], results if len(self.results) > 1 else [results])


class Programs(NamedTuple):
    """The programs of a model.

    Attributes:
      by_name: the programs, see `export_programs`.
      has_symbolic_lengths: whether they accept all lengths up to the limits; otherwise a part of the model
        must know lengths when it is traced, and inputs and targets are padded to the limits.
    """

    by_name: Mapping[str, Program]
    has_symbolic_lengths: bool


def flatten_variables(variables: Variables) -> dict[str, jax.Array]:
    """Returns variables as programs take them, see `Parameters`."""
    flat: dict[str, jax.Array] = traverse_util.flatten_dict(variables, sep="/")
    return flat


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
    start      inputs                             logits ``[b, vocab]`` of the first token, and the cache
    decode_step tokens ``[b]``, the cache         logits of the next token, and the new cache
    generate   inputs                             tokens ``[b, targets_length]``, scores ``[b]``: `decode`
    ========== ================================== =======================================================

    An `Encoder` has the first only, a `LanguageModel` all others. b is any batch, and n and t are any
    lengths up to the limits. Attention runs on the reference route, because the others choose blocks and
    kernels by lengths: a layer holds the logits of all pairs of tokens in memory.

    Args:
      model: an unbound model.
      parameters: from `flatten_variables` of the variables with looped layers; only shapes are read.
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
    functions = _Functions(_on_reference_route(unroll(model)), limits)
    shapes = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in parameters.items()}
    functions.check_limits(shapes)
    try:
        return Programs(_export(functions, shapes, platforms, symbolic=True), True)
    except (ConcretizationTypeError, InconclusiveDimensionOperation):
        # A module has asked for the number behind a length, which a symbol does not have.
        return Programs(_export(functions, shapes, platforms, symbolic=False), False)


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


@dataclasses.dataclass(frozen=True)
class _Functions:
    """The functions that are exported; see the table in `export_programs`."""

    model: TokenModel
    limits: Limits

    def encode(self, parameters: Parameters, inputs: jax.Array) -> jax.Array:
        return encode_tokens(_variables(parameters), inputs, model=self.model)

    def score(self, parameters: Parameters, inputs: jax.Array, targets: jax.Array) -> jax.Array:
        variables = _variables(parameters)
        return score_targets(variables, inputs, targets=targets, model=self._decoding_model)

    def generate(self, parameters: Parameters, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        decoded = decode(
            _variables(parameters),
            inputs,
            model=self._decoding_model,
            max_length=self.limits.targets_length,
            beams=self.limits.beams,
        )
        return decoded.tokens, decoded.scores

    def start(self, parameters: Parameters, inputs: jax.Array) -> tuple[jax.Array, DecodingCache]:
        return self._decoder(parameters, inputs).start()

    def decode_step(
        self, parameters: Parameters, tokens: jax.Array, cache: DecodingCache
    ) -> tuple[jax.Array, DecodingCache]:
        return self._decoder(parameters, tokens[:, None]).next(tokens, cache)

    def check_limits(self, shapes: PyTree) -> None:
        """Raises a `ValueError` if the model has fewer positions than the limits."""
        inputs, targets = (
            _tokens(1, n) for n in (self.limits.inputs_length, self.limits.targets_length)
        )
        try:
            if isinstance(self.model, TextToText):
                jax.eval_shape(self.score, shapes, inputs, targets)
                jax.eval_shape(self.start, shapes, inputs)
            else:
                jax.eval_shape(self.encode, shapes, inputs)
        except ValueError as error:
            raise ValueError(
                f"programs for inputs of {inputs.shape[1]} and targets of {targets.shape[1]} tokens cannot "
                f"be exported, choose fewer with --inputs-length and --max-length: {error}"
            ) from None

    @property
    def _decoding_model(self) -> TextToText:
        assert isinstance(self.model, TextToText)
        return self.model

    def _decoder(self, parameters: Parameters, inputs: jax.Array) -> Decoder:
        max_length = self.limits.targets_length
        return Decoder(self._decoding_model, _variables(parameters), inputs, max_length=max_length)


def _variables(parameters: Parameters) -> Variables:
    """Inverts `flatten_variables`."""
    variables: Variables = traverse_util.unflatten_dict(parameters, sep="/")
    return variables


def _tokens(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns abstract tokens."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _export(
    functions: _Functions, shapes: PyTree, platforms: Sequence[str], *, symbolic: bool
) -> dict[str, Program]:
    """Exports all programs, with symbolic lengths or those of the limits; the batch is symbolic."""
    limits, programs = functions.limits, {}

    def add(name: str, function: Callable[..., PyTree], results: str, **arguments: PyTree) -> None:
        traced = export.export(jax.jit(function), platforms=platforms)
        exported = traced(shapes, *arguments.values())
        programs[name] = Program(tuple(arguments), tuple(results.split()), exported)

    b, n, t = ("b", "n", "t") if symbolic else ("b", limits.inputs_length, limits.targets_length)
    (inputs,) = _abstract([_Spec((b, n))], limits)
    if isinstance(functions.model, Encoder | EncoderDecoder):
        add("encode", functions.encode, "states", inputs=inputs)
    if not isinstance(functions.model, TextToText):
        return programs
    score_inputs, targets = _abstract([_Spec((b, n)), _Spec((b, t))], limits)
    add("score", functions.score, "scores", inputs=score_inputs, targets=targets)
    # Programs take and return the cache's arrays; what else a cache holds is known here.
    _, cache = jax.eval_shape(functions.start, shapes, inputs)
    arrays, structure = jax.tree.flatten(cache)

    def start(parameters: Parameters, inputs: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        logits, cache = functions.start(parameters, inputs)
        return logits, jax.tree.leaves(cache)

    def decode_step(
        parameters: Parameters, tokens: jax.Array, cache: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        logits, new = functions.decode_step(
            parameters, tokens, jax.tree.unflatten(structure, cache)
        )
        return logits, jax.tree.leaves(new)

    add("start", start, "logits cache", inputs=inputs)
    tokens, *arrays = _abstract([_Spec((b,)), *(_Spec(x.shape, x.dtype) for x in arrays)], limits)
    add("decode_step", decode_step, "logits cache", tokens=tokens, cache=arrays)
    add("generate", functions.generate, "tokens scores", inputs=inputs)
    return programs


class _Spec(NamedTuple):
    """Shape, of symbols and numbers, and dtype of an argument."""

    shape: Sequence[object]
    dtype: jax.typing.DTypeLike = jnp.int32


def _abstract(specs: Sequence[_Spec], limits: Limits) -> list[jax.ShapeDtypeStruct]:
    """Returns abstract arguments of one program, with symbols of their own."""
    scope = export.SymbolicScope(length_bounds([spec.shape for spec in specs], limits))
    shapes = [export.symbolic_shape(format_shape(spec.shape), scope=scope) for spec in specs]
    return [
        jax.ShapeDtypeStruct(shape, spec.dtype) for shape, spec in zip(shapes, specs, strict=True)
    ]


def length_bounds(shapes: Iterable[Sequence[object]], limits: Limits) -> list[str]:
    """Returns the limits of the lengths in the shapes of a program's arguments, as `jax.export` takes them.

    It accepts constraints on symbols in these shapes only, and not every cache has the length of the
    inputs: a window, for instance, has one size for all.
    """
    symbols = {symbol for shape in shapes for symbol in re.findall("[a-z]+", format_shape(shape))}
    most = {"n": limits.inputs_length, "t": limits.targets_length}
    return [f"{symbol} <= {most[symbol]}" for symbol in sorted(symbols & most.keys())]


def format_shape(shape: Sequence[object]) -> str:
    """Returns a shape as ``b,n,64``."""
    return ",".join(map(str, shape))
