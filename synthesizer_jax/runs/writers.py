"""Sends the metrics of a run to services such as Weights & Biases.

A package can add a writer with an entry point in the group ``synthesizer_jax.writers``. The entry
point is a callable that takes the run directory and the experiment as JSON data, and returns a
`Writer`. Users select the writer by putting the name of the entry point into `Training.writers`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

from synthesizer_jax.base.files import absolute, is_installed
from synthesizer_jax.base.messages import did_you_mean
from synthesizer_jax.base.registry import JSON
from synthesizer_jax.runs.events import read_events

GROUP = "synthesizer_jax.writers"


class Writer(Protocol):
    """Receives the metrics of a run, in process 0 only.

    If a method of a writer raises an error, training continues and the writer is not called again.
    """

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Receives metrics.

        Args:
          step: number of finished steps.
          values: the metrics by name.
          kind: ``train`` or ``eval``.
        """

    def flush(self) -> None:
        """Called after a checkpoint was saved, to send all metrics that were not sent yet."""

    def close(self, *, failed: bool) -> None:
        """Called when the run ends.

        Args:
          failed: whether the run was ended by an error or a signal.
        """


OpenWriter: TypeAlias = Callable[[pathlib.Path, JSON], Writer]


def find_writers(names: Iterable[str]) -> dict[str, OpenWriter]:
    """Returns a dictionary from the given names of writers to the functions that open the writers.

    Raises:
      ValueError: no writer has one of these names, or the library of a writer is not installed.
    """
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    openers = {}
    for name in names:
        if name not in entries:
            raise ValueError(
                f"training.writers contains {name!r}, but there is no such writer"
                f"{did_you_mean(name, entries) or '.'} The installed packages have the writers "
                f"{', '.join(sorted(entries))}."
            )
        # Every writer in this module has the name of the library that it needs.
        if entries[name].module == __name__ and not is_installed(name):
            raise ValueError(
                f"training.writers contains {name!r}, but the library {name} is not installed. Run "
                f"'pip install {name}'."
            )
        openers[name] = entries[name].load()
    return openers


def _run_key(directory: pathlib.Path) -> str:
    """Returns a key that identifies a run in a service, and stays the same when the run continues.

    If a new run replaces a deleted run in the same directory, the new run has a different key,
    because the key depends on the time of the run's first event.
    """
    first = next(read_events(directory))
    return hashlib.sha256(f"{absolute(directory)} {first['time']}".encode()).hexdigest()[:16]


class _Tracker:
    """Writes to Weights & Biases, or to trackio, whose module has the same functions."""

    def __init__(self, module: str, directory: pathlib.Path, config: JSON):
        self._module: Any = importlib.import_module(module)
        self._takes_status = module == "wandb"
        path = absolute(directory)
        key = _run_key(directory)
        options = {"name": path.name, "id": key}
        if module == "trackio":  # trackio identifies a run by its name
            options = {"name": f"{path.name}-{key}"}
        self._module.init(project=path.parent.name, config=config, resume="allow", **options)

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Sends the metrics with names such as ``train/loss``."""
        self._module.log({f"{kind}/{name}": x for name, x in values.items()}, step=step)

    def flush(self) -> None:
        """Does nothing, because the library sends metrics from its own thread or process."""

    def close(self, *, failed: bool) -> None:
        """Waits until all metrics are sent, and ends the run in the service."""
        if self._takes_status:
            self._module.finish(exit_code=int(failed))
        else:
            self._module.finish()


class _MLflow:
    """Writes to MLflow, at the address in the environment variable ``MLFLOW_TRACKING_URI``.

    In the names of metrics, characters that MLflow does not allow are replaced by ``_``. Names are
    truncated to 250 characters.
    """

    def __init__(self, directory: pathlib.Path, config: JSON):
        self._module: Any = importlib.import_module("mlflow")
        path = absolute(directory)
        key = _run_key(directory)
        experiment = self._module.set_experiment(path.parent.name)
        # If the run continues, find its earlier entry in MLflow by the key.
        before = self._module.search_runs(
            [experiment.experiment_id], f"tags.key = '{key}'", output_format="list"
        )
        run_id = before[0].info.run_id if before else None
        self._module.start_run(run_id, run_name=path.name, tags={"key": key})
        self._module.log_dict(config, "experiment.json")
        self._sent: list[Any] = []

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Sends the metrics with names such as ``train/loss``, from a background thread."""
        named = {_mlflow_name(f"{kind}/{name}"): x for name, x in values.items()}
        self._sent.append(self._module.log_metrics(named, step=step, synchronous=False))

    def flush(self) -> None:
        """Waits until all metrics are sent. If the service fails, this method raises the error."""
        while self._sent:
            self._sent.pop(0).wait()

    def close(self, *, failed: bool) -> None:
        """Waits until all metrics are sent, and ends the run in the service."""
        try:
            self.flush()
        finally:
            self._module.end_run("FAILED" if failed else "FINISHED")


def _mlflow_name(name: str) -> str:
    """Returns the name of a metric in a form that MLflow accepts."""
    return re.sub("[^A-Za-z0-9_. /-]", "_", name)[:250]


open_wandb = functools.partial(_Tracker, "wandb")
open_trackio = functools.partial(_Tracker, "trackio")
open_mlflow = _MLflow
