"""Creates NNX classes from Linen classes, with the same fields, methods and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import nnx

from synthesizer_jax.attention import Mask
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.models import Block, Memory, TokenModel
from synthesizer_jax.nnx.module import LinenModule
from synthesizer_jax.nnx.variables import InitArguments
from synthesizer_jax.registry import fields_of
from synthesizer_jax.typing import PyTree

NNX_CLASSES: dict[type[linen.Module], type[LinenModule]] = {}
"""The NNX class of every Linen class that has one."""


class Layer(LinenModule):
    """A `LinenModule` whose inputs are vectors ``[batch, length, in_features]``."""

    def __init__(
        self,
        *args: object,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
        **fields: object,
    ):
        """Initializes the layer and its parameters.

        Args:
          *args: fields of the Linen class.
          in_features: number of input features.
          rngs: random streams; ``params`` is used for the parameters, and ``dropout`` is forked for
            dropout. The default stream replaces one that is missing.
          cross: whether the layer is used for cross-attention; has an effect only on layers whose
            parameters depend on it (`SentenceFeedForward`, `Block`, `Stack`).
          deterministic: if True, dropout is off; if None, every call must specify it.
          keep_rngs: whether to keep a stream for dropout; otherwise every call with dropout needs one.
          **fields: fields of the Linen class.
        """
        config = _resolve_config(self._linen_class, args, fields)
        x = jax.ShapeDtypeStruct((1, 1, in_features), jnp.float32)
        super().__init__(
            config,
            self._init_arguments(config, x, cross),
            rngs=rngs,
            deterministic=deterministic,
            keep_rngs=keep_rngs,
        )
        self.in_features = in_features

    def _init_arguments(
        self, config: linen.Module, x: jax.ShapeDtypeStruct, cross: bool
    ) -> InitArguments:
        """The arguments to initialize the Linen module with."""
        kwargs = {} if cross or not _needs_causal_mask(config) else {"mask": Mask(causal=True)}
        return InitArguments((x, x) if cross else (x,), kwargs)

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
        x: PyTree = args[0] if args else kwargs.get("x")
        if x is not None and x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}: x has {x.shape[-1]} features, but in_features="
                f"{self.in_features}; build the layer with in_features={x.shape[-1]}"
            )
        return super()._apply(
            method, args, kwargs, deterministic=deterministic, rngs=rngs, sow_weights=sow_weights
        )


class StackLayer(Layer):
    """A `Layer` that contains its own cross-attention: `Block` and `Stack`."""

    def _init_arguments(
        self, config: linen.Module, x: jax.ShapeDtypeStruct, cross: bool
    ) -> InitArguments:
        blocks = [config] if isinstance(config, Block) else [run.block for run in config.runs]
        memory_tokens: PyTree = x
        kwargs: dict[str, PyTree] = {"mask": Mask(causal=_needs_causal_mask(config))}
        if cross or any(block.cross_mixer is not None for block in blocks):
            kwargs["memory"] = Memory(memory_tokens, Mask())
        return InitArguments((x,), kwargs)


class Model(LinenModule):
    """A `LinenModule` whose inputs are integer tokens."""

    def __init__(
        self,
        *args: object,
        rngs: nnx.Rngs,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
        **fields: object,
    ):
        """Initializes the model and its parameters.

        Args:
          *args: fields of the Linen class.
          rngs: random streams; ``params`` is used for the parameters, and ``dropout`` is forked for
            dropout. The default stream replaces one that is missing.
          deterministic: if True, dropout is off; if None, every call must specify it.
          keep_rngs: whether to keep a stream for dropout; otherwise every call with dropout needs one.
          **fields: fields of the Linen class.
        """
        config = _resolve_config(self._linen_class, args, fields)
        super().__init__(
            config,
            InitArguments(config.example(1, 1)),
            rngs=rngs,
            deterministic=deterministic,
            keep_rngs=keep_rngs,
        )


def _resolve_config(
    linen_class: type[linen.Module], args: tuple[object, ...], fields: dict[str, object]
) -> linen.Module:
    """The Linen module with the given fields; a single argument of the class itself is returned as is."""
    if len(args) == 1 and not fields and type(args[0]) is linen_class:
        return args[0]
    return linen_class(*args, **fields)


def _needs_causal_mask(config: object) -> bool:
    """Whether a layer with this configuration accepts only causal masks."""
    if isinstance(config, Mixer) and not config.supports_bidirectional:
        return True
    if isinstance(config, tuple):
        return any(map(_needs_causal_mask, config))
    return dataclasses.is_dataclass(config) and _needs_causal_mask(
        tuple(fields_of(config).values())
    )


def make_nnx_class(
    linen_class: type[linen.Module],
    base: type[LinenModule],
    *methods: str,
    module: str = __name__,
) -> type[LinenModule]:
    """Creates the NNX class of a Linen class and adds it to `NNX_CLASSES`.

    Args:
      linen_class: the class whose fields become arguments of the NNX class.
      base: `Layer`, `StackLayer` or `Model`; used only if no superclass of the Linen class has an NNX
        class, which is the base class otherwise.
      *methods: methods of the Linen class, besides `__call__`, that the NNX class has.
      module: name of the module that defines the class.
    """
    parents = [NNX_CLASSES[c] for c in linen_class.__mro__[1:] if c in NNX_CLASSES]
    parent = parents[0] if parents else base
    functions = {name: getattr(linen_class, name) for name in ("__call__", *methods)}
    signature = _class_signature(linen_class, base)
    attributes = {name: _make_method(name, function) for name, function in functions.items()} | {
        "__doc__": _make_docstring(linen_class.__doc__, base.__init__.__doc__),
        "__module__": module,
        "__init__": _make_init(parent.__init__, linen_class.__name__, signature),
        "__signature__": _ClassSignature(signature),
        "_linen_class": linen_class,
        "_methods": tuple(functions),
    }
    nnx_type = types.new_class(
        linen_class.__name__, (parent,), exec_body=lambda namespace: namespace.update(attributes)
    )
    NNX_CLASSES[linen_class] = nnx_type
    return nnx_type


def nnx_class(linen_class: type[linen.Module]) -> Callable[..., LinenModule]:
    """Returns the NNX class of a Linen class, which is created at its first use."""
    if linen_class not in NNX_CLASSES:
        make_nnx_class(linen_class, Model if issubclass(linen_class, TokenModel) else Layer)
    return NNX_CLASSES[linen_class]


class _ClassSignature:
    """Descriptor of a signature that `inspect` shows for a class, not for instances and subclasses."""

    def __init__(self, signature: inspect.Signature):
        self.signature = signature

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None or vars(owner).get("__signature__") is not self:
            raise AttributeError("__signature__")
        return self.signature


def _class_signature(linen_class: type[linen.Module], base: type[LinenModule]) -> inspect.Signature:
    """The fields of the Linen class, followed by the keyword arguments of the NNX base class."""
    parameters = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY
            if f.kw_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
            annotation=f.type,
        )
        for f in dataclasses.fields(linen_class)
        if f.init and f.name not in ("parent", "name")
    ]
    return inspect.Signature([*parameters, *_keyword_parameters(base.__init__)])


def _make_init(init: PyTree, name: str, signature: inspect.Signature) -> types.FunctionType:
    """Returns an `__init__` that shows a class' fields, and that errors name as the class' own."""
    own = types.FunctionType(init.__code__, init.__globals__, "__init__", None, init.__closure__)
    own.__kwdefaults__, own.__doc__ = init.__kwdefaults__, init.__doc__
    own.__qualname__ = f"{name}.__init__"
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(own)["__signature__"] = signature.replace(
        parameters=[itself, *signature.parameters.values()]
    )
    return own


def _make_method(name: str, function: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Creates an NNX method that runs a method of the Linen class.

    Args:
      name: the method's name.
      function: the Linen class' method.
    """

    def call(
        self: LinenModule,
        *args: object,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
        **kwargs: PyTree,
    ) -> PyTree:
        """Runs the method.

        Args:
          deterministic: if True, dropout is off; None uses the module's attribute.
          rngs: random streams, one stream or a PRNG key for dropout; None uses the module's stream.
          sow_weights: whether to sow the attention weights ``attention_weights``
            ``[batch or 1, heads, q, k]`` as `nnx.Intermediate`, for `nnx.capture`.
        """
        return self._apply(
            name, args, kwargs, deterministic=deterministic, rngs=rngs, sow_weights=sow_weights
        )

    signature = inspect.signature(function)
    nnx_parameters = _keyword_parameters(call)
    conflicts = {p.name for p in nnx_parameters} & signature.parameters.keys()
    if conflicts:
        raise ValueError(
            f"to_nnx: {function.__qualname__} has an argument {min(conflicts)!r}, which NNX modules "
            "already have; remove it, and apply dropout if self.has_rng('dropout')"
        )
    parameters = list(signature.parameters.values())
    var_keyword = [parameters.pop()] if parameters[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    docstring = _make_docstring(function.__doc__, call.__doc__)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*parameters, *nnx_parameters, *var_keyword]
    )
    call.__name__ = name
    call.__doc__ = docstring
    return call


def _keyword_parameters(function: Callable[..., object]) -> list[inspect.Parameter]:
    """The keyword-only parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def _make_docstring(linen_doc: str | None, nnx_doc: str | None) -> str:
    """The Linen documentation, followed by the arguments that NNX adds."""
    _, _, arguments = inspect.cleandoc(nnx_doc or "").partition("Args:\n")
    lines = [
        line for line in arguments.splitlines() if "**fields" not in line and "*args" not in line
    ]
    return "\n".join(
        [inspect.cleandoc(linen_doc or ""), "", "Additional arguments of the NNX module:", *lines]
    )
