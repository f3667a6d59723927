"""Tests damaged data files. Each error is one sentence that names the file and a remedy."""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable

import pytest

from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, train_sentencepiece
from synthesizer_jax.preparation.file_tasks import FileTask, Template, import_files
from synthesizer_jax.preparation.importers.files import find_splits
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.preparation.task_contents import read_rows
from synthesizer_jax.tasks import task_registry
from tests.tasks.loading import LENGTHS, quiet

TASK = "damaged_rows"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A data directory with an imported and prepared task, and its vocabulary."""
    folder = tmp_path_factory.mktemp("whole")
    lines = [json.dumps({"text": f"is {i} even", "label": str(i % 2)}) for i in range(30)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    train_sentencepiece(lines, folder / "v.model", vocab_size=30)
    task = FileTask(TASK, Template("{text}"), Template("{label}"), labels={"0": "0", "1": "1"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
        import_files(task, find_splits([f"validation={folder}/a.jsonl"]), folder)
        read(folder, prepares=True)
    return folder


def read(folder: pathlib.Path, *, prepares: bool = False) -> PreparedTasks:
    """Reads all prepared data in a folder.

    The original data set is read only if it must be prepared.
    """
    task_registry.add_imported(folder)
    prepared = PreparedTasks(folder, SentencePiece(str(folder / "v.model")).build())
    if prepares:
        prepare(TASK, prepared, log=quiet, renew=True)
    examples = prepared.open(TASK, "validation", LENGTHS)
    assert len(list(examples.rows())) == len([examples[i] for i in range(len(examples))]) == 30
    return prepared


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def cut(data: bytes) -> bytes:
    return data[:-9]


def other(text: str) -> Callable[[bytes], bytes]:
    return lambda data: text.encode("latin-1")


def replace(*changes: tuple[str, str]) -> Callable[[bytes], bytes]:
    def edit(data: bytes) -> bytes:
        for old, new in changes:
            assert old.encode() in data
            data = data.replace(old.encode(), new.encode())
        return data

    return edit


STORED, PREPARED = f"imported/{TASK}/1.0.0", f"prepared/*/{TASK}/validation"
IMPORT, RENEW, MODEL = (
    "Import it again with",
    "Run 'synthesizer-jax data prepare .* --renew'",
    "another",
)
DAMAGE = {
    f"{STORED}/*.tfrecord*": (IMPORT, flip, cut, None),
    f"{STORED}/dataset_info.json": (IMPORT, other(""), other("[]"), other("\xff")),
    f"{STORED}/features.json": (
        IMPORT,
        other(""),
        other("{"),
        replace(("tensorflow_datasets.core", "x")),
    ),
    f"{STORED}/task.json": (
        "Import the task again",
        other("{"),
        other("[]"),
        other("{}"),
        replace((TASK, "x")),
        replace(("accuracy", "x")),
    ),
    f"{PREPARED}/*.arrayrecord": (RENEW, flip, cut, other("")),
    f"{PREPARED}/*.msgpack": (RENEW, cut, other("\xc1" * 50), replace(("is 1 even", "is 3 even"))),
    f"{PREPARED}/info.json": (
        "info.json",
        cut,
        other("[]"),
        replace(('"examples": 30', '"examples": 29')),
        replace(('"inputs": 1,\n', ""), ('"targets": 1', '"targets": "1"')),
    ),
    "v.model": (MODEL, other(""), cut, other("root:x:0:0\n")),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_gives_one_sentence_with_path_and_remedy(whole, tmp_path, monkeypatch, name):
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "data"))
    (path,) = folder.glob(name)
    remedy, *edits = DAMAGE[name]
    data = path.read_bytes()
    for edit in edits:
        path.unlink() if edit is None else path.write_bytes(edit(data))
        with pytest.raises(ValueError, match=remedy) as error:
            read(folder, prepares=STORED in name and "task.json" not in name)
        # TFDS does not say which of its files it could not read, so the error names the folder.
        said = str(error.value)
        assert str(folder if remedy == IMPORT else path) in said
        assert "\n" not in said and "{{" not in said
        path.write_bytes(data)


def test_files_of_another_version_are_not_prepared(whole, tmp_path):
    """Files in a different format count as not prepared.

    Prepared files of earlier versions, which lack digests of rows, can be read.
    """
    folder = pathlib.Path(shutil.copytree(whole, tmp_path / "data"))
    (info,) = folder.glob(f"{PREPARED}/info.json")
    record = json.loads(info.read_text())
    info.write_text(json.dumps({k: v for k, v in record.items() if k != "rows_digests"}))
    prepared = read(folder)
    info.write_text(json.dumps(record | {"format": 2}))
    with pytest.raises(FileNotFoundError, match=r"is not prepared in .* Run 'synthesizer-jax data"):
        prepared.open(TASK, "validation", LENGTHS)


def test_an_error_of_a_task_may_be_damage_or_a_mistake(whole, monkeypatch):
    monkeypatch.setattr(task_registry, "TASKS", dict(task_registry.TASKS))
    task_registry.add_imported(whole)

    def broken(rows):
        """Fails, because the rows do not have this feature."""
        return rows.map(lambda row: row["txt"])

    task = dataclasses.replace(task_registry.TASKS[TASK], preprocess=broken)
    monkeypatch.setattr(task_registry, "TASKS", {TASK: task})
    rows = read_rows(TASK, "validation", Bytes(), data_dir=whole)
    with pytest.raises(
        ValueError, match=r"'txt'.*Import.* If a function of your own task raised the error"
    ):
        next(rows)
