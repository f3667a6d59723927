"""Tests that users' files become tasks.

The tests cover every file format, the report, and every error.
"""

import bz2
import csv
import dataclasses
import datetime
import gzip
import json
import lzma
import os
import resource
import shlex

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from synthesizer_jax.base.files import storage_path
from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece
from synthesizer_jax.evaluation.config import Evaluation
from synthesizer_jax.preparation.experiment import prepare_data
from synthesizer_jax.preparation.file_tasks import FileTask, Template, import_files
from synthesizer_jax.preparation.importers.corpora import report_lines
from synthesizer_jax.preparation.importers.files import find_splits
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.postprocessors import UNKNOWN
from synthesizer_jax.tasks.splits import SplitRequest, is_current, open_stream
from synthesizer_jax.tasks.task import Task
from synthesizer_jax.training.run import find_prepared, run
from tests.cli.commands import call, invoke
from tests.environment import python
from tests.evaluation import runs
from tests.tasks.loading import BYTES, load, quiet

ROWS = [{"text": "a fine, small film", "label": "1"}, {"text": "tab-free « dull »", "label": "0"}]
JSON_LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
CSV = 'text,label\r\n"a fine, small film",1\r\n"tab-free « dull »",0\r\n'.encode()
TSV = "text\tlabel\na fine, small film\t1\ntab-free « dull »\t0\n".encode()
LONG = "x" * (csv.field_size_limit() + 1)


@pytest.fixture(autouse=True)
def no_tasks_are_left(monkeypatch):
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))


def zstd(data):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


def parquet(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(rows if isinstance(rows, pa.Table) else pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def write(folder, files):
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def rows(*sources, **options):
    """Returns the rows of all splits in the given source files."""
    found = find_splits([str(s) for s in sources], **options)
    return {split: [row for _, row in part.rows()] for split, part in found.items()}


FILES = {
    "json lines": ("a.jsonl", JSON_LINES),
    "blank lines": ("a.json", JSON_LINES.replace(b"\n", b"\n\n")),
    "byte-order mark": ("a.jsonl", b"\xef\xbb\xbf" + JSON_LINES),
    "byte-order marks": (
        "a.jsonl",
        b"".join(b"\xef\xbb\xbf" + x for x in JSON_LINES.splitlines(True)),
    ),
    "csv": ("a.csv", CSV),
    "csv without an end": ("a.csv", CSV.rstrip()),
    "tsv": ("a.tsv", TSV),
    "gzip": ("a.csv.gz", gzip.compress(CSV)),
    "zstd": ("a.jsonl.zst", zstd(JSON_LINES)),
    "parquet": ("a.parquet", parquet(ROWS)),
    "blank first line": ("a.csv", b"\r\n" + CSV),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_of_every_format_is_read(tmp_path, case):
    name, data = FILES[case]
    write(tmp_path, {name: data})
    assert rows(f"train={tmp_path / name}") == {"train": ROWS}


def test_arguments_name_files_folders_and_columns(tmp_path):
    write(
        tmp_path,
        {
            "long.csv": f"text\n{LONG}\n",
            "bare.csv": CSV.partition(b"\n")[2],
            "a.txt": "one\n\ntwo\n",
            "a.en": "one\ntwo\n",
            "a.de": "eins\nzwei",
            "b.txt": "eins\nzwei\n",
            "part-1.txt": "c\n",
            "part-0.txt": "a\nb\n",
            "more.txt": "d\n",
            "f/train-0.jsonl": JSON_LINES,
            "f/train-1.jsonl": JSON_LINES,
            "f/dev.csv": CSV,
            "f/README.md": "",
        },
    )
    lines = [{"text": text} for text in ("one", "two")]
    pairs = [{"en": "one", "de": "eins"}, {"en": "two", "de": "zwei"}]
    at = f"{tmp_path}/"
    assert rows(f"train={at}long.csv") == {"train": [{"text": LONG}]}
    assert rows(f"train={at}bare.csv", columns=["text", "label"]) == {"train": ROWS}
    assert rows(f"train={at}a.txt,dev={at}a.en+{at}a.de") == {"train": lines, "dev": pairs}
    aligned = rows(f"train={at}more.txt+{at}part-1.txt")
    assert aligned == {"train": [{"more": "d", "part-1": "c"}]}
    many = rows(f"train={at}part-*.txt,train={at}more.txt")["train"]
    assert [row["text"] for row in many] == list("abcd")
    assert rows(tmp_path / "f") == {"train": ROWS + ROWS, "validation": ROWS}


def test_a_line_ends_only_at_a_newline(tmp_path):
    """Only a newline ends a line. Other line separators are part of the text.

    A carriage return before a newline does not belong to the line.
    """
    odd = "a\rb\u2028c\x85d\x0be\x1c"
    write(
        tmp_path,
        {
            "a.en": f"{odd}\r\ntwo\n",
            "a.de": "eins\nzwei\rdrei",
            "a.tsv": f"x\ty\n{odd}\t1\n",
            "a.csv": f'x,y\r\n"{odd}",1\r\n"a\r\nb",2\r\n',
        },
    )
    at = f"{tmp_path}/"
    pairs = [{"en": odd, "de": "eins"}, {"en": "two", "de": "zwei\rdrei"}]
    assert rows(f"train={at}a.en+{at}a.de") == {"train": pairs}
    assert rows(f"train={at}a.tsv") == {"train": [{"x": odd, "y": "1"}]}
    quoted = [{"x": odd, "y": "1"}, {"x": "a\nb", "y": "2"}]
    assert rows(f"train={at}a.csv") == {"train": quoted}


@pytest.mark.parametrize("header", ["text,label", "label,text", ' Text,"LABEL"'])
def test_columns_are_refused_if_the_file_has_a_header(tmp_path, header):
    """The option `--columns` is refused if the file has a header, which would become a row.

    If the first line does not contain names of columns, it is a row.
    """
    _, _, lines = CSV.partition(b"\n")
    write(tmp_path, {"a.csv": header.encode() + b"\n" + lines, "b.csv": lines + b"label,text\n"})
    source = f"train={tmp_path}/a.csv"
    names = ["text", "label"]
    with pytest.raises(
        ValueError, match=r"a\.csv, line 1: The line is a header with .* Leave --columns out"
    ):
        rows(source, columns=names)
    assert len(rows(source, columns=["a", "b"])["train"]) == 3
    with pytest.raises(
        ValueError, match=r"b\.csv, line 3: The line repeats the header\. .* with --columns"
    ):
        rows(f"train={tmp_path}/b.csv", columns=names)


def test_lines_like_a_header_and_quoted_lines_are_rows(tmp_path):
    write(
        tmp_path,
        {"a.tsv": 'x\ty\nx\tx\n"a"\t""\n""b""\t"c\n', "b.csv": "x\nx;y\n", "c.txt": "a;b\n"},
    )
    cells = [("x", "x"), ('"a"', '""'), ('""b""', '"c')]
    assert rows(f"train={tmp_path}/a.tsv") == {
        "train": [dict(zip("xy", c, strict=True)) for c in cells]
    }
    assert rows(f"train={tmp_path}/b.csv") == {"train": [{"x": "x;y"}]}
    (tmp_path / "b.csv").write_text("a;b\n")
    assert rows(f"train={tmp_path}/b.csv", columns=["x"]) == {"train": [{"x": "a;b"}]}
    assert rows(f"train={tmp_path}/c.txt") == {"train": [{"text": "a;b"}]}


def test_parquet_values_are_what_was_written(tmp_path):
    numbers = pa.table({"x": pa.array([0.1, None, 16777216, 3.4e38], pa.float32())})
    write(tmp_path, {"a.parquet": parquet(numbers)})
    found = rows(f"train={tmp_path}/a.parquet")["train"]
    assert [row["x"] for row in found] == [0.1, None, 16777216.0, 3.4e38]


DAY = pa.table({"day": pa.array([2**31 - 1], pa.int32()).cast(pa.date32())})
NOW = pa.table({"time": pa.array([1], pa.timestamp("ns"))})
LATIN = pa.table({"x": pa.Array.from_buffers(pa.string(), 1, pa.array([b"sch\xf6n"]).buffers())})
TWICE = pa.Table.from_arrays([pa.array([1])] * 5, ["a", "b", "c", "b", "a"])
BROKEN = {
    "not JSON": (
        "a.jsonl",
        b'{"text": 1}\n{"text": \n',
        r"a.jsonl, line 2: The line is not JSON \(.* in column 10\)\. .*jq -c \. FILE",
    ),
    "no object": (
        "a.jsonl",
        b"1\n",
        "a.jsonl, line 1: The line must be a JSON object, but it holds a value of the Python",
    ),
    "columns": (
        "a.csv",
        b"x,y\n1,2\n1\n",
        r"a.csv, line 3: The row has 1 columns instead of 2 \(x, y\)",
    ),
    "quote": (
        "a.csv",
        b'x,y\n"1,2\n',
        "after .*a.csv, line 1: A quoted cell is not closed. Close its quotes",
    ),
    "text after a quote": (
        "a.csv",
        b'x,y\n"1"2,3\n',
        "Text follows the closing quote of a cell. Double the",
    ),
    "same name": ("a.tsv", b"x\tx\n1\t2\n", "a.tsv, line 1: Several columns have the name 'x'"),
    "gzip": (
        "a.csv.gz",
        gzip.compress(CSV * 99)[:-20],
        r"a.csv.gz, after line \d+: .*[Tt]runcated",
    ),
    "no gzip": ("a.csv.gz", CSV, "a.csv.gz, after line 0: zlib inflate failed"),
    "zstd": ("a.csv.zst", zstd(CSV * 99)[:-9], "a.csv.zst, after line"),
    "parquet": (
        "a.parquet",
        b"PAR1" * 9,
        "a.parquet, after row 0: The file cannot be read as Parquet",
    ),
    "a day that Python has not": (
        "a.parquet",
        parquet(DAY),
        r"The column 'day' cannot be read \(.*days=2147.*\)\. Write it as text",
    ),
    "nanoseconds": (
        "a.parquet",
        parquet(NOW),
        r"The column 'time' cannot be read \(.*Nanosec.*\)\. Write it as text",
    ),
    "a column twice": (
        "a.parquet",
        parquet(TWICE),
        "Several columns have the name 'a' or 'b'. Give every",
    ),
    "array": (
        "a.json",
        b'[\n{"text": 1}\n]',
        r"line 1: The line begins a JSON array, .*jq -c '.\[\]' FILE",
    ),
    "semicolons": (
        "a.csv",
        b"x;y\n1;2\n",
        "'x;y' has only one column. Columns are separated by commas in .csv",
    ),
    "tabs": (
        "a.csv",
        b"x\ty\n1\t2\n",
        r"'x\\ty' has only one column.* by tabs in \.tsv files",
    ),
    "commas": (
        "a.tsv",
        b"x,y\n1,2\n",
        r"'x,y' has only one column.* by tabs in \.tsv files",
    ),
    "Excel's separator": (
        "a.csv",
        b"sep=;\nx;y\n1;2\n",
        "'sep=;' is a note that Excel adds, not a row. Remove",
    ),
    "Excel's comma": (
        "a.csv",
        b"sep=,\nx,y\n1,2\n",
        "'sep=' is a note that Excel adds, not a row. Remove",
    ),
    "UTF-16": (
        "a.txt",
        "Größe".encode("utf-16"),
        r"a.txt is UTF-16. .*\(iconv -f utf-16 -t utf-8 .*a.txt >",
    ),
    "UTF-16 without its mark": (
        "a.csv",
        "x,y\n".encode("utf-16-le"),
        "line 1: The line contains a NUL character, so",
    ),
    "a bare CR": (
        "a.csv",
        b"x,y\ra,b\r",
        r"a.csv: A carriage return .* outside of quotes\. .*\(tr '\\r' '\\n' < FILE > NEW\)",
    ),
    "gzip without its name": (
        "a.csv",
        gzip.compress(CSV),
        "a.csv is compressed with gzip. Rename .*a.csv.gz",
    ),
    "zstd without its name": (
        "a.txt",
        zstd(CSV),
        "a.txt is compressed with zstd. Rename it to .*a.txt.zst",
    ),
    "bzip2": ("a.csv", bz2.compress(CSV), "a.csv is compressed with bzip2. Unpack it with bunzip2"),
    "xz": ("a.csv", lzma.compress(CSV), "a.csv is compressed with xz. Unpack it with unxz"),
    "xlsx": (
        "a.csv",
        b"PK\x03\x04\x14\x00",
        "a.csv is a spreadsheet or .* Save the spreadsheet as 'CSV UTF-8', or",
    ),
    "xls": (
        "a.tsv",
        b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
        "a.tsv is a spreadsheet or an archive. Save",
    ),
    "Parquet without its name": (
        "a.csv",
        parquet(ROWS),
        "a.csv is a Parquet file. Rename it to .*a.csv.parquet",
    ),
    "Git LFS": (
        "a.txt",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "a.txt is a pointer of Git LFS. Fetch the file with git lfs pull",
    ),
    "a cell quoted in TSV": (
        "a.tsv",
        b'x\ty\n1\t"a ""b"""\n',
        "line 2: The cell .* is quoted as in CSV, but",
    ),
    "a header in the middle": (
        "a.csv",
        CSV + CSV,
        "a.csv, line 4: The line repeats the header. Remove it, or",
    ),
    "a header of a file that was joined": (
        "a.csv",
        CSV + b"\xef\xbb\xbf" + CSV,
        "a.csv, line 4: The line repeats the header. Remove it, or",
    ),
    "a header of TSV": (
        "a.tsv",
        TSV + b"Text\tLabel\n",
        "a.tsv, line 4: The line repeats the header. Remove",
    ),
    "a field twice": (
        "a.jsonl",
        b'{"x": {"y": 1, "z": 2, "y": 3}}\n',
        "line 1: An object has two fields with the name 'y'",
    ),
    "Latin-1": (
        "a.csv",
        "x,y\nschön,1\n".encode("latin-1"),
        r"a.csv, line 2: the byte 0xf6 is not UTF-8\. If .* Latin-1.*\(cat .*a.csv \| iconv -f cp",
    ),
    "Latin-1 in TSV": (
        "a.tsv",
        b"x\ty\nsch\xf6n\t1\n",
        "a.tsv, line 2: the byte 0xf6 is not UTF-8.*iconv",
    ),
    "Latin-1 in JSON": (
        "a.jsonl",
        b'{"x": "sch\xf6n"}\n',
        "a.jsonl, line 1: the byte 0xf6 is not UTF-8.*iconv",
    ),
    "Latin-1 in a header": (
        "a.csv",
        b"sch\xf6n\n",
        "a.csv, line 1: the byte 0xf6 is not UTF-8.*iconv",
    ),
    "Latin-1, compressed": (
        "a.txt.gz",
        gzip.compress(b"sch\xf6n\n"),
        r"line 1: .*gzip -dc .*a.txt.gz \| iconv",
    ),
    "a damaged line": (
        "a.txt",
        "schön\nsch\xf6n".encode() + b"\xc3\n",
        "line 2: the byte 0xc3 .*iconv -c -f utf-8",
    ),
    "a cut character": ("a.txt", "schö".encode()[:-1], "a.txt, line 1: the byte 0xc3 is not UTF-8"),
    "Latin-1 in Parquet": (
        "a.parquet",
        parquet(LATIN),
        "after row 0: The column 'x' has a text that is not UTF-8",
    ),
    "suffix": (
        "a.xlsx",
        b"",
        r"the unknown suffix '\.xlsx'\. The name of a file must end in \.jsonl",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_gives_one_sentence(tmp_path, case):
    name, data, message = BROKEN[case]
    write(tmp_path, {name: data})
    with pytest.raises(ValueError, match=message):
        rows(f"train={tmp_path / name}")


def test_arguments_that_name_no_rows_are_refused(tmp_path):
    write(tmp_path, {"a.en": "one\ntwo\n", "a.de": "eins\n", "a.txt": "one\n", "b/a.en": "one\n"})
    write(tmp_path, {"c.csv": CSV, "c.csv.gz": gzip.compress(CSV)})
    os.mkfifo(tmp_path / "pipe.txt")
    for argument, message in {
        f"train={tmp_path}/a.en+{tmp_path}/a.de": "line 2: The file has no such line",
        f"train={tmp_path}/a.en+{tmp_path}/b/a.en": "cannot be told apart",
        f"train={tmp_path}/a.txt,train={tmp_path}/a.en+{tmp_path}/a.de": "'train' has aligned",
        f"{tmp_path}": "no file whose name begins with train, validation or test",
        f"{tmp_path}/a.en": "is not a directory. Write --from SPLIT=FILE",
        f"all={tmp_path}/a.txt": r"--from 'all=.*a\.txt': The name 'all' stands for all splits",
        "train=": r"Write SPLIT=FILE, such as train=a\.jsonl",
        f"train={tmp_path}/a.txt,train={tmp_path}/a.txt": "cannot be told apart. Name every file",
        f"train={tmp_path}/c.csv,train={tmp_path}/c.csv.gz": "only once, either plain or",
        f"train={tmp_path}/a.en+{tmp_path}/c.csv": r"c\.csv has rows with fields, but aligned",
        f"train={tmp_path}/pipe.txt": r"pipe\.txt is not a regular file",
        f"train={tmp_path}/d.csv": "There is no file",
        f"train={tmp_path}/other-*.txt": r"There is no file .*other-\*\.txt",
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            rows(argument)
    with pytest.raises(
        ValueError, match=r"names the columns of CSV and TSV files, but .*a\.txt is neither\. Le"
    ):
        rows(f"train={tmp_path}/a.txt", columns=["x"])
    mixed = rows(f"train={tmp_path}/a.txt,test={tmp_path}/c.csv", columns=["x", "y"])
    assert mixed["train"] == [{"text": "one"}] and len(mixed["test"]) == 3


def test_a_template_formats_a_row():
    row = {"text": "x", "n": 3, "deep": {"a": True}, "deep.b": "dotted", "bytes": b"\xc3\xa9"}
    row |= {"day": datetime.date(2020, 1, 2), "nan": float("nan")}
    row |= {"list": [{"b": 1}], "latin": b"sch\xf6n", "blank": "\u00a0", "none": ""}
    assert Template("{blank}, {text}")(row) == "\u00a0, x"
    assert Template("a: {blank} b: {none}")(row) == ""
    assert Template("{text} {n} {deep.a} {deep.b}.")(row) == "x 3 True dotted."
    assert Template("{bytes} {day}")(row) == "é 2020-01-02"
    for text in ("{", "{}", "{a} }"):
        with pytest.raises(ValueError, match=r"outside of a field\. Write a field as \{NAME"):
            Template(text)
    for text, message in {
        "{txt}": r"There is no field 'txt', did you mean 'text'\? The fields are text, n",
        "{deep}": r"The field 'deep' is \{\"a\": true\}, which is not text",
        "{text.__class__}": "There is no field 'text.__class__'",
        "{n:>9}": "There is no field 'n:>9'",
        "{nan}": "The field 'nan' is NaN, which is not text",
        "{list.0.b}": "no field 'list.0.b', because 'list' is a list.*Write the part",
        "{latin}": r"The field 'latin' is b'sch\\xf6n', which is not UTF-8\. Write the column as",
    }.items():
        with pytest.raises(ValueError, match=message):
            Template(text)(row)


def test_a_row_without_a_target_names_the_way_to_import_it():
    message = (
        r"no field 'label'\. The fields are text\. Import rows without a target .* --target ''"
    )
    with pytest.raises(ValueError, match=message):
        describe().texts({"text": "new"})
    assert describe(targets=Template("")).texts({"text": "new"}) == ("review: new", UNKNOWN)


def describe(**options):
    given = {"inputs": Template("review: {text}"), "targets": Template("{label}")}
    return FileTask("my_reviews", **{**given, "labels": {"0": "bad", "1": "good"}, **options})


def test_an_imported_task_is_reported_and_found_again(tmp_path, monkeypatch):
    lossy = "lost \ufffd text,1\r\n ,1\r\n".encode()
    write(tmp_path, {"a.jsonl": JSON_LINES * 2, "b.csv": CSV + lossy})
    splits = find_splits([f"train={tmp_path}/a.jsonl,validation={tmp_path}/b.csv"])
    reports = import_files(describe(metrics=("accuracy", "f1")), splits, tmp_path / "data")
    train, its_labels, validation, labels, _ = (" ".join(x.split()) for x in report_lines(reports))
    assert train == f"imported/my_reviews:train 4 rows {tmp_path}/a.jsonl"
    said = "my_reviews:validation 4 rows, 1 with U+FFFD, which stands for lost text, 1 with a blank"
    assert said in validation
    assert [its_labels, labels] == ["targets: good 2, bad 2", "targets: good 3, bad 1"]
    monkeypatch.delitem(task_registry.TASKS, "my_reviews")  # as in a new process
    assert task_registry.add_imported(tmp_path / "data") == ["my_reviews"]
    examples = load("my_reviews", "validation", tmp_path / "data")
    assert examples.task.label_words == ("bad", "good")
    assert examples.target_words == ["good", "bad", "good", "good"]
    assert examples.record(2, "bad")["input"] == "review: lost � text"
    expected = {"accuracy": pytest.approx(75), "f1": pytest.approx(80)}
    assert examples.score(["good", "bad", "bad", "good"]) == expected


def test_other_rows_of_equal_size_make_a_prepared_set_outdated(tmp_path):
    request = SplitRequest("my_reviews", "train", rows=False)
    prepared = PreparedTasks(tmp_path, BYTES)
    for text in ("one", "two"):
        write(tmp_path, {"a.jsonl": json.dumps({"text": text, "label": "1"}) + "\n"})
        import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path, renew=True)
        assert not is_current(request, prepared, lengths=None)
        prepare("my_reviews", prepared, log=quiet)
        assert is_current(request, prepared, lengths=None)
        (inputs, _) = prepared.open("my_reviews", "train", None)[0]
        assert BYTES.decode(inputs) == f"review: {text}"


def test_empty_targets_are_only_allowed_in_splits_for_prediction(tmp_path):
    text = {"targets": Template("{label}"), "labels": {}}
    data_dir = tmp_path / "data"
    said = r"a\.csv, line 4: The target is blank or '<unk>'.* --from test=FILE\. Nothing was"
    for lacking, options in (("", {}), ("<unk>", {}), ("", text), ("<unk>", text)):
        write(tmp_path, {"a.csv": CSV + f"a film,{lacking}\r\n".encode()})
        for split in ("train", "validation"):
            with pytest.raises(ValueError, match=said):
                import_files(
                    describe(**options), find_splits([f"{split}={tmp_path}/a.csv"]), data_dir
                )
        splits = find_splits([f"test={tmp_path}/a.csv"])
        import_files(describe(**options), splits, data_dir, renew=True)
    with pytest.raises(ValueError, match="The target '' is none of the labels a"):
        FileTask("my_texts", None, Template("{x}"), labels={"a": "a"}).texts({"x": ""})


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet", "aligned"])
def test_a_target_of_invisible_characters_is_empty(tmp_path, kind):
    """A target that consists only of invisible characters is empty.

    The test covers all kinds of blanks and files. Within a sentence, blanks are allowed.
    """
    blank = "\u00a0 \u200b\ufeff\u2028\u3000\u00ad"
    row = {"text": "a film", "label": blank}
    files = {
        "a.csv": f"text,label\na film,{blank}\n",
        "a.tsv": f"text\tlabel\na film\t{blank}\n",
        "a.jsonl": json.dumps(row),
        "a.parquet": parquet([row]),
        "a.text": "a film\n",
        "a.label": blank,
    }
    write(tmp_path, files)
    names = [f"{tmp_path}/a.{end}" for end in (("text", "label") if kind == "aligned" else (kind,))]
    splits = find_splits([f"train={'+'.join(names)}"])
    task = describe(targets=Template("It is {label}."), labels={})
    with pytest.raises(
        ValueError, match=r"(line|row) [12]: The target is blank or '<unk>'.*Nothing was"
    ):
        import_files(task, splits, tmp_path / "data")
    for labels in ({}, {"0": "bad"}):
        assert describe(labels=labels).texts(row) == ("review: a film", UNKNOWN)
    assert describe(labels={"": "none"}).texts(row) == ("review: a film", "none")


@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_whose_target_is_hidden_are_not_trained_on(tmp_path, split):
    """Rows with hidden targets are not used for training.

    The test covers an import without any targets, and the test split of a labeled task.
    """
    data = CSV + b"a film,\r\n"
    hidden = data.replace(b"1", b"").replace(b"0", b"")
    write(tmp_path, {"a.csv": data if split == "test" else hidden})
    target = Template("{label}") if split == "test" else None
    splits = find_splits([f"{split}={tmp_path}/a.csv"])
    import_files(describe(targets=target), splits, tmp_path)
    prepared = PreparedTasks(tmp_path, BYTES)
    said = []
    prepare("my_reviews", prepared, training_splits=[split], evaluation_splits=(), log=said.append)
    count = 1 if split == "test" else 3
    assert said == [
        f"my_reviews, {split}: 3 examples, {said[0].split()[4]} tokens",
        f"  of 3 targets, {count} are empty or '<unk>'",
    ]
    config = DataConfig("my_reviews", 32, 8, batch_size=1, shards=1, split=split)
    message = (
        rf"my_reviews's split '{split}' has {count} targets that are empty or '<unk>'\. Choose"
    )
    with pytest.raises(ValueError, match=message):
        open_stream(config, BYTES, data_dir=tmp_path)
    free = dataclasses.replace(task_registry.find_task("my_reviews"), label_words=None)
    task_registry.TASKS["my_reviews"] = free
    with pytest.raises(ValueError, match=message):
        open_stream(config, BYTES, data_dir=tmp_path)


def test_labels_that_the_vocabulary_cannot_tell_apart_are_refused(tmp_path):
    """Labels that the vocabulary cannot distinguish are refused before preparation and training.

    Other targets that lose characters are only counted.
    """
    vocabulary = tmp_path / "v.model"
    train_sentencepiece(["a small fine film review: dull"] * 9, vocabulary, vocab_size=20)
    known = SentencePiece(str(vocabulary)).build()
    prepared = PreparedTasks(tmp_path, known)
    write(tmp_path, {"a.csv": CSV.decode().replace("0", "fine").replace("1", "正")})
    splits = find_splits([f"train={tmp_path}/a.csv"])
    import_files(describe(labels={"正": "正面", "fine": "负面"}), splits, tmp_path)
    message = "'my_reviews' has the label words '正面' and '负面', which have the same tokens"
    with pytest.raises(ValueError, match=message):
        prepare("my_reviews", prepared, evaluation_splits=(), log=quiet)
    assert prepared.find("my_reviews", "train") is None
    labels = {"正": "fine film", "fine": "fine dull"}
    import_files(describe(labels=labels), splits, tmp_path, renew=True)
    prepare("my_reviews", prepared, evaluation_splits=(), log=quiet)
    config = DataConfig("my_reviews", 32, 2, batch_size=1, shards=1)
    with pytest.raises(
        ValueError, match=r"same tokens if targets are cut at 2 tokens\. Choose other"
    ):
        open_stream(config, known, data_dir=tmp_path)
    import_files(describe(labels={}), splits, tmp_path, renew=True)
    report = []
    prepare("my_reviews", prepared, evaluation_splits=(), log=report.append)
    assert report[1:] == ["  of 2 targets, 1 hold unknown pieces"]


def test_a_task_of_a_script_is_prepared_from_python(tmp_path, monkeypatch, capsys):
    """A task that a script defines is prepared from Python.

    A run with a task that is not prepared ends with an error that contains the code to prepare it.

    The same holds for a run on newly imported data.
    """
    write(tmp_path, {"a.jsonl": JSON_LINES})
    splits = find_splits([f"train={tmp_path}/a.jsonl,validation={tmp_path}/a.jsonl"])
    import_files(describe(), splits, tmp_path)
    task = Task("of_a_script", "imported/my_reviews")
    monkeypatch.setitem(task_registry.TASKS, task.name, task)
    experiment = runs.experiment()
    experiment = replace(experiment, data=replace(experiment.data, mixture=task.name))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=r"data prepare of_a_script .* in Python") as e:
            run(experiment, tmp_path / "run", data_dir=tmp_path, visible=False)
        assert not (tmp_path / "run").exists()
        prepare_data(experiment, tmp_path)
        assert "of_a_script, train: 2 examples" in capsys.readouterr().out
        assert find_prepared(experiment, tmp_path).rates(task.name) == {task.name: 1.0}
        import_files(describe(), splits, tmp_path, renew=True)
    command = shlex.split(str(e.value).split("'")[1])[1:]
    command[command.index(task.name)] = "my_reviews"
    assert "my_reviews, validation: 2 examples" in call("", *command)


def test_splits_are_added_to_a_task_of_the_same_definition(tmp_path):
    write(tmp_path, {"a.jsonl": JSON_LINES})
    for split in ("train", "test"):
        import_files(describe(), find_splits([f"{split}={tmp_path}/a.jsonl"]), tmp_path)
    counts = {"train": 2, "test": 2}
    assert task_registry.find_task("my_reviews").stored_splits(tmp_path) == counts
    other = find_splits([f"validation={tmp_path}/a.jsonl"])
    for options in ({"labels": {"0": "no", "1": "yes"}}, {"inputs": Template("{label}")}):
        with pytest.raises(ValueError, match=r"was imported with another task\.json\. .*--renew"):
            import_files(describe(**options), other, tmp_path)
    assert task_registry.find_task("my_reviews").stored_splits(tmp_path) == counts


def test_a_row_that_fits_no_task_is_named_and_changes_nothing(tmp_path):
    numbers = {"metrics": ("pearson",), "labels": {}}
    data_dir = tmp_path / "data"
    task = FileTask("my_rows", None, Template("{x}"), labels={"a": "a"})
    write(tmp_path, {"a.jsonl": '{"x": "a"}\n'})
    import_files(task, find_splits([f"train={tmp_path}/a.jsonl"]), data_dir)
    before = {p: p.read_bytes() for p in data_dir.rglob("*") if p.is_file()}
    for row, changes, said in (
        ('{"x": 1e400}', {}, "a.jsonl, line 2: The field 'x' is Infinity, which is not text"),
        (
            '{"y": 1}',
            {},
            r"a.jsonl, line 2: There is no field 'x'\. The fields are y\. Nothing was",
        ),
        ('{"x": "b"}', {}, "a.jsonl, line 2: The target 'b' is none of the labels a"),
        (
            '{"x": "good"}',
            numbers,
            "a.jsonl, line 2: The target 'good' is not a number, but the met",
        ),
        ('{"x": 1' + 400 * "0" + "}", numbers, "is not a number, but the metric pearson"),
        ('{"x": "\\ud800"}', {"labels": {}}, "a.jsonl, line 2: .*UnicodeEncodeError"),
        (
            '{"x": " "}',
            {"labels": {}},
            "a.jsonl, line 2: The target is blank, and the task has no inputs",
        ),
    ):
        first = '{"x": 1}\n' if changes is numbers else '{"x": "a"}\n'
        write(tmp_path, {"a.jsonl": first + row + "\n"})
        changed = FileTask("my_rows", None, Template("{x}"), **({"labels": {"a": "a"}} | changes))
        with pytest.raises(ValueError, match=said):
            import_files(changed, find_splits([f"train={tmp_path}/a.jsonl"]), data_dir, renew=True)
    write(tmp_path, {"a.jsonl": "\n"})
    with pytest.raises(
        ValueError, match=r"imported/my_rows:train has no rows in .*a\.jsonl\. Nothing was"
    ):
        import_files(task, find_splits([f"train={tmp_path}/a.jsonl"]), data_dir, renew=True)
    assert {p: p.read_bytes() for p in data_dir.rglob("*") if p.is_file()} == before


def test_an_impossible_description_is_refused(tmp_path):
    for options, message in (
        ({"name": "My-Task"}, "'My-Task' is not allowed. Use only a-z, 0-9 and _"),
        ({"metrics": ("acuracy",)}, r"no metric 'acuracy', did you mean 'accuracy'\?"),
        ({"metrics": ("f1",), "labels": {}}, "'f1' compares two labels, .*number of labels: 0"),
        (
            {"metrics": ("f1",), "labels": {"a": "a", "b": "b", "c": "c"}},
            "'f1' compares two labels, .*number of labels: 3",
        ),
        (
            {"metrics": ("rouge",)},
            r"'rouge' compares texts, .* are labels \(number of labels: 1",
        ),
        (
            {"targets": Template("x")},
            r"The target 'x' is the same for every row\. Write {x} to use a field",
        ),
        ({"labels": {"0": " ", "1": "b"}}, r"The label of '0' is blank\. Give every label a word"),
        ({"metrics": ("pearson", "bleu")}, r"'bleu' compares texts, .* are numbers \("),
    ):
        with pytest.raises(ValueError, match=message):
            FileTask(
                **{"name": "mine", "inputs": None, "targets": str, "labels": {"a": "a"}, **options}
            )
    with pytest.raises(ValueError, match="'glue_cola_v002' belongs to a task of this package"):
        import_files(FileTask("glue_cola_v002", None, str), {}, tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot be written to a bucket \(gs://bucket/y\)\. Write them to"
    ):
        import_files(describe(), {}, storage_path("gs://bucket/y"))


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    write(tmp_path, {"a.txt": "".join(f"a line {i}\n" for i in range(4000))})
    splits = find_splits([f"train={tmp_path}/a.txt"])
    task = FileTask("my_lines", None, Template("{text}"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large\. No data set was changed: '.*/out'"):
            import_files(task, splits, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "out").iterdir())
    import_files(task, splits, tmp_path / "out")
    prepared = PreparedTasks(tmp_path / "out", BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(
            OSError, match=r"File too large\. Files that were finished are kept: '.*/prepared"
        ):
            prepare("my_lines", prepared, evaluation_splits=(), log=quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not [path for path in prepared.root.rglob("*") if path.is_file()]


TERMINATED = """
import os, signal
from synthesizer_jax.cli.main import run
from synthesizer_jax.preparation import file_tasks
file_tasks.write_dataset = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
run()
"""


def test_sigterm_leaves_nothing(tmp_path):
    write(tmp_path, {"a.txt": "a\n"})
    words = "data import mine --name x --target {text} --data-dir out --from train=a.txt"
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    python("-c", TERMINATED, *words.split(), code=143, cwd=tmp_path, env=environment)
    assert not list((tmp_path / "out").iterdir())


def test_an_import_shows_its_progress(tmp_path):
    write(tmp_path, {"a.jsonl": JSON_LINES, "b.csv": CSV})
    words = "data import mine --name x --input {text} --target {label}"
    files = f"train={tmp_path}/a.jsonl,validation={tmp_path}/b.csv"
    result = invoke(words, "--data-dir", tmp_path / "out", "--from", files)
    phases = ["loading TensorFlow", "importing imported/x:train", "importing imported/x:validation"]
    assert result.stderr.splitlines() == phases
    assert result.stdout.startswith("imported/x:train ")


def test_a_missing_split_is_reported_before_anything_is_prepared(tmp_path):
    write(tmp_path, {"a.jsonl": JSON_LINES})
    splits = find_splits([f"train={tmp_path}/a.jsonl,dev={tmp_path}/a.jsonl"])
    import_files(describe(), splits, tmp_path)
    experiment = runs.experiment()
    data = replace(experiment.data, mixture="my_reviews")
    wrong = {"data": replace(data, split="trian"), "evaluation": Evaluation(split="dev")}
    for changes, split in (({"data": data}, "validation"), (wrong, "trian")):
        message = (
            rf"for the split {split} in .*\. The splits that have data are dev, train\. Choose one"
        )
        with pytest.raises(FileNotFoundError, match=message):
            find_prepared(replace(experiment, **changes), tmp_path)


def test_processes_that_prepare_know_imported_tasks(tmp_path):
    write(tmp_path, {"a.jsonl": JSON_LINES})
    import_files(describe(), find_splits([f"train={tmp_path}/a.jsonl"]), tmp_path)
    said = call(f"data prepare my_reviews --data-dir {tmp_path} --epochs 2 --workers 2")
    assert "my_reviews, train: 4 examples" in said
