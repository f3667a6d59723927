"""Tests T5Gemma by comparing it with NumPy code that follows its public definition."""

import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import from_json, replace, to_json
from synthesizer_jax.inference import decode
from synthesizer_jax.models import stack_layers, stacks_of
from synthesizer_jax.pretrained import Loaded, encode, generate, load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from tests.pretrained.gemma import CONFIGS, logits, make_folder, make_tensors

INPUTS = np.array([2, 9, 50, 7, 88, 31, 6, 12, 40])
TARGETS = np.array([2, 30, 8, 77, 5, 60, 11])
"""Inputs and targets are longer than the windows of the layers."""


class Case(NamedTuple):
    folder: object
    config: dict
    tensors: dict
    loaded: Loaded


both = pytest.mark.parametrize("case", CONFIGS, indirect=True)
"""A mark for tests of both models.

Tests without it use the model whose stacks differ, which has everything that the other one has.
"""


@pytest.fixture(scope="module", params=["unbalanced"])
def case(request, tmp_path_factory):
    config = CONFIGS[request.param]
    folder = tmp_path_factory.mktemp("t5gemma")
    make_folder(folder, config, tensors := make_tensors(config))
    return Case(folder, config, tensors, load(folder))


def deviation(model, variables, case):
    """Returns the largest deviation in two rows, divided by the largest logit.

    One of the rows is padded on the left.
    """
    inputs = np.zeros((2, 12), np.int32)
    inputs[0, :9], inputs[1, 3:] = INPUTS, INPUTS
    targets = jnp.asarray(np.stack([TARGETS] * 2))
    found = jax.jit(model.apply)(variables, jnp.asarray(inputs), targets)
    expected = logits(case.config, case.tensors, INPUTS, TARGETS)
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@both
def test_t5gemma_computes_what_its_definition_says(case):
    model, variables, vocabulary = case.loaded
    assert model.ids == SpecialIds(0, 1, 2) and from_json(to_json(model)) == model
    assert vocabulary.around_inputs == ([2], []) and vocabulary.vocab_size == 600
    assert deviation(model, variables, case) < 1e-5
    alone = load(case.folder, encoder_only=True)
    states = [encode(loaded, ["a"], pool=False)[0] for loaded in (alone, case.loaded)]
    np.testing.assert_allclose(*states, atol=1e-6)


def test_scanned_layers_compute_the_same(case):
    model, variables, _ = case.loaded
    stacks = stacks_of(model)
    scanned = replace(model, **{name: replace(stack, scan=True) for name, stack in stacks.items()})
    params = {
        name: stack_layers(stack, variables["params"][name]) for name, stack in stacks.items()
    }
    assert deviation(scanned, {"params": {**variables["params"], **params}}, case) < 1e-5


def test_decoding_takes_the_most_probable_tokens(case):
    model, variables, _ = case.loaded
    found = decode(variables, jnp.asarray(INPUTS)[None], model=model, max_length=8).tokens[0]
    row = [2]
    while len(row) < 9 and row[-1] != 1:
        row.append(int(logits(case.config, case.tensors, INPUTS, np.array(row))[-1].argmax()))
    assert found.tolist() == row[1:] + [0] * (9 - len(row))


@both
def test_a_run_of_t5gemma_is_exported_with_the_same_tensors(case, tmp_path):
    convert_checkpoint(case.folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == case.tensors.keys()
    for name, x in case.tensors.items():
        np.testing.assert_array_equal(back[name], x)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    for stack in ("encoder", "decoder"):
        assert (
            case.config[stack].items() <= {**written[stack], "max_position_embeddings": 64}.items()
        )
    again = load(tmp_path / "back")
    assert again.model == case.loaded.model
    assert generate(again, ["a run"], max_length=3) == generate(
        case.loaded, ["a run"], max_length=3
    )


def test_other_alignments_start_as_t5gemma(case, tmp_path):
    convert_checkpoint(case.folder, tmp_path / "run", encoder="rv", max_length=16)
    model, variables, _ = load(tmp_path / "run")
    assert deviation(model, variables, case) < 1e-5
    with pytest.raises(
        ValueError, match=r"encoder\.layers\.0\.self_mixer\.alignment is 'Mixture', which"
    ):
        export_run(tmp_path / "run", tmp_path / "back")


def test_positions_with_another_scaling_are_refused(tmp_path):
    config = CONFIGS["balanced"]
    folder = make_folder(tmp_path / "model", config, make_tensors(config))
    for field in ("rope_parameters", "rope_scaling"):
        for rope, message in (
            ({"rope_type": "yarn", "factor": 2.0}, f"decoder.{field}.rope_type is 'yarn'"),
            ({"type": "dynamic"}, f"decoder.{field}.rope_type is 'dynamic'"),
            (
                {"rope_type": "linear"},
                f"decoder.{field} has the rope_type 'linear', but no factor",
            ),
            (
                {"rope_type": "default", "partial_rotary_factor": 0.5},
                "partial_rotary_factor is 0.5",
            ),
            (
                {"full_attention": {"rope_type": "default"}},
                f"decoder.{field} must be one set of settings",
            ),
        ):
            decoder = config["decoder"] | {field: rope}
            changed = config | {"model_type": "t5gemma", "decoder": decoder}
            (folder / "config.json").write_text(json.dumps(changed))
            with pytest.raises(ValueError, match=re.escape(message)):
                load(folder)


def test_a_tied_projection_with_other_values_is_refused(tmp_path):
    config = CONFIGS["balanced"]
    tensors = make_tensors(config)
    name = "lm_head.out_proj.weight"
    embedding = tensors["model.decoder.embed_tokens.weight"]
    folder = make_folder(tmp_path, config, tensors | {name: embedding})
    load(folder)
    make_folder(folder, config, tensors | {name: embedding * 1.01})
    with pytest.raises(
        ValueError, match=rf"{name} is not equal to model\.decoder.*Correct tie_word_emb"
    ):
        load(folder)
    load(folder, encoder_only=True)
