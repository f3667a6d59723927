"""Tests all kinds of model folders, and tokenizers. `make test-peers` runs these tests."""

import importlib
import json
import pathlib

import pytest
import transformers

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.pretrained.huggingface.tokenizer import read_vocabulary
from tests.peers.test_transformers import ODD
from tests.pretrained.gemma import CONFIGS, make_folder
from tests.pretrained.tokenizers import random_texts, write_tokenizer

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_kind_computes_what_transformers_computes(tmp_path, monkeypatch):
    """Every kind of folder gives the same outputs as in transformers.

    The kinds are the rows of the table in docs/finetune.md.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for row in importlib.import_module("pretrained").rows(tmp_path):
        assert row["in"] <= 1e-5 and row["out"] <= 1e-5 and "no" not in row.values(), row


def test_tokenizers_of_the_library_give_the_same_ids(tmp_path, monkeypatch):
    """All kinds of tokenizers give the same ids as in transformers, before and after an export.

    The kinds are the rows of the second table in docs/finetune.md. Tokens were added to all of
    them. At least 5,000 texts are compared, and more if the real data sets are on this machine.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for row in importlib.import_module("pretrained").tokenizer_rows(tmp_path):
        assert row["texts"] == row["in"] == row["out"] >= 5000, row


NEW = {"content": "new"}
SPECIAL = {"content": "<z>", "special": True, "rstrip": True}


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"pad_token": "[PAD]", "extra_special_tokens": ["<a>", "<b>"]}},
        {"tokenizer_config": {"added_tokens_decoder": {"600": NEW, "601": SPECIAL}}},
        {"added_tokens": {"new": 600, "<c>": 601}, "special_tokens_map": {"pad_token": "<c>"}},
        {"tokenizer_config": {"split_special_tokens": True}},
        {"tokenizer_config": {"add_bos_token": True, "add_eos_token": True}},
    ],
)
def test_the_configuration_of_a_tokenizer_means_the_same(tmp_path, files):
    write_tokenizer(tmp_path, "LLaMA", added=False)
    (tmp_path / "config.json").write_text('{"model_type": "umt5"}')
    for name, fields in files.items():
        file = tmp_path / f"{name}.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.write_text(json.dumps(before | fields), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = read_vocabulary(tmp_path, tmp_path)
    assert ours.vocab_size == len(theirs)
    first, last = ours.around_inputs
    for text in ("new n <a><b> [PAD]<c> x <z>  y </s>", *random_texts(100)):
        assert theirs(text).input_ids == [*first, *ours.encode(text), *last], text


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
