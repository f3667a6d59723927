"""Tests coreference, sentinels and names, which `test_t5_oracle` does not cover."""

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.coreference import SPECIAL, _wnli_question
from synthesizer_jax.tasks.postprocessors import is_labeled, to_text
from tests.environment import python


def rows_of(name, **row):
    """Returns all rows that a task makes from one row."""
    dataset = tf.data.Dataset.from_tensors({key: tf.constant(value) for key, value in row.items()})
    return list(task_registry.find_task(name).preprocess(dataset).as_numpy_iterator())


def finished(name, **row):
    """Returns all pairs of inputs and targets that a task makes from one row."""
    return [(to_text(r["inputs"]), to_text(r["targets"])) for r in rows_of(name, **row)]


WSC = {"text": "Ann told Sue that she won .", "span1_text": "Ann", "span2_text": "she"}
WSC |= {"span1_index": 0, "span2_index": 4, "idx": 0}


def test_wsc_marks_the_pronoun_and_asks_for_the_referent():
    name, written = "super_glue_wsc_v102_simple_eval", "wsc: Ann told Sue that *she* won ."
    assert finished(name, **WSC, label=0) == [(written, "Ann")]
    assert finished("super_glue_wsc_v102_simple_train", **WSC, label=0) == []
    assert finished("super_glue_wsc_v102_simple_train", **WSC, label=1) == [(written, "Ann")]
    for index in (0, 3, 9):
        with pytest.raises(tf.errors.InvalidArgumentError, match="WSC"):
            finished(name, **WSC | {"span2_index": index}, label=1)
    pony, pebble = SPECIAL
    for sentence, pronoun, tail in (
        (pony, "him", 'quite loud. "Good for *him* ," he said.'),
        (pebble, "it", "want to use *it* , but really for now, what more could they wish for?"),
    ):
        row = WSC | {"text": sentence, "span2_text": pronoun, "span2_index": 22}
        ((inputs, _),) = finished(name, **row, label=1)
        assert inputs.startswith("wsc: ") and inputs.endswith(tail)


@pytest.mark.parametrize("name", ["super_glue_wsc_v102_simple_eval", "glue_wnli_v002_simple_eval"])
def test_hidden_labels_of_coreference_stay_hidden(name):
    task = task_registry.find_task(name)
    pair = {"sentence1": "Ann said she won.", "sentence2": "Ann won.", "idx": 0}
    for label in (0, -1):
        (row,) = rows_of(name, **(WSC if "wsc" in name else pair), label=label)
        row["targets_pretokenized"] = row["targets"]
        assert task.postprocess("Ann", example=row, is_target=True) == row["label"] == label
        assert is_labeled(row) is (label >= 0)


def test_labels_of_ones_own_may_be_words_and_negative():
    assert is_labeled({"label": b"bad"}) and is_labeled({"label": np.float32(-0.5)})


def test_wsc_predictions():
    task = task_registry.find_task("super_glue_wsc_v102_simple_eval")
    right = (
        ("the dog", "dog"),
        ("DOG", "his dog"),
        ("the big dog", "dog"),
        ("mark's dog", "Mark's dog"),
    )
    wrong = (
        ("big dog", "small dog"),
        ("cat", "dog"),
        ("Mark's dog", "dog"),
        ("dog", "her"),
        ("dog", ""),
    )
    values = {
        **dict.fromkeys(right, 1),
        **dict.fromkeys(wrong, 0),
        ("", "dog"): -1,
        ("the", "dog"): -1,
    }
    for (prediction, referent), value in values.items():
        example = {"targets_pretokenized": referent.encode(), "label": 1}
        assert task.postprocess(prediction, example=example) == value
        assert task.postprocess(referent, example=example, is_target=True) == 1


def test_wnli_as_coreference():
    for premise, hypothesis, question, candidate in (
        (
            "Lily spoke to Donna, breaking her concentration.",
            "Lily spoke to Donna, breaking Donna's concentration.",
            "Lily spoke to Donna, breaking *her* concentration.",
            "Donna",
        ),
        (
            "I put the cake away in the refrigerator. It has a lot of butter in it.",
            "The cake has a lot of butter in it.",
            "I put the cake away in the refrigerator. *It* has a lot of butter in it.",
            "The cake",
        ),
        (
            "The trophy did not fit, so John sold it.",
            "John sold the trophy.",
            "The trophy did not fit, so John sold *it* .",
            "the trophy",
        ),
        ("Green ideas, it slept", "Nothing else matters", "Green ideas, *it* slept", ""),
        ("Bob left it here today", "Bob left here today", "Bob left *it* here today", "Bob left"),
        ("Bob left it here today", "Here today Bob left", "Bob left *it* here today", ""),
        ("Bob left it", "Ann and Bob left", "Bob left *it*", "Ann and Bob left"),  # T5 marks all
    ):
        assert _wnli_question(premise, hypothesis) == (f"wsc: {question}", candidate)
    with pytest.raises(ValueError, match=r"There is no pronoun in 'Bob left\.'"):
        _wnli_question("Bob left.", "Ann left.")


def test_sentinel_forms():
    task = task_registry.find_task("super_glue_boolq_v102_1_sentinel")
    for answer in ("<extra_id_0> True", "<extra_id_0>True ", "True"):
        assert task.postprocess(answer) == 1
    for answer in (" True", "True <extra_id_0>"):  # SeqIO strips spaces only after a sentinel
        assert task.postprocess(answer) == -1


def test_names_are_suggested_without_tensorflow_and_network():
    program = (
        "import sys, socket\n"
        "socket.socket.connect = None\n"
        "import pathlib\n"
        "from synthesizer_jax.tasks import task_registry\n"
        "assert len(task_registry.TASKS) > 70, len(task_registry.TASKS)\n"
        "assert task_registry.mixture_rates('glue_v002_proportional', pathlib.Path('x')) == {}\n"
        "assert not {'tensorflow', 'seqio', 'pyarrow', 'sklearn'} & set(sys.modules)\n"
    )
    python("-c", program)
    with pytest.raises(ValueError, match="did you mean 'glue_cola_v002'"):
        task_registry.find_task("glue_cola")
    with pytest.raises(ValueError, match="The mixtures are glue_v002_proportional"):
        task_registry.mixture_rates("nothing", pathlib.Path("unused"))
