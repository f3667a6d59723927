"""Conversion of configurations to JSON and back.

An unbound Flax module or a frozen dataclass is its own configuration. Classes that may occur in a saved
experiment are decorated with `@register`; `to_json` writes them as ``{"type": name, field: value, ...}``,
and `from_json` rebuilds them after checking that values have the types of the fields' annotations. Only
registered classes are instantiated; nothing that a file names is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import sys
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, TypeVar

import numpy as np

from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.typing import Limit

Class = TypeVar("Class", bound=type)
Config = TypeVar("Config")

JSON: TypeAlias = Any
"""JSON data as `json.loads` returns it."""

Annotation: TypeAlias = Any
"""A type annotation: a class, a union, `Literal[...]`, `tuple[...]` or another special form."""

REGISTRY: dict[str, type] = {}
"""The registered classes by name."""

EXTRA_MESH_AXES: dict[str, tuple[str, ...]] = {}
"""The mesh axes that `sharding.register_mesh_axis` has added, with the logical axes that they shard."""

MAX_LISTED_CLASSES = 3
"""Errors list the registered subclasses of a base class if there are no more than this."""

MAX_DEPTH = 64
"""Data that is nested more deeply than this is rejected as damaged."""


def register(cls: Class) -> Class:
    """Registers a module or frozen dataclass under its class name; used as a decorator.

    Raises:
      ValueError: a class of another module is already registered under that name.
    """
    registered = REGISTRY.setdefault(cls.__name__, cls)
    if registered is not cls and registered.__module__ != cls.__module__:
        raise ValueError(
            f"cannot register {cls.__module__}.{cls.__name__}: {registered.__module__} has "
            "registered that name; rename one of them"
        )
    REGISTRY[cls.__name__] = cls
    return cls


def field_names(cls: type) -> list[str]:
    """Returns the names of a module's or dataclass' configuration fields, in order."""
    linen = sys.modules.get("flax.linen")  # not imported: recipes without models do not need Flax
    hidden = {"parent", "name"} if linen and issubclass(cls, linen.Module) else set()
    return [f.name for f in dataclasses.fields(cls) if f.init and f.name not in hidden]


def fields_of(obj: object) -> dict[str, Any]:
    """Returns the configuration fields of a module or dataclass instance."""
    return {name: getattr(obj, name) for name in field_names(type(obj))}


def replace(obj: Config, **changes: object) -> Config:
    """Returns a copy of a module or dataclass with some fields changed."""
    return type(obj)(**{**fields_of(obj), **changes})


def to_json(value: object) -> JSON:
    """Converts a value to JSON data, from which `from_json` makes an equal value.

    Args:
      value: JSON values, tuples, dtypes, registered dataclasses and unbound registered modules.

    Raises:
      ValueError: a value has another type, or its class is not registered.
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
        return np.dtype(value).name  # type: ignore[call-overload]
    except TypeError:
        raise ValueError(f"{value!r} cannot be saved as JSON") from None


def from_json(data: JSON, path: str = "") -> Any:
    """Converts JSON data from `to_json` back to a value.

    Lists become tuples. Unknown fields whose value is null are ignored, because they belong to versions
    that had more fields.

    Args:
      data: JSON data.
      path: the data's position in the file, such as ``model.encoder``, for errors.

    Raises:
      ValueError: an unknown type name or field, or a value that does not have the field's type; the error
        names the position.
    """
    if path.count(".") > MAX_DEPTH:
        raise ValueError(f"{path[:40]}… is nested deeper than {MAX_DEPTH} levels")
    if isinstance(data, list):
        return tuple(from_json(v, child_path(path, i)) for i, v in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {k: from_json(v, child_path(path, k)) for k, v in data.items()}
    cls = _registered_class(data["type"], path)
    values = {k: from_json(v, child_path(path, k)) for k, v in data.items() if k != "type"}
    names = field_names(cls)
    unknown = sorted(name for name in values if name not in names and values[name] is not None)
    if unknown:
        raise ValueError(
            f"{_error_prefix(path)}{cls.__name__} has no field {format_value(unknown[0])}"
            f"{did_you_mean(unknown[0], names)}; the configuration was saved by another version"
        )
    values = {name: values[name] for name in names if name in values}
    check_types(cls, values, path)
    try:
        return cls(**values)
    except TypeError:
        missing = [n for n in names if n not in values and _is_required(cls, n)]
        if not missing:
            raise
        raise ValueError(f"{child_path(path, missing[0])} is missing") from None


def _registered_class(name: object, path: str) -> type:
    """The registered class with a name; raises a `ValueError` for unknown names."""
    cls = REGISTRY.get(name) if isinstance(name, str) else None
    if cls is None:
        suggestion = did_you_mean(name, REGISTRY) if isinstance(name, str) else ""
        raise ValueError(
            f"{_error_prefix(path)}unknown type {format_value(name)} in the saved configuration"
            f"{suggestion}; for a class of your own, add --import PACKAGE or --import FILE.py to import "
            "what registers it"
        )
    return cls


def _is_required(cls: type, name: str) -> bool:
    """Whether a field has no default."""
    field = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def child_path(path: str, name: str | int) -> str:
    """Returns the path of a field or of a list's entry."""
    return f"{path}.{name}" if path else str(name)


def _error_prefix(path: str) -> str:
    return f"{path if len(path) <= 99 else f'{path[:98]}…'}: " if path else ""


@functools.cache
def field_types(cls: type, *, limits: bool = False) -> dict[str, Annotation]:
    """Returns the annotations of a class' fields, or nothing if they cannot be evaluated.

    Args:
      cls: the class of a module or dataclass.
      limits: whether annotations keep their `Limit`.
    """
    try:
        return typing.get_type_hints(cls, include_extras=limits)
    except NameError:  # the name is imported for type checkers only
        return {}


def check_fields(obj: object, path: str = "") -> None:
    """Raises a `ValueError` that names the first wrong field in a tree of modules and dataclasses.

    Args:
      obj: an experiment, or something in one.
      path: its position in the experiment.
    """
    if isinstance(obj, tuple):
        for i, entry in enumerate(obj):
            check_fields(entry, child_path(path, i))
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        check_types(type(obj), fields_of(obj), path)
        for name, value in fields_of(obj).items():
            check_fields(value, child_path(path, name))


def check_types(cls: type, values: Mapping[str, object], path: str = "") -> None:
    """Raises a `ValueError` for the first field whose value does not match its annotation.

    Args:
      cls: the class of a module or dataclass.
      values: values of some of its fields.
      path: the object's position in the file, for the error.
    """
    for name, value in values.items():
        annotation = field_types(cls, limits=True).get(name, Any)
        if not matches_type(value, annotation):
            plain = field_types(cls)[name]
            raise ValueError(
                f"{child_path(path, name)} is {format_value(value)}"
                + (
                    f"; allowed: {format_limits(annotation)}"
                    if matches_type(value, plain)
                    else f", expected {format_type(plain)}"
                )
            )


def format_limits(annotation: Annotation) -> str:
    """Formats what an annotation allows besides its types, such as ``1 to 256``; empty if that is all."""
    parts = typing.get_args(annotation)
    own = [str(part) for part in parts if isinstance(part, Limit)]
    return " of ".join(
        [*own, *filter(None, [" or ".join(filter(None, map(format_limits, parts)))])]
    )


def matches_type(value: object, annotation: Annotation) -> bool:
    """Returns whether a value matches an annotation, and lies in its `Limit` if it has one.

    An integer matches `float`; NaN and infinities do not. A value matches a protocol if it has the
    protocol's methods and they accept the protocol's arguments. Annotations that cannot be checked match.
    """
    if members := union_members(annotation):
        return any(matches_type(value, member) for member in members)
    origin: object = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is Annotated:
        limits = (x for x in arguments[1:] if isinstance(x, Limit))
        return matches_type(value, arguments[0]) and all(x.contains(value) for x in limits)
    if annotation is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1:] == (...,):
            return all(matches_type(v, arguments[0]) for v in value)
        return len(value) == len(arguments) and all(map(matches_type, value, arguments))
    cls = origin or annotation
    if not isinstance(cls, type) or cls in (object, Any):
        return True
    if getattr(cls, "_is_protocol", False):
        return _implements(value, cls)
    return isinstance(value, cls)


def _implements(value: object, protocol: type) -> bool:
    """Whether a value has a protocol's methods, with parameters for the protocol's arguments."""
    if isinstance(value, type):
        return False
    for name, method in vars(protocol).items():
        if not inspect.isfunction(method) or name in ("__init__", "__subclasshook__"):
            continue
        implementation = value if name == "__call__" else getattr(value, name, None)
        parameters = inspect.signature(method).parameters.values()
        required = [p for p in parameters if p.default is p.empty][1:]
        try:
            inspect.signature(implementation).bind(*required)  # type: ignore[arg-type]
        except (TypeError, ValueError):  # not callable, or other parameters
            return False
    return True


def union_members(annotation: Annotation) -> tuple[Annotation, ...]:
    """Returns the members of a union, and an empty tuple for other annotations."""
    origin: object = typing.get_origin(annotation)
    return typing.get_args(annotation) if origin in (types.UnionType, typing.Union) else ()


def format_type(annotation: Annotation) -> str:
    """Formats an annotation for errors and tables; a base class as its few registered subclasses."""
    if members := union_members(annotation):
        return " or ".join(map(format_type, members))
    if annotation is type(None):
        return "none"
    origin: object = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return str(annotation).replace(f"{getattr(arguments[0], '__module__', '')}.", "")
    if not isinstance(annotation, type):
        return str(annotation)
    subclasses = [name for name, cls in REGISTRY.items() if annotation in cls.__mro__[:-1]]
    is_base = annotation.__name__ not in REGISTRY and 0 < len(subclasses) <= MAX_LISTED_CLASSES
    return " or ".join(sorted(subclasses)) if is_base else annotation.__name__


def format_value(value: object) -> str:
    """Formats a value for errors, with at most 60 characters."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"a {type(value).__name__}"
    formatted = repr(value) if not isinstance(value, dict) else json.dumps(value, default=str)
    formatted = " ".join(formatted.split())  # modules are shown on several lines
    return formatted if len(formatted) <= 60 else f"{formatted[:57]}…"
