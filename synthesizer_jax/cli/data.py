"""`synthesizer-jax data …`."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.places import DataDir, option

app = typer.Typer(
    help="Import data sets, list tasks, train vocabularies. Nothing is downloaded.",
    no_args_is_help=True,
)


@app.command("import")
def import_files(
    benchmark: Annotated[str, typer.Argument(help="glue, super_glue or multi30k.")],
    source: Annotated[pathlib.Path, typer.Option("--from", help="Folder of the original files.")],
    data_dir: DataDir = None,
) -> None:
    """Write TFDS data sets from the original tsv, jsonl or aligned text files (plain or .gz).

    Missing tasks are reported; a broken row stops the import with file, line and reason. All data
    sets are put into place or none: after an error the earlier ones are as before.
    """
    from synthesizer_jax.data.importers import import_benchmark
    from synthesizer_jax.data.importers.layouts import TASKS
    from synthesizer_jax.data.tasks import default_data_dir
    from synthesizer_jax.data.translation import CORPORA, import_corpus
    from synthesizer_jax.suggestions import suggestion

    known = (*TASKS, *CORPORA)
    if benchmark not in known:
        raise ValueError(
            f"{benchmark!r} cannot be imported{suggestion(benchmark, known)}; choose one of "
            f"{', '.join(known)}"
        )
    load_data_libraries()
    target = default_data_dir() if data_dir is None else data_dir
    read = import_corpus if benchmark in CORPORA else import_benchmark
    report = read(benchmark, source, target)
    for line in report.lines():
        typer.echo(line)
    typer.echo(f"data sets lie in {target}")


@app.command("tasks")
def list_tasks(
    mixture: Annotated[str | None, typer.Argument(help="Only the members of this mixture.")] = None,
    data_dir: DataDir = None,
) -> None:
    """List tasks with what is prepared on this machine, and the mixtures."""
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.data import embedded, tasks, translation  # noqa: F401 - their tasks
    from synthesizer_jax.data.mixtures import MIXTURES

    directory = tasks.default_data_dir() if data_dir is None else data_dir
    rates = dict(tasks.members(mixture)) if mixture else dict.fromkeys(tasks.TASKS)
    table = Table(title=f"{mixture or 'tasks'} in {directory}", title_justify="left")
    for heading in ("task", "data set", "rate", "prepared examples"):
        table.add_column(heading, justify="right" if heading == "rate" else "left")
    for name, rate in rates.items():
        here = tasks.splits(name, directory)
        prepared = ", ".join(f"{split} {n:,}" for split, n in here.items()) or "none"
        shown = "" if rate is None else f"{rate:,.0f}"
        table.add_row(name, tasks.definition(name).dataset, shown, prepared)
    console = Console(width=140)
    console.print(table)
    if mixture is None:
        console.print(f"mixtures: {', '.join(MIXTURES)}", highlight=False)


@app.command("vocabulary")
def vocabulary(
    mixture: Annotated[str, typer.Argument(help="The mixture or task whose text is used.")],
    output: Annotated[pathlib.Path, option("The SentencePiece model to write.")],
    data_dir: DataDir = None,
    size: Annotated[int, typer.Option(help="Number of pieces.", min=16)] = 8000,
    examples: Annotated[int, typer.Option(help="Examples per task.", min=1)] = 20_000,
) -> None:
    """Train a SentencePiece model on a mixture's training inputs and targets."""
    from synthesizer_jax.data import evaluation_sets, tasks, translation  # noqa: F401 - its tasks
    from synthesizer_jax.data.vocabularies import Bytes, train_sentencepiece

    load_data_libraries()
    directory = tasks.default_data_dir() if data_dir is None else data_dir
    parts = [n for n, rate in tasks.available(mixture, directory, "train").items() if rate]
    if not parts:
        raise FileNotFoundError(f"no task of {mixture!r} has training data in {directory}")
    texts: list[str] = []
    for name in parts:
        found = evaluation_sets.load(
            name,
            "train",
            Bytes().build(),
            data_dir=directory,
            lengths={"inputs": 8, "targets": 8},
            max_examples=examples,
        )
        for row in found.examples:
            keys = ("inputs_pretokenized", "targets_pretokenized")
            texts += [evaluation_sets.text(row[key]) for key in keys]
    train_sentencepiece(texts, output, vocab_size=size)
    typer.echo(f"{output}: {size:,} pieces from {len(texts):,} texts of {', '.join(parts)}")
