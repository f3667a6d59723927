"""Digests of a task's code and of its data, by which a cache tells whether they have changed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from synthesizer_jax.data import stored
from synthesizer_jax.data.definitions import TaskDefinition
from synthesizer_jax.data.seqio_tasks import SeqioTask
from synthesizer_jax.data.task import Task

_TASK_CODE = ("preprocessors.py", "coreference.py", "question_answering.py")
"""Files beside this one that make texts of rows, in addition to the module of a task's format."""


class UnknownStateError(ValueError):
    """Code depends on an object of which it cannot be told whether it has changed."""


def code_digest(task: Task) -> str:
    """Returns 16 hexadecimal digits that depend on a task's definition and on the code of its examples.

    Of a task of SeqIO's registry that is its source and the steps before its cache point: the source
    files of their functions, and the values that they are bound to.

    Raises:
      UnknownStateError: a source or a step is bound to an object that is not data, a function or a class.
    """
    code = _Code()
    if isinstance(task, SeqioTask):
        code.add_seqio_task(task)
    else:
        assert isinstance(task, TaskDefinition)
        code.add_definition(task)
    return code.digest()


def data_digest(task: Task, split: str, data_dir: pathlib.Path) -> str:
    """Returns 16 hexadecimal digits that depend on the stored rows of a task's split.

    Of a TFDS data set these are its version and the sizes of its files, of other files their sizes and
    times of modification. Of rows that a function makes nothing is known.

    Args:
      task: the task.
      split: its split.
      data_dir: the directory of the data sets.
    """
    if isinstance(task, SeqioTask):
        found = task.stored_rows(split, data_dir)
    else:
        versions = stored.prepared_versions(task.source, data_dir)
        found = stored.describe_split(list(versions.values())[-1], split) if versions else None
    if found is None:
        return ""
    return _shorten(hashlib.sha256(json.dumps(found, sort_keys=True).encode()))


class _Code:
    """Values and source files that a digest depends on."""

    def __init__(self) -> None:
        self._values: list[str] = []
        self._files: set[pathlib.Path] = set()
        self._seen: set[int] = set()

    def digest(self) -> str:
        digest = hashlib.sha256("\n".join(self._values).encode())
        for path in sorted(self._files):
            digest.update(path.read_bytes())
        return _shorten(digest)

    def add_definition(self, task: TaskDefinition) -> None:
        self._values.append(
            repr((task.name, task.dataset, task.format, task.rename, task.sentinel))
        )
        for cls in type(task.format).__mro__:
            self._add_file(inspect.getmodule(cls) if cls is not object else None)
        self._files.update(pathlib.Path(__file__).with_name(name) for name in _TASK_CODE)

    def add_seqio_task(self, task: SeqioTask) -> None:
        self._values.append(task.name)
        for part in task.code_before_cache():
            self._add(part)

    def _add(self, value: Any) -> None:
        """Adds data, a function with what it is bound to, or a class."""
        if isinstance(value, functools.partial):
            self._add([value.func, value.args, value.keywords])
        elif isinstance(value, types.MethodType):
            self._add([value.__func__, value.__self__])
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, type | types.BuiltinFunctionType):
            self._values.append(f"{value.__module__}.{value.__qualname__}")
            self._add_file(inspect.getmodule(value))
        elif value is None or isinstance(value, str | bytes | int | float | complex | np.generic):
            self._values.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, np.ndarray) and value.dtype != object:
            self._values.append(
                f"{value.dtype} {value.shape} {_shorten(hashlib.sha256(value.tobytes()))}"
            )
        elif isinstance(value, Mapping):
            self._values.append(f"{len(value)} items")
            for key, item in value.items():
                self._add(key)
                self._add(item)
        elif isinstance(value, list | tuple):
            self._values.append(f"{len(value)} values")
            for item in value:
                self._add(item)
        elif dataclasses.is_dataclass(value):
            self._add(type(value))
            self._add({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
        else:
            raise UnknownStateError(f"an object of the class {type(value).__qualname__}")

    def _add_function(self, function: types.FunctionType) -> None:
        """Adds a function's source file, its code where it has none, its defaults and its closure."""
        if id(function) in self._seen:  # a function that calls itself
            return
        self._seen.add(id(function))
        self._values.append(f"{function.__module__}.{function.__qualname__}")
        if not self._add_file(inspect.getmodule(function)):
            self._add_compiled(function.__code__)
        self._add([function.__defaults__, function.__kwdefaults__])
        for cell in function.__closure__ or ():
            self._add(cell.cell_contents)

    def _add_compiled(self, code: types.CodeType) -> None:
        """Adds compiled code, as of a notebook's functions."""
        self._values.append(f"{code.co_code!r} {code.co_names}")
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._add_compiled(constant)
            else:
                self._values.append(repr(constant))

    def _add_file(self, module: types.ModuleType | None) -> bool:
        """Adds the source file of a module; returns whether it has one."""
        path = getattr(module, "__file__", None)
        if path and path.endswith(".py"):
            self._files.add(pathlib.Path(path))
        return bool(path)


def _shorten(digest: Any) -> str:
    return str(digest.hexdigest()[:16])
