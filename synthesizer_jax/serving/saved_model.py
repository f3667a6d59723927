"""The programs of a model as TensorFlow's SavedModel."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.export import is_symbolic_dim

from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables
from synthesizer_jax.serving.directory import check_exportable, write_description
from synthesizer_jax.serving.programs import (
    PLATFORMS,
    Limits,
    Program,
    export_programs,
    flatten_variables,
    format_shape,
    length_bounds,
)
from synthesizer_jax.typing import PyTree

if TYPE_CHECKING:
    import tensorflow as tf

ASSETS = "assets.extra"
"""TensorFlow's directory for files that a SavedModel brings along, and that TensorFlow does not read."""


def write_saved_model(
    directory: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    vocabulary: Vocabulary,
    *,
    limits: Limits,
    platforms: Sequence[str] = PLATFORMS,
) -> None:
    """Writes a model as a SavedModel, whose functions are the programs of `export_programs`.

    After ``loaded = tf.saved_model.load(directory)`` they are ``loaded.generate(inputs)`` and so on. Those
    without a cache are signatures too, for TensorFlow Serving. ``model.json`` and the vocabulary are in
    `ASSETS`.

    Args:
      directory: an empty directory.
      model: see `directory.write_directory`.
      variables: likewise.
      vocabulary: likewise.
      limits: likewise.
      platforms: likewise.

    Raises:
      ModuleNotFoundError: TensorFlow is not installed.
      ValueError: see `directory.write_directory`.
    """
    import tensorflow as tf

    parameters = flatten_variables(variables)
    check_exportable(parameters, vocabulary)
    programs = export_programs(model, parameters, limits, platforms=platforms)
    module = tf.Module()
    module.parameters = {name: tf.Variable(np.asarray(x)) for name, x in parameters.items()}
    signatures = {}
    for name, program in programs.by_name.items():
        function = _function(program, module.parameters, limits)
        setattr(module, name, function)
        if "cache" not in program.results:
            signatures[name] = function
    tf.saved_model.save(module, str(directory), signatures=signatures)
    assets = directory / ASSETS
    assets.mkdir()
    write_description(assets, model, vocabulary, programs=programs, limits=limits)


def _function(
    program: Program, parameters: Mapping[str, tf.Variable], limits: Limits
) -> tf.types.experimental.PolymorphicFunction:
    """Returns a program as a function of TensorFlow, which returns a dictionary of its results."""
    import tensorflow as tf
    from jax.experimental import jax2tf

    _, *arguments = program.abstract_arguments
    converted = jax2tf.convert(
        program.exported.call,
        polymorphic_shapes=[None, *jax.tree.map(lambda x: format_shape(x.shape), arguments)],
        polymorphic_constraints=length_bounds(
            [x.shape for x in jax.tree.leaves(arguments)], limits
        ),
        native_serialization_platforms=program.exported.platforms,
        with_gradient=False,
    )

    def specification(name: str, arrays: PyTree) -> PyTree:
        if isinstance(arrays, list):
            return [specification(f"{name}_{i}", x) for i, x in enumerate(arrays)]
        shape = [None if is_symbolic_dim(n) else n for n in arrays.shape]
        return tf.TensorSpec(shape, arrays.dtype.name, name)

    def function(*arguments: Any) -> dict[str, Any]:
        results = converted(dict(parameters), *arguments)
        names = program.results
        return dict(zip(names, results if len(names) > 1 else [results], strict=True))

    names = zip(program.arguments, arguments, strict=True)
    return tf.function(
        function, autograph=False, input_signature=[specification(*x) for x in names]
    )
