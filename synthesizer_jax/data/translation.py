"""Translation tasks from parallel text files, in T5's format.

Importing this module adds its tasks to `data.tasks`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from synthesizer_jax.data import tasks
from synthesizer_jax.data.definitions import TaskDefinition
from synthesizer_jax.data.formats import Translation
from synthesizer_jax.data.importers.reading import import_error, read_lines
from synthesizer_jax.data.importers.report import ImportReport, SplitReport
from synthesizer_jax.data.staging import staging
from synthesizer_jax.data.storage import write_dataset
from synthesizer_jax.evaluation.metrics import bleu

VERSION = "1.0.0"
LANGUAGES = MappingProxyType({"en": "English", "de": "German", "fr": "French"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A corpus of parallel text files: one file per language and split, aligned line by line.

    Attributes:
      pairs: the pairs of languages.
      files: ``{split: stem}``; the files of a split are ``stem.language``, plain or ``.gz``.
      sizes: number of lines of every split.
    """

    pairs: tuple[tuple[str, str], ...]
    files: Mapping[str, str]
    sizes: Mapping[str, int]


CORPORA: Mapping[str, Corpus] = MappingProxyType(
    {
        "multi30k": Corpus(  # Elliott et al. 2016, 2017
            pairs=(("en", "de"), ("en", "fr")),
            files={"train": "train", "validation": "val", "test": "test_2016_flickr"},
            sizes={"train": 29_000, "validation": 1_014, "test": 1_000},
        )
    }
)


def _translation_tasks() -> Iterator[TaskDefinition]:
    """Yields the tasks of both directions of every pair."""
    for name, corpus in CORPORA.items():
        for pair in corpus.pairs:
            for source, target in (pair, pair[::-1]):
                yield TaskDefinition(
                    f"{name}_{source}_{target}",
                    f"{name}/{'_'.join(pair)}",
                    Translation(
                        f"translate {LANGUAGES[source]} to {LANGUAGES[target]}:", (source, target)
                    ),
                    metrics=(bleu,),
                    splits=tuple(corpus.files),
                )


tasks.add(_translation_tasks())


def import_corpus(name: str, source: pathlib.Path, data_dir: pathlib.Path) -> ImportReport:
    """Writes the TFDS data sets of a corpus from its text files, all of them or none.

    A pair of languages without all of its files is reported as missing.

    Args:
      name: a key of `CORPORA`.
      source: the directory of the files, or its parent if the directory is called `name`.
      data_dir: a TFDS data directory; created if it does not exist.

    Raises:
      ValueError: no pair has all of its files, a line is empty, or a file does not have the
        published number of lines.
    """
    corpus = CORPORA[name]
    source = source / name if (source / name).is_dir() else source
    reports = []
    with staging(data_dir, name) as stage:
        directories = []
        for pair in corpus.pairs:
            config = "_".join(pair)
            missing = [
                f"{stem}.{language}"
                for stem in corpus.files.values()
                for language in pair
                if find_file(source, stem, language) is None
            ]
            for split in corpus.files if missing else ():
                reports.append(SplitReport(missing[0], f"{name}/{config}", split, "missing"))
            if not missing:
                directory = _write_pair(name, pair, source, data_dir=stage.data)
                directories.append(directory)
                reports += _corpus_report(name, pair, source)
        if not directories:
            raise ValueError(
                f"{source} lacks {reports[0].task}; give the folder of {name}'s text files"
            )
        stage.commit(directories)
    return ImportReport(name, str(data_dir), tuple(reports))


def _write_pair(
    name: str, pair: tuple[str, str], source: pathlib.Path, *, data_dir: pathlib.Path
) -> pathlib.Path:
    """Writes the data set of one pair of languages and returns its directory."""
    import tensorflow_datasets as tfds

    corpus = CORPORA[name]
    rows = {split: _read_aligned(corpus, split, pair=pair, source=source) for split in corpus.files}
    return write_dataset(
        name,
        "_".join(pair),
        version=VERSION,
        description=f"{name}, aligned lines.",
        features={language: tfds.features.Text() for language in pair},
        splits={split: functools.partial(iter, split_rows) for split, split_rows in rows.items()},
        data_dir=data_dir,
    )


def _read_aligned(
    corpus: Corpus, split: str, *, pair: tuple[str, str], source: pathlib.Path
) -> list[dict[str, str]]:
    """Returns the rows of one split.

    Raises:
      ValueError: a line is empty, or a file does not have the published number of lines.
    """
    paths = [find_file(source, corpus.files[split], language) for language in pair]
    assert all(path is not None for path in paths)
    files = [list(read_lines(path)) for path in paths if path is not None]
    for path, lines in zip(paths, files, strict=True):
        empty_line = next((number for number, line in lines if not line.strip()), None)
        if empty_line is not None:
            raise import_error(
                pathlib.Path(str(path)), empty_line, "an empty line, which is no translation"
            )
        if len(lines) != corpus.sizes[split]:
            raise import_error(
                pathlib.Path(str(path)),
                len(lines),
                f"the file ends here, where {split} has {corpus.sizes[split]:,} lines",
            )
    texts = ([line for _, line in lines] for lines in files)
    return [dict(zip(pair, translations, strict=True)) for translations in zip(*texts, strict=True)]


def _corpus_report(name: str, pair: tuple[str, str], source: pathlib.Path) -> Iterator[SplitReport]:
    """Yields the report of every split of a pair that was imported."""
    corpus = CORPORA[name]
    for split, stem in corpus.files.items():
        path = find_file(source, stem, pair[1])
        yield SplitReport(
            stem, f"{name}/{'_'.join(pair)}", split, "complete", corpus.sizes[split], 0, str(path)
        )


def find_file(source: pathlib.Path, stem: str, language: str) -> pathlib.Path | None:
    """Returns the file of one language, plain or gzip, or None."""
    for path in (source / f"{stem}.{language}", source / f"{stem}.{language}.gz"):
        if path.exists():
            return path
    return None
