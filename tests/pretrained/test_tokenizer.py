"""Tokenizers of folders become vocabularies, or one sentence."""

import functools
import json
import pathlib

import pytest

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.data.stop_strings import stop_table
from synthesizer_jax.data.vocabularies import Bytes, train_sentencepiece
from synthesizer_jax.pretrained.huggingface import tokenizer
from synthesizer_jax.serving.programs import write_directory
from synthesizer_jax.tasks.seqio_tasks import seqio_vocabulary

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


MERGES = ("t h", "th e", "Ġ the", "o n", "' t", "on '", "Ġ 1", "Ġ Ġ", "Ã ©", "é 1", "Ċ Ċ", "<0x0 A>")
CODET5 = SpecialIds(padding=0, end=2, start=0)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a BPE of bytes in two files, one sentinel, and pieces that no word has."""
    folder = tmp_path_factory.mktemp("codet5")
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]  # Radford et al.'s encoder.py
    characters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    pieces = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *sorted(characters)]
    pieces += [merge.replace(" ", "") for merge in MERGES]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    (folder / "added_tokens.json").write_text(json.dumps({"<extra_id_0>": len(pieces)}))
    return folder


BYTE_LEVEL_TEXTS = {
    "the other": ["the", "Ġ", "o", "the", "r"],
    "on't": ["on", "'t"],  # two words, though "on'" is a piece
    "x 1²1": ["x", "Ġ1", "Â", "²", "1"],  # numbers
    "é1": ["Ã©", "1"],  # a letter and a number
    "a   the": ["a", "ĠĠ", "Ġthe"],  # the last of several spaces belongs to the word
    "a \n\n": ["a", "Ġ", "ĊĊ"],
    "<s>": ["<", "s", ">"],
    "on \t<extra_id_0>\n1": ["on", "▁<extra_id_0>", "Ċ", "1"],  # spaces before a sentinel are dropped
    "": [],
}


def test_a_bpe_of_bytes_is_read(byte_level, tmp_path):
    vocabulary = tokenizer.read_vocabulary(byte_level, tmp_path, ids=CODET5).build()
    vocabulary.check_ids(CODET5)
    assert vocabulary.vocab_size == 5 + 256 + len(MERGES) + 1
    assert vocabulary.around_inputs == ([1], [2])
    for text, pieces in BYTE_LEVEL_TEXTS.items():
        ids = vocabulary.encode(text)
        assert list(map(vocabulary.processor.IdToPiece, ids)) == pieces
        assert vocabulary.decode([1, *ids, 2, 7]) == text.replace(" \t<", "<")
    accent = vocabulary.encode("é")[0]
    assert vocabulary.token_bytes(accent + 1, first=False)[accent] == "é".encode()
    with pytest.raises(ValueError, match=r"a BPE of bytes cannot be exported; .* or leave out --to"):
        write_directory(tmp_path, None, {}, vocabulary, limits=None)
    half = vocabulary.encode("²")[:1]
    assert vocabulary.decode(half) == "\ufffd"
    assert stop_table(vocabulary, ["é1"], vocabulary.vocab_size).shape == (5, vocabulary.vocab_size)


def test_spaces_before_a_sentinel_stay_where_its_token_says_so(byte_level, tmp_path):
    read = functools.partial(tokenizer.read_vocabulary, scratch=tmp_path, ids=CODET5)
    data = json.loads(tokenizer.tokenizer_json(read(byte_level)))
    data["added_tokens"][0]["lstrip"] = False
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps(data))
    vocabulary = read(tmp_path / "saved").build()
    ids = vocabulary.encode("1 <extra_id_0>")
    assert list(map(vocabulary.processor.IdToPiece, ids)) == ["1", "Ġ", "<extra_id_0>"]
    assert vocabulary.decode(ids) == "1 <extra_id_0>"


def test_tokens_that_were_added_to_a_sentencepiece_file_are_refused(tmp_path):
    train_sentencepiece(["a b c", "b c d"] * 9, tmp_path / "spiece.model", vocab_size=9)
    for file, fields in (
        ("tokenizer_config.json", {"added_tokens_decoder": {"109": {"content": "<sep>"}}}),
        ("added_tokens.json", {"<extra_id_0>": 108, "<sep>": 109}),
    ):
        (tmp_path / file).write_text(json.dumps(fields))
        with pytest.raises(ValueError, match=r"cannot be read: it adds '<sep>'.*; put the"):
            tokenizer.read_vocabulary(tmp_path, tmp_path)
        (tmp_path / file).write_text("{}")
    assert tokenizer.read_vocabulary(tmp_path, tmp_path).extra_ids == 100


def test_seqio_gives_texts_the_same_ids(byte_level, tmp_path):
    vocabulary = tokenizer.read_vocabulary(byte_level, tmp_path, ids=CODET5).build()
    theirs, texts = seqio_vocabulary(vocabulary), list(BYTE_LEVEL_TEXTS)
    expected = [vocabulary.encode(text) for text in texts]
    assert theirs.encode_tf(texts).to_list() == expected == list(map(theirs.encode, texts))
    assert theirs.encode_tf(texts[0]).numpy().tolist() == expected[0]
    padded = theirs.encode_tf(texts[:2]).to_tensor()
    assert [x.decode() for x in theirs.decode_tf(padded).numpy()] == texts[:2]
