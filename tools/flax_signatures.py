"""Constructors of Flax modules in the reference, which Flax makes of their fields when it is imported.

Griffe reads the source of the package and does not import it, so that it sees no constructor of a Linen
module, and of an NNX module only the one of `LinenModule`, whose arguments are the fields of another class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import griffe

LINEN_MODULE = "flax.linen.Module"
NNX_MODULE = "synthesizer_jax.nnx.module.LinenModule"


class FlaxSignatures(griffe.Extension):
    """Gives every Linen and NNX module of the package the constructor that it has when it is imported."""

    def __init__(self) -> None:
        self.linen_classes: dict[str, str] = {}
        """The expressions of the keyword `linen_class` of NNX classes, by the path of the class."""
        self.keyword_only: set[str] = set()
        """The paths of classes whose own fields are arguments by keyword only."""

    def on_class_instance(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Notes the Linen class of an NNX class, and whether fields are given by keyword only."""
        for keyword in node.keywords if isinstance(node, ast.ClassDef) else ():
            value = ast.unparse(keyword.value)
            if keyword.arg == "linen_class":
                self.linen_classes[cls.path] = value
            elif keyword.arg == "kw_only" and value == "True":
                self.keyword_only.add(cls.canonical_path)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Sets the constructors when all modules of the package are known."""
        classes = list(_classes(pkg))
        for cls in classes:
            if _is_linen(cls) and "__init__" not in cls.members:
                _set_constructor(cls, self._fields(cls))
        added = [
            parameter
            for parameter in pkg.modules_collection[NNX_MODULE].members["__init__"].parameters
            if parameter.kind is griffe.ParameterKind.keyword_only
        ]
        for cls in classes:
            if name := self.linen_classes.get(cls.path):
                module, _, attribute = name.rpartition(".")
                linen = pkg.modules_collection[f"{cls.module.resolve(module)}.{attribute}"]
                names = {parameter.name for parameter in added}
                fields = [field for field in self._fields(linen) if field.name not in names]
                _set_constructor(cls, [*fields, *added])

    def _fields(self, cls: griffe.Class) -> list[griffe.Parameter]:
        """Returns the fields of a Linen module as parameters; those of its bases come first."""
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
    """Yields the classes that the modules of a package define."""
    for member in module.members.values():
        if member.is_alias:
            continue
        if member.is_module:
            yield from _classes(member)
        elif member.is_class:
            yield member


def _ancestry(cls: griffe.Class) -> list[griffe.Class]:
    """Returns a class and its bases in this package, in the order in which attributes are looked up."""
    return [cls, *cls.mro()]


def _is_linen(cls: griffe.Class) -> bool:
    """Whether the fields of the constructor are known: no base but `nn.Module` is a class of Flax."""
    bases = {
        base if isinstance(base, str) else base.canonical_path
        for ancestor in _ancestry(cls)
        for base in ancestor.bases
    }
    return {base for base in bases if base.startswith("flax.")} == {LINEN_MODULE}


def _set_constructor(cls: griffe.Class, parameters: list[griffe.Parameter]) -> None:
    """Adds an `__init__` with these parameters to a class."""
    this = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    constructor = griffe.Function(
        "__init__", parent=cls, parameters=griffe.Parameters(this, *parameters)
    )
    cls.set_member("__init__", constructor)
