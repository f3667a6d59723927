"""Users' code that a run needs, recorded in its directory.

A run's directory may contain ``code/`` with the names of packages and copies of recipe files. It is data:
nothing in it is imported or executed; a command that loads the run says what to pass with ``--import``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import pathlib
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from synthesizer_jax.base.files import describing, storage_path, write_atomic
from synthesizer_jax.base.registry import EXTRA_MESH_AXES, REGISTRY

CODE_DIRECTORY = "code"
IMPORTS_FILE = "imports.json"

_imported: set[str] = set()  # packages


class Source(NamedTuple):
    """The name of a Python file, such as ``recipe.py``, and its content."""

    name: str
    text: bytes


@dataclasses.dataclass(frozen=True)
class Code:
    """The packages to import, and the files to execute after them, before a run can be loaded."""

    packages: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def __add__(self, other: Code) -> Code:
        """Returns both; a file of `other` replaces one of the same name."""
        sources = {source.name: source for source in (*self.sources, *other.sources)}
        return Code(tuple(dict.fromkeys((*self.packages, *other.packages))), tuple(sources.values()))


NOTHING = Code()

_executed: dict[Source, tuple[ModuleType, Code]] = {}


def load_user_code(names: Sequence[str]) -> Code:
    """Imports packages and executes files, names that end in ``.py``, and returns them.

    Raises:
      ValueError: one does not exist or fails; the message has file and line.
    """
    code = NOTHING
    for name in names:
        if name.endswith(".py"):
            code += execute(name)[1]
        else:
            import_package(name)
            code += Code(packages=(name,))
    return code


def imported_names() -> list[str]:
    """Returns the packages and files that this process has imported and that registered something."""
    files = [str(module.__file__) for module, code in _executed.values() if code != NOTHING]
    return [*sorted(_imported), *files]


def execute(path: str) -> tuple[ModuleType, Code]:
    """Executes a file, once.

    Returns:
      The module, and the file itself if it has registered classes, tasks or mixtures.

    Raises:
      ValueError: there is no such file, or it fails; the message has file, line and the type of the error.
    """
    source = _read_source(storage_path(path))
    if source not in _executed:
        module = ModuleType(f"recipe_{pathlib.Path(path).stem}")
        module.__file__ = path
        before = _registered_names()
        sys.modules[module.__name__] = module  # dataclasses look up their module
        with convert_errors(path):
            exec(compile(source.text, path, "exec", dont_inherit=True), module.__dict__)
        needed = NOTHING if _registered_names() == before else Code(sources=(source,))
        _executed[source] = module, needed
    return _executed[source]


def _read_source(path: pathlib.Path) -> Source:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return Source(path.name, path.read_bytes())


def import_package(name: str) -> ModuleType:
    """Imports a package or module and returns it.

    Raises:
      ValueError: it does not exist.
    """
    if not _is_module_name(name):
        raise ValueError(f"{name!r} is neither the name of a package nor a file that ends in .py")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no package {error.name!r}; install it, or put its folder on PYTHONPATH"
        ) from None
    _imported.add(name)
    return module


def _is_module_name(name: object) -> bool:
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


@contextlib.contextmanager
def convert_errors(path: str) -> Iterator[None]:
    """Context manager that raises errors of a user's file as `ValueError` with file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        text = str(error)
        if isinstance(error, SyntaxError) and error.filename == path:
            lines, text = [error.lineno], error.msg
        where = f"{path}, line {lines[-1]}" if lines else path
        raise ValueError(f"{where}: {type(error).__name__}: {text}") from error


def _registered_names() -> tuple[dict[Any, Any], ...]:
    """Returns everything that code can register with this package and with SeqIO."""
    from synthesizer_jax.tasks import task_registry  # a run that is only loaded needs no tasks

    registries: list[Mapping[Any, Any]] = [
        REGISTRY,
        EXTRA_MESH_AXES,
        task_registry.TASKS,
        task_registry.MIXTURES,
    ]
    if (seqio := sys.modules.get("seqio")) is not None:
        registries += [dict.fromkeys(r.names()) for r in (seqio.TaskRegistry, seqio.MixtureRegistry)]
    return tuple(dict(registry) for registry in registries)


def record_code(directory: pathlib.Path, code: Code) -> None:
    """Writes the code of a run to its directory, if there is any."""
    folder = directory / CODE_DIRECTORY
    if code == NOTHING and not folder.exists():
        return
    names = {"packages": code.packages, "files": [source.name for source in code.sources]}
    contents = {source.name: source.text for source in code.sources}
    contents[IMPORTS_FILE] = json.dumps(names, indent=1).encode() + b"\n"
    for name, content in contents.items():
        write_atomic(folder / name, content)
    for stale in set(folder.glob("*.py")) - {folder / name for name in contents}:
        stale.unlink()


def recorded_code(directory: pathlib.Path) -> Code:
    """Returns the code that is recorded in a run's directory.

    Raises:
      ValueError: the record is damaged.
    """
    folder = directory / CODE_DIRECTORY
    path = folder / IMPORTS_FILE
    if not path.is_file():
        return NOTHING
    with describing(path):
        names = json.loads(path.read_text(encoding="utf-8"))
        packages, files = names["packages"], names["files"]
        plain = [pathlib.PurePath(name).name == name != "" for name in files]
        if not all(plain) or not all(map(_is_module_name, packages)):
            raise ValueError("names of packages and files are expected")
        return Code(tuple(packages), tuple(_read_source(folder / name) for name in files))


def require_code(directory: pathlib.Path) -> None:
    """Checks that the user has named all code of a run; a file replaces a recorded one of the same name.

    Raises:
      ValueError: something was not named; the message has the options to add after reading it.
    """
    code, files = recorded_code(directory), {source.name for source in _executed}
    missing = [name for name in code.packages if name not in sys.modules]
    missing += [str(directory / CODE_DIRECTORY / name) for name, _ in code.sources if name not in files]
    if missing:
        raise ValueError(
            f"{directory} needs code of its own: {' and '.join(missing)}; read it, then add "
            f"{' '.join(f'--import {name}' for name in missing)}"
        )
