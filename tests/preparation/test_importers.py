"""Tests imports of benchmarks and corpora in the layouts of their publishers."""

import functools
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
from synthesizer_jax.preparation import task_contents
from synthesizer_jax.preparation.importers.archives import ARCHIVES, read_split
from synthesizer_jax.preparation.importers.corpora import (
    archive_reports,
    feature_values,
    import_archive,
    import_dataset,
    report_lines,
)
from synthesizer_jax.preparation.importers.files import find_splits
from synthesizer_jax.preparation.importers.reading import Cursor
from synthesizer_jax.preparation.writing import write_dataset
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.definitions import DEFINITIONS


def place(root: pathlib.Path, files: dict) -> pathlib.Path:
    """Writes files.

    Strings and bytes are written unchanged, and other values as JSON. A list is written as one JSON
    value per line.
    """
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
    """Returns the sorted values of some features of all rows. Bytes are decoded to strings."""
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
QUESTION = {"question": "Q", "idx": 7, "answers": ANSWERS}
MULTIRC = {"idx": 4, "passage": {"text": "T", "questions": [QUESTION]}}
RECORD = {
    "idx": 2,
    "passage": {"text": "Bob met Al", "entities": [{"start": 8, "end": 9}, {"start": 0, "end": 2}]},
    "qas": [{"query": "@placeholder left", "idx": 5, "answers": [{"text": "Bob"}, {"text": "Al"}]}],
}
MRPC = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
UNLABELED = {name: value for name, value in COPA.items() if name != "label"}

FILES = {
    "glue": {
        "CoLA/train.tsv.gz": 'gj04\t1\t\tHe said "stop.\ngj04\t0\t*\tHim " said\n',
        "CoLA/test.tsv": "index\tsentence\n0\tA man.\n",
        "QQP/train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        "1\t1\t2\tWhy?\tHow?\t0\n2\t3\t4\tCut in the\nmiddle?\tSo?\t1\n3\t5\t6\tOh?\tAh?\t1\n",
        "MRPC/train.tsv": MRPC + '1\t3\t4\t" first\tsecond\n',
        "MRPC/test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\ta\tb\n",
        "AX/diagnostic.tsv": "index\tsentence1\tsentence2\n"
        + "".join(f"{i}\tpremise {i}\thypothesis\n" for i in range(1104)),
    },
    "super_glue": {
        "WSC/train.jsonl": [WSC],
        "MultiRC/val.jsonl.gz": [MULTIRC],
        "ReCoRD/train.jsonl": [RECORD],
        "COPA/train.jsonl": [COPA, COPA | {"idx": 1, "label": 0}],
        "COPA/test.jsonl": [UNLABELED],
    },
}
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
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Small versions of the archives of GLUE and SuperGLUE, and the reports of their imports."""
    target = tmp_path_factory.mktemp("data")
    reports = {
        name: import_archive(name, place(tmp_path_factory.mktemp(name), files), target)
        for name, files in FILES.items()
    }
    return target, reports


def test_an_import_reports_its_progress_in_rows(tmp_path):
    counts = {}

    def phase(title, total):
        """Counts the rows of a split."""
        counts[title] = [total, 0]

        def advance(count):
            counts[title][1] += count

        return advance

    source = place(tmp_path / "files", FILES["glue"])
    import_archive("glue", source, tmp_path / "data", phase=phase)
    assert counts["importing glue/ax:test"] == [1104, 1104]
    assert counts["importing glue/cola:train"] == [8551, 2]  # the published rows, and these rows


def test_every_layout_has_the_published_rows(imported):
    data_dir, _ = imported
    for (dataset, split), (names, rows) in ROWS.items():
        assert texts(stored(data_dir, dataset, split), *names) == rows, dataset
    (record,) = stored(data_dir, "super_glue/record", "train")
    assert record["entities"].tolist() == [b"Al", b"Bob"] == record["answers"].tolist()


def test_reports_list_the_files_that_exist(imported):
    _, reports = imported
    split = {s.name: s for report in reports.values() for s in report}
    assert split["glue/ax:test"].rows == split["glue/ax:test"].published == 1104
    lines = [" ".join(line.split()) for line in report_lines(reports["glue"])]
    assert "glue/rte:train missing (RTE/train.tsv)" in lines
    assert lines[-1] == "6 of 34 splits, 1,111 rows"
    for said in ("glue/cola:train 2 rows of 8,551 published", "glue/qqp:train 2 rows, 2 left out"):
        assert any(line.startswith(said) for line in lines)


HUB = {
    **{"cola": ("unacceptable", "acceptable"), "sst2": ("negative", "positive"), "stsb": ()},
    **{"mrpc": ("not_equivalent", "equivalent"), "qqp": ("not_duplicate", "duplicate")},
    **dict.fromkeys(("qnli", "rte"), ("entailment", "not_entailment")),
    **dict.fromkeys(("mnli", "mnli_matched", "ax"), ("entailment", "neutral", "contradiction")),
    "wnli": ("not_entailment", "entailment"),
}
"""The classes of GLUE in the order of the numbers in the hub's Parquet files."""


def glue(config, stem):
    """Yields the rows of a file of GLUE.

    A row has texts by feature and column, and the labels in both layouts.
    """
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
    """Returns the rows of all files in the form in which TFDS stores them."""
    found = {}
    for report in archive_reports(benchmark, source):
        if report.files:
            features = tfds.builder(report.dataset, data_dir=source).info.features
            values = functools.partial(feature_values, features=dict(features.items()), labels={})
            converted = report.convert(read_split(report.dataset, report.files), Cursor(), values)
            rows = list(map(features.encode_example, converted))
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
    for dataset, splits in ARCHIVES["glue"].items():
        config = dataset.partition("/")[2]
        for split, layout in splits.items():
            if config == "mnli_mismatched":
                continue  # their files are in the folders of mnli
            folder, stem = pathlib.Path(layout.patterns[0]).with_suffix("").parts
            rows, hub = zip(*glue(config, stem), strict=True)
            table = [list(rows[0]), *(map(str, row.values()) for row in rows)]
            if config == "cola" and stem != "test":
                table = [("x", str(row["is_acceptable"]), "", row["sentence"]) for row in rows]
            text = "".join("\t".join(line) + "\n" for line in table)
            for case, name in (("upper", folder), ("lower", folder.lower()), ("lower", config)):
                place(tmp_path / case, {f"{name.replace('**', 'AX')}/{stem}.tsv": text})
            kind = pa.int64() if HUB[config] else pa.float32()
            write_parquet(
                tmp_path / f"hub/{config}/{split}-00000-of-00001.parquet", hub, label=kind
            )
    published = rows_of("glue", tmp_path / "upper")
    assert len(published) == sum(map(len, ARCHIVES["glue"].values()))
    assert rows_of("glue", tmp_path / "lower") == published
    assert rows_of("glue", tmp_path / "hub") == published


def test_super_glue_of_parquet_files_is_the_same(tmp_path):
    published = rows_of("super_glue", place(tmp_path / "from", FILES["super_glue"]))
    for (dataset, split), rows in published.items():
        # On the hub, the data sets have a different order of rows and more columns.
        if "record" in dataset:
            rows = [row | {"entities": row["entities"][::-1], "entity_spans": []} for row in rows]
        path = tmp_path / "hub" / dataset.partition("/")[2] / split / "0000.parquet"
        write_parquet(path, rows)
    hub = rows_of("super_glue", tmp_path / "hub")
    assert hub == published
    assert len(hub) == 5


BROKEN = {
    "RTE/train.tsv": (
        "sentence1\tsentence2\tlabel\na\tb\tmaybe\n",
        "line 2: The label 'maybe' is nei",
    ),
    "CoLA/train.tsv": (
        "x\t1\tshort\n",
        "glue/cola:train has no rows in .*train.tsv. Incomplete .* left out: 1",
    ),
    "STS-B/dev.tsv": (
        "sentence1\tsentence2\na\tb\n",
        "dev.tsv has no column 'score'. Only test fi",
    ),
    "STS-B/train.tsv": (
        "sentence1\tsentence2\tscore\na\tb\tnan\n",
        "line 2: The field 'label' is nan, wh",
    ),
    "CoLA/dev.tsv": (
        b"x\t1\t\tsch\xf6n\n",
        r"CoLA/dev.tsv, line 1: the byte 0xf6 is not UTF-8\. .*iconv",
    ),
    "CB/test.jsonl": (
        b'{"premise": "sch\xf6n"}\n',
        "CB/test.jsonl, line 1: the byte 0xf6 is not UTF-8",
    ),
    "CB/train.jsonl": (
        [CB, CB | {"idx": 1, "label": "no"}],
        "train.jsonl, line 2: The label 'no' is",
    ),
    "CB/val.jsonl": (
        '{"x": 1}\n{',
        r"CB/val.jsonl, line 1: There is no field 'premise'\. The fields are x",
    ),
    "COPA/val.jsonl": (
        [COPA | {"premise": None}],
        "COPA/val.jsonl, line 1: The field 'premise' is nu",
    ),
    "COPA/train.jsonl": ([UNLABELED], "COPA/train.jsonl, line 1: There is no field 'label'"),
    "readme.txt": ("", "none of the files of glue: CoLA/train.tsv, .*Nothing was imported"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_named_and_leaves_nothing(tmp_path, name):
    content, said = BROKEN[name]
    source = place(tmp_path / "from", {name: content})
    with pytest.raises(ValueError, match=said) as error:
        import_archive("super_glue" if "json" in name else "glue", source, tmp_path / "out")
    assert str(error.value).endswith("Nothing was imported.")
    assert not list((tmp_path / "out").glob("*"))


PAIR = "wmt14_translate/de-en"
ARTICLE = {"article": "A", "highlights": "B"}
ANSWERED = {"question": "Who?", "context": "Ann.", "answers": {"text": ["Ann"]}}
CHAT = {"persona": ["i ski."], "history": ["hello .", "hi .", "you ?"], "reply": "i ski ."}
DPR = {"sentence": "Al saw Bo.", "pronoun": "he", "candidates": ["Al", "Bo"], "label": 1}
NAMED = {
    "wmt14_ende_v003": (
        "a.en+{}a.de",
        {"a.en": "a\n\u00a0\nc\n", "a.de": "x\ny\nz\n"},
        {},
        [("translate English to German: a", "x"), ("translate English to German: c", "z")],
    ),
    "wmt14_enfr_v003": (
        "a.txt+{}b.txt",
        {"a.txt": "a\n", "b.txt": "b\n"},
        {"columns": ["en", "fr"]},
        [("translate English to French: a", "b")],
    ),
    "wikitext_2_v1_full_lm": (
        "wiki.train.tokens",
        {"wiki.train.tokens": WIKI},
        {},
        [("", text) for (text,) in WIKI_ROWS],
    ),
    "iwslt2017_en_de": (
        "a.tsv",
        {"a.tsv": "b\ta\n"},
        {"columns": ["de", "en"]},
        [("translate English to German: a", "b")],
    ),
    "cnn_dailymail_v002": (
        "a.csv",
        {"a.csv": ",id,article,highlights\n\n0,i,A,B\n"},
        {},
        [("summarize: A", "B")],
    ),
    "squad_v010_allanswers": (
        "a.json",
        {"a.json": [ANSWERED]},
        {},
        [("question: Who ? context: Ann . ", "Ann")],
    ),
    "c4_v220_full_lm": (
        "c4-*.json.gz",
        {"c4-0.json.gz": [{"text": "a", "url": None}]},
        {},
        [("", "a")],
    ),
    "convai2_self_original": (
        "a.json",
        {"a.json": [CHAT]},
        {},
        [("dialogue history: hello . | hi . | you ? persona: i ski.", "i ski .")],
    ),
    "dpr_v001_simple": ("a.json", {"a.json": [DPR]}, {}, [("wsc: Al saw Bo.", "Bo")]),
    "ag_news_v100": (
        "a.csv",
        {"a.csv": '"4","A","B"\n'},
        {"columns": ["label", "title", "description"], "labels": {"4": "Sci/Tech"}},
        [("ag_news title: A description: B", "Sci/Tech")],
    ),
    "imdb_reviews_v100": (
        "a.jsonl",
        {"a.jsonl": [{"text": "bad", "label": 0}]},
        {},
        [("imdb text: bad", "negative")],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_tasks_data_set_is_made_of_files_that_a_user_names(tmp_path, name):
    """A task's data set can be made from files that a user names.

    The files are aligned, have columns, have more fields than are read, or have different labels.
    """
    files, contents, options, expected = NAMED[name]
    at = f"{place(tmp_path / 'from', contents)}/"
    labels = options.pop("labels", {})
    splits = find_splits([f"train={at}{files.format(at)}"], **options)
    task = task_registry.find_task(name)
    (report,) = import_dataset(task.dataset, splits, tmp_path, labels=labels)
    assert report.rows == task.stored_splits(tmp_path)["train"]
    assert report.dropped == (name == "wmt14_ende_v003")
    rows = list(task_contents.read_rows(name, "train", Bytes().build(), data_dir=tmp_path))
    sides = ("inputs_pretokenized", "targets_pretokenized")
    assert [tuple(row.get(side, b"").decode() for side in sides) for row in rows] == expected


def test_files_that_do_not_fit_a_data_set_give_one_sentence(tmp_path):
    unanswered = ANSWERED | {"answers": {"text": ["Ann", "\u00a0"]}}
    place(tmp_path, {"a.json": [ARTICLE], "a.x": "a\n", "a.y": "b\n", "a.csv": "9,A\n"})
    place(tmp_path, {"b.csv": "de,en\na,b\n\u200b,c\n", "b.json": [ANSWERED, unanswered]})
    labeled = {"columns": ["label", "text"]}
    for dataset, argument, options, said in (
        (
            PAIR,
            "dev={}a.json",
            {},
            f"{PAIR} has no split 'dev'. Its splits are train, validation, test",
        ),
        (
            PAIR,
            "train={}a.json",
            {},
            r"a.json, line 1: There is no field '..'\. The fields are article, hi",
        ),
        (
            PAIR,
            "train={}a.x+{}a.y",
            {},
            r"a.x, line 1: There is no field '..'\. The fields are x, y",
        ),
        (
            PAIR,
            "train={}a.x+{}a.y",
            {"columns": ["en"]},
            r"--columns \(1\) differs from the number of aligned files \(2\)",
        ),
        ("convai2/none_original", "train={}a.json", {}, "no field 'persona'"),
        (
            PAIR,
            "train={}b.csv",
            {},
            "b.csv, line 3: The field 'de' has a blank text. Fill it in, or remove",
        ),
        (
            "squad/v1.1",
            "train={}b.json",
            {},
            "b.json, line 2: The field 'text' has a blank text. Fill",
        ),
        (
            "imdb_reviews/plain_text",
            "train={}a.csv",
            labeled,
            "The label '9' is neither a number be",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            splits = find_splits([argument.format(f"{tmp_path}/", f"{tmp_path}/")], **options)
            import_dataset(dataset, splits, tmp_path / "out", labels={})
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())
    write_dataset("squad/v1.1", "3.0.0", {"x": np.int64}, {"train": lambda: [{"x": 1}]}, tmp_path)
    with pytest.raises(ValueError, match=r"3\.0\.0 is another version of the data set, and"):
        import_dataset("squad/v1.1", {}, tmp_path, labels={})


def test_a_second_import_adds_splits_and_renew_replaces(tmp_path, caplog, monkeypatch):
    out = tmp_path / "out"
    rename = pathlib.Path.rename
    place(tmp_path, {"a.txt": "one\ntwo\n"})

    def add(split, **options):
        import_dataset(
            "lm1b", find_splits([f"{split}={tmp_path}/a.txt"]), out, labels={}, **options
        )

    task = task_registry.find_task("lm1b_v100_full_lm")
    add("train")
    add("test")
    assert task.stored_splits(out) == {"train": 2, "test": 2}
    assert len(stored(out, "lm1b", "train")) == 2
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file()}

    def full_disk(old, new):
        if new == out / "lm1b/1.0.0" and "replaced" not in old.name:
            raise OSError("disk full")
        return rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", full_disk)
        with pytest.raises(OSError, match="disk full"):
            add("test", renew=True)
    with pytest.raises(ValueError, match=r"has the split 'test' already\. .*replace .* --renew"):
        add("test")
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    add("test", renew=True)
    assert task.stored_splits(out) == {"test": 2}
    assert "The split 'train' of " in caplog.text and "is removed." in caplog.text


def test_every_data_set_has_a_task(tmp_path):
    for dataset, layouts in (pair for archive in ARCHIVES.values() for pair in archive.items()):
        splits = {s for task in DEFINITIONS if task.dataset == dataset for s in task.splits}
        assert layouts.keys() <= splits
    with pytest.raises(
        ValueError, match=r"is not a directory\. Give the directory that holds the files of gl"
    ):
        import_archive("glue", tmp_path / "nowhere", tmp_path / "out")
