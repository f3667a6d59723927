"""The fields of an experiment by their paths: listed, and changed by ``--set path=value``."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from synthesizer_jax.models import ZOO, TokenModel
from synthesizer_jax.registry import (
    described,
    field_names,
    fields_of,
    fits,
    from_json,
    hints,
    replace,
    shown,
    to_json,
    union,
    within,
)
from synthesizer_jax.suggestions import suggestion
from synthesizer_jax.training.limits import limits_of

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


def settings(obj: Any, path: str = "") -> Iterator[Setting]:
    """Every settable path of an experiment, or of anything in one.

    Args:
      obj: a module or dataclass.
      path: where it stands.
    """
    cls: type = type(obj)
    defaults = {f.name: f.default for f in dataclasses.fields(obj)}
    for name in field_names(cls):
        value, place = getattr(obj, name), within(path, name)
        kind = described(hints(cls).get(name, Any))
        if limits := limits_of(cls, name):
            kind += f": {' or '.join(map(str, limits))}"
        missing = defaults[name] is dataclasses.MISSING
        default = None if missing else typed(defaults[name])
        children = list(inside(value, place))
        yield Setting(place, kind, typed(value), default, not children)
        for child, where in children:
            yield from settings(child, where)


def inside(value: Any, path: str) -> Iterator[tuple[Any, str]]:
    """The objects with fields that a value is or holds, and their paths."""
    if isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from inside(entry, within(path, i))
    elif dataclasses.is_dataclass(value):
        yield value, path


def typed(value: Any) -> str:
    """A plain value as ``--set`` reads it; an object as the name of its class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        return f"({', '.join(map(typed, value))})"
    words = {None: "none", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    try:
        text = json.dumps(to_json(value))
    except ValueError:  # a function, which JSON cannot hold
        return shown(value)
    return value if isinstance(value, str) and read(value) == value else text


def read(text: str) -> Any:
    """The value of a text on the command line: JSON, a word of `WORDS`, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # a number of too many digits, too many brackets
        return WORDS.get(text.lower(), text)


def override(obj: Any, assignment: str) -> Any:
    """A copy with one field changed, from ``path.to.field=value``.

    Args:
      obj: an experiment, or any registered object inside it.
      assignment: dots name fields, numbers index tuples; the value is read by the field's type. A model
        is given by its name in `ZOO`, an object as JSON with its ``type``.

    Raises:
      ValueError: an unknown field or a value that does not fit, with a suggestion.
    """
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment!r}: write path.to.field=value")
    return _override(obj, path.split("."), text, path)


def _override(obj: Any, names: list[str], text: str, path: str) -> Any:
    name, rest = names[0], names[1:]
    if isinstance(obj, tuple):
        if not name.isdecimal() or int(name) >= len(obj):
            raise ValueError(f"--set {path}: {name!r} is not an index below {len(obj)}")
        index = int(name)
        new = _override(obj[index], rest, text, path) if rest else parse(text, object, path)
        return (*obj[:index], new, *obj[index + 1 :])
    if not dataclasses.is_dataclass(obj):
        raise ValueError(f"--set {path}: {name!r} is inside a plain value, which has no fields")
    fields = fields_of(obj)
    if name not in fields:
        raise ValueError(
            f"--set {path}: {type(obj).__name__} has no field {name!r}"
            f"{suggestion(name, fields)}; its fields: {', '.join(fields)}"
        )
    if rest:
        return replace(obj, **{name: _override(fields[name], rest, text, path)})
    cls: Any = type(obj)
    return replace(obj, **{name: parse(text, hints(cls).get(name, object), path)})


def parse(text: str, kind: Any, path: str) -> Any:
    """Reads a command-line value for a field of type `kind`."""
    options = union(kind) or (kind,)
    value = from_json(read(text), path)
    if isinstance(value, str) and any(is_model(option) for option in options):
        value = named_model(value, path)
    for option in options:
        if fits(value, option):
            return float(value) if option is float else value
    given = type(value).__name__ if dataclasses.is_dataclass(value) else text
    given = given if len(given) <= 60 else f"{given[:57]}…"
    raise ValueError(f"--set {path}={given}: expected {described(kind)}")


def is_model(kind: Any) -> bool:
    """Whether a field of that type holds a whole model."""
    return isinstance(kind, type) and issubclass(kind, TokenModel)


def named_model(name: str, path: str) -> TokenModel:
    """A model of the zoo."""
    if name not in ZOO:
        raise ValueError(
            f"--set {path}={name}: there is no model {name!r}{suggestion(name, ZOO)}; "
            "'synthesizer-jax models' lists all"
        )
    return ZOO[name]()
