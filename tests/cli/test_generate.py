"""`generate` as a user types it."""

import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from synthesizer_jax.cli import generate
from synthesizer_jax.sharding import MeshShape
from tests.cli import commands
from tests.evaluation import runs

TEXTS = ["a b", "the dog sleeps"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run whose mesh divides the parameters by eight."""
    directory = tmp_path_factory.mktemp("generate")
    runs.write_run(directory, runs.experiment(mesh=MeshShape(fsdp=8)))
    return directory


def call(*arguments):
    return commands.call("generate", *arguments)


def test_several_texts_and_their_scores(run):
    """Lines of one input stand together; the first beam is what is shown without the others."""
    options = ("--workdir", run, "--max-length", 4, "--beams", 3, "--alpha", 1.0)
    best = call(*options, *TEXTS)
    several = call(*options, "--samples", 3, "--scores", *TEXTS).splitlines()
    scores, texts = zip(*(line.split("\t") for line in several), strict=True)
    assert "".join(f"{text}\n" for text in texts[::3]) == best
    assert len(texts) == 6 and all(float(score) < 0 for score in scores)


def test_samples_are_repeated_by_their_seed_and_stay_alone(run):
    options = ("--workdir", run, "--max-length", 4, "--temperature", 0.9, "--top-k", 99)
    options += ("--top-p", 0.95, "--samples", 2, "--min-length", 2, "--relative-length", 2)
    found = call(*options, "--seed", 3, *TEXTS)
    assert len(found.splitlines()) == 4
    assert call(*options, "--seed", 3, "--batch-size", 1, *TEXTS) == found
    assert call(*options, "--seed", 4, *TEXTS) != found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-p", 1.5, "--temperature", 1), "top_p is 1.5; allowed: above 0, at most 1"),
        (("--samples", 2), "samples is 2 with beams 1 and temperature 0; give a temperature"),
        (("--min-length", 99), "min_length is 99; allowed: at most max_length, 8"),
    ],
)
def test_options_that_contradict_are_one_sentence(run, options, message):
    with pytest.raises(ValueError, match=message):
        call("--workdir", run, *options, "text")


ALONE = """
import sys
for name in ("tensorflow", "tensorflow_datasets", "tensorflow_text", "seqio"):
    sys.modules[name] = None  # importing it ends in an ImportError
from synthesizer_jax.cli.main import run
run()
"""


@pytest.mark.slow
def test_one_device_without_tensorflow_says_the_same(run):
    """A process of its own: neither TensorFlow nor SeqIO can be imported, and there is one device."""
    shown = call("--workdir", run, *TEXTS)
    assert len(shown.splitlines()) == 2
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    alone = subprocess.run(
        [sys.executable, "-c", ALONE, "generate", "--workdir", str(run), *TEXTS],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == shown


def test_a_damaged_newest_checkpoint_gives_way_to_an_older_one(run, tmp_path, caplog):
    shutil.copytree(run, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "4"
    (newest / "state" / "manifest.ocdbt").write_bytes(b"")
    older = call("--workdir", run, "--step", "2", *TEXTS)
    assert call("--workdir", tmp_path / "run", *TEXTS) == older
    assert f"{newest} cannot be read" in caplog.text and "step 2 is used" in caplog.text
    with pytest.raises(ValueError, match=r"checkpoints/4 cannot be read .*--step, of 2$"):
        call("--workdir", tmp_path / "run", "--step", "4", *TEXTS)


def test_files_are_looked_at_before_the_model_is_read(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--output .*there is no directory .*absent"):
        call("--workdir", tmp_path, "--output", tmp_path / "absent" / "x", "text")
    (tmp_path / "latin").write_bytes("Größe".encode("latin-1"))
    with pytest.raises(ValueError, match=r"--input .*latin is not UTF-8 text"):
        call("--workdir", tmp_path, "--input", tmp_path / "latin")


def test_inputs_and_outputs_are_lines_of_files(run, tmp_path):
    (tmp_path / "in.txt").write_text("\n".join(TEXTS) + "\n")
    files = ("--input", tmp_path / "in.txt", "--output", tmp_path / "out.txt", "--batch-size", 1)
    call("--workdir", run, *files)
    assert (tmp_path / "out.txt").read_text() == call("--workdir", run, *TEXTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.txt", "out.txt"]


def test_no_text_at_all_is_an_error_and_a_terminal_is_not_read(tmp_path, monkeypatch):
    message = "there is no input; give texts as arguments, --input FILE, or lines to stdin"
    with pytest.raises(ValueError, match=message):
        call("--workdir", tmp_path)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.setattr(generate, "sys", SimpleNamespace(stdin=terminal))
    with pytest.raises(ValueError, match=message):
        call("--workdir", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"holds no experiment\.json"):
        call("--workdir", tmp_path, "text")
