"""Recipes by name: loading, listing and completing them."""

from __future__ import annotations

import ast
import glob
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeVar, overload

from synthesizer_jax.files import storage_path
from synthesizer_jax.messages import did_you_mean

if TYPE_CHECKING:
    from synthesizer_jax.runs.code import Code
    from synthesizer_jax.training.experiment import Experiment

Kind = TypeVar("Kind")
"""The class of a recipe's result: `Experiment` or `Distillation`."""

DEFAULT = "default"
RECIPES = ("Experiment", "Distillation")
"""The names of the classes whose instances recipes return."""

PACKAGE = "synthesizer_jax.recipes"


class Outline(NamedTuple):
    """A public function in a recipe's source that requires no arguments.

    Attributes:
      name: its name.
      summary: the first line of its docstring.
      returns: its return annotation; None if it has none.
    """

    name: str
    summary: str
    returns: str | None


class _RecipeName(NamedTuple):
    """The two parts of ``MODULE:FUNCTION``."""

    module: str
    function: str


def _split_name(name: str) -> _RecipeName:
    module, _, function = name.partition(":")
    return _RecipeName(module, function or DEFAULT)


@overload
def load_recipe(
    name: str, overrides: Sequence[str] = ..., *, imports: Sequence[str] = ...
) -> Experiment: ...


@overload
def load_recipe(
    name: str,
    overrides: Sequence[str] = ...,
    *,
    kind: type[Kind] | tuple[type[Kind], ...],
    imports: Sequence[str] = ...,
) -> Kind: ...


def load_recipe(
    name: str,
    overrides: Sequence[str] = (),
    *,
    kind: type[object] | tuple[type[object], ...] | None = None,
    imports: Sequence[str] = (),
) -> object:
    """Calls a recipe and returns its result with some fields changed.

    Args:
      name: ``MODULE[:FUNCTION]``. The module is a Python file, one of the recipes in this package, or a
        module of your own package (``my_package.recipes``); the function is `default` if omitted. Or the
        directory of a run, for its experiment, starting from its parameters.
      overrides: assignments such as ``training.steps=200``.
      kind: the class that the recipe must return, or several; None is `Experiment`.
      imports: packages or files to import first.

    Raises:
      ValueError: there is no such recipe or field, or a value is not allowed.
    """
    check_name(name)
    from synthesizer_jax.training.experiment import Experiment

    kinds = (Experiment,) if kind is None else kind if isinstance(kind, tuple) else (kind,)
    return load_with_code(name, overrides, kinds=kinds, imports=imports)[0]


def load_with_code(
    name: str,
    overrides: Sequence[str] = (),
    *,
    kinds: tuple[type[Kind], ...],
    imports: Sequence[str] = (),
) -> tuple[Kind, Code]:
    """As `load_recipe`; also returns the user's code that must be recorded with a run."""
    check_name(name)
    from synthesizer_jax.cli.settings import override
    from synthesizer_jax.runs import code

    imported_code = code.load_user_code(imports)
    if _is_directory(name):
        directory = storage_path(name)
        recipe_code = code.recorded_code(directory)
        result = _start_from(directory, kinds)
    else:
        recipe = _split_name(name)
        module, recipe_code = _load_module(recipe.module)
        result = _call_recipe(module, recipe, kinds)
    return override(result, *overrides), imported_code + recipe_code


def _is_directory(name: str) -> bool:
    """Whether a name is that of a directory, and not of a packaged recipe."""
    return name not in packaged_recipes() and storage_path(name).is_dir()


def _start_from(directory: pathlib.Path, kinds: tuple[type[Kind], ...]) -> Kind:
    """Returns the experiment of a run, starting from its parameters."""
    from synthesizer_jax.training.run_directory import start_from_run

    experiment = start_from_run(directory)
    if not isinstance(experiment, kinds):
        raise ValueError(
            f"{directory} is the directory of a run, where a {_format_classes(kinds)} is expected; give a "
            "recipe"
        )
    return experiment


def check_name(name: str) -> None:
    """Raises a `ValueError` if there is no recipe with this name.

    JAX is not imported, so that the error appears at once. A module of the user's package is not checked.
    """
    if _is_directory(name):
        return
    recipe = _split_name(name)
    if recipe.module.endswith(".py"):
        if not pathlib.Path(recipe.module).is_file():
            raise ValueError(f"there is no recipe file {recipe.module}{_list_packaged()}")
    elif recipe.module in packaged_recipes():
        known = [outline.name for outline in recipe_outlines(recipe_source(recipe.module))]
        if recipe.function not in known:
            raise ValueError(_format_missing(recipe, known))
    elif "." not in recipe.module:
        suggestion = did_you_mean(recipe.module, packaged_recipes())
        raise ValueError(f"there is no recipe {recipe.module!r}{suggestion}{_list_packaged()}")


def _load_module(name: str) -> tuple[ModuleType, Code]:
    """Returns a recipe's module, and the part of its code that must be recorded with a run."""
    from synthesizer_jax.runs import code

    if name.endswith(".py"):
        return code.execute(name)
    if name in packaged_recipes():
        return importlib.import_module(f"{PACKAGE}.{name}"), code.NOTHING
    return code.import_package(name), code.Code(packages=(name,))


def _call_recipe(module: ModuleType, recipe: _RecipeName, kinds: tuple[type[Kind], ...]) -> Kind:
    """Calls a recipe's function.

    Raises:
      ValueError: there is no such function, it requires arguments, or its result is not one of `kinds`.
    """
    from synthesizer_jax.registry import format_value
    from synthesizer_jax.runs.code import convert_errors

    function = vars(module).get(recipe.function)
    if (
        not callable(function)
        or recipe.function.startswith("_")
        or not _may_return(function, kinds)
    ):
        raise ValueError(_format_missing(recipe, _recipe_functions(module, kinds), kinds))
    path = module.__file__ or recipe.module
    place = (
        f"{path}, line {function.__code__.co_firstlineno}" if inspect.isfunction(function) else path
    )
    if required := _required_parameters(function):
        raise ValueError(
            f"{place}: the recipe {recipe.function!r} takes an argument, {required[0]}; give it a default"
        )
    with convert_errors(path):
        result = function()
    if not isinstance(result, kinds):
        raise ValueError(
            f"{place}: the recipe {recipe.function!r} returns {format_value(result)}, expected "
            f"{_format_classes(kinds)}"
        )
    return result


def _format_missing(recipe: _RecipeName, known: Sequence[str], kinds: tuple[type, ...] = ()) -> str:
    """Formats the error for a function that does not exist."""
    none = f"none that return a {_format_classes(kinds)}" if kinds else "none"
    return (
        f"{recipe.module} has no recipe {recipe.function!r}{did_you_mean(recipe.function, known)}; "
        f"it has: {', '.join(known) or none}"
    )


def _recipe_functions(module: ModuleType, kinds: tuple[type, ...]) -> list[str]:
    """Returns the names of the module's own public functions that may be recipes of `kinds`."""
    return [
        name
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and not _required_parameters(function)
        and _may_return(function, kinds)
    ]


def _may_return(function: Callable[..., object], kinds: tuple[type, ...]) -> bool:
    """Returns whether the return annotation is absent, one of `kinds`, or no class of recipes."""
    annotation = inspect.get_annotations(function).get("return")
    full_name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    name = full_name.strip("'\"").rpartition(".")[2]
    return name not in RECIPES or name in [kind.__name__ for kind in kinds]


def _format_classes(classes: tuple[type, ...]) -> str:
    return " or ".join(cls.__name__ for cls in classes)


def _required_parameters(function: Callable[..., object]) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in variadic
    ]


def packaged_recipes() -> list[str]:
    """Returns the names of the recipes in this package."""
    package = importlib.import_module(PACKAGE)
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__))


def recipe_source(name: str) -> str:
    """Returns the source of a packaged recipe."""
    spec = importlib.util.find_spec(f"{PACKAGE}.{name}")
    assert spec is not None and spec.origin is not None
    return pathlib.Path(spec.origin).read_text(encoding="utf-8")


def recipe_outlines(source: str) -> list[Outline]:
    """Returns the public functions that require no arguments, in order; the source is only parsed."""
    outlines = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        arguments = node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        if len(positional) > len(arguments.defaults) or None in arguments.kw_defaults:
            continue  # it requires arguments
        summary = (ast.get_docstring(node) or "").partition("\n")[0]
        returns = None if node.returns is None else ast.unparse(node.returns).strip("'\"")
        outlines.append(Outline(node.name, summary, returns))
    return outlines


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the packaged recipes, their functions, and the files that begin with a string."""
    module, colon, _ = incomplete.partition(":")
    if colon and module in packaged_recipes():
        names = [f"{module}:{outline.name}" for outline in recipe_outlines(recipe_source(module))]
    else:
        files = pathlib.Path().glob(f"{glob.escape(incomplete)}*.py")
        names = [*packaged_recipes(), *map(str, files)]
    return [name for name in names if name.startswith(incomplete)]


def _list_packaged() -> str:
    return f"; recipes in this package: {', '.join(packaged_recipes())}"
