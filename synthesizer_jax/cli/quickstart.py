"""`synthesizer-jax quickstart`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import DataDir, Overrides, Quiet, storage_option
from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.cli.report import print_comparison, provenance, summarize_run

if TYPE_CHECKING:
    import numpy as np

    from synthesizer_jax.evaluation.evaluator import Evaluator
    from synthesizer_jax.reports import Answer, Example
    from synthesizer_jax.tasks.task import Task
    from synthesizer_jax.training.experiment import Experiment
    from synthesizer_jax.typing import PyTree

RECIPES = {"Random + Vanilla": "random_vanilla", "Dot product": "dot_product"}
"""Names of the compared models, and their recipes."""

EXAMPLES_SHOWN = 3
"""The number of examples per task in the report."""

TITLE = "Co-training eight tasks with a Synthesizer"
LEAD = (
    "A tiny T5 whose self-attention mixes a learned table with the dot product, and its twin "
    "with the dot product alone, trained on the same generated mixture in T5's task formats."
)


@dataclasses.dataclass(frozen=True)
class _HeldOutRow:
    """A preprocessed row of a task's held-out examples."""

    task: Task
    fields: Mapping[str, object]

    @property
    def inputs(self) -> str:
        from synthesizer_jax.evaluation.evaluation_sets import to_text

        return to_text(self.fields["inputs_pretokenized"])

    @property
    def target(self) -> str:
        from synthesizer_jax.evaluation.evaluation_sets import to_text

        return to_text(self.fields["targets_pretokenized"])

    def is_right(self, answer: str) -> bool:
        """Returns whether metrics take an answer for the target."""
        target = self.task.postprocess(self.target, example=self.fields, is_target=True)
        return self.task.postprocess(answer, example=self.fields) == target


def quickstart(
    workdir: Annotated[pathlib.Path, storage_option("Directory of the runs and the report.")],
    *,
    data_dir: DataDir = None,
    seed: Annotated[
        int, typer.Option(help="Seed of parameters, dropout and the order of the data.")
    ] = 0,
    overrides: Overrides = None,
    quiet: Quiet = False,
) -> None:
    """Train a Synthesizer and a dot-product model on synthetic tasks and compare them.

    Prints a table of metrics per task and writes WORKDIR/report.html. The same command continues an
    interrupted training.
    """
    from synthesizer_jax.training.run import run

    start = time.perf_counter()
    data_dir = workdir / "data" if data_dir is None else data_dir
    seeds = [f"training.seed={seed}", f"data.seed={seed}"]
    for title, recipe in RECIPES.items():
        typer.echo(f"training {title} ({recipe})")
        experiment = load_recipe(f"quickstart:{recipe}", [*seeds, *(overrides or ())])
        run(experiment, workdir / recipe, data_dir=data_dir, visible=not quiet)
    _compare_runs(workdir, data_dir, start)


def _compare_runs(workdir: pathlib.Path, data_dir: pathlib.Path, start: float) -> None:
    """Prints the table of metrics and writes the report.

    Args:
      workdir: the directory of the finished runs.
      data_dir: the directory of data sets.
      start: when the command started, by `time.perf_counter`.
    """
    import jax

    from synthesizer_jax.evaluation import synthetic_baselines
    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports import Report, write_report
    from synthesizer_jax.tasks.task import Task
    from synthesizer_jax.training.run_data import open_data
    from synthesizer_jax.training.run_directory import load_experiment

    first = workdir / next(iter(RECIPES.values()))
    vocabulary, evaluator = open_data(load_experiment(first), first, data_dir)
    tokens = evaluator.sets[0].inputs[0]
    rows = [
        _HeldOutRow(s.task, fields)
        for s in evaluator.sets
        if isinstance(s.task, Task)
        for fields in s.examples[:EXAMPLES_SHOWN]
    ]
    summaries = {name: summarize_run(title, workdir / name) for title, name in RECIPES.items()}
    runs = []
    for name, (run, _) in summaries.items():
        answers, tables, weights = _inspect_model(workdir / name, evaluator, rows)
        runs.append(dataclasses.replace(run, attention=weights, tables=tables, answers=answers))
    _, metric_names = next(iter(summaries.values()))
    report = Report(
        title=TITLE,
        lead=LEAD,
        runs=runs,
        baselines={
            "Majority": synthetic_baselines.majority_scores(),
            "Bag of words": synthetic_baselines.bag_of_words_scores(),
        },
        metric_names=metric_names,
        counts={s.name: len(s.inputs) for s in evaluator.sets},
        examples=[_report_example(row) for row in rows],
        tokens=[vocabulary.decode([int(i)]) or "(end)" for i in tokens],
        facts=provenance()
        | {
            "device": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
            "cores": str(os.cpu_count()),
            "minutes": f"{(time.perf_counter() - start) / 60:.1f}",
        },
    )
    path = workdir / "report.html"
    write_report(path, report)
    print_comparison(report)
    typer.echo(f"report: {absolute(path)}")


def _report_example(row: _HeldOutRow) -> Example:
    """Converts a row for the report.

    In WSC the target of a row with a false label is a wrong answer; it is shown after ``not``.
    """
    from synthesizer_jax.reports import Example

    answer = row.target if row.is_right(row.target) else f"not {row.target}"
    return Example(row.task.name, row.inputs, answer)


def _inspect_model(
    directory: pathlib.Path, evaluator: Evaluator, rows: Sequence[_HeldOutRow]
) -> tuple[list[Answer], list[np.ndarray], list[np.ndarray]]:
    """Returns a run's answers to some rows, and what `_attention_maps` returns for the first example."""
    from synthesizer_jax.checkpoints.manager import restore_variables
    from synthesizer_jax.evaluation.prediction import Predictor
    from synthesizer_jax.inference import Decoding
    from synthesizer_jax.reports import Answer
    from synthesizer_jax.training.run_directory import load_experiment

    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    _, variables = restore_variables(directory / "checkpoints")
    predictor = Predictor(
        experiment.model,
        variables,
        evaluator.vocabulary,
        inputs_length=lengths["inputs"],
        decoding=Decoding(max_length=lengths["targets"]),
        batch_size=len(rows),
    )
    texts = predictor.predict([predictor.encode(row.inputs) for row in rows])
    answers = [Answer(text, row.is_right(text)) for text, row in zip(texts, rows, strict=True)]
    return answers, *_attention_maps(experiment, variables, evaluator.sets[0].inputs[0])


def _attention_maps(
    experiment: Experiment, variables: PyTree, tokens: np.ndarray
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns the softmax of the encoder's tables, and its attention weights on one input, by layer."""
    import jax
    import numpy as np

    length = len(tokens)
    _, state = experiment.model.apply(
        variables, tokens[None], method="encode", mutable=["intermediates"]
    )
    layers = state["intermediates"]["encoder"]
    names = sorted(layers, key=lambda name: int(name.split("_")[1]))
    weights = [np.asarray(layers[n]["attention"]["attention_weights"][0][0]) for n in names]
    params = variables["params"]["encoder"]
    tables = [
        np.asarray(jax.nn.softmax(part["table"][:, :length, :length]))
        for n in names
        for part in params[n]["attention"]["align"].values()
        if isinstance(part, dict) and "table" in part
    ]
    return tables, weights
