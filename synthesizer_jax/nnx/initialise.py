"""The variables of a Linen module, as NNX variables with logical axis names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import flax.linen as linen
import jax
from flax import nnx
from flax.core import meta
from flax.core.spmd import get_logical_axis_rules
from jax.interpreters import partial_eval

from synthesizer_jax.parameters import Axes, logical_axes


@dataclasses.dataclass(frozen=True)
class Example:
    """Arguments of a module's `__call__` for its initialisation.

    Attributes:
      args: arrays or `jax.ShapeDtypeStruct`.
      kwargs: the same by name.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def initialise(
    config: linen.Module, example: Example, key: jax.Array
) -> tuple[dict[str, Any], bool]:
    """Makes all variables of a Linen module; computes no outputs.

    Under `nnx.logical_axis_rules` and a mesh the variables are made sharded, unless
    `nnx.use_eager_sharding(False)`, as those of Flax's modules. Without rules logical names mean
    nothing to the mesh, and the variables are as the mesh has them by default.

    Args:
      config: an unbound module.
      example: arguments of its `__call__`.
      key: makes the parameters.

    Returns:
      Nested dictionaries of `nnx.Variable`, by the paths within their collections; whether the module
      has dropout, that is, whether its outputs depend on a random stream ``dropout``.
    """
    axes, has_dropout = trace(config, example)
    # The second stream is for modules that drop while they are initialised; no variable uses it.
    keys = {"params": key, "dropout": jax.random.key(0)}
    values = linen.unbox(config.lazy_init(keys, *example.args, **example.kwargs))
    return as_variables(values, axes, type(config).__name__), has_dropout


def as_variables(values: Any, axes: dict[Any, Axes], name: str) -> dict[str, Any]:
    """Nested dictionaries of `nnx.Variable`, by the paths within their collections.

    Args:
      values: a Linen module's variables.
      axes: from `axes_of`.
      name: the module's class, for the error.

    Raises:
      ValueError: two collections have a variable of the same path.
    """
    eager = bool(nnx.using_eager_sharding() and get_logical_axis_rules() and meta.get_global_mesh())
    found: dict[str, Any] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(values):
        collection, *names = (key.key for key in path)
        kind = nnx.variable_type_from_name(collection, allow_register=True)
        node = found
        for name in names[:-1]:
            node = node.setdefault(name, {})
        if names[-1] in node:
            raise ValueError(
                f"{name} has two variables {'/'.join(names)!r}, in two collections; "
                "rename one of them"
            )
        sharding: dict[str, Any] = {"out_sharding": axes[path]} if path in axes else {}
        node[names[-1]] = kind(value, eager_sharding=eager, **sharding)
    return found


def trace(config: linen.Module, example: Example) -> tuple[dict[Any, Axes], bool]:
    """The axis names of all variables that have some, by path; whether the outputs need dropout's stream.

    Args:
      config: an unbound module.
      example: arguments of its `__call__`.
    """

    def run(params: jax.Array, dropout: jax.Array, args: Any, kwargs: Any) -> Any:
        return config.init_with_output({"params": params, "dropout": dropout}, *args, **kwargs)

    key = jax.random.key(0)
    with naming_axes():
        program, (_, boxed) = jax.make_jaxpr(run, return_shape=True)(
            key, key, example.args, dict(example.kwargs)
        )
    jaxpr = program.jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return axes_of(boxed), used[1]


@contextlib.contextmanager
def naming_axes() -> Iterator[None]:
    """Linen modules that are initialised here box their variables with the names of their axes.

    Logical axis rules are off: with them Linen would constrain kernels before they have their shape.
    """
    with logical_axes(), nnx.logical_axis_rules(()):
        yield


def axes_of(boxed: Any) -> dict[Any, Axes]:
    """The axis names of boxed variables by their paths."""
    is_box = lambda node: isinstance(node, linen.Partitioned)
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {path: tuple(leaf.names) for path, leaf in leaves if is_box(leaf)}
