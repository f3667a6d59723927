"""A SeqIO task of a package of the user's own: trained, resumed, evaluated from the run alone."""

import json
import os

import pytest

from tests.cli.commands import run_all
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

PACKAGE = '''
"""Counting, with a preprocessor, a metric and a split of its own."""

import functools

import seqio
import tensorflow as tf


def numbers(split, shuffle_files, seed=None):
    del shuffle_files, seed
    return tf.data.Dataset.range({"train": 40, "held_out": 6}[split])


def spell(dataset, *, word):
    return dataset.map(
        lambda n: {
            "inputs": tf.strings.join([word, " ", tf.strings.as_string(n)]),
            "targets": tf.where(n % 2 == 0, "even", "odd"),
        }
    )


def share_of_even(targets, predictions):
    return {"even": sum(t == "even" for t in targets) / len(targets), "count": len(predictions)}


vocabulary = seqio.ByteVocabulary()
for word in ("is", "was"):
    seqio.TaskRegistry.add(
        f"parity_{word}",
        source=seqio.FunctionDataSource(
            numbers, splits=["train", "held_out"], num_input_examples={"train": 40, "held_out": 6}
        ),
        preprocessors=[
            functools.partial(spell, word=word),
            seqio.preprocessors.tokenize,
            seqio.CacheDatasetPlaceholder(),
            seqio.preprocessors.append_eos_after_trim,
        ],
        output_features={
            "inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)
        },
        metric_fns=[share_of_even],
    )
seqio.MixtureRegistry.add("parity", [("parity_is", 3), ("parity_was", 1)])
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("parity")
    (place / "parity_tasks.py").write_text(PACKAGE)
    (place / "data").mkdir()
    return place


TRAIN = (
    "train quickstart:random_vanilla --workdir run --data-dir data --import parity_tasks --quiet "
    '--set data.mixture=parity --set vocabulary={"type":"Bytes"} --set evaluation.split=held_out '
    "--set data.batch_size=8 --set training.save_every=2"
)


def say(place, *commands):
    """What commands print that succeed, run in one process."""
    path = f"{ROOT}{os.pathsep}{place}"
    said = run_all(place, commands, PYTHONPATH=path)
    assert [code for code, _ in said] == [0] * len(commands), said
    return [text for _, text in said]


def test_it_is_trained_resumed_and_evaluated_from_the_run_alone(place):
    listing = "data list parity --import parity_tasks"
    *_, listed = say(
        place, f"{TRAIN} --set training.steps=2", f"{TRAIN} --set training.steps=4", listing
    )
    assert "parity_was" in listed and "held_out 6" in listed
    steps = [json.loads(x) for x in (place / "run/metrics.jsonl").read_text().splitlines()]
    (last,) = [r for r in steps if r["kind"] == "eval" and r["step"] == 4]
    assert last["parity_is/even"] == last["parity_was/even"] == 0.5
    assert last["parity_is/loss"] > 0

    (shown,) = say(place, "eval --workdir run --data-dir data")
    assert "parity_is" in shown and "count" in shown
    files = sorted((place / "run/evaluation/4").glob("*.jsonl"))
    assert [f.name for f in files] == ["parity_is.jsonl", "parity_was.jsonl"]
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert [r["input"] for r in rows] == [f"is {n}" for n in range(6)]
    assert [r["target"] for r in rows] == ["even", "odd"] * 3
