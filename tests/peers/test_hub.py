"""Tests that models in the cache of `huggingface_hub` are found by name, without a network."""

import jax
import numpy as np
import pytest
from huggingface_hub import constants

from synthesizer_jax.pretrained import load
from tests.pretrained.folders import TINY, make_folder, make_tensors

COMMIT = "0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab"


def test_models_are_read_from_the_cache_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "models--google--flan-t5-small"
    folder = make_folder(model / "snapshots" / COMMIT, TINY, make_tensors(TINY), shards=2)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    for revision in (None, "main", COMMIT):
        found = load("google/flan-t5-small", revision=revision)
        jax.tree.map(np.testing.assert_array_equal, found.variables, load(folder).variables)
    encoder = make_folder(
        folder / "text_encoder_2", TINY, make_tensors(TINY, seed=1), variant="fp16"
    )
    found = load("google/flan-t5-small/text_encoder_2", encoder_only=True, variant="fp16")
    expected = load(encoder, encoder_only=True, variant="fp16")
    jax.tree.map(np.testing.assert_array_equal, found.variables, expected.variables)
    for name, revision in (("google/flan-t5-small", "other"), ("google/t5-v1_1-small", None)):
        with pytest.raises(
            FileNotFoundError, match=r"hf download .*LocalEntryNotFoundError: Cannot find"
        ):
            load(name, revision=revision)
