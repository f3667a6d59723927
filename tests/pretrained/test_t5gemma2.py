"""Tests T5Gemma 2 by comparing it with NumPy code that follows its public definition."""

import copy
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import from_json, replace, to_json
from synthesizer_jax.inference import decode, encode_tokens
from synthesizer_jax.models import stack_layers, stacks_of
from synthesizer_jax.pretrained import encode, generate, load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface import folder as opening
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.huggingface.weights import open_weights
from tests.pretrained.gemma2 import (
    CONFIG,
    END_OF_IMAGE,
    IMAGES,
    encoder_config,
    logits,
    make_folder,
    make_tensors,
    states,
)

INPUTS = np.array([2, 9, 50, END_OF_IMAGE, 88, 31, 6, 12, 40])
TARGETS = np.array([2, 30, 8, 77, 5, END_OF_IMAGE, 11])
"""Inputs and targets are longer than the windows of the layers."""

TENSORS = make_tensors()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("t5gemma2") / "model", TENSORS | IMAGES)


@pytest.fixture(scope="module")
def loaded(folder):
    return load(folder)


def changed(**fields):
    """Returns the configuration with other values at paths such as ``decoder__hidden_size``."""
    config = copy.deepcopy(CONFIG)
    for path, value in fields.items():
        *keys, last = path.split("__")
        part = config
        for key in keys:
            part = part[key]
        part[last] = value
    return config


def deviation(model, variables):
    """Returns the largest deviation in two rows, divided by the largest logit.

    One of the rows is padded on the left.
    """
    inputs = np.zeros((2, 12), np.int32)
    inputs[0, :9], inputs[1, 3:] = INPUTS, INPUTS
    targets = jnp.asarray(np.stack([TARGETS] * 2))
    found = jax.jit(model.apply)(variables, jnp.asarray(inputs), targets)
    expected = logits(TENSORS, INPUTS, TARGETS)
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


def test_t5gemma2_computes_what_its_definition_says(loaded):
    model, variables, vocabulary = loaded
    assert model.ids == SpecialIds(0, 1, 2) and from_json(to_json(model)) == model
    assert vocabulary.around_inputs == ([2], [])
    assert deviation(model, variables) < 1e-5


def test_scanned_layers_compute_the_same(loaded):
    model, variables, _ = loaded
    stacks = stacks_of(model)
    scanned = replace(model, **{name: replace(stack, scan=True) for name, stack in stacks.items()})
    params = {
        name: stack_layers(stack, variables["params"][name]) for name, stack in stacks.items()
    }
    assert "run_0" in params["encoder"], "the first two layers are equal"
    assert deviation(scanned, {"params": {**variables["params"], **params}}) < 1e-5


@pytest.mark.parametrize("window", [1, 2, 5])
def test_the_window_of_an_encoder_is_around_the_query(tmp_path, window):
    config = changed(encoder__text_config__sliding_window=window)
    model, variables, _ = load(make_folder(tmp_path, TENSORS, config), encoder_only=True)
    found = encode_tokens(variables, jnp.asarray(INPUTS)[None], model=model)[0]
    expected = states(TENSORS, INPUTS, config=config)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("kind", ["a whole model", "an encoder", "names of modules"])
def test_an_encoder_is_read_without_other_tensors(tmp_path, monkeypatch, loaded, kind):
    """Neither the tensors of the decoder nor those of the vision tower are read.

    Programs other than transformers save the encoder's tensors with the names of the modules.
    """
    tensors, config = TENSORS | IMAGES, CONFIG
    if kind == "an encoder":
        tensors = {
            name.removeprefix("model.encoder."): x
            for name, x in tensors.items()
            if ".decoder." not in name
        }
        config = encoder_config()
    elif kind == "names of modules":
        tensors = {
            re.sub(r"encoder\.(layers|norm|embed)", r"encoder.text_model.\1", name): x
            for name, x in tensors.items()
        }
    source = make_folder(tmp_path / "model", tensors, config)
    read = []

    def open_and_record(*arguments, **options):
        """Opens tensors that note when they are read."""
        return {
            name: tensor._replace(read=lambda i, n=name, t=tensor: read.append(n) or t.read(i))
            for name, tensor in open_weights(*arguments, **options).items()
        }

    monkeypatch.setattr(opening, "open_weights", open_and_record)
    alone = load(source, encoder_only=kind != "an encoder")
    assert read and not any("decoder." in n or "vision" in n or "modal" in n for n in read)
    found, expected = (encode(x, ["a text"], pool=False)[0] for x in (alone, loaded))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_exported_encoder_has_the_same_tensors(tmp_path):
    alone = load(make_folder(tmp_path / "model", TENSORS), encoder_only=True)
    back = tmp_path / "back"
    back.mkdir()
    write_folder(back, *alone)
    assert load(back).model == alone.model
    for name, x in load_file(back / "model.safetensors").items():
        np.testing.assert_array_equal(x, TENSORS[f"model.encoder.{name}"])


def test_decoding_takes_the_most_probable_tokens(loaded):
    model, variables, _ = loaded
    found = decode(variables, jnp.asarray(INPUTS)[None], model=model, max_length=8).tokens[0]
    row = [2]
    while len(row) < 9 and row[-1] != 1:
        row.append(int(logits(TENSORS, INPUTS, np.array(row))[-1].argmax()))
    assert found.tolist() == row[1:] + [0] * (9 - len(row))


def test_a_run_of_t5gemma2_is_exported_with_the_same_tensors(folder, loaded, tmp_path):
    ids = {"eos_token_id": [1, 106], "pad_token_id": 0, "bos_token_id": 2}
    source = make_folder(tmp_path / "model", TENSORS | IMAGES)
    (source / "generation_config.json").write_text(json.dumps(ids))
    convert_checkpoint(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")

    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == TENSORS.keys()
    for name, x in TENSORS.items():
        np.testing.assert_array_equal(back[name], x)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    for stack, given in (
        (written["encoder"]["text_config"], CONFIG["encoder"]["text_config"]),
        (written["decoder"], CONFIG["decoder"]),
    ):
        assert {**given, "eos_token_id": [1, 106]}.items() <= stack.items()
    assert written["encoder"]["eoi_token_index"] == END_OF_IMAGE

    again = load(tmp_path / "back")
    assert again.model == replace(loaded.model, ids=SpecialIds(0, 1, 2, also_end=(106,)))
    texts = (generate(x, ["a run"], max_length=3) for x in (again, loaded))
    assert next(texts) == next(texts)
    card = (tmp_path / "back" / "README.md").read_text()
    assert "This is a T5Gemma 2, which was converted" in card


def test_other_alignments_start_as_t5gemma2(folder, tmp_path):
    convert_checkpoint(folder, tmp_path / "run", encoder="rv", decoder="rv", max_length=16)
    model, variables, _ = load(tmp_path / "run")
    assert deviation(model, variables) < 1e-5


ROPE = "encoder__text_config__rope_parameters"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"decoder__layer_types": ["full_attention", "chunked_attention"]},
            "decoder.layer_types is ('full_attention', 'chunked_attention'), but",
        ),
        (
            {"decoder__layer_types": ["full_attention"]},
            "decoder.layer_types has 1 entries, but decoder.num_hidden_layers is 2",
        ),
        (
            {f"{ROPE}__full_attention": {"rope_type": "yarn", "factor": 2.0}},
            "encoder.text_config.rope_parameters.full_attention.rope_type is 'yarn', but it must "
            "be one of 'default', 'linear'",
        ),
        (
            {f"{ROPE}__full_attention": {"type": "linear"}},
            "rope_parameters.full_attention has the rope_type 'linear', but no factor",
        ),
        (
            {ROPE: {"rope_type": "default"}},
            "rope_parameters may only have the keys full_attention and sliding_attention",
        ),
        (
            {"decoder__hidden_size": 32},
            "encoder.text_config.hidden_size is 24 and decoder.hidden_size is 32, but the stacks",
        ),
        (
            {"decoder__vocab_size": 700},
            "encoder.text_config.vocab_size is 600 and decoder.vocab_size is 700, but the stacks",
        ),
        (
            {"decoder__attn_logit_softcapping": 50.0},
            "decoder.attn_logit_softcapping is 50.0, but it must be None",
        ),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, but a T5Gemma 2 has only"),
        (
            {"architectures": ["T5Gemma2ForTokenClassification"]},
            "a T5Gemma2ForTokenClassification is not supported",
        ),
        (
            {"encoder__text_config": None},
            "it describes a vision tower and no text model. Give the folder of a T5",
        ),
        ({"model_type": "siglip_vision_model"}, "which is a vision tower, which reads images"),
    ],
)
def test_a_configuration_that_is_not_supported_is_refused(tmp_path, fields, message):
    (tmp_path / "config.json").write_text(json.dumps(changed(**fields)))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_older_names_of_rotary_settings_are_read(tmp_path, loaded):
    """Configurations in the format of version 4 have one entry for each setting."""
    config = copy.deepcopy(CONFIG)
    for c in (config["encoder"]["text_config"], config["decoder"]):
        del c["rope_parameters"]
        c["rope_scaling"] = {"rope_type": "linear", "factor": 3.0}
        c["rope_theta"] = 1000.0
        c["rope_local_base_freq"] = 100.0
    assert load(make_folder(tmp_path, TENSORS, config)).model == loaded.model


def test_weights_that_do_not_fit_are_refused(tmp_path):
    source = make_folder(tmp_path, IMAGES)
    with pytest.raises(ValueError, match=r"contains only the weights of a vision tower.*Give the"):
        load(source)

    copies = {
        "model.decoder.embed_tokens.weight": "model.encoder.embed_tokens.weight",
        "lm_head.out_proj.weight": "model.encoder.embed_tokens.weight",
        "model.decoder.embed_tokens.eoi_embedding": "model.encoder.embed_tokens.eoi_embedding",
    }
    equal = TENSORS | {copy: TENSORS[name] for copy, name in copies.items()}
    load(make_folder(tmp_path, equal))
    for copy_of, name in copies.items():
        save_file(equal | {copy_of: 2 * TENSORS[name]}, source / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{copy_of} is not equal to {name}, but a T5Gemma 2"):
            load(source)
        load(source, encoder_only=True)
