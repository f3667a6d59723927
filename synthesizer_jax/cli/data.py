"""Defines the commands `synthesizer-jax data …`, which import, prepare and check data sets."""

from __future__ import annotations

import contextlib
import functools
import itertools
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.messages import Phase, did_you_mean, end_sentence
from synthesizer_jax.base.typing import Count, Number, Range
from synthesizer_jax.cli.options import DataDir, Imports, print_table
from synthesizer_jax.data.tokenizer_json import AnyVocabulary, Tokenizer, is_tokenizer
from synthesizer_jax.data.vocabularies import EXTRA_IDS, Bytes, SentencePiece

if TYPE_CHECKING:
    from synthesizer_jax.training.experiment import Experiment

SHOWN_TOKENS = 24
"""The number of tokens of a text that `data show` prints."""

MINE = "mine"
"""The name with which `data import` imports the user's own files."""


def _open_directory(
    data_dir: pathlib.Path | None, imports: list[str] | None, *, libraries: bool = True
) -> pathlib.Path:
    """Registers all tasks, and returns the data directory.

    The registered tasks include the tasks of the user's code, and the tasks of files that were
    imported before.

    Args:
      data_dir: the data directory. `None` means the default data directory.
      imports: the user's packages or files to load.
      libraries: whether to import TensorFlow, because the caller needs it.
    """
    from synthesizer_jax.preparation.rows import import_tensorflow
    from synthesizer_jax.runs import code
    from synthesizer_jax.tasks import task_registry

    if libraries:
        import_tensorflow()
    directory = data_dir or task_registry.default_data_dir()
    code.load_user_code(imports or ())
    task_registry.add_imported(directory)
    return directory


@contextlib.contextmanager
def _show_phases() -> Iterator[Phase]:
    """Context manager that shows the phases of a command. The first phase loads TensorFlow."""
    from synthesizer_jax.preparation.rows import import_tensorflow
    from synthesizer_jax.runs.progress import show_phases

    with show_phases() as phase:
        advance = phase("loading TensorFlow", 1)
        import_tensorflow()
        advance(1)
        yield phase


def _vocabulary(name: str | None, extra_ids: int | None = None, bos: bool = False) -> AnyVocabulary:
    """Returns the vocabulary in a file, or `Bytes` for the name "bytes" or `None`.

    Raises:
      ValueError: if `extra_ids` or `bos` is given for a ``tokenizer.json``, which has sentinels and
        BOS of its own.
    """
    if name is not None and is_tokenizer(name):
        if extra_ids is not None or bos:
            raise ValueError(
                f"{name} determines the sentinels and BOS. Leave --extra-ids and --bos out."
            )
        return Tokenizer(name)
    if extra_ids is None:
        extra_ids = EXTRA_IDS
    if name is None or name == "bytes":
        return Bytes(extra_ids)
    return SentencePiece(name, extra_ids, bos)


def prepare_missing(
    experiment: Experiment,
    data_dir: pathlib.Path | None,
    *,
    trains: bool = True,
    only: Sequence[str] = (),
) -> None:
    """Prepares the data of a run if the data is not prepared already.

    The work is done in a separate process, so that this process need not import TensorFlow. In a
    group of processes, only process zero starts the separate process, and all other processes wait.

    Args:
      experiment: the experiment of the run.
      data_dir: the data directory. `None` means the default data directory.
      trains: whether the run will be trained. If `trains` is false, only evaluation data is
        prepared.
      only: the tasks to prepare. An empty list means all tasks.

    Raises:
      ValueError: the separate process fails. The message contains the command of this process and
        the last line of its output.
      FileNotFoundError: no data is prepared, and there are no data sets from which data could be
        prepared.
    """
    from synthesizer_jax.hosts import processes
    from synthesizer_jax.tasks import task_registry
    from synthesizer_jax.training.run import missing_preparation

    directory = data_dir or task_registry.default_data_dir()
    task_registry.add_imported(directory)
    with processes.process_zero_first("data"):
        missing = missing_preparation(experiment, directory, trains=trains, only=only)
        if not missing:
            return
        command = [sys.executable, "-m", "synthesizer_jax", *missing]
        done = subprocess.run(
            command, check=False, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        if not done.returncode:
            print(done.stderr, end="", file=sys.stderr)
        else:
            # If the process fails, the last line of its output is the error message. Include this
            # message in the error that is raised here.
            said, _, last = done.stderr.rstrip().rpartition("\n")
            print(said, end="", file=sys.stderr)
            reason = last.removeprefix("error: ") or f"exit code {done.returncode}"
            raise ValueError(
                f"{experiment.data.mixture} could not be prepared: {end_sentence(reason)} The "
                f"command was: synthesizer-jax {shlex.join(missing)}"
            )


def import_files(
    benchmark: str,
    *,
    source: Annotated[list[str], "--from"],
    data_dir: DataDir = None,
    name: str | None = None,
    inputs: Annotated[str | None, "--input"] = None,
    target: str | None = None,
    labels: str | None = None,
    metrics: Annotated[list[str] | None, "--metric"] = None,
    columns: str | None = None,
    renew: bool = False,
) -> None:
    """Import files as data sets: a benchmark's archive, a known data set, or your own files.

    The data sets are written in the format of TFDS. If a row cannot be read,
    the command prints the file and the line, and changes no data set. Splits
    that were imported before are kept. If an archive does not contain a split,
    the command says so.

    The format of a file may be JSON lines, CSV, TSV, Parquet, text (one row per
    line, with the field 'text') or aligned text (train=a.en+a.de). All files
    except Parquet may be compressed as .gz or .zst.

    Example: synthesizer-jax data import wmt14_translate/de-en
    --from train=a.en+a.de,validation=b.en+b.de

    Example: synthesizer-jax data import mine --name reviews
    --from train=a.jsonl,validation=b.csv --input 'review: {text}'
    --target '{label}' --labels bad,good

    Args:
      benchmark: an archive (glue or super_glue), the name of a data set that a task reads, such as
        cnn_dailymail, or mine for your own files. An unknown name prints the list of all names.
      source: for an archive, its directory. For files, SPLIT=FILE or a directory. To give several
        sources, separate them with commas, or repeat the option. In the name of a file, * stands
        for any characters.
      name: for your own files, the name of the task.
      inputs: for your own files, a template for the input, with the names of fields in braces, such
        as 'review: {text}'. Without this option, the task has only targets.
      target: for your own files, a template for the target, such as '{label}'. Give '' if the
        targets are not known, so that they can only be predicted.
      labels: the allowed targets, such as 'bad,good' or '0=bad,1=good'. For a known data set, the
        label words for which the values in your files stand.
      metrics: for your own files, the metric, such as accuracy (the default), bleu or f1.
        Repeatable.
      columns: the columns of CSV and TSV files without a header, or of aligned files, such as
        'a,b'.
      renew: replace all splits of a data set that was imported before.
    """
    from synthesizer_jax.preparation import file_tasks
    from synthesizer_jax.preparation.importers import corpora
    from synthesizer_jax.preparation.importers.archives import ARCHIVES, DATASETS
    from synthesizer_jax.preparation.importers.files import find_splits
    from synthesizer_jax.tasks.task_registry import default_data_dir

    directory = data_dir or default_data_dir()
    words = _label_words(labels)
    column_names = columns.split(",") if columns else []
    hints = []
    if benchmark == MINE:
        if name is None or target is None:
            missing = "--name" if name is None else "--target"
            raise ValueError(f"'data import {MINE}' needs {missing}. See the example in --help.")
        task = file_tasks.FileTask(
            name,
            None if inputs is None else file_tasks.Template(inputs),
            file_tasks.Template(target) if target else None,
            tuple(metrics or ["accuracy"]),
            words,
        )
        files = find_splits(source, columns=column_names)
        with _show_phases() as phase:
            reports = file_tasks.import_files(task, files, directory, renew=renew, phase=phase)
        if target:
            split = "" if "train" in files else f" --set data.split={min(files)}"
            hints.append(f"train with --set data.mixture={name}{split}")
    elif any(option is not None for option in (name, inputs, target, metrics)):
        raise ValueError(
            f"{benchmark} has its own format. The options --name, --input, --target and --metric "
            f"can only be used with 'data import {MINE}'."
        )
    elif benchmark in DATASETS:
        files = find_splits(source, columns=column_names)
        with _show_phases() as phase:
            reports = corpora.import_dataset(
                benchmark, files, directory, labels=words, renew=renew, phase=phase
            )
    elif benchmark not in ARCHIVES:
        importable = (MINE, *ARCHIVES, *DATASETS)
        hint = did_you_mean(benchmark, importable) or "."
        raise ValueError(
            f"There is no data set {benchmark!r} to import{hint} Choose one of "
            f"{', '.join(importable)}."
        )
    elif len(source) > 1 or labels or columns:
        raise ValueError(
            f"{benchmark} is imported from the directory of its published files. Give this "
            "directory with --from, and neither --labels nor --columns."
        )
    else:
        with _show_phases() as phase:
            reports = corpora.import_archive(
                benchmark, storage_path(source[0]), directory, renew=renew, phase=phase
            )
    lines = [*corpora.report_lines(reports), *hints, f"data sets are in {directory}"]
    typer.echo("\n".join(lines))


def _label_words(labels: str | None) -> dict[str, str]:
    """Returns a dictionary that maps the values in ``--labels`` to the words for which they stand.

    If an entry of ``--labels`` has no ``=``, the entry is both the value and the word.

    Raises:
      ValueError: a value occurs twice.
    """
    words: dict[str, str] = {}
    for label in labels.split(",") if labels else ():
        value, equals, word = label.partition("=")
        if value in words:
            raise ValueError(f"--labels contains {value!r} twice. Give every value only once.")
        words[value] = word if equals else value
    return words


def prepare_tasks(
    mixture: str,
    *,
    vocabulary: str | None = None,
    extra_ids: Number | None = None,
    bos: bool = False,
    data_dir: DataDir = None,
    split: list[str] | None = None,
    evaluation_split: list[str] | None = None,
    inputs_length: Number = 0,
    targets_length: Number = 0,
    epochs: Count | None = None,
    task: list[str] | None = None,
    workers: Count = 1,
    renew: bool = False,
    imports: Imports = None,
) -> None:
    """Tokenize the tasks of a mixture once, so that runs can read them without TensorFlow.

    The prepared files are written to the data directory. All runs with the same
    vocabulary use the same prepared files, even if their sequence lengths
    differ. You rarely need this command, because train, eval, predict, distill
    and inspect prepare missing data themselves. If you interrupt the command,
    the finished files are kept.

    Args:
      mixture: the mixture or task to prepare.
      vocabulary: a SentencePiece model, a tokenizer.json, or the word bytes. The default is bytes.
        The synthetic mixtures use their own vocabulary by default.
      extra_ids: the number of sentinels that are added to a SentencePiece model or to bytes. The
        default is 100.
      bos: begin inputs with the BOS of a SentencePiece model like Gemma's. Inputs then do not end
        with EOS.
      split: a split to train on. The default is train. Repeatable.
      evaluation_split: a split to evaluate on. The default is validation. Repeatable.
      inputs_length: the number of input tokens in a row, for tasks whose preprocessing depends on
        this number.
      targets_length: the number of target tokens in a row, for tasks whose preprocessing depends on
        this number.
      epochs: how many times the rows are read, for tasks with random steps. The default is 1, or
        the number of epochs in the files that are already prepared.
      task: prepare only this task of the mixture. Repeatable.
      workers: the number of processes that read the files of large data sets.
      renew: prepare files again even if they exist.
    """
    from synthesizer_jax.data.prepared import PreparedTasks
    from synthesizer_jax.preparation.prepare import prepare
    from synthesizer_jax.preparation.synthetic import train_vocabulary
    from synthesizer_jax.tasks import synthetic

    directory = _open_directory(data_dir, imports)
    config = _vocabulary(vocabulary, extra_ids, bos)
    if vocabulary is None and mixture in synthetic.MIXTURES:
        train_vocabulary(directory)
        config = synthetic.vocabulary(directory)
    lengths = {"inputs": inputs_length, "targets": targets_length}
    prepared = PreparedTasks(directory, config.build())
    prepare(
        mixture,
        prepared,
        training_splits=list(filter(None, split or ["train"])),
        evaluation_splits=list(filter(None, evaluation_split or ["validation"])),
        lengths=lengths if targets_length else None,
        epochs=epochs,
        only=task or (),
        workers=workers,
        renew=renew,
        setup=functools.partial(_open_directory, directory, imports),
        log=typer.echo,
    )
    typer.echo(f"prepared tasks are in {prepared.root}")


def list_tasks(
    mixture: str | None = None, *, data_dir: DataDir = None, imports: Imports = None
) -> None:
    """List all tasks, the number of examples that each has in the data directory, and all mixtures.

    With --import, the tasks and mixtures that your code adds to the registries
    of SeqIO are listed, too.

    Args:
      mixture: list only the tasks of this mixture, together with their rates.
    """
    from synthesizer_jax.tasks import task_registry

    directory = _open_directory(data_dir, imports, libraries=False)
    rates: dict[str, float | None]
    if mixture is None:
        rates = dict.fromkeys(task_registry.task_names())
    else:
        rates = {**task_registry.mixture_rates(mixture, directory)}
    rows = []
    for name, rate in rates.items():
        task = task_registry.find_task(name)
        splits = task.stored_splits(directory).items()
        stored = ", ".join(f"{split} {'?' if n is None else f'{n:,}'}" for split, n in splits)
        rows.append((name, task.dataset, stored or "none", "" if rate is None else f"{rate:,.0f}"))
    headings = ("task", "data set", "examples", "rate")
    print_table(headings, rows, title=f"{mixture or 'tasks'} in {directory}", left=3)
    if mixture is None:
        typer.echo(f"mixtures: {', '.join(task_registry.mixture_names())}")


def show_task(
    task: str,
    *,
    data_dir: DataDir = None,
    split: str = "train",
    vocabulary: str | None = None,
    rows: Number = 3,
    examples: Count = 2000,
    imports: Imports = None,
) -> None:
    """Show the texts and tokens of some rows of a task, and the lengths of its inputs and targets.

    Lengths include EOS.

    Args:
      task: the name of the task.
      split: the split of the task.
      vocabulary: the vocabulary that splits texts into tokens, a SentencePiece model, a
        tokenizer.json or the word bytes. The default is bytes.
      rows: the number of rows to show.
      examples: the number of rows whose lengths are measured.
    """
    import numpy as np

    from synthesizer_jax.data.examples import SIDES
    from synthesizer_jax.preparation import task_contents

    built = _vocabulary(vocabulary).build()
    with _show_phases() as phase:
        directory = _open_directory(data_dir, imports)
        read = task_contents.read_rows(
            task, split, built, data_dir=directory, count=max(rows, examples), phase=phase
        )
        measured = list(read)

    for row in measured[:rows]:
        for side in SIDES:
            if side not in row:
                continue
            ids = [int(i) for i in row[side]]
            shown = ids[:SHOWN_TOKENS]
            more = "…" if len(ids) > SHOWN_TOKENS else ""
            pieces = "·".join(built.decode([i]) for i in shown if i != built.eos_id)
            typer.echo(
                f"{side}: {task_contents.text_of(row, side, built)}\n"
                f"  {len(ids):,} tokens: {pieces}{more}\n"
                f"  ids: {' '.join(map(str, shown))}{more}"
            )
    unit = "bytes" if isinstance(built, Bytes) else "tokens"
    typer.echo(f"{task}, {split}: lengths of {len(measured[:examples]):,} rows in {unit}")
    for side in SIDES:
        lengths = [len(row[side]) for row in measured[:examples] if side in row]
        if lengths:
            middle, most = np.percentile(lengths, [50, 99])
            typer.echo(
                f"{side}: median {middle:.0f}, 99th percentile {most:.0f}, longest {max(lengths):,}"
            )


def check_tasks(mixture: str, *, data_dir: DataDir = None, imports: Imports = None) -> None:
    """Compare data sets with their published sizes, and find repeated rows and shared inputs.

    The table shows how many rows of a split are repeated, and how many inputs
    it shares with other splits of the task. The exit code is 1 if a split does
    not have the published number of rows.

    Args:
      mixture: the mixture or task whose data sets are checked.
    """
    from synthesizer_jax.preparation import task_contents

    with _show_phases() as phase:
        directory = _open_directory(data_dir, imports)
        checks = [
            check
            for name in _members(mixture, directory)
            for check in task_contents.check_splits(name, directory, phase=phase)
        ]

    rows = []
    for check in checks:
        published = "not known" if check.published is None else f"{check.published:,}"
        shared = ", ".join(f"{other} {n:,}" for other, n in check.shared.items()) or "–"
        number = "?" if check.rows is None else f"{check.rows:,}"
        if check.is_complete is False:
            number += " ✗"
        rows.append((check.task, check.split, number, published, f"{check.repeated:,}", shared))
    headings = ("task", "split", "rows", "published", "repeated rows", "inputs shared with")
    print_table(headings, rows, title=f"{mixture} in {directory}", left=2)

    wrong = [f"{check.task} {check.split}" for check in checks if check.is_complete is False]
    if wrong:
        typer.echo(f"Splits without their published number of rows: {', '.join(wrong)}", err=True)
        raise typer.Exit(1)


def train_vocabulary(
    mixture: str,
    *,
    output: pathlib.Path,
    data_dir: DataDir = None,
    size: Annotated[int, Range(16)] = 8000,
    examples: Count = 20_000,
    imports: Imports = None,
) -> None:
    """Train a SentencePiece model on the inputs and targets of a mixture's training split.

    Args:
      mixture: the mixture or task that provides the text.
      output: the file of the new SentencePiece model.
      size: the number of pieces.
      examples: the maximum number of examples to read from each task.
    """
    from synthesizer_jax.data.examples import SIDES
    from synthesizer_jax.data.vocabularies import train_sentencepiece
    from synthesizer_jax.preparation.task_contents import read_rows, text_of

    # Use the vocabulary of bytes. Only the texts of the rows are used, so any vocabulary will do
    # here.
    codec = Bytes().build()
    with _show_phases() as phase:
        directory = _open_directory(data_dir, imports)
        members = _members(mixture, directory, "train")
        rows = itertools.chain.from_iterable(
            read_rows(name, "train", codec, data_dir=directory, count=examples, phase=phase)
            for name in members
        )
        texts = [text_of(row, side, codec) for row in rows for side in SIDES]
        texts = [text for text in texts if text]

        advance = phase(f"training a vocabulary of {size:,} pieces", 1)
        train_sentencepiece(texts, output, vocab_size=size)
        advance(1)
    typer.echo(f"{output}: {size:,} pieces from {len(texts):,} texts of {', '.join(members)}")


def _members(mixture: str, directory: pathlib.Path, split: str | None = None) -> list[str]:
    """Returns the names of the tasks of a mixture that have data in a directory.

    Args:
      mixture: the name of a mixture or a task.
      directory: the data directory.
      split: the split that a task must have to be returned. `None` means any split.

    Raises:
      FileNotFoundError: no task has data. The message says how to import the data of the tasks.
    """
    from synthesizer_jax.tasks import task_registry
    from synthesizer_jax.tasks.splits import import_remedy

    names = task_registry.member_names(mixture)
    stored = {name: task_registry.find_task(name).stored_splits(directory) for name in names}
    members = [name for name, splits in stored.items() if splits and split in (None, *splits)]
    if not members:
        data = "data" if split is None else f"a split {split!r}"
        raise FileNotFoundError(
            f"No task of {mixture!r} has {data} in {directory}. {import_remedy(names, directory)}"
        )
    return members
