"""Where a run's metrics go besides its own files: services that others watch, by name.

A package adds a writer by an entry point in the group ``synthesizer_jax.writers``: a callable that takes
the run's directory and its configuration as JSON, and returns a `Writer`.
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
    """Receives the metrics of a run, in process 0 only. One that raises an error is called no more."""

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Takes metrics by name after `step` steps; `kind` is ``train`` or ``eval``."""

    def flush(self) -> None:
        """Is called after a checkpoint was saved."""

    def close(self, *, failed: bool) -> None:
        """Is called when the run ends; `failed`: by an error or a signal."""


OpenWriter: TypeAlias = Callable[[pathlib.Path, JSON], Writer]


def find_writers(names: Iterable[str]) -> dict[str, OpenWriter]:
    """Returns what opens the writers of these names, by name.

    Raises:
      ValueError: there is none of a name, or its library is not installed.
    """
    entries = {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}
    openers = {}
    for name in names:
        if name not in entries:
            raise ValueError(
                f"training.writers: there is no {name!r}{did_you_mean(name, entries)}; installed packages "
                f"have {', '.join(sorted(entries))}"
            )
        if entries[name].module == __name__ and not is_installed(name):  # named after their libraries
            raise ValueError(f"training.writers: {name} is not installed: pip install {name}")
        openers[name] = entries[name].load()
    return openers


def _run_key(directory: pathlib.Path) -> str:
    """Returns what a run that goes on has in common with itself, and not with a former one in its place."""
    first = next(read_events(directory))
    return hashlib.sha256(f"{absolute(directory)} {first['time']}".encode()).hexdigest()[:16]


class _Tracker:
    """Weights & Biases, or trackio, whose module has the same functions."""

    def __init__(self, module: str, directory: pathlib.Path, config: JSON):
        self._module: Any = importlib.import_module(module)
        self._takes_status = module == "wandb"
        path = absolute(directory)
        key = _run_key(directory)
        options = {"name": path.name, "id": key}
        if module == "trackio":  # where a run is known by its name
            options = {"name": f"{path.name}-{key}"}
        self._module.init(project=path.parent.name, config=config, resume="allow", **options)

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Sends the metrics as ``train/loss`` and so on."""
        self._module.log({f"{kind}/{name}": x for name, x in values.items()}, step=step)

    def flush(self) -> None:
        """Does nothing: the library sends what it has from a thread or process of its own."""

    def close(self, *, failed: bool) -> None:
        """Waits until everything is sent."""
        self._module.finish(**{"exit_code": int(failed)} if self._takes_status else {})


class _MLflow:
    """MLflow, at the address in ``MLFLOW_TRACKING_URI``; in names it gets ``_`` for what it refuses."""

    def __init__(self, directory: pathlib.Path, config: JSON):
        self._module: Any = importlib.import_module("mlflow")
        path, key = absolute(directory), _run_key(directory)
        experiment = self._module.set_experiment(path.parent.name)
        before = self._module.search_runs(
            [experiment.experiment_id], f"tags.key = '{key}'", output_format="list"
        )
        run_id = before[0].info.run_id if before else None
        self._module.start_run(run_id, run_name=path.name, tags={"key": key})
        self._module.log_dict(config, "experiment.json")
        self._sent: list[Any] = []

    def write(self, step: int, values: Mapping[str, float], *, kind: str) -> None:
        """Sends the metrics as ``train/loss`` and so on, from a thread."""
        valid = lambda name: re.sub("[^A-Za-z0-9_. /-]", "_", name)[:250]
        named = {valid(f"{kind}/{name}"): x for name, x in values.items()}
        self._sent.append(self._module.log_metrics(named, step=step, synchronous=False))

    def flush(self) -> None:
        """Waits until everything is sent, and raises what the service has refused."""
        while self._sent:
            self._sent.pop(0).wait()

    def close(self, *, failed: bool) -> None:
        """Waits until everything is sent, and ends the run."""
        try:
            self.flush()
        finally:
            self._module.end_run("FAILED" if failed else "FINISHED")


open_wandb = functools.partial(_Tracker, "wandb")
open_trackio = functools.partial(_Tracker, "trackio")
open_mlflow = _MLflow
