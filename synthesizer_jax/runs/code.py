"""Records users' code that a run needs in the run directory.

A run directory may contain a folder ``code/`` with the names of packages and copies of recipe
files. The folder is only a record, and nothing in it is imported or executed automatically. A
command that loads the run says which ``--import`` options are needed, so that users can read the
code before they run it.
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

_imported: set[str] = set()  # packages that this process has imported for users


class Source(NamedTuple):
    """A Python file of a user.

    Attributes:
      name: the name of the file without folders, such as ``recipe.py``.
      text: the content of the file.
    """

    name: str
    text: bytes


@dataclasses.dataclass(frozen=True)
class Code:
    """The users' code that must be loaded before a run can be loaded.

    Attributes:
      packages: names of packages to import.
      sources: files to execute after the packages are imported.
    """

    packages: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def __add__(self, other: Code) -> Code:
        """Returns the packages and files of both objects.

        If both objects contain a file of the same name, the file in `other` is used.
        """
        sources = {source.name: source for source in (*self.sources, *other.sources)}
        return Code(
            tuple(dict.fromkeys((*self.packages, *other.packages))), tuple(sources.values())
        )


NOTHING = Code()

_executed: dict[Source, tuple[ModuleType, Code]] = {}


def load_user_code(names: Sequence[str]) -> Code:
    """Imports packages, executes files, and returns a `Code` that describes the packages and files.

    Args:
      names: names of packages, and paths of files that end in ``.py``.

    Raises:
      ValueError: a package or file does not exist, or executing a file raises an error. The message
        about such an error names the file and the line.
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
    """Returns the users' packages that this process has imported, and the files it has executed.

    Files that have registered nothing are left out.
    """
    files = [str(module.__file__) for module, code in _executed.values() if code != NOTHING]
    return [*sorted(_imported), *files]


def execute(path: str) -> tuple[ModuleType, Code]:
    """Executes a Python file, unless a file with this name and content was executed already.

    Args:
      path: the path of the file.

    Returns:
      The module that the file defines, and a `Code`. The `Code` contains the file if the file has
      registered classes, tasks, mixtures or mesh axes. Otherwise, the `Code` is `NOTHING`.

    Raises:
      ValueError: the file does not exist, or executing the file raises an error. The message
        contains the file, the line and the type of the error.
    """
    source = _read_source(storage_path(path))
    if source not in _executed:
        module = ModuleType(f"recipe_{pathlib.Path(path).stem}")
        module.__file__ = path
        before = _registered_names()
        sys.modules[module.__name__] = module  # the decorator `dataclass` looks it up
        with convert_errors(path):
            exec(compile(source.text, path, "exec", dont_inherit=True), module.__dict__)
        needed = NOTHING
        if _registered_names() != before:
            needed = Code(sources=(source,))
        _executed[source] = module, needed
    return _executed[source]


def _read_source(path: pathlib.Path) -> Source:
    """Reads a file of Python code.

    Raises:
      ValueError: the file does not exist.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    return Source(path.name, path.read_bytes())


def import_package(name: str) -> ModuleType:
    """Imports a user's package or module and returns it.

    Raises:
      ValueError: the name is not valid, or the package does not exist.
    """
    if not _is_module_name(name):
        raise ValueError(f"{name!r} is neither the name of a package nor the path of a .py file.")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # If `name` imports a different package that is missing, the error is raised unchanged.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"There is no package {error.name!r}. Install it, or add its folder to PYTHONPATH."
        ) from None
    _imported.add(name)
    return module


def _is_module_name(name: object) -> bool:
    """Returns whether a value is a string that may name a module."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


@contextlib.contextmanager
def convert_errors(path: str) -> Iterator[None]:
    """Context manager that turns an error in a user's file into a `ValueError` with file and line.

    Args:
      path: the path of the file, as it was passed to `compile`.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The last frame that belongs to the file is the innermost line of the user's code.
        lines = [frame.lineno for frame in frames if frame.filename == path]
        text = str(error)
        if isinstance(error, SyntaxError) and error.filename == path:
            # A file with a syntax error was not executed, so no frame belongs to it. The error
            # itself contains the line.
            lines = [error.lineno]
            text = error.msg
        where = f"{path}, line {lines[-1]}" if lines else path
        raise ValueError(f"{where}: {type(error).__name__}: {text}") from error


def _registered_names() -> tuple[dict[Any, Any], ...]:
    """Returns copies of the registries of this package and SeqIO, to detect what code registers."""
    # Import the registry of tasks only here, because commands that only load a model do not need
    # tasks.
    from synthesizer_jax.tasks import task_registry

    registries: list[Mapping[Any, Any]] = [
        REGISTRY,
        EXTRA_MESH_AXES,
        task_registry.TASKS,
        task_registry.MIXTURES,
    ]
    # SeqIO is slow to import. If SeqIO has not been imported, nothing can be registered with it.
    seqio = sys.modules.get("seqio")
    if seqio is not None:
        registries.append(dict.fromkeys(seqio.TaskRegistry.names()))
        registries.append(dict.fromkeys(seqio.MixtureRegistry.names()))
    return tuple(dict(registry) for registry in registries)


def record_code(directory: pathlib.Path, code: Code) -> None:
    """Writes the users' code of a run to its directory, and deletes outdated copies of files.

    Nothing is written if the run needs no code and no code was recorded before.
    """
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
    """Returns the users' code that is recorded in a run directory.

    Raises:
      ValueError: the record is damaged.
    """
    folder = directory / CODE_DIRECTORY
    path = folder / IMPORTS_FILE
    if not path.is_file():
        return NOTHING
    with describing(path):
        names = json.loads(path.read_text(encoding="utf-8"))
        packages = names["packages"]
        files = names["files"]
        if not all(map(_is_file_name, files)) or not all(map(_is_module_name, packages)):
            raise ValueError("it must contain only names of packages and names of files")
        return Code(tuple(packages), tuple(_read_source(folder / name) for name in files))


def _is_file_name(name: str) -> bool:
    """Returns whether a recorded name is the name of a file without folders.

    The check is needed because a run directory may come from someone else. A recorded name with
    folders could point to a file outside of the run directory.
    """
    return pathlib.PurePath(name).name == name != ""


def require_code(directory: pathlib.Path) -> None:
    """Checks that all users' code of a run has been loaded in this process.

    A recorded file counts as loaded if any file of the same name was executed, so that users can
    load a corrected version.

    Raises:
      ValueError: some code was not loaded. The message contains the ``--import`` options that the
        user can add after reading the code.
    """
    code = recorded_code(directory)
    missing = [name for name in code.packages if name not in sys.modules]

    executed_files = {source.name for source in _executed}
    for source in code.sources:
        if source.name not in executed_files:
            missing.append(str(directory / CODE_DIRECTORY / source.name))

    if missing:
        options = " ".join(f"--import {name}" for name in missing)
        raise ValueError(
            f"{directory} needs code that was not imported: {' and '.join(missing)}. Read this "
            f"code. If you trust it, add the options {options}"
        )
