"""Users' files become tasks: every format, every report, every error."""

import csv
import datetime
import gzip
import json
import os
import resource
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli.main import app
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.files import storage_path
from synthesizer_jax.tasks import imported, task_registry
from synthesizer_jax.tasks.imported import FileTask, Template, add_imported, import_files
from synthesizer_jax.tasks.importers import (
    IMPORTERS,
    corpora,
    import_benchmark,
    import_corpus,
    reading,
)
from synthesizer_jax.tasks.importers.files import find_splits
from synthesizer_jax.tasks.preparation import SplitRequest, is_current
from synthesizer_jax.tasks.prepare import prepare
from synthesizer_jax.tasks.streams import open_stream
from tests.data.small import multi30k
from tests.tasks.loading import BYTES, load, quiet

ROWS = [{"text": "a fine, small film", "label": "1"}, {"text": "tab-free « dull »", "label": "0"}]
JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CSV = 'text,label\r\n"a fine, small film",1\r\n"tab-free « dull »",0\r\n'.encode()
TSV = "text\tlabel\na fine, small film\t1\ntab-free « dull »\t0\n".encode()


@pytest.fixture(autouse=True)
def no_tasks_are_left(monkeypatch):
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def rows(*sources, **options):
    """The rows of every split that arguments name."""
    found = find_splits([str(s) for s in sources], **options)
    return {split: [row for _, row in part] for split, part in found.items()}


FILES = {
    "json lines": ("a.jsonl", JSON_LINES),
    "blank lines": ("a.json", JSON_LINES.replace(b"\n", b"\n\n")),
    "byte-order mark": ("a.jsonl", b"\xef\xbb\xbf" + JSON_LINES),
    "csv": ("a.csv", CSV),
    "csv without an end": ("a.csv", CSV.rstrip()),
    "tsv": ("a.tsv", TSV),
    "gzip": ("a.csv.gz", gzip.compress(CSV)),
    "zstd": ("a.jsonl.zst", zstd(JSON_LINES)),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_every_format_is_read(tmp_path, case):
    name, data = FILES[case]
    (tmp_path / name).write_bytes(data)
    assert rows(f"train={tmp_path / name}") == {"train": ROWS}


def test_tables_of_arrow_are_read(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=1)
    assert rows(f"test={tmp_path / 'a.parquet'}") == {"test": ROWS}


def test_long_fields_are_read_and_the_limit_of_others_stays(tmp_path):
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("text\n" + "x" * (limit + 1) + "\n")
    assert rows(f"train={tmp_path}/a.csv") == {"train": [{"text": "x" * (limit + 1)}]}
    assert csv.field_size_limit() == limit


def test_columns_without_a_header_are_named(tmp_path):
    (tmp_path / "a.csv").write_bytes(CSV.partition(b"\n")[2])
    assert rows(f"train={tmp_path / 'a.csv'}", columns=["text", "label"]) == {"train": ROWS}


def test_text_is_a_row_per_line_and_aligned_text_a_field_per_file(tmp_path):
    for name, text in (("a.txt", "one\n\ntwo\n"), ("a.en", "one\ntwo\n"), ("a.de", "eins\nzwei")):
        (tmp_path / name).write_text(text)
    assert rows(f"train={tmp_path}/a.txt,validation={tmp_path}/a.en+{tmp_path}/a.de") == {
        "train": [{"text": "one"}, {"text": "two"}],
        "validation": [{"en": "one", "de": "eins"}, {"en": "two", "de": "zwei"}],
    }


def test_a_folder_is_read_by_the_names_of_its_files(tmp_path):
    (tmp_path / "train-00000.jsonl").write_bytes(JSON_LINES)
    (tmp_path / "train-00001.jsonl").write_bytes(JSON_LINES)
    (tmp_path / "dev.csv").write_bytes(CSV)
    (tmp_path / "README.md").write_text("not data")
    assert rows(tmp_path) == {"train": ROWS + ROWS, "validation": ROWS}


def save_to_disk(folder, splits):
    """Writes a folder as `datasets` does, with a feature of classes."""
    folder.mkdir(exist_ok=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, table in splits.items():
        (folder / split).mkdir()
        info = {"features": {"label": {"names": ["bad", "good"], "_type": "ClassLabel"}}}
        (folder / split / "dataset_info.json").write_text(json.dumps(info))
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (folder / split / "state.json").write_text(json.dumps(state))
        with (
            pa.OSFile(str(folder / split / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as writer,
        ):
            writer.write_table(table)


def test_a_saved_folder_of_datasets_has_the_names_of_its_classes(tmp_path):
    table = pa.table({"text": ["x", "y", "z"], "label": [1, 0, -1]})
    save_to_disk(tmp_path, {"train": table, "test": table.slice(2)})
    expected = [
        {"text": t, "label": w} for t, w in zip("xyz", ("good", "bad", "<unk>"), strict=True)
    ]
    assert rows(tmp_path) == {"train": expected, "test": expected[2:]}
    assert rows(tmp_path / "test") == {"test": expected[2:]}
    state = {"_data_files": [{"filename": "../../etc.arrow"}]}
    (tmp_path / "test" / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=r"names the file '\.\./\.\./etc\.arrow', outside of it"):
        rows(tmp_path)


BROKEN = {
    "not JSON": ("a.jsonl", b'{"text": 1}\n{"text": \n', r"a.jsonl, line 2: not JSON \(.*column"),
    "no object": ("a.jsonl", b"[1]\n", "a.jsonl, line 1: a JSON object was expected, not list"),
    "columns": ("a.csv", b"x,y\n1,2\n1\n", r"a.csv, line 3: 1 columns instead of 2 \(x, y\)"),
    "quote": ("a.csv", b'x,y\n"1,2\n', r"a.csv, line 2: not CSV \(unexpected end of data\)"),
    "same name": ("a.tsv", b"x\tx\n1\t2\n", "every column needs a name of its own"),
    "gzip": ("a.csv.gz", gzip.compress(CSV * 99)[:-20], "damaged gzip stream"),
    "no gzip": ("a.csv.gz", CSV, "a.csv.gz, line 1: damaged gzip stream"),
    "zstd": ("a.csv.zst", zstd(CSV * 99)[:-9], "damaged zstd stream"),
    "parquet": ("a.parquet", b"PAR1" * 9, "a.parquet, the whole file: not Parquet"),
    "compressed twice": ("a.parquet.gz", b"", r"\.parquet files are compressed inside"),
    "swollen gzip": (
        "a.txt.gz",
        gzip.compress(b"a\n" * 9**5),
        "txt.gz, line .*: .* text 200 times as long as the file",
    ),
    "long line": (
        "a.txt.zst",
        zstd(b"a" * 2000),
        "zst, line 1: a line of more than 1,000 bytes",
    ),
    "suffix": ("a.xlsx", b"", r"\.xlsx is not known; files end in \.jsonl"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_sentence(tmp_path, case, monkeypatch):
    monkeypatch.setattr(reading, "LONGEST_LINE", 1000)
    name, data, message = BROKEN[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        rows(f"train={tmp_path / name}")


def test_arguments_that_name_no_rows_are_refused(tmp_path):
    (tmp_path / "a.en").write_text("one\ntwo\n")
    (tmp_path / "a.de").write_text("eins\n")
    (tmp_path / "a.txt").write_text("one\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "a.en").write_text("one\n")
    for argument, message in {
        f"train={tmp_path}/a.en+{tmp_path}/a.de": "line 2: the file ends here, the others go on",
        f"train={tmp_path}/a.en+{tmp_path}/b/a.en": "cannot be told apart",
        f"{tmp_path}": "no file whose name begins with train, validation or test",
        f"{tmp_path}/a.en": "is no folder; write --from SPLIT=FILE",
        "train=": r"write SPLIT=FILE, such as train=a\.jsonl",
        f"train={tmp_path}/a.txt,train={tmp_path}/a.txt": "a.txt twice for the split 'train'",
    }.items():
        with pytest.raises(ValueError, match=message):
            rows(argument)
    with pytest.raises(FileNotFoundError, match="there is no file"):
        rows(f"train={tmp_path}/c.csv")


def test_a_template_formats_a_row():
    row = {"text": "x", "n": 3, "deep": {"a": True}, "deep.b": "dotted"}
    assert Template("{{{text}}} {n} {deep.a} {deep.b}")(row) == "{x} 3 True dotted"
    for text, message in {
        "{": "cannot be read",
        "{}": "a field without a name",
        "{n:>9}": "with a format",
        "{n!r}": "with a format",
    }.items():
        with pytest.raises(ValueError, match=message):
            Template(text)
    for text, message in {
        "{txt}": r"there is no field 'txt', did you mean 'text'\?; there are text, n",
        "{deep}": r"the field 'deep' is \{\"a\": true\}, which is no text",
        "{text.__class__}": "there is no field 'text.__class__': what '__class__' would be in is no",
    }.items():
        with pytest.raises(ValueError, match=message):
            Template(text)(row)


def describe(**options):
    given = {"inputs": Template("review: {text}"), "targets": Template("{label}")}
    return FileTask("my_reviews", **{**given, "labels": {"0": "bad", "1": "good"}, **options})


def test_a_task_is_written_with_a_report_and_known_again(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES + JSON_LINES)
    (tmp_path / "b.csv").write_bytes(CSV + b"broken \xff byte,1\r\n")
    splits = find_splits([f"train={tmp_path}/a.jsonl,validation={tmp_path}/b.csv"])
    found = import_files(describe(metrics=("accuracy", "f1")), splits, tmp_path / "data")
    assert [line for summary in found for line in summary.lines()] == [
        "train: 4 rows",
        f"  longest inputs: 5 words ({tmp_path}/a.jsonl, line 1)",
        f"  longest targets: 1 word ({tmp_path}/a.jsonl, line 1)",
        "  targets: good 2, bad 2",
        "  repeats of earlier rows: 2",
        "validation: 3 rows",
        f"  longest inputs: 5 words ({tmp_path}/b.csv, line 2)",
        f"  longest targets: 1 word ({tmp_path}/b.csv, line 2)",
        "  targets: good 2, bad 1",
        "  also in train: 2 rows",
        "  not UTF-8, with bytes replaced by U+FFFD: 1 line",
    ]
    monkeypatch.delitem(task_registry.TASKS, "my_reviews")  # as in another process
    assert add_imported(tmp_path / "data") == ["my_reviews"]
    examples = load("my_reviews", "validation", tmp_path / "data")
    assert examples.label_words == ("bad", "good")
    assert examples.target_words == ["good", "bad", "good"]
    assert examples.record(2, "bad")["input"] == "review: broken � byte"
    assert examples.score(["good", "bad", "bad"]) == {
        "accuracy": pytest.approx(200 / 3),
        "f1": pytest.approx(200 / 3),
    }


def test_a_split_of_several_files(tmp_path):
    for name, text in {"part-1": "c\n", "part-0": "a\nb\n", "more": "d\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [f"train={tmp_path}/part-*.txt,train={tmp_path}/more.txt"]
    assert [row["text"] for row in rows(*sources)["train"]] == list("abcd")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*other-\*\.txt"):
        find_splits([f"train={tmp_path}/other-*.txt"])
    with pytest.raises(ValueError, match="aligned files of 'train' cannot be joined"):
        find_splits([f"train=a.txt,train={tmp_path}/a.en+{tmp_path}/a.de"])


def test_rows_that_will_be_truncated_are_counted(tmp_path):
    """With the vocabulary of bytes, one more for EOS."""
    (tmp_path / "a.txt").write_text("x" * 511 + "\n" + "y" * 512 + "\n" + "z z " * 300 + "\n")
    task = FileTask("my_texts", lambda row: row["text"], lambda row: row["text"][:3])
    for vocabulary, count in (
        (None, "at least 1 (33.3%)"),
        (Bytes().build(), "2 (66.7%)"),
    ):
        splits = find_splits([f"train={tmp_path}/a.txt"])
        (found,) = import_files(task, splits, tmp_path, vocabulary=vocabulary, renew=True)
        assert f"  inputs truncated to rows of 512 tokens: {count}" in list(found.lines())
        assert not found.truncated["targets"]


def test_python_functions_make_the_texts(tmp_path):
    (tmp_path / "a.tsv").write_bytes(TSV)
    task = FileTask(
        "my_lengths",
        inputs=lambda row: row["text"].upper(),
        targets=lambda row: str(len(row["text"])),
        metrics=("pearson",),
    )
    import_files(task, find_splits([f"validation={tmp_path / 'a.tsv'}"]), tmp_path)
    examples = load("my_lengths", "validation", tmp_path)
    assert examples.target_words == ["18", "17"]
    assert examples.score(["2", "1"]) == {"pearson_corrcoef": pytest.approx(100)}


def test_a_task_that_is_imported_again_has_its_new_rows(tmp_path):
    config = DataConfig("my_reviews", 32, 8, batch_size=1, shards=1, shuffle=False)
    for row in ROWS:
        (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * (int(row["label"]) + 1))
        import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path, renew=True)
        assert task_registry.find_task("my_reviews").stored_splits(tmp_path) == {
            "train": int(row["label"]) + 1
        }
        prepare("my_reviews", PreparedTasks(tmp_path, BYTES), log=quiet)
        batch = next(open_stream(config, Bytes().build(), data_dir=tmp_path))
        text = Bytes().build().decode(batch["encoder_input_tokens"][0])
        assert text == f"review: {row['text']}"


def test_processes_that_prepare_know_imported_tasks(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path)
    options = ["--data-dir", str(tmp_path), "--epochs", "2", "--workers", "2"]
    result = CliRunner().invoke(app, ["data", "prepare", "my_reviews", *options])
    assert "my_reviews, train: 4 examples" in result.output, result.exception


def test_other_rows_of_equal_size_make_a_prepared_set_outdated(tmp_path):
    request = SplitRequest("my_reviews", "train", rows=False)
    prepared = PreparedTasks(tmp_path, BYTES)
    for text in ("one", "two"):
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": text, "label": "1"}) + "\n")
        import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path, renew=True)
        assert not is_current(request, prepared, lengths=None)
        prepare("my_reviews", prepared, log=quiet)
        assert is_current(request, prepared, lengths=None)
        (inputs, _) = prepared.open("my_reviews", "train", None)[0]
        assert BYTES.decode(inputs) == f"review: {text}"


def test_splits_are_added_to_a_task_of_the_same_definition(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    train, test = (find_splits([f"{split}={tmp_path}/a.jsonl"]) for split in ("train", "test"))
    import_files(describe(), train, tmp_path)
    import_files(describe(), test, tmp_path)
    assert task_registry.find_task("my_reviews").stored_splits(tmp_path) == {"test": 2, "train": 2}
    assert task_registry.TASKS["my_reviews"].splits == ("test", "train")
    with pytest.raises(
        ValueError, match=r"was imported with another task.json; replace .* --renew"
    ):
        import_files(describe(metrics=("f1",)), find_splits([f"b={tmp_path}/a.jsonl"]), tmp_path)


def test_nothing_is_written_where_a_row_is_broken(tmp_path):
    data_dir = tmp_path / "data"
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), data_dir)
    before = {p: p.read_bytes() for p in data_dir.rglob("*") if p.is_file()}
    (tmp_path / "b.jsonl").write_bytes(JSON_LINES + b'{"text": "x", "label": "7"}\n')
    (tmp_path / "c.jsonl").write_bytes(JSON_LINES + b'{"text": null, "label": "1"}\n')
    (tmp_path / "d.jsonl").write_bytes(b"")
    for name, message in {
        "b": "b.jsonl, line 3: the target '7' is none of the labels 0, 1; nothing was imported",
        "c": "c.jsonl, line 3: the field 'text' is null, which is no text; nothing was imported",
        "d": "d.jsonl: the split 'train' has no rows; nothing was imported",
    }.items():
        with pytest.raises(ValueError, match=message):
            import_files(describe(), find_splits([f"train={tmp_path}/{name}.jsonl"]), data_dir)
        assert {p: p.read_bytes() for p in data_dir.rglob("*") if p.is_file()} == before


def test_a_description_that_cannot_be_is_refused():
    for options, message in {
        (("name", "My-Task"),): "has other characters than a-z, 0-9 and _",
        (("metrics", ("acuracy",)),): r"no metric 'acuracy', did you mean 'accuracy'\?",
        (("metrics", ("f1",)), ("labels", ())): "'f1' compares two labels; with no labels",
        (("metrics", ("f1",)), ("labels", zip("abc", "abc", strict=True))): "with 3 labels",
        (
            ("metrics", ("rouge",)),
        ): "'rouge' compares texts; with 1 label and .* answers are labels",
        (
            ("labels", (("bad", ""),)),
        ): "the label 'bad' has the word '', which marks hidden targets",
        (("metrics", ("pearson", "bleu")),): "'bleu' compares texts; .* answers are numbers",
    }.items():
        given = dict(options)
        with pytest.raises(ValueError, match=message):
            FileTask(
                given.get("name", "mine"),
                None,
                str,
                metrics=given.get("metrics", ("accuracy",)),
                labels=dict(given.get("labels", {"a": "a"})),
            )


WORD = r"a.jsonl, line 1: the target 'good' is no number, which the metric pearson compares"


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        ('{"x": 1e400}', {}, "a.jsonl, line 1: the field 'x' is Infinity, which is no text"),
        ('{"x": "good"}', {"metrics": ("pearson",)}, WORD),
        ('{"x": "1"}', {"metrics": ("pearson",), "labels": {"1": "good"}}, WORD),
        ('{"x": 1' + 400 * "0" + "}", {"metrics": ("pearson",)}, "is no number, which the metric"),
        ("", {}, "a.jsonl: the split 'train' has no rows; nothing was imported"),
    ],
)
def test_a_row_that_is_no_text_number_or_row_is_named(tmp_path, row, changes, said):
    (tmp_path / "a.jsonl").write_text(row + "\n")
    task = FileTask("my_rows", inputs=None, targets=Template("{x}"), **changes)
    with pytest.raises(ValueError, match=said):
        import_files(task, find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path / "data")


def test_a_date_that_python_has_not_names_the_file(tmp_path):
    days = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    pq.write_table(pa.table({"day": days}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"a.parquet, the whole file: not Parquet \(days=2147483647"
    ):
        rows(f"train={tmp_path}/a.parquet")


def test_a_name_of_the_package_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    task = FileTask("glue_cola_v002", None, Template("{text}"))
    with pytest.raises(ValueError, match="'glue_cola_v002' is that of a task of this package"):
        import_files(task, find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path)


def test_a_damaged_definition_is_one_sentence(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(JSON_LINES)
    import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path)
    path = tmp_path / imported.FOLDER / "my_reviews" / imported.VERSION / imported.DEFINITION
    good = json.loads(path.read_text())
    for data in ("{", "[]", "{}", json.dumps({**good, "metrics": ["x"]}),
                 json.dumps({**good, "name": "other"})):  # fmt: skip
        path.write_text(data)
        with pytest.raises(ValueError, match=r"task\.json is damaged \(.*import the task again"):
            add_imported(tmp_path)


def test_splits_that_would_be_one_are_refused(tmp_path):
    table = pa.table({"text": ["x"]})
    save_to_disk(tmp_path, {"validation_matched": table, "validation_mismatched": table})
    assert set(rows(tmp_path)) == {"validation_matched", "validation_mismatched"}
    save_to_disk(tmp_path / "two", {"dev": table, "validation": table})
    with pytest.raises(ValueError, match="two splits that are 'validation' here"):
        rows(tmp_path / "two")


@pytest.mark.parametrize("listed", [5, [5], [{"filename": 5}], None])
def test_a_damaged_list_of_files_is_one_sentence(tmp_path, listed):
    save_to_disk(tmp_path, {"train": pa.table({"text": ["x"]})})
    (tmp_path / "train" / "state.json").write_text(json.dumps({"_data_files": listed}))
    with pytest.raises(ValueError, match=r"state\.json (has no list of names|names the file)"):
        rows(tmp_path)


def test_values_of_arrow_are_those_of_json(tmp_path):
    when = datetime.date(2020, 1, 2)
    table = pa.table({"a": [b"\xc3\xa9"], "b": [when], "c": [float("nan")], "d": [[b"x"]]})
    pq.write_table(table, tmp_path / "a.parquet")
    ((row,),) = rows(f"train={tmp_path}/a.parquet").values()
    assert (row["a"], row["b"], row["d"]) == ("é", "2020-01-02", ["x"])
    with pytest.raises(ValueError, match="the field 'c' is NaN, which is no text"):
        Template("{c}")(row)


def test_files_joined_by_plus_are_aligned_whatever_their_names(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("eins\nzwei\n")
    assert rows(f"train={tmp_path}/a.txt+{tmp_path}/b.txt") == {
        "train": [{"a": "one", "b": "eins"}, {"a": "two", "b": "zwei"}]
    }


COLA = "".join(f"gj04\t{i % 2}\t\tSentence number {i} is rather long.\n" for i in range(4000))


@pytest.mark.parametrize("limit", [20_000, 250_000], ids=["in our copy", "in TFDS's files"])
def test_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path, limit):
    (tmp_path / "files" / "CoLA").mkdir(parents=True)
    (tmp_path / "files" / "CoLA" / "subset_train.tsv").write_text(COLA)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            import_benchmark("glue", tmp_path / "files", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "out").iterdir()) == []


TERMINATED = """
import os, signal
from synthesizer_jax.cli.main import run
from synthesizer_jax.tasks import imported

imported.write_dataset = lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM)
run()
"""


def test_sigterm_removes_what_is_half_written_as_ctrl_c_does(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    arguments = ["data", "import", "mine", "--name", "x", "--target", "{text}", "--data-dir", "out"]
    command = [sys.executable, "-c", TERMINATED, *arguments, "--from", "train=a.txt"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert ended.returncode > 0, ended.stderr
    assert not list((tmp_path / "out").iterdir())


def test_what_is_no_regular_file_is_refused(tmp_path):
    (tmp_path / "glue/RTE").mkdir(parents=True)
    os.mkfifo(tmp_path / "glue/RTE/train.tsv")
    with pytest.raises(ValueError, match=r"RTE/train\.tsv is no regular file"):
        import_benchmark("glue", tmp_path, tmp_path / "out")
    os.mkfifo(tmp_path / "train.en")
    for name in ("train.de", "val.en", "val.de", "test_2016_flickr.en", "test_2016_flickr.de"):
        (tmp_path / name).write_text("a\n")
    with pytest.raises(ValueError, match=r"train\.en is no regular file"):
        import_corpus("multi30k", tmp_path, tmp_path / "out")


def test_an_empty_line_of_one_language_is_named(tmp_path, monkeypatch):
    sizes = dict.fromkeys(("train", "validation", "test"), 3)
    monkeypatch.setattr(corpora, "CORPORA", {"multi30k": multi30k(sizes)[:1]})
    for stem in ("train", "val", "test_2016_flickr"):
        (tmp_path / f"{stem}.en").write_text("a\nb\nc\n")
        (tmp_path / f"{stem}.de").write_text("a\n \nc\n" if stem == "val" else "a\nb\nc\n")
    with pytest.raises(ValueError, match=r"val\.de, line 2: an empty line.* nothing was imported"):
        import_corpus("multi30k", tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_bucket_is_refused():
    with pytest.raises(
        ValueError, match=r"not written to a bucket \(gs://bucket/y\); write them to"
    ):
        import_files(describe(), {}, storage_path("gs://bucket/y"))


def test_the_command_names_all_that_can_be_imported(tmp_path):
    result = CliRunner().invoke(app, ["data", "import", "gleu", "--from", str(tmp_path)])
    said = str(result.exception)
    assert said.startswith("'gleu' cannot be imported, did you mean 'glue'?; choose one of ")
    assert all(name in said for name in IMPORTERS)
    assert {"glue", "super_glue", "multi30k", "squad"} <= set(IMPORTERS)
