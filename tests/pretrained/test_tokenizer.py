"""Tests that tokenizers in folders are read as vocabularies, or refused with one sentence."""

import builtins
import json
import pathlib
import pickle
import shutil
import sys

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.data.stop_strings import stop_table
from synthesizer_jax.data.tokenizer_json import Tokenizer
from synthesizer_jax.data.vocabularies import (
    BPE_OF_BYTES,
    Bytes,
    SentencePiece,
    train_sentencepiece,
)
from synthesizer_jax.pretrained.huggingface import tokenizer
from synthesizer_jax.tasks.seqio_tasks import seqio_vocabulary
from tests.pretrained import gemma
from tests.pretrained.tokenizers import ADDED as USERS
from tests.pretrained.tokenizers import KINDS, SENTINELS, random_texts, write_tokenizer

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


CODET5 = SpecialIds(padding=0, end=2, start=0)


@pytest.fixture(scope="module", params=KINDS)
def folder(tmp_path_factory: pytest.TempPathFactory, request) -> pathlib.Path:
    """A folder with a tokenizer of one kind, to which tokens were added."""
    path = tmp_path_factory.mktemp("tokenizer") / request.param
    write_tokenizer(path, request.param)
    return path


def test_a_tokenizer_is_read_with_its_added_tokens(folder, tmp_path):
    vocabulary = tokenizer.read_vocabulary(folder, tmp_path)
    assert vocabulary == Tokenizer(str(folder / "tokenizer.json"))
    assert vocabulary.vocab_size == 600 + len(USERS)
    for i, token in enumerate(USERS, 600):
        assert vocabulary.encode(f"{token.content} ")[:1] == [i] or token.content == "[NEW]"
    assert vocabulary.first_sentinel == 599
    # Sentinels are shown, and other special tokens are not.
    assert vocabulary.decode([599, 600, vocabulary.eos_id, 599]) == "<extra_id_0>"
    assert not vocabulary.is_text(600) and vocabulary.is_text(601)
    assert vocabulary.decode([10_000]) == ""
    first, last = vocabulary.around_inputs
    expected = {
        "LLaMA": ("", "</s>"),
        "LLaMA, legacy": ("<s>", ""),
        "T5": ("", "</s>"),
        "CodeT5": ("<s>", "</s>"),
        "Gemma": ("<bos>", ""),
        "WordPiece": ("[CLS]", "[SEP]"),
    }[folder.name]
    ids = [[vocabulary.backend.id_of(token)] if token else [] for token in expected]
    assert [first, last] == ids


def test_texts_come_back(folder):
    """All kinds keep the words of a text, and bytes keep all characters."""
    vocabulary = Tokenizer(str(folder / "tokenizer.json"))
    texts = ["a training run", "Ünïcödé, 日本語 😀!"]
    if folder.name in ("T5", "WordPiece"):
        texts = ["a training run"]
    for text in texts:
        assert vocabulary.decode([*vocabulary.encode(text), vocabulary.eos_id, 9]) == text


def test_the_bytes_of_tokens_are_those_of_the_text(folder):
    vocabulary = Tokenizer(str(folder / "tokenizer.json"))
    size = vocabulary.vocab_size
    first = vocabulary.token_bytes(size + 3, first=True)
    later = vocabulary.token_bytes(size + 3, first=False)
    assert later[size:] == [b""] * 3
    for text in ("a training run", "the loss, the loss", "naïve <extra_id_0> é"):
        ids = vocabulary.encode(text)
        found = first[ids[0]] + b"".join(later[i] for i in ids[1:])
        assert found.decode("utf-8", "replace") == vocabulary.decode(ids)
    table = stop_table(vocabulary, ["ing"], size)
    state = 0
    for i in vocabulary.encode("a training"):
        state = table[state, i]
    assert state == len(table) - 1


def test_seqio_gives_texts_the_same_ids(folder):
    vocabulary = Tokenizer(str(folder / "tokenizer.json"))
    theirs = seqio_vocabulary(vocabulary)
    assert theirs == seqio_vocabulary(vocabulary) and theirs.vocab_size == 600
    texts = ["", "a  b", *random_texts(20)]
    expected = [vocabulary.encode(text) for text in texts]
    assert theirs.encode_tf(texts).to_list() == expected == list(map(theirs.encode, texts))
    assert theirs.encode_tf(texts[3]).numpy().tolist() == expected[3]
    padded = theirs.encode_tf(texts[:2]).to_tensor()
    found = [x.decode() for x in theirs.decode_tf(padded).numpy()]
    assert found == list(map(vocabulary.decode, padded.numpy().tolist()))


def test_the_digest_depends_on_the_ids_and_not_on_the_path(tmp_path):
    digests = set()
    for kind in KINDS:
        write_tokenizer(tmp_path / kind, kind)
        vocabulary = Tokenizer(str(tmp_path / kind / "tokenizer.json")).build()
        digests.add(vocabulary.digest)
        # Worker processes read the files again.
        assert pickle.loads(pickle.dumps(vocabulary)).digest == vocabulary.digest
    shutil.copytree(tmp_path / "T5", tmp_path / "copy")
    assert len(digests) == len(KINDS)
    change_json(tmp_path / "copy" / "tokenizer_config.json", model_max_length=512)
    copy = Tokenizer(str(tmp_path / "copy" / "tokenizer.json"))
    assert copy.digest in digests
    change_json(tmp_path / "copy" / "tokenizer_config.json", split_special_tokens=True)
    split = Tokenizer(str(tmp_path / "copy" / "tokenizer.json"))
    assert split.digest not in digests
    assert copy.encode("<sep>") == [600] and 600 not in split.encode("<sep>")


def change_json(file: pathlib.Path, **fields: object) -> None:
    """Changes some fields of a JSON object in a file."""
    data = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps(data | fields), encoding="utf-8")


@pytest.mark.parametrize("kind", ["spiece.model", "tokenizer.model"])
def test_added_tokens_of_a_sentencepiece_model_need_a_tokenizer_json(tmp_path, kind):
    """The SentencePiece model is not used if the folder lists other tokens.

    Versions 4 and 5 of transformers list added tokens in different files.
    """
    folder = tmp_path / "folder"
    folder.mkdir()
    train_sentencepiece(["a b c", "b c d"] * 9, folder / kind, vocab_size=9)
    plain = tokenizer.read_vocabulary(folder, tmp_path)
    assert plain == SentencePiece(str(folder / kind))
    sep = {"content": "<sep>", "special": True}
    for file, fields in (
        ("tokenizer_config.json", {"added_tokens_decoder": {"109": sep}}),
        ("added_tokens.json", {"<extra_id_0>": 108, "<sep>": 109}),
    ):
        change_json(folder / file, **fields)
        with pytest.raises(
            ValueError, match=r"adds the token '<sep>' to .*\. Write a tokenizer\.json .*AutoTok"
        ):
            tokenizer.read_vocabulary(folder, tmp_path)
        (folder / file).unlink()
    assert tokenizer.read_vocabulary(folder, tmp_path) == plain
    write_tokenizer(folder, "T5")
    found = tokenizer.read_vocabulary(folder, tmp_path)
    assert found == Tokenizer(str(folder / "tokenizer.json"))
    write_tokenizer(folder, "T5", size=109, added=False)
    if kind == "spiece.model":
        # The model and its sentinels have all tokens, so the library is not needed.
        assert tokenizer.read_vocabulary(folder, tmp_path) == SentencePiece(str(folder / kind), 4)


def test_tokens_that_were_added_to_bytes_are_refused(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    change_json(config, tokenizer_class="ByT5Tokenizer")
    assert tokenizer.read_vocabulary(tmp_path, tmp_path) == Bytes(125)
    change_json(config, added_tokens_decoder={"384": {"content": "<sep>"}})
    with pytest.raises(ValueError, match="adds the token '<sep>' to ByT5's bytes"):
        tokenizer.read_vocabulary(tmp_path, tmp_path)


def test_other_tokens_around_a_text_are_read_by_the_library(tmp_path):
    """The post-processor decides about BOS and EOS, as in transformers."""
    gemma.write_tokenizer(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for fields in ({}, {"add_bos_token": True}, {"add_eos_token": False}, {"add_bos_token": None}):
        config.write_text(json.dumps({"tokenizer_class": "GemmaTokenizerFast"} | fields))
        assert tokenizer.read_vocabulary(tmp_path, tmp_path).bos
    for field, value in (("add_bos_token", False), ("add_eos_token", True)):
        for name in ("GemmaTokenizer", "TokenizersBackend"):
            config.write_text(json.dumps({"tokenizer_class": name, field: value}))
            with pytest.raises(
                ValueError, match=f"{field} in .* is {value}, .* Write a tokenizer.js"
            ):
                tokenizer.read_vocabulary(tmp_path, tmp_path)
    write_tokenizer(tmp_path, "Gemma")
    for single, around in (
        ([{"Sequence": {"id": "A", "type_id": 0}}], ([], [])),
        (
            [
                {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
            ],
            ([], [2]),
        ),
    ):
        file = tmp_path / "tokenizer.json"
        processor = json.loads(file.read_text(encoding="utf-8"))["post_processor"]
        change_json(file, post_processor=processor | {"single": single})
        change_json(config, add_bos_token=True)
        vocabulary = tokenizer.read_vocabulary(tmp_path, tmp_path)
        assert vocabulary.around_inputs == around and vocabulary.eos_id == 1


def test_a_class_whose_files_are_not_read_is_refused(tmp_path):
    config = tmp_path / "tokenizer_config.json"
    train_sentencepiece(["a b c", "b c d"] * 9, tmp_path / "spiece.model", vocab_size=9)
    for name in (*tokenizer.CLASSES, "T5TokenizerFast", "PreTrainedTokenizerFast", None):
        config.write_text(json.dumps({"tokenizer_class": name}))
        assert tokenizer.read_vocabulary(tmp_path, tmp_path) is not None
    for name in ("LlamaTokenizer", "LlamaTokenizerFast", "XLMRobertaTokenizer", "BertTokenizer"):
        config.write_text(json.dumps({"tokenizer_class": name}))
        with pytest.raises(
            ValueError, match=f"tokenizer_class in .* is '{name}', .* Write a tokenizer.json"
        ):
            tokenizer.read_vocabulary(tmp_path, tmp_path)
    (tmp_path / "spiece.model").unlink()
    with pytest.raises(ValueError, match=r"'BertTokenizer', but the folder has no tokenizer\.json"):
        tokenizer.read_vocabulary(tmp_path, tmp_path)


def test_tokens_of_the_configuration_are_added(tmp_path):
    """Tokens that only the configuration names are added, as in transformers."""
    write_tokenizer(tmp_path, "LLaMA", added=False)
    config, file = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    change_json(config, pad_token="[PAD]", extra_special_tokens=["<a>", "<b>"])
    vocabulary = Tokenizer(str(file)).build()
    assert vocabulary.encode("[PAD]<b><a>") == [600, 602, 601] and not vocabulary.is_text(600)
    change_json(config, added_tokens_decoder={"600": {"content": "new", "special": False}})
    assert Tokenizer(str(file)).encode("new <b>")[0] == 600
    assert Tokenizer(str(file)).encode("<b>") == [603]
    change_json(config, added_tokens_decoder={"700": {"content": "new", "special": False}})
    with pytest.raises(
        ValueError, match=r"tokenizer_config\.json cannot be read: the token 'new' must have the id"
    ):
        Tokenizer(str(file)).build()


def test_special_tokens_beyond_the_embedding_are_refused_in_texts(tmp_path):
    """Gemma's tokenizers have a special token for images, which models of texts lack."""
    write_tokenizer(tmp_path, "Gemma", added=False)
    config, file = tmp_path / "tokenizer_config.json", tmp_path / "tokenizer.json"
    size = Tokenizer(str(file)).vocab_size
    change_json(config, extra_special_tokens=["<image_soft_token>"])
    found = tokenizer.read_vocabulary(tmp_path, tmp_path, rows=size)
    assert found == Tokenizer(str(file), size=size) and found.vocab_size == size
    assert pickle.loads(pickle.dumps(found)) == found
    assert found.encode("a text") == Tokenizer(str(file)).encode("a text")
    with pytest.raises(ValueError, match=r"the token '<image_soft_token>' with the id .* Remove"):
        found.encode("a <image_soft_token>")
    with pytest.raises(ValueError, match="'<image_soft_token>'"):
        found.backend.encode_batch(["a", "<image_soft_token>"])

    # A model with a row for the token reads it, and a token of texts is not left out.
    assert tokenizer.read_vocabulary(tmp_path, tmp_path, rows=size + 1) == Tokenizer(str(file))
    assert tokenizer.read_vocabulary(tmp_path, tmp_path, rows=size - 1) == Tokenizer(str(file))


def test_older_files_of_codet5_are_read(tmp_path):
    new, old = tmp_path / "new", tmp_path / "old"
    write_tokenizer(new, "CodeT5", added=False)
    data = json.loads((new / "tokenizer.json").read_text(encoding="utf-8"))
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    merges = [" ".join(merge) for merge in data["model"]["merges"]]
    (old / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    change_json(old / "added_tokens.json", **{name: 596 + i for i, name in enumerate(SENTINELS)})
    change_json(old / "tokenizer_config.json", tokenizer_class="RobertaTokenizer")
    read = tokenizer.read_vocabulary(old, tmp_path, ids=CODET5)
    (tmp_path / "tokenizer.json").unlink()  # the scratch directory does not live long
    expected = Tokenizer(str(new / "tokenizer.json"))
    for text in ("on \t<extra_id_0>\n1", "x 1²1", "é  the", *random_texts(50)):
        assert read.encode(text) == expected.encode(text)
    assert read.around_inputs == expected.around_inputs == ([1], [2])
    assert set(read.files()) == {"tokenizer.json", "tokenizer_config.json"}
    change_json(old / "vocab.json", **{"<pad>": "x"})
    with pytest.raises(ValueError, match=r"vocab\.json cannot be read: "):
        tokenizer.read_vocabulary(old, tmp_path, ids=CODET5)


def test_codet5s_vocabularies_of_earlier_versions_are_read(tmp_path):
    """An earlier version stored CodeT5's ``tokenizer.json`` in a SentencePiece file."""
    write_tokenizer(tmp_path, "CodeT5", added=False)
    source = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    data = json.loads(source)
    proto = sentencepiece_model_pb2.ModelProto()
    kinds = proto.SentencePiece
    pieces = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    for i, piece in enumerate([*pieces, *(f"▁{name}" for name in SENTINELS)]):
        kind = kinds.CONTROL if i in (0, 1, 2, 4) else kinds.NORMAL
        proto.pieces.add(piece=piece, score=-i, type=kinds.UNKNOWN if i == 3 else kind)
    spec = proto.trainer_spec
    spec.model_type, spec.vocab_size = sentencepiece_model_pb2.TrainerSpec.BPE, len(proto.pieces)
    spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = 0, 1, 2, 3
    spec.pad_piece, spec.bos_piece, spec.eos_piece, spec.unk_piece = pieces[:4]
    spec.input.append(source)
    proto.normalizer_spec.name = BPE_OF_BYTES
    proto.normalizer_spec.escape_whitespaces = False
    (tmp_path / "old.model").write_bytes(proto.SerializeToString())
    old = SentencePiece(str(tmp_path / "old.model"), 0, bos=True).build()
    new = Tokenizer(str(tmp_path / "tokenizer.json"))
    assert (old.vocab_size, old.around_inputs) == (600, ([1], [2]))
    for text in ("on <extra_id_0> 1", *random_texts(20)):
        ids = new.encode(text)
        assert old.encode(text) == ids and old.decode(ids) == new.decode(ids)
        assert seqio_vocabulary(old).encode(text) == ids
    np.testing.assert_array_equal(stop_table(old, ["ing"], 600), stop_table(new, ["ing"], 600))


def test_a_missing_library_gives_one_sentence(tmp_path, monkeypatch):
    write_tokenizer(tmp_path, "CodeT5")
    original = builtins.__import__

    def without_library(name: str, *args: object) -> object:
        if name == "tokenizers":
            raise ModuleNotFoundError("No module named 'tokenizers'", name=name)
        return original(name, *args)

    monkeypatch.delitem(sys.modules, "tokenizers")
    monkeypatch.setattr(builtins, "__import__", without_library)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"tokenizer\.json needs the package tokenizers, .* 'synthesizer_jax\[tokenizers\]'\.",
    ):
        tokenizer.read_vocabulary(tmp_path, tmp_path)


SEQUENCE, BOS = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "x", "type_id": 0}}
BAD_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [BOS, SEQUENCE],
    "pair": [SEQUENCE],
    "special_tokens": {"x": {"id": "x", "ids": [10**6], "tokens": ["x"]}},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pre_tokenizer": {"type": "New"}},
            "cannot be read by the package tokenizers: .* newer v",
        ),
        ({"normalizer": {"type": "New"}}, "cannot be read by the package tokenizers: "),
        ({"model": {"type": "New"}}, "cannot be read by the package tokenizers: "),
        ({"model": []}, "cannot be read"),
        (
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
            "cannot be read by the package tokenizers: Precompiled",
        ),
        ({"added_tokens": []}, "the token '</s>' must|does not say|cannot be read"),
        (
            {"added_tokens": [{"id": 2 * 10**9, "content": "x", "special": True}]},
            "cannot be read",
        ),
        ({"post_processor": BAD_TEMPLATE}, r"adds the ids \[1000000\], but the largest id is 604"),
    ],
)
def test_a_tokenizer_that_the_library_cannot_read_gives_one_sentence(
    tmp_path, capfd, change, message
):
    write_tokenizer(tmp_path, "LLaMA")
    if "added_tokens" in change:
        change_json(
            tmp_path / "tokenizer_config.json", added_tokens_decoder={"9": {"content": "q"}}
        )
    change_json(tmp_path / "tokenizer.json", **change)
    with pytest.raises(ValueError, match=message) as error:
        tokenizer.read_vocabulary(tmp_path, tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert not capfd.readouterr().err


def test_an_unknown_end_and_other_sentinels_give_one_sentence(tmp_path):
    write_tokenizer(tmp_path, "LLaMA")
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    config.unlink()
    assert Tokenizer(str(file)).eos_id == 2  # the post-processor adds it
    change_json(file, post_processor=None)
    with pytest.raises(
        ValueError, match=r"does not say which token is EOS\. Write a tokenizer_conf"
    ):
        Tokenizer(str(file)).build()
    change_json(config, eos_token={"content": "</s>"})
    assert Tokenizer(str(file)).eos_id == 2
    added = json.loads(file.read_text(encoding="utf-8"))["added_tokens"]
    names = {token["content"]: token for token in added}
    first, second = names["<extra_id_0>"], names["<extra_id_1>"]
    first["content"], second["content"] = second["content"], first["content"]
    change_json(file, added_tokens=added)
    with pytest.raises(ValueError, match=r"<extra_id_0> has the id 598 and .* descending ids"):
        _ = Tokenizer(str(file)).first_sentinel
    with pytest.raises(FileNotFoundError, match=r"There is no tokenizer .*missing\.json\. Give"):
        Tokenizer(str(tmp_path / "missing.json")).build()


@pytest.mark.parametrize("kind", [SentencePiece, Tokenizer])
def test_a_folder_in_the_place_of_a_file_is_answered_with_the_files(kind, tmp_path):
    message = (
        "is a folder. Give a file in it as --vocabulary or vocabulary.path, such as its spiece"
    )
    with pytest.raises(FileNotFoundError, match=message):
        kind(str(tmp_path)).build()
