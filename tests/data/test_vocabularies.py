"""Compares our vocabularies, which need neither SeqIO nor TensorFlow, with SeqIO's."""

import pathlib

import numpy as np
import pytest
import sentencepiece
import seqio

from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, train_sentencepiece
from synthesizer_jax.preparation import synthetic
from synthesizer_jax.tasks.seqio_tasks import seqio_vocabulary
from synthesizer_jax.tasks.synthetic import VOCAB_SIZE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The SentencePiece model of the synthetic mixture."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.model"
    train_sentencepiece(synthetic.training_texts(), path, vocab_size=VOCAB_SIZE, model_type="bpe")
    return path


TEXTS = [
    *list(synthetic.training_texts())[::400],
    "",
    "  two  spaces ",
    "Überraschung: naïve café, 日本語 ½ \U0001f600 \n\t end",
    "before <extra_id_0> and <extra_id_7> after<extra_id_1>",
]


def test_texts_and_ids_are_seqios(model):
    rng = np.random.default_rng(0)
    pairs = [(Bytes(n), seqio.ByteVocabulary(extra_ids=n)) for n in (0, 100)]
    for n in (0, 4, 100):
        theirs = seqio.SentencePieceVocabulary(str(model), extra_ids=n)
        pairs.append((SentencePiece(str(model), extra_ids=n), theirs))
    for ours, theirs in pairs:
        assert (ours.vocab_size, ours.unk_id) == (theirs.vocab_size, theirs.unk_id)
        for text in TEXTS:
            ids = ours.encode(text)
            assert ids == theirs.encode(text)
            assert ours.decode(ids) == theirs.decode(ids)
            assert ours.decode([*ids, 1, *ids]) == theirs.decode([*ids, 1, *ids])
        for _ in range(50):  # the ids include EOS, padding, and ids beyond the vocabulary
            ids = rng.integers(0, ours.vocab_size + 30, 12).astype(np.int32)
            assert ours.decode(ids) == theirs.decode(ids.tolist())
        assert seqio_vocabulary(ours) == theirs
    assert len({ours.digest for ours, _ in pairs}) == len(pairs)


def test_texts_and_ids_are_seqios_with_t5s_model(real_data):
    path = real_data / "sentencepiece" / "t5_spiece.model"
    ours = SentencePiece(str(path)).build()
    theirs = seqio.SentencePieceVocabulary(str(path), 100)
    assert ours.vocab_size == theirs.vocab_size == 32_100
    assert ours.encode("<extra_id_0>") == [32_099]
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_long_texts_are_trained_on_too(tmp_path):
    train_sentencepiece(["a b c " * 3000 + "é"], tmp_path / "v.model", vocab_size=8)
    assert 2 not in SentencePiece(str(tmp_path / "v.model"), 0).encode("a é")


def test_a_tokenizer_json_is_not_a_sentencepiece_model(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not .* set vocabulary=.*Tokenizer"):
        SentencePiece(str(path)).build()


def test_ids_that_a_model_does_not_have_give_one_sentence(tmp_path):
    path = tmp_path / "vocabulary.model"
    # By default, SentencePiece uses the ids 0 for unknown, 1 for BOS and 2 for EOS, and no padding.
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c d"] * 9), model_writer=file, vocab_size=9, minloglevel=2
        )
    vocabulary = SentencePiece(str(path)).build()
    assert vocabulary.around_inputs == ([], [2]) and vocabulary.decode(
        [3, 2, 4]
    ) == vocabulary.decode([3])
    vocabulary.check_ids(SpecialIds(padding=1, end=2))
    for ids, message in (
        ((0, 1), "has the EOS id 2, but model.ids.end is 1"),
        ((5, 2), "padding is 5, which stands for text"),
    ):
        with pytest.raises(ValueError, match=message):
            vocabulary.check_ids(SpecialIds(*ids))
