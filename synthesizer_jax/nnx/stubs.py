"""Writes `mixers.pyi` and `models.pyi`, from which editors and type checkers know the NNX classes.

``python -m synthesizer_jax.nnx.stubs`` after a change of a Linen class' fields or methods.
"""

from __future__ import annotations

import ast
import builtins
import collections
import dataclasses
import importlib
import inspect
import json
import pathlib
import sys
import textwrap
import types
from typing import Any

import flax.linen as linen

from synthesizer_jax.models import Stack
from synthesizer_jax.nnx import forms, mixers, models, module

PUBLIC = (
    "typing",
    "synthesizer_jax.attention",
    "synthesizer_jax.alignments",
    "synthesizer_jax.initializers",
    "synthesizer_jax.mixers",
    "synthesizer_jax.models",
    "synthesizer_jax.nnx.forms",
)
"""Where a stub imports names from: the first of these modules that has the name."""


def stub(source: types.ModuleType) -> str:
    """The stub of a module of NNX classes.

    Args:
      source: `mixers` or `models`.
    """
    classes = [v for v in vars(source).values() if getattr(v, "__module__", "") == source.__name__]
    bodies = [class_stub(cls) for cls in classes]
    scopes = [vars(forms), vars(module)]
    for cls in classes:
        scopes += [vars(sys.modules[c.__module__]) for c in cls._linen_class.__mro__]
    known = {*vars(builtins), *(cls.__name__ for cls in classes)}
    nodes = [node for body in bodies for node in ast.walk(ast.parse(body))]
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    made = '"""Made by `python -m synthesizer_jax.nnx.stubs`; do not edit."""'
    return "\n".join([made, "", imports(names - known, scopes), "", *bodies])


def class_stub(cls: type[Any]) -> str:
    """A class with its documentation, fields, constructor and methods."""
    constructor = inspect.signature(cls)
    receiver = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    constructor = constructor.replace(parameters=[receiver, *constructor.parameters.values()])
    fields = {f.name: f for f in dataclasses.fields(cls._linen_class)}
    attributes = [
        f"{name}: {parameter.annotation}"
        for name, parameter in constructor.parameters.items()
        if name in fields and parameter.annotation != Stack.__name__  # a model's is its parameters
    ]
    body = [docstring(cls), "", *attributes, function_stub("__init__", constructor, "None", None)]
    for name in cls._methods:
        function = getattr(cls, name)
        signature = inspect.signature(function)
        result = signature.return_annotation
        result = "Any" if result is inspect.Signature.empty else result
        body.append(function_stub(name, signature, result, docstring(function)))
    (base,) = cls.__bases__
    return (
        f"class {cls.__name__}({base.__name__}):\n"
        + textwrap.indent("\n".join(body), "    ")
        + "\n"
    )


def function_stub(name: str, signature: inspect.Signature, result: str, doc: str | None) -> str:
    """A method, one parameter a line."""
    lines: list[str] = []
    star = False
    for p in signature.parameters.values():
        if p.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            lines.append("*")
            star = True
        prefix = "**" if p.kind is inspect.Parameter.VAR_KEYWORD else ""
        annotated = prefix + p.name
        if p.annotation is not inspect.Parameter.empty:
            annotated += f": {p.annotation}"
        if p.default is not inspect.Parameter.empty:
            annotated += f" = {default(p.default)}"
        lines.append(annotated)
    arguments = "".join(f"    {line},\n" for line in lines)
    end = " ..." if doc is None else "\n" + textwrap.indent(doc, "    ")
    return f"def {name}(\n{arguments}) -> {result}:{end}"


def default(value: Any) -> str:
    """A default value as it is written."""
    if isinstance(value, tuple):
        return f"({', '.join(map(default, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, linen.Module):
        return f"{type(value).__name__}()" if value == type(value)() else "..."
    return json.dumps(value) if isinstance(value, str) else repr(value)


def docstring(documented: Any) -> str:
    """The documentation as a literal."""
    text = inspect.getdoc(documented) or ""
    return f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'


def imports(names: set[str], scopes: list[dict[str, Any]]) -> str:
    """The statements that import names which the classes' own modules know."""
    lines, members = set(), collections.defaultdict(set)
    for name in names:
        value = next(scope[name] for scope in scopes if name in scope)
        if isinstance(value, types.ModuleType):
            package, _, last = value.__name__.rpartition(".")
            if last != name:
                lines.add(f"import {value.__name__} as {name}")
            elif package:
                members[package].add(name)
            else:
                lines.add(f"import {name}")
        else:
            members[home(name, value)].add(name)
    for source, found in members.items():
        lines.add(f"from {source} import {', '.join(sorted(found))}")
    own = {line for line in lines if line.startswith("from synthesizer_jax")}
    standard = {line for line in lines if line.startswith("from typing")}
    groups = [standard, lines - own - standard, own]
    order = lambda line: (line.startswith("from"), line)
    return "\n\n".join("\n".join(sorted(group, key=order)) for group in groups if group)


def home(name: str, value: Any) -> str:
    """The module to import a name from."""
    for candidate in (*PUBLIC, getattr(value, "__module__", "builtins")):
        if getattr(importlib.import_module(candidate), name, None) is value:
            return candidate
    raise ValueError(f"no module of PUBLIC has {name}; add the one that does")


def main() -> None:
    """Writes both stubs beside their modules."""
    for source in (mixers, models):
        path = pathlib.Path(str(source.__file__)).with_suffix(".pyi")
        path.write_text(stub(source))


if __name__ == "__main__":
    main()
