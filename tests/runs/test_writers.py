"""Tests that metrics are sent to services with the same values as in the log of the run."""

import importlib.machinery
import importlib.metadata
import pathlib
import shutil
import sys
import types
from unittest import mock

import pytest

from synthesizer_jax.base.registry import from_json
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.runs import writers
from synthesizer_jax.runs.events import add_event, read_events
from synthesizer_jax.training.run_log import NonFiniteLossError
from tests.training.tiny import CopyStream, experiment, logged, run


@pytest.fixture
def install(monkeypatch):
    """Returns a function that makes mock modules importable."""

    def make(name):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        for function in ("init", "log", "finish", "set_experiment", "start_run", "log_dict"):
            setattr(module, function, mock.Mock())
        for function in ("log_metrics", "end_run"):
            setattr(module, function, mock.Mock())
        module.search_runs = mock.Mock(return_value=[])
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def test_a_run_is_also_logged_by_services_and_continues_there(tmp_path, install):
    names = ("wandb", "trackio", "mlflow")
    modules = {name: install(name) for name in names}
    directory = tmp_path / "group" / "mine"
    recipe = experiment(steps=4, save_every=2, writers=names)
    with pytest.raises(NonFiniteLossError):
        run(directory, recipe, CopyStream(bad_batch=3))
    run(directory, recipe)  # continues from step 2, after step 3 was sent
    own = logged(directory)
    shutil.rmtree(directory)  # then a new run starts in the same directory
    run(directory, experiment(steps=1, writers=names))
    for name, module in modules.items():
        logs = module.log_metrics if name == "mlflow" else module.log
        *calls, again = logs.call_args_list
        sent = {c.kwargs["step"]: c.args[0]["train/loss"] for c in calls}
        assert sent == own and again.kwargs["step"] == 1
        assert [c.kwargs["step"] for c in calls] == [1, 2, 3, 4]
        if name == "mlflow":
            assert module.set_experiment.call_args.args == ("group",)
            assert module.start_run.call_args.kwargs["run_name"] == "mine"
            config = module.log_dict.call_args_list[1].args[0]
            ends = [c.args for c in module.end_run.call_args_list]
            assert ends == [("FAILED",), ("FINISHED",), ("FINISHED",)]
            keys = [c.args[1] for c in module.search_runs.call_args_list]
        else:
            first, second, third = (c.kwargs for c in module.init.call_args_list)
            config = second.pop("config")
            assert {k: v for k, v in first.items() if k != "config"} == second
            assert (second["project"], second["resume"]) == ("group", "allow")
            assert second["name"].startswith("mine")
            status = [{"exit_code": i} if name == "wandb" else {} for i in (1, 0, 0)]
            assert [c.kwargs for c in module.finish.call_args_list] == status
            keys = [k.get("id", k["name"]) for k in (first, second, third)]
        assert from_json(config) == recipe
        assert keys[0] == keys[1] != keys[2]


def test_mlflow_gets_names_that_it_takes_and_refusals_are_noticed(tmp_path, install):
    """Names are changed so that MLflow accepts them, and refusals are noticed.

    MLflow refuses a whole batch of metrics because of one name, and reports this only when asked.
    """
    module = install("mlflow")
    add_event(tmp_path, "start", step=0)
    writer = writers.open_mlflow(tmp_path, {})
    writer.write(4, {"mine/recall@5": 0.5, "mine/F1 %": 0.5, "Größe": 0.5}, kind="eval")
    call = module.log_metrics.call_args
    assert set(call.args[0]) == {"eval/mine/recall_5", "eval/mine/F1 _", "eval/Gr__e"}
    module.log_metrics.return_value.wait.side_effect = RuntimeError("no answer")
    with pytest.raises(RuntimeError, match="no answer"):
        writer.flush()
    writer.write(5, {"loss": 0.5}, kind="train")
    with pytest.raises(RuntimeError, match="no answer"):
        writer.close(failed=False)
    assert module.end_run.call_args.args == ("FINISHED",)


class Noted(list):
    """A metric writer that another package provides."""

    def __init__(self, directory: pathlib.Path, config: object):
        NOTED.append(self)

    def write(self, step, values, *, kind):
        self.append((step, kind, sorted(values)))

    def flush(self):
        self.append("flush")

    def close(self, *, failed):
        self.append(f"close, {failed=}")


NOTED: list[Noted] = []


class Away(Noted):
    """A metric writer for a service that cannot be reached."""

    def flush(self):
        raise ConnectionError("no answer")


@pytest.mark.parametrize("visible", [True, False])
def test_a_service_that_fails_costs_no_training(visible, tmp_path, monkeypatch, capsys):
    """Training continues if a service fails.

    All checkpoints are saved, and other writers continue. If the run itself fails, the services are
    told so.
    """
    groups = {name: f"{__name__}:{kind}" for name, kind in (("away", "Away"), ("mine", "Noted"))}
    entries = [
        importlib.metadata.EntryPoint(n, value, writers.GROUP) for n, value in groups.items()
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    NOTED.clear()

    def evaluate(state):
        raise RuntimeError("of the evaluation")

    recipe = experiment(steps=2, save_every=1, writers=("away", "mine"))
    with pytest.raises(RuntimeError, match="of the evaluation"):
        run(tmp_path, recipe, evaluate=evaluate, visible=visible)
    assert finished_steps(tmp_path / "checkpoints") == [1, 2]
    away, mine = NOTED
    assert [entry[0] for entry in away] == [1]
    assert mine[-1] == "close, failed=True" and mine.count("flush") == 2
    printed = capsys.readouterr()
    line = "away gets no more metrics in this run, because it failed: Connection"
    assert line in (printed.out if visible else printed.err)
    events = {event["event"]: event["text"] for event in read_events(tmp_path)}
    assert line in events["writer_failed"]
    assert events["interrupted"] == "RuntimeError: of the evaluation"


def test_missing_services_are_reported_before_the_run_starts(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match=r"contains 'wandbb', .* did you mean 'wandb'\? The installed packages"
    ):
        run(tmp_path, experiment(writers=("wandbb",)))
    monkeypatch.setattr(writers, "is_installed", lambda library: False)
    with pytest.raises(
        ValueError, match=r"library mlflow is not installed\. Run 'pip install mlflow'"
    ):
        run(tmp_path, experiment(writers=("mlflow",)))
    assert not (tmp_path / "metrics.jsonl").exists()
