"""The fields of an experiment by their paths: listed, and changed by ``--set path=value``."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import (
    JSON,
    Annotation,
    child_path,
    field_names,
    field_types,
    fields_of,
    format_limits,
    format_type,
    format_value,
    from_json,
    matches_type,
    replace,
    to_json,
    union_members,
)
from synthesizer_jax.data.objectives import OBJECTIVES, Objective
from synthesizer_jax.models import ZOO, TokenModel

_Object = TypeVar("_Object")

WORDS = {"none": None, "true": True, "false": False}

NAMED: tuple[tuple[type, str, Mapping[str, Any], str], ...] = (
    (TokenModel, "model", ZOO, "'synthesizer-jax models' lists all"),
    (Objective, "objective", OBJECTIVES, f"there are {', '.join(OBJECTIVES)}"),
)
"""Classes whose objects have names: the class, what an object is called, the table, and a remedy."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field that can be set.

    Attributes:
      path: such as ``training.optimizer.learning_rate.warmup_steps``.
      type: the annotated type, and what is allowed besides.
      value: as it is typed after ``--set path=``; the name of its class where it has fields itself.
      default: the same of its default; None: the recipe has to give it.
      leaf: whether it is a plain value, without fields.
    """

    path: str
    type: str
    value: str
    default: str | None
    leaf: bool


def settings(obj: object, path: str = "") -> Iterator[Setting]:
    """Yields every settable field of an experiment, or of anything in one.

    Args:
      obj: a module or dataclass.
      path: where it stands.
    """
    cls: Any = type(obj)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    for name in field_names(cls):
        value, place = getattr(obj, name), child_path(path, name)
        kind = format_type(field_types(cls).get(name, object))
        if limits := format_limits(field_types(cls, limits=True).get(name)):
            kind += f": {limits}"
        missing = defaults[name] is dataclasses.MISSING
        default = None if missing else _format_setting(defaults[name])
        children = list(_nested_objects(value, place))
        yield Setting(place, kind, _format_setting(value), default, not children)
        for child, where in children:
            yield from settings(child, where)


def _has_fields(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _nested_objects(value: object, path: str) -> Iterator[tuple[object, str]]:
    """Yields the objects with fields that a value is or holds, and their paths."""
    if isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from _nested_objects(entry, child_path(path, i))
    elif _has_fields(value):
        yield value, path


def _format_setting(value: object) -> str:
    """Returns a plain value as ``--set`` reads it, an object as the name of its class."""
    if _has_fields(value):
        return type(value).__name__
    if isinstance(value, tuple) and any(map(_has_fields, value)):
        return f"({', '.join(map(_format_setting, value))})"
    try:
        text = json.dumps(to_json(value))
    except ValueError:  # a function, which JSON cannot hold
        return format_value(value)
    if isinstance(value, str) and parse_text(value) == value:
        return value
    return "none" if value is None else text


def parse_text(text: str) -> JSON:
    """Returns the value of an argument: JSON, a literal of Python, a word of `WORDS`, or the text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return WORDS.get(text.lower(), text)


def override(obj: _Object, *assignments: str) -> _Object:
    """Returns a copy with some fields changed, each by ``path.to.field=value``; the last one counts.

    An object is made, and checked, when all of its fields have their new values.

    Args:
      obj: an experiment, or any registered object inside it.
      assignments: dots name fields, numbers index tuples; a value is JSON or a literal of Python, read by
        the field's type. A model is given by its name in `ZOO`, an objective by its name in
        `OBJECTIVES`, any object as JSON with its ``type``.

    Raises:
      ValueError: an unknown field or a value that does not fit, with a suggestion.
    """
    changes: dict[str | None, Any] = {}  # by field or index; under None the new value itself
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r}: write path.to.field=value")
        *parents, last = path.split(".")
        inner = changes
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = {None: text}
    return cast(_Object, _apply(changes, obj, object, ""))


def _apply(changes: dict[str | None, Any], value: object, kind: Annotation, path: str) -> object:
    """Returns the value of a field of type `kind` at a path after changes."""
    if None in changes:
        value = _parse_value(changes.pop(None), kind, path)
    if not changes:
        return value
    entries: dict[str, object] = {}
    kinds: dict[str, Annotation] = {}
    missing = "{!r} is inside a plain value, which has no fields"
    if isinstance(value, tuple):
        entries = {str(i): entry for i, entry in enumerate(value)}
        missing = f"{{!r}} is not an index below {len(value)}"
    elif _has_fields(value):
        cls: type = type(value)
        entries, kinds = fields_of(value), field_types(cls)
        missing = f"{type(value).__name__} has no field {{!r}}"
    for name, inner in changes.items():
        place = child_path(path, str(name))
        if name not in entries:
            nested = settings(value, path) if kinds else ()
            places = [found.path for found in nested if found.path.endswith(f".{name}")][:3]
            fields = f"; its fields: {', '.join(entries)}" if kinds else ""
            other = did_you_mean(str(name), entries) + fields
            hint = f"; write {' or '.join(places)}" if places else other
            raise ValueError(f"--set {place}: {missing.format(name)}{hint}")
        entries[str(name)] = _apply(inner, entries[str(name)], kinds.get(str(name), object), place)
    return tuple(entries.values()) if isinstance(value, tuple) else replace(value, **entries)


def _parse_value(text: str, kind: Annotation, path: str) -> object:
    """Returns the value of an argument for a field of type `kind`."""
    options = union_members(kind) or (kind,)
    value = from_json(parse_text(text), path)
    for base, noun, known, remedy in NAMED:
        is_base = any(isinstance(option, type) and issubclass(option, base) for option in options)
        if isinstance(value, str) and is_base:
            if value not in known:
                hint = did_you_mean(value, known)
                raise ValueError(f"--set {path}={value}: there is no {noun} {value!r}{hint}; {remedy}")
            value = known[value]() if base is TokenModel else known[value]
    for option in options:
        if matches_type(value, option):
            return float(value) if option is float else value
    given = type(value).__name__ if _has_fields(value) else text
    given = given if len(given) <= 60 else f"{given[:57]}…"
    raise ValueError(f"--set {path}={given}: expected {format_type(kind)}")
