"""The fields of an experiment by their paths: listed, and changed by ``--set path=value``."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar, cast

from synthesizer_jax.data.objectives import OBJECTIVES, Objective
from synthesizer_jax.messages import did_you_mean
from synthesizer_jax.models import ZOO, TokenModel
from synthesizer_jax.registry import (
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

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Object = TypeVar("_Object")

WORDS = {"none": None, "true": True, "false": False}


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
    assert dataclasses.is_dataclass(obj) and not isinstance(obj, type)
    cls: type = type(obj)
    defaults = {f.name: f.default for f in dataclasses.fields(obj)}
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


def _nested_objects(value: object, path: str) -> Iterator[tuple[DataclassInstance, str]]:
    """Yields the objects with fields that a value is or holds, and their paths."""
    if isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from _nested_objects(entry, child_path(path, i))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield value, path


def _format_setting(value: object) -> str:
    """Returns a plain value as ``--set`` reads it, an object as the name of its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return f"({', '.join(map(_format_setting, value))})"
    words = {None: "none", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    try:
        text = json.dumps(to_json(value))
    except ValueError:  # a function, which JSON cannot hold
        return format_value(value)
    return value if isinstance(value, str) and _parse_text(value) == value else text


def _parse_text(text: str) -> JSON:
    """Returns the value of an argument: JSON, a literal of Python, a word of `WORDS`, or the text."""
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return WORDS.get(text.lower(), text)


@dataclasses.dataclass
class _Change:
    """A new value, as it was typed (None: the old one), and then changes inside it by field or index."""

    text: str | None = None
    inside: dict[str, _Change] = dataclasses.field(default_factory=dict)


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
    changes = _Change()
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r}: write path.to.field=value")
        *parents, last = path.split(".")
        change = changes
        for name in parents:
            change = change.inside.setdefault(name, _Change())
        change.inside[last] = _Change(text)
    return cast(_Object, _apply(changes, obj, object, ""))


def _apply(change: _Change, value: object, kind: Annotation, path: str) -> object:
    """Returns the value of a field of type `kind` at a path after a change."""
    if change.text is not None:
        value = _parse_value(change.text, kind, path)
    if not change.inside:
        return value
    entries: dict[str, object] = {}
    kinds: dict[str, Annotation] = {}
    missing = "{!r} is inside a plain value, which has no fields"
    if isinstance(value, tuple):
        entries = {str(i): entry for i, entry in enumerate(value)}
        missing = f"{{!r}} is not an index below {len(value)}"
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries, kinds = fields_of(value), field_types(type(value))
        missing = f"{type(value).__name__} has no field {{!r}}"
    for name, inner in change.inside.items():
        place = child_path(path, name)
        if name not in entries:
            fields = f"; its fields: {', '.join(entries)}" if kinds else ""
            hint = did_you_mean(name, entries) + fields
            raise ValueError(f"--set {place}: {missing.format(name)}{hint}")
        entries[name] = _apply(inner, entries[name], kinds.get(name, object), place)
    return tuple(entries.values()) if isinstance(value, tuple) else replace(value, **entries)


def _parse_value(text: str, kind: Annotation, path: str) -> object:
    """Returns the value of an argument for a field of type `kind`."""
    options = union_members(kind) or (kind,)
    value = from_json(_parse_text(text), path)
    if isinstance(value, str) and any(_is_model(option) for option in options):
        value = _named_model(value, path)
    if isinstance(value, str) and any(_is_objective(option) for option in options):
        value = _named_objective(value, path)
    for option in options:
        if matches_type(value, option):
            return float(value) if option is float else value
    given = type(value).__name__ if dataclasses.is_dataclass(value) else text
    given = given if len(given) <= 60 else f"{given[:57]}…"
    raise ValueError(f"--set {path}={given}: expected {format_type(kind)}")


def _is_model(kind: object) -> bool:
    """Returns whether a field of that type holds a whole model."""
    return isinstance(kind, type) and issubclass(kind, TokenModel)


def _is_objective(kind: object) -> bool:
    """Returns whether a field of that type holds an objective."""
    return isinstance(kind, type) and issubclass(kind, Objective)


def _named_objective(name: str, path: str) -> Objective:
    """Returns an objective of the table."""
    if name not in OBJECTIVES:
        raise ValueError(
            f"--set {path}={name}: there is no objective {name!r}{did_you_mean(name, OBJECTIVES)}; "
            f"there are {', '.join(OBJECTIVES)}"
        )
    return OBJECTIVES[name]


def _named_model(name: str, path: str) -> TokenModel:
    """Returns a model of the zoo."""
    if name not in ZOO:
        raise ValueError(
            f"--set {path}={name}: there is no model {name!r}{did_you_mean(name, ZOO)}; "
            "'synthesizer-jax models' lists all"
        )
    return ZOO[name]()
