"""T5 as a text encoder: rows of fixed length, folders of diffusers, the encoder's tensors alone."""

import numpy as np
import pytest

from synthesizer_jax.pretrained import encode, load
from tests.pretrained.folders import FAMILIES, TINY, logits, make_folder, make_tensors

TEXTS = ["a cat", "a longer prompt of a dog"]


@pytest.mark.parametrize("family", ["T5 1.1, FLAN-T5", "umT5"])
@pytest.mark.parametrize("attend_to_padding", [True, False])
def test_padded_texts_have_the_states_of_transformers(tmp_path, family, attend_to_padding):
    """Without an attention mask and with one, at padded positions too; cut, as they ever were."""
    config = TINY | FAMILIES[family]
    loaded = load(make_folder(tmp_path, config, tensors := make_tensors(config)))
    options = {"pad_to": 16, "attend_to_padding": attend_to_padding}
    found = encode(loaded, TEXTS, **options)
    assert found.shape == (2, 16, 20)
    for text, states, pooled in zip(TEXTS, found, encode(loaded, TEXTS, pool=True, **options), strict=True):
        ids = np.array([*loaded.vocabulary.encode(text)[:15], 1])
        real, rows = len(ids), np.pad(ids, (0, 16 - len(ids)))
        expected = logits(config, tensors, rows, None, real=None if attend_to_padding else real)
        assert np.abs(states - expected).max() < 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(pooled, states[:real].mean(0), atol=1e-6)
        if not attend_to_padding:
            (cut,) = encode(loaded, [text], inputs_length=16, pool=False)
            np.testing.assert_allclose(cut, states[:real], atol=1e-5)
    with pytest.raises(ValueError, match="give pad_to too"):
        encode(loaded, TEXTS, attend_to_padding=True)
