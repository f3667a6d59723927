"""The base of our NNX modules: a Linen module as configuration, its variables as NNX state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import flax.linen as linen
import jax
from flax import nnx

from synthesizer_jax.models.universal import LOSSES
from synthesizer_jax.nnx.initialise import Example, initialise
from synthesizer_jax.registry import fields_of

Loss = nnx.variable_type_from_name(LOSSES, allow_register=True)
"""The type of what modules add to a training loss, such as `UniversalStack`'s ponder cost.

``logits, losses = nnx.capture(model, Loss)(inputs, targets)`` collects it.
"""


class LinenModule(nnx.Module):
    """An NNX module that computes what a Linen module does.

    Parameters lie where the Linen module has them: ``params/out/kernel`` is ``module.out["kernel"]``,
    an `nnx.Param`; other collections have the variable type of their name. Parameters carry the
    logical axis names of `synthesizer_jax.parameters.LOGICAL_AXES` as ``out_sharding``. The fields of
    the configuration can be read as attributes.

    Attributes:
      config: the unbound Linen module.
      deterministic: dropout is off; set by `train`, `eval`, `set_attributes` and `nnx.view`.
      rngs: the module's own stream for dropout; None where it has no dropout or was given none.
    """

    _linen_class: ClassVar[type[linen.Module]]
    _methods: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        config: linen.Module,
        example: Example,
        *,
        rngs: nnx.Rngs,
        deterministic: bool | None,
        keep_rngs: bool,
    ):
        """Makes the variables.

        Args:
          config: an unbound Linen module.
          example: arguments that the module can be initialised with.
          rngs: random streams; ``params`` makes the parameters, ``dropout`` is for dropout.
          deterministic: dropout is off; None: every call has to say.
          keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
        """
        variables, self.has_dropout = initialise(config, example, rngs.params())
        for name, tree in variables.items():
            if hasattr(type(self), name):
                raise ValueError(
                    f"{type(config).__name__} has a parameter or submodule {name!r}, a name that NNX "
                    "modules use themselves; rename it"
                )
            setattr(self, name, nnx.data(tree))
        self.variable_names = tuple(variables)
        self.deterministic = deterministic
        given = keep_rngs and self.has_dropout and ("dropout" in rngs or "default" in rngs)
        self.rngs = nnx.data(rngs.dropout.fork() if given else None)
        self.config = config

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            config = vars(self).get("config")
            if config is None or name not in fields_of(config):
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            return getattr(config, name)

        def __setattr__(self, name: str, value: Any) -> None:
            config = vars(self).get("config")
            if config is not None and name not in vars(self) and name in fields_of(config):
                raise AttributeError(
                    f"{type(self).__name__}: {name} is fixed at construction; make a new module with "
                    f"{name}={value!r}"
                )
            super().__setattr__(name, value)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Called by `nnx.view`.

        Args:
          deterministic: if True, dropout is off.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _apply(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
    ) -> Any:
        """Runs a method of the Linen module."""
        sown = {LOSSES: Loss} if Loss in map(type, vars(self).get("__captures__", ())) else {}
        if sow_weights:
            sown["intermediates"] = nnx.Intermediate
        result = self.config.apply(
            linen_variables(self),
            *args,
            rngs=self._dropout_keys(deterministic, rngs),
            method=getattr(type(self.config), method),
            mutable=list(sown) or False,
            **kwargs,
        )
        if not sown:
            return result
        result, updates = result
        if sow_weights and not updates.get("intermediates"):
            raise ValueError(
                f"{type(self).__name__}: sow_weights=True, but it computes no attention weights; call "
                "it without"
            )
        for collection, kind in sown.items():
            for path, values in _leaves(updates.get(collection, {}), kind=tuple):
                for value in values:
                    self.sow(kind, "/".join(path), value)
        return result

    def _dropout_keys(
        self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None
    ) -> dict[str, jax.Array]:
        """The random streams for the Linen module: a new key for dropout, or nothing."""
        if not self.has_dropout:
            return {}
        name = type(self).__name__
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            raise ValueError(
                f"{name}: nothing says whether dropout acts; give deterministic=True or False at the "
                "call or at construction, or call train() or eval()"
            )
        if deterministic:
            return {}
        rngs = self.rngs if rngs is None else rngs
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout if "dropout" in rngs or "default" in rngs else None
        if rngs is None:
            raise ValueError(
                f"{name}: dropout needs a random stream; give rngs with a stream 'dropout' or a default "
                "one at construction or at the call, or call with deterministic=True"
            )
        if not isinstance(rngs, nnx.RngStream | jax.Array):
            raise TypeError(
                f"{name}: rngs is a {type(rngs).__name__}; give nnx.Rngs, one stream or a key"
            )
        return {"dropout": rngs() if isinstance(rngs, nnx.RngStream) else rngs}


def linen_variables(module: LinenModule) -> dict[str, Any]:
    """A module's variables as the Linen module's `apply` takes them.

    ``module.config.apply(linen_variables(module), ...)`` is the Linen form of a call.

    Args:
      module: from `to_nnx` or one of the classes of this package.
    """
    found: dict[str, Any] = {}
    for name in module.variable_names:
        for path, variable in _leaves({name: getattr(module, name)}, kind=nnx.Variable):
            node = found.setdefault(_collection(variable), {})
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = variable.get_value()
    return found


def _collection(variable: nnx.Variable) -> str:
    if isinstance(variable, nnx.Param):
        return "params"
    return nnx.variable_name_from_type(type(variable), allow_register=True)


def _leaves(tree: Any, *, kind: type) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of one type in nested dictionaries, with their paths."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: isinstance(node, kind)
    ):
        yield tuple(key.key for key in path), leaf
