"""Code of users' own that a run needs: recorded beside the run, and run again for those who have run it.

A run's directory may hold ``code/``: the names of packages and copies of recipe files. It is data like
the rest of the directory: nothing of it is imported or executed unless this account has run the very same
code before (a file named by its digest lies in ``$XDG_STATE_HOME/synthesizer_jax/trusted``), or the user
names it with ``--import``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import pathlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from synthesizer_jax.data import tasks
from synthesizer_jax.files import storage_path, write_aside
from synthesizer_jax.registry import REGISTRY

CODE_DIRECTORY = "code"
IMPORTS_FILE = "imports.json"

_log = logging.getLogger(__name__)
_imported: set[str] = set()  # packages
_executed: dict[str, tuple[ModuleType, bool]] = {}  # by digest
_named: set[str] = set()  # files that the user has named


@dataclasses.dataclass(frozen=True)
class Source:
    """A Python file.

    Attributes:
      name: such as ``recipe.py``.
      text: its content.
    """

    name: str
    text: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of name and content."""
        return hashlib.sha256(self.name.encode() + b"\0" + self.text).hexdigest()


@dataclasses.dataclass(frozen=True)
class Code:
    """What has to be imported before a run can be loaded.

    Attributes:
      packages: names of packages or modules.
      sources: files to execute after them.
    """

    packages: tuple[str, ...] = ()
    sources: tuple[Source, ...] = ()

    def __add__(self, other: Code) -> Code:
        """Both; of two files with one name the other's."""
        sources = {source.name: source for source in (*self.sources, *other.sources)}
        return Code(
            tuple(dict.fromkeys((*self.packages, *other.packages))), tuple(sources.values())
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all names and contents."""
        whole = [list(self.packages), [source.digest for source in self.sources]]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()


NOTHING = Code()


def load(names: Sequence[str]) -> Code:
    """Imports packages and executes files that the user names.

    Args:
      names: packages, or paths that end in ``.py``.

    Raises:
      ValueError: one is not there, or fails; with file and line.
    """
    code = NOTHING
    for name in names:
        if name.endswith(".py"):
            source = read_named(name)
            if any(other.name == source.name and other != source for other in code.sources):
                raise ValueError(f"two imported files are called {source.name}; rename one of them")
            execute(source, name)
            code += Code(sources=(source,))
        else:
            import_package(name)
            code += Code(packages=(name,))
    return code


def read_named(path: str) -> Source:
    """A file that the user names; it takes the place of files of that name in runs' records."""
    source = read_source(storage_path(path))
    _named.add(source.name)
    return source


def read_source(path: pathlib.Path) -> Source:
    """A file to execute.

    Raises:
      ValueError: there is none.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return Source(path.name, path.read_bytes())


def execute(source: Source, path: str) -> tuple[ModuleType, bool]:
    """The module of a file, and whether it made classes, tasks or mixtures known.

    It is executed once, or again where another file of its name has been since.

    Raises:
      ValueError: it fails; with file, line and the error's type.
    """
    name = f"recipe_{pathlib.Path(source.name).stem}"
    done = _executed.get(source.digest)
    if done is None or sys.modules.get(name) is not done[0]:
        module = ModuleType(name)
        module.__file__ = path
        before = known_names()
        sys.modules[name] = module  # dataclasses look their module up
        with failures_of(path):
            exec(compile(source.text, path, "exec", dont_inherit=True), module.__dict__)
        _executed[source.digest] = module, known_names() != before
    return _executed[source.digest]


def import_package(name: str) -> ModuleType:
    """A package or module by its name, as Python finds it.

    Raises:
      ValueError: there is none.
    """
    if not is_module_name(name):
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


def is_module_name(name: Any) -> bool:
    """Whether that is a dotted name."""
    return isinstance(name, str) and all(part.isidentifier() for part in name.split("."))


@contextlib.contextmanager
def failures_of(path: str) -> Iterator[None]:
    """Errors of a user's file become a `ValueError` that names the file and its line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == path
        ]
        text = str(error)
        if isinstance(error, SyntaxError) and error.filename == path:
            lines, text = [error.lineno], error.msg
        place = f"{path}, line {lines[-1]}" if lines else path
        raise ValueError(f"{place}: {type(error).__name__}: {text}") from error


def known_names() -> tuple[Any, ...]:
    """All that code can make known to this package and to SeqIO."""
    seqio = sys.modules.get("seqio")
    registered = (
        [] if seqio is None else [seqio.TaskRegistry.names(), seqio.MixtureRegistry.names()]
    )
    return dict(REGISTRY), dict(tasks.TASKS), dict(tasks.MIXTURES), [set(n) for n in registered]


def record(directory: pathlib.Path, code: Code) -> None:
    """Writes what a run needs into its directory; nothing where it needs nothing."""
    place = directory / CODE_DIRECTORY
    if code == NOTHING and not place.exists():
        return
    names = {"packages": code.packages, "files": [source.name for source in code.sources]}
    contents = {source.name: source.text for source in code.sources}
    contents[IMPORTS_FILE] = json.dumps(names, indent=1).encode() + b"\n"
    for name, content in contents.items():
        write_aside(place / name, content)
    for stale in set(place.glob("*.py")) - {place / name for name in contents}:
        stale.unlink()


def recorded(directory: pathlib.Path) -> Code:
    """What a run needs, by its directory.

    Raises:
      ValueError: the record is damaged.
    """
    place = directory / CODE_DIRECTORY
    path = place / IMPORTS_FILE
    if not path.is_file():
        return NOTHING
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
        packages, files = names["packages"], names["files"]
        plain = [pathlib.PurePath(name).name == name != "" for name in files]
        if not all(plain) or not all(map(is_module_name, packages)):
            raise ValueError("names of packages and files are expected")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None
    return Code(tuple(packages), tuple(read_source(place / name) for name in files))


def require(directory: pathlib.Path) -> None:
    """Runs the code that a run needs, if this account has run it before or the user has named it.

    A file that the user has named in this process stands for a recorded one of its name.

    Raises:
      ValueError: neither; the error says what to read and what to type.
    """
    code, place = recorded(directory), directory / CODE_DIRECTORY
    wanted = [source for source in code.sources if source.name not in _named]
    packages = [name for name in code.packages if name not in _imported]
    sources = [source for source in wanted if source.digest not in _executed]
    if (packages or sources) and not (trusted_directory() / code.digest).is_file():
        names = [*packages, *(str(place / source.name) for source in sources)]
        options = " ".join(f"--import {name}" for name in names)
        raise ValueError(
            f"{directory} needs code that this account has not run: {' and '.join(names)}; read it, "
            f"then add {options}"
        )
    for name in packages:
        import_package(name)
    for source in wanted:
        execute(source, str(place / source.name))
    if all(source.digest in _executed for source in code.sources):
        trust(code)


def trust(code: Code) -> None:
    """Notes that this account has run that code, so that later commands run it without being told."""
    place = trusted_directory()
    if code == NOTHING or (place / code.digest).is_file():
        return
    names = [*code.packages, *(source.name for source in code.sources)]
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        (place / code.digest).write_text("\n".join(names) + "\n", encoding="utf-8")
    except OSError as error:
        _log.warning("%s; later commands need --import %s", error, " --import ".join(names))


def trusted_directory() -> pathlib.Path:
    """Where the digests of code lie that this account has run."""
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return pathlib.Path(home).expanduser() / "synthesizer_jax" / "trusted"
