"""Where the rows of every archive are: one table of files, readers and published sizes.

The sizes are those of TFDS after it has dropped rows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from synthesizer_jax.preparation.importers import readers
from synthesizer_jax.tasks.definitions import DEFINITIONS, PAIRS

Part: TypeAlias = tuple[str, ...]
"""Patterns of file names that are read together, such as one of either language."""

SAMPLE = "subset_"
"""What the names of files begin with that are a sample of the official ones, with any number of rows."""


@dataclasses.dataclass(frozen=True)
class SplitLayout:
    """The files of a split.

    Attributes:
      name: TFDS's name.
      files: the files in order of preference, each of them those of the whole split.
      rows: the published number of rows; None: any.
    """

    name: str
    files: tuple[Part, ...]
    rows: int | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """A TFDS data set and the files that it is made of.

    Attributes:
      dataset: its name, and its configuration if it has some.
      read: the reader of the files of a split.
      splits: its splits.
    """

    dataset: str
    read: readers.Reader
    splits: tuple[SplitLayout, ...]


def find_files(split: SplitLayout, source: pathlib.Path) -> list[pathlib.Path]:
    """Returns the preferred files of a split that are there, else a sample, else none."""
    for prefix, part in itertools.product(("", SAMPLE), split.files):
        found = [list(_matches(source, pattern, prefix)) for pattern in part]
        if all(found):
            return list(itertools.chain(*found))
    return []


def _matches(source: pathlib.Path, pattern: str, prefix: str) -> Iterator[pathlib.Path]:
    """Yields the files of a pattern, plain or compressed; `source` may be the pattern's folder itself."""
    folder, slash, name = pattern.rpartition("/")
    pattern = f"{folder}{slash}{prefix}{name}"
    _, _, last = pattern.removeprefix("**/").partition("/")
    is_inside = fnmatch.fnmatch(f"{source.name}/{last}", pattern.removeprefix("**/"))
    for candidate in (pattern, last) if is_inside else (pattern,):
        compressed = {path.with_suffix(""): path for path in source.glob(candidate + ".gz")}
        found = compressed | {path: path for path in source.glob(candidate)}
        if found:
            yield from (found[path] for path in sorted(found))
            return


def find_importer(dataset: str) -> tuple[str, Layout] | None:
    """Returns the name that ``data import`` takes for the archive of a data set, and its layout."""
    found = ((name, layout) for name, layouts in CORPORA.items() for layout in layouts)
    return next((pair for pair in found if pair[1].dataset == dataset), None)


def published_rows(dataset: str) -> Mapping[str, int]:
    """Returns the published sizes of the splits of a data set, as far as they are known."""
    known = find_importer(dataset)
    if known is None:
        return _PUBLISHED.get(dataset, {})
    return {split.name: split.rows for split in known[1].splits if split.rows}


def _benchmark(dataset: str, /, **splits: tuple[str, int | None]) -> Layout:
    """Returns a data set of GLUE or SuperGLUE: a file of the archive, or Parquet, for every split.

    Folders may be in lower case or have TFDS's names; Parquet files in these have TFDS's columns.
    """
    benchmark, _, config = dataset.partition("/")
    task, _, part = config.partition("_")  # mnli_matched
    layouts = []
    for split, (file, rows) in splits.items():
        folder, _, name = file.rpartition("/")
        stems = (f"{config}/{split}", f"{task}/{split}_{part}")
        parquet = [stem + end for stem in stems for end in ("-*.parquet", "/*.parquet")]
        files = zip([file, f"{folder.lower()}/{name}", f"{config}/{name}", *parquet])
        layouts.append(SplitLayout(split, tuple(files), rows))
    of_archive = functools.partial(readers.glue, config)
    read = readers.or_parquet(of_archive if benchmark == "glue" else readers.super_glue)
    return Layout(dataset, read, tuple(layouts))


def _glue(config: str, folder: str, *sizes: int | None, super_glue: bool = False) -> Layout:
    names = ("train", "val" if super_glue else "dev", "test")
    kind = "jsonl" if super_glue else "tsv"
    files = [(f"{folder}/{name}.{kind}", size) for name, size in zip(names, sizes, strict=True)]
    splits = dict(zip(("train", "validation", "test"), files, strict=True))
    return _benchmark(f"{'super_' if super_glue else ''}glue/{config}", **splits)


_super = functools.partial(_glue, super_glue=True)


def _multi30k(pair: tuple[str, str]) -> Layout:
    def split(name: str, stem: str, rows: int) -> SplitLayout:
        return SplitLayout(name, (tuple(f"{stem}.{language}" for language in pair),), rows)

    splits = (
        split("train", "train", 29_000),
        split("validation", "val", 1_014),
        split("test", "test_2016_flickr", 1_000),
    )
    return Layout(f"multi30k/{'_'.join(pair)}", readers.aligned, splits)


def _wikitext(size: int, version: str) -> Layout:
    suffix, folder = "tokens", f"**/wikitext-{size}"
    if version == "raw-v1":
        suffix, folder = "raw", f"{folder}-raw"
    splits = tuple(
        SplitLayout(split, ((f"{folder}/wiki.{stem}.{suffix}",), (f"{folder}/{stem}.txt",)))
        for split, stem in (("train", "train"), ("validation", "valid"), ("test", "test"))
    )
    return Layout(f"wikitext/wikitext-{size}-{version}", readers.articles, splits)


CORPORA: Mapping[str, tuple[Layout, ...]] = {
    "glue": (
        _glue("cola", "CoLA", 8_551, 1_043, 1_063),
        _glue("sst2", "SST-2", 67_349, 872, 1_821),
        _glue("mrpc", "MRPC", 3_668, 408, 1_725),
        _glue("qqp", "QQP", None, 40_430, 390_965),  # its source was corrected
        _glue("stsb", "STS-B", 5_749, 1_500, 1_379),
        _benchmark(
            "glue/mnli",
            train=("MNLI/train.tsv", 392_702),
            validation_matched=("MNLI/dev_matched.tsv", 9_815),
            validation_mismatched=("MNLI/dev_mismatched.tsv", 9_832),
            test_matched=("MNLI/test_matched.tsv", 9_796),
            test_mismatched=("MNLI/test_mismatched.tsv", 9_847),
        ),
        _benchmark(
            "glue/mnli_matched",
            validation=("MNLI/dev_matched.tsv", 9_815),
            test=("MNLI/test_matched.tsv", 9_796),
        ),
        _benchmark(
            "glue/mnli_mismatched",
            validation=("MNLI/dev_mismatched.tsv", 9_832),
            test=("MNLI/test_mismatched.tsv", 9_847),
        ),
        _glue("qnli", "QNLI", 104_743, 5_463, 5_463),
        _glue("rte", "RTE", 2_490, 277, 3_000),
        _glue("wnli", "WNLI", 635, 71, 146),
        _benchmark("glue/ax", test=("**/diagnostic.tsv", 1_104)),
    ),
    "super_glue": (
        _super("boolq", "BoolQ", 9_427, 3_270, 3_245),
        _super("cb", "CB", 250, 56, 250),
        _super("copa", "COPA", 400, 100, 500),
        _super("multirc", "MultiRC", 27_243, 4_848, 9_693),
        _super("record", "ReCoRD", 100_730, 10_000, 10_000),
        _super("rte", "RTE", 2_490, 277, 3_000),
        _super("wic", "WiC", 5_428, 638, 1_400),
        _super("wsc.fixed", "WSC", 554, 104, 146),
        _benchmark("super_glue/axb", test=("AX-b/AX-b.jsonl", 1_104)),
        _benchmark("super_glue/axg", test=("AX-g/AX-g.jsonl", 356)),
    ),
    "multi30k": tuple(map(_multi30k, PAIRS["multi30k"])),
    "wikitext": tuple(_wikitext(size, version) for size in (2, 103) for version in ("v1", "raw-v1")),
}
"""The data sets of every archive, by the name that ``data import`` takes."""

_NEWSTEST = {"validation": 3_000, "test": 3_003}
_PUBLISHED: Mapping[str, Mapping[str, int]] = {
    **dict.fromkeys(("wmt14_translate/de-en", "wmt14_translate/fr-en"), _NEWSTEST),
    "wmt_t2t_translate/de-en": _NEWSTEST,
    "cnn_dailymail": {"train": 287_113, "validation": 13_368, "test": 11_490},
    "squad/v1.1": {"train": 87_599, "validation": 10_570},
    "ag_news_subset": {"train": 120_000, "test": 7_600},
    "imdb_reviews/plain_text": {"train": 25_000, "test": 25_000},
}

DATASETS = tuple(
    name for name in dict.fromkeys(task.dataset for task in DEFINITIONS) if find_importer(name) is None
)
"""The data sets of tasks that have no archive: TFDS prepares them, or a user names their files."""
