"""Translation tasks from parallel text files, in T5's format.

Importing it makes its tasks known to `data.tasks`.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from synthesizer_jax.data import tasks
from synthesizer_jax.data.definitions import TaskDefinition
from synthesizer_jax.data.importers.reading import broken, read_lines
from synthesizer_jax.data.importers.report import ImportReport, SplitReport
from synthesizer_jax.data.metrics import bleu
from synthesizer_jax.data.staging import staging
from synthesizer_jax.data.storage import write_dataset

VERSION = "1.0.0"
LANGUAGES = MappingProxyType({"en": "English", "de": "German", "fr": "French"})


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Aligned text files, one language each, line by line.

    Attributes:
      pairs: the languages, two and two.
      files: the stem of every split's files, ``{split: stem}``; a file is ``stem.language``, plain or
        ``.gz``.
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


def definitions() -> Iterator[TaskDefinition]:
    """Both directions of every pair."""
    for name, corpus in CORPORA.items():
        for pair in corpus.pairs:
            for source, target in (pair, pair[::-1]):
                yield TaskDefinition(
                    f"{name}_{source}_{target}",
                    f"{name}/{'_'.join(pair)}",
                    prefix=f"translate {LANGUAGES[source]} to {LANGUAGES[target]}:",
                    features=(source, target),
                    kind="translation",
                    metrics=(bleu,),
                    splits=tuple(corpus.files),
                )


tasks.add(definitions())


def import_corpus(name: str, source: pathlib.Path, data_dir: pathlib.Path) -> ImportReport:
    """Writes the TFDS data sets of a corpus from its text files, all of them or none.

    Args:
      name: of `CORPORA`.
      source: the folder that holds the files, or its parent when that is called `name`.
      data_dir: a TFDS data directory; made if need be.

    Raises:
      ValueError: a file is missing, or two languages have not the published number of lines.
    """
    corpus = CORPORA[name]
    source = source / name if (source / name).is_dir() else source
    reports = []
    with staging(data_dir, name) as stage:
        written = []
        for pair in corpus.pairs:
            config = "_".join(pair)
            missing = [
                f"{stem}.{language}"
                for stem in corpus.files.values()
                for language in pair
                if find(source, stem, language) is None
            ]
            for split in corpus.files if missing else ():
                reports.append(SplitReport(missing[0], f"{name}/{config}", split, "missing"))
            if not missing:
                found = write_pair(name, pair, source, stage.data)
                written.append(found)
                reports += report(name, pair, source)
        if not written:
            raise ValueError(
                f"{source} lacks {reports[0].task}; give the folder of {name}'s text files"
            )
        stage.put(written)
    return ImportReport(name, str(data_dir), tuple(reports))


def write_pair(
    name: str, pair: tuple[str, str], source: pathlib.Path, data_dir: pathlib.Path
) -> pathlib.Path:
    """Writes the data set of one pair of languages."""
    import tensorflow_datasets as tfds

    corpus = CORPORA[name]
    rows = {split: aligned(corpus, split, pair, source) for split in corpus.files}
    return write_dataset(
        name,
        "_".join(pair),
        version=VERSION,
        description=f"{name}, aligned lines.",
        features={language: tfds.features.Text() for language in pair},
        splits={split: functools.partial(iter, found) for split, found in rows.items()},
        data_dir=data_dir,
    )


def aligned(
    corpus: Corpus, split: str, pair: tuple[str, str], source: pathlib.Path
) -> list[dict[str, str]]:
    """The rows of one split; raises a `ValueError` when the files do not fit together."""
    paths = [find(source, corpus.files[split], language) for language in pair]
    assert all(path is not None for path in paths)
    files = [list(read_lines(path)) for path in paths if path is not None]
    for path, lines in zip(paths, files, strict=True):
        empty = next((number for number, line in lines if not line.strip()), None)
        if empty is not None:
            raise broken(pathlib.Path(str(path)), empty, "an empty line, which is no translation")
        if len(lines) != corpus.sizes[split]:
            raise broken(
                pathlib.Path(str(path)),
                len(lines),
                f"the file ends here, where {split} has {corpus.sizes[split]:,} lines",
            )
    texts = ([line for _, line in lines] for lines in files)
    return [dict(zip(pair, both, strict=True)) for both in zip(*texts, strict=True)]


def report(name: str, pair: tuple[str, str], source: pathlib.Path) -> Iterator[SplitReport]:
    """What was found of a pair."""
    corpus = CORPORA[name]
    for split, stem in corpus.files.items():
        path = find(source, stem, pair[1])
        yield SplitReport(
            stem, f"{name}/{'_'.join(pair)}", split, "complete", corpus.sizes[split], 0, str(path)
        )


def find(source: pathlib.Path, stem: str, language: str) -> pathlib.Path | None:
    """The file of one language, plain or gzip."""
    for path in (source / f"{stem}.{language}", source / f"{stem}.{language}.gz"):
        if path.exists():
            return path
    return None
