"""`synthesizer-jax data import`."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.cli.options import DataDir, load_data_libraries
from synthesizer_jax.files import storage_path

if TYPE_CHECKING:
    from synthesizer_jax.tasks.imported import FileTask

MINE = "mine"
"""The name that imports files of the user's own."""

Name = Annotated[str | None, typer.Option(help="mine: the name of the task.")]
Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        help="mine: the input, with fields of a row in braces, such as 'review: {text}'; without it "
        "the task has targets only.",
    ),
]
Target = Annotated[
    str | None, typer.Option("--target", help="mine: the target, such as '{label}'.")
]
Labels = Annotated[
    str | None,
    typer.Option(help="mine: the allowed targets, such as 'bad,good' or '0=bad,1=good'."),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option("--metric", help="mine: accuracy (the default), bleu, f1, … Repeatable."),
]
Columns = Annotated[
    str | None,
    typer.Option(help="mine: the columns of CSV and TSV files that have no header, such as 'a,b'."),
]
Renew = Annotated[
    bool, typer.Option("--renew", help="Replace what was imported before, with all of its splits.")
]


def import_files(
    benchmark: Annotated[
        str,
        typer.Argument(help="mine, glue, super_glue, multi30k, …; an unknown name lists all."),
    ],
    source: Annotated[
        list[str],
        typer.Option(
            "--from",
            help="Directory of the files. mine: also SPLIT=FILE, several with commas or by repeating the "
            "option; in the name of a file, * stands for anything.",
        ),
    ],
    *,
    data_dir: DataDir = None,
    name: Name = None,
    inputs: Input = None,
    target: Target = None,
    labels: Labels = None,
    metrics: Metrics = None,
    columns: Columns = None,
    renew: Renew = False,
) -> None:
    """Write TFDS data sets from the original files of a benchmark or corpus, or from your own.

    Missing tasks are reported; splits of an earlier import are kept. A row that cannot be read stops the
    import with its file and line, and then no data set is changed.

    Your own files are JSON lines, CSV, TSV, Parquet, text (a row per line, with the field 'text') or
    aligned text (train=a.en+a.de), each also .gz or .zst. Example:
    synthesizer-jax data import mine --name reviews --from train=a.jsonl,validation=b.csv --input
    'review: {text}' --target '{label}' --labels bad,good
    """
    from synthesizer_jax.tasks.task_registry import default_data_dir

    directory = default_data_dir() if data_dir is None else data_dir
    if benchmark == MINE:
        if name is None or target is None:
            missing = "--name" if name is None else "--target"
            raise ValueError(f"'data import {MINE}' needs {missing}; --help shows an example")
        task = _describe_task(name, inputs, target, labels=labels, metrics=metrics)
        lines = _import_own(task, source, columns, data_dir=directory, renew=renew)
    elif any(x is not None for x in (name, inputs, target, labels, metrics, columns)):
        raise ValueError(
            f"{benchmark} is imported as it is published; --name, --input, --target, --labels, --metric "
            f"and --columns belong to 'data import {MINE}'"
        )
    else:
        lines = _import_benchmark(benchmark, source, data_dir=directory, renew=renew)
    for line in lines:
        typer.echo(line)
    typer.echo(f"data sets are in {directory}")


def _describe_task(
    name: str, inputs: str | None, target: str, *, labels: str | None, metrics: list[str] | None
) -> FileTask:
    """Returns the task that the options describe."""
    from synthesizer_jax.tasks.imported import FileTask, Template

    words = {}
    for label in labels.split(",") if labels else ():
        value, equals, word = label.partition("=")
        words[value] = word if equals else value
    return FileTask(
        name,
        None if inputs is None else Template(inputs),
        Template(target),
        ("accuracy",) if metrics is None else tuple(metrics),
        words,
    )


def _import_own(
    task: FileTask,
    source: list[str],
    columns: str | None,
    *,
    data_dir: pathlib.Path,
    renew: bool,
) -> list[str]:
    """Imports the user's own files and returns the lines of the report."""
    from synthesizer_jax.tasks.imported import import_files
    from synthesizer_jax.tasks.importers.files import find_splits

    splits = find_splits(source, columns=columns.split(",") if columns else ())
    load_data_libraries()
    found = import_files(task, splits, data_dir, renew=renew)
    return [
        *(line for summary in found for line in summary.lines()),
        f"train with --set data.mixture={task.name}",
    ]


def _import_benchmark(
    name: str, source: list[str], *, data_dir: pathlib.Path, renew: bool
) -> list[str]:
    """Imports a benchmark's files and returns the lines of the report."""
    from synthesizer_jax.messages import did_you_mean
    from synthesizer_jax.tasks.importers import CORPORA, import_corpus, report_lines

    if name not in CORPORA:
        known = (MINE, *CORPORA)
        raise ValueError(
            f"{name!r} cannot be imported{did_you_mean(name, known)}; choose one of "
            f"{', '.join(known)}"
        )
    if len(source) > 1:
        raise ValueError(f"{name} is imported from one directory; give one --from")
    load_data_libraries()
    return list(report_lines(import_corpus(name, storage_path(source[0]), data_dir, renew=renew)))
