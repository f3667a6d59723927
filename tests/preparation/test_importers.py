"""Benchmarks and corpora in the layouts in which they are published: rows, sizes, errors."""

import gzip
import json
import pathlib

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow_datasets as tfds

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.preparation import inspection
from synthesizer_jax.preparation.importers import CORPORA, import_corpus, report_lines
from synthesizer_jax.preparation.importers.corpora import SplitReport
from synthesizer_jax.preparation.importers.layouts import find_importer, find_parts
from synthesizer_jax.preparation.importers.reading import Cursor
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.definitions import DEFINITIONS
from tests.tasks.loading import load


def place(root: pathlib.Path, files: dict) -> pathlib.Path:
    """Writes files: texts, bytes, and others as JSON; of a list of JSON values a line each."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        if not isinstance(content, bytes | str):
            content = json.dumps(content)
        data = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return root


def stored(data_dir: pathlib.Path, name: str, split: str) -> list[dict]:
    builder = tfds.builder_from_directory(next((data_dir / name).glob("*.*.*")))
    return list(tfds.as_numpy(builder.as_dataset(split=split)))


def texts(rows: list[dict], *names: str) -> list[tuple]:
    """The values of some features of all rows, sorted, bytes as texts."""
    found = ([row[name] for name in names] for row in rows)
    return sorted(tuple(v.decode() if isinstance(v, bytes) else v for v in row) for row in found)


QUESTION = {"id": "1", "question": "Who won?", "answers": [{"text": "Ann", "answer_start": 0}] * 2}
QUESTIONS = {"data": [{"title": "T", "paragraphs": [{"context": "Ann won.", "qas": [QUESTION]}]}]}
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
WIKI_ROWS = [(" = One = \n \n a <unk> \n = = Part = = \n \n b",), (" = Two = \n \n c",)]
CHAT = (
    "1 your persona: i ski.\n2 hello .\thi .\n3 you ?\ti ski .\tx|y\n"
    "1 your persona: i sing.\n2 hey .\tyo .\n"
)
COPA = {"premise": "P", "choice1": "A", "choice2": "B", "question": "cause", "label": 1, "idx": 0}
CB = {"premise": "P", "hypothesis": "H", "label": "neutral", "idx": 0}
WSC = {
    "text": "the dog saw Ann . She ran",
    "target": {"span1_text": "Ann.", "span1_index": 3, "span2_text": "She", "span2_index": 5},
    "label": True,
    "idx": 0,
}
ANSWERS = [{"text": "0", "idx": 0, "label": 0}, {"text": "no", "idx": 1, "label": 0}]
MULTIRC = {
    "idx": 4,
    "passage": {"text": "T", "questions": [{"question": "Q", "idx": 7, "answers": ANSWERS}]},
}
RECORD = {
    "idx": 2,
    "passage": {"text": "Bob met Al", "entities": [{"start": 8, "end": 9}, {"start": 0, "end": 2}]},
    "qas": [{"query": "@placeholder left", "idx": 5, "answers": [{"text": "Bob"}, {"text": "Al"}]}],
}
MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
UNLABELED = {name: value for name, value in COPA.items() if name != "label"}

FILES = {
    "glue": {
        "CoLA/subset_train.tsv.gz": 'gj04\t1\t\tHe said "stop.\ngj04\t0\t*\tHim " said\n',
        "CoLA/subset_test.tsv": "index\tsentence\n0\tA man.\n",
        "QQP/subset_train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        "1\t1\t2\tWhy?\tHow?\t0\n2\t3\t4\tCut in the\nmiddle?\tSo?\t1\n3\t5\t6\tOh?\tAh?\t1\n",
        "MRPC/subset_train.tsv": MRPC + '1\t3\t4\t" first\tsecond\n',
        "MRPC/subset_test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n",
        "AX/diagnostic.tsv": "index\tsentence1\tsentence2\n"
        + "".join(f"{i}\tpremise {i}\thypothesis\n" for i in range(1104)),
    },
    "super_glue": {
        "WSC/subset_train.jsonl": [WSC],
        "MultiRC/subset_val.jsonl.gz": [MULTIRC],
        "ReCoRD/subset_train.jsonl": [RECORD],
        "COPA/subset_train.jsonl": [COPA, COPA | {"idx": 1, "label": 0}],
        "COPA/subset_test.jsonl": [UNLABELED],
        "DPR/subset_train.c.txt": "Al saw Bo.\nhe\nAl, Bo\nBo\n\nX\nhe\nA , B\nA\n",
    },
    "multi30k": {"subset_train.en": "a \n\nb\n", "subset_train.de": "c\nx\nd\n"},
    "iwslt2016": {
        "en-de/train.tags.en-de.en": "<url>u</url>\n<title>t</title>\nA \n\nB\n",
        "en-de/train.tags.en-de.de": "<url>u</url>\n<title>t</title>\nC\n\nD\n",
        **{
            f"en-de/IWSLT16.{stem}.en-de.{language}.xml": TALK.format(f"{stem[4:]} {language}")
            for stem in ("TED.dev2010", "TED.tst2014", "TED.tst2015", "QED.tst2016")
            for language in ("en", "de")
        },
    },
    "wmt15": {
        "training/news-commentary-v10.fr-en.en": "a\n",
        "training/news-commentary-v10.fr-en.fr": "b\n",
        "dev/newsdiscussdev2015-fren-src.fr.sgm": SGM.format("d"),
        "dev/newsdiscussdev2015-fren-ref.en.sgm": SGM.format("c &amp; d"),
        "dev/newstest2014-fren-src.fr.sgm": SGM.format("f"),
        "dev/newstest2014-fren-ref.en.sgm": SGM.format("e"),
    },
    "wmt16": {"en-ro.tmx.gz": TMX},
    "wmt19": {
        "europarl-v9.de-en.tsv": "a\tb\nonly one\n\t\n",
        "wikititles-v1.de-en.tsv.gz": "c\td\n",
        "commoncrawl.de-en.en": "e\n\n",
        "commoncrawl.de-en.de": "f\ng\n",
    },
    "trivia_qa": {
        "qa/wikipedia-train.json": json.dumps({"Data": [TRIVIA]}, indent=4),
        "evidence/wikipedia/A/B.txt": " Ann Lee won the race .\n",
        "evidence/web/1.txt": "nobody",
    },
    "c4": {
        "en/c4-train.00000-of-01024.json": '{"text": "a", "url": "u", "timestamp": "t"}\n',
        "en/c4-train.00001-of-01024.json.gz": '{"text": "b\\nc", "url": null}\n',
    },
    "wikitext": {"wikitext-2/wiki.train.tokens": WIKI, "wikitext-103/valid.txt": WIKI},
    "lm1b": {
        "1-billion/training-monolingual.tokenized.shuffled/news.en-00001-of-00100": "a b\nc\n",
        "1-billion/training-monolingual.tokenized.shuffled/news.en-00002-of-00100": "d\n",
    },
    "cnn_dailymail": {"subset_train.csv": ',id,article,highlights\n\n0,i,"A\nB",C\n'},
    "squad": {"subset_train-v1.1.json": QUESTIONS},
    "convai2": {"train_self_original_no_cands.txt": CHAT},
    "ag_news": {"subset_test.csv": '"3","A, ""B""","C"\n'},
    "imdb": {"train/neg/subset_1.txt": "bad", "train/pos/subset_9.txt": "good"},
}  # fmt: skip
ROWS = {
    ("glue/cola", "train"): (("sentence", "idx"), [('He said "stop.', 0), ('Him " said', 1)]),
    ("glue/cola", "test"): (("sentence", "label"), [("A man.", -1)]),
    ("glue/qqp", "train"): (("question1", "label", "idx"), [("Oh?", 1, 3), ("Why?", 0, 0)]),
    ("glue/mrpc", "train"): (("sentence1", "sentence2", "label"), [('" first', "second", 1)]),
    ("glue/mrpc", "test"): (("sentence2", "label"), [("b", -1)]),
    ("super_glue/wsc.fixed", "train"): (("span1_text", "span1_index", "label"), [("Ann", 3, 1)]),
    ("super_glue/multirc", "validation"): (("answer", "label"), [("0", 0), ("no", 0)]),
    ("super_glue/copa", "train"): (("label", "idx"), [(0, 1), (1, 0)]),
    ("super_glue/copa", "test"): (("label",), [(-1,)]),
    ("definite_pronoun_resolution", "train"): (("sentence", "label"), [("Al saw Bo.", 1), ("X", 0)]),
    ("multi30k/en_de", "train"): (("en", "de"), [("a ", "c"), ("b", "d")]),
    ("iwslt2016/en_de", "train"): (("en", "de"), [("A", "C"), ("B", "D")]),
    ("iwslt2016/en_de", "validation"): (("en",), [("dev2010 en & x",), ("tst2014 en & x",)]),
    ("iwslt2016/en_de", "test"): (("de",), [("tst2015 de & x",), ("tst2016 de & x",)]),
    ("wmt15_translate/fr-en", "train"): (("en", "fr"), [("a", "b")]),
    ("wmt15_translate/fr-en", "validation"): (("en", "fr"), [("c & d", "d"), ("e", "f")]),
    ("wmt16_translate/ro-en", "train"): (("en", "ro"), [("One <1>", "Unu")]),
    ("wmt19_translate/de-en", "train"): (("en", "de"), [("b", "a"), ("d", "c"), ("e", "f")]),
    ("c4/en", "train"): (("text", "url", "content-type"), [("a", "u", ""), ("b\nc", "", "")]),
    ("wikitext/wikitext-2-v1", "train"): (("text",), WIKI_ROWS),
    ("wikitext/wikitext-103-v1", "validation"): (("text",), WIKI_ROWS),
    ("lm1b", "train"): (("text",), [("a b",), ("c",), ("d",)]),
    ("cnn_dailymail", "train"): (("id", "article", "highlights"), [("i", "A\nB", "C")]),
    ("squad/v1.1", "train"): (("context", "question", "title", "id"), [("Ann won.", "Who won?", "T", "1")]),
    ("ag_news_subset", "test"): (("label", "title", "description"), [(2, 'A, "B"', "C")]),
    ("imdb_reviews/plain_text", "train"): (("text", "label"), [("bad", 0), ("good", 1)]),
}  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Every benchmark and corpus but equal ones in small, and the reports of their imports."""
    target = tmp_path_factory.mktemp("data")
    reports = {
        name: import_corpus(name, place(tmp_path_factory.mktemp(name), files), target)
        for name, files in FILES.items()
    }
    return target, reports


def test_every_layout_has_the_published_rows(imported):
    data_dir, _ = imported
    for (dataset, split), (names, rows) in ROWS.items():
        assert texts(stored(data_dir, dataset, split), *names) == rows, dataset
    (record,) = stored(data_dir, "super_glue/record", "train")
    assert record["entities"].tolist() == [b"Al", b"Bob"] == record["answers"].tolist()
    (trivia,) = stored(data_dir, "trivia_qa/rc", "train")
    assert list(trivia["entity_pages"]["wiki_context"]) == [b"Ann Lee won the race ."]
    assert list(trivia["search_results"]["rank"]) == [1]
    found = {
        (tuple(row["persona"]), tuple(row["history"]), row["reply"])
        for row in stored(data_dir, "convai2/self_original", "train")
    }
    assert found == {
        ((b"i ski.",), (b"hello .",), b"hi ."),
        ((b"i ski.",), (b"hello .", b"hi .", b"you ?"), b"i ski ."),
        ((b"i sing.",), (b"hey .",), b"yo ."),
    }
    assert {find_importer(dataset)[0] for dataset, _ in ROWS} | {"trivia_qa", "convai2"} == set(
        FILES
    )
    assert set(CORPORA) - set(FILES) == {"iwslt2017", "wmt14", "wmt_t2t"}


def test_reports_say_what_is_there(imported):
    _, reports = imported
    split = {s.name: s for report in reports.values() for s in report}
    assert (split["glue/cola:train"].status, split["glue/cola:train"].rows) == ("subset", 2)
    assert (split["glue/ax:test"].status, split["glue/ax:test"].rows) == ("complete", 1104)
    assert split["wmt19_translate/de-en:train"].status == "subset"  # some of the parts
    assert split["wmt19_translate/de-en:train"].dropped == 3
    assert split["lm1b:train"].status == "present"
    lines = list(report_lines(reports["glue"]))
    assert "glue/rte:train missing (RTE/train.tsv)" in [" ".join(line.split()) for line in lines]
    assert lines[-1] == "6 of 34 splits, 1,111 rows"
    assert any("3 dropped" in line for line in report_lines(reports["wmt19"]))


def test_tasks_read_what_is_imported(imported):
    data_dir, _ = imported
    lengths = {"inputs": 200, "targets": 50}
    (example,) = load("trivia_qa_v010", "train", data_dir, lengths=lengths).examples
    assert example["inputs_pretokenized"] == b"question: Who won ? context: Ann Lee won the race . "
    assert example["targets_pretokenized"] == b"ann lee"
    sets = load("convai2_self_original", "train", data_dir, lengths=lengths)
    inputs = {row["inputs_pretokenized"] for row in sets.examples}
    assert b"dialogue history: hello . | hi . | you ? persona: i ski." in inputs
    assert sets.score(sets.target_words)["bleu1"] == pytest.approx(100)
    rows = inspection.read_rows("lm1b_v100_full_lm", "train", Bytes().build(), data_dir=data_dir)
    assert {tuple(sorted(row)) for row in rows} == {("targets", "targets_pretokenized")}


HUB = {
    **{"cola": ("unacceptable", "acceptable"), "sst2": ("negative", "positive"), "stsb": ()},
    **{"mrpc": ("not_equivalent", "equivalent"), "qqp": ("not_duplicate", "duplicate")},
    **dict.fromkeys(("qnli", "rte"), ("entailment", "not_entailment")),
    **dict.fromkeys(("mnli", "mnli_matched", "ax"), ("entailment", "neutral", "contradiction")),
    "wnli": ("not_entailment", "entailment"),
}
"""GLUE's classes in the order of the numbers in the Parquet files of the Hugging Face hub."""


def glue(config, stem):
    """The rows of a file of GLUE: texts by feature and column, and the labels of both layouts."""
    settings = tfds.builder_cls("glue").builder_configs[config]
    columns = dict(settings.text_features)
    if config == "mrpc":
        columns = {"sentence1": "#1 String", "sentence2": "#2 String"}
    for i in range(3):
        values = {name: f'{stem} "{name}" {i}' for name in columns}
        hidden = stem.startswith(("test", "diagnostic"))
        class_ = i % max(len(HUB[config]), 1)
        in_words = config in ("mnli", "qnli", "rte")
        label = HUB[config][class_] if in_words else class_ if HUB[config] else 0.1 * i
        shown = {} if hidden else {settings.label_column: label}
        row = {columns[name]: value for name, value in values.items()} | shown
        number = class_ if HUB[config] else 0.1 * i
        yield row, {**values, "label": -1 if hidden else number, "idx": i}


def rows_of(benchmark, source):
    """The rows of all files as TFDS stores them."""
    found = {}
    for layout in CORPORA[benchmark]:
        features = tfds.builder(layout.dataset, data_dir=source).info.features
        for split in layout.splits:
            report = SplitReport(layout, split, find_parts(split, source))
            if report.parts:
                rows = map(features.encode_example, report.read(Cursor()))
                plain = jax.tree.map(lambda value: np.asarray(value).tolist(), list(rows))
                found[layout.dataset, split.name] = plain
    return found


def write_parquet(path, rows, **types):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(rows)
    for name, kind in types.items():
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    pq.write_table(table, path)


def test_glue_of_the_archive_in_either_case_and_of_parquet_files_is_the_same(tmp_path):
    for layout in CORPORA["glue"]:
        config = layout.dataset.partition("/")[2]
        for split in layout.splits:
            if config == "mnli_mismatched":
                continue  # in the folders of mnli
            folder, stem = pathlib.Path(split.parts[0][0]).with_suffix("").parts
            rows, hub = zip(*glue(config, stem), strict=True)
            table = [list(rows[0]), *(map(str, row.values()) for row in rows)]
            if config == "cola" and stem != "test":
                table = [("x", str(row["is_acceptable"]), "", row["sentence"]) for row in rows]
            text = "".join("\t".join(line) + "\n" for line in table)
            for case, name in (("upper", folder), ("lower", folder.lower()), ("lower", config)):
                place(tmp_path / case, {f"{name.replace('**', 'AX')}/subset_{stem}.tsv": text})
            kind = pa.int64() if HUB[config] else pa.float32()
            write_parquet(
                tmp_path / f"hub/{config}/subset_{split.name}-00000-of-00001.parquet",
                hub,
                label=kind,
            )
    published = rows_of("glue", tmp_path / "upper")
    assert len(published) == sum(len(layout.splits) for layout in CORPORA["glue"])
    assert rows_of("glue", tmp_path / "lower") == published
    assert rows_of("glue", tmp_path / "hub") == published


def test_super_glue_of_parquet_files_is_the_same(tmp_path):
    published = rows_of("super_glue", place(tmp_path / "from", FILES["super_glue"]))
    for (dataset, split), rows in published.items():
        if "record" in dataset:  # the hub's sets have no order, and there are more columns
            rows = [row | {"entities": row["entities"][::-1], "entity_spans": []} for row in rows]
        if dataset.startswith("super_glue"):
            path = tmp_path / "hub" / dataset.partition("/")[2] / split / "subset_0000.parquet"
            write_parquet(path, rows)
    hub = rows_of("super_glue", tmp_path / "hub")
    assert hub == {name: rows for name, rows in published.items() if "super_glue" in name[0]}
    assert len(hub) == 5


BROKEN = {
    "RTE/train.tsv": ("sentence1\tsentence2\tlabel\na\tb\tmaybe\n", "train.tsv: invalid .*'maybe'"),
    "CoLA/train.tsv": ("x\t1\t\tfine\nx\t1\tshort\n", "after .*train.tsv, example 1: IndexError"),
    "CoLA/dev.tsv": ("x\t1\t\tfine\n", "1 of 1,043 published rows in .*subset_dev.tsv"),
    "CB/train.jsonl": ([CB, CB | {"idx": 1, "label": "no"}], "train.jsonl, example 2: .*'no'"),
    "CB/val.jsonl": ('{"x": 1}\n{', "CB/val.jsonl: KeyError: 'premise'"),
    "COPA/val.jsonl": ([COPA | {"premise": 3}], "COPA/val.jsonl, example 1"),
    "WiC/train.jsonl.gz": ([CB], "damaged.*|KeyError: 'word'"),
    "DPR/test.c.txt": ("S he\nhe\nA, B\nC\n", "test.c.txt: 'C' is not in list"),
    "dev-v1.1.json": ({"data": [{}]}, "dev-v1.1.json: KeyError: 'paragraphs'"),
    "train-v1.1.json": ("{", "train-v1.1.json: JSONDecodeError"),
    "test.csv": ('"5","a","b"\n', "test.csv, line 1: .*4"),
    "train.csv": ('"1","a"\n', "train.csv, line 1: 2 columns instead of 3"),
    "valid_self_original_no_cands.txt": ("2 a\tb\n1 hi\n", "after .*line 1: not enough values"),
    "en-ro.tmx": ("<tmx><body><tu>", "en-ro.tmx: ParseError"),
    "val.de": ("a\n", "val.de, line 2: the file ends here, the others go on"),
    "qa/web-dev.json": ({"Data": [TRIVIA]}, "the folder .*evidence with the documents is not"),
    "en/c4-train.0.json": ('{"text": 1}\n', "c4-train.0.json, line 1: "),
    "en/c4-validation.0.json.gz": (b"", "c4-validation.0.json.gz, after line 0"),
    "readme.txt": ("", "lacks aclImdb|lacks .*; nothing was imported"),
}
CORPUS_OF = {
    **dict.fromkeys(("RTE", "CoLA"), "glue"),
    **dict.fromkeys(("CB", "COPA", "WiC", "DPR"), "super_glue"),
    **{"dev-v1.1.json": "squad", "train-v1.1.json": "squad", "val.de": "multi30k", "qa": "trivia_qa"},
    **{"test.csv": "ag_news", "train.csv": "ag_news", "en-ro.tmx": "wmt16", "en": "c4"},
    "valid_self_original_no_cands.txt": "convai2",
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_leaves_nothing(tmp_path, name):
    content, said = BROKEN[name]
    source = place(tmp_path / "from", {name: content})
    if name.endswith("c4-validation.0.json.gz"):
        (source / name).write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    if name == "val.de":
        place(source, {"val.en": "a\nb\n"})
    with pytest.raises(ValueError, match=said) as error:
        import_corpus(CORPUS_OF.get(name.partition("/")[0], "imdb"), source, tmp_path / "out")
    assert str(error.value).endswith("nothing was imported")
    assert not list((tmp_path / "out").glob("*"))


def test_a_second_import_adds_splits_and_renew_replaces(tmp_path, caplog, monkeypatch):
    out, rename = tmp_path / "out", pathlib.Path.rename
    other = place(tmp_path / "other", {"valid_self_original_no_cands.txt": CHAT})
    task = task_registry.find_task("convai2_self_original")
    import_corpus("convai2", place(tmp_path / "train", FILES["convai2"]), out)
    import_corpus("convai2", other, out)
    assert task.stored_splits(out) == {"train": 3, "validation": 3}
    assert len(stored(out, "convai2/self_original", "train")) == 3
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}

    def full_disk(old, new):
        if new == out / "convai2/self_original/1.0.0" and "replaced" not in old.name:
            raise OSError("disk full")
        return rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", full_disk)
        with pytest.raises(OSError, match="disk full"):
            import_corpus("convai2", other, out, renew=True)
    with pytest.raises(ValueError, match=r"has the split 'validation' already; replace .* --renew"):
        import_corpus("convai2", other, out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    import_corpus("convai2", other, out, renew=True)
    assert task.stored_splits(out) == {"validation": 3}
    assert "removes the split 'train' of " in caplog.text


def test_every_data_set_has_a_task_and_a_folder_may_be_given_itself(tmp_path):
    for layout in (layout for layouts in CORPORA.values() for layout in layouts):
        splits = {s for task in DEFINITIONS if task.dataset == layout.dataset for s in task.splits}
        assert {s.name for s in layout.splits} <= splits
    source = place(tmp_path / "from", FILES["wikitext"]) / "wikitext-2"
    report = import_corpus("wikitext", source, tmp_path / "out")
    assert [s.name for s in report if s.rows] == ["wikitext/wikitext-2-v1:train"]
    with pytest.raises(
        ValueError, match="is not a folder; give the one that holds the files of gl"
    ):
        import_corpus("glue", tmp_path / "nowhere", tmp_path / "out")
