"""Attempts of `malformed.py`, execution of commands, and damage to bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import pathlib
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

Rng = random.Random

SECONDS = 120
"""The time limit of a command."""

RECIPE = pathlib.Path(__file__).with_name("reliability_run.py")


@dataclasses.dataclass
class CommandResult:
    """The result of a command.

    Attributes:
      code: the exit code, or ``"hang"``.
      out: standard output.
      errors: standard error.
    """

    code: int | str
    out: str
    errors: str


@dataclasses.dataclass
class Case:
    """An attempt, whose input has already been damaged.

    Attributes:
      name: description of the damage.
      command: arguments of `synthesizer-jax`.
      locations: an error must name one of these.
      watched: files and directories that a failing command must not change.
      check: called after a successful command; returns a description of what is wrong with the result, or
        None. Reads input and result independently of the package.
      healing: phrases by which the command reports that it continues without the damaged part.
    """

    name: str
    command: list[str]
    locations: tuple[str, ...]
    watched: tuple[pathlib.Path, ...]
    check: Callable[[CommandResult], str | None]
    healing: tuple[str, ...] = ("cannot be read", "set aside", "is skipped", "dropped")


class HangError(BaseException):
    """Raised when the time limit is exceeded; a `BaseException`, so that no handler catches it."""


def call(command: list[str]) -> CommandResult:
    """Runs `synthesizer-jax` in this process."""
    from synthesizer_jax.cli import main as program

    out, errors = io.StringIO(), io.StringIO()
    argv, sys.argv = sys.argv, ["synthesizer-jax", *command]
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(errors)]
    previous_handler = signal.signal(signal.SIGALRM, raise_hang)
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            program.run()
        code: int | str = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except HangError:
        code = "hang"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous_handler)
        root.handlers = handlers
        sys.argv = argv
    return CommandResult(code, out.getvalue(), errors.getvalue())


def run_checked(command: list[str]) -> CommandResult:
    """Runs a command that must succeed; used for undamaged inputs."""
    result = call(command)
    if result.code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {result.code}:\n{result.errors}")
    return result


def raise_hang(*_: Any) -> None:
    """Signal handler that ends a command that hangs."""
    raise HangError


# -- damage to bytes ---------------------------------------------------------------------------------


def truncate(data: bytes, rng: Rng) -> bytes:
    """Keeps only the beginning."""
    return data[: rng.randrange(len(data))]


def flip_bit(data: bytes, rng: Rng) -> bytes:
    """Flips a bit."""
    index = rng.randrange(len(data))
    return data[:index] + bytes([data[index] ^ 1 << rng.randrange(8)]) + data[index + 1 :]


def zero_block(data: bytes, rng: Rng) -> bytes:
    """Overwrites a block with zeros, as file systems may do after a crash."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice([1, 8, 512]))
    return data[:start] + bytes(end - start) + data[end:]


def insert_noise(data: bytes, rng: Rng) -> bytes:
    """Inserts random bytes."""
    index = rng.randrange(len(data) + 1)
    return data[:index] + rng.randbytes(rng.choice([1, 4, 64])) + data[index:]


def drop_block(data: bytes, rng: Rng) -> bytes:
    """Removes a block."""
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice([1, 7, 300]) :]


def repeat_block(data: bytes, rng: Rng) -> bytes:
    """Repeats a block."""
    start = rng.randrange(len(data))
    end = start + rng.choice([1, 20, 400])
    return data[:end] + data[start:end] + data[end:]


def append_noise(data: bytes, rng: Rng) -> bytes:
    """Appends random bytes."""
    return data + rng.randbytes(rng.choice([1, 30]))


def empty(data: bytes, rng: Rng) -> bytes:
    """Removes everything."""
    del data, rng
    return b""


Damage = Callable[[bytes, Rng], bytes]

BYTES: tuple[Damage, ...] = (
    *(truncate, flip_bit, zero_block, insert_noise),
    *(drop_block, repeat_block, append_noise, empty),
)


def damage_file(path: pathlib.Path, damage: Damage, rng: Rng) -> str:
    """Damages a non-empty file in place; returns a description."""
    path.write_bytes(damage(path.read_bytes(), rng))
    return f"{damage.__name__} of {path.name}"
