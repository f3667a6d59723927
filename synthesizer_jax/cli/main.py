"""The command `synthesizer-jax`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback

import typer

from synthesizer_jax.cli.checkpoints import average, convert, export
from synthesizer_jax.cli.data import app as data
from synthesizer_jax.cli.doctor import doctor, local
from synthesizer_jax.cli.evaluate import evaluate, predict
from synthesizer_jax.cli.generate import generate
from synthesizer_jax.cli.options import missing_extra_message
from synthesizer_jax.cli.plan import models, plan, recipes
from synthesizer_jax.cli.report import analyze, quickstart, report
from synthesizer_jax.cli.train import distill, train
from synthesizer_jax.files import is_storage_error
from synthesizer_jax.messages import escape_controls
from synthesizer_jax.runtime.compilation_cache import enable_compilation_cache
from synthesizer_jax.version import __version__

END_SECONDS = 60.0
"""Time for threads of libraries to end after the command."""

TRACEBACK = "SYNTHESIZER_JAX_TRACEBACK"

app = typer.Typer(
    name="synthesizer-jax",
    help="Train, evaluate and use Synthesizer T5s.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train)
app.command("distill")(distill)
app.command("convert")(convert)
app.command("export")(export)
app.command("average")(average)
app.command("eval")(evaluate)
app.command("predict")(predict)
app.command("generate")(generate)
app.command("recipes")(recipes)
app.command("models")(models)
app.command("plan")(plan)
app.add_typer(data, name="data")
app.command("analyze")(analyze)
app.command("quickstart")(quickstart)
app.command("report")(report)
app.command("doctor")(doctor)
app.command("local")(local)


def print_version(show: bool) -> None:
    """Prints the version and exits."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(
        False, "--version", callback=print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Train, evaluate and use Synthesizer T5s in JAX."""


def main() -> None:
    """Runs a command, and exits at most `END_SECONDS` after it even if threads are still running."""
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        timer = threading.Timer(END_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        raise


def run() -> None:
    """Runs a command and prints errors that users can cause in one line, without a traceback.

    With the environment variable SYNTHESIZER_JAX_TRACEBACK=1 tracebacks are printed.
    """
    # SeqIO logs every split that it skips, and Orbax the tracebacks of errors that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.basicConfig(format="%(message)s")
    enable_compilation_cache()
    # As Ctrl-C does: what is not complete is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except Exception as error:
        preemption = sys.modules.get("synthesizer_jax.runtime.preemption")
        if preemption is not None and isinstance(error, preemption.Preempted):
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
        if _is_user_error(error) and not os.environ.get(TRACEBACK):
            print(
                f"error: {missing_extra_message(error) or _one_line_message(error)}",
                file=sys.stderr,
            )
            _exit_program(2)
        traceback.print_exception(error)
        _exit_program(1)


def _is_user_error(error: Exception) -> bool:
    """Returns whether users or the storage can cause errors of this class."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, RuntimeError, ImportError)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        kinds += (tensorflow.errors.OpError,)
    return isinstance(error, kinds) or is_storage_error(error)


def _exit_program(code: int) -> None:
    """Exits; a process of a group does not wait for the others."""
    if "jax" not in sys.modules:
        sys.exit(code)
    from synthesizer_jax.runtime import processes

    processes.exit_process(code)


def _one_line_message(error: BaseException) -> str:
    """Returns an error's message in one line, for unspecific errors with how to see the traceback.

    Of a message that echoes what a file holds, the middle is left out.
    """
    text = escape_controls(" ".join(str(error).split())) or type(error).__name__
    text = text if len(text) <= 2000 else f"{text[:1500]} … {text[-300:]}"
    if type(error) in (RuntimeError, ImportError):
        text += f" ({type(error).__name__}; {TRACEBACK}=1 shows where)"
    return text
