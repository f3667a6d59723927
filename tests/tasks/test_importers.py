"""Made distribution files become TFDS data sets, or stop the import without leaving a trace."""

import gzip
import json
import pathlib

import numpy as np
import pytest
import tensorflow_datasets as tfds

from synthesizer_jax.tasks.importers import ImportReport, SplitReport, import_benchmark


def put(path: pathlib.Path, text: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode() if isinstance(text, str) else text
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def lines(*rows: object) -> str:
    return "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)


def read(data_dir: pathlib.Path, name: str, split: str) -> dict[int, dict]:
    """Examples by idx, read as any TFDS user reads them."""
    dataset = tfds.load(name, split=split, data_dir=data_dir, download=False)
    return {int(row["idx"]): row for row in tfds.as_numpy(dataset)}


def report_of(report: ImportReport, config: str) -> dict[str, SplitReport]:
    return {s.split: s for s in report.splits if s.config == config}


def test_tsv_plain_and_gz_with_mark_and_quotes(tmp_path: pathlib.Path) -> None:
    source, out = tmp_path / "files", tmp_path / "out"
    put(
        source / "CoLA/subset_train.tsv.gz",
        'gj04\t1\t\tHe said "stop and left.\ngj04\t0\t*\tHim " said stop\n',
    )
    put(source / "CoLA/subset_test.tsv", "index\tsentence\n0\tA man.\n1\tTwo men.\n")
    put(
        source / "sst-2/subset_train.tsv",
        "\ufeffsentence\tlabel\r\nfine \t1\r\nbad\t0\r\n\r\n",
    )
    report = import_benchmark("glue", source, out)
    cola = read(out, "glue/cola", "train")
    assert [(cola[i]["sentence"], cola[i]["label"]) for i in (0, 1)] == [
        (b'He said "stop and left.', 1),
        (b'Him " said stop', 0),
    ]
    assert [row["label"] for row in read(out, "glue/cola", "test").values()] == [-1, -1]
    sst2 = read(out, "glue/sst2", "train")
    assert [(sst2[i]["sentence"], sst2[i]["label"]) for i in (0, 1)] == [(b"fine ", 1), (b"bad", 0)]
    assert sst2[0]["idx"].dtype == np.int32
    found = report_of(report, "glue/cola")
    assert (found["train"].status, found["train"].rows) == ("subset", 2)
    assert found["validation"].status == "missing"
    assert "validation" not in tfds.builder("glue/cola", data_dir=out).info.splits
    assert report_of(report, "glue/rte")["train"].file is None
    text = list(report.lines())
    assert any(line.startswith("glue/rte:train") and "missing (RTE)" in line for line in text)
    assert text[-1].startswith("glue: 3 of 34 splits, 6 rows")


def test_rows_that_tfds_drops_are_counted_and_keep_the_numbering(tmp_path: pathlib.Path) -> None:
    put(
        tmp_path / "files/QQP/subset_train.tsv",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        "1\t1\t2\tWhy?\tHow?\t0\n"
        "2\t3\t4\tCut in the\n"
        "middle?\tSo?\t1\n"
        "3\t5\t6\tWhere?\tWhere to?\t1\n"
        "4\t7\t8\tNo label?\tNone?\n",
    )
    report = import_benchmark("glue", tmp_path / "files", tmp_path / "out")
    split = report_of(report, "glue/qqp")["train"]
    assert (split.rows, split.dropped) == (2, 3)
    assert any("3 dropped" in line for line in report.lines())
    rows = read(tmp_path / "out", "glue/qqp", "train")
    assert {i: (r["question1"], r["label"]) for i, r in rows.items()} == {
        0: (b"Why?", 0),
        3: (b"Where?", 1),
    }


def test_json_forms_of_mnli(tmp_path: pathlib.Path) -> None:
    folder, out = tmp_path / "glue/MNLI", tmp_path / "out"
    pairs = {str(i): {"text_a": f"p{i}", "text_b": f'h"{i}', "label": "neutral"} for i in range(3)}
    put(folder / "subset10k_train.json.gz", json.dumps(pairs, indent=4))
    row = {"premise": "A", "hypothesis": "B", "label": "contradiction"}
    put(folder / "subset_dev_matched.jsonl", lines(row, row | {"label": 0}))
    put(folder / "textfooler_mnli_mismatched_1k.tsv", "entailment\tP .\tH .\n")
    import_benchmark("glue", tmp_path, out)
    train = read(out, "glue/mnli", "train")
    assert [(r["premise"], r["hypothesis"], r["label"]) for _, r in sorted(train.items())] == [
        (f"p{i}".encode(), f'h"{i}'.encode(), 1) for i in range(3)
    ]
    for name, split in (("mnli", "validation_matched"), ("mnli_matched", "validation")):
        assert [r["label"] for _, r in sorted(read(out, f"glue/{name}", split).items())] == [2, 0]
    (only,) = read(out, "glue/mnli_mismatched", "validation").values()
    assert (only["premise"], only["hypothesis"], only["label"]) == (b"P .", b"H .", 0)


MRPC_HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def test_mrpc_from_the_original_and_from_glues_own_files(tmp_path: pathlib.Path) -> None:
    rows = [f'{i % 2}\t{i}\t{i + 9}\t" first {i}\tsecond {i}\n' for i in range(4)]
    original = tmp_path / "original/MRPC"
    for name in ("train", "test"):
        put(original / f"subset_msr_paraphrase_{name}.txt", MRPC_HEADER + "".join(rows))
    put(original / "dev_ids.tsv.gz", "2\t11\n")
    import_benchmark("glue", tmp_path / "original", tmp_path / "out")
    train = read(tmp_path / "out", "glue/mrpc", "train")
    assert {i: r["label"] for i, r in train.items()} == {0: 0, 1: 1, 3: 1}
    assert train[3]["sentence1"] == b'" first 3'
    assert list(read(tmp_path / "out", "glue/mrpc", "validation")) == [2]
    assert {r["label"] for r in read(tmp_path / "out", "glue/mrpc", "test").values()} == {-1}

    own = tmp_path / "own/MRPC"
    put(own / "subset_train.tsv", MRPC_HEADER + "".join(rows[:2] + rows[3:]))
    put(own / "subset_dev.tsv", MRPC_HEADER + rows[2])
    import_benchmark("glue", tmp_path / "own", tmp_path / "out2")
    assert [
        r["label"] for _, r in sorted(read(tmp_path / "out2", "glue/mrpc", "train").items())
    ] == [*(0, 1, 1)]
    (only,) = read(tmp_path / "out2", "glue/mrpc", "validation").values()
    assert (only["sentence2"], only["label"]) == (b"second 2", 0)


COPA = {"premise": "P", "choice1": "A", "choice2": "B", "question": "cause", "label": 1, "idx": 0}
CB = {"premise": "P", "hypothesis": "H", "label": "neutral", "idx": 0}
WSC = {
    "text": "the dog saw Ann . She ran",
    "target": {"span1_text": "Ann.", "span1_index": 3, "span2_text": "She", "span2_index": 5},
    "label": True,
    "idx": 0,
}
MULTIRC = {
    "idx": 4,
    "passage": {
        "text": "T",
        "questions": [
            {"question": "Q", "idx": 7, "answers": [{"text": str(a), "idx": a, "label": a % 2}]}
            for a in (0,)
        ],
    },
}
RECORD = {
    "idx": 2,
    "passage": {"text": "Bob met Al", "entities": [{"start": 8, "end": 9}, {"start": 0, "end": 2}]},
    "qas": [{"query": "@placeholder left", "idx": 5, "answers": [{"text": "Bob"}, {"text": "Al"}]}],
}


def test_super_glue_rows_are_tfds_rows(tmp_path: pathlib.Path) -> None:
    source, out = tmp_path / "files", tmp_path / "out"
    multirc = json.loads(json.dumps(MULTIRC))
    multirc["passage"]["questions"][0]["answers"] += [{"text": "no", "idx": 1, "label": 0}]
    put(source / "WSC/subset_train.jsonl", lines(WSC))
    put(source / "MultiRC/subset_val.jsonl.gz", lines(multirc))
    put(source / "ReCoRD/fewglue32_train.jsonl", lines(RECORD))
    put(source / "COPA/subset_train.jsonl", lines(COPA, COPA | {"idx": 1, "label": 0}))
    unlabeled = {k: v for k, v in COPA.items() if k != "label"}
    put(source / "COPA/subset_test.jsonl", lines(unlabeled))
    put(source / "DPR/subset_train.c.txt", "Al saw Bo.\nhe\nAl, Bo\nBo\n\nX\nhe\nA , B\nA\n")
    report = import_benchmark("super_glue", source, out)
    (wsc,) = read(out, "super_glue/wsc.fixed", "train").values()
    assert (wsc["span1_text"], wsc["span1_index"], wsc["label"]) == (b"Ann", 3, 1)
    answers = list(tfds.as_numpy(tfds.load("super_glue/multirc", split="validation", data_dir=out)))
    assert {(r["answer"], r["label"], r["idx"]["question"]) for r in answers} == {
        (b"0", 0, 7),
        (b"no", 0, 7),
    }
    (record,) = tfds.as_numpy(tfds.load("super_glue/record", split="train", data_dir=out))
    assert record["entities"].tolist() == [b"Al", b"Bob"] == record["answers"].tolist()
    copa = read(out, "super_glue/copa", "train")
    assert (copa[0]["label"], copa[1]["label"]) == (1, 0)
    assert read(out, "super_glue/copa", "test")[0]["label"] == -1
    pronouns = list(
        tfds.as_numpy(tfds.load("definite_pronoun_resolution", split="train", data_dir=out))
    )
    assert {(r["sentence"], r["label"]) for r in pronouns} == {(b"Al saw Bo.", 1), (b"X", 0)}
    assert report_of(report, "super_glue/multirc")["validation"].rows == 2


WIC = {"word": "bank", "sentence1": "a", "sentence2": "b", "idx": 0} | dict.fromkeys(
    ("start1", "start2", "end1", "end2"), 0
)

BROKEN = {
    "label": (
        "RTE/subset_train.tsv",
        "sentence1\tsentence2\tlabel\na\tb\tmaybe\n",
        "example 1: TFDS cannot read it",
    ),
    "no label": ("RTE/subset_dev.tsv", "sentence1\tsentence2\na\tb\n", "line 1: no column 'label'"),
    "cola": (
        "CoLA/subset_train.tsv",
        "x\t1\t\tfine\nx\t1\tshort\n",
        "example 2: TFDS cannot read it",
    ),
    "encoding": (
        "AX/subset_diagnostic.tsv",
        b"sentence1\tsentence2\nok\tok\n\xff\tb\n",
        "line 3: byte 0",
    ),
    "json": ("MNLI/subset_train.json", "[]", "a JSON object was expected, not list"),
    "key": ("MNLI/subset_train.json", '{"8": {"text_a": "a", "label": 0}}', "entry '8': 'text_b'"),
    "tab": ("MNLI/subset_dev_matched.jsonl", lines({"premise": "a\tb"}), "line 1: 'premise' holds"),
    "mrpc id": (
        "MRPC/subset_msr_paraphrase_train.txt",
        MRPC_HEADER + "1\t1\t2\ta\tb\n",
        "needs GLUE's dev_ids.tsv",
    ),
    "wrong size": ("CoLA/dev.tsv", "x\t1\t\tfine\n", "1 rows after 0 dropped .* has 1,043"),
    "not json": ("CB/subset_train.jsonl", lines(CB, "{"), "line 2: not JSON"),
    "blank": ("CB/subset_train.jsonl", lines(CB, "", CB | {"idx": 1}), "line 2: not JSON"),
    "class": (
        "CB/subset_train.jsonl",
        lines(CB | {"label": "no"}),
        "example 1: TFDS cannot read it",
    ),
    "hidden": (
        "CB/subset_val.jsonl",
        lines({"premise": "", "hypothesis": "", "idx": 0}),
        "example 1: TFDS cannot read it",
    ),
    "type": ("CB/subset_train.jsonl", lines(CB | {"premise": 3}), "example 1: TFDS cannot read it"),
    "twice": (
        "CB/subset_train.jsonl",
        lines(CB, CB),
        "example 2: TFDS cannot read it .*idx 0 is there twice",
    ),
    "span": (
        "WSC/subset_train.jsonl",
        lines(WSC, WSC | {"idx": 1, "target": WSC["target"] | {"span1_text": "Zoe"}}),
        "example 2: TFDS cannot read it",
    ),
    "pronoun": ("DPR/subset_test.c.txt", "S he\nhe\nA, B\nC\n", "example 1: TFDS cannot read it"),
    "long field": (
        "SST-2/subset_train.tsv",
        f"sentence\tlabel\nfine\t1\n{'x' * 131_073}\t1\n",
        "example 2: TFDS cannot read it .*field larger than",
    ),
    "not a number": (
        "SST-2/subset_dev.jsonl",
        '{"sentence": NaN, "label": 1}\n',
        "line 1: not JSON .NaN is no number of JSON",
    ),
    "number as text": (
        "SST-2/subset_dev.jsonl",
        lines({"sentence": 1e3, "label": 1}),
        "line 1: 'sentence' is missing or no text",
    ),
    "half a character": (
        "SST-2/subset_dev.jsonl",
        lines({"sentence": "fine", "label": 1}, {"sentence": "\ud800", "label": 1}),
        r"line 2: \\ud800 is half a character",
    ),
    "half a character in a key": (
        "CB/subset_train.jsonl",
        lines(CB | {"\udfff": 1}),
        r"line 1: \\udfff is half a character",
    ),
    "large idx": (
        "CB/subset_train.jsonl",
        lines(CB, CB | {"idx": 2**40}),
        "example 2: TFDS cannot read it",
    ),
    "large idx as text": (
        "AX-b/subset_AX-b.jsonl",
        lines({"sentence1": "a", "sentence2": "b", "label": "entailment", "idx": "9" * 5000}),
        "example 1: TFDS cannot read it",
    ),
    "large offset": (
        "WiC/subset_test.jsonl",
        lines(WIC | {"end2": 2**31}),
        "example 1: TFDS cannot read it",
    ),
    "tsv": ("CB/subset_train.tsv", "a\tb\n", "SuperGLUE is read from jsonl"),
    "gzip": ("CB/subset_train.jsonl.gz", b"", "line 2: damaged gzip"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_row_stops_the_import_and_leaves_nothing(
    case: str, tmp_path: pathlib.Path
) -> None:
    name, content, message = BROKEN[case]
    source, out = tmp_path / "files", tmp_path / "out"
    put(source / name, content)
    if case == "gzip":
        (source / name).write_bytes(gzip.compress(lines(CB).encode())[:-9])
    glue = name.split("/")[0] in ("SST-2", "RTE", "CoLA", "STS-B", "AX", "MNLI", "MRPC")
    with pytest.raises(ValueError, match=message) as error:
        import_benchmark("glue" if glue else "super_glue", source, out)
    assert name.split("/")[1] in str(error.value)
    assert str(error.value).endswith("nothing was imported")
    assert list(out.iterdir()) == []


def test_a_failure_after_good_tasks_changes_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "files", tmp_path / "out"
    put(source / "CB/subset_train.jsonl", lines(CB))
    import_benchmark("super_glue", source, out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    put(source / "CB/subset_train.jsonl", lines(CB, CB | {"idx": 1}))
    put(source / "COPA/subset_train.jsonl", lines(COPA | {"premise": 9}))
    with pytest.raises(ValueError, match="example 1: TFDS cannot read it"):
        import_benchmark("super_glue", source, out, renew=True)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before

    put(source / "COPA/subset_train.jsonl", lines(COPA))
    rename, place = pathlib.Path.rename, out / "super_glue/cb/1.0.2"

    def full_disk(old: pathlib.Path, new: pathlib.Path) -> pathlib.Path:
        if new == place and "replaced" not in old.name:
            raise OSError("disk full")
        return rename(old, new)

    monkeypatch.setattr(pathlib.Path, "rename", full_disk)
    with pytest.raises(OSError, match="disk full"):
        import_benchmark("super_glue", source, out, renew=True)
    assert {p: p.stat().st_mtime_ns for p in place.rglob("*")}.items() <= before.items()
    assert len(read(out, "super_glue/cb", "train")) == 1
    assert not (out / "super_glue/copa").exists()
    assert not list(out.glob(".import*"))


def test_a_second_import_adds_splits_and_leaves_the_rest(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "out"
    put(tmp_path / "first/CB/subset_train.jsonl", lines(CB))
    put(tmp_path / "first/COPA/subset_train.jsonl", lines(COPA))
    import_benchmark("super_glue", tmp_path / "first", out)
    put(tmp_path / "second/CB/subset_val.jsonl", lines(CB, CB | {"idx": 1}))
    import_benchmark("super_glue", tmp_path / "second", out)
    assert list(tfds.builder("super_glue/cb", data_dir=out).info.splits) == ["validation", "train"]
    assert len(read(out, "super_glue/cb", "validation")) == 2
    assert len(read(out, "super_glue/cb", "train")) == 1
    assert len(read(out, "super_glue/copa", "train")) == 1
    assert sorted(p.name for p in out.iterdir()) == ["super_glue"]


def test_a_complete_split_has_its_published_size(tmp_path: pathlib.Path) -> None:
    rows = "".join(f"{i}\tpremise {i}\thypothesis\n" for i in range(1104))
    put(tmp_path / "files/diagnostic.tsv", "index\tsentence1\tsentence2\n" + rows)
    report = import_benchmark("glue", tmp_path / "files", tmp_path / "out")
    split = report_of(report, "glue/ax")["test"]
    assert (split.status, split.rows) == ("complete", 1104)
    assert read(tmp_path / "out", "glue/ax", "test")[1103]["premise"] == b"premise 1103"


def test_what_cannot_be_imported_is_said_in_one_sentence(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="'blue' is unknown; choose one of glue, super_glue"):
        import_benchmark("blue", tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="is not a folder"):
        import_benchmark("glue", tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match=r"no glue file in .* CoLA, SST-2"):
        import_benchmark("glue", tmp_path, tmp_path / "out")
