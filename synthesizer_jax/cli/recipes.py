"""Finds and calls recipes by name, and changes fields of their results by assignments."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import glob
import importlib
import importlib.resources
import inspect
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import (
    JSON,
    REGISTRY,
    Annotation,
    check_types,
    child_path,
    class_names,
    field_names,
    field_types,
    fields_of,
    format_limits,
    format_type,
    format_value,
    from_json,
    is_config,
    matches_type,
    replace,
    to_json,
    union_members,
)
from synthesizer_jax.base.typing import AUTO

if TYPE_CHECKING:
    from synthesizer_jax.runs.code import Code
    from synthesizer_jax.training.experiment import Experiment

OTHER_NAMES = {
    **dict.fromkeys(("lora", "peft", "adapter"), "training.adapters=LoRA"),
    "target_modules": "training.adapters.targets",
    "lora_alpha": "training.adapters.alpha",
    "use_dora": "training.adapters.dora=true",
    "use_rslora": "training.adapters.rank_stabilized=true",
    "modules_to_save": "training.adapters.whole",
    "trainable_token_indices": "training.adapters.tokens",
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), "training.adapters.rules"),
    **dict.fromkeys(
        ("bf16", "fp16", "half", "mixed_precision", "precision"), "model.dtype=bfloat16"
    ),
    "epochs": "training.steps",
    "max_steps": "training.steps",
    "num_train_epochs": "training.steps",
    "eval_steps": "evaluation.every",
    "logging_steps": "training.log_every",
    "save_steps": "training.save_every",
    "save_total_limit": "training.keep_latest",
    "gradient_accumulation_steps": "training.micro_batches",
    "gradient_checkpointing": "model.encoder.remat=full",
    "max_grad_norm": "training.optimizer.clip_norm",
    "per_device_train_batch_size": "data.batch_size",
}
"""Maps names of settings in other libraries to the paths that an error message suggests."""

MOST_CHOICES = 16
"""The largest number of allowed classes of a field that an error message lists.

For example, a field that may be any module has too many allowed classes.
"""

Kind = TypeVar("Kind")
"""The class of a recipe's result: `Experiment` or `Distillation`."""

_Object = TypeVar("_Object")

PACKAGE = "synthesizer_jax.recipes"
"""The name of the package as which the folder ``configs/`` is installed."""

WORDS = {"none": None, "true": True, "false": False}
"""Maps words to values. `parse_text` accepts the words in upper case and in lower case."""


def load_recipe(
    name: str, overrides: Sequence[str] = (), *, imports: Sequence[str] = ()
) -> Experiment:
    """Calls a recipe, and returns its experiment with some fields changed.

    See `load_with_code` for the arguments and errors.
    """
    from synthesizer_jax.training.experiment import Experiment

    return load_with_code(name, overrides, kinds=(Experiment,), imports=imports)[0]


def load_with_code(
    name: str,
    overrides: Sequence[str] = (),
    *,
    kinds: tuple[type[Kind], ...],
    imports: Sequence[str] = (),
) -> tuple[Kind, Code]:
    """Calls a recipe, changes fields of its result, and returns the result and the user's code.

    Args:
      name: ``MODULE[:FUNCTION[:ARGUMENT…]]`` or the directory of a run. The module is a Python
        file, one of the recipes in this package, or a module of your own package
        (``my_package.recipes``). If no function is given, `default` is called. The arguments are
        passed to the function. For a directory, the result is the experiment of the run, changed so
        that it starts from the parameters of the run.
      overrides: assignments such as ``training.steps=200``.
      kinds: the classes that the recipe may return.
      imports: packages or files to import first.

    Returns:
      The result of the recipe with its changed fields, and the user's code, which must be recorded
      with a run.

    Raises:
      ValueError: the recipe or a field does not exist, or a value is not allowed.
    """
    from synthesizer_jax.runs import code
    from synthesizer_jax.training.run_directory import start_from_run

    user_code = code.load_user_code(imports)
    module_name, _, function = name.partition(":")
    result: object
    if module_name not in packaged_recipes() and (run := storage_path(name)).is_dir():
        user_code += code.recorded_code(run)
        result = start_from_run(run)
    else:
        module, recipe_code = _load_module(module_name)
        user_code += recipe_code
        result = _call(module, function or "default")
    if not isinstance(result, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} returns {format_value(result)}, expected {expected}.")
    return override(result, *overrides), user_code


def _load_module(name: str) -> tuple[ModuleType, Code]:
    """Returns the module of a recipe, and the code that must be recorded with a run.

    A recipe of this package needs no recorded code.

    Raises:
      ValueError: the module does not exist.
    """
    from synthesizer_jax.runs import code

    if name.endswith(".py"):
        return code.execute(name)
    if name in packaged_recipes():
        return importlib.import_module(f"{PACKAGE}.{name}"), code.NOTHING
    if "." in name:
        return code.import_package(name), code.Code(packages=(name,))
    packaged = packaged_recipes()
    hint = did_you_mean(name, packaged) or "."
    raise ValueError(
        f"There is no recipe and no directory {name!r}{hint} The recipes of this package are "
        f"{', '.join(packaged)}."
    )


def _call(module: ModuleType, call: str) -> object:
    """Calls a function of a recipe's module, and returns its result.

    Args:
      module: the module.
      call: ``FUNCTION[:ARGUMENT…]``. An argument is passed as a string if the annotation of the
        parameter allows a string. Otherwise, `parse_text` converts the argument.

    Raises:
      ValueError: the function does not exist, or does not accept these arguments.
    """
    from synthesizer_jax.runs.code import convert_errors

    name, *arguments = call.split(":")
    path, function = str(module.__file__), vars(module).get(name)
    if name.startswith("_") or not callable(function):
        recipes = [
            other
            for other, value in vars(module).items()
            if inspect.isfunction(value)
            and value.__module__ == module.__name__
            and not other.startswith("_")
        ]
        if not recipes:
            raise ValueError(f"{path} has no recipes.")
        raise ValueError(
            f"{path} has no recipe {name!r}{did_you_mean(name, recipes) or '.'} Its recipes are "
            f"{', '.join(recipes)}."
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
    """Returns the names of this package's modules with recipes, such as ``papers.translation``."""
    (folder,) = map(pathlib.Path, importlib.import_module(PACKAGE).__path__)
    files = (path.relative_to(folder).with_suffix("") for path in folder.rglob("*.py"))
    return sorted(".".join(file.parts) for file in files if file.name != "__init__")


def list_recipes() -> list[dict[str, str]]:
    """Returns the name, the returned class and the summary of each recipe in this package.

    The summary is the first line of the recipe's docstring. The modules are parsed instead of
    imported, which is faster.
    """
    rows = []
    for module in packaged_recipes():
        path = importlib.resources.files(PACKAGE) / f"{module.replace('.', '/')}.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            arguments = (argument.arg.upper() for argument in node.args.args)
            rows.append(
                {
                    "recipe": ":".join([module, node.name, *arguments]),
                    "returns": ast.unparse(node.returns) if node.returns else "",
                    "summary": (ast.get_docstring(node) or "").partition("\n")[0],
                }
            )
    return rows


def complete_recipe(incomplete: str) -> list[str]:
    """Returns the recipes, functions of recipes, and files whose names begin with a string."""
    if ":" in incomplete:
        names = [row["recipe"] for row in list_recipes()]
    else:
        files = pathlib.Path().glob(f"{glob.escape(incomplete)}*.py")
        names = [*packaged_recipes(), *map(str, files)]
    return [name for name in names if name.startswith(incomplete)]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A field of a recipe that ``--set`` can change.

    Attributes:
      path: the path of the field, such as ``training.optimizer.learning_rate.warmup_steps``.
      type: the annotated type, followed by the limits of the type if there are any.
      value: the current value, as it is written after ``--set path=``. An object with fields is
        shown as the name of its class.
      default: the default value in the same form as `value`, or `None` if the field has no default.
      leaf: whether the value is plain, which means that it has no fields.
    """

    path: str
    type: str
    value: str
    default: str | None
    leaf: bool


def settings(obj: object, path: str = "") -> Iterator[Setting]:
    """Yields every field of an experiment, or of an object inside it, that ``--set`` can change.

    Args:
      obj: a Flax module or dataclass.
      path: the path of the object in the experiment. The path is empty if `obj` is the experiment
        itself.
    """
    cls: Any = type(obj)
    defaults = {f.name: f.default for f in dataclasses.fields(cls)}
    for name in field_names(cls):
        value = getattr(obj, name)
        field_path = child_path(path, name)
        kind = format_type(field_types(cls).get(name, object))
        limits = format_limits(field_types(cls, limits=True).get(name))
        if limits:
            kind += f": {limits}"
        has_default = defaults[name] is not dataclasses.MISSING
        default = _format_setting(defaults[name]) if has_default else None
        children = list(_nested_objects(value, field_path))
        yield Setting(field_path, kind, _format_setting(value), default, not children)
        for child, child_at in children:
            yield from settings(child, child_at)


def _nested_objects(value: object, path: str) -> Iterator[tuple[object, str]]:
    """Yields the objects with fields that a value contains, and the path of each object.

    If the value is a tuple, the objects are its entries. If the value is not a tuple, the only
    object is the value itself.
    """
    if isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from _nested_objects(entry, child_path(path, i))
    elif is_config(value):
        yield value, path


def _format_setting(value: object) -> str:
    """Returns a plain value in the form that ``--set`` reads, or the name of an object's class."""
    if is_config(value):
        return type(value).__name__
    if isinstance(value, tuple) and any(map(is_config, value)):
        return f"({', '.join(map(_format_setting, value))})"
    try:
        text = json.dumps(to_json(value))
    except ValueError:  # JSON cannot represent a function
        return format_value(value)
    if isinstance(value, str) and parse_text(value) == value:
        return value
    return "none" if value is None else text


def parse_text(text: str) -> JSON:
    """Converts a string from the command line to the value that it represents.

    The function tries to read the string as JSON, then as a literal of Python, and then as a word
    of `WORDS`. If the string has none of these forms, the value is the string itself.
    """
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return read(text)
    return WORDS.get(text.lower(), text)


def override(obj: _Object, *assignments: str) -> _Object:
    """Returns a copy of an object with some fields changed by assignments ``path.to.field=value``.

    The order of assignments to different fields does not matter, because an object is built and
    checked after all of its fields have the new values. If a field is assigned twice, the last
    value counts.

    Args:
      obj: an experiment, or any registered object inside it.
      assignments: the assignments, each of which consists of a path and a value. In a path, dots
        separate the names of fields, and numbers are indices of tuples. A value is JSON or a
        literal of Python, and must fit the type of the field. A model may be given by its name in
        `ZOO`, which sets the dtype of the model to ``auto``. An objective may be given by its name
        in `OBJECTIVES`. Any object may be given by the name of its class, or as JSON whose entry
        ``type`` is the name of its class.

    Raises:
      ValueError: a field is unknown, or a value does not fit. The message suggests what to write.
    """
    # `changes` is a tree of nested dictionaries, whose keys are the parts of the paths. The new
    # value of a path is stored under the key None.
    changes: dict[str | None, Any] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r}: Write path.to.field=value.")
        *parents, last = path.split(".")
        inner = changes
        for name in parents:
            inner = inner.setdefault(name, {})
        inner[last] = {None: text}
    return cast(_Object, _apply(changes, obj, object, ""))


def _apply(changes: dict[str | None, Any], value: object, kind: Annotation, path: str) -> object:
    """Returns the new value of a field, after changes of the field or of fields inside its value.

    Args:
      changes: a tree of changes; see `override`.
      value: the value of the field before the changes.
      kind: the annotated type of the field.
      path: the path of the field, for error messages.
    """
    if None in changes:
        value = _parse_value(changes.pop(None), kind, path)
    if not changes:
        return value
    # `entries` contains the fields or entries of the value by name or index, and `kinds` contains
    # the types of the fields.
    entries: dict[str, object] = {}
    kinds: dict[str, Annotation] = {}
    if isinstance(value, tuple):
        entries = {str(i): entry for i, entry in enumerate(value)}
    elif is_config(value):
        cls: type = type(value)
        entries, kinds = fields_of(value), field_types(cls)
    for key, inner in changes.items():
        name = str(key)
        if name not in entries:
            raise ValueError(_unknown_field(value, name, path))
        entries[name] = _apply(
            inner, entries[name], kinds.get(name, object), child_path(path, name)
        )
    return tuple(entries.values()) if isinstance(value, tuple) else replace(value, **entries)


def _unknown_field(value: object, name: str, path: str) -> str:
    """Returns the error message for a value that has no field of a given name, with a suggestion.

    Args:
      value: an object with fields, a tuple, or a plain value.
      name: the name of a field, or the index of a tuple's entry.
      path: the path of the value.
    """
    problem = f"--set {child_path(path, name)}: "
    if isinstance(value, tuple):
        return f"{problem}{name!r} is not an index below {len(value)}."
    if value is None:
        return f"{problem}{path} is none. First set {path} to the name of a class."
    if not is_config(value):
        return f"{problem}{name!r} is inside a plain value, which has no fields."
    problem += f"{type(value).__name__} has no field {name!r}"
    # Find fields with the same name in objects inside the value.
    deeper = [field.path for field in settings(value, path) if field.path.endswith(f".{name}")]
    if deeper:
        return f"{problem}. Use {' or '.join(deeper[:3])}."
    if name in OTHER_NAMES:
        return f"{problem}. Use {OTHER_NAMES[name]}."
    fields = fields_of(value)
    if not fields:
        return f"{problem}. It has no fields."
    hint = did_you_mean(name, fields) or "."
    return f"{problem}{hint} Its fields are {', '.join(fields)}."


def _parse_value(text: str, kind: Annotation, path: str) -> object:
    """Converts a string to a value for a field of type `kind`.

    Raises:
      ValueError: the string cannot be converted to the type of the field. The message suggests what
        to write.
    """
    from synthesizer_jax.data.objectives import OBJECTIVES, Objective
    from synthesizer_jax.models import ZOO, TokenModel

    options = union_members(kind) or (kind,)
    value = from_json(parse_text(text), path)
    if isinstance(value, str) and _allows_class(options, TokenModel):
        model = _look_up(value, ZOO, "model", path, "'synthesizer-jax models' lists all models.")
        value = replace(model(), dtype=AUTO)
    elif isinstance(value, str) and _allows_class(options, Objective):
        remedy = f"The objectives are {', '.join(OBJECTIVES)}."
        value = _look_up(value, OBJECTIVES, "objective", path, remedy)
    elif (
        isinstance(value, str)
        and value in REGISTRY
        and not any(matches_type(value, option) for option in options)
    ):
        value = from_json({"type": value}, path)
    for option in options:
        if matches_type(value, option):
            return float(value) if option is float else value

    given = type(value).__name__ if is_config(value) else text
    if len(given) > 60:
        given = f"{given[:57]}…"
    expected, choices = format_type(kind), class_names(kind)
    hint = did_you_mean(given, choices) or "."
    if len(choices) <= MOST_CHOICES and set(choices) - set(expected.split(" or ")):
        hint += f" Choose one of {', '.join(choices)}."
    raise ValueError(f"--set {path}={given}: expected {expected}{hint}")


def _allows_class(options: Sequence[Annotation], base: type) -> bool:
    """Returns whether any of several types is a given class, or a subclass of it."""
    return any(isinstance(option, type) and issubclass(option, base) for option in options)


def _look_up(name: str, table: Mapping[str, Any], noun: str, path: str, remedy: str) -> Any:
    """Returns the entry with a given name from a table.

    Args:
      name: the name of the entry.
      table: the entries by name.
      noun: a noun for the entries, for the error message.
      path: the path of the field, for the error message.
      remedy: the last sentence of the error message.

    Raises:
      ValueError: the table has no entry with this name.
    """
    if name not in table:
        hint = did_you_mean(name, table) or "."
        raise ValueError(f"--set {path}={name}: There is no {noun} {name!r}{hint} {remedy}")
    return table[name]
