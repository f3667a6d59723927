"""What a run tells about its steps, in its files and on the terminal."""

from __future__ import annotations

import math
import pathlib
import time
from collections.abc import Callable, Mapping

from synthesizer_jax.base.messages import one_line_error
from synthesizer_jax.base.registry import to_json
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.hosts import processes
from synthesizer_jax.runs.events import add_event
from synthesizer_jax.runs.metrics import MetricsWriter, Throughput
from synthesizer_jax.runs.progress import Progress
from synthesizer_jax.runs.writers import Writer, find_writers
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.step import Batch, Metrics

STOP = "stop"
"""Among a step's metrics in several processes: the signal that one of them got, or 0."""


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient became infinite or not a number."""


class RunLog:
    """The log of a run. Metrics of a step are read when the next one computes, so that devices never wait.

    Args:
      experiment: the run's.
      directory: the run's.
      checkpoints: the run's.
      visible: whether to show progress.

    Attributes:
      throughput: measures the rates.
      agreed_signal: in several processes, the signal that one of them had received in the last step read.
    """

    def __init__(
        self, experiment: Experiment, directory: pathlib.Path, checkpoints: Checkpoints, *, visible: bool
    ):
        training = experiment.training
        self._experiment, self._log_every = experiment, training.log_every
        self._open_writers = find_writers(training.writers)
        self._directory, self._checkpoints = directory, checkpoints
        self._created = time.time()
        self._metrics: MetricsWriter | None = None  # in process 0 alone
        self._writers: dict[str, Writer] = {}  # to services, likewise
        self._step = 0
        visible = visible and processes.is_process_zero()
        self._progress = Progress(training.steps, title=directory.name, visible=visible)
        self._unread: tuple[int, Metrics, int] | None = None
        self.throughput = Throughput()
        self.agreed_signal = 0

    def begin(self, step: int) -> None:
        """Begins to write, after the state was restored or made."""
        if processes.is_process_zero():
            add_event(self._directory, "start", step=step, at=self._created)
            self._metrics = MetricsWriter(self._directory, restored_step=step)
            config = to_json(self._experiment)
            for name, make in self._open_writers.items():
                self._writers[name] = make(self._directory, config)
        self._progress.advance(step)
        self.throughput.read()  # rates are those from here on, without compilation

    def say(self, step: int, text: str, *, event: str | None = None) -> None:
        """Prints a line about a step, and writes an event if one is named."""
        if event is not None:
            self.add_event(step, event, text)
        urgent = self._metrics is not None and event in ("stopped", "writer_failed")
        self._progress.say(step, text, urgent=urgent)

    def add_event(self, step: int, event: str, text: str = "") -> None:
        """Writes an event."""
        if self._metrics is not None:
            add_event(self._directory, event, step=step, text=text)

    def close(self, error: BaseException | None) -> None:
        """Stops the display, and closes the files and the writers; `error` is what ended the run."""
        if self._metrics is not None:
            self._metrics.close()
        self._tell(lambda writer: writer.close(failed=error is not None))
        self._progress.close()
        if error is not None:
            self.add_event(self._step, "interrupted", one_line_error(error))

    def add_step(self, step: int, batch: Batch, metrics: Metrics) -> None:
        """Logs the step before, and keeps the metrics of a step that may still be computed."""
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
        self.report_saved()
        if step % self._log_every == 0:
            values |= self.throughput.read()
            self._write(step, values, kind="train")
            self._progress.log_training(step, values)

    def flush_files(self) -> None:
        """Logs the last step, so that a run continued from its checkpoint misses no line."""
        self.flush()
        if self._metrics is not None:
            self._metrics.flush()

    def flush_writers(self) -> None:
        """Lets services have what they were not sent yet."""
        self._tell(lambda writer: writer.flush())

    def add_evaluation(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Logs the measures of an evaluation."""
        self.add_event(step, "evaluated")
        self._write(step, values, kind="eval")
        self._progress.log_evaluation(step, values, seconds)
        self.throughput.read()

    def _write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        self._step = step
        if self._metrics is not None:
            self._metrics.write(step, values, kind=kind)
            if (kind, step) not in self._metrics.removed:
                self._tell(lambda writer: writer.write(step, values, kind=kind))

    def _tell(self, call: Callable[[Writer], None]) -> None:
        """Calls the writers to services; whatever is wrong with one, training goes on without it."""
        for name, writer in list(self._writers.items()):
            try:
                call(writer)
            except Exception as error:
                del self._writers[name]
                text = f"{name} gets no more metrics in this run: {one_line_error(error)}"
                self.say(self._step, text, event="writer_failed")

    def report_saved(self) -> None:
        """Reports the checkpoints that were finished in the meantime."""
        for step in self._checkpoints.take_newly_saved():
            self.say(step, "saved", event="saved")

    def _check_finite(self, values: Mapping[str, float], step: int) -> None:
        """Raises a `NonFiniteLossError` if the loss or the gradient of a step is not finite."""
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                self._checkpoints.wait()
                newest = max(self._checkpoints.steps, default=None)
                saved = "no checkpoint was saved yet" if newest is None else f"step {newest} is saved"
                raise NonFiniteLossError(
                    f"the {name.replace('_', ' ')} of step {step} is {values[name]}; stopped, {saved}: "
                    "lower the learning rate, warm up longer or clip gradients, and start again"
                )
