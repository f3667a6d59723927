"""Where the rows of every corpus are: one table of files, readers and published numbers of rows."""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from synthesizer_jax.tasks.importers import corpus_readers as readers
from synthesizer_jax.tasks.importers import question_readers
from synthesizer_jax.tasks.translation import PAIRS

Part: TypeAlias = tuple[str, ...]
"""Patterns of file names that are read together, such as one of either language."""


@dataclasses.dataclass(frozen=True)
class SplitLayout:
    """The files of a split.

    Attributes:
      name: TFDS's name.
      parts: the parts, whose rows follow one another.
      rows: the published number of rows; None: any.
      also: alternatives in order of preference, each of them the files of the whole split.
      sample: files that are read if the others are not there; they may have any number of rows.
      read: the reader, where it is not that of the other splits.
    """

    name: str
    parts: tuple[Part, ...]
    rows: int | None = None
    also: tuple[Part, ...] = ()
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
      features: the kind of every feature: ``text``, ``texts`` (a list), ``integer``, ``answers`` of SQuAD,
        ``aliases``, ``pages`` and ``results`` of TriviaQA.
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
    for parts in (split.parts, *((part,) for part in split.also), (split.sample or (),)):
        found = [[list(_matches(source, pattern)) for pattern in part] for part in parts]
        whole = [list(itertools.chain(*files)) for files in found if files and all(files)]
        if whole:
            return whole
    return []


def _matches(source: pathlib.Path, pattern: str) -> Iterator[pathlib.Path]:
    """Yields the files of a pattern, plain or compressed; `source` may be the pattern's folder itself."""
    _, _, last = pattern.removeprefix("**/").partition("/")
    is_inside = fnmatch.fnmatch(f"{source.name}/{last}", pattern.removeprefix("**/"))
    for candidate in (pattern, last) if is_inside else (pattern,):
        compressed = {path.with_suffix(""): path for path in source.glob(candidate + ".gz")}
        found = compressed | {path: path for path in source.glob(candidate)}
        if found:
            yield from (found[path] for path in sorted(found))
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
    features = dict.fromkeys(pair, "text")
    read = readers.aligned_talks(pair)
    return Layout(f"iwslt{year}/{'_'.join(pair)}", features, read, splits)


def _wmt(
    name: str,
    target: str,
    corpora: Sequence[str],
    validation: Sequence[str],
    test: str | None,
    *,
    sample: Part | None = None,
) -> Layout:
    """Returns a translation task of WMT: training corpora, and sets of news as SGML or plain text.

    Args:
      name: TFDS's name without ``_translate``.
      target: the language beside English.
      corpora: the training corpora: stems of pairs of text files, or files of both languages.
      validation: the sets of news of that split.
      test: the same of the test split; None: there is none.
      sample: see `SplitLayout`.
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

    splits = [SplitLayout("train", tuple(map(part, corpora)), sample=sample)]
    splits += [news("validation", *validation)] + ([news("test", test)] if test else [])
    read = readers.parallel(pair)
    return Layout(f"{name}_translate/{direction}", dict.fromkeys(pair, "text"), read, tuple(splits))


def _c4(config: str) -> Layout:
    """Returns C4 as the JSON lines that its mirrors publish, a folder for each configuration."""
    features = dict.fromkeys(readers.PAGE, "text")
    splits = tuple(
        SplitLayout(split, ((f"**/{config}/c4-{split}.*.json",),))
        for split in ("train", "validation")
    )
    return Layout(f"c4/{config}", features, readers.pages, splits, version="3.1.0")


def _wikitext(size: int, version: str) -> Layout:
    is_raw = version == "raw-v1"
    folder, suffix = f"wikitext-{size}{'-raw' if is_raw else ''}", "raw" if is_raw else "tokens"

    def split(name: str, stem: str) -> SplitLayout:
        also = (f"**/{folder}/{stem}.txt",)
        return SplitLayout(name, ((f"**/{folder}/wiki.{stem}.{suffix}",),), also=(also,))

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
_TALKS = ("TED.dev2010", *(f"TED.tst{year}" for year in range(2010, 2017)))
_WMT14 = ("commoncrawl", "europarl-v7", "news-commentary-v9")
_FRENCH = ("giga-fren.release2.fixed", "undoc.2000")
_NEWS_ROWS = {"newstest2013": 3_000, "newstest2014": 3_003}

CORPORA: Mapping[str, tuple[Layout, ...]] = MappingProxyType(
    {
        "multi30k": tuple(map(_multi30k, PAIRS["multi30k"])),
        "iwslt2016": tuple(
            _iwslt(2016, p, _TALKS[:6], (*_TALKS[6:], "QED.tst2016")) for p in PAIRS["iwslt2016"]
        ),
        "iwslt2017": tuple(_iwslt(2017, p, _TALKS[:1], _TALKS[1:7]) for p in PAIRS["iwslt2017"]),
        "wmt14": (
            _wmt(
                *("wmt14", "de", _WMT14, ("newstest2013",), "newstest2014"),
                sample=("src-train.txt", "tgt-train.txt"),
            ),
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
        "wmt16": (
            _wmt(
                *("wmt16", "ro", ("europarl-v8", "en-ro.tmx"), ("newsdev2016",), "newstest2016"),
            ),
        ),
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
                {
                    **dict.fromkeys(("question", "question_id", "question_source"), "text"),
                    **{"answer": "aliases", "entity_pages": "pages", "search_results": "results"},
                },
                question_readers.trivia,
                (
                    SplitLayout("train", (("**/qa/*-train.json",),)),
                    SplitLayout("validation", (("**/qa/*-dev.json",),)),
                    SplitLayout("test", (("**/qa/*test-without-answers.json",),)),
                ),
                version="1.1.0",
            ),
        ),
        "c4": (_c4("en"), _c4("en.noclean")),
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
                question_readers.squad,
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
