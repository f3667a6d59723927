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
from synthesizer_jax.preparation.importers import CORPORA, import_corpus, import_dataset, report_lines
from synthesizer_jax.preparation.importers.corpora import archive_reports
from synthesizer_jax.preparation.importers.files import find_splits
from synthesizer_jax.preparation.importers.layouts import find_importer
from synthesizer_jax.preparation.importers.reading import Cursor
from synthesizer_jax.preparation.writing import write_dataset
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.definitions import DEFINITIONS


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


WIKI = " \n = One = \n \n a <unk> \n = = Part = = \n \n b \n \n = Two = \n \n c \n"
WIKI_ROWS = [(" = One = \n \n a <unk> \n = = Part = = \n \n b",), (" = Two = \n \n c",)]
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
    },
    "multi30k": {"subset_train.en": "a \n\nb\n", "subset_train.de": "c\nx\nd\n"},
    "wikitext": {"wikitext-2/wiki.train.tokens": WIKI, "wikitext-103/valid.txt": WIKI},
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
    ("multi30k/en_de", "train"): (("en", "de"), [("a ", "c"), ("b", "d")]),
    ("wikitext/wikitext-2-v1", "train"): (("text",), WIKI_ROWS),
    ("wikitext/wikitext-103-v1", "validation"): (("text",), WIKI_ROWS),
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
    assert {find_importer(dataset)[0] for dataset, _ in ROWS} == set(FILES) == set(CORPORA)


def test_reports_say_what_is_there(imported):
    _, reports = imported
    split = {s.name: s for report in reports.values() for s in report}
    assert (split["glue/cola:train"].status, split["glue/cola:train"].rows) == ("subset", 2)
    assert (split["glue/ax:test"].status, split["glue/ax:test"].rows) == ("complete", 1104)
    assert split["glue/qqp:train"].dropped == 2
    assert split["wikitext/wikitext-2-v1:train"].status == "present"
    lines = list(report_lines(reports["glue"]))
    assert "glue/rte:train missing (RTE/train.tsv)" in [" ".join(line.split()) for line in lines]
    assert lines[-1] == "6 of 34 splits, 1,111 rows"
    assert any("2 rows, 2 left out" in line for line in lines)


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
    for report in archive_reports(benchmark, source):
        if report.files:
            features = tfds.builder(report.dataset, data_dir=source).info.features
            encoded = report.encode(Cursor(), dict(features.items()), {})
            rows = list(map(features.encode_example, encoded))
            plain = jax.tree.map(lambda value: np.asarray(value).tolist(), rows)
            found[report.dataset, report.split] = plain
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
            folder, stem = pathlib.Path(split.files[0][0]).with_suffix("").parts
            rows, hub = zip(*glue(config, stem), strict=True)
            table = [list(rows[0]), *(map(str, row.values()) for row in rows)]
            if config == "cola" and stem != "test":
                table = [("x", str(row["is_acceptable"]), "", row["sentence"]) for row in rows]
            text = "".join("\t".join(line) + "\n" for line in table)
            for case, name in (("upper", folder), ("lower", folder.lower()), ("lower", config)):
                place(tmp_path / case, {f"{name.replace('**', 'AX')}/subset_{stem}.tsv": text})
            kind = pa.int64() if HUB[config] else pa.float32()
            write_parquet(
                tmp_path / f"hub/{config}/subset_{split.name}-00000-of-00001.parquet", hub, label=kind
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
        path = tmp_path / "hub" / dataset.partition("/")[2] / split / "subset_0000.parquet"
        write_parquet(path, rows)
    hub = rows_of("super_glue", tmp_path / "hub")
    assert hub == published
    assert len(hub) == 5


BROKEN = {
    "RTE/train.tsv": ("sentence1\tsentence2\tlabel\na\tb\tmaybe\n", "line 2: the label 'maybe' is nei"),
    "CoLA/train.tsv": ("x\t1\t\tfine\nx\t1\tshort\n", "1 of 8,551 published rows, without 1 .* left"),
    "CoLA/dev.tsv": ("x\t1\t\tfine\n", "1 of 1,043 published rows in .*or name them subset_dev.tsv"),
    "CB/train.jsonl": ([CB, CB | {"idx": 1, "label": "no"}], "train.jsonl, line 2: the label 'no' is"),
    "CB/val.jsonl": ('{"x": 1}\n{', "CB/val.jsonl, line 1: there is no field 'premise'; there are x"),
    "COPA/val.jsonl": ([COPA | {"premise": None}], "COPA/val.jsonl, line 1: the field 'premise' is nu"),
    "COPA/train.jsonl": ([UNLABELED], "COPA/train.jsonl, line 1: there is no field 'label'"),
    "WiC/train.jsonl.gz": (b"", "WiC/train.jsonl.gz, after line 0"),
    "val.de": ("a\n", "val.de, line 2: the file ends here, the others go on"),
    "readme.txt": ("", "lacks .*wikitext-2/wiki.train.tokens, .*; nothing was imported"),
}
CORPUS_OF = {
    **dict.fromkeys(("RTE", "CoLA"), "glue"),
    **dict.fromkeys(("CB", "COPA", "WiC"), "super_glue"),
    "val.de": "multi30k",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_leaves_nothing(tmp_path, name):
    content, said = BROKEN[name]
    source = place(tmp_path / "from", {name: content})
    if name.endswith(".gz"):
        (source / name).write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-9])
    if name == "val.de":
        place(source, {"val.en": "a\nb\n"})
    with pytest.raises(ValueError, match=said) as error:
        import_corpus(CORPUS_OF.get(name.partition("/")[0], "wikitext"), source, tmp_path / "out")
    assert str(error.value).endswith("nothing was imported")
    assert not list((tmp_path / "out").glob("*"))


PAIR, ARTICLE, ANSWERED = ("wmt14_translate/de-en", {"article": "A", "highlights": "B"}, {"text": ["Ann"]})
CHAT = {"persona": ["i ski."], "history": ["hello .", "hi .", "you ?"], "reply": "i ski ."}
RACE = {
    "question": " Who won?",
    "answer": {"normalized_aliases": ["ann lee", "annie"], "value": "Ann"},
    "entity_pages": {"wiki_context": ["Ann Lee won the race ."]},
    "search_results": {"search_context": ["nobody"]},
}
DPR = {"sentence": "Al saw Bo.", "pronoun": "he", "candidates": ["Al", "Bo"], "label": 1}
NAMED = {
    "wmt14_ende_v003": ("a.en+{}a.de", {"a.en": "a\n\nc\n", "a.de": "x\ny\nz\n"}, {},
                        [("translate English to German: a", "x"), ("translate English to German: c", "z")]),
    "wmt14_enfr_v003": ("a.txt+{}b.txt", {"a.txt": "a\n", "b.txt": "b\n"}, {"columns": ["en", "fr"]},
                        [("translate English to French: a", "b")]),
    "iwslt2017_en_de": ("a.tsv", {"a.tsv": "b\ta\n"}, {"columns": ["de", "en"]},
                        [("translate English to German: a", "b")]),
    "cnn_dailymail_v002": ("a.csv", {"a.csv": ",id,article,highlights\n\n0,i,A,B\n"}, {},
                           [("summarize: A", "B")]),
    "squad_v010": ("a.json", {"a.json": [{"question": "Who?", "context": "Ann.", "answers": ANSWERED}]}, {},
                   [("question: Who ? context: Ann . ", "Ann")]),
    "trivia_qa_v010": ("a.jsonl", {"a.jsonl": [RACE]}, {},
                       [("question: Who won ? context: Ann Lee won the race . ", "ann lee")]),
    "c4_v220_full_lm": ("c4-*.json.gz", {"c4-0.json.gz": [{"text": "a", "url": None}]}, {}, [("", "a")]),
    "convai2_self_original": ("a.json", {"a.json": [CHAT]}, {},
        [("dialogue history: hello . | hi . | you ? persona: i ski.", "i ski .")]),
    "dpr_v001_simple": ("a.json", {"a.json": [DPR]}, {}, [("wsc: Al saw Bo.", "Bo")]),
    "ag_news_v100": ("a.csv", {"a.csv": '"4","A","B"\n'},
                     {"columns": ["label", "title", "description"], "labels": {"4": "Sci/Tech"}},
                     [("ag_news title: A description: B", "Sci/Tech")]),
    "imdb_reviews_v100": ("a.jsonl", {"a.jsonl": [{"text": "bad", "label": 0}]}, {},
                          [("imdb text: bad", "negative")]),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_a_tasks_data_set_is_made_of_files_that_a_user_names(tmp_path, name):
    """Aligned, with columns, with more fields than are read, with other names of labels."""
    files, contents, options, expected = NAMED[name]
    at, labels = f"{place(tmp_path / 'from', contents)}/", options.pop("labels", {})
    splits = find_splits([f"train={at}{files.format(at)}"], **options)
    task = task_registry.find_task(name)
    (report,) = import_dataset(task.dataset, splits, tmp_path, labels=labels)
    assert report.rows == task.stored_splits(tmp_path)["train"]
    assert report.dropped == (name == "wmt14_ende_v003")
    rows = list(inspection.read_rows(name, "train", Bytes().build(), data_dir=tmp_path))
    sides = ("inputs_pretokenized", "targets_pretokenized")
    assert [tuple(row.get(side, b"").decode() for side in sides) for row in rows] == expected


def test_files_that_do_not_fit_a_data_set_are_one_sentence(tmp_path):
    place(tmp_path, {"a.json": [ARTICLE], "a.x": "a\n", "a.y": "b\n", "a.csv": "9,A\n"})
    labeled = {"columns": ["label", "text"]}
    for dataset, argument, options, said in (
        (PAIR, "dev={}a.json", {}, f"{PAIR} has no split 'dev'; it has train, validation, test"),
        (PAIR, "train={}a.json", {}, "a.json, line 1: there is no field '..'; there are article, hi"),
        (PAIR, "train={}a.x+{}a.y", {}, "a.x, line 1: there is no field '..'; there are x, y"),
        (PAIR, "train={}a.x+{}a.y", {"columns": ["en"]}, "2 aligned files have 1 columns"),
        ("convai2/none_original", "train={}a.json", {}, "no field 'persona'"),
        ("imdb_reviews/plain_text", "train={}a.csv", labeled, "the label '9' is neither a number be"),
    ):
        with pytest.raises(ValueError, match=said):
            splits = find_splits([argument.format(f"{tmp_path}/", f"{tmp_path}/")], **options)
            import_dataset(dataset, splits, tmp_path / "out", labels={})
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    write_dataset("squad/v1.1", "3.0.0", {"x": np.int64}, {"train": lambda: [{"x": 1}]}, tmp_path)
    with pytest.raises(ValueError, match=r"3\.0\.0 would be read instead; delete it"):
        import_dataset("squad/v1.1", {}, tmp_path, labels={})


def test_a_second_import_adds_splits_and_renew_replaces(tmp_path, caplog, monkeypatch):
    out, rename = tmp_path / "out", pathlib.Path.rename
    other = place(tmp_path / "other", {"wikitext-2/valid.txt": WIKI})
    task = task_registry.find_task("wikitext_2_v1_full_lm")
    import_corpus("wikitext", place(tmp_path / "train", {"wikitext-2/train.txt": WIKI}), out)
    import_corpus("wikitext", other, out)
    assert task.stored_splits(out) == {"train": 2, "validation": 2}
    assert len(stored(out, "wikitext/wikitext-2-v1", "train")) == 2
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}

    def full_disk(old, new):
        if new == out / "wikitext/wikitext-2-v1/1.0.0" and "replaced" not in old.name:
            raise OSError("disk full")
        return rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", full_disk)
        with pytest.raises(OSError, match="disk full"):
            import_corpus("wikitext", other, out, renew=True)
    with pytest.raises(ValueError, match=r"has the split 'validation' already; replace .* --renew"):
        import_corpus("wikitext", other, out)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    import_corpus("wikitext", other, out, renew=True)
    assert task.stored_splits(out) == {"validation": 2}
    assert "removes the split 'train' of " in caplog.text


def test_every_data_set_has_a_task_and_a_folder_may_be_given_itself(tmp_path):
    for layout in (layout for layouts in CORPORA.values() for layout in layouts):
        splits = {s for task in DEFINITIONS if task.dataset == layout.dataset for s in task.splits}
        assert {s.name for s in layout.splits} <= splits
    source = place(tmp_path / "from", FILES["wikitext"]) / "wikitext-2"
    report = import_corpus("wikitext", source, tmp_path / "out")
    assert [s.name for s in report if s.rows] == ["wikitext/wikitext-2-v1:train"]
    with pytest.raises(ValueError, match="is not a folder; give the one that holds the files of gl"):
        import_corpus("glue", tmp_path / "nowhere", tmp_path / "out")
