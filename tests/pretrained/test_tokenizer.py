"""Tests that tokenizers in folders are read as vocabularies, or refused with one sentence."""

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
from tests.pretrained import gemma

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
    """Sentinels are recognized even if they are among the normal pieces.

    Version 5 of transformers saves exported tokenizers in this way.
    """
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


MERGES = (
    "t h",
    "th e",
    "Ġ the",
    "o n",
    "' t",
    "on '",
    "Ġ 1",
    "Ġ Ġ",
    "Ã ©",
    "é 1",
    "Ċ Ċ",
    "<0x0 A>",
)
CODET5 = SpecialIds(padding=0, end=2, start=0)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a byte-level BPE tokenizer in two files.

    The tokenizer has one sentinel, and pieces that do not occur in any word.
    """
    folder = tmp_path_factory.mktemp("codet5")
    # These ranges are from encoder.py of Radford et al.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    pieces = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", *sorted(characters)]
    pieces += [merge.replace(" ", "") for merge in MERGES]
    (folder / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(pieces)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    (folder / "added_tokens.json").write_text(json.dumps({"<extra_id_0>": len(pieces)}))
    return folder


BYTE_LEVEL_TEXTS = {
    "the other": ["the", "Ġ", "o", "the", "r"],
    "on't": ["on", "'t"],  # two words, although "on'" is also a piece
    "x 1²1": ["x", "Ġ1", "Â", "²", "1"],  # numbers
    "é1": ["Ã©", "1"],  # a letter and a number
    "a   the": ["a", "ĠĠ", "Ġthe"],  # the last space belongs to the word
    "a \n\n": ["a", "Ġ", "ĊĊ"],
    "<s>": ["<", "s", ">"],
    # Spaces before a sentinel are removed.
    "on \t<extra_id_0>\n1": ["on", "▁<extra_id_0>", "Ċ", "1"],
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
    with pytest.raises(
        ValueError, match=r"of the kind byte-level BPE cannot be exported\. .* or leave out --to"
    ):
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


SEP = [{"id": 108, "content": "<extra_id_0>"}, {"id": 384, "content": "<sep>"}]


@pytest.mark.parametrize("kind", ["spiece.model", "tokenizer.model", "bytes", "tokenizer.json"])
def test_tokens_that_were_added_are_refused(tmp_path, kind):
    """Tokenizers with added tokens are refused.

    Versions 4 and 5 of transformers list added tokens in different files.

    Added tokens are found even if the folder also contains a SentencePiece file.
    """
    config = {"tokenizer_class": "ByT5Tokenizer"} if kind == "bytes" else {}
    if kind == "tokenizer.json":
        (tmp_path / kind).write_text(json.dumps(GOOD))
    elif kind != "bytes":
        train_sentencepiece(["a b c", "b c d"] * 9, tmp_path / kind, vocab_size=9)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    plain = tokenizer.read_vocabulary(tmp_path, tmp_path)
    for file, fields in (
        ("tokenizer_config.json", config | {"added_tokens_decoder": {"384": {"content": "<sep>"}}}),
        ("added_tokens.json", {"<extra_id_0>": 108, "<sep>": 384}),
        ("tokenizer.json", GOOD | {"added_tokens": [*ADDED, *SEP]}),
    ):
        if kind == "tokenizer.json" and file != kind:
            continue
        before = (tmp_path / file).read_text() if (tmp_path / file).is_file() else "{}"
        (tmp_path / file).write_text(json.dumps(fields))
        with pytest.raises(
            ValueError, match=r"it adds the token '<sep>'.* If your texts do not need this token"
        ):
            tokenizer.read_vocabulary(tmp_path, tmp_path)
        (tmp_path / file).write_text(before)
    assert tokenizer.read_vocabulary(tmp_path, tmp_path) == plain


def test_a_class_that_is_not_read_is_refused(tmp_path):
    train_sentencepiece(["a b c", "b c d"] * 9, tmp_path / "spiece.model", vocab_size=9)
    names = [
        *tokenizer.CLASSES,
        "T5TokenizerFast",
        "PreTrainedTokenizerFast",
        "TokenizersBackend",
        None,
    ]
    for name in names:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        assert tokenizer.read_vocabulary(tmp_path, tmp_path) is not None
    for name in ("LlamaTokenizer", "LlamaTokenizerFast", "XLMRobertaTokenizer", "BertTokenizer"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(
            ValueError, match=f"tokenizer_class in .* is '{name}', but only the classes"
        ):
            tokenizer.read_vocabulary(tmp_path, tmp_path)


def test_other_tokens_around_a_text_are_refused(tmp_path):
    gemma.write_tokenizer(tmp_path)
    read = functools.partial(tokenizer.read_vocabulary, tmp_path, tmp_path)
    for fields in ({}, {"add_bos_token": True}, {"add_eos_token": False}, {"add_bos_token": None}):
        fields = {"tokenizer_class": "GemmaTokenizerFast"} | fields
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
        assert read().bos
    for field, value in (("add_bos_token", False), ("add_eos_token", True)):
        for name in ("GemmaTokenizer", "TokenizersBackend"):
            fields = {"tokenizer_class": name, field: value}
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
            with pytest.raises(
                ValueError,
                match=f"{field} in .* is {value}, but a model of this package reads texts with BOS",
            ):
                read()
    scratch = tmp_path / "scratch"
    for folder in (scratch, tmp_path / "t5"):
        folder.mkdir()
    text, special = {"Sequence": {}}, {"SpecialToken": {}}
    good = {tmp_path / "t5": [text, special], tmp_path: [special, text]}
    (tmp_path / "tokenizer_config.json").unlink()
    for folder, expected in good.items():
        for single in (expected, [text], [special, text, special]):
            template = {"post_processor": {"type": "TemplateProcessing", "single": single}}
            (folder / "tokenizer.json").write_text(json.dumps(GOOD | template))
            if single == expected:
                assert tokenizer.read_vocabulary(folder, scratch) is not None
                continue
            with pytest.raises(ValueError, match=r"post_processor must put only [BE]OS"):
                tokenizer.read_vocabulary(folder, scratch)


def test_seqio_gives_texts_the_same_ids(byte_level, tmp_path):
    vocabulary = tokenizer.read_vocabulary(byte_level, tmp_path, ids=CODET5).build()
    theirs = seqio_vocabulary(vocabulary)
    texts = list(BYTE_LEVEL_TEXTS)
    expected = [vocabulary.encode(text) for text in texts]
    assert theirs.encode_tf(texts).to_list() == expected == list(map(theirs.encode, texts))
    assert theirs.encode_tf(texts[0]).numpy().tolist() == expected[0]
    padded = theirs.encode_tf(texts[:2]).to_tensor()
    assert [x.decode() for x in theirs.decode_tf(padded).numpy()] == texts[:2]
