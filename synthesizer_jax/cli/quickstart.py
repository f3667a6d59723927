"""`synthesizer-jax quickstart`."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.places import DataDir, option
from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.cli.report import facts, show, summarise
from synthesizer_jax.cli.train import Overrides

if TYPE_CHECKING:
    from synthesizer_jax.data.definitions import TaskDefinition
    from synthesizer_jax.reports import Example, RunReport
    from synthesizer_jax.training.evaluator import Evaluator
    from synthesizer_jax.training.experiment import Experiment

RECIPES = {"Random + Vanilla": "random_vanilla", "Dot product": "dot_product"}
EXAMPLES_SHOWN = 3
"""Per task, in the report."""


def quickstart(
    workdir: Annotated[pathlib.Path, option("Where the runs and the report go.")],
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(help="Of parameters, dropout and data order.")] = 0,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train a Synthesizer and its dot-product twin on the embedded mixture and compare them.

    Ends with a table of metrics per task and WORKDIR/report.html. Started again it continues.
    """
    from synthesizer_jax.training.run import run

    began = time.perf_counter()
    load_data_libraries()
    data_dir = workdir / "data" if data_dir is None else data_dir
    seeds = [f"training.seed={seed}", f"data.seed={seed}"]
    for title, recipe in RECIPES.items():
        typer.echo(f"training {title} ({recipe})")
        experiment = load_recipe(f"quickstart:{recipe}", [*seeds, *(overrides or ())])
        run(experiment, workdir / recipe, data_dir=data_dir, visible=not quiet)
    compare(workdir, data_dir, began)


def compare(workdir: pathlib.Path, data_dir: pathlib.Path, began: float) -> None:
    """Compares finished runs: prints the table, writes the page."""
    import jax

    from synthesizer_jax.data import embedded
    from synthesizer_jax.files import absolute
    from synthesizer_jax.reports import Report, write_report
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.run import open_data

    first = workdir / next(iter(RECIPES.values()))
    vocabulary, evaluator = open_data(load_experiment(first), first, data_dir)
    example = evaluator.sets[0]
    rows = [(s.task, row) for s in evaluator.sets for row in s.examples[:EXAMPLES_SHOWN]]
    logged = [(summarise(title, workdir / name), workdir / name) for title, name in RECIPES.items()]
    runs = [with_answers(run, place, evaluator, rows) for (run, _), place in logged]
    (_, metrics), _ = logged[0]
    page = Report(
        title="Co-training eight tasks with a Synthesizer",
        lead=(
            "A tiny T5 whose self-attention mixes a learned table with the dot product, and its twin "
            "with the dot product alone, trained on the same generated mixture in T5's task formats."
        ),
        runs=runs,
        baselines={
            "Majority": embedded.majority(),
            "Bag of words": embedded.bag_of_words(),
        },
        metric_names=metrics,
        counts={s.name: len(s.inputs) for s in evaluator.sets},
        examples=[example_of(task, row) for task, row in rows],
        tokens=[vocabulary.decode([int(i)]) or "(end)" for i in example.inputs[0]],
        facts=facts()
        | {
            "device": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
            "cores": str(os.cpu_count()),
            "minutes": f"{(time.perf_counter() - began) / 60:.1f}",
        },
    )
    path = workdir / "report.html"
    write_report(path, page)
    show(page)
    typer.echo(f"report: {absolute(path)}")


def example_of(task: TaskDefinition, row: Any) -> Example:
    """A held-out row as the page shows it; a target that is itself wrong, as in WSC, gets a ``not``."""
    from synthesizer_jax.data.evaluation_sets import text
    from synthesizer_jax.reports import Example

    target = text(row["targets_pretokenized"])
    answer = target if task.is_right(target, row) else f"not {target}"
    return Example(task.name, text(row["inputs_pretokenized"]), answer)


def with_answers(
    run: RunReport,
    directory: pathlib.Path,
    evaluator: Evaluator,
    rows: list[tuple[TaskDefinition, Any]],
) -> RunReport:
    """A run with its answers to some held-out rows, and its attention on the first."""
    from synthesizer_jax.data.evaluation_sets import text
    from synthesizer_jax.evaluation import Predictor
    from synthesizer_jax.reports import Answer
    from synthesizer_jax.training.checkpoints import restore_variables
    from synthesizer_jax.training.experiment import load_experiment

    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    _, variables = restore_variables(directory / "checkpoints")
    predictor = Predictor(
        experiment.model,
        variables,
        evaluator.vocabulary,
        inputs_length=lengths["inputs"],
        targets_length=lengths["targets"],
        batch_size=len(rows),
    )
    inputs = [predictor.encode(text(row["inputs_pretokenized"])) for _, row in rows]
    answers = [
        Answer(said, task.is_right(said, row))
        for said, (task, row) in zip(predictor.predict(inputs), rows, strict=True)
    ]
    tables, weights = attention_of(experiment, variables, evaluator.sets[0].inputs[0])
    return dataclasses.replace(run, attention=weights, tables=tables, answers=answers)


def attention_of(experiment: Experiment, variables: Any, tokens: Any) -> tuple[list, list]:
    """Softmax of the encoder's tables, and its attention weights on one input, by layer."""
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
