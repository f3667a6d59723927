"""What a run tells about its steps: in its files, on the terminal, and when it hangs."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Mapping

from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.runs.events import Events, goodput
from synthesizer_jax.runs.metrics import MetricsWriter, Throughput
from synthesizer_jax.runs.progress import Progress
from synthesizer_jax.runtime import processes
from synthesizer_jax.runtime.watchdog import Watchdog
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.step import Batch, Metrics
from synthesizer_jax.training.trainer import Trainer

STOP = "stop"
"""Among a step's metrics in several processes: the signal that one of them got, or 0."""

SPARSE_STEPS = 100
"""After so many steps in a row with more padding than tokens a line says what helps, once."""

_SPARSE = (
    "data.pack=true fills rows with several examples; for models that refuse that, data.buckets=[[64,16]] "
    "shortens batches; or lower data.inputs_length and data.targets_length"
)


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient became infinite or not a number."""


class RunLog:
    """The log of a run. Metrics of a step are read when the next one computes, so that devices never wait.

    Args:
      trainer: makes the steps.
      directory: the run's.
      checkpoints: the run's.
      visible: whether to show progress.

    Attributes:
      throughput: measures the rates.
      agreed_signal: in several processes, the signal that one of them had received in the last step read.
    """

    def __init__(
        self,
        trainer: Trainer,
        directory: pathlib.Path,
        checkpoints: Checkpoints,
        *,
        visible: bool,
    ):
        training = trainer.experiment.training
        writes = processes.is_process_zero()
        self._trainer, self._directory, self._checkpoints = trainer, directory, checkpoints
        self._created, self._writer = time.time(), MetricsWriter(directory, writes=False)
        self._events = Events(directory, writes=writes)
        self._progress = Progress(training.steps, title=directory.name, visible=visible and writes)
        self._watchdog = Watchdog(training.watchdog_seconds)
        self._unread: tuple[int, Metrics, int] | None = None
        self._sparse_steps = 0
        self.throughput = Throughput()
        self.agreed_signal = 0

    def begin(self, state: TrainState) -> None:
        """Begins to write, after the state was restored or made."""
        step = int(state.step)
        self._earlier_updates = self._trainer.earlier_updates(state)
        self._events.write("start", step=step, at=self._created)
        self._writer = MetricsWriter(
            self._directory, restored_step=step, writes=processes.is_process_zero()
        )
        self._progress.begin(step)
        self._watchdog.reset()
        self.throughput.read()  # rates are those from here on, without compilation

    def say(self, step: int, text: str, *, event: str | None = None) -> None:
        """Prints a line about a step, and writes an event if one is named."""
        if event is not None:
            self._events.write(event, step=step)
        self._progress.say(step, text)

    def end(self, step: int) -> None:
        """Writes that the run has ended."""
        self._events.write("end", step=step)

    def close(self) -> None:
        """Stops the display and the watchdog, and closes the files."""
        self._watchdog.close()
        self._writer.close()
        self._progress.close()

    def add_step(self, step: int, batch: Batch, metrics: Metrics) -> None:
        """Logs the step before, and keeps the metrics of a step that may still be computed."""
        self._watchdog.reset()
        self.flush()
        sides = batch["encoder_input_tokens"], batch["decoder_target_tokens"]
        self._unread = step, metrics, sum(side.size for side in sides)

    def flush(self) -> None:
        """Waits for the last step, checks its metrics and writes them.

        Raises:
          NonFiniteLossError: the run diverged.
        """
        if self._unread is None:
            return
        (step, metrics, capacity), self._unread = self._unread, None
        values = {name: float(value) for name, value in metrics.items()}
        self.agreed_signal = int(values.pop(STOP, 0))
        self._check_finite(values, step)
        self.throughput.add(values["tokens"], capacity=capacity)
        self._progress.advance(step)
        if self._sparse_steps < SPARSE_STEPS:
            self._sparse_steps = self._sparse_steps + 1 if 2 * values["tokens"] < capacity else 0
            if self._sparse_steps == SPARSE_STEPS:
                self.say(step, f"more than half of the tokens are padding: {_SPARSE}")
        self.report_saved()
        if step % self._trainer.experiment.training.log_every == 0:
            if self._earlier_updates is not None:
                rate = self._trainer.learning_rate(self._earlier_updates + step)
                values |= {} if rate is None else {"learning_rate": rate}
            values |= self.throughput.read()
            self._writer.write(step, values, kind="train")
            self._progress.log_training(step, values)

    def flush_files(self) -> None:
        """Logs the last step, so that a run continued from its checkpoint misses no line."""
        self.flush()
        self._writer.flush()

    def add_evaluation(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Logs the measures of an evaluation."""
        self._events.write("evaluated", step=step)
        share = goodput(self._directory, self.throughput.seconds_per_step)
        values |= {} if share is None else {"goodput": share}
        self._writer.write(step, values, kind="eval")
        self._progress.log_evaluation(step, values, seconds)
        self.throughput.read()

    def report_saved(self) -> None:
        """Reports the checkpoints that were finished in the meantime."""
        for step in self._checkpoints.take_newly_saved():
            self.say(step, "saved", event="saved")

    def _check_finite(self, values: Mapping[str, float], step: int) -> None:
        """Raises a `NonFiniteLossError` if the loss or the gradient of a step is not finite."""
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self._checkpoints.wait()
                newest = self._checkpoints.latest
                saved = (
                    "no checkpoint was saved yet" if newest is None else f"step {newest} is saved"
                )
                raise NonFiniteLossError(
                    f"the {name.replace('_', ' ')} of step {step} is {values[name]}; stopped, {saved}: "
                    "lower the learning rate, warm up longer or clip gradients, and start again"
                )
