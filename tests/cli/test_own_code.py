"""Tests that a user's classes, SeqIO tasks and metrics still work after training.

Code that is stored in the directory of a run is not executed.
"""

import json
import sys

import pytest

import synthesizer_jax.distillation.distill  # noqa: F401 - registers classes before `afresh`
from synthesizer_jax.base import registry
from synthesizer_jax.cli.recipes import load_with_code
from synthesizer_jax.runs import code
from synthesizer_jax.training.experiment import Experiment
from tests.cli.commands import call, run_all

RECIPE = '''
"""An alignment, a SeqIO task and a metric of its own."""

from __future__ import annotations

import flax.linen as nn
import jax.numpy as jnp
import seqio
import tensorflow as tf

from synthesizer_jax.alignments import Alignment
from synthesizer_jax.attention import static
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.models import Size, t5
from synthesizer_jax.base.registry import register
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training


@register
class Slope(Alignment):
    """Logits that fall with the key's position."""

    steepness: float = 0.5

    @nn.compact
    def __call__(self, queries, keys, context):
        row = -self.steepness * jnp.arange(context.key_span.length, dtype=jnp.float32)
        shape = (context.num_heads, context.query_span.length, context.key_span.length)
        return (static(jnp.broadcast_to(row, shape)),)


def numbers(split, shuffle_files, seed=None):
    return tf.data.Dataset.range({"train": 40, "held_out": 6}[split])


def spell(dataset):
    return dataset.map(
        lambda n: {
            "inputs": tf.strings.join(["is ", tf.strings.as_string(n)]),
            "targets": tf.where(n % 2 == 0, "even", "odd"),
        }
    )


def share_of_even(targets, predictions):
    return {"even": sum(t == "even" for t in targets) / len(targets), "count": len(predictions)}


feature = seqio.Feature(seqio.ByteVocabulary())
sizes = {"train": 40, "held_out": 6}
if "own_parity" not in seqio.TaskRegistry.names():
    seqio.TaskRegistry.add(
        "own_parity",
        source=seqio.FunctionDataSource(numbers, splits=list(sizes), num_input_examples=sizes),
        preprocessors=[spell, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        output_features={"inputs": feature, "targets": feature},
        metric_fns=[share_of_even],
    )


def default():
    return Experiment(
        model=t5(Size(8, 1, 16, 2, 4), encoder=Slope(0.25), decoder=Slope(), vocab_size=384),
        vocabulary=Bytes(),
        data=DataConfig("own_parity", 16, 4, batch_size=8, shards=1),
        training=Training(steps=2, optimizer=AdamW(), log_every=1, save_every=2),
        evaluation=Evaluation(method="greedy", batch_size=4, split="held_out"),
    )
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a finished run of a user's recipe."""
    place = tmp_path_factory.mktemp("own")
    (place / "data").mkdir()
    (place / "mine.py").write_text(RECIPE)
    call(f"train {place}/mine.py --workdir {place}/run --data-dir {place}/data --quiet")
    return place


@pytest.fixture
def afresh(monkeypatch):
    """Forgets all code of users, as in a new process."""
    own = {k: v for k, v in registry.REGISTRY.items() if v.__module__.startswith("synthesizer_jax")}
    monkeypatch.setattr(registry, "REGISTRY", own)
    monkeypatch.setattr(code, "REGISTRY", own)
    monkeypatch.setattr(code, "_executed", {})
    monkeypatch.setattr(code, "_imported", set())


def test_a_fresh_process_evaluates_with_the_copy(place):
    assert (place / "run/code/mine.py").read_text() == (place / "mine.py").read_text()
    names = json.loads((place / "run/code/imports.json").read_text())
    assert names == {"packages": [], "files": ["mine.py"]}
    command = "eval --workdir run --import run/code/mine.py --data-dir data"
    ((code, said),) = run_all(place, [command])
    assert code == 0 and "own_parity" in said and "even 0.50  count 6.00" in said, said
    rows = [json.loads(x) for x in (place / "run/evaluation/2/own_parity.jsonl").open()]
    assert [r["input"] for r in rows] == [f"is {n}" for n in range(6)]
    assert [r["target"] for r in rows] == ["even", "odd"] * 3


@pytest.mark.usefixtures("afresh")
def test_code_that_is_not_named_is_not_run(place):
    file = place / "run/code/mine.py"
    message = (
        rf"run needs code that was not imported: {file}\. Read .* add the options --import {file}"
    )
    with pytest.raises(ValueError, match=message):
        call(f"generate --workdir {place}/run hello")
    assert "Slope" not in registry.REGISTRY
    call(f"generate --workdir {place}/run --import {file} hello")
    assert "Slope" in registry.REGISTRY


@pytest.mark.usefixtures("afresh")
def test_a_converted_run_takes_its_code_along(place, tmp_path):
    call(f"convert {place}/run {tmp_path}/converted --import {place}/mine.py")
    assert code.recorded_code(tmp_path / "converted") == code.recorded_code(place / "run")
    runs = (place / "run", tmp_path / "converted")
    first, second = (call(f"generate --workdir {run}", "is 3") for run in runs)
    assert first == second


@pytest.mark.usefixtures("afresh")
def test_a_run_is_continued_with_its_recipe_edited(place):
    with (place / "mine.py").open("a") as file:
        file.write("# a remark\n")
    call(f"train {place}/mine.py --workdir {place}/run --data-dir {place}/data --quiet")
    assert (place / "run/code/mine.py").read_text().endswith("# a remark\n")


@pytest.mark.usefixtures("afresh")
def test_a_package_is_recorded_by_its_name(place, monkeypatch, tmp_path):
    (tmp_path / "own_package.py").write_text((place / "mine.py").read_text())
    monkeypatch.syspath_prepend(tmp_path)
    code.record_code(tmp_path, code.Code(("own_package",)))
    with pytest.raises(
        ValueError, match=r"not imported: own_package\. .* add the options --import own_package"
    ):
        code.require_code(tmp_path)
    assert code.load_user_code(["own_package"]) == code.recorded_code(tmp_path)
    assert code.imported_names() == ["own_package"] and "Slope" in registry.REGISTRY
    code.require_code(tmp_path)
    with pytest.raises(ValueError, match=r"There is no package 'no_such_package'\. Install it"):
        code.load_user_code(["no_such_package"])
    monkeypatch.delitem(sys.modules, "own_package")


@pytest.mark.usefixtures("afresh")
def test_a_student_inherits_its_teachers_code(place, tmp_path):
    (tmp_path / "student.py").write_text(
        "from synthesizer_jax.alignments import Random\n"
        "from synthesizer_jax.distillation.distill import Distillation\n"
        "from synthesizer_jax.training.experiment import Training\n"
        "from synthesizer_jax.optimizers import AdamW\n"
        "from synthesizer_jax.distillation.replacement import Replacement\n"
        "def default():\n"
        "    training = Training(steps=1, optimizer=AdamW())\n"
        "    return Distillation((Replacement(Random(max_length=16)),), training)\n"
    )
    call(
        f"distill {tmp_path}/student.py --teacher {place}/run --quiet --import {place}/mine.py "
        f"--workdir {tmp_path}/student --data-dir {place}/data"
    )
    # The file of the student's recipe registers no classes, so later commands do not need it.
    assert code.recorded_code(tmp_path / "student") == code.recorded_code(place / "run")


def test_a_recipe_that_registers_nothing_is_not_recorded(tmp_path):
    (tmp_path / "plain.py").write_text(
        "from tests.training.tiny import experiment\ndef default():\n    return experiment()\n"
    )
    _, own = load_with_code(str(tmp_path / "plain.py"), kinds=(Experiment,))
    assert own == code.Code()
