"""T5Gemma in, trained, decoded and out, against a NumPy oracle of its public definition."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from synthesizer_jax.base.registry import from_json, replace, to_json
from synthesizer_jax.inference import Decoding, decode, decode_sequences
from synthesizer_jax.models import stacks_of
from synthesizer_jax.pretrained import encode, generate, load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.primitives.parameters import apply_method
from synthesizer_jax.training.losses import chunked_cross_entropy, cross_entropy
from tests.pretrained.gemma import CONFIGS, logits, make_folder, make_tensors

INPUTS = np.array([2, 9, 50, 7, 88, 31, 6, 12, 40])
TARGETS = np.array([2, 30, 8, 77, 5, 60, 11])
"""Each longer than the windows of the layers."""


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request, tmp_path_factory):
    config = CONFIGS[request.param]
    tensors = make_tensors(config)
    return make_folder(tmp_path_factory.mktemp("t5gemma"), config, tensors), config, tensors


def deviation(model, variables, config, tensors):
    """The largest, as a share of the largest logit; the other row is padded, on the left too."""
    inputs = np.zeros((2, 12), np.int32)
    inputs[0, :9], inputs[1, 3:] = INPUTS, INPUTS
    targets = np.stack([TARGETS] * 2)
    found = apply_method(model.__call__, variables, jnp.asarray(inputs), jnp.asarray(targets))
    expected = logits(config, tensors, INPUTS, TARGETS)
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


def test_it_computes_what_its_definition_says(folder):
    path, config, tensors = folder
    model, variables, vocabulary = load(path)
    assert dataclasses.astuple(model.ids) == (0, 1, 2)
    assert vocabulary.around_inputs == ([2], []) and vocabulary.vocab_size == 600
    assert from_json(to_json(model)) == model
    assert deviation(model, variables, config, tensors) < 1e-5
    alone = load(path, encoder_only=True)
    states = encode(load(path), ["what is it?"], pool=False)[0]
    np.testing.assert_allclose(encode(alone, ["what is it?"], pool=False)[0], states, atol=1e-6)


def test_decoding_takes_the_most_probable_tokens(folder):
    path, config, tensors = folder
    model, variables, _ = load(path)
    found = decode(variables, jnp.asarray(INPUTS)[None], model=model, max_length=8).tokens[0]
    row = [2]
    while len(row) < 9 and row[-1] != 1:
        row.append(int(logits(config, tensors, INPUTS, np.array(row))[-1].argmax()))
    assert found.tolist() == row[1:] + [0] * (9 - len(row))
    beams = decode_sequences(
        variables, jnp.asarray(INPUTS)[None], model=model, decoding=Decoding(max_length=8, beams=2)
    )
    assert (
        beams.log_probabilities[0, 0]
        >= decode(variables, jnp.asarray(INPUTS)[None], model=model, max_length=8).scores[0] - 1e-5
    )


def test_a_run_of_it_is_exported_with_the_same_tensors(folder, tmp_path):
    path, config, tensors = folder
    convert_checkpoint(path, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name], x)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    for stack in ("encoder", "decoder"):
        assert config[stack].items() <= {**written[stack], "max_position_embeddings": 64}.items()
    assert load(tmp_path / "back").model == load(path).model
    texts = ["what is it?", "a run"]
    assert generate(load(tmp_path / "back"), texts, max_length=5) == generate(
        load(path), texts, max_length=5
    )


def test_other_alignments_start_as_it(folder, tmp_path):
    path, config, tensors = folder
    convert_checkpoint(path, tmp_path / "run", encoder="rv", max_length=16)
    model, variables, vocabulary = load(tmp_path / "run")
    assert deviation(model, variables, config, tensors) < 1e-5
    (tmp_path / "back").mkdir()
    with pytest.raises(
        ValueError, match=r"encoder\.layers\.0\.self_mixer\.alignment is 'Mixture', which no"
    ):
        write_folder(tmp_path / "back", model, variables, vocabulary)


def test_scanned_layers_compute_the_same(folder):
    path, config, tensors = folder
    model, variables, _ = load(path)
    scanned = replace(model, **{name: replace(s, scan=True) for name, s in stacks_of(model).items()})
    params = {
        name: jax.tree.map(lambda x: x, tree)
        if name not in stacks_of(model)
        else _stacked(model, name, tree)
        for name, tree in variables["params"].items()
    }
    assert deviation(scanned, {"params": params}, config, tensors) < 1e-5


def _stacked(model, name, tree):
    from synthesizer_jax.models import stack_layers

    return stack_layers(stacks_of(model)[name], tree)


def test_the_chunked_loss_has_the_soft_cap():
    rng = np.random.default_rng(0)
    hidden, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((2, 6, 8), (8, 20)))
    targets, weights = jnp.asarray(rng.integers(0, 20, (2, 6))), jnp.ones((2, 6))
    rest = {"targets": targets, "weights": weights}

    def whole(hidden, kernel):
        return cross_entropy(3.0 * jnp.tanh(hidden @ kernel / 3.0), **rest).total

    def chunked(hidden, kernel):
        return chunked_cross_entropy(hidden, kernel, soft_cap=3.0, chunk=5, **rest).total

    for found, expected in zip(
        *(jax.grad(f, (0, 1))(hidden, kernel) for f in (chunked, whole)), strict=True
    ):
        np.testing.assert_allclose(found, expected, atol=1e-5)
