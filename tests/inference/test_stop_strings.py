"""Tests stop strings, which end a text, by searching for them in the decoded text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.data.stop_strings import stop_table
from synthesizer_jax.data.vocabularies import EOS, Bytes, SentencePiece, train_sentencepiece
from synthesizer_jax.inference import Decoding, decode_sequences
from synthesizer_jax.inference.beam_search import beam_search
from synthesizer_jax.inference.decoder import Constraints
from synthesizer_jax.inference.sampling import decode_rows
from synthesizer_jax.models import Size, t5
from synthesizer_jax.pretrained import Loaded, generate, generate_with_scores
from tests.inference.beam_search import t5x_beams
from tests.inference.table import Table, look_up, table_log_p

WORDS = [
    "the",
    "sea",
    "was",
    "calm,",
    "then",
    "seas",
    "and",
    "theatres:",
    "äh!",
    "naïve",
    "answers",
]


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, 8)) for _ in range(200)]
    path = tmp_path_factory.mktemp("vocabulary") / "spiece.model"
    train_sentencepiece(texts, path, vocab_size=60, model_type="bpe")
    return SentencePiece(str(path), 3)


def first_end(vocabulary, ids, strings):
    """Returns the smallest number of tokens whose text contains one of the strings, or None."""
    texts = (vocabulary.decode(ids[: n + 1]) for n in range(len(ids)))
    return next((n for n, text in enumerate(texts, 1) if any(s in text for s in strings)), None)


@pytest.mark.parametrize("kind", ["pieces", "bytes"])
@pytest.mark.parametrize(
    "strings", [("he",), (" the", "s a"), ("ä", "n an", "na"), ("aab", "ab", "the")]
)
def test_a_table_finds_strings_where_texts_hold_them(pieces, kind, strings):
    """Stop strings are found wherever texts contain them.

    A string may be spread over several tokens, lie within one token, begin a text, or contain long
    characters.

    A long character consists of several bytes.
    """
    vocabulary = pieces if kind == "pieces" else Bytes(3)
    size = vocabulary.vocab_size + 5
    rng = np.random.default_rng(1)
    table = stop_table(vocabulary, strings, size)
    tokens = [[i] for i in range(size) if i != EOS]
    if kind == "bytes":
        tokens = [vocabulary.encode(character) for character in "the sn aäb"]
    ends = []
    for _ in range(400):
        ids = [i for token in rng.integers(0, len(tokens), 12) for i in tokens[token]]
        state = 0
        found = None
        for n, token in enumerate(ids, 1):
            state = int(table[state, token])
            found = found or (n if state == len(table) - 1 else None)
        expected = first_end(vocabulary, ids, strings)
        assert found == expected, (ids, vocabulary.decode(ids))
        ends.append(found)
    assert sum(end is not None for end in ends) > 3


def test_decoding_ends_with_stop_strings():
    """Greedy decoding and all beams end with a stop string.

    Scores include only the tokens up to the end of the string.
    """
    words = {2: b"a", 3: b"b", 4: b"ab", 5: b"ba", 6: b"c", 7: b"", 8: b"abba"}
    strings = (b"bb", b"caa")

    class Words(Bytes):
        def token_bytes(self, size, *, first):
            return [words.get(i, b"") for i in range(size)]

    table = stop_table(Words(), [s.decode() for s in strings], 9)
    logits = np.random.default_rng(0).normal(size=(24, 7, Table.CODES, 9))
    logits[..., 1] -= 2
    constraints = Constraints(None, jnp.full(24, 7), stops=jnp.asarray(table))
    model = Table(np.float32(logits))
    greedy = jax.jit(lambda: decode_rows(model, constraints))()
    beams = jax.jit(lambda: beam_search(model, constraints, beams=3, alpha=0.6, samples=3))()

    def ends(tokens):
        text = b"".join(words.get(token, b"") for token in tokens)
        return tokens[-1] == EOS or any(string in text for string in strings)

    stopped = 0
    for i, example in enumerate(logits):
        tokens = ()
        while len(tokens) < 7 and not (tokens and ends(tokens)):
            tokens += (int(look_up(example)([tokens])[0].argmax()),)
        stopped += len(tokens) < 7 and tokens[-1] != EOS
        assert tuple(greedy.tokens[i, 0].tolist()) == tokens + (0,) * (7 - len(tokens))
        wanted = t5x_beams(table_log_p(example), 7, 3, 0.6, ends=ends)
        rows = zip(beams.tokens[i], beams.scores[i], beams.log_probabilities[i], strict=True)
        for (best, score), (found, value, log_p) in zip(wanted, rows, strict=True):
            assert tuple(found.tolist()) == best + (0,) * (7 - len(best))
            np.testing.assert_allclose(value, score, atol=1e-5)
            np.testing.assert_allclose(log_p, score * ((5 + len(best)) / 6) ** 0.6, atol=1e-5)
    assert stopped > 3


def test_a_search_continues_after_many_stop_strings():
    """If many continuations complete a stop string, the best other continuations stay alive."""
    words = {i: b"." for i in range(2, 12)} | {12: b"a", 13: b"b"}

    class Words(Bytes):
        def token_bytes(self, size, *, first):
            return [words.get(i, b"") for i in range(size)]

    logits = np.random.default_rng(0).normal(size=(8, 4, Table.CODES, 14))
    logits[..., 0] -= 20
    logits[..., 2:12] += 3
    constraints = Constraints(
        None, jnp.full(8, 4), stops=jnp.asarray(stop_table(Words(), ["."], 14))
    )
    model = Table(np.float32(logits))
    found = jax.jit(lambda: beam_search(model, constraints, beams=2, alpha=6.0, samples=2))()

    def ends(tokens):
        """Whether the last token is EOS or completes a stop string."""
        return 1 <= tokens[-1] < 12

    lengths = set()
    for example, rows, scores in zip(logits, found.tokens, found.scores, strict=True):
        wanted = t5x_beams(table_log_p(example), 4, 2, 6.0, ends=ends)
        for (best, expected), tokens, score in zip(wanted, rows, scores, strict=True):
            assert tuple(tokens.tolist()) == best + (0,) * (4 - len(best))
            np.testing.assert_allclose(score, expected, atol=1e-5)
            lengths.add(len(best))
    assert max(lengths) > 1


def test_texts_are_cut_before_stop_strings():
    vocabulary = Bytes()
    source = jnp.ones((1, 4), int)
    model = t5(Size(16, 1, 32, 2, 8), vocab_size=vocabulary.vocab_size)
    loaded = Loaded(model, jax.jit(model.init)(jax.random.key(0), source, source), vocabulary)
    options = {"max_length": 40, "temperature": 1.5, "top_k": 60, "samples": 4}
    (samples,) = generate_with_scores(loaded, ["x"], decoding=Decoding(**options))
    texts = [sample.text for sample in samples]
    strings = tuple(text[2:4] for text in texts[:2])
    decoding = Decoding(**options, stop_strings=strings)
    (found,) = generate_with_scores(loaded, ["x"], decoding=decoding)
    cut = [min((text.find(s) for s in strings if s in text), default=len(text)) for text in texts]
    assert [x.text for x in found] == [text[:n] for text, n in zip(texts, cut, strict=True)]
    assert generate(loaded, ["x"], decoding=decoding) == [found[0].text] == [texts[0][:2]]
    with pytest.raises(
        ValueError, match=r"this function knows only tokens\. Pass stops=stop_table"
    ):
        decode_sequences(loaded.variables, source, model=model, decoding=decoding)
    with pytest.raises(ValueError, match="stop_strings contains '', which every text contains"):
        Decoding(max_length=4, stop_strings=("",))
