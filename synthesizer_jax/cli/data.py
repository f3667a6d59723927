"""`synthesizer-jax data …`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.data_import import import_files
from synthesizer_jax.cli.options import DataDir, Imports, load_data_libraries, storage_option

if TYPE_CHECKING:
    from synthesizer_jax.data.vocabularies import Vocabulary
    from synthesizer_jax.tasks.inspection import Lengths, SplitCheck
    from synthesizer_jax.tasks.postprocessors import Example

SHOWN_TOKENS = 24
BAR = 40
"""Width of the longest bar of a histogram, in characters."""

app = typer.Typer(
    help="Import, list, show, check and prepare data sets, train vocabularies. Nothing is downloaded.",
    no_args_is_help=True,
)
app.command("import")(import_files)


def _open_directory(
    data_dir: pathlib.Path | None, imports: list[str] | None, *, libraries: bool = True
) -> pathlib.Path:
    """Makes all tasks known, the user's and those of imported files too; returns the data directory."""
    from synthesizer_jax.runs import code
    from synthesizer_jax.tasks import imported, synthetic, task_registry  # noqa: F401 - its tasks

    if libraries:
        load_data_libraries()
    directory = task_registry.default_data_dir() if data_dir is None else data_dir
    code.load_user_code(imports or ())
    imported.add_imported(directory)
    return directory


@app.command("prepare")
def prepare_tasks(
    mixture: Annotated[str, typer.Argument(help="Mixture or task to prepare.")],
    *,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            help="A SentencePiece model; by default bytes, or the synthetic mixture's own vocabulary."
        ),
    ] = None,
    extra_ids: Annotated[int, typer.Option(help="Sentinels added to the vocabulary.", min=0)] = 100,
    data_dir: DataDir = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Split to train on; by default train. Repeatable.")
    ] = None,
    evaluation_split: Annotated[
        list[str] | None,
        typer.Option(help="Split to evaluate on; by default validation. Repeatable."),
    ] = None,
    inputs_length: Annotated[
        int, typer.Option(help="Input tokens of a row, for tasks whose steps depend on it.", min=0)
    ] = 0,
    targets_length: Annotated[int, typer.Option(help="Target tokens of a row.", min=0)] = 0,
    epochs: Annotated[
        int | None,
        typer.Option(
            help="How often rows are read, for tasks with random steps; by default once, or as for what is "
            "there.",
            min=1,
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Prepare only this task of the mixture. Repeatable.")
    ] = None,
    workers: Annotated[
        int, typer.Option(help="Processes that read the files of large data sets.", min=1)
    ] = 1,
    renew: Annotated[bool, typer.Option("--renew", help="Write again what is there.")] = False,
    imports: Imports = None,
) -> None:
    """Tokenize a mixture's tasks once; training and evaluation read the files without TensorFlow.

    They are written into the data directory, where every run with the same vocabulary finds them, whatever
    its lengths. Training, eval, predict, distill and analyze prepare what they miss by themselves. A call
    that is interrupted keeps the files it has finished.
    """
    from synthesizer_jax.data.prepared import PreparedTasks
    from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
    from synthesizer_jax.tasks import synthetic
    from synthesizer_jax.tasks.prepare import prepare

    directory = _open_directory(data_dir, imports)
    config = Bytes(extra_ids) if vocabulary is None else SentencePiece(vocabulary, extra_ids)
    if mixture == synthetic.MIXTURE:
        synthetic.write(directory)
        config = synthetic.vocabulary(directory) if vocabulary is None else config
    lengths = {"inputs": inputs_length, "targets": targets_length}
    prepared = PreparedTasks(directory, config.build())
    prepare(
        mixture,
        prepared,
        training_splits=[name for name in split or ("train",) if name],
        evaluation_splits=[name for name in evaluation_split or ("validation",) if name],
        lengths=lengths if targets_length else None,
        epochs=epochs,
        only=task or (),
        workers=workers,
        renew=renew,
        setup=functools.partial(_open_directory, directory, imports),
        log=typer.echo,
    )
    typer.echo(f"prepared tasks are in {prepared.root}")


Mixture = Annotated[str | None, typer.Argument(help="Only the tasks of this mixture.")]


@app.command("list")
def list_tasks(mixture: Mixture = None, data_dir: DataDir = None, imports: Imports = None) -> None:
    """List the tasks with the numbers of prepared examples, and the mixtures.

    With --import also those of SeqIO's registries.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.tasks import task_registry

    directory = _open_directory(data_dir, imports, libraries=False)
    rates = (
        dict(task_registry.mixture_rates(mixture, directory))
        if mixture
        else dict.fromkeys(task_registry.task_names())
    )
    table = Table(title=f"{mixture or 'tasks'} in {directory}", title_justify="left")
    for heading in ("task", "data set", "rate", "prepared examples"):
        table.add_column(heading, justify="right" if heading == "rate" else "left")
    for name, rate in rates.items():
        splits = task_registry.find_task(name).stored_splits(directory)
        counts = {split: "?" if n is None else f"{n:,}" for split, n in splits.items()}
        prepared = ", ".join(f"{split} {n}" for split, n in counts.items()) or "none"
        formatted_rate = "" if rate is None else f"{rate:,.0f}"
        table.add_row(name, task_registry.find_task(name).dataset, formatted_rate, prepared)
    console = Console(width=140)
    console.print(table)
    if mixture is None:
        console.print(f"mixtures: {', '.join(task_registry.mixture_names())}", highlight=False)


@app.command("show")
def show_task(
    task: Annotated[str, typer.Argument(help="Task.")],
    *,
    data_dir: DataDir = None,
    split: Annotated[str, typer.Option(help="Split.")] = "train",
    vocabulary: Annotated[
        pathlib.Path | None,
        storage_option("SentencePiece model that counts the tokens; by default UTF-8 bytes."),
    ] = None,
    rows: Annotated[int, typer.Option(help="Number of rows to show.", min=0)] = 3,
    examples: Annotated[int, typer.Option(help="Number of rows to measure.", min=1)] = 2000,
    inputs_length: Annotated[int, typer.Option(help="Input tokens of a batch.", min=1)] = 512,
    targets_length: Annotated[int, typer.Option(help="Target tokens of a batch.", min=1)] = 114,
    imports: Imports = None,
) -> None:
    """Show a task's texts and tokens, and how long they are.

    Lengths count EOS; what is longer than a batch's row is truncated in training and evaluation.
    """
    from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
    from synthesizer_jax.tasks import inspection

    directory = _open_directory(data_dir, imports)
    built = (Bytes() if vocabulary is None else SentencePiece(str(vocabulary))).build()
    read = inspection.read_rows(task, split, built, data_dir=directory, count=max(rows, examples))
    found = list(read)
    for row in found[:rows]:
        _print_row(row, built)
    unit = "bytes" if vocabulary is None else "tokens"
    typer.echo(f"{task}, {split}: lengths of {len(found[:examples]):,} rows in {unit}")
    for feature, limit in (("inputs", inputs_length), ("targets", targets_length)):
        lengths = inspection.Lengths.of(found[:examples], feature)
        if lengths.lengths.any():
            _print_lengths(lengths, limit)


def _print_row(row: Example, vocabulary: Vocabulary) -> None:
    """Prints a row's texts and the first of its tokens."""
    from synthesizer_jax.data.task_streams import SIDES
    from synthesizer_jax.data.vocabularies import EOS
    from synthesizer_jax.tasks.inspection import text_of

    for feature in SIDES:
        if feature not in row:
            continue
        ids = [int(i) for i in row[feature]]
        text = text_of(row, feature, vocabulary)
        pieces = "·".join(vocabulary.decode([i]) for i in ids[:SHOWN_TOKENS] if i != EOS)
        more = "…" if len(ids) > SHOWN_TOKENS else ""
        typer.echo(f"{feature}: {text}")
        typer.echo(f"  {len(ids):,} tokens: {pieces}{more}")
        typer.echo(f"  ids: {' '.join(map(str, ids[:SHOWN_TOKENS]))}{more}")
    typer.echo("")


def _print_lengths(lengths: Lengths, limit: int) -> None:
    """Prints percentiles, the truncated share and a histogram."""
    import numpy as np

    middle, most = np.percentile(lengths.lengths, [50, 99])
    typer.echo(
        f"{lengths.feature}: median {middle:.0f}, 99th percentile {most:.0f}, longest "
        f"{lengths.lengths.max():,}; {lengths.truncated_share(limit):.1%} are longer than {limit}"
    )
    histogram = lengths.histogram(limit)
    largest = max(count for _, count in histogram)
    width = max(len(name) for name, _ in histogram)
    for name, count in histogram:
        bar = "█" * round(BAR * count / largest)
        typer.echo(f"  {name:>{width}} {bar} {count:,}".rstrip())


@app.command("check")
def check_tasks(
    mixture: Annotated[str, typer.Argument(help="Mixture or task.")],
    *,
    data_dir: DataDir = None,
    imports: Imports = None,
) -> None:
    """Compare prepared data sets with their published sizes, and their splits with each other.

    Exits with 1 where a split has another number of rows than was published.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.tasks import inspection, task_registry

    directory = _open_directory(data_dir, imports)
    names = [
        n
        for n in task_registry.member_names(mixture)
        if task_registry.find_task(n).stored_splits(directory)
    ]
    if not names:
        raise FileNotFoundError(
            f"no task of {mixture!r} has data in {directory}; import it with 'synthesizer-jax data "
            "import', or name another --data-dir"
        )
    checks = [check for name in names for check in inspection.check_splits(name, directory)]
    table = Table(title=f"{mixture} in {directory}", title_justify="left")
    for heading in ("task", "split", "rows", "published", "repeated rows", "inputs shared with"):
        table.add_column(heading, justify="left" if heading in ("task", "split") else "right")
    for check in checks:
        table.add_row(*_cells(check))
    Console(width=140).print(table)
    wrong = [f"{c.task} {c.split}" for c in checks if c.is_complete is False]
    if wrong:
        typer.echo(f"not of the published size: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def _cells(check: SplitCheck) -> tuple[str, ...]:
    """Returns a row of the table of checks."""
    published = " or ".join(f"{n:,}" for n in check.published) or "not known"
    shared = ", ".join(f"{other} {n:,}" for other, n in check.shared.items()) or "–"
    rows = "?" if check.rows is None else f"{check.rows:,}"
    mark = " ✗" if check.is_complete is False else ""
    return check.task, check.split, rows + mark, published, f"{check.repeated:,}", shared


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
    from synthesizer_jax.data.vocabularies import train_sentencepiece
    from synthesizer_jax.tasks import task_registry

    directory = _open_directory(data_dir, imports)
    members = [
        name
        for name, rate in task_registry.mixture_rates(mixture, directory).items()
        if rate and "train" in task_registry.find_task(name).stored_splits(directory)
    ]
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
    from synthesizer_jax.tasks.inspection import read_rows, text_of

    vocabulary = Bytes().build()
    for row in read_rows(task, "train", vocabulary, data_dir=data_dir, count=max_examples):
        yield from (text_of(row, side, vocabulary) for side in ("inputs", "targets"))
