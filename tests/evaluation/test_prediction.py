"""Tests that predictions keep their order for every batch size and mesh, and have scores."""

import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax import Attention, Block, FeedForward, LanguageModel, RelativeBias, Run, Stack
from synthesizer_jax.base.ids import T5_IDS, SpecialIds
from synthesizer_jax.checkpoints.placement import layout_over
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation import prediction
from synthesizer_jax.evaluation.evaluation_sets import EvaluationSet
from synthesizer_jax.evaluation.prediction import (
    Predictor,
    _length_batches,
    _pad_tokens,
    _until_end,
)
from synthesizer_jax.evaluation.scoring import (
    TaskResult,
    evaluate_tasks,
    mean_score,
    text_metrics,
    text_nats,
)
from synthesizer_jax.inference import Decoding, Sequences, decode_sequences, score_targets
from synthesizer_jax.models import Encoder, Size, t5
from synthesizer_jax.sharding import MeshShape, make_mesh
from synthesizer_jax.tasks.definitions import GLUE, SUPER_GLUE
from synthesizer_jax.tasks.task import Task
from tests.evaluation import runs

BYTES = Bytes()
WINDOW = 8
NOTHING = np.zeros((1, 0), np.int32)
INPUTS = ["abc", "a", "fedcba", "bb", "c", "dd", "abcdefabcdef"]
WORDS = ("ab", "c", "bca")
RTE = ("entailment", "not_entailment")


class Letters:
    """A vocabulary of letters, whose ids start at 2."""

    eos_id = 1
    around_inputs = ([], [1])

    def encode(self, s):
        return [ord(c) - ord("a") + 2 for c in s]

    def decode(self, ids):
        return "".join(chr(int(i) - 2 + ord("a")) for i in ids if i > 1)


def predictor_of(model, variables, vocabulary, decoding, **options):
    options = {"inputs_length": 16, "batch_size": 3} | options
    return Predictor(model, variables, vocabulary, decoding=decoding, **options)


@pytest.fixture(scope="module")
def predictor():
    model = t5(Size(8, 1, 16, 2, 4), vocab_size=16)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 4), int), jnp.ones((1, 3), int))

    def make(method="greedy", **options):
        options = {"ranks": method == "rank", "variables": variables} | options
        decoding = options.pop("decoding", Decoding(max_length=4))
        return predictor_of(model, options.pop("variables"), Letters(), decoding, **options)

    return make


def encoded(predictor, texts=INPUTS):
    return [predictor.encode(text) for text in texts]


@pytest.mark.parametrize("options", [{"beams": 3}, {"temperature": 0.8, "top_p": 0.9}])
def test_several_texts_do_not_depend_on_the_batch(predictor, options):
    decoding = Decoding(max_length=4, samples=3, **options)
    together, alone = (predictor(decoding=decoding, batch_size=n) for n in (3, 1))
    found, same = (p.generate_texts(encoded(p)) for p in (together, alone))
    assert [len(generated) for generated in found] == [3] * len(INPUTS)
    assert [[g.text for g in x] for x in found] == [[g.text for g in x] for x in same]
    scores = [[g.score for g in x] for x in found]
    np.testing.assert_allclose(scores, [[g.score for g in x] for x in same], rtol=1e-4)
    first = together.predict(encoded(together))
    assert first.texts == [generated[0].text for generated in found]
    np.testing.assert_array_equal(first.scores, np.float32(scores)[:, 0])


def test_ranking_takes_the_most_probable_word(predictor):
    p = predictor("rank")
    targets = _pad_tokens([np.array([*Letters().encode(w), 1], np.int32) for w in WORDS], 3, 4, 0)
    answers = p.predict(encoded(p), WORDS)
    np.testing.assert_array_equal(answers.scores, answers.ranked.max(axis=-1))
    for x, answer, found in zip(encoded(p), answers.texts, answers.ranked, strict=True):
        sources = _pad_tokens([x] * 3, 3, 16, 0)
        scores = score_targets(p.variables, sources, targets=targets, model=p.model)
        np.testing.assert_allclose(found, scores, rtol=1e-5)
        assert answer == WORDS[int(np.argmax(scores))]
    p.vocabulary.encode = lambda s: [2]
    with pytest.raises(ValueError, match=r"'ab' and 'c', which have the same tokens\. Choose"):
        p.predict(encoded(p), WORDS)


def test_a_mesh_gives_the_answers_of_one_device(predictor):
    """A mesh of several devices gives the same answers as one device.

    The parameters are sharded, and there are fewer inputs than devices.
    """
    one = predictor("rank")
    mesh = make_mesh(MeshShape(fsdp=4, tensor=2))
    layout = layout_over(one.model, one.model.example(4, 4), mesh)
    divided = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), one.variables, layout)
    embedding = divided["params"]["embedding"]
    assert embedding.addressable_shards[0].data.size == embedding.size // 8
    sample = Decoding(max_length=4, temperature=0.8, top_k=9, top_p=0.9)
    targets = [np.array([5, 6, 1]), np.array([7, 1]), np.array([8, 9, 10, 1])]
    found = []
    for options in ({}, {"variables": divided, "mesh": mesh}):
        ranking, sampling = predictor("rank", **options), predictor(decoding=sample, **options)
        inputs = encoded(ranking)[:3]
        losses = ranking.log_probabilities(inputs, targets)
        found.append((ranking.predict(inputs, WORDS), sampling.predict(inputs), losses))
    for single, several in zip(found[0][:2], found[1][:2], strict=True):
        assert single.texts == several.texts
        np.testing.assert_allclose(single.scores, several.scores, rtol=1e-4)
    np.testing.assert_allclose(found[0][2], found[1][2], rtol=1e-4)


def test_twelve_programs_serve_glue_and_super_glue(predictor, monkeypatch):
    """Twelve compiled programs are enough to evaluate GLUE and SuperGLUE.

    Eight programs compute answers, and four compute the loss.
    """
    answering, losses = set(), set()

    def choices(_, tokens, *, choices, model):
        answering.add((tokens.shape, np.shape(choices)))
        return jnp.zeros((len(tokens), len(choices)))

    def decoded(_, tokens, *, decoding, **__):
        answering.add(tokens.shape)
        scores = jnp.zeros((len(tokens), 1))
        return Sequences(jnp.zeros((*scores.shape, decoding.max_length)), scores, scores)

    def scored(_, tokens, *, targets, model):
        losses.add((tokens.shape, targets.shape))
        return jnp.zeros(len(tokens))

    monkeypatch.setattr(prediction, "score_choices", choices)
    monkeypatch.setattr(prediction, "decode_sequences", decoded)
    monkeypatch.setattr(prediction, "score_targets", scored)
    p = predictor("rank", decoding=Decoding(max_length=32), inputs_length=512, batch_size=8)
    # Each piece has three characters, which is about as long as the pieces of SentencePiece.
    p.vocabulary.encode = lambda s: [zlib.crc32(s.encode()) >> 1] * -(-len(s) // 3)
    rng = np.random.default_rng(0)
    for task in (*GLUE, *SUPER_GLUE):
        longest = 100 if "stsb" in task.name else 512
        inputs = [np.full(n, 2, np.int32) for n in (5, *rng.integers(1, longest, 9), longest)]
        words = task.label_words
        assert len(p.predict(inputs, words).texts) == 11
        targets = [np.full(n, 2, np.int32) for n in rng.integers(1, 6 if words else 32, 11)]
        assert p.log_probabilities(inputs, targets).shape == (11,)
    assert len(answering) <= 8 and len(losses) <= 4


def test_batches_are_sorted_padded_and_whole():
    rng = np.random.default_rng(0)
    inputs = [np.ones(n, np.int32) * (i + 1) for i, n in enumerate(rng.integers(1, 90, 23))]
    seen = []
    for rows, batch in _length_batches(inputs, 5, (32, 64), 0):
        assert batch.shape[0] == 5
        assert batch.shape[1] in (32, 64)
        for row, slot in zip(rows, batch, strict=False):
            assert (slot != 0).sum() == min(len(inputs[row]), 64)
            assert slot[0] == row + 1
        seen += rows
    assert sorted(seen) == list(range(23))
    assert _until_end(np.array([5, 6, 1, 7]), T5_IDS) == [5, 6]
    assert _until_end(np.array([5, 0, 0]), T5_IDS) == [5]
    assert _until_end(np.array([5, 6]), T5_IDS) == [5, 6]


@pytest.fixture(scope="module")
def writer():
    """A language model for texts without inputs."""
    block = Block(Attention(2, 4), FeedForward(16))
    stack = Stack((Run(block, 1),), bias=RelativeBias(bidirectional=False))
    model = LanguageModel(vocab_size=BYTES.vocab_size, d_model=8, decoder=stack)
    variables = model.init(jax.random.key(0), NOTHING, jnp.ones((1, 4), jnp.int32))
    decoding = Decoding(max_length=WINDOW)
    return predictor_of(model, variables, BYTES, decoding, inputs_length=0, batch_size=4)


@pytest.fixture(scope="module")
def log_probabilities(writer):
    """Returns a function that computes the log-probabilities of the next token at each position.

    The function makes full passes of the model, which all have the same length.
    """
    full_pass = jax.jit(writer.model.apply)

    def log_probabilities(row):
        tokens = np.zeros((1, 24), np.int32)
        tokens[0, : len(row)] = row
        logits = np.float64(full_pass(writer.variables, NOTHING, tokens))[0, : len(row)]
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    return log_probabilities


def test_every_token_of_a_text_counts_once(writer, log_probabilities):
    texts = ["", "a", "ein Apfel, grün", "no  more\n words than five and", "x" * 31]
    tokens = [np.asarray([*BYTES.encode(text), 1], np.int32) for text in texts]
    found = text_nats(writer, [NOTHING[0]] * len(texts), tokens)
    wanted = np.zeros(len(texts))
    for i, ids in enumerate(tokens):
        for start in range(0, len(ids), WINDOW):
            window = ids[start : start + WINDOW]
            logp = log_probabilities([0, *window[:-1]])
            wanted[i] -= logp[np.arange(len(window)), window].sum()
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    lengths = np.array([*map(len, tokens)])
    np.testing.assert_array_equal(lengths, [1, 2, 17, 30, 32])
    total = sum(wanted)
    words = 0 + 1 + 3 + 6 + 1 + 5
    assert text_metrics(found, lengths, texts) == {
        "perplexity": pytest.approx(math.exp(total / 82)),
        "word_perplexity": pytest.approx(math.exp(total / words)),
        "bits_per_byte": pytest.approx(total / math.log(2) / 77),
    }
    assert text_metrics(found, lengths, None).keys() == {"perplexity"}


def test_a_model_without_inputs_continues_texts(writer, log_probabilities):
    """Greedy decoding appends the most probable token of a full pass at each step."""
    texts = encoded(writer, ("", "a", "a few words", "ab"))
    assert [len(text) for text in texts] == [0, 1, 11, 2]
    found = writer.generate_texts(texts)
    for text, (answer,) in zip(texts, found, strict=True):
        row = [0, *text]
        score = 0.0
        for _ in range(WINDOW):
            logp = log_probabilities(row)[-1]
            row.append(int(logp.argmax()))
            score += float(logp.max())
            if row[-1] == 1:
                break
        assert answer.text == BYTES.decode(row[1 + len(text) :])
        assert answer.score == pytest.approx(score, abs=1e-3)


@pytest.mark.parametrize("options", [{"beams": 3}, {"temperature": 0.5, "samples": 2}])
def test_beams_and_samples_continue_texts(writer, log_probabilities, options):
    """Beams and samples continue a text.

    Their scores are the log-probabilities of the continuation.
    """
    texts = encoded(writer, ("a", "a few words"))
    tokens = _pad_tokens(texts, 2, 11, 0)
    decoding = Decoding(max_length=5, **options)
    given = {"model": writer.model, "decoding": decoding, "continues": True}
    found = decode_sequences(writer.variables, tokens, **given)
    for text, sequences, scores in zip(texts, found.tokens, found.log_probabilities, strict=True):
        for sequence, score in zip(np.asarray(sequences), scores, strict=True):
            length = list(sequence).index(1) + 1 if 1 in sequence else len(sequence)
            row = [0, *text, *sequence[:length]]
            logp = log_probabilities(row)
            after = sum(logp[i - 1, row[i]] for i in range(len(text) + 1, len(row)))
            assert float(score) == pytest.approx(float(after), abs=1e-3)


@pytest.mark.parametrize("padding", [0, 3])
def test_a_masked_language_model_is_measured_where_tokens_are_masked(padding):
    """A masked language model's loss is measured only at masked tokens, for any padding id.

    Most of the targets are padding.
    """
    ids = SpecialIds(padding=padding)
    model = Encoder(
        vocab_size=16, d_model=8, encoder=t5(Size(8, 1, 16, 2, 4)).encoder, masked_lm=True, ids=ids
    )
    variables = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 4), int))
    predictor = predictor_of(model, variables, Letters(), Decoding(max_length=16))
    inputs = [np.array([5, 15, 7, 8, 15, 9, 1]), np.array([15, 6, 4, 1])]
    targets = [np.full(len(row), padding) for row in inputs]
    targets[0][[1, 4]] = 6, 7
    targets[1][0] = 9
    rows = [
        {"inputs": row, "targets": target, "inputs_pretokenized": "", "targets_pretokenized": ""}
        for row, target in zip(inputs, targets, strict=True)
    ]
    examples = EvaluationSet(Task("letters", "letters", metrics=(), has_inputs=False), "test", rows)
    (result,) = evaluate_tasks(predictor, [examples])
    nats = 0.0
    for row, target in zip(inputs, targets, strict=True):
        logits = np.float64(model.apply(variables, row[None]).token_logits[0])
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nats -= sum(log_p[i, target[i]] for i in np.flatnonzero(target != padding))
    assert result.text_metrics == {"perplexity": pytest.approx(np.exp(nats / 3), rel=1e-4)}
    assert result.loss.per_token == pytest.approx(nats / 3, rel=1e-4)


def test_measures_of_texts_do_not_enter_the_score():
    def result(name, **fields):
        values = {"metrics": {}, "predictions": (), "scores": np.zeros(1), **fields}
        return TaskResult(task=name, split="test", n=1, labeled=1, **values)

    text = result("a", text_metrics={"perplexity": 1e4})
    assert mean_score([text, result("b", metrics={"accuracy": 50.0})]) == 50.0
    assert math.isnan(mean_score([text]))


@pytest.fixture(scope="module")
def classifier():
    """A classifier whose classes have a different order than the label words of the task."""
    recipe = runs.classifier()
    variables = recipe.model.init(jax.random.key(4), jnp.ones((1, 4), int))
    options = {"classes": recipe.data.classes, "batch_size": 2, "inputs_length": 32, "ranks": True}
    return predictor_of(recipe.model, variables, BYTES, Decoding(max_length=1), **options)


def test_label_words_are_ranked_by_their_classes(classifier):
    inputs = encoded(classifier, ("a b", "rte", "the dog sleeps", "c", "d e f g"))
    found = classifier.rank(inputs, RTE)
    apply = jax.jit(classifier.model.apply)
    logits = apply(classifier.variables, _pad_tokens(inputs, 5, 32, 0)).outputs[:, ::-1]
    np.testing.assert_allclose(found, jax.nn.log_softmax(logits), atol=1e-4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(classifier.rank(inputs, RTE[1:]), found[:, 1:])
    answers = classifier.predict(inputs, RTE)
    assert answers.texts == [RTE[i] for i in found.argmax(axis=1)]
    assert len(set(answers.texts)) == 2, "the random model prefers one class"
    np.testing.assert_array_equal(answers.scores, found.max(axis=1))
    every = classifier.predict(inputs)  # SeqIO's tasks have no label words
    assert (every.texts, every.words) == (answers.texts, RTE[::-1])
    assert classifier.rank([], RTE).shape == (0, 2)
    ids = [np.array([*BYTES.encode(RTE[i % 2]), 1]) for i in range(5)]
    targets = classifier.log_probabilities(inputs, ids)
    np.testing.assert_array_equal(targets, [row[i % 2] for i, row in enumerate(found)])


def test_unknown_words_and_unsuitable_models_give_one_sentence(classifier, writer):
    inputs = encoded(classifier, ["a"])
    maybe = np.array([*BYTES.encode("maybe"), 1])
    with pytest.raises(ValueError, match=r"label word 'maybe' is none of data\.classes \(not_ent"):
        classifier.rank(inputs, ("entailment", "maybe"))
    with pytest.raises(ValueError, match=r"An example has the target 'maybe', which is none of"):
        classifier.log_probabilities(inputs, [maybe])
    with pytest.raises(TypeError, match="Encoder, which cannot generate text"):
        classifier.generate_texts(inputs)
    model = t5(Size(8, 1, 16, 2, 4), vocab_size=32)
    with pytest.raises(TypeError, match="type EncoderDecoder cannot continue a text"):
        decode_sequences({}, NOTHING, model=model, decoding=writer.decoding, continues=True)
