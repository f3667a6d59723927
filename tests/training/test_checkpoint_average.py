"""Tests the mean of the last checkpoints, which is a run that other commands accept."""

import resource
import shutil

import jax
import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.pretrained.loading import load
from synthesizer_jax.training.checkpoint_average import average_checkpoints
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import load_experiment
from tests.cli.commands import call, invoke
from tests.evaluation.runs import experiment, write_run
from tests.training.tiny import close, damage


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A run with three checkpoints, whose parameters differ."""
    directory = tmp_path_factory.mktemp("average") / "run"
    write_run(directory, experiment(), steps=(2, 4, 6))
    return directory


def test_an_average_is_the_mean_and_loads_like_a_run(source, tmp_path):
    done = invoke("average", source, tmp_path / "mean", "--last", 2)
    assert done.stdout == f"{tmp_path / 'mean'} holds the mean of the steps 4, 6 of {source}\n"
    averaging, writing = done.stderr.splitlines()
    assert averaging == "averaging 2 checkpoints" and writing.startswith("writing a checkpoint of ")
    params = [restore_variables(source / "checkpoints", step=step)[1]["params"] for step in (4, 6)]
    expected = jax.tree.map(
        lambda *x: np.mean([np.asarray(a, np.float64) for a in x], axis=0), *params
    )
    step, found = restore_variables(tmp_path / "mean" / "checkpoints")
    assert step == 6
    close(found["params"], expected, rtol=1e-6, atol=1e-6)
    assert {x.dtype for x in jax.tree.leaves(found["params"])} == {np.dtype(np.float32)}
    loaded = load(tmp_path / "mean")
    jax.tree.map(np.testing.assert_array_equal, loaded.variables["params"], found["params"])


def test_training_does_not_continue_in_the_directory_of_an_average(source, tmp_path):
    """The directory of an average contains only parameters, so training cannot continue there.

    The same is true for the directory of a converted model.
    """
    call("average", source, tmp_path / "mean")
    before = {path.name for path in (tmp_path / "mean").iterdir()}
    recipe = load_experiment(tmp_path / "mean")
    with pytest.raises(ValueError, match=r"contains only parameters.*train .*/mean --workdir NEW"):
        run(recipe, tmp_path / "mean", data_dir=tmp_path, visible=False)
    assert {path.name for path in (tmp_path / "mean").iterdir()} == before


def test_by_default_all_kept_checkpoints_are_averaged(source, tmp_path):
    done = invoke("average", source, tmp_path / "mean")
    assert done.stdout == f"{tmp_path / 'mean'} holds the mean of the steps 2, 4, 6 of {source}\n"
    write_run(tmp_path / "equal", experiment(), steps=(1, 2), value=0.1)
    average_checkpoints(tmp_path / "equal", tmp_path / "same")
    _, found = restore_variables(tmp_path / "same" / "checkpoints")
    assert all((x == np.float32(0.1)).all() for x in jax.tree.leaves(found))


@pytest.mark.parametrize("command", ["average", "convert", "export"])
def test_a_full_disk_is_named_and_leaves_nothing(source, tmp_path, command):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match=r"File too large\. Nothing was written: '.*/new'"):
            call(command, source, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_mistakes_give_one_sentence_and_write_nothing(source, tmp_path):
    with pytest.raises(
        ValueError,
        match=r"mean needs 5 checkpoints, but .* only the steps 2, 4, 6\. .*keep_latest=5",
    ):
        call("average", source, tmp_path / "mean", "--last", 5)
    damaged = shutil.copytree(source, tmp_path / "damaged")
    damage(damaged / "checkpoints" / "2")
    with pytest.raises(ValueError, match=r"checkpoints/2 cannot be read"):
        average_checkpoints(damaged, tmp_path / "mean")
    with pytest.raises(FileExistsError, match=r"already exists\. Choose a new directory"):
        call("average", source, damaged, "--last", 2)
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"]
