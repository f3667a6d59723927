"""NNX classes made from Linen classes: the same fields, methods and documentation."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
from flax import nnx

from synthesizer_jax.attention import Mask
from synthesizer_jax.mixers import SentenceFeedForward
from synthesizer_jax.models import Block, Memory, TokenModel
from synthesizer_jax.nnx.initialise import Example
from synthesizer_jax.nnx.module import LinenModule
from synthesizer_jax.registry import fields_of

FORMS: dict[type[linen.Module], type[LinenModule]] = {}
"""The NNX class of every Linen class that has one."""


class Layer(LinenModule):
    """A `LinenModule` that reads tokens ``[batch, length, in_features]``."""

    def __init__(
        self,
        *args: Any,
        in_features: int,
        rngs: nnx.Rngs,
        cross: bool = False,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
        **fields: Any,
    ):
        """Makes the layer and its parameters.

        Args:
          *args: fields of the Linen class.
          in_features: width of the tokens.
          rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
            A stream that is missing is the default one.
          cross: the layer attends to other tokens than its own; only a layer whose parameters depend
            on that (`SentenceFeedForward`, `Block`, `Stack`) needs to know.
          deterministic: dropout is off; None: every call has to say.
          keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
          **fields: fields of the Linen class.
        """
        config = configured(self._linen_class, args, fields)
        tokens = jax.ShapeDtypeStruct((1, 1, in_features), jnp.float32)
        super().__init__(
            config,
            self._example(config, tokens, cross),
            rngs=rngs,
            deterministic=deterministic,
            keep_rngs=keep_rngs,
        )
        self.in_features = in_features

    def _example(self, config: Any, tokens: Any, cross: bool) -> Example:
        """Arguments to initialise the Linen module with."""
        mask = {} if cross or not needs_causal_mask(config) else {"mask": Mask(causal=True)}
        return Example((tokens, tokens) if cross else (tokens,), mask)

    def _apply(self, method: str, args: Any, kwargs: Any, **options: Any) -> Any:
        x = args[0] if args else kwargs.get("x")
        if x is not None and x.shape[-1] != self.in_features:
            raise ValueError(
                f"{type(self).__name__}: x is {x.shape[-1]} wide, but in_features={self.in_features}; "
                f"make the layer with in_features={x.shape[-1]}"
            )
        return super()._apply(method, args, kwargs, **options)


class Residual(Layer):
    """A `Layer` whose cross-attention is inside: `Block` and `Stack`."""

    def _example(self, config: Any, tokens: Any, cross: bool) -> Example:
        """Arguments to initialise the Linen module with."""
        blocks = [config] if isinstance(config, Block) else [run.block for run in config.runs]
        kwargs: dict[str, Any] = {"mask": Mask(causal=needs_causal_mask(config))}
        if cross or any(block.cross_mixer is not None for block in blocks):
            kwargs["memory"] = Memory(tokens, Mask())
        return Example((tokens,), kwargs)


class Model(LinenModule):
    """A `LinenModule` that reads integer tokens."""

    def __init__(
        self,
        *args: Any,
        rngs: nnx.Rngs,
        deterministic: bool | None = False,
        keep_rngs: bool = True,
        **fields: Any,
    ):
        """Makes the model and its parameters.

        Args:
          *args: fields of the Linen class.
          rngs: random streams; ``params`` makes the parameters, and ``dropout`` is forked for dropout.
            A stream that is missing is the default one.
          deterministic: dropout is off; None: every call has to say.
          keep_rngs: keep a stream for dropout; False: every call with dropout has to bring one.
          **fields: fields of the Linen class.
        """
        config: Any = configured(self._linen_class, args, fields)
        super().__init__(
            config,
            Example(config.example(1, 1)),
            rngs=rngs,
            deterministic=deterministic,
            keep_rngs=keep_rngs,
        )


def configured(
    linen_class: type[linen.Module], args: tuple[Any, ...], fields: dict[str, Any]
) -> linen.Module:
    """The Linen module of the given fields, or the one that is given itself."""
    if len(args) == 1 and not fields and type(args[0]) is linen_class:
        return args[0]
    return linen_class(*args, **fields)


def needs_causal_mask(config: Any) -> bool:
    """Whether a layer with the given configuration works under a causal mask only."""
    if isinstance(config, SentenceFeedForward) and config.causal:
        return True
    if isinstance(config, tuple):
        return any(map(needs_causal_mask, config))
    return dataclasses.is_dataclass(config) and needs_causal_mask(tuple(fields_of(config).values()))


def form(
    linen_class: type[linen.Module],
    base: type[LinenModule],
    *methods: str,
    module: str = __name__,
) -> type[Any]:
    """Makes the NNX class of a Linen class; `FORMS` knows it afterwards.

    Args:
      linen_class: its fields are the class' arguments.
      base: `Layer`, `Residual` or `Model`. Where a superclass of the Linen class has an NNX class, that is
        the base.
      *methods: methods of the Linen class, besides `__call__`, to give the NNX class.
      module: where the class is bound to its name.
    """
    parents = [FORMS[c] for c in linen_class.__mro__[1:] if c in FORMS]
    functions = {name: getattr(linen_class, name) for name in ("__call__", *methods)}
    body = {name: method(name, function) for name, function in functions.items()} | {
        "__doc__": documentation(linen_class.__doc__, base.__init__.__doc__),
        "__module__": module,
        "__signature__": ClassSignature(class_signature(linen_class, base)),
        "_linen_class": linen_class,
        "_methods": tuple(functions),
    }
    parent: type[Any] = parents[0] if parents else base
    made = types.new_class(linen_class.__name__, (parent,), exec_body=lambda n: n.update(body))
    FORMS[linen_class] = made
    return made


def form_of(linen_class: type[linen.Module]) -> type[Any]:
    """The NNX class of a Linen class, made at the first use."""
    if linen_class not in FORMS:
        form(linen_class, Model if issubclass(linen_class, TokenModel) else Layer)
    return FORMS[linen_class]


class ClassSignature:
    """What `inspect.signature` shows of a class, but not of its instances and subclasses."""

    def __init__(self, signature: inspect.Signature):
        self.signature = signature

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        if instance is not None or vars(owner).get("__signature__") is not self:
            raise AttributeError("__signature__")
        return self.signature


def class_signature(linen_class: type[linen.Module], base: type[LinenModule]) -> inspect.Signature:
    """The fields of the Linen class, then the keyword arguments of the NNX class' base."""
    parameters = [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY
            if f.kw_only
            else inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
            annotation=f.type,
        )
        for f in dataclasses.fields(linen_class)  # type: ignore[arg-type]
        if f.init and f.name not in ("parent", "name")
    ]
    return inspect.Signature([*parameters, *keywords(base.__init__)])


def method(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an NNX class that runs a Linen class' method.

    Args:
      name: the method's name.
      function: the Linen class' method.
    """

    def call(
        self: LinenModule,
        *args: Any,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | jax.Array | None = None,
        sow_weights: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Runs the method.

        Args:
          deterministic: dropout is off; None: the module's `deterministic` says.
          rngs: random streams, one stream or a key for dropout, instead of the module's own.
          sow_weights: leave the attention weights ``attention_weights`` ``[batch or 1, heads, q, k]`` to
            `nnx.capture`, as `nnx.Intermediate`.
        """
        return self._apply(
            name, args, kwargs, deterministic=deterministic, rngs=rngs, sow_weights=sow_weights
        )

    documented = documentation(function.__doc__, call.__doc__)
    signature = inspect.signature(function)
    own = list(signature.parameters.values())
    rest = [own.pop()] if own[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    call.__signature__ = signature.replace(parameters=[*own, *keywords(call), *rest])  # type: ignore[attr-defined]
    call.__name__ = name
    call.__doc__ = documented
    return call


def keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The keyword-only parameters of a function."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]


def documentation(linen: str | None, own: str | None) -> str:
    """The Linen documentation, followed by what NNX adds to its arguments."""
    _, _, added = inspect.cleandoc(own or "").partition("Args:\n")
    lines = [line for line in added.splitlines() if "**fields" not in line and "*args" not in line]
    return "\n".join([inspect.cleandoc(linen or ""), "", "As an NNX module also:", *lines])
