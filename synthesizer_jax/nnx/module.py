"""The base class of the NNX modules: a Linen module is the configuration, its variables are the state."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from flax.core.spmd import get_logical_axis_rules
from flax.traverse_util import flatten_dict, unflatten_dict

from synthesizer_jax.attention import Mask
from synthesizer_jax.base.registry import fields_of, is_config
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.models import LOSSES, Block, FeedForward, Memory, TokenModel
from synthesizer_jax.primitives.parameters import NamedAxes, Variables, logical_axes


def _variable_type(
    collection: str,
) -> Callable[[type[nnx.Variable[Any]]], type[nnx.Variable[Any]]]:
    """Makes a class the variable type of a collection, unless the collection has a type already.

    Flax would make a type when it meets the collection's name, but such a type cannot be pickled, because
    no module defines it.
    """

    def register(cls: type[nnx.Variable[Any]]) -> type[nnx.Variable[Any]]:
        try:
            return nnx.register_variable_name(collection, cls)
        except ValueError:  # other code has registered a type for the name
            return nnx.variable_type_from_name(collection)

    return register


@_variable_type("constants")
class Constant(nnx.Variable[Any]):
    """The variable type of what is not trained, as the table of a `Random` with ``trainable=False``."""


@_variable_type(LOSSES)
class Loss(nnx.Variable[Any]):
    """The variable type of terms that modules add to the training loss, as `UniversalStack`'s ponder cost.

    ``logits, losses = nnx.capture(model, Loss)(inputs, targets)`` collects them.
    """


class LinenModule(nnx.Module):
    """An NNX module that computes the function of a Linen module.

    Parameters have the same paths as in the Linen module: ``params/out/kernel`` is
    ``module.out["kernel"]``, an `nnx.Param`. Variables of other collections have the variable type that
    Flax registers for the collection's name. Parameters carry the logical axis names of
    `primitives.parameters.LOGICAL_AXES` as ``out_sharding``; under `nnx.logical_axis_rules` and a mesh
    they are created sharded, as those of Flax's modules are, unless `nnx.use_eager_sharding(False)` is
    set. The fields and methods of the Linen module are attributes of the NNX module.

    Args:
      *args: fields of the Linen class in their order; or one Linen module, which has them.
      rngs: random streams; ``params`` is used for the parameters, and ``dropout`` is forked for dropout.
        The default stream replaces one that is missing.
      in_features: number of input features; None for models, whose inputs are integer tokens.
      example: arguments of the Linen module's call in the place of `in_features`; of arrays or
        `jax.ShapeDtypeStruct` only the shapes matter.
      deterministic: if True, dropout is off; if None, every call must specify it.
      keep_rngs: whether to keep a stream for dropout; otherwise every call with dropout needs one.
      **fields: fields of the Linen class.

    Attributes:
      config: the unbound Linen module.
      deterministic: if True, dropout is off; set by `train`, `eval`, `set_attributes` and `nnx.view`.
      has_dropout: whether the Linen module, or a module in its fields, has a `dropout_rate` above zero.
      rngs: the module's own stream for dropout, or None.
      variable_names: the attributes that hold variables.
    """

    linen_class: ClassVar[type[linen.Module]] = linen.Module

    def __init_subclass__(cls, linen_class: type[linen.Module] | None = None, **options: Any):
        super().__init_subclass__(**options)
        if linen_class is not None:
            cls.linen_class = linen_class
            cls.__doc__ = f"{cls.__doc__}\n\n{inspect.cleandoc(linen_class.__doc__ or '')}"
            cls.__signature__ = joined_signature(linen_class, LinenModule)  # type: ignore[attr-defined]

    def __init__(
        self,
        *args: Any,
        rngs: nnx.Rngs,
        in_features: int | None = None,
        example: tuple[Any, ...] = (),
        deterministic: bool | None = False,
        keep_rngs: bool = True,
        **fields: Any,
    ):
        is_config = len(args) == 1 and not fields and isinstance(args[0], self.linen_class)
        config = args[0] if is_config else self.linen_class(*args, parent=None, **fields)
        example, options = (example, {}) if example else _example_arguments(config, in_features)
        # Logical axis rules would constrain kernels before these have their final shape.
        with logical_axes(), nnx.logical_axis_rules(()):
            variables = config.lazy_init(rngs.params(), *example, **options)
        # Without rules the logical names have no meaning for a mesh.
        eager = bool(nnx.using_eager_sharding() and get_logical_axis_rules() and meta.get_global_mesh())
        flat: dict[tuple[str, ...], nnx.Variable[jax.Array]] = {}
        for (collection, *path), value in flatten_dict(variables).items():
            variable_type = nnx.variable_type_from_name(collection, allow_register=True)
            metadata: dict[str, Any] = {}
            if isinstance(value, NamedAxes):
                value, metadata["out_sharding"] = value.value, tuple(value.names)
            flat[tuple(path)] = variable_type(value, eager_sharding=eager, **metadata)
        nodes = unflatten_dict(flat)
        for name, node in nodes.items():
            setattr(self, name, nnx.data(node))
        self.variable_names = tuple(nodes)
        self.has_dropout = any(getattr(p, "dropout_rate", 0.0) > 0 for p in _parts(config))
        has_stream = "dropout" in rngs or "default" in rngs
        keep_stream = keep_rngs and self.has_dropout and has_stream
        self.rngs = nnx.data(rngs.dropout.fork() if keep_stream else None)
        self.deterministic = deterministic
        self.in_features = in_features
        self.config = config

    def __call__(
        self,
        *args: Any,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
        method: str = "__call__",
        **kwargs: Any,
    ) -> Any:
        """Calls a method of the Linen module; ``module.encode(...)`` calls `encode` in the same way.

        Args:
          *args: arguments of the method.
          deterministic: if True, dropout is off; None uses the module's attribute.
          rngs: random streams, one stream or a PRNG key for dropout; None uses the module's stream.
          sow_weights: whether to sow the attention weights ``attention_weights``
            ``[batch or 1, heads, q, k]`` as `nnx.Intermediate`, for `nnx.capture`.
          method: the method's name.
          **kwargs: keyword arguments of the method.

        Raises:
          ValueError: dropout needs a random stream, `deterministic` is not set, or there are no weights.
        """
        captured_types = map(type, vars(self).get("__captures__", ()))
        sown_types: dict[str, type[nnx.Variable[Any]]] = {}
        if Loss in captured_types:
            sown_types[LOSSES] = Loss
        if sow_weights:
            sown_types["intermediates"] = nnx.Intermediate
        key = draw_dropout_key(self, deterministic, rngs) if self.has_dropout else None
        result = self.config.apply(
            linen_variables(self),
            *args,
            rngs={} if key is None else {"dropout": key},
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
            for path, values in flatten_dict(updates.get(collection, {})).items():
                for value in values:
                    self.sow(variable_type, "/".join(path), value)
        return result

    def __getattr__(self, name: str) -> Any:
        config = vars(self).get("config")
        is_hidden = name.startswith("_") or hasattr(linen.Module, name)
        if config is None or is_hidden or not hasattr(config, name):
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        method = getattr(type(config), name, None)
        if name in fields_of(config) or not callable(method) or hasattr(method, "nowrap"):
            return getattr(config, name)
        return functools.update_wrapper(functools.partial(self.__call__, method=name), method)

    def __setattr__(self, name: str, value: object) -> None:
        config = vars(self).get("config")
        if config is not None and name not in vars(self) and name in fields_of(config):
            raise AttributeError(
                f"{type(self).__name__}: {name} is fixed at construction; build a new module with "
                f"{name}={value!r}"
            )
        super().__setattr__(name, value)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Called by `nnx.view`: sets attributes of a view; None keeps the value."""
        if deterministic is not None:
            self.deterministic = deterministic


def joined_signature(wrapped: type, wrapper: type) -> inspect.Signature:
    """Returns the parameters of a class, without Linen's own, and the keywords that its wrapper adds."""
    # NNX's metaclass hides the signatures of classes.
    parameters, options = (
        inspect.signature(vars(cls)["__init__"]).parameters for cls in (wrapped, wrapper)
    )
    added = {name: p for name, p in options.items() if p.kind is p.KEYWORD_ONLY}
    left_out = {*added, "self", "parent", "name"}
    kept = (p for name, p in parameters.items() if name not in left_out)
    return inspect.Signature(sorted([*kept, *added.values()], key=lambda p: p.kind))


def draw_dropout_key(
    module: Any, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | jax.Array | None
) -> jax.Array | None:
    """Returns the PRNG key of a call's dropout, or None without dropout.

    The arguments override the module's attributes of the same names.
    """
    name = type(module).__name__
    deterministic = module.deterministic if deterministic is None else deterministic
    if deterministic is None:
        raise ValueError(
            f"{name}: deterministic is not set; pass deterministic=True or False to the call or to "
            "the constructor, or call train() or eval()"
        )
    if deterministic:
        return None
    rngs = module.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs.dropout if "dropout" in rngs or "default" in rngs else None
    if rngs is None:
        raise ValueError(
            f"{name}: dropout needs a random stream; pass rngs with a stream 'dropout' or a default "
            "stream to the constructor or to the call, or set deterministic=True"
        )
    return rngs if isinstance(rngs, jax.Array) else rngs()


def linen_variables(module: LinenModule) -> Variables:
    """Returns a module's variables in the form that the Linen module's `apply` takes.

    ``module.config.apply(linen_variables(module), ...)`` is the Linen equivalent of a call.
    """
    nodes = {name: getattr(module, name) for name in module.variable_names}
    flat = {
        (nnx.variable_name_from_type(type(variable)), *path): variable.get_value()
        for path, variable in flatten_dict(nodes).items()
    }
    return unflatten_dict(flat)


def _example_arguments(
    config: linen.Module, in_features: int | None
) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
    """Arguments of a module's `__call__` for its initialization; arrays are `jax.ShapeDtypeStruct`."""
    if isinstance(config, TokenModel):
        return config.example(1, 1), {}
    if in_features is None:
        raise ValueError(f"{type(config).__name__} needs in_features, the number of features of its inputs")
    x = jax.ShapeDtypeStruct((1, 1, in_features), jnp.float32)
    if isinstance(config, FeedForward):
        return (x,), {}
    parts = list(_parts(config))
    causal = any(isinstance(p, Mixer) and not p.supports_bidirectional for p in parts)
    kwargs: dict[str, PyTree] = {"mask": Mask(causal=causal)}
    if any(isinstance(p, Block) and p.cross_mixer is not None for p in parts):
        kwargs["memory"] = Memory(x, Mask())  # type: ignore[arg-type]
    return (x,), kwargs


def _parts(config: object) -> Iterator[object]:
    """Yields a configuration and everything in its fields."""
    yield config
    entries = config if isinstance(config, tuple) else ()
    for value in fields_of(config).values() if is_config(config) else entries:
        yield from _parts(value)
