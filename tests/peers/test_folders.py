"""Tests all kinds of model folders, and tokenizers. `make test-peers` runs these tests."""

import importlib
import json
import pathlib

import pytest
import transformers

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.pretrained.huggingface.export import _write_tokenizer
from synthesizer_jax.pretrained.huggingface.tokenizer import read_vocabulary
from tests.peers.test_transformers import ODD
from tests.pretrained.gemma import CONFIGS, make_folder

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_kind_computes_what_transformers_computes(tmp_path, monkeypatch):
    """Every kind of folder gives the same outputs as in transformers.

    The kinds are the rows of the table in docs/finetune.md.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for row in importlib.import_module("pretrained").rows(tmp_path):
        assert row["in"] <= 1e-5 and row["out"] <= 1e-5 and "no" not in row.values(), row


@pytest.mark.parametrize("older", [False, True])
def test_codet5s_tokenizer_gives_the_same_ids(tmp_path, monkeypatch, older):
    """CodeT5's tokenizer gives the same ids as in transformers.

    The tokenizer is read from ``tokenizer.json``, or from ``vocab.json`` and ``merges.txt``.

    After an export, it still gives the same ids.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module("pretrained").write_byte_level(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    if older:
        (tmp_path / "tokenizer.json").unlink()
        added = {f"<extra_id_{i}>": 599 - i for i in range(100)}
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    vocabulary = read_vocabulary(tmp_path, tmp_path, ids=SpecialIds(0, 2, 0)).build()
    exported = tmp_path / "exported"
    exported.mkdir()
    _write_tokenizer(exported, vocabulary, SpecialIds(0, 2, 0))
    written = transformers.RobertaTokenizer.from_pretrained(exported)
    assert vocabulary.vocab_size == len(tokenizer) == len(written) == 600
    first, last = vocabulary.around_inputs
    for text in ODD:
        ids = vocabulary.encode(text)
        assert written.decode(ids) == vocabulary.decode(ids)
        if "<s>" not in text and "<mask>" not in text:  # transformers finds these tokens in a text
            for theirs in (tokenizer, written):
                assert theirs(text).input_ids == [*first, *ids, *last], text


@pytest.mark.parametrize("saved", [False, True])
def test_gemmas_tokenizer_gives_the_same_ids(tmp_path, saved):
    """Gemma's tokenizer gives the same ids as in transformers.

    The tokenizer is read from its SentencePiece model, or from ``tokenizer.json``.
    """
    folder = make_folder(tmp_path / "a", CONFIGS["balanced"], {})
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if saved:
        tokenizer.save_pretrained(tmp_path / "b")
        folder = tmp_path / "b"
    vocabulary = read_vocabulary(folder, tmp_path, ids=SpecialIds(0, 1, 2)).build()
    assert vocabulary.vocab_size == len(tokenizer) == 600
    for text in ODD:
        first, last = vocabulary.around_inputs
        assert tokenizer(text).input_ids == [*first, *vocabulary.encode(text), *last], text
