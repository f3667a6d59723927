"""Implements the program `synthesizer-jax`, with all of its commands and with error reporting."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import TextIO

import typer

from synthesizer_jax.base.files import is_storage_error
from synthesizer_jax.base.messages import escape_controls
from synthesizer_jax.cli import checkpoints, data, doctor, evaluate, inspect, plan, report, train
from synthesizer_jax.cli.generate import generate
from synthesizer_jax.cli.options import as_command
from synthesizer_jax.hosts.compilation_cache import enable_compilation_cache
from synthesizer_jax.version import __version__

COMMANDS: dict[str, Callable[..., None]] = {
    "quickstart": train.quickstart,
    "train": train.train,
    "distill": train.distill,
    "convert": checkpoints.convert,
    "export": checkpoints.export,
    "average": checkpoints.average,
    "eval": evaluate.evaluate,
    "predict": evaluate.predict,
    "generate": generate,
    "recipes": plan.recipes,
    "models": plan.models,
    "plan": plan.plan,
    "compare": report.report,
    "report": report.report,
    "inspect": inspect.inspect,
    "doctor": doctor.doctor,
    "local": doctor.local,
}
DATA_COMMANDS: dict[str, Callable[..., None]] = {
    "import": data.import_files,
    "prepare": data.prepare_tasks,
    "list": data.list_tasks,
    "show": data.show_task,
    "check": data.check_tasks,
    "vocabulary": data.train_vocabulary,
}

END_SECONDS = 60.0
"""The number of seconds after a command in which the threads of libraries must end."""

TRACEBACK = "SYNTHESIZER_JAX_TRACEBACK"
"""The name of the environment variable that makes all errors print a traceback."""

app = typer.Typer(
    name="synthesizer-jax",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(
    help=(
        "Import, list, show, check and prepare data sets, and train vocabularies. Nothing is "
        "downloaded."
    ),
    no_args_is_help=True,
)
for name, function in COMMANDS.items():
    app.command(name)(as_command(function))
for name, function in DATA_COMMANDS.items():
    data_app.command(name)(as_command(function))
app.add_typer(data_app, name="data")


def print_version(show: bool) -> None:
    """Prints the version and exits if `show` is true."""
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
    """Runs a command, and makes sure that the process ends.

    Threads of libraries can keep a process alive after the command has ended. The process exits at
    most `END_SECONDS` after the command, even if threads are still running. If a thread of
    `processes.background_thread` is running, the process exits immediately, because the result of
    the thread is no longer needed.
    """
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if "jax" in sys.modules:
            from synthesizer_jax.hosts import processes

            if processes.has_background_thread():
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        timer = threading.Timer(END_SECONDS, os._exit, (code,))
        timer.daemon = True
        timer.start()
        raise


def run() -> None:
    """Runs a command. Errors that users can cause are printed in one line without a traceback.

    The exit code is 2 after an error that users can cause, and 1 after any other error. If the
    environment variable SYNTHESIZER_JAX_TRACEBACK is set, all errors are printed with a traceback,
    and the exit code is 1.
    """
    # Silence absl's logger, because through it SeqIO logs every split that it skips, and Orbax logs
    # the traceback of every error that it raises.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.basicConfig(format="%(message)s", handlers=[_StandardErrorHandler()])
    sys.unraisablehook = _report_unraisable
    enable_compilation_cache()
    # Turn SIGTERM into an exception, as Python does for Ctrl-C, so that incomplete output is
    # removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        app()
    except Exception as error:
        preemption = sys.modules.get("synthesizer_jax.hosts.preemption")
        if preemption is not None and isinstance(error, preemption.Preempted):
            print(error, file=sys.stderr)
            sys.exit(error.exit_code)
        is_known = _is_user_error(error) and not os.environ.get(TRACEBACK)
        if is_known:
            print(f"error: {_one_line_message(error)}", file=sys.stderr)
        else:
            traceback.print_exception(error)
        code = 2 if is_known else 1
        if "jax" in sys.modules:  # do not wait for other processes of the group
            from synthesizer_jax.hosts import processes

            processes.exit_process(code)
        sys.exit(code)


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Prints log messages to standard error.

    A progress bar replaces `sys.stderr` while it is shown, so that what is printed does not run
    into the bar. The handler therefore looks up `sys.stderr` for every message.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Prints a log message."""
        self.stream = sys.stderr
        super().emit(record)


def _report_unraisable(raised: sys.UnraisableHookArgs) -> None:
    """Reports an error that Python cannot raise, such as an error in a destructor.

    The error "Event loop is closed" is not reported. Libraries raise this error if the process ends
    after another error while an asynchronous write is still under way. The other error has already
    been reported.
    """
    if str(raised.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(raised)


def _is_user_error(error: Exception) -> bool:
    """Returns whether an error is of a class of errors that users or the file storage can cause."""
    if isinstance(error, ValueError | OSError | RuntimeError | ImportError):
        return True
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(error, tensorflow.errors.OpError):
        return True
    return is_storage_error(error)


def _one_line_message(error: BaseException) -> str:
    """Returns the message of an error in one line.

    The middle of a message with more than 2000 characters is left out, because such a message
    probably repeats the contents of a file. The message of a plain `RuntimeError` or `ImportError`
    is followed by a hint on how to see the traceback, because the message may not say enough.
    """
    # If this package raises the error itself, the error has a complete message and no name.
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        extra = _extra_of(error.name)
        if extra is not None:
            return f"{error.name} is not installed. Run: pip install 'synthesizer_jax[{extra}]'"
    text = escape_controls(" ".join(str(error).split())) or type(error).__name__
    if len(text) > 2000:
        text = f"{text[:1500]} … {text[-300:]}"
    if type(error) in (RuntimeError, ImportError):
        text += f" ({type(error).__name__}. Set {TRACEBACK}=1 to see where it was raised.)"
    return text


def _extra_of(module: str) -> str | None:
    """Returns this package's extra that installs a module, or `None` if there is no such extra."""
    name = module.partition(".")[0]
    # The name of the package that contains a module may have hyphens instead of underscores, or may
    # be entirely different.
    package = {"sklearn": "scikit-learn"}.get(name, name.replace("_", "[-_]"))
    # If synthesizer-jax is not installed as a package, it has no metadata.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("synthesizer-jax") or ():
            match = re.match(rf"{package}\b(?!-).*extra == ['\"](\w+)", requirement)
            if match:
                return match[1]
    return None
