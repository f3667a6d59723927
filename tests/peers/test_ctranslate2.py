"""Tests that CTranslate2 can decode with the files of `export`, as in docs/serving.md."""

import json

import ctranslate2
import numpy as np
import pytest

from synthesizer_jax.data.vocabularies import SentencePiece, train_sentencepiece
from synthesizer_jax.inference import decode
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from tests.conftest import ROOT, snippets
from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1, FLAN-T5", "mT5", "UL2"])
def test_greedy_tokens_are_equal(tmp_path, monkeypatch, family):
    monkeypatch.chdir(tmp_path)
    words = (ROOT / "docs" / "serving.md").read_text().splitlines()
    train_sentencepiece(words, tmp_path / "own.model", vocab_size=250)
    config = TINY | FAMILIES[family]
    folder = make_folder(tmp_path / "folder", config, make_tensors(config))
    convert_checkpoint(
        folder, tmp_path / "run", vocabulary=SentencePiece(str(tmp_path / "own.model"), 100)
    )
    export_run(tmp_path / "run", tmp_path / "cola-t5")
    ctranslate2.converters.TransformersConverter("cola-t5").convert("cola-ct2")
    names: dict = {}
    exec(snippets("docs/serving.md")[-1], names)
    model, variables, vocabulary = load(tmp_path / "run")
    ids = json.loads((tmp_path / "cola-ct2" / "shared_vocabulary.json").read_text())
    texts = ("one text", "another")
    for text, result, answer in zip(texts, names["results"], names["answers"], strict=True):
        inputs = np.array([[*vocabulary.encode(text), 1]])
        (tokens,) = decode(variables, inputs, model=model, max_length=84).tokens.tolist()
        theirs = [ids.index(piece) for piece in result.hypotheses[0]]
        assert theirs == tokens[: [*tokens, 1].index(1)]
        assert names["pieces"].decode(result.hypotheses[0]) == answer
