"""Converts configurations to JSON and back.

A configuration is an unbound Flax module or a frozen dataclass. Classes that may occur in a saved
experiment are decorated with `@register`. `to_json` writes an object of a registered class as
``{"type": name, field: value, ...}``. `from_json` makes an equal object from the JSON data, after
checking that the values have the types of the fields' annotations. `from_json` makes objects only
of registered classes. `from_json` never imports a module that is named in a file.
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

from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.typing import Limit

Class = TypeVar("Class", bound=type)
Config = TypeVar("Config")

JSON: TypeAlias = Any
"""JSON data as `json.loads` returns it."""

Annotation: TypeAlias = Any
"""A type annotation: a class, a union, `Literal[...]`, `tuple[...]` or another special form."""

REGISTRY: dict[str, type] = {}
"""The registered classes by name."""

EXTRA_MESH_AXES: dict[str, tuple[str, ...]] = {}
"""The mesh axes that `sharding.register_mesh_axis` has added, and the logical axes of each.

If a dimension of an array has a logical axis of a mesh axis, the dimension is sharded over the mesh
axis.
"""


def register(cls: Class) -> Class:
    """Decorator that registers a module or frozen dataclass under its class name.

    Raises:
      ValueError: if a class from a different module is already registered under the same name.
    """
    # A class of the same module may be registered again, for example when a notebook cell is run
    # twice.
    registered = REGISTRY.setdefault(cls.__name__, cls)
    if registered.__module__ != cls.__module__:
        raise ValueError(
            f"{cls.__module__}.{cls.__name__} cannot be registered, because "
            f"{registered.__module__} has already registered a class of the same name. Rename one "
            "of the two classes."
        )
    REGISTRY[cls.__name__] = cls
    return cls


def field_names(cls: type) -> list[str]:
    """Returns the names of the configuration fields of a module or dataclass, in order."""
    # This function does not import Flax, because recipes without models do not need it.
    linen = sys.modules.get("flax.linen")
    is_module = linen is not None and issubclass(cls, linen.Module)
    hidden = {"parent", "name"} if is_module else set()
    return [f.name for f in dataclasses.fields(cls) if f.init and f.name not in hidden]


def fields_of(obj: object) -> dict[str, Any]:
    """Returns the configuration fields of a module or dataclass instance."""
    return {name: getattr(obj, name) for name in field_names(type(obj))}


def replace(obj: Config, **changes: object) -> Config:
    """Returns a copy of a module or dataclass in which some fields are changed."""
    return type(obj)(**{**fields_of(obj), **changes})


def to_json(value: object) -> JSON:
    """Converts a value to JSON data. `from_json` makes an equal value from the JSON data.

    Args:
      value: JSON values, tuples, registered dataclasses and unbound registered modules.

    Raises:
      ValueError: if a value has a type that is not supported, or if its class is not registered.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if is_config(value):
        name = type(value).__name__
        if REGISTRY.get(name) is not type(value):
            raise ValueError(f"{name} is not registered. Decorate the class with @register.")
        return {"type": name, **{k: to_json(v) for k, v in fields_of(value).items()}}
    raise ValueError(f"{value!r} cannot be saved as JSON.")


def plain_json(value: Any, *, digits: int = 17) -> JSON:
    """Converts reports with arrays to JSON data.

    Arrays become lists, and NaN and infinities become null. If a dictionary key is a tuple, it
    becomes a string in which spaces separate the entries of the tuple.

    Args:
      value: nested dictionaries, lists, tuples, arrays and JSON values.
      digits: the number of significant digits of floats. By default, floats are not rounded.
    """
    # Arrays and NumPy scalars have the method `tolist`.
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        result = {}
        for key, part in value.items():
            name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            result[name] = plain_json(part, digits=digits)
        return result
    if isinstance(value, list | tuple):
        return [plain_json(part, digits=digits) for part in value]
    return value


def from_json(data: JSON, path: str = "") -> Any:
    """Converts JSON data from `to_json` back to a value.

    Lists become tuples. An unknown field is ignored if its value is null, because another version
    of this package may have had the field.

    Args:
      data: JSON data.
      path: the position of the data in the file, such as ``model.encoder``, for errors.

    Raises:
      ValueError: if a type name or field is unknown, or a value does not have the type of its
        field. The error message contains the position of the value.
    """
    if isinstance(data, list):
        return tuple(from_json(v, child_path(path, i)) for i, v in enumerate(data))
    if not isinstance(data, dict):
        return data
    values = {k: from_json(v, child_path(path, k)) for k, v in data.items() if k != "type"}
    if "type" not in data:
        return values

    where = ""
    if path:
        where = f"{path}: " if len(path) <= 99 else f"{path[:98]}…: "
    type_name = data["type"]
    cls = REGISTRY.get(type_name) if isinstance(type_name, str) else None
    if cls is None:
        raise ValueError(
            f"{where}the saved configuration contains the unknown type {format_value(type_name)}"
            f"{did_you_mean(str(type_name), REGISTRY) or '.'} If it is a class of your own, add "
            "--import PACKAGE or --import FILE.py, so that the class is registered."
        )

    names = field_names(cls)
    for name in sorted(values.keys() - set(names)):
        if values.pop(name) is not None:
            raise ValueError(
                f"{where}{cls.__name__} has no field {format_value(name)}"
                f"{did_you_mean(name, names) or '.'} The configuration was saved by another "
                "version."
            )
    check_types(cls, values, path)
    try:
        return cls(**values)
    except TypeError as error:
        # A `TypeError` means that the data lack a field that has no default.
        raise ValueError(f"{where}{cls.__name__} cannot be created: {error}.") from None


def child_path(path: str, name: str | int) -> str:
    """Returns the position of a field or of an entry of a list, such as ``model.encoder``."""
    return f"{path}.{name}" if path else str(name)


@functools.cache
def field_types(cls: Any, *, limits: bool = False) -> dict[str, Annotation]:
    """Returns the annotations of the fields of a class, or of the arguments of a function.

    Args:
      cls: the class or function.
      limits: whether the annotations include the limits of the values (see `Limit`).
    """
    try:
        return typing.get_type_hints(cls, include_extras=limits)
    except NameError:
        # Type hints cannot be resolved if an annotation contains a name that is imported only for
        # type checkers.
        return {}


def check_fields(obj: object, path: str = "") -> None:
    """Raises a `ValueError` for the first invalid field in a tree of modules and dataclasses."""
    children: Any = enumerate(obj) if isinstance(obj, tuple) else ()
    if is_config(obj):
        check_types(type(obj), fields_of(obj), path)
        children = fields_of(obj).items()
    for name, child in children:
        check_fields(child, child_path(path, name))


def check_types(cls: Any, values: Mapping[str, object], path: str = "") -> None:
    """Raises a `ValueError` for the first value that does not match the annotation of its field.

    Args:
      cls: the class or function with the annotations.
      values: the values by the names of the fields or arguments.
      path: the position of the fields in the file, for the error message.
    """
    for name, value in values.items():
        annotation = field_types(cls, limits=True).get(name, Any)
        if matches_type(value, annotation):
            continue
        plain = field_types(cls)[name]
        if matches_type(value, plain):
            # The value has the right type, so it must be outside its limits.
            expected = f"it must be {format_limits(annotation)}"
        else:
            expected = f"{format_type(plain)} is expected"
        raise ValueError(f"{child_path(path, name)} is {format_value(value)}, but {expected}.")


def format_limits(annotation: Annotation) -> str:
    """Returns the limits of an annotation as text, such as ``1 to 256``.

    If the annotation has no limits, the result is an empty string.
    """
    parts = typing.get_args(annotation)
    limits = [str(part) for part in parts if isinstance(part, Limit)]
    nested = " or ".join(filter(None, map(format_limits, parts)))
    origin: object = typing.get_origin(annotation)
    if nested and origin is tuple:
        nested = f"a tuple of values that are {nested}"
    return " and ".join([*limits, nested] if nested else limits)


def matches_type(value: object, annotation: Annotation) -> bool:
    """Returns whether a value matches an annotation, including the annotation's `Limit`.

    An integer that fits into 32 bits matches `float`, because JAX accepts it as a number. NaN and
    infinities do not match `float`. A value matches a protocol if it has all methods of the
    protocol, and the methods accept the protocol's arguments. If an annotation cannot be checked,
    every value matches it.
    """
    origin: object = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    members = union_members(annotation)
    if members:
        return any(matches_type(value, member) for member in members)
    if origin is Annotated:
        limits = (x for x in arguments[1:] if isinstance(x, Limit))
        return matches_type(value, arguments[0]) and all(value in limit for limit in limits)
    # `bool` is a subclass of `int` in Python, but True and False are not allowed as numbers.
    if annotation in (int, float) and isinstance(value, bool):
        return False
    if annotation is float:
        is_int32 = isinstance(value, int) and abs(value) < 2**31
        return is_int32 or (isinstance(value, float) and math.isfinite(value))
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple and isinstance(value, tuple):
        if arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(matches_type, value, arguments))
    cls = origin or annotation
    if not isinstance(cls, type) or cls in (object, Any):
        return True
    is_protocol = getattr(cls, "_is_protocol", False)
    return _implements(value, cls) if is_protocol else isinstance(value, cls)


def _implements(value: object, protocol: type) -> bool:
    """Returns whether a value has the methods of a protocol, with compatible parameters."""
    methods = {n: m for n, m in vars(protocol).items() if inspect.isfunction(m)}
    for name in methods.keys() - {"__init__", "__subclasshook__"}:
        parameters = list(inspect.signature(methods[name]).parameters.values())[1:]
        try:
            method: Any = value if name == "__call__" else getattr(value, name)
            inspect.signature(method).bind(*(p for p in parameters if p.default is p.empty))
        except (AttributeError, TypeError, ValueError):
            # The value does not have the method, or the parameters of the method are not
            # compatible.
            return False
    # A class has the same methods as its instances, but only an instance implements the protocol.
    return not isinstance(value, type)


def class_names(annotation: Annotation) -> list[str]:
    """Returns the sorted names of the registered classes whose objects match an annotation.

    The list is empty for annotations of numbers, strings and tuples.
    """
    members = union_members(annotation) or (annotation,)
    return sorted(
        name
        for name, cls in REGISTRY.items()
        if any(_is_class_of(cls, member) for member in members)
    )


def _is_class_of(cls: type, annotation: Annotation) -> bool:
    """Returns whether the objects of a class match an annotation.

    The result is False if the annotation is `object`, or neither a class nor a protocol.
    """
    if not isinstance(annotation, type) or annotation is object:
        return False
    if not getattr(annotation, "_is_protocol", False):
        return issubclass(cls, annotation)
    # A protocol with only one method, such as `Schedule.build`, can also match unrelated classes.
    # Within this library, a class that is meant to match is in the same package as the protocol. A
    # user's class can be in any package.
    package, other = (c.__module__.split(".")[:2] for c in (cls, annotation))
    if package[0] == other[0] and package != other:
        return False
    # The check needs only the methods of an object, so an object that is not initialized is enough.
    return _implements(object.__new__(cls), annotation)


def union_members(annotation: Annotation) -> tuple[Annotation, ...]:
    """Returns the members of a union, or an empty tuple for other annotations."""
    origin: object = typing.get_origin(annotation)
    return typing.get_args(annotation) if origin in (types.UnionType, typing.Union) else ()


def format_type(annotation: Annotation) -> str:
    """Returns an annotation as text for error messages and tables."""
    origin: object = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if union_members(annotation):
        return " or ".join(map(format_type, arguments))
    if annotation is type(None):
        return "none"
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return str(annotation).replace(f"{getattr(arguments[0], '__module__', '')}.", "")
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def format_value(value: object) -> str:
    """Returns a value as text with at most 60 characters, for error messages."""
    if is_config(value):
        return f"a {type(value).__name__}"
    formatted = repr(value) if not isinstance(value, dict) else json.dumps(value, default=str)
    # The representation of a module has several lines, which are joined here.
    formatted = " ".join(formatted.split())
    return formatted if len(formatted) <= 60 else f"{formatted[:57]}…"


def is_config(value: object) -> bool:
    """Returns whether a value is a Flax module or an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
