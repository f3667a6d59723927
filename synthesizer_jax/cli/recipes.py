"""From the name of a recipe to an experiment."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import pkgutil
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from synthesizer_jax.registry import suggestion
from synthesizer_jax.training.experiment import Experiment, override

DEFAULT = "default"


def load_recipe(name: str, overrides: Sequence[str] = (), *, kind: type = Experiment) -> Any:
    """What a recipe returns, of ``FILE.py[:recipe]`` or ``NAME[:recipe]``, with fields overridden.

    Args:
      name: a Python file, or one of the recipes that come with the package; after the colon one of
        its functions, without it the function `default`.
      overrides: assignments such as ``training.steps=200``.
      kind: what the recipe must return: an `Experiment`, or for `distill` a `Distillation`.

    Raises:
      ValueError: no such recipe, field or value.
    """
    place, _, function = name.partition(":")
    module = load_module(place)
    recipes = functions(module, kind)
    function = function or DEFAULT
    if function not in recipes:
        raise ValueError(
            f"{place} has no recipe {function!r}{suggestion(function, recipes)}; it has: "
            f"{', '.join(recipes) or f'none that return a {kind.__name__}'}"
        )
    experiment = recipes[function]()
    for assignment in overrides:
        experiment = override(experiment, assignment)
    return experiment


def load_module(place: str) -> ModuleType:
    """A recipe file by its path, or a recipe of the package by its name."""
    path = pathlib.Path(place)
    if path.suffix == ".py":
        if not path.is_file():
            raise ValueError(f"there is no recipe file {place}{known()}")
        spec = importlib.util.spec_from_file_location(f"recipe_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    if place not in packaged():
        raise ValueError(f"there is no recipe {place!r}{suggestion(place, packaged())}{known()}")
    return importlib.import_module(f"synthesizer_jax.recipes.{place}")


def packaged() -> list[str]:
    """Names of the recipes that come with the package."""
    package = importlib.import_module("synthesizer_jax.recipes")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__))


def known() -> str:
    """The end of an error: what there is."""
    return f"; recipes that come with the package: {', '.join(packaged())}"


def functions(module: ModuleType, kind: type = Experiment) -> dict[str, Callable[[], Any]]:
    """A module's own public functions that need no arguments and return a `kind`."""
    return {
        name: f
        for name, f in vars(module).items()
        if inspect.isfunction(f)
        and f.__module__ == module.__name__
        and not name.startswith("_")
        and f.__annotations__.get("return") in (kind, kind.__name__)
    }
