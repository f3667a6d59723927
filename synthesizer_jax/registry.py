"""Objects as JSON and back: how a recipe's modules are saved and rebuilt.

An unbound Flax module or a frozen dataclass is its own configuration. Classes that may appear in a
saved experiment carry `@register`; `to_json` writes them as ``{"type": name, field: value, ...}``
and `from_json` rebuilds them, with values of the types that the fields are annotated with. Nothing is
imported by a path read from a file.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import types
import typing
from typing import Any, TypeVar

import flax.linen as nn
import numpy as np

from synthesizer_jax.suggestions import suggestion

T = TypeVar("T", bound=type)

REGISTRY: dict[str, type] = {}

DEEPEST = 64
"""So many objects and lists within one another are data; more are damage."""


def register(cls: T) -> T:
    """Makes a module or frozen dataclass known by its class name; used as a decorator.

    Raises:
      ValueError: another class of that name is registered already.
    """
    known = REGISTRY.setdefault(cls.__name__, cls)
    if known is not cls and known.__module__ != cls.__module__:
        raise ValueError(
            f"cannot register {cls.__module__}.{cls.__name__}: {known.__module__} has registered "
            "that name; rename one of them"
        )
    REGISTRY[cls.__name__] = cls
    return cls


def field_names(cls: type) -> list[str]:
    """The names of a module's or dataclass' configuration fields, in their order."""
    hidden = {"parent", "name"} if issubclass(cls, nn.Module) else set()
    return [f.name for f in dataclasses.fields(cls) if f.init and f.name not in hidden]


def fields_of(obj: Any) -> dict[str, Any]:
    """The configuration fields of a module or dataclass instance, in their order."""
    return {name: getattr(obj, name) for name in field_names(type(obj))}


def replace(obj: Any, **changes: Any) -> Any:
    """A copy of a module or dataclass with some fields changed."""
    return type(obj)(**{**fields_of(obj), **changes})


def to_json(value: Any) -> Any:
    """JSON data that `from_json` turns into an equal value.

    Args:
      value: JSON values, tuples, dtypes, registered dataclasses and unbound registered modules.

    Raises:
      ValueError: a value of another type, or of a class that is not registered.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if REGISTRY.get(name) is not type(value):
            raise ValueError(f"{name} is not registered: decorate the class with @register")
        return {"type": name, **{k: to_json(v) for k, v in fields_of(value).items()}}
    try:
        return np.dtype(value).name
    except TypeError:
        raise ValueError(f"{value!r} cannot be saved as JSON") from None


def from_json(data: Any, path: str = "") -> Any:
    """The value that `to_json` wrote; lists come back as tuples, fields of old that were null are gone.

    Args:
      data: JSON values.
      path: where they stand, such as ``model.encoder``, for errors.

    Raises:
      ValueError: a type name or field that this version does not know, or a value of another type than
        the field has; the error names the place.
    """
    if path.count(".") > DEEPEST:
        raise ValueError(f"{path[:40]}… is nested deeper than {DEEPEST} levels")
    if isinstance(data, list):
        return tuple(from_json(v, within(path, i)) for i, v in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {k: from_json(v, within(path, k)) for k, v in data.items()}
    cls = known_class(data["type"], path)
    given = {k: from_json(v, within(path, k)) for k, v in data.items() if k != "type"}
    known = field_names(cls)
    unknown = sorted(name for name in given if name not in known and given[name] is not None)
    if unknown:
        raise ValueError(
            f"{at(path)}{cls.__name__} has no field {unknown[0]!r}{suggestion(unknown[0], known)}; the "
            "configuration was saved by another version"
        )
    values = {name: given[name] for name in known if name in given}
    check_types(cls, values, path)
    try:
        return cls(**values)
    except TypeError:
        missing = [n for n in known if n not in values and is_required(cls, n)]
        if not missing:
            raise
        raise ValueError(f"{within(path, missing[0])} is missing") from None


def known_class(name: Any, path: str) -> type:
    """The registered class of that name."""
    cls = REGISTRY.get(name) if isinstance(name, str) else None
    if cls is None:
        near = suggestion(name, REGISTRY) if isinstance(name, str) else ""
        raise ValueError(
            f"{at(path)}unknown type {name!r} in the saved configuration{near}; if it is your own "
            "class, add --import PACKAGE, or --import FILE.py, that registers it"
        )
    return cls


def is_required(cls: type, name: str) -> bool:
    """Whether a field has no default."""
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    nothing = dataclasses.MISSING
    return field.default is nothing and field.default_factory is nothing


def within(path: str, name: str | int) -> str:
    """The path of a field, or of an entry."""
    return f"{path}.{name}" if path else str(name)


def at(path: str) -> str:
    """The beginning of an error at a place."""
    return f"{path}: " if path else ""


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """The annotated types of a class' fields; empty where its own annotations cannot be read."""
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a name that only type checkers import
        return {}


def check_types(cls: type, values: dict[str, Any], path: str = "") -> None:
    """Raises a `ValueError` for the first field whose value is not of its annotated type.

    Args:
      cls: a module's or dataclass' class.
      values: some of its fields.
      path: where the object stands, for the error.
    """
    for name, value in values.items():
        kind = hints(cls).get(name, Any)
        if not fits(value, kind):
            raise ValueError(f"{within(path, name)} is {shown(value)}, expected {described(kind)}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; what cannot be asked fits.

    A `float` is finite and may be given as an integer. Of a protocol's methods it is asked whether they
    are there and take the protocol's arguments.
    """
    if options := union(kind):
        return any(fits(value, option) for option in options)
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1:] == (...,):
            return all(fits(v, arguments[0]) for v in value)
        return len(value) == len(arguments) and all(map(fits, value, arguments))
    kind = origin or kind
    if not isinstance(kind, type) or kind in (object, Any):
        return True
    if getattr(kind, "_is_protocol", False):
        return answers(value, kind)
    return isinstance(value, kind)


def answers(value: Any, protocol: type) -> bool:
    """Whether a value has a protocol's methods."""
    if isinstance(value, type):
        return False
    for name, method in vars(protocol).items():
        if not inspect.isfunction(method) or name in ("__init__", "__subclasshook__"):
            continue
        own = value if name == "__call__" else getattr(value, name, None)
        asked = inspect.signature(method).parameters.values()
        required = [p for p in asked if p.default is p.empty][1:]
        try:
            inspect.signature(own).bind(*required)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # not callable, or with other arguments
            return False
    return True


def union(kind: Any) -> tuple[Any, ...]:
    """The members of a union; empty for other types."""
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return typing.get_args(kind) if is_union else ()


def described(kind: Any) -> str:
    """An annotated type as an error or a table names it."""
    if options := union(kind):
        return " or ".join(map(described, options))
    if kind is type(None):
        return "none"
    if typing.get_origin(kind) is tuple:
        return str(kind).replace(f"{getattr(typing.get_args(kind)[0], '__module__', '')}.", "")
    return getattr(kind, "__name__", str(kind))


def shown(value: Any) -> str:
    """A value in an error: short, whatever it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"a {type(value).__name__}"
    text = repr(value) if not isinstance(value, dict) else json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}…"
