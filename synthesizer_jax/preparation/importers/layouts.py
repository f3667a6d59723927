"""Where the rows of every benchmark and corpus are: one table of files, readers and published sizes.

The sizes are those of TFDS after it has dropped rows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from synthesizer_jax.preparation.importers import readers
from synthesizer_jax.preparation.importers.reading import Row
from synthesizer_jax.tasks.definitions import PAIRS

Part: TypeAlias = tuple[str, ...]
"""Patterns of file names that are read together, such as one of either language."""

SAMPLE = "subset_"
"""What the names of files begin with that are a sample of the official ones, with any number of rows."""


@dataclasses.dataclass(frozen=True)
class SplitLayout:
    """The files of a split.

    Attributes:
      name: TFDS's name.
      parts: the parts, whose rows follow one another.
      rows: the published number of rows; None: any.
      also: alternatives in order of preference, each of them the files of the whole split.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int | None = None
    also: tuple[Part, ...] = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """A TFDS data set and the files that it is made of.

    Attributes:
      dataset: its name, and its configuration if it has some.
      read: the reader of a part of a split.
      splits: its splits.
      features: the names of the features that are texts, and with ``*`` of those that are lists of texts;
        empty: those of TFDS's data set of this name, whose version it has too.
    """

    dataset: str
    read: readers.Reader
    splits: tuple[SplitLayout, ...]
    features: tuple[str, ...] = ()


def find_parts(split: SplitLayout, source: pathlib.Path) -> list[list[pathlib.Path]]:
    """Returns the files of those parts of a split that are there, else its other files, else a sample."""
    for prefix, parts in itertools.product(
        ("", SAMPLE), (split.parts, *((part,) for part in split.also))
    ):
        found = [[list(_matches(source, p, prefix)) for p in part] for part in parts]
        whole = [list(itertools.chain(*files)) for files in found if all(files)]
        if whole:
            return whole
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
    """Returns the name that ``data import`` takes for a TFDS data set, and its layout."""
    found = ((name, layout) for name, layouts in CORPORA.items() for layout in layouts)
    return next((pair for pair in found if pair[1].dataset == dataset), None)


def _layout(
    dataset: str,
    read: readers.Reader | None = None,
    features: tuple[str, ...] = (),
    /,
    **splits: tuple[str | Part, int | None],
) -> Layout:
    """Returns a data set of files and numbers of rows; by default TFDS's code reads them."""
    parts = {s: (f,) if isinstance(f, str) else f for s, (f, _) in splits.items()}
    found = tuple(SplitLayout(s, (parts[s],), rows) for s, (_, rows) in splits.items())
    return Layout(dataset, read or readers.by_tfds(dataset), found, features)


def _benchmark(dataset: str, /, **splits: tuple[str, int | None]) -> Layout:
    """Returns a data set of GLUE or SuperGLUE: a file of the archive, or Parquet, for every split.

    Folders may be in lower case or have TFDS's names; Parquet files in these have TFDS's columns.
    """
    config = dataset.partition("/")[2]
    task, _, part = config.partition("_")  # mnli_matched
    layouts = []
    for split, (file, rows) in splits.items():
        folder, _, name = file.rpartition("/")
        stems = (f"{config}/{split}", f"{task}/{split}_{part}")
        parquet = [stem + end for stem in stems for end in ("-*.parquet", "/*.parquet")]
        also = zip([f"{folder.lower()}/{name}", f"{config}/{name}", *parquet])
        layouts.append(SplitLayout(split, ((file,),), rows, tuple(also)))
    read = readers.by_tfds(dataset, readers.mrpc if config == "mrpc" else None)
    return Layout(dataset, read, tuple(layouts))


def _glue(config: str, folder: str, *sizes: int | None, super_glue: bool = False) -> Layout:
    names = ("train", "val" if super_glue else "dev", "test")
    kind = "jsonl" if super_glue else "tsv"
    files = [(f"{folder}/{name}.{kind}", size) for name, size in zip(names, sizes, strict=True)]
    splits = dict(zip(("train", "validation", "test"), files, strict=True))
    return _benchmark(f"{'super_' if super_glue else ''}glue/{config}", **splits)


_super = functools.partial(_glue, super_glue=True)


def _texts(stem: str, languages: tuple[str, str], suffix: str = "") -> Part:
    return tuple(f"{stem}.{language}{suffix}" for language in languages)


def _multi30k(pair: tuple[str, str]) -> Layout:
    return _layout(
        f"multi30k/{'_'.join(pair)}",
        readers.parallel(pair),
        pair,
        train=(_texts("train", pair), 29_000),
        validation=(_texts("val", pair), 1_014),
        test=(_texts("test_2016_flickr", pair), 1_000),
    )


def _iwslt(
    year: int, pair: tuple[str, str], validation: Sequence[str], test: Sequence[str]
) -> Layout:
    direction = "-".join(pair)
    splits = [SplitLayout("train", (_texts(f"**/train.tags.{direction}", pair),))]
    for split, stems in (("validation", validation), ("test", test)):
        names = (f"**/IWSLT{year % 100}.{stem}.{direction}" for stem in stems)
        splits.append(SplitLayout(split, tuple(_texts(name, pair, ".xml") for name in names)))
    dataset = f"iwslt{year}/{'_'.join(pair)}"
    return Layout(dataset, readers.parallel(pair), tuple(splits), features=pair)


def _wmt(
    name: str, target: str, corpora: Sequence[str], validation: Sequence[str], test: str | None
) -> Layout:
    """Returns a translation task of WMT: training corpora, and sets of news as SGML or plain text.

    Args:
      name: TFDS's name without ``_translate``.
      target: the language beside English.
      corpora: the training corpora: stems of pairs of text files, or files of both languages.
      validation: the sets of news of that split.
      test: the same of the test split; None: there is none.
    """
    pair, direction = ("en", target), f"{target}-en"

    def news(split: str, *stems: str) -> SplitLayout:
        sgm = [f"**/{stem}-{target}en" for stem in stems]
        parts = tuple((f"{stem}-ref.en.sgm", f"{stem}-src.{target}.sgm") for stem in sgm)
        also = (_texts(f"**/en-{target}/{stems[0]}", pair), _texts(f"**/dev/{stems[0]}", pair))
        rows = _NEWS_ROWS.get(stems[0]) if len(stems) == 1 else None
        return SplitLayout(split, parts, rows, also=also if len(stems) == 1 else ())

    def part(corpus: str) -> Part:
        is_file = corpus.endswith((".tsv", ".tmx"))
        return (f"**/{corpus}",) if is_file else _texts(f"**/{corpus}.{direction}", pair)

    splits = [SplitLayout("train", tuple(map(part, corpora)))]
    splits += [news("validation", *validation)] + ([news("test", test)] if test else [])
    return Layout(f"{name}_translate/{direction}", readers.parallel(pair), tuple(splits))


_NEWS_ROWS = {"newstest2013": 3_000, "newstest2014": 3_003}


def _c4(config: str) -> Layout:
    """Returns C4 as the JSON lines that its mirrors publish, a folder for each configuration."""
    files = {s: (f"**/{config}/c4-{s}.*.json", None) for s in ("train", "validation")}
    return _layout(f"c4/{config}", readers.table(_page), **files)


def _page(row: Row) -> Row:
    """Returns a page of C4; those of its mirrors lack some fields, which are empty."""
    others = ("url", "timestamp", "content-type", "content-length")
    return {"text": row["text"], **{name: str(row.get(name) or "") for name in others}}


def _wikitext(size: int, version: str) -> Layout:
    suffix = "raw" if version == "raw-v1" else "tokens"
    folder = f"**/wikitext-{size}{'-raw' if version == 'raw-v1' else ''}"
    splits = tuple(
        SplitLayout(
            split, ((f"{folder}/wiki.{stem}.{suffix}",),), also=((f"{folder}/{stem}.txt",),)
        )
        for split, stem in (("train", "train"), ("validation", "valid"), ("test", "test"))
    )
    dataset = f"wikitext/wikitext-{size}-{version}"
    return Layout(dataset, readers.articles, splits, features=("text",))


def _convai2(kind: str) -> Layout:
    return _layout(
        f"convai2/{kind}",
        readers.dialogues,
        _DIALOGUE,
        train=(f"train_{kind}_no_cands.txt", None),
        validation=(f"valid_{kind}_no_cands.txt", None),
    )


def _reviews(split: str) -> SplitLayout:
    parts = tuple((f"**/{split}/{folder}/*.txt",) for folder in ("neg", "pos"))
    return SplitLayout(split, parts, 25_000)


def _article(row: Row) -> Row:
    """Returns a row of CNN/Daily Mail, whose csv may have a column of numbers too."""
    return {name: row[name] for name in ("id", "article", "highlights")} | {"publisher": ""}


def _news(row: Row) -> Row:
    """Returns a row of AG News, whose classes are counted from 1."""
    return {**row, "label": int(row["label"]) - 1}


_DIALOGUE = ("persona*", "history*", "reply")
_LM1B = "**/{}-monolingual.tokenized.shuffled/news.en{}-*"
_TALKS = ("TED.dev2010", *(f"TED.tst{year}" for year in range(2010, 2017)))
_WMT14 = ("commoncrawl", "europarl-v7", "news-commentary-v9")
_FRENCH = ("giga-fren.release2.fixed", "undoc.2000")
_T2T = ("europarl-v7", "commoncrawl", "news-commentary-v13")
_WMT15 = ("europarl-v7", "commoncrawl", "news-commentary-v10", *_FRENCH)
_WMT19 = (
    *("europarl-v9.de-en.tsv", "en-de.bicleaner07.tmx", "commoncrawl"),
    *("news-commentary-v14.de-en.tsv", "wikititles-v1.de-en.tsv", "rapid2019"),
)

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
        _layout(
            "definite_pronoun_resolution",
            train=("DPR/train.c.txt", 1_322),
            test=("DPR/test.c.txt", 564),
        ),
    ),
    "multi30k": tuple(map(_multi30k, PAIRS["multi30k"])),
    "iwslt2016": tuple(
        _iwslt(2016, p, _TALKS[:6], (*_TALKS[6:], "QED.tst2016")) for p in PAIRS["iwslt2016"]
    ),
    "iwslt2017": tuple(
        _iwslt(2017, p, _TALKS[:7], (_TALKS[7], "TED.tst2017"))  # You et al. 2020
        if "ja" in p
        else _iwslt(2017, p, _TALKS[:1], _TALKS[1:7])  # Bozic et al. 2023
        for p in PAIRS["iwslt2017"]
    ),
    "wmt14": (
        _wmt("wmt14", "de", _WMT14, ("newstest2013",), "newstest2014"),
        _wmt("wmt14", "fr", (*_WMT14, *_FRENCH), ("newstest2013",), "newstest2014"),
    ),
    "wmt_t2t": (_wmt("wmt_t2t", "de", _T2T, ("newstest2013",), "newstest2014"),),
    "wmt15": (
        _wmt("wmt15", "fr", _WMT15, ("newsdiscussdev2015", "newstest2014"), "newsdiscusstest2015"),
    ),
    "wmt16": (_wmt("wmt16", "ro", ("europarl-v8", "en-ro.tmx"), ("newsdev2016",), "newstest2016"),),
    "wmt19": (_wmt("wmt19", "de", _WMT19, ("newstest2018",), None),),
    "trivia_qa": (
        _layout(
            "trivia_qa/rc",
            readers.trivia,
            train=("**/qa/*-train.json", None),
            validation=("**/qa/*-dev.json", None),
            test=("**/qa/*test-without-answers.json", None),
        ),
    ),
    "c4": (_c4("en"), _c4("en.noclean")),
    "cnn_dailymail": (
        _layout(
            "cnn_dailymail",
            readers.table(_article),
            train=("train.csv", 287_113),
            validation=("validation.csv", 13_368),
            test=("test.csv", 11_490),
        ),
    ),
    "squad": (
        _layout(
            "squad/v1.1", train=("train-v1.1.json", 87_599), validation=("dev-v1.1.json", 10_570)
        ),
    ),
    "lm1b": (
        _layout(
            "lm1b",
            readers.lines,
            train=(_LM1B.format("training", ""), None),
            test=(_LM1B.format("heldout", ".heldout"), None),
        ),
    ),
    "wikitext": tuple(
        _wikitext(size, version) for size in (2, 103) for version in ("v1", "raw-v1")
    ),
    "convai2": (_convai2("self_original"), _convai2("none_original")),
    "ag_news": (
        _layout(
            "ag_news_subset",
            readers.table(_news, columns=("label", "title", "description")),
            train=("train.csv", 120_000),
            test=("test.csv", 7_600),
        ),
    ),
    "imdb": (
        Layout("imdb_reviews/plain_text", readers.reviews, (_reviews("train"), _reviews("test"))),
    ),
}
"""The data sets of every benchmark and corpus, by the name that ``data import`` takes."""
