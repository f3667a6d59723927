"""Where the rows of every corpus are: one table of files, readers and published numbers of rows."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from synthesizer_jax.data.importers import corpus_readers as readers
from synthesizer_jax.data.translation import PAIRS

Part: TypeAlias = tuple[str, ...]
"""Patterns of file names that are read together, such as one of either language."""


@dataclasses.dataclass(frozen=True)
class SplitLayout:
    """The files of a split.

    Attributes:
      name: TFDS's name.
      parts: the parts, whose rows follow one another.
      rows: the published number of rows; None: any.
      also: other names of the whole split's files.
      sample: files that are read if the others are not there; they may have any number of rows.
      read: the reader, where it is not that of the other splits.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int | None = None
    also: Part | None = None
    sample: Part | None = None
    read: readers.Reader | None = None

    def is_sample(self, parts: Sequence[Sequence[pathlib.Path]]) -> bool:
        """Returns whether the files are those of the sample."""
        names = [path.name.removesuffix(".gz") for path in parts[0]]
        return self.sample is not None and names == list(self.sample)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A TFDS data set and the files that it is made of.

    Attributes:
      dataset: its name, and its configuration if it has some.
      features: the kind of every feature: ``text``, ``texts`` (a list), ``integer``, ``answers``.
      read: the reader of a part of a split.
      splits: its splits.
      version: its version; TFDS's, where TFDS has the data set.
    """

    dataset: str
    features: Mapping[str, str]
    read: readers.Reader
    splits: tuple[SplitLayout, ...]
    version: str = "1.0.0"


def find_parts(split: SplitLayout, source: pathlib.Path) -> list[list[pathlib.Path]]:
    """Returns the files of those parts of a split that are there, else its other files or its sample."""
    for parts in (split.parts, (split.also or (),), (split.sample or (),)):
        found = [[list(_matches(source, pattern)) for pattern in part] for part in parts]
        whole = [list(itertools.chain(*files)) for files in found if files and all(files)]
        if whole:
            return whole
    return []


def _matches(source: pathlib.Path, pattern: str) -> Iterator[pathlib.Path]:
    for candidate in (pattern, pattern + ".gz"):
        found = sorted(source.glob(candidate))
        if found:
            yield from found
            return


def _texts(stem: str, languages: tuple[str, str]) -> Part:
    return tuple(f"{stem}.{language}" for language in languages)


def _multi30k(pair: tuple[str, str]) -> Layout:
    splits = (
        SplitLayout("train", (_texts("train", pair),), 29_000),
        SplitLayout("validation", (_texts("val", pair),), 1_014),
        SplitLayout("test", (_texts("test_2016_flickr", pair),), 1_000),
    )
    features = dict.fromkeys(pair, "text")
    return Layout(f"multi30k/{'_'.join(pair)}", features, readers.aligned(pair), splits)


def _iwslt(year: int, pair: tuple[str, str], dev: str, tests: Sequence[str]) -> Layout:
    direction = "-".join(pair)

    def talks(stem: str) -> Part:
        name = f"**/IWSLT{year % 100}.TED.{stem}.{direction}"
        return tuple(f"{name}.{language}.xml" for language in pair)

    splits = (
        SplitLayout("train", (_texts(f"**/train.tags.{direction}", pair),)),
        SplitLayout("validation", (talks(dev),)),
        SplitLayout("test", tuple(talks(test) for test in tests)),
    )
    features = dict.fromkeys(pair, "text")
    read = readers.aligned_talks(pair)
    return Layout(f"iwslt{year}/{'_'.join(pair)}", features, read, splits)


def _wmt14(target: str, corpora: Sequence[str], *, sample: Part | None = None) -> Layout:
    """Returns WMT 2014: training corpora, newstest2013 and newstest2014 as plain text."""
    pair, direction = ("en", target), f"{target}-en"

    def news(year: int) -> Part:
        return _texts(f"en-{target}/newstest{year}", pair)

    parts = tuple(_texts(f"**/{corpus}.{direction}", pair) for corpus in corpora)
    splits = (
        SplitLayout("train", parts, sample=sample),
        SplitLayout("validation", (news(2013),), 3_000, also=_texts("**/dev/newstest2013", pair)),
        SplitLayout("test", (news(2014),), 3_003),
    )
    read = readers.aligned(pair, drop_empty=True)
    return Layout(f"wmt14_translate/{direction}", dict.fromkeys(pair, "text"), read, splits)


def _wikitext(size: int, version: str) -> Layout:
    is_raw = version == "raw-v1"
    folder, suffix = f"wikitext-{size}{'-raw' if is_raw else ''}", "raw" if is_raw else "tokens"

    def split(name: str, stem: str) -> SplitLayout:
        also = (f"{folder}/{stem}.txt",)
        return SplitLayout(name, ((f"**/{folder}/wiki.{stem}.{suffix}",),), also=also)

    splits = (split("train", "train"), split("validation", "valid"), split("test", "test"))
    dataset = f"wikitext/wikitext-{size}-{version}"
    return Layout(dataset, {"text": "text"}, readers.articles, splits)


def _convai2(kind: str) -> Layout:
    splits = (
        SplitLayout("train", ((f"train_{kind}_no_cands.txt",),)),
        SplitLayout("validation", ((f"valid_{kind}_no_cands.txt",),)),
    )
    return Layout(f"convai2/{kind}", _DIALOGUE, readers.dialogues, splits)


def _xsum(name: str, rows: int) -> SplitLayout:
    files = ("**/XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json", "**/bbc-summary-data/*.summary")
    return SplitLayout(name, (files,), rows, read=readers.xsum(name))


def _reviews(split: str) -> SplitLayout:
    parts = tuple((f"**/{split}/{folder}/*.txt",) for folder in ("neg", "pos"))
    return SplitLayout(split, parts, 25_000)


_DIALOGUE = {"persona": "texts", "history": "texts", "reply": "text"}
_SUMMARY = dict.fromkeys(("article", "highlights", "id", "publisher"), "text")
_QUESTION = dict.fromkeys(("id", "title", "context", "question"), "text") | {"answers": "answers"}
_LM1B = "**/{}-monolingual.tokenized.shuffled/news.en{}-*"
_TALKS = tuple(f"tst{year}" for year in range(2010, 2016))
_WMT14 = ("commoncrawl", "europarl-v7", "news-commentary-v9")

CORPORA: Mapping[str, tuple[Layout, ...]] = MappingProxyType(
    {
        "multi30k": tuple(map(_multi30k, PAIRS["multi30k"])),
        "iwslt2016": tuple(_iwslt(2016, p, "tst2013", ("tst2014",)) for p in PAIRS["iwslt2016"]),
        "iwslt2017": tuple(_iwslt(2017, p, "dev2010", _TALKS) for p in PAIRS["iwslt2017"]),
        "wmt14": (
            _wmt14("de", _WMT14, sample=("src-train.txt", "tgt-train.txt")),
            _wmt14("fr", (*_WMT14, "giga-fren.release2.fixed", "undoc.2000")),
        ),
        "cnn_dailymail": (
            Layout(
                "cnn_dailymail",
                _SUMMARY,
                readers.summaries,
                (
                    SplitLayout("train", (("train.csv",),), 287_113, sample=("train_sample.csv",)),
                    SplitLayout("validation", (("validation.csv",),), 13_368),
                    SplitLayout("test", (("test.csv",),), 11_490),
                ),
                version="3.4.0",
            ),
        ),
        "xsum": (
            Layout(
                "xsum",
                {"document": "text", "summary": "text"},
                readers.lines,
                (_xsum("train", 204_045), _xsum("validation", 11_332), _xsum("test", 11_334)),
                version="1.1.0",
            ),
        ),
        "squad": (
            Layout(
                "squad/v1.1",
                _QUESTION,
                readers.questions,
                (
                    SplitLayout("train", (("train-v1.1.json",),), 87_599),
                    SplitLayout("validation", (("dev-v1.1.json",),), 10_570),
                ),
                version="3.0.0",
            ),
        ),
        "lm1b": (
            Layout(
                "lm1b",
                {"text": "text"},
                readers.lines,
                (
                    SplitLayout("train", ((_LM1B.format("training", ""),),)),
                    SplitLayout("test", ((_LM1B.format("heldout", ".heldout"),),)),
                ),
                version="1.1.0",
            ),
        ),
        "wikitext": tuple(
            _wikitext(size, version) for size in (2, 103) for version in ("v1", "raw-v1")
        ),
        "convai2": (_convai2("self_original"), _convai2("none_original")),
        "xpersona": (
            Layout(
                "xpersona/en",
                _DIALOGUE,
                readers.persona_json,
                (
                    SplitLayout("validation", (("En_persona_valid.json",),), 7_316),
                    SplitLayout("test", (("En_persona_test.json",),), 7_801),
                ),
            ),
        ),
        "ag_news": (
            Layout(
                "ag_news_subset",
                {"title": "text", "description": "text", "label": "integer"},
                readers.ag_news,
                (
                    SplitLayout("train", (("train.csv",),), 120_000),
                    SplitLayout("test", (("test.csv",),), 7_600),
                ),
            ),
        ),
        "imdb": (
            Layout(
                "imdb_reviews/plain_text",
                {"text": "text", "label": "integer"},
                readers.reviews,
                (_reviews("train"), _reviews("test")),
            ),
        ),
    }
)
"""The data sets of every corpus, by the name that ``data import`` takes."""
