"""What the doctor finds, and what it says to do."""

import importlib.metadata

import jax

from synthesizer_jax.cli import doctor
from synthesizer_jax.runtime import processes
from tests.cli.commands import ended


def test_a_healthy_machine(tmp_path):
    code, said = ended("doctor", "--workdir", tmp_path / "run")
    assert code == 0 and "FAIL" not in said, said
    for word in ("Python 3.", "jax 0.1", "one process", "8 × cpu", "memory free", "is writable"):
        assert word in said
    assert list((tmp_path / "run").iterdir()) == []


def test_a_directory_that_is_none(tmp_path):
    (tmp_path / "file").write_text("")
    code, said = ended("doctor", "--workdir", tmp_path / "file" / "run")
    assert code == 1
    assert "FAIL" in said and "→ give a directory that is writable" in said


def test_hosts_that_differ_are_named_and_lines_say_whose_they_are(monkeypatch):
    everyone = lambda _, mine: [mine, mine, mine | {"flax": "0.1"}, mine | {"flax": "0.1"}]
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    monkeypatch.setattr(processes, "process_count", lambda: 4)
    monkeypatch.setattr(processes, "all_gather", everyone)
    code, said = ended("doctor")
    assert (
        code == 1
        and "versions or settings differ" in said
        and "on 2, 3" in said
        and "'flax': '0.1'" in said
    )
    assert all(line.startswith("[3] ") for line in said.splitlines())


def test_versions_that_do_not_belong_together(monkeypatch):
    numbers = {"jax": "0.10.1", "jaxlib": "0.10.2"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: numbers.get(name, "1.0"))
    _, apart = doctor._check_versions()
    assert apart.level == "FAIL" and apart.remedy == "pip install 'jaxlib==0.10.1'"


def test_a_group_that_does_not_come_together(monkeypatch):
    def fail(timeout):
        raise RuntimeError("processes 1 to 3\nhave not started")

    monkeypatch.setattr(processes, "join_group", fail)
    (finding,) = doctor._check_group(1.0)
    assert finding.text == "processes 1 to 3 have not started" and "every host" in finding.remedy
