"""Corpora in the layouts in which they are published: rows, sizes, and errors that name the line."""

import csv
import gzip
import io
import json
import pathlib
import shutil
import tracemalloc

import pytest
import tensorflow_datasets as tfds

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.catalog import DEFINITIONS
from synthesizer_jax.tasks.importers import IMPORTERS, import_corpus
from synthesizer_jax.tasks.importers.corpus_layouts import CORPORA
from synthesizer_jax.tasks.importers.corpus_readers import parallel
from synthesizer_jax.tasks.postprocessors import to_text
from tests.tasks.loading import load


def place(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return root


def stored(data_dir, name, split):
    builder = tfds.builder_from_directory(next((data_dir / name).glob("*.*.*")))
    return list(tfds.as_numpy(builder.as_dataset(split=split)))


def texts(row, *names):
    return tuple(row[name].decode() for name in names)


def examples_of(data_dir, task, split):
    return load(task, split, data_dir, lengths={"inputs": 200, "targets": 50})


QUESTIONS = {
    "data": [
        {
            "title": "T",
            "paragraphs": [
                {
                    "context": "Ann won.",
                    "qas": [
                        {
                            "id": "1",
                            "question": "Who won?",
                            "answers": [{"text": "Ann", "answer_start": 0}] * 2,
                        }
                    ],
                }
            ],
        }
    ]
}
TALK = '<doc>\n<title>T</title>\n<seg id="1"> {} &amp; x </seg>\n</doc>\n'
SGM = '<refset setid="s">\n<doc docid="d">\n<p>\n<seg id="1">{}</seg>\n</p>\n</doc>\n</refset>\n'
TMX = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header/><body>
<tu><tuv xml:lang="en"><seg>One &lt;1&gt;</seg></tuv><tuv xml:lang="ro"><seg>Unu</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Two</seg></tuv><tuv xml:lang="ro"><seg/></tuv></tu>
</body></tmx>
"""
TRIVIA = {
    "Question": " Who won? ",
    "QuestionId": "q1",
    "QuestionSource": "s",
    "Answer": {
        **{"Aliases": ["Ann Lee", "Annie"], "NormalizedAliases": ["ann lee", "annie"]},
        **{"NormalizedValue": "ann lee", "Type": "WikipediaEntity", "Value": "Ann Lee"},
    },
    "EntityPages": [
        {"DocSource": "TagMe", "Filename": "A/B.txt", "Title": "B"},
        {"DocSource": "TagMe", "Filename": "A/missing.txt", "Title": "C"},
    ],
    "SearchResults": [
        {"Description": "d", "Filename": "1.txt", "Rank": 1, "Title": "t", "Url": "u"}
    ],
}
WIKI = " \n = One = \n \n a <unk> \n = = Part = = \n \n b \n \n = Two = \n \n c \n"
ARTICLE = (
    "[SN]URL[SN]\nu\n[SN]TITLE[SN]\nt\n[SN]FIRST-SENTENCE[SN]\nShort.\n\n[SN]RESTBODY[SN]\nLong.\n"
)
CHAT = (
    "1 your persona: i ski.\n2 hello .\thi .\n3 you ?\ti ski .\tx|y\n"
    "1 your persona: i sing.\n2 hey .\tyo .\n"
)

LAYOUTS = {
    "iwslt2016": {
        "en-de/train.tags.en-de.en": "<url>u</url>\n<title>t</title>\nA \n\nB\n",
        "en-de/train.tags.en-de.de": "<url>u</url>\n<title>t</title>\nC\n\nD\n",
        **{
            f"en-de/IWSLT16.{stem}.en-de.{language}.xml": TALK.format(f"{stem[4:]} {language}")
            for stem in ("TED.dev2010", "TED.tst2010", "TED.tst2014", "TED.tst2015", "QED.tst2016")
            for language in ("en", "de")
        },
    },
    "wmt14": {"src-train.txt": "a\n\nb\n", "tgt-train.txt": "c\nd\ne\n"},
    "wmt15": {
        "training/news-commentary-v10.fr-en.en": "a\n",
        "training/news-commentary-v10.fr-en.fr": "b\n",
        "dev/newsdiscussdev2015-fren-src.fr.sgm": SGM.format("d"),
        "dev/newsdiscussdev2015-fren-ref.en.sgm": SGM.format("c &amp; d"),
        "dev/newstest2014-fren-src.fr.sgm": SGM.format("f"),
        "dev/newstest2014-fren-ref.en.sgm": SGM.format("e"),
    },
    "wmt16": {"en-ro.tmx": TMX},
    "wmt19": {
        "europarl-v9.de-en.tsv": "a\tb\nonly one\n\t\n",
        "commoncrawl.de-en.en": "e\n\n",
        "commoncrawl.de-en.de": "f\ng\n",
        "newstest2018-deen-src.de.sgm": SGM.format("h"),
        "newstest2018-deen-ref.en.sgm": SGM.format("i"),
    },
    "trivia_qa": {
        "qa/wikipedia-train.json": {"Data": [TRIVIA]},
        "evidence/wikipedia/A/B.txt": " Ann Lee won the race .\n",
        "evidence/web/1.txt": "nobody",
    },
    "c4": {
        "en/c4-train.00000-of-01024.json": '{"text": "a", "url": "u", "timestamp": "t"}\n',
        "en/c4-train.00001-of-01024.json": '{"text": "b\\nc", "url": "u", "timestamp": "t"}\n',
    },
    "wikitext": {"wikitext-2/wiki.train.tokens": WIKI, "wikitext-103/valid.txt": WIKI},
    "lm1b": {
        "1-billion/training-monolingual.tokenized.shuffled/news.en-00001-of-00100": "a b\nc\n",
        "1-billion/training-monolingual.tokenized.shuffled/news.en-00002-of-00100": "d\n",
        "1-billion/heldout-monolingual.tokenized.shuffled/news.en.heldout-00000-of-00050": "e\n",
    },
    "cnn_dailymail": {"train_sample.csv": ',id,article,highlights\n\n0,i,"A\nB",C\n'},
    "convai2": {"train_self_original_no_cands.txt": CHAT},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Small corpora in their published layouts, imported."""
    target = tmp_path_factory.mktemp("data")
    for name, files in LAYOUTS.items():
        source = place(tmp_path_factory.mktemp(name), files)
        if name == "wmt19":
            with gzip.open(source / "wikititles-v1.de-en.tsv.gz", "wt") as file:
                file.write("c\td\n")
        import_corpus(name, source, target)
    return target


def test_translations(data_dir):
    rows = stored(data_dir, "iwslt2016/en_de", "train")
    assert sorted(texts(row, "en", "de") for row in rows) == [("A", "C"), ("B", "D")]
    rows = {s: stored(data_dir, "iwslt2016/en_de", s) for s in ("validation", "test")}
    said = {
        split: sorted(texts(row, "en")[0][:7] for row in found) for split, found in rows.items()
    }
    years = {"validation": ["dev2010", "tst2010", "tst2014"], "test": ["tst2015", "tst2016"]}
    assert said == years  # those of You et al. 2020
    assert texts(rows["test"][0], "de")[0][7:] == " de & x"
    rows = stored(data_dir, "wmt14_translate/de-en", "train")
    assert sorted(texts(row, "en", "de") for row in rows) == [("a", "c"), ("b", "e")]


def test_translations_of_wmt(data_dir):
    """Texts, SGML, TSV and TMX; what lacks a language is left out."""
    found = {
        (name, split): sorted(
            texts(row, "en", name[-5:-3]) for row in stored(data_dir, name, split)
        )
        for name, split in (
            ("wmt15_translate/fr-en", "train"),
            ("wmt15_translate/fr-en", "validation"),
            ("wmt16_translate/ro-en", "train"),
            ("wmt19_translate/de-en", "train"),
            ("wmt19_translate/de-en", "validation"),
        )
    }
    assert list(found.values()) == [
        [("a", "b")],
        [("c & d", "d"), ("e", "f")],
        [("One <1>", "Unu")],
        [("b", "a"), ("d", "c"), ("e", "f")],
        [("i", "h")],
    ]


def test_units_of_a_tmx_file_are_read_one_after_the_other(tmp_path):
    unit = '<tu><tuv xml:lang="en"><seg>a</seg></tuv><tuv xml:lang="ro"><seg>b</seg></tuv></tu>\n'
    with gzip.open(tmp_path / "en-ro.tmx.gz", "wt") as file:
        file.write(f'<tmx version="1.4"><header/><body>\n{unit * 5000}</body></tmx>')
    tracemalloc.start()
    try:
        number = sum(1 for _, row in parallel(("en", "ro"))([tmp_path / "en-ro.tmx.gz"]) if row)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert number == 5000 and peak < 2**20  # 4 MB if all of them were kept


def test_compressed_and_plain_files_of_a_pattern_are_read_together(tmp_path):
    source = place(tmp_path / "from", LAYOUTS["c4"])
    with gzip.open(source / "en/c4-train.00002-of-01024.json.gz", "wt") as file:
        file.write('{"text": "third", "url": null}\n')
    report = import_corpus("c4", source, tmp_path / "out")
    assert {s.rows for s in report.splits if s.file} == {3}
    assert ("third", "") in {
        texts(row, "text", "url") for row in stored(tmp_path / "out", "c4/en", "train")
    }


def test_pages_of_c4(data_dir):
    rows = stored(data_dir, "c4/en", "train")
    assert sorted(texts(row, "text", "url", "content-type") for row in rows) == [
        ("a", "u", ""),
        ("b\nc", "u", ""),
    ]
    (row, _) = (
        task_registry.find_task("c4_v220_span_corruption")
        .to_seqio(Bytes().build(), data_dir)
        .get_dataset(split="train")
        .as_numpy_iterator()
    )
    assert row["targets_pretokenized"] in (b"a", b"b\nc")


def test_questions_of_trivia_qa_with_their_documents(data_dir):
    (row,) = stored(data_dir, "trivia_qa/rc", "train")
    assert list(row["entity_pages"]["wiki_context"]) == [b"Ann Lee won the race ."]
    assert list(row["search_results"]["rank"]) == [1]
    assert row["answer"]["matched_wiki_entity_name"] == b""
    (example,) = examples_of(data_dir, "trivia_qa_v010", "train").examples
    assert example["inputs_pretokenized"] == (
        b"question: Who won ? context: Ann Lee won the race . "
    )
    assert example["targets_pretokenized"] == b"ann lee"


def test_the_folder_of_a_pattern_may_be_given_itself(tmp_path):
    source = place(tmp_path / "from", LAYOUTS["wikitext"]) / "wikitext-2"
    report = import_corpus("wikitext", source, tmp_path / "out")
    found = {s.config: s.rows for s in report.splits if s.file}
    assert found == {"wikitext/wikitext-2-v1": 2}


def test_language_models_have_lines_or_articles(data_dir):
    rows = stored(data_dir, "lm1b", "train")
    assert sorted(row["text"] for row in rows) == [b"a b", b"c", b"d"]
    for name, split in (("2-v1", "train"), ("103-v1", "validation")):
        rows = [
            row["text"].decode() for row in stored(data_dir, f"wikitext/wikitext-{name}", split)
        ]
        assert sorted(rows) == [
            " = One = \n \n a <unk> \n = = Part = = \n \n b",
            " = Two = \n \n c",
        ]  # fmt: skip
    task = task_registry.find_task("lm1b_v100_full_lm")
    (row,) = task.format.preprocess(tfds.builder("lm1b", data_dir=data_dir).as_dataset("test"))
    assert {name: value.numpy() for name, value in row.items()} == {"targets": b"e"}
    assert not task.format.has_inputs
    opened = task.to_seqio(Bytes().build(), data_dir)
    (tokenized,) = opened.get_dataset(split="test").as_numpy_iterator()
    assert set(tokenized) == {"targets", "targets_pretokenized"}
    assert list(tokenized["targets"]) == [ord("e") + 3, 1]


def test_summaries_and_dialogues(data_dir):
    (row,) = stored(data_dir, "cnn_dailymail", "train")
    assert texts(row, "id", "article", "highlights") == ("i", "A\nB", "C")
    rows = stored(data_dir, "convai2/self_original", "train")
    found = {(tuple(row["persona"]), tuple(row["history"]), row["reply"]) for row in rows}
    assert found == {
        ((b"i ski.",), (b"hello .",), b"hi ."),
        ((b"i ski.",), (b"hello .", b"hi .", b"you ?"), b"i ski ."),
        ((b"i sing.",), (b"hey .",), b"yo ."),
    }
    sets = examples_of(data_dir, "convai2_self_original", "train")
    inputs = {to_text(row["inputs_pretokenized"]) for row in sets.examples}
    assert "dialogue history: hello . | hi . | you ? persona: i ski." in inputs
    assert sets.score(sets.target_words)["bleu1"] == pytest.approx(100)


def test_a_second_folder_adds_its_splits_and_renew_replaces(tmp_path, caplog):
    out = tmp_path / "out"
    train = place(tmp_path / "train", LAYOUTS["convai2"])
    other = place(tmp_path / "other", {"valid_self_original_no_cands.txt": CHAT})
    import_corpus("convai2", train, out)
    import_corpus("convai2", other, out)
    assert len(stored(out, "convai2/self_original", "train")) == 3
    assert len(stored(out, "convai2/self_original", "validation")) == 3
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ValueError, match=r"has the split 'validation' already; replace .* --renew"):
        import_corpus("convai2", other, out)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")}.keys() == before.keys()
    import_corpus("convai2", other, out, renew=True)
    assert task_registry.find_task("convai2_self_original").stored_splits(out) == {"validation": 3}
    assert "removes the split 'train' of " in caplog.text


def test_published_sizes_are_checked_and_readers_read(tmp_path):
    """Every layout with a published size is read to its end, and then refused because it is too short."""
    files = {
        "squad": {"train-v1.1.json": QUESTIONS},
        "ag_news": {"test.csv": '"3","A, ""B""","C"\n'},
        "xpersona": {"En_persona_test.json": [{"persona": ["p"], "dialogue": [["a", "b"]]}]},
        "imdb": {"aclImdb/train/neg/0_1.txt": "bad", "aclImdb/train/pos/0_9.txt": "good"},
        "xsum": {
            "XSum-TRAINING-DEV-TEST-SPLIT-90-5-5.json": {"train": ["1"], "validation": [], "test": []},
            "bbc-summary-data/1.summary": ARTICLE,
        },
    }  # fmt: skip
    expected = {
        "squad": {"context": "Ann won.", "question": "Who won?", "title": "T", "id": "1"},
        "ag_news": {"label": 2, "title": 'A, "B"', "description": "C"},
        "xpersona": {"persona": ["p"], "history": ["a"], "reply": "b"},
        "imdb": {"text": "bad", "label": 0},
        "xsum": {"document": "Long.", "summary": "Short."},
    }
    for name, content in files.items():
        source = place(tmp_path / name, content)
        layout = CORPORA[name][0]
        split = next(s for s in layout.splits if list(source.glob(s.parts[0][0])))
        paths = [path for pattern in split.parts[0] for path in source.glob(pattern)]
        _, row = next((split.read or layout.read)(paths))
        assert row.items() >= expected[name].items()
        assert set(row) == set(layout.features)
        with pytest.raises(
            ValueError, match=r"has [12] of .* published rows in .*; nothing was imported"
        ):
            import_corpus(name, source, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("name", "files", "said"),
    [
        ("squad", {"dev-v1.1.json": {"data": [{}]}}, "not SQuAD's JSON .KeyError: 'paragraphs'"),
        ("squad", {"dev-v1.1.json": "{"}, "line 1: not JSON"),
        ("ag_news", {"test.csv": '"5","a","b"\n'}, "test.csv, line 1: class '5' is not 1, 2, 3 or 4"),
        ("ag_news", {"test.csv": '"1","a"\n'}, "line 1: 2 fields where 3 belong"),
        ("ag_news", {"test.csv": '"1","a" b,"c"\n'}, "line 1: .*expected after"),
        ("cnn_dailymail", {"train.csv": "id,article\n"}, "line 1: no column 'highlights'"),
        ("convai2", {"valid_self_original_no_cands.txt": "1 hi\n"}, "line 1: no tab and reply"),
        ("convai2", {"valid_self_original_no_cands.txt": "hi\n"}, "line 1: a number and a text"),
        ("xpersona", {"En_persona_test.json": [{"persona": 1}]}, "dialogue 1: 'persona' and"),
        ("xpersona", {"En_persona_test.json": [{"persona": [], "dialogue": [["a"]]}]}, "a turn is"),
        ("wmt14", {"src-train.txt": "a\nb\n", "tgt-train.txt": "a\n"},
         "tgt-train.txt, the end: it ends before line 2 of the other language"),
        ("wmt16", {"en-ro.tmx": "<tmx><body><tu>"}, "en-ro.tmx, the file: not TMX"),
        ("wmt19", {f"{folder}/europarl-v9.de-en.tsv": "a\tb\n" for folder in "xy"},
         "y/europarl-v9.de-en.tsv, the file: .*x/europarl-v9.de-en.tsv is there too; keep one"),
        ("trivia_qa", {"qa/web-dev.json": {"Data": [TRIVIA]}}, "the folder 'evidence' with its"),
        ("trivia_qa", {"qa/web-dev.json": {"Data": [{}]}, "evidence/web/1.txt": ""},
         "not TriviaQA's JSON .KeyError"),
        ("trivia_qa",
         {"qa/web-dev.json": {"Data": [TRIVIA | {"EntityPages": [{"Filename": "../x"}]}]},
          "evidence/web/1.txt": ""},
         r"the file name '\.\./x' leaves its folder"),
        ("c4", {"en/c4-train.0.json": '{"text": 1}\n'}, "line 1: there is no text 'text'"),
        ("imdb", {"readme.txt": ""}, r"lacks \*\.txt; nothing was imported"),
    ],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path, name, files, said):
    source = place(tmp_path / "from", files)
    with pytest.raises(ValueError, match=said) as caught:
        import_corpus(name, source, tmp_path / "out")
    assert "nothing was imported" in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def test_every_data_set_of_a_corpus_has_a_task():
    layouts = [layout for layouts in CORPORA.values() for layout in layouts]
    used = {task.dataset: task for task in DEFINITIONS}
    for layout in layouts:
        assert {split.name for split in layout.splits} <= set(used[layout.dataset].splits)
    assert set(CORPORA) < set(IMPORTERS)


def test_configurations_and_versions_are_those_of_tfds(tmp_path):
    for layout in (layout for layouts in CORPORA.values() for layout in layouts):
        if layout.dataset.partition("/")[0] in tfds.list_builders(with_community_datasets=False):
            info = tfds.builder(layout.dataset, data_dir=tmp_path).info
            assert (str(info.version), set(info.features)) == (layout.version, set(layout.features))


# The files that this machine may have. --------------------------------------------------------------


def copied(real_data, target, names):
    for old, new in names.items():
        (target / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(real_data / old, target / new)
    return target


REAL = {
    "wikitext": {f"wikitext-2/{s}.txt.gz": f"wikitext-2/{s}.txt.gz" for s in ("valid", "test")},
    "xpersona": {
        f"personachat_xpersona_en/En_persona_{s}.json.gz": f"En_persona_{s}.json.gz"
        for s in ("valid", "test")
    },
    "ag_news": {"ag_news/test.csv.gz": "test.csv.gz"},
    "cnn_dailymail": {"cnn_dailymail_sample/train_sample.csv.gz": "train_sample.csv.gz"},
    "convai2": {
        f"convai2_sample/{s}_self_original_no_cands.txt.gz": f"{s}_self_original_no_cands.txt.gz"
        for s in ("train", "valid")
    },
    "wmt14": {
        f"wmt15_ende_sample/{s}-train.txt.gz": f"{s}-train.txt.gz" for s in ("src", "tgt")
    }
    | {
        f"wmt_newstest/en-{x}/newstest{y}.{z}.gz": f"en-{x}/newstest{y}.{z}.gz"
        for x in ("de", "fr")
        for y in (2013, 2014)
        for z in ("en", x)
    },
}  # fmt: skip
ROWS = {
    "wikitext": {"validation": 60, "test": 60},
    "xpersona": {"validation": 7_316, "test": 7_801},
    "ag_news": {"test": 7_600},
    "cnn_dailymail": {"train": 100},
    "convai2": {"train": 66, "validation": 66},
    "wmt14": {"train": 9_999, "validation": 3_000, "test": 3_003},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_published_files(name, real_data, tmp_path):
    source = copied(real_data, tmp_path / "from", REAL[name])
    report = import_corpus(name, source, tmp_path / "out")
    first = CORPORA[name][0].dataset
    found = {s.split: s.rows for s in report.splits if s.config == first and s.file}
    assert found == ROWS[name]
    stored(tmp_path / "out", first, next(iter(found)))


@pytest.mark.slow
def test_real_csv_is_read_as_it_is(real_data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    import_corpus("ag_news", real_data / "ag_news", tmp_path)
    text = gzip.decompress((real_data / "ag_news/test.csv.gz").read_bytes()).decode()
    wanted = [(int(c) - 1, t, d) for c, t, d in csv.reader(io.StringIO(text, newline=""))]
    rows = stored(tmp_path, "ag_news_subset", "test")
    found = [(int(row["label"]), *texts(row, "title", "description")) for row in rows]
    assert sorted(found) == sorted(wanted)
