"""Tests that folders of transformers can be read and exported, unchanged or after training.

The output projection of a model depends on two fields of ``config.json``, on the version of
transformers, and on whether a tensor exists. The function `projection` implements the rule, and
tests/peers compares it with transformers.
"""

import itertools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.opening import open_pretrained, read_params
from synthesizer_jax.primitives.parameters import apply_method
from tests.pretrained.folders import TINY, make_folder, make_tensors

OUTPUT = "lm_head.weight"
WRITTEN_BY = {4: "4.57.6", 5: "5.23.0"}
DEFAULTS = {
    "t5": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "mt5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "umt5": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": True},
}
SMALL = TINY | {"vocab_size": 40, "num_layers": 1, "num_decoder_layers": 1}
SMALL |= {"relative_attention_max_distance": 128}


def make_configs(family):
    """Yields configurations of a family of models, each with its tensors.

    The configurations cover versions 4 and 5 of transformers, T5 1.0 and T5 1.1, and all flags.
    """
    flags = (None, True, False)
    ways = itertools.product(
        WRITTEN_BY, flags, flags if family == "t5" else (None,), ("", "copy", "own")
    )
    for i, (version, tied, scaled, output) in enumerate(ways):
        config = SMALL | {"model_type": family, "transformers_version": WRITTEN_BY[version]}
        config |= {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled}
        config["feed_forward_proj"] = ("relu", "gated-gelu")[i % 2]
        tensors = make_tensors(config | {"tie_word_embeddings": output != "own"})
        if output == "copy":
            tensors[OUTPUT] = tensors["shared.weight"]
        if config["feed_forward_proj"] == DEFAULTS[family]["feed_forward_proj"]:
            del config["feed_forward_proj"]
        yield version, {k: v for k, v in config.items() if v is not None}, tensors


def projection(version, config, tensors):
    """Returns the matrix ``[vocab, d_model]`` by which transformers multiplies the outputs.

    The result is None if transformers uses none of the tensors. A umT5 with a separate output
    projection is read as it was trained, although version 5 of transformers also scales its
    outputs.
    """
    embedding = tensors["shared.weight"]
    own = tensors.get(OUTPUT)
    tied = config.get("tie_word_embeddings", DEFAULTS[config["model_type"]]["tie_word_embeddings"])
    differs = own is not None and not np.array_equal(own, embedding)
    if version == 4 and not tied:
        return own
    if version == 4 and differs:
        return None  # this tensor is dropped
    by_family = {"mt5": False, "umt5": not differs, "t5": config.get("scale_decoder_outputs", tied)}
    scaled = True if version == 4 else by_family[config["model_type"]]
    return (own if differs else embedding) * (config["d_model"] ** -0.5 if scaled else 1.0)


def applied(model, params):
    """Returns the matrix by which our model multiplies the outputs."""
    kernel, scale = apply_method(model.output_kernel, {"params": params})
    return np.asarray(kernel).T * scale


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_an_exported_folder_equals_its_source(tmp_path, family):
    taken = 0
    for i, (version, config, tensors) in enumerate(make_configs(family)):
        source = make_folder(tmp_path / str(i), config, tensors)
        # The tokenizer has more ids than these small embeddings have rows.
        (source / "tokenizer_config.json").unlink()
        expected = projection(version, config, tensors)
        if expected is None:
            refused = pytest.raises(ValueError, match=r"lm_head\.weight is (missing|not equal to)")
            with refused, open_pretrained(source):
                pass
            continue
        with open_pretrained(source) as pretrained:
            model = pretrained.model
            params = read_params(pretrained)
        np.testing.assert_allclose(applied(model, params), expected, rtol=1e-6)
        trained = jax.tree.map(lambda x: -2.0 * x, params)
        if "logits_kernel" in params:
            trained["logits_kernel"] = 3.0 * params["logits_kernel"]
        (folder := source / "back").mkdir()
        write_folder(folder, model, {"params": trained}, None)
        written = json.loads((folder / "config.json").read_text())
        back = load_file(folder / "model.safetensors")
        expected = applied(model, trained)
        # Version 5 of transformers always scales the outputs of a umT5, so only test version 4.
        for version in WRITTEN_BY if family != "umt5" else (4,):
            np.testing.assert_allclose(projection(version, written, back), expected, rtol=1e-6)
        assert all(np.array_equal(back[n], -2 * x) for n, x in tensors.items() if n != OUTPUT)
        with open_pretrained(folder) as again:
            found = applied(again.model, read_params(again))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        taken += 1
    assert taken > 8
