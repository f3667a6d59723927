"""Calls the command line, in this process or in a new process."""

import json
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

from click.testing import Result
from typer.testing import CliRunner

from synthesizer_jax.cli.main import app
from tests.conftest import ROOT
from tests.environment import COMMANDS, without_devices

RECIPE = ROOT / "benchmarks" / "reliability_run.py"
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


def call(command: str, *words: object, code: int = 0) -> str:
    """Runs a command, checks its exit code, and returns everything that it prints; see `invoke`."""
    return invoke(command, *words, code=code).output


def invoke(command: str, *words: object, code: int = 0) -> Result:
    """Runs a command, checks its exit code, and returns the result.

    The result has what the command prints to standard output and to standard error, and both
    together. Errors that the command line does not handle are raised.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    result = CliRunner().invoke(app, [*command.split(), *map(str, words)])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def start(command: str, environment: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """Starts a command in a new process."""
    own = [sys.executable, "-m", "synthesizer_jax", *command.split()]
    return subprocess.Popen(own, env=without_devices() | (environment or {}), **options)


def run_all(place: pathlib.Path, commands: Sequence, **environment: str) -> list[tuple[int, str]]:
    """Runs commands one after the other in one process.

    Returns the exit code of each command, and the text that it printed.
    """
    words = [command.split() if isinstance(command, str) else command for command in commands]
    (place / "commands.json").write_text(json.dumps(words))
    own = {"PYTHONPATH": str(ROOT), "COLUMNS": "160", "XDG_STATE_HOME": str(place / "state")}
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS, "commands.json"],
        env=without_devices() | {"GLIBC_TUNABLES": ""} | own | environment,
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.split(r"=== exit (\d+)\n", ended.stdout)
    assert len(found) == 2 * len(commands) + 1, ended.stdout
    return [(int(code), text) for code, text in zip(found[1::2], found[::2], strict=False)]
