"""Recipes by name: loading, listing and completing them."""

from __future__ import annotations

import ast
import glob
import importlib
import importlib.resources
import inspect
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.messages import did_you_mean

if TYPE_CHECKING:
    from synthesizer_jax.runs.code import Code
    from synthesizer_jax.training.experiment import Experiment

Kind = TypeVar("Kind")
"""The class of a recipe's result: `Experiment` or `Distillation`."""

PACKAGE = "synthesizer_jax.recipes"


def load_recipe(name: str, overrides: Sequence[str] = (), *, imports: Sequence[str] = ()) -> Experiment:
    """Calls a recipe and returns its experiment with some fields changed; see `load_with_code`."""
    from synthesizer_jax.training.experiment import Experiment

    return load_with_code(name, overrides, kinds=(Experiment,), imports=imports)[0]


def load_with_code(
    name: str,
    overrides: Sequence[str] = (),
    *,
    kinds: tuple[type[Kind], ...],
    imports: Sequence[str] = (),
) -> tuple[Kind, Code]:
    """Calls a recipe; returns its result with some fields changed, and the code to record with a run.

    Args:
      name: ``MODULE[:FUNCTION[:ARGUMENT…]]``. The module is a Python file, one of the recipes in this
        package, or a module of your own package (``my_package.recipes``); the function is `default` if
        omitted, and called with the arguments, which are texts. Or the directory of a run, for its
        experiment, starting from its parameters.
      overrides: assignments such as ``training.steps=200``.
      kinds: the classes that the recipe may return.
      imports: packages or files to import first.

    Raises:
      ValueError: there is no such recipe or field, or a value is not allowed.
    """
    from synthesizer_jax.base.registry import format_value
    from synthesizer_jax.cli.settings import override
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.run_directory import start_from_run

    own = code.load_user_code(imports)
    place, _, function = name.partition(":")
    result: object
    if place not in packaged_recipes() and storage_path(name).is_dir():
        own += code.recorded_code(storage_path(name))
        result = start_from_run(storage_path(name))
    else:
        module, recipe_code = _load_module(place)
        own += recipe_code
        result = _call(module, function or "default")
    if not isinstance(result, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} returns {format_value(result)}, expected {expected}")
    return override(result, *overrides), own


def _load_module(name: str) -> tuple[ModuleType, Code]:
    """Returns a recipe's module, and the part of its code that must be recorded with a run."""
    from synthesizer_jax.runs import code

    if name.endswith(".py"):
        return code.execute(name)
    if name in packaged_recipes():
        return importlib.import_module(f"{PACKAGE}.{name}"), code.NOTHING
    if "." in name:
        return code.import_package(name), code.Code(packages=(name,))
    packaged = packaged_recipes()
    raise ValueError(
        f"there is no recipe {name!r}{did_you_mean(name, packaged)} (nor a run in a directory of that "
        f"name); recipes in this package: {', '.join(packaged)}"
    )


def _call(module: ModuleType, call: str) -> object:
    """Calls a recipe's function; ``call`` is its name, and arguments after colons.

    Arguments are texts, or what `parse_text` makes of them where the annotation is of another type.
    """
    from synthesizer_jax.base.registry import check_types, field_types, matches_type
    from synthesizer_jax.cli.settings import parse_text
    from synthesizer_jax.runs.code import convert_errors

    name, *arguments = call.split(":")
    path, function = str(module.__file__), vars(module).get(name)
    if name.startswith("_") or not callable(function):
        known = [
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not other.startswith("_")
        ]
        raise ValueError(
            f"{path} has no recipe {name!r}{did_you_mean(name, known)}; it has: "
            f"{', '.join(known) or 'none'}"
        )
    try:
        bound = inspect.signature(function).bind(*arguments)
        for argument, text in bound.arguments.items():
            if not matches_type(text, field_types(function, limits=True).get(argument, str)):
                bound.arguments[argument] = parse_text(str(text))
        check_types(function, bound.arguments, name)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    with convert_errors(path):
        return function(*bound.args)


def packaged_recipes() -> list[str]:
    """Returns the names of the recipes in this package."""
    (folder,) = map(pathlib.Path, importlib.import_module(PACKAGE).__path__)
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return sorted(".".join(file.parts) for file in files if file.name != "__init__")


def list_recipes() -> list[dict[str, str]]:
    """Returns what each packaged recipe is called, returns and is; their sources are only parsed."""
    found = []
    for module in packaged_recipes():
        path = importlib.resources.files(PACKAGE) / f"{module.replace('.', '/')}.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                arguments = (a.arg.upper() for a in node.args.args)
                found.append(
                    {
                        "recipe": ":".join([module, node.name, *arguments]),
                        "returns": ast.unparse(node.returns) if node.returns else "",
                        "summary": (ast.get_docstring(node) or "").partition("\n")[0],
                    }
                )
    return found


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the packaged recipes, their functions, and the files that begin with a string."""
    if ":" in incomplete:
        names = [row["recipe"] for row in list_recipes()]
    else:
        files = pathlib.Path().glob(f"{glob.escape(incomplete)}*.py")
        names = [*packaged_recipes(), *map(str, files)]
    return [name for name in names if name.startswith(incomplete)]
