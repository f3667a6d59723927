"""`synthesizer-jax data …`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

from synthesizer_jax.cli.data_cache import cache_tasks
from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.options import DataDir, storage_option

app = typer.Typer(
    help="Import data sets, list tasks, train vocabularies, cache tokens. Nothing is downloaded.",
    no_args_is_help=True,
)
app.command("cache")(cache_tasks)


@app.command("import")
def import_files(
    benchmark: Annotated[str, typer.Argument(help="glue, super_glue or multi30k.")],
    source: Annotated[
        pathlib.Path, typer.Option("--from", help="Directory of the original files.")
    ],
    data_dir: DataDir = None,
) -> None:
    """Write TFDS data sets from the original tsv, jsonl or aligned text files (plain or .gz).

    Missing tasks are reported. A row that cannot be read stops the import with its file and line, and
    then no data set is changed.
    """
    from synthesizer_jax.data.importers import import_benchmark
    from synthesizer_jax.data.importers.layouts import TASKS
    from synthesizer_jax.data.tasks import default_data_dir
    from synthesizer_jax.data.translation import CORPORA, import_corpus
    from synthesizer_jax.messages import did_you_mean

    known = (*TASKS, *CORPORA)
    if benchmark not in known:
        raise ValueError(
            f"{benchmark!r} cannot be imported{did_you_mean(benchmark, known)}; choose one of "
            f"{', '.join(known)}"
        )
    load_data_libraries()
    target = default_data_dir() if data_dir is None else data_dir
    read = import_corpus if benchmark in CORPORA else import_benchmark
    report = read(benchmark, source, target)
    for line in report.lines():
        typer.echo(line)
    typer.echo(f"data sets are in {target}")


@app.command("tasks")
def list_tasks(
    mixture: Annotated[str | None, typer.Argument(help="Only the tasks of this mixture.")] = None,
    data_dir: DataDir = None,
) -> None:
    """List the tasks with the numbers of prepared examples, and the mixtures."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.data import synthetic, tasks, translation  # noqa: F401 - their tasks
    from synthesizer_jax.data.mixtures import MIXTURES

    directory = tasks.default_data_dir() if data_dir is None else data_dir
    rates = dict(tasks.mixture_rates(mixture)) if mixture else dict.fromkeys(tasks.TASKS)
    table = Table(title=f"{mixture or 'tasks'} in {directory}", title_justify="left")
    for heading in ("task", "data set", "rate", "prepared examples"):
        table.add_column(heading, justify="right" if heading == "rate" else "left")
    for name, rate in rates.items():
        splits = tasks.prepared_splits(name, directory)
        prepared = ", ".join(f"{split} {n:,}" for split, n in splits.items()) or "none"
        formatted_rate = "" if rate is None else f"{rate:,.0f}"
        table.add_row(name, tasks.task_definition(name).dataset, formatted_rate, prepared)
    console = Console(width=140)
    console.print(table)
    if mixture is None:
        console.print(f"mixtures: {', '.join(MIXTURES)}", highlight=False)


@app.command("vocabulary")
def train_vocabulary(
    mixture: Annotated[str, typer.Argument(help="Mixture or task that provides the text.")],
    output: Annotated[pathlib.Path, storage_option("The SentencePiece model to write.")],
    *,
    data_dir: DataDir = None,
    size: Annotated[int, typer.Option(help="Number of pieces.", min=16)] = 8000,
    examples: Annotated[int, typer.Option(help="Examples per task.", min=1)] = 20_000,
) -> None:
    """Train a SentencePiece model on a mixture's training inputs and targets."""
    from synthesizer_jax.data import synthetic, tasks, translation  # noqa: F401 - their tasks
    from synthesizer_jax.data.vocabularies import train_sentencepiece

    load_data_libraries()
    directory = tasks.default_data_dir() if data_dir is None else data_dir
    rates = tasks.available_members(mixture, directory, "train")
    members = [name for name, rate in rates.items() if rate]
    if not members:
        raise FileNotFoundError(
            f"no task of {mixture!r} has training data in {directory}; import its data sets with "
            "'synthesizer-jax data import', or give another --data-dir"
        )
    texts = [text for name in members for text in _training_texts(name, directory, examples)]
    train_sentencepiece(texts, output, vocab_size=size)
    typer.echo(f"{output}: {size:,} pieces from {len(texts):,} texts of {', '.join(members)}")


def _training_texts(task: str, data_dir: pathlib.Path, max_examples: int) -> Iterator[str]:
    """Yields the inputs and targets of a task's training examples."""
    from synthesizer_jax.data.vocabularies import Bytes
    from synthesizer_jax.evaluation import evaluation_sets

    examples = evaluation_sets.load_evaluation_set(
        task,
        "train",
        Bytes().build(),
        data_dir=data_dir,
        lengths={"inputs": 8, "targets": 8},
        max_examples=max_examples,
    )
    for row in examples.examples:
        for key in ("inputs_pretokenized", "targets_pretokenized"):
            yield evaluation_sets.to_text(row[key])
