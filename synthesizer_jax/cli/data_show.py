"""`synthesizer-jax data list`, `show` and `check`."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.libraries import load_data_libraries
from synthesizer_jax.cli.options import DataDir, Imports, storage_option

if TYPE_CHECKING:
    from synthesizer_jax.data.vocabularies import Vocabulary
    from synthesizer_jax.tasks.inspection import Lengths, SplitCheck
    from synthesizer_jax.tasks.postprocessors import Example

SHOWN_TOKENS = 24
BAR = 40
"""Width of the longest bar of a histogram, in characters."""

Mixture = Annotated[str | None, typer.Argument(help="Only the tasks of this mixture.")]


def list_tasks(mixture: Mixture = None, data_dir: DataDir = None, imports: Imports = None) -> None:
    """List the tasks with the numbers of prepared examples, and the mixtures.

    With --import also those of SeqIO's registries.
    """
    from rich.console import Console
    from rich.table import Table

    from synthesizer_jax.tasks import task_registry

    directory = task_registry.default_data_dir() if data_dir is None else data_dir
    load_tasks(directory, imports)
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
    from synthesizer_jax.tasks import inspection, task_registry

    load_data_libraries()
    directory = task_registry.default_data_dir() if data_dir is None else data_dir
    load_tasks(directory, imports)
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
    from synthesizer_jax.tasks.inspection import text_of

    for feature in SIDES:
        if feature not in row:
            continue
        ids = [int(i) for i in row[feature]]
        text = text_of(row, feature, vocabulary)
        pieces = "·".join(
            vocabulary.decode([i]) for i in ids[:SHOWN_TOKENS] if i != vocabulary.eos_id
        )
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

    load_data_libraries()
    directory = task_registry.default_data_dir() if data_dir is None else data_dir
    load_tasks(directory, imports)
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


def load_tasks(data_dir: pathlib.Path, imports: list[str] | None) -> None:
    """Makes all tasks known: those of the package, of imported packages and of imported files."""
    from synthesizer_jax.runs import code
    from synthesizer_jax.tasks import imported, synthetic  # noqa: F401 - its tasks

    code.load_user_code(imports or ())
    imported.add_imported(data_dir)
