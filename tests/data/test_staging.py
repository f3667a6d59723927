"""Data sets are put into place all or none: after errors, after kills, beside running imports."""

import errno
import os
import pathlib
import resource
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli.main import app
from synthesizer_jax.tasks.importers import IMPORTERS, corpora, import_benchmark, import_corpus
from synthesizer_jax.tasks.importers.layouts import TASKS, find_file
from synthesizer_jax.tasks.staging import Staging, staging
from tests.data.small import multi30k

NAMES = ("glue/cola/1.0.0", "glue/rte/1.0.0", "glue/wnli/1.0.0")


def write(folder: pathlib.Path, content: str) -> pathlib.Path:
    folder.mkdir(parents=True)
    (folder / "rows").write_text(content)
    return folder


def fill(stage: Staging) -> list[pathlib.Path]:
    """New data sets of all names."""
    return [write(stage.data / name, "new") for name in NAMES]


def import_all(data_dir: pathlib.Path) -> None:
    with staging(data_dir, "glue") as stage:
        stage.commit(fill(stage))


def contents(data_dir: pathlib.Path) -> dict[str, str | None]:
    """Text of every file; folders are None."""
    return {
        str(p.relative_to(data_dir)): p.read_text() if p.is_file() else None
        for p in data_dir.rglob("*")
    }


@pytest.fixture
def data_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    """Two earlier data sets, the third is not there."""
    for name in (NAMES[0], NAMES[2]):
        write(tmp_path / "data" / name, "old")
    return tmp_path / "data"


def test_new_data_sets_take_the_places_of_earlier_ones(data_dir):
    import_all(data_dir)
    assert [(data_dir / name / "rows").read_text() for name in NAMES] == ["new"] * 3
    assert [p.name for p in data_dir.iterdir()] == ["glue"]


@pytest.mark.parametrize("failing", range(1, 6))
def test_after_a_failed_renaming_everything_is_as_before(data_dir, monkeypatch, failing):
    before, rename, count = contents(data_dir), os.replace, 0

    def full_disk(source, target):
        nonlocal count
        count += 1
        if count == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        import_all(data_dir)
    assert contents(data_dir) == before


def test_a_place_that_cannot_be_written_is_found_before_the_first_renaming(data_dir, monkeypatch):
    (data_dir / "glue/rte").write_text("a file")
    before = contents(data_dir)
    with pytest.raises(NotADirectoryError, match=r"glue/rte is no folder; move it away"):
        import_all(data_dir)
    assert contents(data_dir) == before
    (data_dir / "glue/rte").unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "wnli")
    with pytest.raises(PermissionError, match="glue/wnli is not writable"):
        import_all(data_dir)
    assert (data_dir / NAMES[0] / "rows").read_text() == "old"


KILLED = """
import os, pathlib, shutil, signal, sys
from tests.data.test_staging import import_all

data = pathlib.Path(sys.argv[1])
for moment in range(1, 8):
    copy = data.with_name(f"killed_{moment}")
    shutil.copytree(data, copy)
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    count, done = 0, lambda f: None

    def killing(function):
        def call(*arguments, **options):
            global count
            count += 1
            if count == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)
        return call

    os.replace = killing(os.replace)
    pathlib.Path.unlink = killing(pathlib.Path.unlink)
    import_all(copy)
    os._exit(0)
"""


def test_what_a_killed_process_left_is_undone_by_the_next(data_dir):
    before = contents(data_dir)
    subprocess.run([sys.executable, "-c", KILLED, str(data_dir)], check=True, cwd=os.getcwd())
    for moment in range(1, 8):  # writing the plan, five renamings, the last word
        left = data_dir.with_name(f"killed_{moment}")
        assert len(list(left.glob(".import-glue-*"))) == 1
        with staging(left, "other") as stage:
            assert contents(left).keys() - {*contents(stage.folder)} >= before.keys()
        assert contents(left) == before


def test_what_was_killed_without_its_lock_is_removed_too(data_dir):
    """As the removal of a folder may leave it."""
    before = contents(data_dir)
    write(data_dir / ".import-glue-left" / "data", "half")
    with staging(data_dir, "other"):
        assert not (data_dir / ".import-glue-left").exists()
    assert contents(data_dir) == before


TERMINATED = """
import os, signal, sys
from synthesizer_jax.cli.main import run
from synthesizer_jax.data import imported

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


def test_the_folder_of_a_running_import_is_left_alone(data_dir):
    with staging(data_dir, "glue") as first:
        new = fill(first)
        with staging(data_dir, "glue") as second:
            assert second.folder != first.folder
        assert all(folder.is_dir() for folder in new)
        first.commit(new)
    assert (data_dir / NAMES[1] / "rows").read_text() == "new"


@pytest.mark.parametrize(
    "plan", ['["../precious"]', '["glue/../../precious"]', '["linked/precious"]', '[""]', "[1", "3"]
)
def test_a_plan_from_elsewhere_moves_nothing(data_dir, plan):
    precious = write(data_dir.parent / "precious", "mine")
    (data_dir / "linked").symlink_to(data_dir.parent)
    left = write(data_dir / ".import-glue-other", "")
    (left / "owner.lock").touch()
    (left / "plan.json").write_text(plan)
    before = contents(data_dir)
    with pytest.raises(ValueError, match=r"plan\.json .*; move .*\.import-glue-other away"):
        import_all(data_dir)
    assert contents(data_dir) == before
    assert (precious / "rows").read_text() == "mine"


COLA = "".join(f"gj04\t{i % 2}\t\tSentence number {i} is rather long.\n" for i in range(4000))


def cola(source: pathlib.Path) -> pathlib.Path:
    (source / "CoLA").mkdir(parents=True)
    (source / "CoLA/subset_train.tsv").write_text(COLA)
    return source


@pytest.mark.parametrize("limit", [20_000, 250_000], ids=["in our copy", "in TFDS's files"])
def test_a_full_disk_names_the_folder_and_leaves_nothing(tmp_path, limit):
    source, out = cola(tmp_path / "files"), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            import_benchmark("glue", source, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(out) in str(error.value)
    assert list(out.iterdir()) == []


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


def test_a_folder_that_cannot_be_read_is_not_called_missing(tmp_path, monkeypatch):
    folder = cola(tmp_path) / "CoLA"

    def listed(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", listed)
    with pytest.raises(PermissionError, match="CoLA"):
        find_file(folder, TASKS["glue"][0].splits[0])


def test_an_empty_line_of_one_language_is_named(tmp_path, monkeypatch):
    sizes = dict.fromkeys(("train", "validation", "test"), 3)
    monkeypatch.setattr(corpora, "CORPORA", {"multi30k": multi30k(sizes)[:1]})
    for stem in ("train", "val", "test_2016_flickr"):
        (tmp_path / f"{stem}.en").write_text("a\nb\nc\n")
        (tmp_path / f"{stem}.de").write_text("a\n \nc\n" if stem == "val" else "a\nb\nc\n")
    with pytest.raises(ValueError, match=r"val\.de, line 2: an empty line.* nothing was imported"):
        import_corpus("multi30k", tmp_path, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_names_all_that_can_be_imported(tmp_path):
    result = CliRunner().invoke(app, ["data", "import", "gleu", "--from", str(tmp_path)])
    said = str(result.exception)
    assert said.startswith("'gleu' cannot be imported, did you mean 'glue'?; choose one of ")
    assert all(name in said for name in IMPORTERS)
    assert {"glue", "super_glue", "multi30k", "squad"} <= set(IMPORTERS)
