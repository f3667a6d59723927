"""`synthesizer-jax eval`."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from synthesizer_jax.cli.evaluation_tables import print_best_steps, print_results
from synthesizer_jax.cli.options import DataDir, Imports, RunDirectory, Step

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from synthesizer_jax.evaluation.evaluator import Evaluator
    from synthesizer_jax.evaluation.scoring import TaskResult
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.typing import PyTree

POLL_SECONDS = 10.0

Every = Annotated[
    bool, typer.Option("--all", help="Evaluate all checkpoints; show the best of each task.")
]
Follow = Annotated[
    bool, typer.Option("--follow", help="Evaluate checkpoints as a running training saves them.")
]
Method = Annotated[str | None, typer.Option(help="greedy, beam or rank; by default the recipe's.")]
Split = Annotated[str | None, typer.Option(help="Split; by default the recipe's.")]
Tasks = Annotated[list[str] | None, typer.Option(help="Only this task. Repeatable.")]
MaxExamples = Annotated[
    int | None, typer.Option(help="Maximum number of examples per task, in whole groups.", min=1)
]
BatchSize = Annotated[int | None, typer.Option(help="Examples per batch.", min=1)]
SavePredictions = Annotated[
    bool,
    typer.Option(
        help="Write input, target, prediction and score of every example to TASK.jsonl, beside the results."
    ),
]


@dataclasses.dataclass(frozen=True)
class _Selection:
    """The checkpoints to evaluate.

    Attributes:
      step: the step of a single checkpoint; None is the newest.
      every: evaluate all checkpoints instead.
      follow: evaluate all checkpoints, and wait for those that a running training saves.
    """

    step: int | None
    every: bool
    follow: bool


def evaluate(
    workdir: RunDirectory,
    *,
    data_dir: DataDir = None,
    step: Step = None,
    every: Every = False,
    follow: Follow = False,
    method: Method = None,
    split: Split = None,
    task: Tasks = None,
    max_examples: MaxExamples = None,
    batch_size: BatchSize = None,
    save_predictions: SavePredictions = True,
    imports: Imports = None,
) -> None:
    """Evaluate checkpoints task by task, with T5's metrics and the benchmarks' averages.

    The model is restored from the run's directory and sharded over all devices of all processes, as in
    training. Results and predictions are written to evaluation/STEP in that directory, and those of a
    split that is not the recipe's to evaluation/STEP/SPLIT; with --task or --max-examples to the folder
    part in it, so that the results of the whole stay. Examples without a label, as in most test splits,
    are predicted and not scored.
    """
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.runtime import processes

    overrides = given(method=method, split=split, max_examples=max_examples, batch_size=batch_size)
    opened = open_run(workdir, data_dir=data_dir, overrides=overrides, tasks=task, imports=imports)
    selection = _Selection(step, every, follow)
    part = bool(task) or max_examples is not None
    metrics = {}
    for number, variables in _restore_checkpoints(workdir, opened.layout, selection):
        folder = files.evaluation_folder(workdir, number, opened.other_split, part=part)
        saved = folder if save_predictions else None
        results, overall = measure_step(opened, number, variables, folder=saved)
        metrics[number] = {result.task: result.metrics for result in results}
        if processes.is_process_zero():
            files.write_results(folder, number, results, overall=overall)
    if len(metrics) > 1 and processes.is_process_zero():
        print_best_steps(metrics)


def given(**options: object) -> dict[str, object]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


class OpenRun(NamedTuple):
    """A run whose checkpoints are to be evaluated.

    Attributes:
      evaluator: its evaluation, with the given settings.
      other_split: the split that is evaluated, where it is not the recipe's; else None.
      mesh: over which devices its variables are sharded.
      layout: how, see `place_variables`.
    """

    evaluator: Evaluator
    other_split: str | None
    mesh: Mesh
    layout: PyTree


def open_run(
    workdir: pathlib.Path,
    *,
    data_dir: pathlib.Path | None,
    overrides: Mapping[str, object],
    tasks: list[str] | None,
    imports: list[str] | None,
) -> OpenRun:
    """Starts the group of processes and opens a run, with its code and its examples.

    Args:
      workdir: the run's directory.
      data_dir: the directory of data sets; None is the default directory.
      overrides: new values of fields of `Evaluation`.
      tasks: the tasks to evaluate; None is all.
      imports: packages and files to import first.
    """
    from synthesizer_jax.checkpoints.placement import place_variables
    from synthesizer_jax.runs import code
    from synthesizer_jax.runtime import processes
    from synthesizer_jax.training.run_directory import load_experiment

    processes.start_group()
    code.load_user_code(imports or ())
    experiment = load_experiment(workdir)
    evaluator = _open_evaluator(
        experiment, workdir, data_dir=data_dir, overrides=overrides, tasks=tasks
    )
    split = evaluator.evaluation.split
    other_split = None if split == experiment.evaluation.split else split
    mesh, layout = place_variables(experiment.model, experiment.example, experiment.mesh)
    return OpenRun(evaluator, other_split, mesh, layout)


def measure_step(
    opened: OpenRun, step: int, variables: PyTree, *, folder: pathlib.Path | None
) -> tuple[list[TaskResult], dict[str, float]]:
    """Evaluates a checkpoint, prints its results and writes its predictions; see `Evaluator.measure`.

    Args:
      opened: the run.
      step: the checkpoint's.
      variables: its variables.
      folder: where TASK.jsonl are written; None: they are not.
    """
    from synthesizer_jax.evaluation import files
    from synthesizer_jax.runs.progress import show_phases
    from synthesizer_jax.runtime import processes

    with show_phases(visible=processes.is_process_zero()) as phase:
        results, overall = opened.evaluator.measure(variables, mesh=opened.mesh, phase=phase)
    if processes.is_process_zero():
        print_results(step, results, overall)
        if folder is not None:
            files.write_all_predictions(folder, zip(opened.evaluator.sets, results, strict=True))
            typer.echo(f"predictions: {folder}/TASK.jsonl")
    return results, overall


def _open_evaluator(
    experiment: Experiment,
    workdir: pathlib.Path,
    *,
    data_dir: pathlib.Path | None,
    overrides: Mapping[str, object],
    tasks: list[str] | None,
) -> Evaluator:
    """Loads the examples, and prints which tasks have none in the split.

    Args:
      experiment: the run's experiment.
      workdir: the run's directory.
      data_dir: the directory of data sets; None is the default directory.
      overrides: new values of fields of `Evaluation`.
      tasks: the tasks to evaluate; None is all.
    """
    from synthesizer_jax.registry import replace
    from synthesizer_jax.runtime import processes
    from synthesizer_jax.tasks.task_registry import default_data_dir
    from synthesizer_jax.training.run_data import open_data

    evaluation = replace(experiment.evaluation, **overrides)
    data_dir = default_data_dir() if data_dir is None else data_dir
    experiment = replace(experiment, evaluation=evaluation)
    _, evaluator = open_data(experiment, workdir, data_dir, only=tasks)
    if evaluator.lacking and processes.is_process_zero():
        lacking = ", ".join(evaluator.lacking)
        typer.echo(f"without the split {evaluation.split!r} in {data_dir}: {lacking}")
    return evaluator


def _restore_checkpoints(
    workdir: pathlib.Path, layout: PyTree, selection: _Selection
) -> Iterator[tuple[int, PyTree]]:
    """Yields the steps and variables of the selected checkpoints.

    If several are selected, those that cannot be read, or that a running training has deleted meanwhile,
    are skipped with a message.

    Raises:
      FileNotFoundError: the given checkpoint does not exist, or there is none that can be read.
      ValueError: the given checkpoint cannot be read.
    """
    from synthesizer_jax.checkpoints.manager import restore_variables
    from synthesizer_jax.runtime import processes

    directory = workdir / "checkpoints"
    if not selection.every and not selection.follow:
        yield restore_variables(directory, step=selection.step, layout=layout)
        return
    skipped, any_restored = [], False
    for step in _iterate_steps(workdir, follow=selection.follow):
        try:
            restored = restore_variables(directory, step=step, layout=layout)
        except (FileNotFoundError, ValueError) as error:
            skipped.append(step)
            if processes.is_process_zero():
                typer.echo(f"step {step} is skipped: {error}", err=True)
            continue
        any_restored = True
        yield restored
    if not any_restored:
        detail = f" (tried {', '.join(map(str, skipped))})" if skipped else "; train first"
        raise FileNotFoundError(f"{directory} has no checkpoint that can be read{detail}")


def _iterate_steps(workdir: pathlib.Path, *, follow: bool) -> Iterator[int]:
    """Yields the steps of finished checkpoints.

    With `follow`, waits for further checkpoints until that of the run's last step, or until it has
    stopped early.
    """
    from synthesizer_jax.checkpoints import manager
    from synthesizer_jax.runs.events import has_stopped
    from synthesizer_jax.runtime import processes
    from synthesizer_jax.training.run_directory import load_experiment

    yielded: set[int] = set()
    last = load_experiment(workdir).training.steps
    while True:
        # Before the checkpoints are listed: none is added to a run that has stopped.
        stopped = has_stopped(workdir)
        finished = manager.finished_steps(workdir / "checkpoints")
        # All processes must evaluate the same steps, so they use the list of process zero.
        shared, stopped = processes.all_gather("steps", (finished, stopped))[0]
        new = [step for step in shared if step not in yielded]
        yielded.update(new)
        yield from new
        if not follow or last in yielded or stopped:
            return
        if not new:
            time.sleep(POLL_SECONDS)
