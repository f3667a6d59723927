"""`synthesizer-jax data …`."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Annotated

import typer

from synthesizer_jax.cli.data_cache import cache_tasks
from synthesizer_jax.cli.data_import import import_files
from synthesizer_jax.cli.data_show import check_tasks, list_tasks, load_tasks, show_task
from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.options import DataDir, Imports, storage_option

app = typer.Typer(
    help="Import, list, show and check data sets, train vocabularies, cache tokens. Nothing is downloaded.",
    no_args_is_help=True,
)
app.command("cache")(cache_tasks)


app.command("import")(import_files)


app.command("list")(list_tasks)
app.command("show")(show_task)
app.command("check")(check_tasks)


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
    load_tasks(directory, imports)
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
