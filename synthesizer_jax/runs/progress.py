"""Shows the progress of a run as a progress bar on a terminal, and as lines of text elsewhere."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import shlex
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from synthesizer_jax.base.messages import Phase, escape_controls
from synthesizer_jax.runs.metrics import METRICS_FILE, read_scores

UTILIZATIONS = {"mfu": "MFU", "product_utilization": "matmul utilization"}
"""Labels of utilizations by name. Only the first utilization that is available is shown."""


class Progress:
    """Shows the progress of a run.

    On a terminal or in a notebook, the class shows a progress bar, and a line for every evaluation
    and checkpoint. Elsewhere, only lines of text are printed, including a line every
    `training.log_every` steps.

    Args:
      total: number of steps of the run.
      title: a title, which is shown before the progress bar.
      visible: whether to show anything. If `visible` is false, only urgent messages are printed.
        They go to standard error.
    """

    def __init__(self, total: int, *, title: str = "", visible: bool = True):
        self._total = total
        self._visible = visible
        self._console = Console(stderr=not visible, highlight=False, markup=False, soft_wrap=True)
        self._shown = visible and (self._console.file.isatty() or self._console.is_jupyter)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._shown,
        )
        self._task = self._bar.add_task(escape_controls(title), total=total, numbers="")

    def advance(self, step: int) -> None:
        """Moves the bar to a number of finished steps."""
        self._bar.start()
        self._bar.update(self._task, completed=step)

    def log_training(self, step: int, values: Mapping[str, float]) -> None:
        """Shows the loss and the rates of training."""
        parts = [f"loss {values['loss']:.4g}"]
        if "learning_rate" in values:  # absent if the schedule is unknown
            parts.append(f"learning rate {values['learning_rate']:.3g}")
        parts += [
            f"padding {values['padding']:.0%}",
            f"{values['steps_per_second']:.3g} steps/s",
            f"{values['tokens_per_second']:,.0f} tokens/s",
        ]
        for name, label in UTILIZATIONS.items():
            if name in values:
                parts.append(f"{label} {values[name]:.0%}")
                break

        if self._shown:
            self._bar.update(self._task, numbers="  ".join(parts))
            return
        left = (self._total - step) / max(values["steps_per_second"], 1e-9)
        self.say(step, "  ".join([*parts, f"{format_duration(left)} left"]))

    def log_evaluation(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Prints the measures of an evaluation, which took `seconds` seconds."""
        overall = [f"{name} {values[name]:.4g}" for name in ("score", "loss") if name in values]
        tasks = [f"{name} {value:.4g}" for name, value in values.items() if "/" in name]
        text = f"evaluated in {format_duration(seconds)}: {', '.join(overall)}"
        if tasks:
            text += f"; {', '.join(tasks)}"
        self.say(step, text)

    def say(self, step: int, text: str, *, urgent: bool = False) -> None:
        """Prints a line about a step. Urgent lines are printed even if progress is not visible."""
        width = len(str(self._total))
        if self._visible or urgent:
            self._console.print(escape_controls(f"step {step:>{width}}/{self._total}  {text}"))

    def close(self) -> None:
        """Stops the display."""
        self._bar.stop()


@contextlib.contextmanager
def show_phases(*, visible: bool = True) -> Iterator[Phase]:
    """Context manager that shows the phases of a command on standard error.

    The context manager yields a `Phase`, which is a function that starts a new phase. The function
    prints the title of the phase, and shows a progress bar if standard error is a terminal. Nothing
    is shown before the first phase, so that a library can show a progress bar of its own.

    Args:
      visible: whether to show anything.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    bar = Bar(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        # Rich would otherwise print to standard error what a script expects in standard output.
        redirect_stdout=Console().file.isatty(),
        disable=not (visible and console.file.isatty()),
    )

    def phase(title: str, total: int | None) -> Callable[[int], object]:
        """Prints the title of a phase, and replaces the progress bar of the previous phase."""
        if visible:
            console.print(escape_controls(title))
        for task in bar.task_ids:
            bar.remove_task(task)
        bar.start()
        return functools.partial(bar.advance, bar.add_task("", total=total))

    try:
        yield phase
    finally:
        bar.stop()


def summary_lines(
    directory: pathlib.Path,
    steps: int,
    saved: list[int],
    *,
    data_dir: pathlib.Path | None,
    prompt: str = "INPUT",
) -> str:
    """Returns the summary at the end of a run, with scores, files and the commands to try next.

    Args:
      directory: the run directory.
      steps: number of finished steps.
      saved: the steps of the run's checkpoints.
      data_dir: the data directory to use in the suggested commands. None means the default
        directory.
      prompt: an example prompt for the suggested command ``synthesizer-jax generate``. The prompt
        must be empty if the model does not generate text.
    """
    finished = f"{directory} has finished its {steps:,} steps."
    scores = read_scores(directory / METRICS_FILE)
    finite = {step: score for step, score in scores.items() if math.isfinite(score)}
    if finite:
        best = max(finite, key=lambda step: (finite[step], step))
        last = max(finite)
        finished += f" The score at step {last:,} is {finite[last]:.2f}."
        if best != last:
            finished += f" The best score is {finite[best]:.2f}, at step {best:,}."

    kept = ", ".join(f"{step:,}" for step in saved)
    contents = (
        f"{directory} contains {METRICS_FILE}, evaluation/ and checkpoints of these steps: {kept}."
    )

    data = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
    run = shlex.quote(str(directory))
    lines = [finished, contents, f"next: synthesizer-jax eval --workdir {run}{data}"]
    if prompt:
        lines.append(f'      synthesizer-jax generate --workdir {run} "{prompt}"')
    return "\n".join(lines)


def format_duration(seconds: float) -> str:
    """Returns a duration as text, such as ``12.3 s``, ``4 min 5 s`` or ``3 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
