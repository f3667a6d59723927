"""What the doctor finds, and what it says to do."""

import jax
import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli import doctor
from synthesizer_jax.cli.main import app


@pytest.fixture(autouse=True)
def no_slices(monkeypatch):
    for name in doctor.MEGASCALE:
        monkeypatch.delenv(name, raising=False)


def call(*arguments):
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_a_healthy_machine(tmp_path):
    code, said = call("--workdir", tmp_path / "run")
    assert code == 0, said
    assert "FAIL" not in said
    for word in (
        "Python 3.",
        "jax 0.1",
        "one process",
        "8 × cpu",
        "GiB of memory free",
        "writable",
    ):
        assert word in said
    assert list((tmp_path / "run").iterdir()) == []


def test_lines_of_several_processes_say_whose_they_are(monkeypatch):
    from synthesizer_jax.runtime import processes

    monkeypatch.setattr(jax, "process_index", lambda: 3)
    monkeypatch.setattr(processes, "process_count", lambda: 4)
    monkeypatch.setattr(processes, "all_gather", lambda _, value: [value] * 4)
    code, said = call()
    assert code == 0, said
    assert all(line.startswith("[3] ") for line in said.splitlines())


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    code, said = call("--workdir", tmp_path / "file" / "run")
    assert code == 1
    assert "FAIL" in said
    assert "→ give a directory that is writable" in said


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (("2", None, None), "MEGASCALE_NUM_SLICES without MEGASCALE_SLICE_ID, MEGASCALE_COORD"),
        (("2", "2", "localhost"), "slice 2 of 2 does not exist"),
        (("2", "1", "gone.invalid"), "gone.invalid is unknown; its slices may have been deleted"),
    ],
)
def test_stale_variables_of_slices(monkeypatch, values, problem):
    for name, value in zip(doctor.MEGASCALE, values, strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    (finding,) = doctor._check_slice_variables()
    assert finding.level == "problem"
    assert problem in finding.text
    assert finding.remedy.startswith("unset MEGASCALE_NUM_SLICES")


def test_versions_that_do_not_belong_together(monkeypatch):
    numbers = {"jax": "0.9.1", "jaxlib": "0.10.2"}
    monkeypatch.setattr(doctor, "_version_of", lambda name: numbers.get(name, "1.0"))
    _, untested, apart = doctor._check_versions()
    assert untested.level == "warning"
    assert apart.remedy == "pip install 'jaxlib==0.9.1'"


def test_hosts_that_differ_are_named(monkeypatch):
    from synthesizer_jax.runtime import processes

    mine = doctor._host_identity()
    other = {**mine, "flax": "0.1"}
    monkeypatch.setattr(processes, "process_count", lambda: 4)
    monkeypatch.setattr(processes, "all_gather", lambda _, value: [value, value, other, other])
    (finding,) = doctor._check_agreement()
    assert finding.text == f"flax differs: {mine['flax']!r} on process 0, '0.1' on 2 to 3"
    monkeypatch.setattr(processes, "all_gather", lambda _, value: [value] * 4)
    (finding,) = doctor._check_agreement()
    assert finding.level == "ok"
