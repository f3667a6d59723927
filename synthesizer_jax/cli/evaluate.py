"""Defines the commands `synthesizer-jax eval` and `synthesizer-jax predict`."""

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
"""The names of the measures of label words, which are printed in a separate sentence."""


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
    """Evaluate checkpoints of a run task by task, with T5's metrics and the averages of benchmarks.

    The model is sharded over all devices of all processes, as in training.
    Results and predictions are written to evaluation/STEP in the directory of
    the run. If you choose a split that differs from the recipe's split, the
    results are written to evaluation/STEP/SPLIT. With --task or --max-examples,
    the results are written to a subfolder called part, so that they do not
    replace the results of a complete evaluation.

    Examples without a label, as in most test splits, are predicted but not
    scored.

    Args:
      run: the directory of the run.
      workdir: the directory of the run, if it is not given as an argument.
      step: the step of the checkpoint. The default is the newest checkpoint.
      every: evaluate all checkpoints, and show the best step of each task.
      method: the decoding method, greedy, beam or rank. The default is the recipe's.
      split: the split to evaluate. The default is the recipe's.
      task: evaluate only this task. Repeatable.
      max_examples: the number of examples of each task to read. If examples are scored in groups,
        the last group is read completely.
      batch_size: the number of examples per batch.
      save_predictions: write the input, target, prediction and score of every example to
        TASK.jsonl, next to the results.
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

    Inputs, predictions and scores of each task are written to TASK.jsonl. If
    the examples have labels, the command shows metrics. For a test split of
    GLUE or SuperGLUE, the command also writes the files for the leaderboard,
    such as glue/CoLA.tsv or super_glue/BoolQ.jsonl, unless you give
    --max-examples. To submit these files, zip the folder glue or super_glue.
    The leaderboards accept only valid answers. In the files for a leaderboard,
    a prediction that is not one of the labels is therefore replaced by the
    first label, and an invalid similarity score is replaced by 0. Similarity
    scores are clipped to the range from 0 to 5. The command prints how many
    predictions it has replaced.

    Example: synthesizer-jax predict runs/rv --split test --output predictions

    Args:
      run: the directory of the run.
      workdir: the directory of the run, if it is not given as an argument.
      split: the split to predict.
      output: the directory of the files. The default is evaluation/STEP/SPLIT in the directory of
        the run.
      step: the step of the checkpoint. The default is the newest checkpoint.
      method: the decoding method, greedy, beam or rank. The default is the recipe's.
      task: predict only this task. Repeatable.
      max_examples: the number of examples of each task to read. If examples are scored in groups,
        the last group is read completely.
      batch_size: the number of examples per batch.
    """
    from synthesizer_jax.evaluation.benchmarks import write_submission
    from synthesizer_jax.hosts import processes

    changes = _given(method=method, batch_size=batch_size, split=split, loss_batches=0)
    # If --max-examples is not given, predict all examples, even if the recipe limits their number.
    changes["max_examples"] = max_examples
    opened, evaluator = _open(chosen_run(run, workdir), imports, data_dir, task, changes)
    number, variables = opened.restore(step)
    part = max_examples is not None
    folder, results, _ = _measure(opened, evaluator, number, variables, part=part, output=output)
    if processes.is_process_zero() and split.startswith(TEST) and not part:
        answers = [result.predictions for result in results]
        written = write_submission(folder, list(zip(evaluator.sets, answers, strict=True)))
        for path, replaced in written.items():
            message = f"leaderboard file: {path}"
            if replaced:
                message += f" ({replaced:,} predictions were not valid answers and were replaced)"
            typer.echo(message)
        if not written:
            typer.echo("GLUE and SuperGLUE have no leaderboard for these tasks.")


def _given(**options: object) -> dict[str, object]:
    """Returns only the options that the user has given, which are those that are not `None`."""
    return {name: value for name, value in options.items() if value is not None}


def _open(
    workdir: pathlib.Path,
    imports: list[str] | None,
    data_dir: pathlib.Path | None,
    tasks: list[str] | None,
    changes: Mapping[str, object],
) -> tuple[OpenRun, Evaluator]:
    """Opens a run and its evaluator, and prints the names of tasks that do not have the split.

    Missing data is prepared before the evaluator is opened.

    Args:
      workdir: the directory of the run.
      imports: the user's packages or files to load.
      data_dir: the data directory. `None` means the default data directory.
      tasks: the tasks to evaluate. `None` means all tasks of the run.
      changes: new values for fields of the run's `Evaluation`, by the names of the fields.
    """
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
        typer.echo(f"Tasks without the split {evaluation.split!r} in {data_dir}: {lacking}")
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
    """Evaluates a checkpoint, prints the results and writes the predictions.

    Args:
      run: the run.
      evaluator: the evaluator with the evaluation sets.
      step: the step of the checkpoint.
      variables: the variables of the checkpoint.
      part: whether only some tasks or examples are evaluated.
      output: the folder for the predictions. `None` means a folder in the directory of the run.
      writes: whether to write the predictions.

    Returns:
      The folder, the results by task and the measures over all tasks; see `Evaluator.measure`.
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


def _restore_checkpoints(
    run: OpenRun, step: int | None, *, every: bool
) -> Iterator[tuple[int, PyTree]]:
    """Yields the step and the variables of one checkpoint, or of every checkpoint of a run.

    A run that is still training may delete checkpoints at any time. If `every` is true, checkpoints
    that cannot be read are therefore skipped with a message.

    Args:
      run: the run.
      step: the step of the checkpoint. `None` means the newest checkpoint. `step` is ignored if
        `every` is true.
      every: whether to yield all checkpoints.

    Raises:
      FileNotFoundError: no checkpoint can be read.
    """
    from synthesizer_jax.checkpoints import manager
    from synthesizer_jax.hosts import processes

    if not every:
        yield run.restore(step)
        return
    finished = manager.finished_steps(run.directory / "checkpoints")
    # All processes must evaluate the same steps, so every process uses the list of process zero.
    steps = processes.all_gather("steps", finished)[0]
    any_restored = False
    for number in steps:
        try:
            restored = run.restore(number)
        except (FileNotFoundError, ValueError) as error:
            if processes.is_process_zero():
                typer.echo(f"Step {number} is skipped: {error}", err=True)
            continue
        any_restored = True
        yield restored
    if not any_restored:
        problem = f"{run.directory / 'checkpoints'} has no checkpoint that can be read"
        if steps:
            raise FileNotFoundError(f"{problem} (tried {', '.join(map(str, steps))}).")
        raise FileNotFoundError(f"{problem}. Train first.")


def _print_results(step: int, results: Sequence[TaskResult], overall: Mapping[str, float]) -> None:
    """Prints the results of a checkpoint on each task, and the measures over all tasks."""
    rows = []
    for result in results:
        nats = "" if result.loss is None else f"{result.loss.per_token:.4f}"
        if not result.labeled:
            metrics = "unlabeled: predicted, not scored"
        else:
            metrics = _format(result.metrics | result.text_metrics) or "no metric"
            if result.labeled < result.n:
                metrics += f"  ({result.n - result.labeled:,} unlabeled)"
        rows.append((result.task, result.split, metrics, f"{result.n:,}", nats))
    headings = ("task", "split", "metrics", "n", "loss")
    print_table(headings, rows, title=f"step {step:,}", left=3)
    means = {name: value for name, value in overall.items() if name not in LABEL_LOSSES}
    if means:
        typer.echo(f"overall: {_format(means)}")
    if LABEL_LOSSES[0] in overall:
        loss, prior, _ = (overall[name] for name in LABEL_LOSSES)
        typer.echo(
            f"label words: loss {loss:.2f} nats per example. A model that does not read the inputs "
            f"has at least {prior:.2f}."
        )


def _format(metrics: Mapping[str, float]) -> str:
    """Returns a line of text with the names and values of results."""
    return "  ".join(f"{name} {value:.2f}" for name, value in metrics.items())


def _print_best_steps(results: Mapping[int, Results]) -> None:
    """Prints the best step of every task, and two averages over the tasks of each benchmark.

    The first average uses the results of each task at the task's own best step, as in T5. The
    second average is the highest average that is reached at a single step.
    """
    from synthesizer_jax.evaluation import benchmarks

    best = benchmarks.best_by_task(results)
    rows = [(task, f"{step:,}", _format(results[step][task])) for task, step in best.items()]
    if rows:
        print_table(("task", "step", "metrics"), rows, title="best steps")
    for benchmark in benchmarks.BENCHMARKS:
        single = benchmarks.best_single_step(results, benchmark)
        if single is not None:
            step, average = single
            typer.echo(
                f"{benchmark}: {benchmarks.best_average(results, benchmark):.2f} with each task at "
                f"its best step, {average:.2f} at the single step {step}"
            )
