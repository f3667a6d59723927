"""Tokenizers of folders become vocabularies, or one sentence."""

import json

from synthesizer_jax.data.vocabularies import Bytes, train_sentencepiece
from synthesizer_jax.pretrained.huggingface import tokenizer

PIECES = [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["▁a", -1.0], ["b", -2.0], ["▁", -3.0]]
ADDED = [{"id": i, "content": PIECES[i][0]} for i in range(3)] + [
    {"id": 6, "content": "<extra_id_1>"},
    {"id": 7, "content": "<extra_id_0>"},
]
GOOD = {"model": {"type": "Unigram", "vocab": PIECES, "unk_id": 2}, "added_tokens": ADDED}


def test_a_tokenizer_is_read_with_its_sentinels(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOOD))
    vocabulary = tokenizer.read_vocabulary(tmp_path, tmp_path).build()
    assert vocabulary.vocab_size == 8
    assert vocabulary.encode("ab <extra_id_0> a") == [3, 4, 7, 3]
    assert vocabulary.encode("<extra_id_1>") == [6]


def test_sentinels_among_the_pieces_are_found_as_such(tmp_path):
    """As version 5 saves what was exported here."""
    model = GOOD["model"] | {"vocab": [*PIECES, ["▁<extra_id_0>", 0.0]]}
    good = {"model": model, "added_tokens": ADDED[:3]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(good))
    vocabulary = tokenizer.read_vocabulary(tmp_path, tmp_path).build()
    assert vocabulary.encode("ab <extra_id_0>b") == [3, 4, 6, 4]
    assert vocabulary.decode([3, 6]) == "a <extra_id_0>"


def test_sentinels_are_added_where_there_are_none(tmp_path):
    named = tokenizer.named_vocabulary
    assert named("bytes") == Bytes(125) and named("bytes", 7) == Bytes(7)
    plain, with_sentinels = tmp_path / "plain.model", tmp_path / "sentinels.model"
    train_sentencepiece(["a b c", "b c d"] * 9, plain, vocab_size=9)
    (tmp_path / "tokenizer.json").write_text(json.dumps(GOOD))
    with_sentinels.write_bytes(tokenizer.sentencepiece_model(tmp_path / "tokenizer.json"))
    assert named(str(plain)).extra_ids == 100
    assert named(str(with_sentinels)).extra_ids == 0
