"""Logs the steps and events of a run, to its files, to services and on the terminal."""

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
"""Name of an additional metric of steps in runs with several processes.

The metric is the number of the signal that one of the processes has received, or 0 if no process
has received a signal.
"""


class NonFiniteLossError(RuntimeError):
    """The loss or a gradient became infinite or not a number."""


class RunLog:
    """Logs a run. The metrics of a step are read only after the next step was dispatched.

    Reading a metric waits until the devices have computed it. Because the next step is dispatched
    before the metrics of a step are read, the devices never wait for the log.

    Args:
      experiment: the experiment of the run.
      directory: the run directory.
      checkpoints: the checkpoints of the run.
      visible: whether to show progress.

    Attributes:
      throughput: measures steps and tokens per second.
      agreed_signal: the signal that one of several processes had received in the last step whose
        metrics were read, or 0. The value of `agreed_signal` is the same in all processes.
    """

    def __init__(
        self,
        experiment: Experiment,
        directory: pathlib.Path,
        checkpoints: Checkpoints,
        *,
        visible: bool,
    ):
        training = experiment.training
        self._experiment = experiment
        self._log_every = training.log_every
        self._open_writers = find_writers(training.writers)
        self._directory = directory
        self._checkpoints = checkpoints
        self._created = time.time()
        # Only process 0 writes metrics, to files and to services. In other processes, `_metrics` is
        # None and `_writers` is empty.
        self._metrics: MetricsWriter | None = None
        self._writers: dict[str, Writer] = {}
        self._step = 0
        visible = visible and processes.is_process_zero()
        self._progress = Progress(training.steps, title=directory.name, visible=visible)
        # `_unread` holds the number of the last step, its metrics, and the number of positions in
        # its batch. The devices may still be computing the metrics.
        self._unread: tuple[int, Metrics, int] | None = None
        self.throughput = Throughput()
        self.agreed_signal = 0

    def begin(self, step: int) -> None:
        """Opens the files and services for writing, after the state was restored or initialized.

        Args:
          step: number of finished steps.
        """
        if processes.is_process_zero():
            add_event(self._directory, "start", step=step, at=self._created)
            self._metrics = MetricsWriter(self._directory, restored_step=step)
            config = to_json(self._experiment)
            for name, make in self._open_writers.items():
                self._writers[name] = make(self._directory, config)
        self._progress.advance(step)
        self.throughput.read()  # restarts the measurement, so that rates exclude compilation

    def say(self, step: int, text: str, *, event: str | None = None) -> None:
        """Prints a line about a step. If `event` is given, the line is also written as an event."""
        if event is not None:
            self.add_event(step, event, text)
        urgent = self._metrics is not None and event in ("stopped", "writer_failed")
        self._progress.say(step, text, urgent=urgent)

    def add_event(self, step: int, event: str, text: str = "") -> None:
        """Appends an event to ``events.jsonl``, in process 0 only."""
        if self._metrics is not None:
            add_event(self._directory, event, step=step, text=text)

    def close(self, error: BaseException | None) -> None:
        """Stops the display and closes the files and services.

        Args:
          error: the exception that ended the run, or None.
        """
        if self._metrics is not None:
            self._metrics.close()
        self._tell(lambda writer: writer.close(failed=error is not None))
        self._progress.close()
        if error is not None:
            self.add_event(self._step, "interrupted", one_line_error(error))

    def add_step(self, step: int, batch: Batch, metrics: Metrics) -> None:
        """Logs the previous step, and keeps the metrics of this step, which may still be computed.

        Args:
          step: number of finished steps, including this one.
          batch: the batch of this step.
          metrics: the metrics of this step.
        """
        self.flush()
        # `capacity` is the number of positions in the batch, including padding.
        capacity = batch["encoder_input_tokens"].size + batch["decoder_target_tokens"].size
        self._unread = step, metrics, capacity

    def flush(self) -> None:
        """Waits for the last step, checks its metrics and writes them.

        Raises:
          NonFiniteLossError: the loss or the gradient is not finite, so the run diverged.
        """
        if self._unread is None:
            return
        step, metrics, capacity = self._unread
        self._unread = None
        values = {name: float(value) for name, value in metrics.items()}
        self.agreed_signal = int(values.pop(STOP, 0))
        self._check_finite(values, step)

        self.throughput.add(values["tokens"], capacity=capacity)
        self._progress.advance(step)
        self.report_saved()
        if step % self._log_every == 0:
            values.update(self.throughput.read())
            self._write(step, values, kind="train")
            self._progress.log_training(step, values)

    def flush_files(self) -> None:
        """Logs the last step and writes all files.

        The training loop calls this method before it saves a checkpoint. No line of the log is then
        missing if the run continues from the checkpoint.
        """
        self.flush()
        if self._metrics is not None:
            self._metrics.flush()

    def flush_writers(self) -> None:
        """Asks the services to send everything that they have not sent yet."""
        self._tell(lambda writer: writer.flush())

    def add_evaluation(self, step: int, values: dict[str, float], seconds: float) -> None:
        """Logs the measures of an evaluation."""
        self.add_event(step, "evaluated")
        self._write(step, values, kind="eval")
        self._progress.log_evaluation(step, values, seconds)
        self.throughput.read()

    def _write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Writes metrics to the files and the services.

        A run that continues may repeat steps whose lines were removed from its files. The services
        already have the metrics of repeated steps, so these metrics are not sent again.
        """
        self._step = step
        if self._metrics is not None:
            self._metrics.write(step, values, kind=kind)
            if (kind, step) not in self._metrics.removed:
                self._tell(lambda writer: writer.write(step, values, kind=kind))

    def _tell(self, call: Callable[[Writer], None]) -> None:
        """Calls a function on all writers to services.

        A writer that raises an error is removed and reported, and training goes on without this
        writer.
        """
        for name, writer in list(self._writers.items()):
            try:
                call(writer)
            except Exception as error:
                del self._writers[name]
                reason = one_line_error(error)
                text = f"{name} gets no more metrics in this run, because it failed: {reason}"
                self.say(self._step, text, event="writer_failed")

    def report_saved(self) -> None:
        """Reports the checkpoints whose writing has finished since the last call."""
        for step in self._checkpoints.take_newly_saved():
            self.say(step, "saved", event="saved")

    def _check_finite(self, values: Mapping[str, float], step: int) -> None:
        """Raises a `NonFiniteLossError` if the loss or the gradient of a step is not finite."""
        for name in ("loss", "gradient_norm"):
            if math.isfinite(values[name]):
                continue
            self._checkpoints.wait()
            newest = max(self._checkpoints.steps, default=None)
            saved = "No checkpoint was saved yet."
            if newest is not None:
                saved = f"The newest checkpoint is of step {newest}."
            raise NonFiniteLossError(
                f"Training has stopped, because the {name.replace('_', ' ')} of step {step} is "
                f"{values[name]}. {saved} Lower the learning rate, warm up longer or clip "
                "gradients, and start again."
            )
