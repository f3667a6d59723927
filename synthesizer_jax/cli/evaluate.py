"""`synthesizer-jax eval` and `synthesizer-jax predict`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.base.typing import Count
from synthesizer_jax.cli.data import prepare_missing
from synthesizer_jax.cli.options import DataDir, Imports, OpenRun, chosen_run, open_run, print_table

if TYPE_CHECKING:
    from synthesizer_jax.base.typing import PyTree
    from synthesizer_jax.evaluation.benchmarks import Results
    from synthesizer_jax.evaluation.evaluator import Evaluator
    from synthesizer_jax.evaluation.scoring import TaskResult

TEST = "test"
LABEL_LOSSES = "label_loss", "label_prior_entropy", "joint_label_prior_entropy"


def evaluate(
    run: pathlib.Path | None = None,
    *,
    workdir: pathlib.Path | None = None,
    data_dir: DataDir = None,
    step: int | None = None,
    every: Annotated[bool, "--all"] = False,
    method: str | None = None,
    split: str | None = None,
    task: list[str] | None = None,
    max_examples: Count | None = None,
    batch_size: Count | None = None,
    save_predictions: bool = True,
    imports: Imports = None,
) -> None:
    """Evaluate checkpoints task by task, with T5's metrics and the benchmarks' averages.

    The model is restored from the run's directory and sharded over all devices of all processes, as in
    training. Results and predictions are written to evaluation/STEP in that directory, and those of a
    split that is not the recipe's to evaluation/STEP/SPLIT. With --task or --max-examples they go to the
    folder part in it, so that the results of the whole stay. Examples without a label, as in most test
    splits, are predicted and not scored.

    Args:
      run: directory of the run.
      workdir: the same.
      step: step of the checkpoint; by default the newest one.
      every: evaluate all checkpoints; show the best of each task.
      method: greedy, beam or rank; by default the recipe's.
      split: split; by default the recipe's.
      task: only this task. Repeatable.
      max_examples: maximum number of examples per task, in whole groups.
      batch_size: examples per batch.
      save_predictions: write input, target, prediction and score of every example to TASK.jsonl, beside
        the results.
    """
    from synthesizer_jax.evaluation import scoring
    from synthesizer_jax.hosts import processes

    changes = _given(method=method, split=split, max_examples=max_examples, batch_size=batch_size)
    opened, evaluator = _open(chosen_run(run, workdir), imports, data_dir, task, changes)
    metrics = {}
    for number, variables in _restore_checkpoints(opened, step, every=every):
        part = bool(task) or max_examples is not None
        folder, results, overall = _measure(
            opened, evaluator, number, variables, part=part, writes=save_predictions
        )
        metrics[number] = {result.task: result.metrics for result in results}
        if processes.is_process_zero():
            scoring.write_results(folder, number, results, overall=overall)
    if len(metrics) > 1 and processes.is_process_zero():
        _print_best_steps(metrics)


def predict(
    run: pathlib.Path | None = None,
    *,
    workdir: pathlib.Path | None = None,
    data_dir: DataDir = None,
    split: str = TEST,
    output: pathlib.Path | None = None,
    step: int | None = None,
    method: str | None = None,
    task: list[str] | None = None,
    max_examples: Count | None = None,
    batch_size: Count | None = None,
    imports: Imports = None,
) -> None:
    """Predict all examples of a split, and write the files of GLUE's and SuperGLUE's leaderboards.

    Every task has a file TASK.jsonl of inputs, predictions and their scores; where examples have labels,
    metrics are shown. Predictions of a benchmark's test split are also written as its leaderboard reads
    them, except with --max-examples, glue/CoLA.tsv or super_glue/BoolQ.jsonl: a folder is what is to be
    zipped. There a prediction that is none of the labels becomes the first label, one that is no similarity
    score 0, and others are clipped to 0 to 5; invalid ones are counted.

    Example: synthesizer-jax predict runs/rv --split test --output predictions

    Args:
      run: directory of the run.
      workdir: the same.
      split: the split to predict.
      output: directory of the files; by default evaluation/STEP/SPLIT in the run's.
      step: step of the checkpoint; by default the newest one.
      method: greedy, beam or rank; by default the recipe's.
      task: only this task. Repeatable.
      max_examples: maximum number of examples per task, in whole groups.
      batch_size: examples per batch.
    """
    from synthesizer_jax.evaluation.benchmarks import write_submission
    from synthesizer_jax.hosts import processes

    changes = _given(method=method, batch_size=batch_size, split=split, loss_batches=0)
    changes["max_examples"] = max_examples  # by default all, whatever the recipe evaluates
    opened, evaluator = _open(chosen_run(run, workdir), imports, data_dir, task, changes)
    number, variables = opened.restore(step)
    part = max_examples is not None
    folder, results, _ = _measure(opened, evaluator, number, variables, part=part, output=output)
    if processes.is_process_zero() and split.startswith(TEST) and not part:
        answers = [result.predictions for result in results]
        written = write_submission(folder, list(zip(evaluator.sets, answers, strict=True)))
        for path, replaced in written.items():
            invalid = f"; {replaced:,} predictions that are no valid answer are replaced"
            typer.echo(f"{path} is written{invalid if replaced else ''}")
        if not written:
            typer.echo("no leaderboard of GLUE or SuperGLUE takes these tasks")


def _given(**options: object) -> dict[str, object]:
    """Returns the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _open(
    workdir: pathlib.Path,
    imports: list[str] | None,
    data_dir: pathlib.Path | None,
    tasks: list[str] | None,
    changes: Mapping[str, object],
) -> tuple[OpenRun, Evaluator]:
    """Opens a run and the examples of some tasks (None: all), and prints which have none in the split."""
    from synthesizer_jax.base.registry import replace
    from synthesizer_jax.hosts import processes
    from synthesizer_jax.tasks.task_registry import default_data_dir
    from synthesizer_jax.training.run import open_evaluator
    from synthesizer_jax.training.run_directory import with_vocabulary_path

    processes.start_group()
    run = open_run(workdir, imports)
    evaluation = replace(run.experiment.evaluation, **changes)
    data_dir = data_dir or default_data_dir()
    experiment = replace(run.experiment, evaluation=evaluation)
    whole = with_vocabulary_path(experiment, run.directory)
    prepare_missing(whole, data_dir, trains=False, only=tasks or ())
    evaluator = open_evaluator(experiment, run.directory, data_dir, only=tasks)
    if evaluator.lacking and processes.is_process_zero():
        lacking = ", ".join(evaluator.lacking)
        typer.echo(f"without the split {evaluation.split!r} in {data_dir}: {lacking}")
    return run, evaluator


def _measure(
    run: OpenRun,
    evaluator: Evaluator,
    step: int,
    variables: PyTree,
    *,
    part: bool,
    output: pathlib.Path | None = None,
    writes: bool = True,
) -> tuple[pathlib.Path, list[TaskResult], dict[str, float]]:
    """Evaluates a checkpoint, prints its results and writes its predictions.

    Returns:
      The folder of its files, and the results; see `Evaluator.measure`.
    """
    from synthesizer_jax.evaluation import scoring
    from synthesizer_jax.hosts import processes
    from synthesizer_jax.runs.progress import show_phases

    split = evaluator.evaluation.split
    other = None if split == run.experiment.evaluation.split else split
    folder = output or scoring.evaluation_folder(run.directory, step, other, part=part)
    with show_phases(visible=processes.is_process_zero()) as phase:
        results, overall = evaluator.measure(variables, mesh=run.mesh, phase=phase)
    if processes.is_process_zero():
        _print_results(step, results, overall)
        if writes:
            for examples, result in zip(evaluator.sets, results, strict=True):
                scoring.write_predictions(folder, result, examples=examples)
            typer.echo(f"predictions: {folder}/TASK.jsonl")
    return folder, results, overall


def _restore_checkpoints(run: OpenRun, step: int | None, *, every: bool) -> Iterator[tuple[int, PyTree]]:
    """Yields the step and the variables of one checkpoint, or of all.

    Of all, those that cannot be read, or that a running training has deleted meanwhile, are skipped with a
    message.
    """
    from synthesizer_jax.checkpoints import manager
    from synthesizer_jax.hosts import processes

    if not every:
        yield run.restore(step)
        return
    finished = manager.finished_steps(run.directory / "checkpoints")
    # All processes must evaluate the same steps, so they use the list of process zero.
    steps, any_restored = processes.all_gather("steps", finished)[0], False
    for number in steps:
        try:
            restored = run.restore(number)
        except (FileNotFoundError, ValueError) as error:
            if processes.is_process_zero():
                typer.echo(f"step {number} is skipped: {error}", err=True)
            continue
        any_restored = True
        yield restored
    if not any_restored:
        detail = f" (tried {', '.join(map(str, steps))})" if steps else "; train first"
        raise FileNotFoundError(
            f"{run.directory / 'checkpoints'} has no checkpoint that can be read{detail}"
        )


def _print_results(step: int, results: Sequence[TaskResult], overall: Mapping[str, float]) -> None:
    """Prints a checkpoint's results by task, and those over all tasks: score, losses, averages."""
    rows = []
    for result in results:
        nats = "" if result.loss is None else f"{result.loss.per_token:.4f}"
        metrics = _format(result.metrics | result.text_metrics) or "no metric"
        if unlabeled := result.n - result.labeled:
            metrics += f"  ({unlabeled:,} unlabeled)"
        metrics = metrics if result.labeled else "unlabeled: predicted, not scored"
        rows.append((result.task, result.split, metrics, f"{result.n:,}", nats))
    headings = ("task", "split", "metrics", "n", "loss")
    print_table(headings, rows, title=f"step {step:,}", left=3)
    if means := {name: x for name, x in overall.items() if name not in LABEL_LOSSES}:
        typer.echo(f"overall: {_format(means)}")
    if LABEL_LOSSES[0] in overall:
        loss, prior, _ = (overall[name] for name in LABEL_LOSSES)
        typer.echo(
            f"label words: loss {loss:.2f} nats per example, at best {prior:.2f} without reading inputs"
        )


def _format(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.2f}" for name, value in metrics.items())


def _print_best_steps(results: Mapping[int, Results]) -> None:
    """Prints every task's best step, and for each benchmark two averages.

    The first average takes each task at its best step, as T5 does; the second is that of the best step.
    """
    from synthesizer_jax.evaluation import benchmarks

    best = benchmarks.best_by_task(results)
    rows = [(task, f"{step:,}", _format(results[step][task])) for task, step in best.items()]
    if rows:
        print_table(("task", "step", "metrics"), rows, title="best steps")
    for benchmark in benchmarks.BENCHMARKS:
        if single := benchmarks.best_single_step(results, benchmark):
            typer.echo(
                f"{benchmark}: {benchmarks.best_average(results, benchmark):.2f} with each task at its "
                f"best step, {single[1]:.2f} at the single step {single[0]}"
            )
