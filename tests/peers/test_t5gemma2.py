"""Compares T5Gemma 2 with transformers 5. `make test-peers` runs these tests.

The adapters of a T5Gemma 2 are tested in test_peft.py.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import replace
from synthesizer_jax.inference import decode, encode_tokens
from synthesizer_jax.models.t5gemma2 import SIZES, T5Gemma2Size, window_pattern
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.huggingface.export import write_folder
from tests.models.test_structures import parameters
from tests.peers.test_transformers import TOLERANCE, compare_logits, load_reference, make_model
from tests.pretrained import gemma2

if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("transformers 4 has no T5Gemma 2", allow_module_level=True)

INPUTS = np.random.default_rng(0).integers(3, gemma2.VOCAB_SIZE, (3, 20))
INPUTS[0, 5] = gemma2.END_OF_IMAGE
INPUTS[1, 13:] = 0
TARGETS = np.random.default_rng(1).integers(3, gemma2.VOCAB_SIZE, (3, 16))
TARGETS[:, 0] = 2
TARGETS[2, 3] = gemma2.END_OF_IMAGE
"""Inputs and targets are several times as long as the windows."""


@pytest.fixture(scope="module")
def reference():
    return make_model(copy.deepcopy(gemma2.CONFIG))


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("t5gemma2") / "model"
    reference.save_pretrained(path)
    gemma2.write_tokenizer(path)
    return path


def logits(model, inputs=INPUTS, targets=TARGETS):
    """Returns the logits of transformers."""
    arguments = {
        "input_ids": torch.as_tensor(inputs),
        "attention_mask": torch.as_tensor(inputs != 0).long(),
        "decoder_input_ids": torch.as_tensor(targets),
    }
    with torch.no_grad():
        return model(**arguments).logits.numpy()


def check(loaded, model):
    """Compares the logits of a model of this package with those of transformers."""
    expected = logits(model)
    tokens = jnp.asarray(INPUTS, jnp.int32), jnp.asarray(TARGETS, jnp.int32)
    found = jax.jit(loaded.model.apply)(loaded.variables, *tokens)
    assert np.abs(np.asarray(found) - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("window", [1, 4, 5])
def test_logits_are_the_same(tmp_path, window):
    config = copy.deepcopy(gemma2.CONFIG)
    config["encoder"]["text_config"]["sliding_window"] = window
    config["decoder"]["sliding_window"] = window + 1
    model = make_model(config)
    model.save_pretrained(tmp_path)
    gemma2.write_tokenizer(tmp_path)
    check(load(tmp_path), model)


def test_an_exported_model_is_the_same(reference, folder, tmp_path):
    loaded = load(folder)
    write_folder(tmp_path, *loaded)
    again = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    np.testing.assert_array_equal(logits(again), logits(reference))


def test_an_encoder_has_the_same_states(reference, folder, tmp_path):
    """The encoder is in a folder of its own, or in the folder of the whole model."""
    encoder = reference.get_encoder()
    real = INPUTS != 0
    with torch.no_grad():
        expected = encoder(
            input_ids=torch.as_tensor(INPUTS), attention_mask=torch.as_tensor(real).long()
        ).last_hidden_state.numpy()
    encoder.save_pretrained(tmp_path / "encoder")
    gemma2.write_tokenizer(tmp_path / "encoder")
    for loaded in (load(folder, encoder_only=True), load(tmp_path / "encoder")):
        found = encode_tokens(loaded.variables, jnp.asarray(INPUTS), model=loaded.model)
        assert np.abs(found - expected)[real].max() <= TOLERANCE * np.abs(expected[real]).max()

    back = tmp_path / "back"
    back.mkdir()
    write_folder(back, *loaded)
    # A `T5Gemma2Encoder` that is loaded alone takes 256,000 as the id of the end of an image.
    again = load_reference(back, loaded.model)
    assert isinstance(again, type(encoder))
    again.text_model.embed_tokens.eoi_token_index = gemma2.END_OF_IMAGE
    compare_logits(again, loaded.model, loaded.variables)


def test_decoded_ids_are_the_same(reference, folder):
    """Decoding ends at any of two EOS ids, and rows are longer than the windows."""
    loaded = load(folder)
    with torch.no_grad():
        generated = reference.generate(
            torch.as_tensor(INPUTS),
            attention_mask=torch.as_tensor(INPUTS != 0).long(),
            max_new_tokens=12,
            do_sample=False,
        ).numpy()[:, 1:]
    # Let decoding end at a token that the first row contains.
    end = int(generated[0, 6])
    with torch.no_grad():
        generated = reference.generate(
            torch.as_tensor(INPUTS),
            attention_mask=torch.as_tensor(INPUTS != 0).long(),
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=[1, end],
        ).numpy()[:, 1:]
    model = replace(loaded.model, ids=SpecialIds(0, 1, 2, also_end=(end,)))
    found = decode(loaded.variables, jnp.asarray(INPUTS), model=model, max_length=12).tokens
    assert (generated[0, 7:] == 0).all() and end in generated[0]
    np.testing.assert_array_equal(np.asarray(found)[:, : generated.shape[1]], generated)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_have_the_same_numbers_of_parameters(name):
    """The parameters that texts need are counted on PyTorch's meta device."""
    size: T5Gemma2Size = SIZES[name]
    text = {
        "vocab_size": 262_144,
        "hidden_size": size.d_model,
        "intermediate_size": size.d_ff,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": 256,
        "sliding_window": size.window,
    }
    config = transformers.T5Gemma2Config(
        encoder={"text_config": text, "vision_config": gemma2.VISION, "mm_tokens_per_image": 4},
        decoder=text,
    )
    with torch.device("meta"):
        model = transformers.T5Gemma2ForConditionalGeneration(config)
    of_images = ("model.encoder.vision_tower.", "model.encoder.multi_modal_projector.")
    count = sum(x.numel() for n, x in model.named_parameters() if not n.startswith(of_images))
    assert count == parameters(f"t5gemma2_{name}")
    kinds = ("sliding_attention" if w else "full_attention" for w in window_pattern(size.layers))
    assert config.decoder.layer_types == list(kinds)
