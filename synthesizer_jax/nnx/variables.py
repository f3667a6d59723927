"""The variables of a Linen module, as NNX variables with logical axis names."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

import flax.linen as linen
import jax
from flax import nnx
from flax.core import meta
from flax.core.spmd import get_logical_axis_rules
from jax.interpreters import partial_eval

from synthesizer_jax.parameters import Axes, logical_axes
from synthesizer_jax.typing import KeyPath, PyTree


@dataclasses.dataclass(frozen=True)
class InitArguments:
    """Arguments of a module's `__call__` with which it is initialized.

    Attributes:
      args: arrays or `jax.ShapeDtypeStruct`.
      kwargs: the same, by name.
    """

    args: tuple[PyTree, ...]
    kwargs: Mapping[str, PyTree] = dataclasses.field(default_factory=dict)


def init_variables(
    config: linen.Module, arguments: InitArguments, key: jax.Array
) -> tuple[dict[str, PyTree], bool]:
    """Initializes all variables of a Linen module without computing its outputs.

    Under `nnx.logical_axis_rules` and a mesh the variables are created sharded, as those of Flax's
    modules are, unless `nnx.use_eager_sharding(False)` is set. Without rules the logical names have no
    meaning for the mesh, and the variables get its default sharding.

    Args:
      config: an unbound module.
      arguments: arguments of its `__call__`.
      key: PRNG key of the parameters.

    Returns:
      A pair ``(variables, has_dropout)``: nested dictionaries of `nnx.Variable`, keyed by the path within
      the collection, and whether the module's outputs depend on the random stream ``dropout``.
    """
    axes, has_dropout = _trace_init(config, arguments)
    # Modules that apply dropout during initialization need the second stream; no variable uses it.
    keys = {"params": key, "dropout": jax.random.key(0)}
    values = linen.unbox(config.lazy_init(keys, *arguments.args, **arguments.kwargs))
    return to_nnx_variables(values, axes, type(config).__name__), has_dropout


def to_nnx_variables(
    values: PyTree, axes: Mapping[KeyPath, Axes], class_name: str
) -> dict[str, PyTree]:
    """Converts Linen variables to nested dictionaries of `nnx.Variable`.

    Args:
      values: a Linen module's variables, by collection.
      axes: from `axes_by_path`.
      class_name: the module's class, for errors.

    Raises:
      ValueError: two collections have a variable at the same path.
    """
    eager = bool(nnx.using_eager_sharding() and get_logical_axis_rules() and meta.get_global_mesh())
    variables: dict[str, PyTree] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(values):
        collection, *names = (entry.key for entry in path)
        variable_type = nnx.variable_type_from_name(collection, allow_register=True)
        node = variables
        for name in names[:-1]:
            node = node.setdefault(name, {})
        if names[-1] in node:
            raise ValueError(
                f"{class_name} has two variables named {'/'.join(names)!r}, in two collections; "
                "rename one of them"
            )
        metadata: dict[str, PyTree] = {"out_sharding": axes[path]} if path in axes else {}
        node[names[-1]] = variable_type(value, eager_sharding=eager, **metadata)
    return variables


def _trace_init(config: linen.Module, arguments: InitArguments) -> tuple[dict[KeyPath, Axes], bool]:
    """The axis names of the variables, and whether the outputs depend on the dropout key."""

    def init_with_output(
        params_key: jax.Array, dropout_key: jax.Array, args: PyTree, kwargs: PyTree
    ) -> PyTree:
        keys = {"params": params_key, "dropout": dropout_key}
        return config.init_with_output(keys, *args, **kwargs)

    key = jax.random.key(0)
    with box_with_axes():
        closed_jaxpr, (_, boxed) = jax.make_jaxpr(init_with_output, return_shape=True)(
            key, key, arguments.args, dict(arguments.kwargs)
        )
    jaxpr = closed_jaxpr.jaxpr
    _, used_inputs = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return axes_by_path(boxed), used_inputs[1]


@contextlib.contextmanager
def box_with_axes() -> Iterator[None]:
    """A context in which Linen modules box the variables they initialize with logical axis names.

    Logical axis rules are switched off: with them, Linen would constrain kernels before these have their
    final shape.
    """
    with logical_axes(), nnx.logical_axis_rules(()):
        yield


def axes_by_path(boxed: PyTree) -> dict[KeyPath, Axes]:
    """The axis names of boxed variables, keyed by path."""
    is_box = lambda node: isinstance(node, linen.Partitioned)
    nodes = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box)
    return {path: tuple(node.names) for path, node in nodes if is_box(node)}
