"""What an attempt of `malformed.py` is, how a command is run, and damage to bytes."""

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

Dice = random.Random

SECONDS = 120
"""A command that takes longer hangs."""

RECIPE = pathlib.Path(__file__).with_name("reliability_run.py")


@dataclasses.dataclass
class Said:
    """What a command did.

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
    """An attempt; its input lies there damaged when it is made.

    Attributes:
      name: what is damaged and how.
      command: arguments of `synthesizer-jax`.
      places: an error must name one of them.
      watched: files and directories that an error must leave as they were.
      check: after a command that worked, what is wrong with its result, or nothing. It reads input and
        result with other means than the package.
      healing: what the command says when it goes on without what is damaged.
    """

    name: str
    command: list[str]
    places: tuple[str, ...]
    watched: tuple[pathlib.Path, ...]
    check: Callable[[Said], str | None]
    healing: tuple[str, ...] = ("cannot be read", "set aside", "passed over", "dropped")


class HangError(BaseException):
    """The time is up; nothing catches it."""


def call(command: list[str]) -> Said:
    """Runs `synthesizer-jax` in this process."""
    from synthesizer_jax.cli import main as program

    out, errors = io.StringIO(), io.StringIO()
    arguments, sys.argv = sys.argv, ["synthesizer-jax", *command]
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, [logging.StreamHandler(errors)]
    old = signal.signal(signal.SIGALRM, ring)
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
        signal.signal(signal.SIGALRM, old)
        root.handlers = handlers
        sys.argv = arguments
    return Said(code, out.getvalue(), errors.getvalue())


def good(command: list[str]) -> Said:
    """Runs a command that must work: it makes a good input, or says what the damaged one must give."""
    said = call(command)
    if said.code != 0:
        raise SystemExit(f"{' '.join(command)} ended with {said.code}:\n{said.errors}")
    return said


def ring(*_: Any) -> None:
    """Ends a command that hangs."""
    raise HangError


# -- damage to bytes ---------------------------------------------------------------------------------


def truncate(data: bytes, dice: Dice) -> bytes:
    """Only the beginning."""
    return data[: dice.randrange(len(data))]


def flip_bit(data: bytes, dice: Dice) -> bytes:
    """One bit."""
    place = dice.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << dice.randrange(8)]) + data[place + 1 :]


def zero_block(data: bytes, dice: Dice) -> bytes:
    """Zeros where something was, as a file system may leave them after a crash."""
    start = dice.randrange(len(data))
    end = min(len(data), start + dice.choice([1, 8, 512]))
    return data[:start] + bytes(end - start) + data[end:]


def insert_noise(data: bytes, dice: Dice) -> bytes:
    """Random bytes in between."""
    place = dice.randrange(len(data) + 1)
    return data[:place] + dice.randbytes(dice.choice([1, 4, 64])) + data[place:]


def drop_block(data: bytes, dice: Dice) -> bytes:
    """Something is missing."""
    start = dice.randrange(len(data))
    return data[:start] + data[start + dice.choice([1, 7, 300]) :]


def repeat_block(data: bytes, dice: Dice) -> bytes:
    """Something is there twice."""
    start = dice.randrange(len(data))
    end = start + dice.choice([1, 20, 400])
    return data[:end] + data[start:end] + data[end:]


def append_noise(data: bytes, dice: Dice) -> bytes:
    """Random bytes behind the end."""
    return data + dice.randbytes(dice.choice([1, 30]))


def empty(data: bytes, dice: Dice) -> bytes:
    """Nothing at all."""
    del data, dice
    return b""


Damage = Callable[[bytes, Dice], bytes]

BYTES: tuple[Damage, ...] = (
    *(truncate, flip_bit, zero_block, insert_noise),
    *(drop_block, repeat_block, append_noise, empty),
)


def damage_file(path: pathlib.Path, damage: Damage, dice: Dice) -> str:
    """Damages a file, which is not empty, in place; says what was done."""
    path.write_bytes(damage(path.read_bytes(), dice))
    return f"{damage.__name__} of {path.name}"
