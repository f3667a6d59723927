"""Adds the constructors of Flax modules to the API reference.

Flax makes the constructor of a module from its fields when the module is imported. Griffe reads the
source of the package instead of importing it, so it finds no constructors for Linen modules. For
NNX modules, Griffe finds only the constructor of `LinenModule`, whose arguments are the fields of
another class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import griffe

LINEN_MODULE = "flax.linen.Module"
NNX_MODULE = "synthesizer_jax.nnx.module.LinenModule"


class FlaxSignatures(griffe.Extension):
    """Adds the constructors that Flax creates for Linen and NNX modules at import time."""

    def __init__(self) -> None:
        self.linen_classes: dict[str, str] = {}
        """The value of the keyword `linen_class` of each NNX class, by the path of the class."""
        self.keyword_only: set[str] = set()
        """The paths of the classes whose own fields are keyword-only arguments."""

    def on_class_instance(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Records a class's `linen_class`, and whether the fields of the class are keyword-only."""
        for keyword in node.keywords if isinstance(node, ast.ClassDef) else ():
            value = ast.unparse(keyword.value)
            if keyword.arg == "linen_class":
                self.linen_classes[cls.path] = value
            elif keyword.arg == "kw_only" and value == "True":
                self.keyword_only.add(cls.canonical_path)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Sets all constructors, after Griffe has read all modules of the package."""
        classes = list(_classes(pkg))
        for cls in classes:
            if _is_linen(cls) and "__init__" not in cls.members:
                _set_constructor(cls, self._fields(cls))

        # The constructor of an NNX module takes the fields of its Linen module and these additional
        # arguments.
        added = [
            parameter
            for parameter in pkg.modules_collection[NNX_MODULE].members["__init__"].parameters
            if parameter.kind is griffe.ParameterKind.keyword_only
        ]
        names = {parameter.name for parameter in added}
        for cls in classes:
            if cls.path in self.linen_classes:
                module, _, attribute = self.linen_classes[cls.path].rpartition(".")
                linen = pkg.modules_collection[f"{cls.module.resolve(module)}.{attribute}"]
                fields = [field for field in self._fields(linen) if field.name not in names]
                _set_constructor(cls, [*fields, *added])

    def _fields(self, cls: griffe.Class) -> list[griffe.Parameter]:
        """Returns the fields of a Linen module as parameters.

        The fields of base classes come first.
        """
        fields = {}
        for ancestor in reversed(_ancestry(cls)):
            kind = griffe.ParameterKind.positional_or_keyword
            if ancestor.canonical_path in self.keyword_only:
                kind = griffe.ParameterKind.keyword_only
            for member in ancestor.members.values():
                is_field = member.is_attribute and "instance-attribute" in member.labels
                if is_field and member.annotation is not None and "property" not in member.labels:
                    fields[member.name] = griffe.Parameter(
                        member.name, annotation=member.annotation, kind=kind, default=member.value
                    )
        return sorted(
            fields.values(), key=lambda field: field.kind is griffe.ParameterKind.keyword_only
        )


def _classes(module: griffe.Module) -> Iterator[griffe.Class]:
    """Yields all classes that are defined in a package's modules."""
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            yield from _classes(member)
        elif member.is_class:
            yield member


def _ancestry(cls: griffe.Class) -> list[griffe.Class]:
    """Returns a class and its base classes in this package, in method resolution order."""
    return [cls, *cls.mro()]


def _is_linen(cls: griffe.Class) -> bool:
    """Returns whether all fields of a Linen module are known.

    All fields are known if `nn.Module` is the only Flax class from which the module inherits.
    """
    bases = {
        base if isinstance(base, str) else base.canonical_path
        for ancestor in _ancestry(cls)
        for base in ancestor.bases
    }
    return {base for base in bases if base.startswith("flax.")} == {LINEN_MODULE}


def _set_constructor(cls: griffe.Class, parameters: list[griffe.Parameter]) -> None:
    """Adds an `__init__` with the given parameters to a class."""
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    constructor = griffe.Function(
        "__init__", parent=cls, parameters=griffe.Parameters(this, *parameters)
    )
    cls.set_member("__init__", constructor)
