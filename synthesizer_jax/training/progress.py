"""What a run says while it goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from synthesizer_jax.training.metrics import METRICS_FILE, scores

OVERALL = ("score", "loss", "goodput")
"""Measures of an evaluation that stand before those of single tasks."""


UTILISATIONS = {"mfu": "MFU", "product_utilisation": "of a matrix product"}
"""How a step's share of what the devices can do is called; the first that is known is shown."""


class Progress:
    """A run's voice. One line for every `training.log_every` steps, evaluation and checkpoint.

    Args:
      total: number of steps of the run.
      title: what stands in front of the bar.
      visible: False says nothing.
    """

    def __init__(self, total: int, *, title: str = "", visible: bool = True):
        self._total, self._visible = total, visible
        self._console = Console(highlight=False, markup=False, soft_wrap=True)
        shown = visible and (self._console.is_terminal or self._console.is_jupyter)
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not shown,
        )
        self._shown = shown
        self._task = self._bar.add_task(title, total=total, numbers="")

    def begin(self, step: int) -> None:
        """Shows the bar, at a number of finished steps."""
        self._bar.update(self._task, completed=step)
        self._bar.start()

    def advance(self, step: int) -> None:
        """Moves to a number of finished steps."""
        self._bar.update(self._task, completed=step)

    def trained(self, step: int, values: Mapping[str, float]) -> None:
        """Tells the newest loss and rates."""
        parts = [
            f"loss {values['loss']:.4g}",
            f"learning rate {values['learning_rate']:.3g}",
            f"padding {values['padding']:.0%}",
            f"{values['steps_per_second']:.3g} steps/s",
            f"{values['tokens_per_second']:,.0f} tokens/s",
        ]
        used = next((name for name in UTILISATIONS if name in values), None)
        if used is not None:
            parts.append(f"{UTILISATIONS[used]} {values[used]:.0%}")
        if self._shown:
            self._bar.update(self._task, numbers="  ".join(parts))
            return
        left = (self._total - step) / max(values["steps_per_second"], 1e-9)
        self.say(step, "  ".join([*parts, f"{duration(left)} left"]))

    def evaluated(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Tells what an evaluation has measured."""
        overall = [f"{name} {values[name]:.4g}" for name in OVERALL if name in values]
        tasks = [f"{name} {value:.4g}" for name, value in values.items() if "/" in name]
        text = f"evaluated in {duration(seconds)}: {', '.join(overall)}"
        self.say(step, f"{text}; {', '.join(tasks)}" if tasks else text)

    def say(self, step: int, text: str) -> None:
        """A line about a step."""
        width = len(str(self._total))
        self.note(f"step {step:>{width}}/{self._total}  {text}")

    def note(self, text: str) -> None:
        """A line, above the bar."""
        if self._visible:
            self._console.print(text)

    def close(self) -> None:
        """Ends the display."""
        self._bar.stop()


def summary(
    directory: pathlib.Path, *, steps: int, saved: list[int], data_dir: pathlib.Path | None
) -> str:
    """The last words of a run: how good it is, where things lie, and what to type next.

    Args:
      directory: the run's.
      steps: number of finished steps.
      saved: steps whose checkpoints were kept.
      data_dir: the data directory that was given; None: the default one.
    """
    measured = scores(directory / METRICS_FILE)
    lines = [f"{directory} has finished its {steps:,} steps"]
    finite = {step: score for step, score in measured.items() if math.isfinite(score)}
    if finite:
        best = max(finite, key=lambda step: (finite[step], step))
        last = max(finite)
        lines[0] += f": score {finite[last]:.2f} at step {last:,}"
        lines[0] += "" if best == last else f", the best {finite[best]:.2f} at step {best:,}"
    kept = ", ".join(f"{step:,}" for step in saved)
    lines.append(f"{directory} holds checkpoints of the steps {kept}, {METRICS_FILE}, evaluation/")
    data = "" if data_dir is None else f" --data-dir {shlex.quote(str(data_dir))}"
    run = shlex.quote(str(directory))
    lines.append(f"next: synthesizer-jax eval --workdir {run}{data}")
    lines.append(f'      synthesizer-jax generate --workdir {run} "INPUT"')
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Such as ``12.3 s``, ``4 min 5 s`` and ``3 h 20 min``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds) // 60
    if minutes < 60:
        return f"{minutes} min {round(seconds) % 60} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
