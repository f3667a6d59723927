"""Tests models whose ids for padding, end and start differ from T5's.

MADLAD uses 1 for padding, 2 for the end and 0 for the start.
"""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.data.batch import assemble_batch
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.examples import DrawnExample
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.inference import Decoding, decode
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from tests.pretrained.folders import TINY, UNTIED, logits, make_folder, make_tensors
from tests.pretrained.gemma import MADLAD, write_tokenizer

CONFIG = TINY | UNTIED | MADLAD
INPUTS = np.array([9, 0, 50, 7, 2])
"""Token ids with 0, which stands for unknown text."""


@pytest.fixture(scope="module")
def madlad(tmp_path_factory):
    folder = make_folder(tmp_path_factory.mktemp("madlad"), CONFIG, tensors := make_tensors(CONFIG))
    write_tokenizer(folder, gemma=False)
    return folder, tensors, load(folder)


def test_padding_and_start_are_those_of_the_model(madlad):
    _, tensors, (model, variables, vocabulary) = madlad
    assert model.ids == SpecialIds(1, 2, 0) and vocabulary.around_inputs == ([], [2])
    rows = jnp.asarray([[*INPUTS, 1, 1], [1, 1, *INPUTS]])
    row = [0]
    found = jax.jit(model.apply)(variables, rows, jnp.asarray([[0, 5, 1], [0, 5, 1]]))
    expected = logits(CONFIG, tensors, INPUTS, np.array([0, 5, 1]))
    np.testing.assert_allclose(found, np.stack([expected] * 2), atol=1e-4)
    while len(row) < 7 and row[-1] != 2:
        row.append(int(logits(CONFIG, tensors, INPUTS, np.array(row))[-1].argmax()))
    decoded = decode(variables, rows, model=model, max_length=6).tokens
    np.testing.assert_array_equal(decoded, [row[1:] + [1] * (7 - len(row))] * 2)


def test_text_also_ends_at_other_ids(madlad, tmp_path):
    """Text may also end at an additional id.

    An instruction-tuned T5Gemma uses such an id at the end of its turns.
    """
    folder, _, (model, variables, vocabulary) = madlad
    tokens = decode(variables, INPUTS[None], model=model, max_length=6).tokens[0].tolist()
    turn = tokens[2]
    until = tokens[: tokens.index(turn)]
    shutil.copytree(folder, tmp_path / "turns")
    (tmp_path / "turns" / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": [2, 5]}))
    (tmp_path / "turns" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, turn]})
    )
    loaded = load(tmp_path / "turns")
    assert loaded.model.ids == SpecialIds(1, 2, 0, (turn,))
    found = decode(variables, INPUTS[None], model=loaded.model, max_length=6).tokens[0]
    np.testing.assert_array_equal(found, [*until, turn] + [1] * (5 - len(until)))
    options = {"inputs_length": 8, "decoding": Decoding(max_length=6), "batch_size": 1}
    ((text,),) = Predictor(loaded.model, variables, vocabulary, **options).generate_texts([INPUTS])
    assert text.text == vocabulary.decode(until)
    convert_checkpoint(tmp_path / "turns", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    assert load(tmp_path / "back").model == loaded.model


def test_targets_are_scored_up_to_the_padding(madlad):
    _, tensors, (model, variables, vocabulary) = madlad
    options = {"inputs_length": 16, "decoding": Decoding(max_length=8), "batch_size": 2}
    predictor = Predictor(model, variables, vocabulary, **options)
    target = np.array([5, 0, 2])
    scores = predictor.log_probabilities([INPUTS, INPUTS[2:]], [target, target[1:]])
    for inputs, ids, score in zip((INPUTS, INPUTS[2:]), (target, target[1:]), scores, strict=True):
        found = logits(CONFIG, tensors, inputs, np.array([0, *ids[:-1]]))
        log_p = found - np.log(np.exp(found).sum(-1, keepdims=True))
        np.testing.assert_allclose(score, log_p[np.arange(len(ids)), ids].sum(), atol=1e-4)


def test_rows_of_a_batch_are_padded_with_the_models_id():
    def example(*ids):
        """Returns an example with the given inputs, and with targets made from the inputs."""
        return DrawnExample(np.array(ids, np.int32), np.array([*ids[1:], 2], np.int32), 0, 0)

    config = DataConfig("films", 8, 8, batch_size=8, pack=True)
    batch = assemble_batch([[example(7, 0, 2), example(8, 2)]], config, ids=SpecialIds(1, 2, 3))
    assert {name: x[0].tolist() for name, x in batch.items()} == {
        "encoder_input_tokens": [7, 0, 2, 8, 2, 1, 1, 1],
        "decoder_input_tokens": [3, 0, 2, 3, 2, 1, 1, 1],
        "decoder_target_tokens": [0, 2, 2, 2, 2, 1, 1, 1],
        "decoder_loss_weights": [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0],
        "encoder_segment_ids": [1, 1, 1, 2, 2, 0, 0, 0],
        "decoder_segment_ids": [1, 1, 1, 2, 2, 0, 0, 0],
    }


def test_the_export_has_the_ids(madlad, tmp_path):
    folder, _, loaded = madlad
    convert_checkpoint(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    assert load(tmp_path / "back").model == loaded.model
    tokenizer = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert (tokenizer["pad_token"], tokenizer["eos_token"]) == ("<s>", "</s>")
