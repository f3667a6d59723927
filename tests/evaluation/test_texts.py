"""The loss of texts: windows, words and bytes, against the same counted token by token."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Attention, Block, FeedForward, LanguageModel, RelativeBias, Run, Stack
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.evaluation.scoring import TaskResult, mean_score
from synthesizer_jax.evaluation.texts import text_loss
from synthesizer_jax.inference import Decoding, decode_sequences
from synthesizer_jax.models import Size, t5

TEXTS = ["", "a", "ein Apfel, grün", "no  more\n words than five and", "x" * 31]
WINDOW = 8


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    block = Block(Attention(2, 4), FeedForward(16))
    model = LanguageModel(
        vocab_size=Bytes().build().vocab_size,
        d_model=8,
        decoder=Stack((Run(block, 1),), bias=RelativeBias(bidirectional=False)),
    )
    nothing = jnp.zeros((1, 0), jnp.int32)
    variables = model.init(jax.random.key(0), nothing, jnp.ones((1, 4), jnp.int32))
    return Predictor(
        model,
        variables,
        Bytes().build(),
        inputs_length=0,
        decoding=Decoding(max_length=WINDOW),
        batch_size=4,
    )


def encoded(text: str) -> np.ndarray:
    return np.asarray([*Bytes().build().encode(text), 1], np.int32)


def nats(predictor: Predictor, window: np.ndarray) -> float:
    """The loss of a window in plain float64."""
    shifted = jnp.asarray(np.concatenate([[0], window[:-1]])[None])
    nothing = jnp.zeros((1, 0), jnp.int32)
    logits = np.asarray(predictor.model.apply(predictor.variables, nothing, shifted), np.float64)[0]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -float(logp[np.arange(len(window)), window].sum())


def test_every_token_counts_once(predictor: Predictor) -> None:
    tokens = [encoded(text) for text in TEXTS]
    found = text_loss(predictor, [np.zeros(0, np.int32)] * len(TEXTS), tokens, TEXTS)
    wanted = [
        sum(nats(predictor, ids[s : s + WINDOW]) for s in range(0, len(ids), WINDOW))
        for ids in tokens
    ]
    np.testing.assert_allclose(found.nats, wanted, rtol=1e-5)
    np.testing.assert_array_equal(found.tokens, [1, 2, 17, 30, 32])
    total = sum(wanted)
    words = sum(len(text.split()) for text in TEXTS) + len(TEXTS)
    assert words == 0 + 1 + 3 + 6 + 1 + 5
    metrics = found.metrics()
    assert metrics["perplexity"] == pytest.approx(math.exp(total / 82))
    assert metrics["word_perplexity"] == pytest.approx(math.exp(total / words))
    assert metrics["bits_per_byte"] == pytest.approx(total / math.log(2) / 77)


@pytest.fixture(scope="module")
def log_probabilities(predictor: Predictor) -> Callable[[list[int]], np.ndarray]:
    """Those of the next token after each of a row, in full passes of one length."""
    full_pass = jax.jit(predictor.model.apply)

    def log_probabilities(row: list[int]) -> np.ndarray:
        tokens = np.zeros((1, 24), np.int32)
        tokens[0, : len(row)] = row
        logits = full_pass(predictor.variables, np.zeros((1, 0), np.int32), tokens)
        return np.asarray(jax.nn.log_softmax(logits[0, : len(row)].astype(np.float32)))

    return log_probabilities


def test_a_model_without_inputs_continues_texts(
    predictor: Predictor, log_probabilities: Callable[[list[int]], np.ndarray]
) -> None:
    """Greedily, by the most probable token after each text in a full pass; the texts share a batch."""
    texts = [predictor.encode(text) for text in ("", "a", "a few words", "ab")]
    assert [len(text) for text in texts] == [0, 1, 11, 2]
    for text, (found,) in zip(texts, predictor.generate_texts(texts), strict=True):
        row, score = [0, *text], 0.0
        for _ in range(predictor.decoding.max_length):
            logp = log_probabilities(row)[-1]
            row.append(int(logp.argmax()))
            score += float(logp.max())
            if row[-1] == 1:
                break
        assert found.text == predictor.vocabulary.decode(row[1 + len(text) :])
        assert found.score == pytest.approx(score, abs=1e-3)


def test_lengths_of_texts_to_continue_share_programs(predictor: Predictor) -> None:
    shapes = set()

    def remember(_: list[int], batch: np.ndarray) -> tuple[np.ndarray]:
        shapes.add(batch.shape)
        return (np.zeros(len(batch)),)

    for length in (5, 6, 7, 8):
        predictor._map([np.full(length, 5, np.int32)], "decode", remember)
    assert shapes == {(4, 8)}


@pytest.mark.parametrize("options", [{"beams": 3}, {"temperature": 0.5, "samples": 2}])
def test_beams_and_samples_continue_texts(
    predictor: Predictor, log_probabilities: Callable[[list[int]], np.ndarray], options: dict
) -> None:
    """The scores are the log-probabilities of what follows the text."""
    texts = [predictor.encode(text) for text in ("a", "a few words")]
    tokens = np.zeros((2, 11), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    found = decode_sequences(
        predictor.variables,
        tokens,
        model=predictor.model,
        decoding=Decoding(max_length=5, **options),
        continues=True,
    )
    for text, sequences, scores in zip(texts, found.tokens, found.log_probabilities, strict=True):
        for sequence, score in zip(np.asarray(sequences), scores, strict=True):
            length = list(sequence).index(1) + 1 if 1 in sequence else len(sequence)
            row = [0, *text, *sequence[:length]]
            logp = log_probabilities(row)
            after = sum(logp[i - 1, row[i]] for i in range(len(text) + 1, len(row)))
            assert float(score) == pytest.approx(float(after), abs=1e-3)


def test_what_reads_inputs_continues_no_text() -> None:
    model = t5(Size(8, 1, 16, 2, 4), vocab_size=32)
    with pytest.raises(TypeError, match="EncoderDecoder models read inputs and continue no text"):
        decode_sequences(
            {},
            np.zeros((1, 2), np.int32),
            model=model,
            decoding=Decoding(max_length=3),
            continues=True,
        )


def test_measures_of_texts_do_not_enter_the_score() -> None:
    def result(name: str, **fields: object) -> TaskResult:
        values = {"metrics": {}, "predictions": (), "scores": np.zeros(1), **fields}
        return TaskResult(task=name, split="test", n=1, labeled=1, **values)

    text = result("a", text_metrics={"perplexity": 1e4})
    assert mean_score([text, result("b", metrics={"accuracy": 50.0})]) == 50.0
    assert math.isnan(mean_score([text]))
