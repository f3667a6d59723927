"""`synthesizer-jax data …`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

from synthesizer_jax.cli.data_import import import_files
from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.options import DataDir, Imports, storage_option

app = typer.Typer(
    help="Import data sets, list tasks, train vocabularies. Nothing is downloaded.",
    no_args_is_help=True,
)


app.command("import")(import_files)


@app.command("tasks")
def list_tasks(
    mixture: Annotated[str | None, typer.Argument(help="Only the tasks of this mixture.")] = None,
    data_dir: DataDir = None,
    imports: Imports = None,
) -> None:
    """List the tasks with the numbers of prepared examples, and the mixtures.

    With --import also those of SeqIO's registries.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.data import tasks

    directory = tasks.default_data_dir() if data_dir is None else data_dir
    _load_tasks(directory, imports)
    rates = (
        dict(tasks.mixture_rates(mixture, directory))
        if mixture
        else dict.fromkeys(tasks.task_names())
    )
    table = Table(title=f"{mixture or 'tasks'} in {directory}", title_justify="left")
    for heading in ("task", "data set", "rate", "prepared examples"):
        table.add_column(heading, justify="right" if heading == "rate" else "left")
    for name, rate in rates.items():
        splits = tasks.prepared_splits(name, directory)
        counts = {split: "?" if n is None else f"{n:,}" for split, n in splits.items()}
        prepared = ", ".join(f"{split} {n}" for split, n in counts.items()) or "none"
        formatted_rate = "" if rate is None else f"{rate:,.0f}"
        table.add_row(name, tasks.find_task(name).source, formatted_rate, prepared)
    console = Console(width=140)
    console.print(table)
    if mixture is None:
        console.print(f"mixtures: {', '.join(tasks.mixture_names())}", highlight=False)


@app.command("vocabulary")
def train_vocabulary(
    mixture: Annotated[str, typer.Argument(help="Mixture or task that provides the text.")],
    output: Annotated[pathlib.Path, storage_option("The SentencePiece model to write.")],
    *,
    data_dir: DataDir = None,
    size: Annotated[int, typer.Option(help="Number of pieces.", min=16)] = 8000,
    examples: Annotated[int, typer.Option(help="Examples per task.", min=1)] = 20_000,
    imports: Imports = None,
) -> None:
    """Train a SentencePiece model on a mixture's training inputs and targets."""
    from synthesizer_jax.data import tasks
    from synthesizer_jax.data.vocabularies import train_sentencepiece

    load_data_libraries()
    directory = tasks.default_data_dir() if data_dir is None else data_dir
    _load_tasks(directory, imports)
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


def _load_tasks(data_dir: pathlib.Path, imports: list[str] | None) -> None:
    """Makes all tasks known: those of the package, of imported packages and of imported files."""
    from synthesizer_jax.data import imported, synthetic  # noqa: F401 - its tasks
    from synthesizer_jax.runs import code

    code.load_user_code(imports or ())
    imported.add_imported(data_dir)


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
