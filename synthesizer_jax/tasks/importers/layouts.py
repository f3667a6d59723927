"""Where the rows of every benchmark and corpus are: one table of files, readers and published sizes.

The sizes are those of TFDS after it has dropped rows.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from synthesizer_jax.tasks.definitions import PAIRS
from synthesizer_jax.tasks.importers import readers
from synthesizer_jax.tasks.importers.reading import Row

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
      read: the reader, where it is not that of the other splits.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int | None = None
    also: tuple[Part, ...] = ()
    read: readers.Reader | None = None


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
    for name, layouts in CORPORA.items():
        for layout in layouts:
            if layout.dataset == dataset:
                return name, layout
    return None


def _benchmark(
    dataset: str, folder: str, stems: Mapping[str, str], *sizes: int | None, kind: str
) -> Layout:
    """Returns a data set of GLUE or SuperGLUE; `stems` are those of the names of files, by split."""
    splits = tuple(
        SplitLayout(name, ((f"{folder}/{stem}.{kind}",),), size)
        for (name, stem), size in zip(stems.items(), sizes, strict=True)
    )
    return Layout(dataset, readers.by_tfds(dataset), splits)


def _glue(config: str, folder: str, *sizes: int | None) -> Layout:
    stems = {"train": "train", "validation": "dev", "test": "test"}
    layout = _benchmark(f"glue/{config}", folder, stems, *sizes, kind="tsv")
    return dataclasses.replace(layout, read=readers.mrpc) if config == "mrpc" else layout


def _mnli(domain: str, *sizes: int) -> Layout:
    stems = {"validation": f"dev_{domain}", "test": f"test_{domain}"}
    return _benchmark(f"glue/mnli_{domain}", "MNLI", stems, *sizes, kind="tsv")


def _super(config: str, folder: str, *sizes: int) -> Layout:
    stems = {"train": "train", "validation": "val", "test": "test"}
    if len(sizes) == 1:
        stems = {"test": folder}
    return _benchmark(f"super_glue/{config}", folder, stems, *sizes, kind="jsonl")


_MNLI_STEMS = {
    "train": "train",
    "validation_matched": "dev_matched",
    "validation_mismatched": "dev_mismatched",
    "test_matched": "test_matched",
    "test_mismatched": "test_mismatched",
}
_DIAGNOSTIC = SplitLayout(
    "test",
    (("AX/diagnostic.tsv",),),
    1_104,
    also=(("diagnostic/diagnostic.tsv",), ("diagnostic.tsv",)),
)
_PRONOUNS = "definite_pronoun_resolution"


def _texts(stem: str, languages: tuple[str, str]) -> Part:
    return tuple(f"{stem}.{language}" for language in languages)


def _multi30k(pair: tuple[str, str]) -> Layout:
    splits = (
        SplitLayout("train", (_texts("train", pair),), 29_000),
        SplitLayout("validation", (_texts("val", pair),), 1_014),
        SplitLayout("test", (_texts("test_2016_flickr", pair),), 1_000),
    )
    return Layout(f"multi30k/{'_'.join(pair)}", readers.parallel(pair), splits, features=pair)


def _iwslt(
    year: int, pair: tuple[str, str], validation: Sequence[str], test: Sequence[str]
) -> Layout:
    direction = "-".join(pair)

    def talks(stem: str) -> Part:
        name = f"**/IWSLT{year % 100}.{stem}.{direction}"
        return tuple(f"{name}.{language}.xml" for language in pair)

    splits = (
        SplitLayout("train", (_texts(f"**/train.tags.{direction}", pair),)),
        SplitLayout("validation", tuple(map(talks, validation))),
        SplitLayout("test", tuple(map(talks, test))),
    )
    return Layout(f"iwslt{year}/{'_'.join(pair)}", readers.parallel(pair), splits, features=pair)


def _wmt(
    name: str,
    target: str,
    corpora: Sequence[str],
    validation: Sequence[str],
    test: str | None,
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
        if len(stems) > 1:
            return SplitLayout(split, parts)
        (stem,) = stems
        also = (_texts(f"**/en-{target}/{stem}", pair), _texts(f"**/dev/{stem}", pair))
        return SplitLayout(split, parts, _NEWS_ROWS.get(stem), also=also)

    def part(corpus: str) -> Part:
        is_file = corpus.endswith((".tsv", ".tmx"))
        return (f"**/{corpus}",) if is_file else _texts(f"**/{corpus}.{direction}", pair)

    splits = [SplitLayout("train", tuple(map(part, corpora)))]
    splits += [news("validation", *validation)] + ([news("test", test)] if test else [])
    return Layout(f"{name}_translate/{direction}", readers.parallel(pair), tuple(splits))


def _c4(config: str) -> Layout:
    """Returns C4 as the JSON lines that its mirrors publish, a folder for each configuration."""
    splits = tuple(
        SplitLayout(split, ((f"**/{config}/c4-{split}.*.json",),))
        for split in ("train", "validation")
    )
    return Layout(f"c4/{config}", readers.table(_page), splits)


def _page(row: Row) -> Row:
    """Returns a page of C4; those of its mirrors lack some fields, which are empty."""
    others = ("url", "timestamp", "content-type", "content-length")
    return {"text": row["text"], **{name: str(row.get(name) or "") for name in others}}


def _wikitext(size: int, version: str) -> Layout:
    is_raw = version == "raw-v1"
    folder, suffix = f"wikitext-{size}{'-raw' if is_raw else ''}", "raw" if is_raw else "tokens"

    def split(name: str, stem: str) -> SplitLayout:
        also = (f"**/{folder}/{stem}.txt",)
        return SplitLayout(name, ((f"**/{folder}/wiki.{stem}.{suffix}",),), also=(also,))

    splits = (split("train", "train"), split("validation", "valid"), split("test", "test"))
    dataset = f"wikitext/wikitext-{size}-{version}"
    return Layout(dataset, readers.articles, splits, features=("text",))


def _convai2(kind: str) -> Layout:
    splits = (
        SplitLayout("train", ((f"train_{kind}_no_cands.txt",),)),
        SplitLayout("validation", ((f"valid_{kind}_no_cands.txt",),)),
    )
    return Layout(f"convai2/{kind}", readers.dialogues, splits, features=_DIALOGUE)


def _xsum(name: str, rows: int) -> SplitLayout:
    files = ("**/XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json", "**/bbc-summary-data/*.summary")
    return SplitLayout(name, (files,), rows, read=readers.xsum(name))


def _reviews(split: str) -> SplitLayout:
    parts = tuple((f"**/{split}/{folder}/*.txt",) for folder in ("neg", "pos"))
    return SplitLayout(split, parts, 25_000)


_DIALOGUE = ("persona*", "history*", "reply")
_LM1B = "**/{}-monolingual.tokenized.shuffled/news.en{}-*"
_TALKS = ("TED.dev2010", *(f"TED.tst{year}" for year in range(2010, 2017)))
_WMT14 = ("commoncrawl", "europarl-v7", "news-commentary-v9")
_FRENCH = ("giga-fren.release2.fixed", "undoc.2000")
_NEWS_ROWS = {"newstest2013": 3_000, "newstest2014": 3_003}


def _article(row: Row) -> Row:
    """Returns a row of CNN/Daily Mail, whose csv may have a column of numbers too."""
    return {name: row.get(name, "") for name in ("id", "article", "highlights")} | {"publisher": ""}


def _news(row: Row) -> Row:
    """Returns a row of AG News, whose classes are counted from 1."""
    return {**row, "label": int(row["label"]) - 1}


CORPORA: Mapping[str, tuple[Layout, ...]] = {
    "glue": (
        _glue("cola", "CoLA", 8_551, 1_043, 1_063),
        _glue("sst2", "SST-2", 67_349, 872, 1_821),
        _glue("mrpc", "MRPC", 3_668, 408, 1_725),
        _glue("qqp", "QQP", None, 40_430, 390_965),  # its source was corrected
        _glue("stsb", "STS-B", 5_749, 1_500, 1_379),
        _benchmark(
            *("glue/mnli", "MNLI", _MNLI_STEMS, 392_702, 9_815, 9_832, 9_796, 9_847), kind="tsv"
        ),
        _mnli("matched", 9_815, 9_796),
        _mnli("mismatched", 9_832, 9_847),
        _glue("qnli", "QNLI", 104_743, 5_463, 5_463),
        _glue("rte", "RTE", 2_490, 277, 3_000),
        _glue("wnli", "WNLI", 635, 71, 146),
        Layout("glue/ax", readers.by_tfds("glue/ax"), (_DIAGNOSTIC,)),
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
        _super("axb", "AX-b", 1_104),
        _super("axg", "AX-g", 356),
        Layout(
            _PRONOUNS,
            readers.by_tfds(_PRONOUNS, takes_split=False),
            (
                SplitLayout("train", (("DPR/train.c.txt",),), 1_322),
                SplitLayout("test", (("DPR/test.c.txt",),), 564),
            ),
        ),
    ),
    "multi30k": tuple(map(_multi30k, PAIRS["multi30k"])),
    "iwslt2016": tuple(
        _iwslt(2016, p, _TALKS[:6], (*_TALKS[6:], "QED.tst2016")) for p in PAIRS["iwslt2016"]
    ),
    "iwslt2017": tuple(_iwslt(2017, p, _TALKS[:1], _TALKS[1:7]) for p in PAIRS["iwslt2017"]),
    "wmt14": (
        _wmt("wmt14", "de", _WMT14, ("newstest2013",), "newstest2014"),
        _wmt("wmt14", "fr", (*_WMT14, *_FRENCH), ("newstest2013",), "newstest2014"),
    ),
    "wmt_t2t": (
        _wmt(
            *("wmt_t2t", "de", ("europarl-v7", "commoncrawl", "news-commentary-v13")),
            *(("newstest2013",), "newstest2014"),
        ),
    ),
    "wmt15": (
        _wmt(
            *("wmt15", "fr", ("europarl-v7", "commoncrawl", "news-commentary-v10", *_FRENCH)),
            *(("newsdiscussdev2015", "newstest2014"), "newsdiscusstest2015"),
        ),
    ),
    "wmt16": (_wmt("wmt16", "ro", ("europarl-v8", "en-ro.tmx"), ("newsdev2016",), "newstest2016"),),
    "wmt19": (
        _wmt(
            "wmt19",
            "de",
            (
                *("europarl-v9.de-en.tsv", "en-de.bicleaner07.tmx", "commoncrawl"),
                *("news-commentary-v14.de-en.tsv", "wikititles-v1.de-en.tsv", "rapid2019"),
            ),
            *(("newstest2018",), None),
        ),
    ),
    "trivia_qa": (
        Layout(
            "trivia_qa/rc",
            readers.trivia,
            (
                SplitLayout("train", (("**/qa/*-train.json",),)),
                SplitLayout("validation", (("**/qa/*-dev.json",),)),
                SplitLayout("test", (("**/qa/*test-without-answers.json",),)),
            ),
        ),
    ),
    "c4": (_c4("en"), _c4("en.noclean")),
    "cnn_dailymail": (
        Layout(
            "cnn_dailymail",
            readers.table(_article),
            (
                SplitLayout("train", (("train.csv",),), 287_113),
                SplitLayout("validation", (("validation.csv",),), 13_368),
                SplitLayout("test", (("test.csv",),), 11_490),
            ),
        ),
    ),
    "xsum": (
        Layout(
            "xsum",
            readers.xsum("train"),
            (_xsum("train", 204_045), _xsum("validation", 11_332), _xsum("test", 11_334)),
        ),
    ),
    "squad": (
        Layout(
            "squad/v1.1",
            readers.squad,
            (
                SplitLayout("train", (("train-v1.1.json",),), 87_599),
                SplitLayout("validation", (("dev-v1.1.json",),), 10_570),
            ),
        ),
    ),
    "lm1b": (
        Layout(
            "lm1b",
            readers.lines,
            (
                SplitLayout("train", ((_LM1B.format("training", ""),),)),
                SplitLayout("test", ((_LM1B.format("heldout", ".heldout"),),)),
            ),
        ),
    ),
    "wikitext": tuple(
        _wikitext(size, version) for size in (2, 103) for version in ("v1", "raw-v1")
    ),
    "convai2": (_convai2("self_original"), _convai2("none_original")),
    "xpersona": (
        Layout(
            "xpersona/en",
            readers.persona_json,
            (
                SplitLayout("validation", (("En_persona_valid.json",),), 7_316),
                SplitLayout("test", (("En_persona_test.json",),), 7_801),
            ),
            features=_DIALOGUE,
        ),
    ),
    "ag_news": (
        Layout(
            "ag_news_subset",
            readers.table(_news, columns=("label", "title", "description")),
            (
                SplitLayout("train", (("train.csv",),), 120_000),
                SplitLayout("test", (("test.csv",),), 7_600),
            ),
        ),
    ),
    "imdb": (
        Layout("imdb_reviews/plain_text", readers.reviews, (_reviews("train"), _reviews("test"))),
    ),
}
"""The data sets of every benchmark and corpus, by the name that ``data import`` takes."""
