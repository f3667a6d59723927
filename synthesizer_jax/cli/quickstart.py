"""`synthesizer-jax quickstart`."""

from __future__ import annotations

import pathlib
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from synthesizer_jax.cli.train import DataDir

if TYPE_CHECKING:
    from synthesizer_jax.reports import Example, RunReport
    from synthesizer_jax.training.evaluator import Evaluator
    from synthesizer_jax.training.experiment import Experiment

RECIPES = {"Random + Vanilla": "random_vanilla", "Dot product": "dot_product"}
EXAMPLES_SHOWN = 3
"""Per task, in the report."""


def quickstart(
    workdir: Annotated[pathlib.Path, typer.Option(help="Where the runs and the report go.")],
    data_dir: DataDir = None,
    seed: Annotated[int, typer.Option(help="Of parameters, dropout and data order.")] = 0,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Change a field of both recipes.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
) -> None:
    """Train a Synthesizer and its dot-product twin on the embedded mixture and compare them.

    Ends with a table of metrics per task and WORKDIR/report.html. Started again it continues.
    """
    from synthesizer_jax.cli.recipes import load_recipe
    from synthesizer_jax.training.run import run

    began = time.perf_counter()
    data_dir = workdir / "data" if data_dir is None else data_dir
    seeds = [f"training.seed={seed}", f"data.seed={seed}"]
    for title, recipe in RECIPES.items():
        typer.echo(f"training {title} ({recipe})")
        experiment = load_recipe(f"quickstart:{recipe}", [*seeds, *(overrides or ())])
        run(experiment, workdir / recipe, data_dir=data_dir, visible=not quiet)
    report(workdir, data_dir, began)


def report(workdir: pathlib.Path, data_dir: pathlib.Path, began: float) -> None:
    """Compares finished runs: prints the table, writes the page."""
    from synthesizer_jax.data import embedded
    from synthesizer_jax.reports import Report, write_report
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.run import open_data

    first = workdir / next(iter(RECIPES.values()))
    vocabulary, evaluator = open_data(load_experiment(first), first, data_dir)
    example = evaluator.sets[0]
    shown = examples_of(evaluator)
    runs = [
        summarise(title, workdir / recipe, evaluator, shown) for title, recipe in RECIPES.items()
    ]
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
        metric_names={s.name: main_metric(s)[0] for s in evaluator.sets},
        counts={s.name: len(s.inputs) for s in evaluator.sets},
        examples=shown,
        tokens=[vocabulary.decode([int(i)]) or "·" for i in example.inputs[0]],
        facts=facts(time.perf_counter() - began),
    )
    path = workdir / "report.html"
    write_report(path, page)
    show(page)
    typer.echo(f"report: {path.resolve()}")


def main_metric(examples: Any) -> tuple[str, float]:
    """Name of a task's first metric, and its value for right answers."""
    return next(iter(examples.score(examples.target_words).items()))


def examples_of(evaluator: Evaluator) -> list[Example]:
    """The first examples of every task."""
    from synthesizer_jax.data.evaluation_sets import text
    from synthesizer_jax.reports import Example

    return [
        Example(s.name, text(row["inputs_pretokenized"]), text(row["targets_pretokenized"]))
        for s in evaluator.sets
        for row in s.examples[:EXAMPLES_SHOWN]
    ]


def summarise(
    title: str, directory: pathlib.Path, evaluator: Evaluator, shown: list[Example]
) -> RunReport:
    """What the page shows of one finished run."""
    import numpy as np

    from synthesizer_jax.evaluation import Predictor
    from synthesizer_jax.models import summarize
    from synthesizer_jax.reports import RunReport
    from synthesizer_jax.training.checkpoints import restore_variables
    from synthesizer_jax.training.experiment import load_experiment
    from synthesizer_jax.training.metrics import METRICS_FILE, read_metrics

    experiment = load_experiment(directory)
    lengths = experiment.data.lengths
    costs = summarize(
        experiment.model, inputs_length=lengths["inputs"], targets_length=lengths["targets"]
    )
    records = read_metrics(directory / METRICS_FILE)
    trained = [r for r in records if r["kind"] == "train"]
    measured = [r for r in records if r["kind"] == "eval"]
    _, variables = restore_variables(directory / "checkpoints")
    predictor = Predictor(
        experiment.model,
        variables,
        evaluator.vocabulary,
        inputs_length=lengths["inputs"],
        targets_length=lengths["targets"],
        batch_size=len(shown),
    )
    answers = predictor.predict([predictor.encode(e.text) for e in shown])
    tables, weights = attention_of(experiment, variables, evaluator.sets[0].inputs[0])
    return RunReport(
        title=title,
        parameters=costs.parameters,
        cache_bytes=costs.cache_bytes_per_token,
        flops=costs.flops_per_token,
        losses=([r["step"] for r in trained], [r["loss"] for r in trained]),
        held_out=([r["step"] for r in measured], [r["loss"] for r in measured]),
        steps_per_second=float(np.median([r["steps_per_second"] for r in trained])),
        tokens_per_second=float(np.median([r["tokens_per_second"] for r in trained])),
        metrics={s.name: measured[-1][f"{s.name}/{main_metric(s)[0]}"] for s in evaluator.sets},
        attention=weights,
        tables=tables,
        predictions=answers,
    )


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


def facts(seconds: float) -> dict[str, str]:
    """What the numbers were made with."""
    import os
    import platform

    import flax
    import jax

    from synthesizer_jax.version import __version__

    return {
        "synthesizer_jax": __version__,
        "jax": jax.__version__,
        "flax": flax.__version__,
        "Python": platform.python_version(),
        "device": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
        "cores": str(os.cpu_count()),
        "minutes": f"{seconds / 60:.1f}",
    }


def show(page: Any) -> None:
    """Prints the table of the page."""
    from rich.console import Console
    from rich.table import Table

    systems = {run.title: run.metrics for run in page.runs} | dict(page.baselines)
    table = Table(title="held-out metrics, percent", title_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("metric")
    for name in ("n", *systems):
        table.add_column(name, justify="right")
    for task, metric in page.metric_names.items():
        values = (f"{system[task]:.1f}" for system in systems.values())
        table.add_row(task, metric, f"{page.counts[task]:,}", *values)
    Console(width=120).print(table)
