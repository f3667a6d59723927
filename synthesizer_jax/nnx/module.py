"""The base class of the NNX modules: a Linen module is the configuration, its variables are the state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, TypeVar

import flax.linen as linen
import jax
from flax import nnx

from synthesizer_jax.models.universal import LOSSES
from synthesizer_jax.nnx.variables import InitArguments, init_variables
from synthesizer_jax.registry import fields_of
from synthesizer_jax.typing import PyTree

Node = TypeVar("Node")

Loss = nnx.variable_type_from_name(LOSSES, allow_register=True)
"""The variable type of terms that modules add to the training loss, such as `UniversalStack`'s ponder cost.

``logits, losses = nnx.capture(model, Loss)(inputs, targets)`` collects them.
"""


class LinenModule(nnx.Module):
    """An NNX module that computes the function of a Linen module.

    Parameters have the same paths as in the Linen module: ``params/out/kernel`` is
    ``module.out["kernel"]``, an `nnx.Param`. Variables of other collections have the variable type that
    Flax registers for the collection's name. Parameters carry the logical axis names of
    `synthesizer_jax.parameters.LOGICAL_AXES` as ``out_sharding``. The fields of the configuration can be
    read as attributes of the module.

    Attributes:
      config: the unbound Linen module.
      deterministic: if True, dropout is off; set by `train`, `eval`, `set_attributes` and `nnx.view`.
      has_dropout: whether the outputs depend on a random stream.
      rngs: the module's own stream for dropout, or None.
      variable_names: the attributes that hold variables.
    """

    _linen_class: ClassVar[type[linen.Module]]
    _methods: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        config: linen.Module,
        arguments: InitArguments,
        *,
        rngs: nnx.Rngs,
        deterministic: bool | None,
        keep_rngs: bool,
    ):
        """Initializes the variables.

        Args:
          config: an unbound Linen module.
          arguments: arguments of the Linen module's `__call__` for its initialization.
          rngs: random streams; ``params`` is used for the parameters, ``dropout`` for dropout.
          deterministic: if True, dropout is off; if None, every call must specify it.
          keep_rngs: whether to keep a stream for dropout; otherwise every call with dropout needs one.
        """
        variables, self.has_dropout = init_variables(config, arguments, rngs.params())
        for name, subtree in variables.items():
            if hasattr(type(self), name):
                raise ValueError(
                    f"{type(config).__name__} has a parameter or submodule named {name!r}, which is an "
                    "attribute of every NNX module; rename it"
                )
            setattr(self, name, nnx.data(subtree))
        self.variable_names = tuple(variables)
        self.deterministic = deterministic
        has_stream = "dropout" in rngs or "default" in rngs
        keep_stream = keep_rngs and self.has_dropout and has_stream
        self.rngs = nnx.data(rngs.dropout.fork() if keep_stream else None)
        self.config = config

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            config = vars(self).get("config")
            if config is None or name not in fields_of(config):
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(config, name)

        def __setattr__(self, name: str, value: object) -> None:
            config = vars(self).get("config")
            if config is not None and name not in vars(self) and name in fields_of(config):
                raise AttributeError(
                    f"{type(self).__name__}: {name} is fixed at construction; build a new module with "
                    f"{name}={value!r}"
                )
            super().__setattr__(name, value)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets attributes of a view of the module; called by `nnx.view`.

        Args:
          deterministic: if True, dropout is off; if None, the attribute keeps its value.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _apply(
        self,
        method: str,
        args: tuple[object, ...],
        kwargs: Mapping[str, PyTree],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> PyTree:
        captured_types = map(type, vars(self).get("__captures__", ()))
        sown_types = {LOSSES: Loss} if Loss in captured_types else {}
        if sow_weights:
            sown_types["intermediates"] = nnx.Intermediate
        result = self.config.apply(
            linen_variables(self),
            *args,
            rngs=self._dropout_keys(deterministic, rngs),
            method=getattr(type(self.config), method),
            mutable=list(sown_types) or False,
            **kwargs,
        )
        if not sown_types:
            return result
        result, updates = result
        if sow_weights and not updates.get("intermediates"):
            raise ValueError(
                f"{type(self).__name__}: sow_weights=True, but this module computes no attention "
                "weights; set sow_weights=False"
            )
        for collection, variable_type in sown_types.items():
            for path, values in _nodes_of_type(updates.get(collection, {}), tuple):
                for value in values:
                    self.sow(variable_type, "/".join(path), value)
        return result

    def _dropout_keys(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None
    ) -> dict[str, jax.Array]:
        """The random streams of a call to the Linen module: a new dropout key, or none."""
        if not self.has_dropout:
            return {}
        name = type(self).__name__
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"{name}: deterministic is not set; pass deterministic=True or False to the call or "
                "to the constructor, or call train() or eval()"
            )
        if deterministic:
            return {}
        rngs = self.rngs if rngs is None else rngs
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout if "dropout" in rngs or "default" in rngs else None
        if rngs is None:
            raise ValueError(
                f"{name}: dropout needs a random stream; pass rngs with a stream 'dropout' or a default "
                "stream to the constructor or to the call, or set deterministic=True"
            )
        if not isinstance(rngs, nnx.RngStream | jax.Array):
            raise TypeError(
                f"{name}: rngs is a {type(rngs).__name__}; pass nnx.Rngs, an nnx.RngStream or a PRNG key"
            )
        return {"dropout": rngs() if isinstance(rngs, nnx.RngStream) else rngs}


def linen_variables(module: LinenModule) -> dict[str, PyTree]:
    """Returns a module's variables in the form that the Linen module's `apply` takes.

    ``module.config.apply(linen_variables(module), ...)`` is the Linen equivalent of a call.

    Args:
      module: from `to_nnx`, or an instance of one of this package's classes.
    """
    variables: dict[str, PyTree] = {}
    for name in module.variable_names:
        for path, variable in _nodes_of_type({name: getattr(module, name)}, nnx.Variable):
            node = variables.setdefault(_collection(variable), {})
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = variable.get_value()
    return variables


def _collection(variable: nnx.Variable[jax.Array]) -> str:
    if isinstance(variable, nnx.Param):
        return "params"
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _nodes_of_type(tree: PyTree, node_type: type[Node]) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yields the paths and nodes of nested dictionaries whose leaves all have the given type."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, node_type)
    )
    for path, node in nodes:
        yield tuple(entry.key for entry in path), node
