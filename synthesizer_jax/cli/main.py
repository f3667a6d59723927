"""The command `synthesizer-jax`."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback

import typer

from synthesizer_jax.cli.compiled import keep_compiled
from synthesizer_jax.cli.data import app as data
from synthesizer_jax.cli.distill import distill
from synthesizer_jax.cli.doctor import doctor
from synthesizer_jax.cli.evaluate import evaluate
from synthesizer_jax.cli.generate import generate
from synthesizer_jax.cli.libraries import missing
from synthesizer_jax.cli.local import local
from synthesizer_jax.cli.memory import with_large_pages
from synthesizer_jax.cli.models import models
from synthesizer_jax.cli.plan import plan
from synthesizer_jax.cli.quickstart import quickstart
from synthesizer_jax.cli.report import report
from synthesizer_jax.cli.show_recipes import recipes
from synthesizer_jax.cli.train import train
from synthesizer_jax.files import is_storage_error
from synthesizer_jax.version import __version__

END_SECONDS = 60.0

TRACEBACK = "SYNTHESIZER_JAX_TRACEBACK"

LONG = ("train", "distill", "quickstart")
"""Commands that run long enough to be started twice."""

app = typer.Typer(
    name="synthesizer-jax",
    help="Train, evaluate and use Synthesizer T5s.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train)
app.command("distill")(distill)
app.command("eval")(evaluate)
app.command("generate")(generate)
app.command("recipes")(recipes)
app.command("models")(models)
app.command("plan")(plan)
app.add_typer(data, name="data")
app.command("quickstart")(quickstart)
app.command("report")(report)
app.command("doctor")(doctor)
app.command("local")(local)


def version(show: bool) -> None:
    """Prints the version and ends."""
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    show_version: bool = typer.Option(
        False, "--version", callback=version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Train, evaluate and use Synthesizer T5s in JAX."""


def main() -> None:
    """The program: `run`, and an end within `END_SECONDS`, whatever threads of libraries still do."""
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        timer = threading.Timer(END_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        raise


def run() -> None:
    """Runs a command: a user's mistake ends in one line, not in a traceback.

    Set the environment variable SYNTHESIZER_JAX_TRACEBACK=1 to see where an error came from.
    """
    # SeqIO's skipped splits are no news to a user.
    logging.getLogger("absl").setLevel(logging.ERROR)
    if sys.argv[1:2] and sys.argv[1] in LONG:
        with_large_pages()
    keep_compiled()
    try:
        app()
    except Exception as error:
        if is_users(error) and not os.environ.get(TRACEBACK):
            print(f"error: {missing(error) or one_line(error)}", file=sys.stderr)
            leave(2)
        traceback.print_exception(error)
        leave(1)


def is_users(error: Exception) -> bool:
    """Whether an error may be a user's or the storage's; of TensorFlow's, if that is loaded."""
    kinds: tuple[type[Exception], ...] = (ValueError, OSError, RuntimeError, ImportError)
    if (tensorflow := sys.modules.get("tensorflow")) is not None:
        kinds += (tensorflow.errors.OpError,)
    return isinstance(error, kinds) or is_storage_error(error)


def leave(code: int) -> None:
    """Ends the process; one of a group of processes does not wait for the others."""
    if "jax" not in sys.modules:
        sys.exit(code)
    from synthesizer_jax.sharding import hosts

    hosts.leave(code)


def one_line(error: BaseException) -> str:
    """An error's message in one line; unknown kinds say how to see more."""
    text = " ".join(str(error).split()) or type(error).__name__
    if type(error) in (RuntimeError, ImportError):
        text += f" ({type(error).__name__}; {TRACEBACK}=1 shows where)"
    return text
