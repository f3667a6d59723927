"""A JSONL and a CSV file through the command line: imported, shown, checked, trained, evaluated."""

import json

import pytest

from tests.cli.commands import call

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A run on an imported task, from training rows in JSON and validation rows in a CSV file."""
    place = tmp_path_factory.mktemp("files")
    rows = [{"text": f"{'good' if n % 2 else 'bad'} {n}", "label": n % 2} for n in range(40)]
    (place / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "b.csv").write_text("text,label\n" + "".join(f"good {n},1\n" for n in range(6)))
    call(
        *("data", "import", "mine", "--name", "own_files", "--data-dir", place / "data"),
        *("--from", f"train={place}/a.jsonl,validation={place}/b.csv"),
        *("--input", "review: {text}", "--target", "{label}", "--labels", "0=no,1=yes"),
    )
    for steps in (2, 4):
        call(
            *("train", "quickstart:random_vanilla", "--workdir", place / "run", "--quiet"),
            *("--data-dir", place / "data", "--set", "data.mixture=own_files"),
            *("--set", 'vocabulary={"type": "Bytes"}', "--set", "data.batch_size=8"),
            *("--set", f"training.steps={steps}", "--set", "training.save_every=2"),
        )
    return place


def test_it_trains_resumes_and_is_evaluated(place):
    written = place / "run" / "evaluation" / "4" / "own_files.jsonl"
    assert len(written.read_text().splitlines()) == 6  # by the run itself
    call(
        *("eval", "--workdir", place / "run", "--data-dir", place / "data"),
        *("--save-predictions", "--method", "rank"),
    )
    (file,) = (place / "run" / "evaluation" / "4").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert file.name == "own_files.jsonl"
    assert [row["input"] for row in rows] == [f"review: good {n}" for n in range(6)]
    assert {row["target"] for row in rows} == {"yes"}
    assert {row["prediction"] for row in rows} <= {"no", "yes"}  # label words are ranked


def test_it_is_listed_shown_and_checked(place):
    assert "train 40, validation 6" in call(
        "data", "list", "own_files", "--data-dir", place / "data"
    )
    shown = call("data", "show", "own_files", "--data-dir", place / "data", "--rows", "1")
    assert "inputs: review: " in shown and "lengths of 40 rows in bytes" in shown
    checked = call("data", "check", "own_files", "--data-dir", place / "data")
    assert "train 3" in checked  # "good 1", "good 3" and "good 5" are in both


def test_options_that_do_not_belong_are_refused(place):
    with pytest.raises(ValueError, match="'data import mine' needs --name"):
        call("data", "import", "mine", "--from", place, "--target", "{x}")
    with pytest.raises(ValueError, match="glue is imported as it is published; --name"):
        call("data", "import", "glue", "--from", place, "--name", "x")
    with pytest.raises(ValueError, match=r"'glu' cannot be imported, did you mean 'glue'"):
        call("data", "import", "glu", "--from", place)
