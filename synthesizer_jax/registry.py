"""Objects as JSON and back: how a recipe's modules are saved and rebuilt.

An unbound Flax module or a frozen dataclass is its own configuration. Classes that may appear in a
saved experiment carry `@register`; `to_json` writes them as ``{"type": name, field: value, ...}``
and `from_json` rebuilds them. Nothing is imported by a path read from a file.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any, TypeVar

import flax.linen as nn
import numpy as np

T = TypeVar("T", bound=type)

REGISTRY: dict[str, type] = {}


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


def fields_of(obj: Any) -> dict[str, Any]:
    """The configuration fields of a module or dataclass instance, in their order."""
    hidden = {"parent", "name"} if isinstance(obj, nn.Module) else set()
    return {
        f.name: getattr(obj, f.name)
        for f in dataclasses.fields(obj)
        if f.init and f.name not in hidden
    }


def replace(obj: Any, **changes: Any) -> Any:
    """A copy of a module or dataclass with some fields changed."""
    return type(obj)(**{**fields_of(obj), **changes})


def to_json(value: Any) -> Any:
    """JSON data that `from_json` turns into an equal value.

    Args:
      value: JSON values, tuples, dtypes, registered dataclasses and unbound registered modules.

    Raises:
      TypeError: a value of another type, or of a class that is not registered.
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
            raise TypeError(f"{name} is not registered: decorate the class with @register")
        return {"type": name, **{k: to_json(v) for k, v in fields_of(value).items()}}
    try:
        return np.dtype(value).name
    except TypeError:
        raise TypeError(f"{value!r} cannot be saved as JSON") from None


def from_json(data: Any) -> Any:
    """The value that `to_json` wrote; lists come back as tuples, fields of old that were null are gone.

    Raises:
      ValueError: a type name or field that this version does not know.
    """
    if isinstance(data, list):
        return tuple(from_json(v) for v in data)
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {k: from_json(v) for k, v in data.items()}
    cls = REGISTRY.get(data["type"])
    if cls is None:
        raise ValueError(
            f"unknown type {data['type']!r} in the saved configuration"
            f"{suggestion(data['type'], REGISTRY)}; if it is your own class, import its package "
            "first (--import my_package)"
        )
    given = {k: from_json(v) for k, v in data.items() if k != "type"}
    known = {f.name for f in dataclasses.fields(cls) if f.init}
    unknown = sorted(name for name in set(given) - known if given[name] is not None)
    if unknown:
        raise ValueError(
            f"{data['type']} has no field {unknown[0]!r}{suggestion(unknown[0], known)}; the "
            "configuration was saved by another version"
        )
    return cls(**{name: value for name, value in given.items() if name in known})


def suggestion(word: str, known: Any) -> str:
    """``, did you mean 'x'?`` for the nearest known word, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""
