"""The base class of the NNX modules of this package.

An NNX module of this package holds a Linen module as its configuration, and the variables of the
Linen module as its state. Calling the NNX module applies the Linen module to the variables.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
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
    """Registers a class as the variable type of a collection that has no type yet.

    Without a registered type, Flax would create a type when it first encounters the name of the
    collection. A type that Flax creates cannot be pickled, because no module defines it.

    Args:
      collection: the name of a Linen collection.

    Returns:
      A decorator for the class.
    """

    def register(cls: type[nnx.Variable[Any]]) -> type[nnx.Variable[Any]]:
        """Returns this class, or the type that other code has registered for the collection."""
        try:
            return nnx.register_variable_name(collection, cls)
        except ValueError:  # other code has registered a type for the name
            return nnx.variable_type_from_name(collection)

    return register


@_variable_type("constants")
class Constant(nnx.Variable[Any]):
    """The variable type of arrays that are not trained.

    For example, the table of a `Random` alignment with ``trainable=False`` is a `Constant`.
    """


@_variable_type(LOSSES)
class Loss(nnx.Variable[Any]):
    """The variable type of losses that modules add to the training loss.

    For example, the ponder cost of a `UniversalStack` is a `Loss`. Collect the losses of a model
    with ``logits, losses = nnx.capture(model, Loss)(inputs, targets)``.
    """


class LinenModule(nnx.Module):
    """An NNX module that wraps a Linen module.

    Parameters have the same paths as in the Linen module. For example, the parameter
    ``params/out/kernel`` is the `nnx.Param` ``module.out["kernel"]``. Variables of other
    collections have the variable type that Flax has registered for the name of the collection. The
    fields and methods of the Linen module are attributes of the NNX module.

    The metadata ``out_sharding`` of a parameter contains the names of its logical axes from
    `primitives.parameters.LOGICAL_AXES`. If `nnx.logical_axis_rules` and a mesh are set, parameters
    are created sharded, as in Flax's modules. Use `nnx.use_eager_sharding(False)` to create
    unsharded parameters.

    Args:
      *args: the fields of the Linen class in their order, or a single Linen module whose fields are
        used.
      rngs: the random streams. The stream ``params`` initializes the parameters, and the stream
        ``dropout`` is forked for dropout. If a stream is missing, the default stream is used.
      in_features: the number of input features. Models do not need `in_features`, because their
        inputs are integer tokens.
      example: arguments for a call of the Linen module, which can be given instead of
        `in_features`. Only the shapes and dtypes matter, so arrays may be replaced by
        `jax.ShapeDtypeStruct`.
      deterministic: whether dropout is off. If `deterministic` is None, every call must pass it.
      keep_rngs: whether the module keeps a random stream for dropout. If `keep_rngs` is False,
        every call with dropout must pass `rngs`.
      **fields: fields of the Linen class.

    Attributes:
      config: the unbound Linen module.
      deterministic: whether dropout is off. `train`, `eval`, `set_attributes` and `nnx.view` set
        this attribute.
      has_dropout: whether the Linen module, or a module in its fields, has a `dropout_rate` above
        zero.
      in_features: the argument `in_features`.
      rngs: the random stream that the module keeps for dropout, or None.
      variable_names: the names of the attributes that hold variables.
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
        options: dict[str, PyTree] = {}
        if not example:
            example, options = _example_arguments(config, in_features)

        # With logical axis rules, Flax would constrain the sharding of kernels before the kernels
        # have their final shape. The rules are therefore disabled while the parameters are
        # initialized.
        with logical_axes(), nnx.logical_axis_rules(()):
            variables = config.lazy_init(rngs.params(), *example, **options)

        # Parameters can be created sharded only if there are rules from logical axes to mesh axes.
        eager = bool(
            nnx.using_eager_sharding() and get_logical_axis_rules() and meta.get_global_mesh()
        )
        flat: dict[tuple[str, ...], nnx.Variable[jax.Array]] = {}
        for (collection, *path), value in flatten_dict(variables).items():
            variable_type = nnx.variable_type_from_name(collection, allow_register=True)
            metadata: dict[str, Any] = {}
            if isinstance(value, NamedAxes):
                metadata["out_sharding"] = tuple(value.names)
                value = value.value

            # The type of the variable identifies the collection, so the path does not contain the
            # collection.
            flat[tuple(path)] = variable_type(value, eager_sharding=eager, **metadata)
        nodes = unflatten_dict(flat)
        for name, node in nodes.items():
            setattr(self, name, nnx.data(node))
        self.variable_names = tuple(nodes)

        self.has_dropout = any(getattr(part, "dropout_rate", 0.0) > 0 for part in _parts(config))
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
        """Calls the Linen module, or a method of the Linen module.

        ``module.encode(...)`` is short for ``module(..., method="encode")``.

        Args:
          *args: the arguments of the method.
          deterministic: whether dropout is off. None means that the module's attribute
            `deterministic` decides.
          rngs: random streams, a single stream, or a PRNG key for dropout. None means the stream
            that the module keeps.
          sow_weights: whether to sow the attention weights, ``[batch or 1, heads, q, k]``, as
            ``attention_weights``. Sown weights have the variable type `nnx.Intermediate`, and
            `nnx.capture` collects them.
          method: the name of the method of the Linen module.
          **kwargs: the keyword arguments of the method.

        Returns:
          The result of the method.

        Raises:
          ValueError: if dropout has no random stream, if `deterministic` is not set, or if
            `sow_weights` is True but the module computes no attention weights.
        """
        # Losses are computed only inside of `nnx.capture(..., Loss)`, because no other code reads
        # them.
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
                f"{type(self).__name__}: sow_weights is True, but this module computes no "
                "attention weights. Set sow_weights=False."
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

        # A method that uses variables is called through `__call__`, which applies it to the
        # variables. Fields, and methods without variables (`nn.nowrap`), are returned from the
        # Linen module unchanged.
        if name in fields_of(config) or not callable(method) or hasattr(method, "nowrap"):
            return getattr(config, name)
        return functools.update_wrapper(functools.partial(self.__call__, method=name), method)

    def __setattr__(self, name: str, value: object) -> None:
        config = vars(self).get("config")
        if config is not None and name not in vars(self) and name in fields_of(config):
            raise AttributeError(
                f"{type(self).__name__}: {name} cannot be changed after construction. Build a new "
                f"module with {name}={value!r}."
            )
        super().__setattr__(name, value)

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the attribute `deterministic`, unless the argument is None.

        `nnx.view` calls this method.
        """
        if deterministic is not None:
            self.deterministic = deterministic


def joined_signature(wrapped: type, wrapper: type) -> inspect.Signature:
    """Returns the signature of a class that wraps another class.

    The signature has the parameters of the wrapped class, without Linen's `parent` and `name`, and
    the keyword arguments that the wrapper adds.

    Args:
      wrapped: the wrapped class.
      wrapper: the class that wraps `wrapped`, whose constructor adds keyword arguments.
    """
    # `inspect.signature(cls)` does not work, because NNX's metaclass hides the signatures of
    # classes.
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
    """Returns the PRNG key for the dropout of a call, or None if dropout is off.

    Args:
      module: a module with the attributes `deterministic` and `rngs`.
      deterministic: whether dropout is off. None means that the module's attribute `deterministic`
        decides.
      rngs: random streams, a single stream, or a PRNG key. None means the stream that the module
        keeps.

    Raises:
      ValueError: if `deterministic` is not set, or if there is no random stream for dropout.
    """
    name = type(module).__name__
    deterministic = module.deterministic if deterministic is None else deterministic
    if deterministic is None:
        raise ValueError(
            f"{name}: deterministic is not set. Pass deterministic=True or deterministic=False to "
            "the call or to the constructor, or call train() or eval()."
        )
    if deterministic:
        return None
    rngs = module.rngs if rngs is None else rngs
    if isinstance(rngs, nnx.Rngs):
        rngs = rngs.dropout if "dropout" in rngs or "default" in rngs else None
    if rngs is None:
        raise ValueError(
            f"{name}: dropout needs a random stream. Pass rngs with a stream 'dropout' or a "
            "default stream to the constructor or to the call, or set deterministic=True."
        )
    return rngs if isinstance(rngs, jax.Array) else rngs()


def linen_variables(module: LinenModule) -> Variables:
    """Returns the variables of an NNX module as an argument for `apply` of its Linen module.

    ``module.config.apply(linen_variables(module), ...)`` is equivalent to ``module(...)``.
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
    """Returns arguments of a module's `__call__` for the initialization of the module.

    All arrays are given as `jax.ShapeDtypeStruct`.

    Raises:
      ValueError: if the module is not a model and `in_features` is None.
    """
    if isinstance(config, TokenModel):
        return config.example(1, 1), {}
    if in_features is None:
        raise ValueError(
            f"{type(config).__name__} needs in_features, the number of features of its inputs."
        )
    x = jax.ShapeDtypeStruct((1, 1, in_features), jnp.float32)
    if isinstance(config, FeedForward):
        return (x,), {}
    parts = list(_parts(config))

    # Some mixers accept only causal masks.
    causal = any(isinstance(p, Mixer) and not p.supports_bidirectional for p in parts)
    kwargs: dict[str, PyTree] = {"mask": Mask(causal=causal)}
    if isinstance(config, Mixer):
        return ((x, x) if config.reads_memory else (x,)), kwargs
    blocks = [p for p in parts if isinstance(p, Block)]
    if any(p.cross_mixer is not None or p.self_mixer.reads_memory for p in blocks):
        kwargs["memory"] = Memory(x, Mask())  # type: ignore[arg-type]
    return (x,), kwargs


def _parts(config: object) -> Iterator[object]:
    """Yields a configuration, the values of its fields, and recursively the parts of the values."""
    yield config
    children: Iterable[object] = ()
    if is_config(config):
        children = fields_of(config).values()
    elif isinstance(config, tuple):
        children = config
    for child in children:
        yield from _parts(child)
