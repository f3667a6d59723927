"""The fields of an experiment by their paths: listed, and changed by ``--set path=value``."""

from __future__ import annotations

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
    format_type,
    format_value,
    from_json,
    matches_type,
    replace,
    to_json,
    union_members,
)
from synthesizer_jax.training.limits import limits_of

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
        if limits := limits_of(cls, name):
            kind += f": {' or '.join(map(str, limits))}"
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
    """Returns the value of an argument: JSON, a word of `WORDS`, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of too many digits, too many brackets
        return WORDS.get(text.lower(), text)


def override(obj: _Object, assignment: str) -> _Object:
    """Returns a copy with one field changed, from ``path.to.field=value``.

    Args:
      obj: an experiment, or any registered object inside it.
      assignment: dots name fields, numbers index tuples; the value is read by the field's type. A model
        is given by its name in `ZOO`, an objective by its name in `OBJECTIVES`, any object as JSON with
        its ``type``.

    Raises:
      ValueError: an unknown field or a value that does not fit, with a suggestion.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment!r}: write path.to.field=value")
    return cast(_Object, _override(obj, path.split("."), text, path=path))


def _override(obj: object, names: list[str], text: str, *, path: str) -> object:
    name, rest = names[0], names[1:]
    if isinstance(obj, tuple):
        if not name.isdecimal() or int(name) >= len(obj):
            raise ValueError(f"--set {path}: {name!r} is not an index below {len(obj)}")
        index = int(name)
        new = (
            _override(obj[index], rest, text, path=path)
            if rest
            else _parse_value(text, object, path)
        )
        return (*obj[:index], new, *obj[index + 1 :])
    if not dataclasses.is_dataclass(obj) or isinstance(obj, type):
        raise ValueError(f"--set {path}: {name!r} is inside a plain value, which has no fields")
    fields = fields_of(obj)
    if name not in fields:
        raise ValueError(
            f"--set {path}: {type(obj).__name__} has no field {name!r}"
            f"{did_you_mean(name, fields)}; its fields: {', '.join(fields)}"
        )
    if rest:
        return replace(obj, **{name: _override(fields[name], rest, text, path=path)})
    cls = type(obj)
    return replace(obj, **{name: _parse_value(text, field_types(cls).get(name, object), path)})


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
