"""From the name of a recipe to an experiment."""

from __future__ import annotations

import ast
import dataclasses
import glob
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from synthesizer_jax.suggestions import suggestion

if TYPE_CHECKING:
    from synthesizer_jax.training.code import Code

Kinds: TypeAlias = type | tuple[type, ...]

DEFAULT = "default"
RECIPES = ("Experiment", "Distillation")
"""The names of the classes that a recipe may return."""

PACKAGE = "synthesizer_jax.recipes"


@dataclasses.dataclass(frozen=True)
class Outline:
    """A public function of a recipe's source that takes no argument.

    Attributes:
      name: the function's.
      summary: the first line of its documentation.
      returns: its return annotation; None: it has none.
    """

    name: str
    summary: str
    returns: str | None


def load_recipe(
    name: str,
    overrides: Sequence[str] = (),
    *,
    kind: Kinds | None = None,
    imports: Sequence[str] = (),
) -> Any:
    """What a recipe returns, of ``FILE.py[:recipe]`` or ``NAME[:recipe]``, with fields overridden.

    Args:
      name: a Python file, one of the recipes that come with the package, or a module of a package of
        your own (``my_package.recipes``); after the colon one of its functions, without it the function
        `default`.
      overrides: assignments such as ``training.steps=200``.
      kind: what the recipe must return: an `Experiment` (None), or for `distill` a `Distillation`.
      imports: packages or files to import first.

    Raises:
      ValueError: no such recipe, field or value.
    """
    return load_with_code(name, overrides, kind=kind, imports=imports)[0]


def load_with_code(
    name: str,
    overrides: Sequence[str] = (),
    *,
    kind: Kinds | None = None,
    imports: Sequence[str] = (),
) -> tuple[Any, Code]:
    """As `load_recipe`; besides, the code of users' own that has to be recorded with a run."""
    check_name(name)
    from synthesizer_jax.training import code
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.training.settings import override

    kinds = (Experiment,) if kind is None else kind if isinstance(kind, tuple) else (kind,)
    place, _, function = name.partition(":")
    used = code.load(imports)
    module, needed = load_module(place)
    experiment = call(module, place, function or DEFAULT, kinds)
    for assignment in overrides:
        experiment = override(experiment, assignment)
    return experiment, used + needed


def check_name(name: str) -> None:
    """Raises a `ValueError` for the name of a recipe that is not there; imports nothing heavy."""
    place, _, function = name.partition(":")
    if place.endswith(".py"):
        if not pathlib.Path(place).is_file():
            raise ValueError(f"there is no recipe file {place}{known()}")
    elif place in packaged():
        found = [outline.name for outline in outlines(source_of(place))]
        if (function or DEFAULT) not in found:
            raise ValueError(absent(place, function or DEFAULT, found))
    elif "." not in place:
        raise ValueError(f"there is no recipe {place!r}{suggestion(place, packaged())}{known()}")


def load_module(place: str) -> tuple[ModuleType, Code]:
    """The module of a recipe, and of its code what has to be recorded with a run."""
    from synthesizer_jax.training import code

    if place.endswith(".py"):
        source = code.read_named(place)
        module, registers = code.execute(source, place)
        return module, code.Code(sources=(source,)) if registers else code.NOTHING
    if place in packaged():
        return importlib.import_module(f"{PACKAGE}.{place}"), code.NOTHING
    return code.import_package(place), code.Code(packages=(place,))


def call(module: ModuleType, place: str, function: str, kinds: tuple[type, ...]) -> Any:
    """What a recipe's function returns.

    Raises:
      ValueError: there is no such function, it takes arguments, or it returns something else.
    """
    from synthesizer_jax.registry import shown
    from synthesizer_jax.training.code import failures_of

    recipes = functions(module, kinds)
    target = vars(module).get(function)
    if not callable(target) or function.startswith("_") or not may_return(target, kinds):
        raise ValueError(absent(place, function, recipes, kinds))
    path, line = module.__file__ or place, getattr(target, "__code__", None)
    where = path if line is None else f"{path}, line {line.co_firstlineno}"
    if needs := [p for p in parameters(target) if p.default is p.empty]:
        raise ValueError(
            f"{where}: the recipe {function!r} takes an argument, {needs[0].name}; give it a default"
        )
    with failures_of(path):
        found = target()
    if not isinstance(found, kinds):
        raise ValueError(
            f"{where}: the recipe {function!r} returns {shown(found)}, expected {named(kinds)}"
        )
    return found


def absent(place: str, function: str, recipes: Sequence[str], kinds: tuple[type, ...] = ()) -> str:
    """The error for a function that is not there."""
    none = f"none that return a {named(kinds)}" if kinds else "none"
    return (
        f"{place} has no recipe {function!r}{suggestion(function, recipes)}; it has: "
        f"{', '.join(recipes) or none}"
    )


def functions(module: ModuleType, kinds: tuple[type, ...]) -> list[str]:
    """A module's own public functions that need no arguments and may return one of `kinds`."""
    return [
        name
        for name, f in vars(module).items()
        if inspect.isfunction(f)
        and f.__module__ == module.__name__
        and not name.startswith("_")
        and not any(p.default is p.empty for p in parameters(f))
        and may_return(f, kinds)
    ]


def may_return(function: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a function's annotation names no class of recipes but these; it may name none."""
    returns = getattr(function, "__annotations__", {}).get("return")
    name = str(getattr(returns, "__name__", returns)).strip("'\"").rpartition(".")[2]
    return name not in RECIPES or name in [kind.__name__ for kind in kinds]


def named(kinds: tuple[type, ...]) -> str:
    """The names of classes."""
    return " or ".join(kind.__name__ for kind in kinds)


def parameters(function: Any) -> list[inspect.Parameter]:
    """A function's parameters, without those that gather any number."""
    gathering = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in inspect.signature(function).parameters.values() if p.kind not in gathering]


def packaged() -> list[str]:
    """Names of the recipes that come with the package."""
    package = importlib.import_module(PACKAGE)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__))


def source_of(name: str) -> str:
    """The source of a packaged recipe."""
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None and spec.origin is not None
    return pathlib.Path(spec.origin).read_text(encoding="utf-8")


def outlines(source: str) -> list[Outline]:
    """The public functions of a source that take no argument, in their order; nothing is run."""
    found = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        own = node.args
        given = [*own.posonlyargs, *own.args]
        required = len(given) > len(own.defaults) or None in own.kw_defaults
        if not required:
            summary = (ast.get_docstring(node) or "").partition("\n")[0]
            returns = None if node.returns is None else ast.unparse(node.returns).strip("'\"")
            found.append(Outline(node.name, summary, returns))
    return found


def complete_recipe(incomplete: str) -> list[str]:
    """What a shell offers for a recipe: packaged names, their functions, files."""
    place, colon, _ = incomplete.partition(":")
    if colon and place in packaged():
        names = [f"{place}:{outline.name}" for outline in outlines(source_of(place))]
    else:
        names = [*packaged(), *map(str, pathlib.Path().glob(f"{glob.escape(incomplete)}*.py"))]
    return [name for name in names if name.startswith(incomplete)]


def known() -> str:
    """The end of an error: what there is."""
    return f"; recipes that come with the package: {', '.join(packaged())}"
