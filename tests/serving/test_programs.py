"""Compares exported programs with the functions from which they were exported."""

import json
import runpy
import sys
import threading
import urllib.error
import urllib.request

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

import synthesizer_jax as sj
from synthesizer_jax.attention import static
from synthesizer_jax.base.ids import SpecialIds
from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, train_sentencepiece
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.inference import Decoding, decode, encode_tokens, score_targets
from synthesizer_jax.mixers import DynamicConvolution
from synthesizer_jax.models import Size, alignment, t5, unroll, unroll_variables
from synthesizer_jax.models.zoo import language_model as zoo_model
from synthesizer_jax.pretrained import generate, load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.card import read_card
from synthesizer_jax.serving.load import Model
from synthesizer_jax.serving.programs import (
    LOADER,
    PLATFORMS,
    Limits,
    export_programs,
    write_directory,
)
from tests.cli.commands import invoke
from tests.conftest import snippets
from tests.environment import python
from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors
from tests.training import tiny

VOCAB = 384
LIMITS = Limits(inputs_length=12, targets_length=5)
SIZE = Size(8, 1, 16, 2, 4)
SHAPES = ((3, 7, 4), (2, 12, 5))
"""Batch size, length of the inputs and length of the targets. The last ones are the limits."""


def encoder_decoder(kind, size=SIZE, **options):
    aligned = alignment(kind, head_dim=4, max_length=17)
    return t5(size, encoder=aligned, vocab_size=VOCAB, **options)


def language_model():
    stack = encoder_decoder("fix", size=Size(8, 2, 16, 2, 4), scan=True).encoder
    return sj.LanguageModel(vocab_size=VOCAB, d_model=8, decoder=stack, prefix=True)


def encoder(kind="d", vocab_size=VOCAB):
    return sj.Encoder(vocab_size=vocab_size, d_model=8, encoder=encoder_decoder(kind).encoder)


def convolutions():
    """Returns an encoder with convolutions whose weights depend on the tokens.

    The shape of the weights contains the batch size, which is symbolic during the export.
    """
    stack = t5(SIZE, encoder=DynamicConvolution(width=3), relative_bias=False).encoder
    return sj.Encoder(vocab_size=VOCAB, d_model=8, encoder=stack)


def variables_of(model):
    made = jax.jit(model.init)(
        jax.random.key(0), *(jnp.ones(x.shape, int) for x in model.example(4, 4))
    )
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(1), x.shape), made)


def exported(directory, model, vocabulary=None, limits=LIMITS):
    """Exports a model, and returns its variables and its directory."""
    variables = variables_of(model)
    directory.mkdir()
    looped = unroll_variables(model, variables)
    vocabulary = vocabulary or Bytes()
    write_directory(directory, unroll(model), looped, vocabulary, limits=limits)
    return variables, directory


def random_tokens(batch, length):
    """Returns random tokens. Every second row is padded, alternately in front and at the end."""
    tokens = np.random.default_rng(batch * length).integers(2, 300, (batch, length))
    tokens[1::4, : length // 3] = 0
    tokens[3::4, -(length // 3) :] = 0
    return tokens.astype(np.int32)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def agrees(loaded, model, variables, shapes=SHAPES[:1], beams=1):
    """Compares all exported programs with the library's functions, for some shapes."""

    def run(name, *arguments):
        """Runs an exported program."""
        return loaded.programs[name](loaded.parameters, *arguments)

    for batch, n, t in shapes:
        inputs, targets = random_tokens(batch, n), random_tokens(batch, t)
        if "encode" in loaded.programs:
            close(run("encode", inputs), encode_tokens(variables, inputs, model=model))
        if "score" in loaded.programs:
            expected = score_targets(variables, inputs, targets=targets, model=model)
            close(run("score", inputs, targets), expected)
            limit = LIMITS.targets_length
            expected = decode(variables, inputs, model=model, max_length=limit, beams=beams)
            tokens, scores = run("generate", inputs)
            np.testing.assert_array_equal(tokens, expected.tokens)
            close(scores, expected.scores)


@pytest.fixture(scope="module")
def synthesizer(tmp_path_factory):
    model = encoder_decoder("rv")
    return model, *exported(tmp_path_factory.mktemp("programs") / "rv-programs", model)


def test_a_synthesizer_runs_at_every_batch_and_length_on_every_platform(synthesizer):
    model, variables, directory = synthesizer
    loaded = Model(directory)
    assert list(loaded.programs) == ["encode", "generate", "score"]
    assert loaded.info["lengths"] == "symbolic" and loaded.info["platforms"] == list(PLATFORMS)
    agrees(loaded, model, variables, SHAPES)
    with pytest.raises(ValueError, match="shapes"):  # the length is above the limit
        loaded.programs["encode"](loaded.parameters, random_tokens(2, 13))


@pytest.mark.parametrize(
    ("model", "programs", "beams"),
    [
        (encoder(), ["encode"], 1),
        (convolutions(), ["encode"], 1),
        (language_model(), ["generate", "score"], 3),
    ],
    ids=["encoder", "dynamic convolutions", "language model"],
)
def test_a_model_has_the_programs_of_its_kind(tmp_path, model, programs, beams):
    """Every kind of model exports its own set of programs.

    The models include constants, scanned layers and beams.
    """
    limits = Limits(LIMITS.inputs_length, LIMITS.targets_length, beams)
    variables, directory = exported(tmp_path / "model", model, limits=limits)
    loaded = Model(directory)
    assert list(loaded.programs) == programs
    agrees(loaded, model, variables, beams=beams)


WITHOUT_THE_PACKAGE = """
import importlib.util, json, runpy, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        absent = ("synthesizer_jax", "flax", "safetensors", "optax", "tensorflow")
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
sys.argv[1:] = ["a text", "another, which is longer"]
names = runpy.run_path("load.py", run_name="__main__")
model = names["model"]
inputs = model.tokens(["a", "some text", "text"], 9)
outputs = model.programs["generate"](model.parameters, inputs)[0]
print(json.dumps([inputs.tolist(), outputs.tolist()]))
assert not [m for m in sys.modules if m.startswith(("synthesizer_jax", "flax"))]
"""


def test_the_loader_runs_where_this_package_is_not_installed(synthesizer):
    model, variables, directory = synthesizer
    *texts, last = python("-c", WITHOUT_THE_PACKAGE, cwd=directory).stdout.splitlines()
    vocabulary = Bytes()
    rows = [[*vocabulary.encode(x)[:11], 1] for x in ("a text", "another, which is longer")]
    ids = np.array([row + [0] * (12 - len(row)) for row in rows])
    expected = decode(variables, ids, model=model, max_length=5).tokens.tolist()
    assert texts == [*map(Model(directory).text, expected)]
    inputs, tokens = map(np.array, json.loads(last))
    expected = decode(variables, jnp.asarray(inputs), model=model, max_length=5).tokens
    np.testing.assert_array_equal(tokens, expected)


def test_the_pages_server_answers(synthesizer, monkeypatch):
    first, server = snippets("docs/serving.md")[:2]
    monkeypatch.chdir(synthesizer[2].parent)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "load", raising=False)
    names: dict = {}
    exec(first, names)
    exec(server.replace("8000", "0").replace("server.serve_forever()", ""), names)
    model = names["model"]
    texts = ["a text", "b"]
    with names["server"] as server:
        address = "http://{}:{}".format(*server.server_address)

        def post(body):
            thread = threading.Thread(target=server.handle_request)
            thread.start()
            try:
                with urllib.request.urlopen(address, body.encode()) as answer:
                    return answer.status, json.load(answer)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)
            finally:
                thread.join()

        status, found = post(json.dumps(texts))
        assert status == 200 and post("[]") == (200, [])
        refused = {"error": 'The texts must be a list of strings, such as ["a text"].'}
        assert [post(body) for body in ('"x"', "[1]", '{"a": "b"}')] == [(400, refused)] * 3
        for body, reason in ((r'["\ud800"]', "surrogates"), ("a text", "Expecting value")):
            status, answer = post(body)
            assert status == 400 and reason in answer["error"]
    inputs = model.tokens(texts, LIMITS.inputs_length)
    tokens, _ = model.programs["generate"](model.parameters, inputs)
    assert found == [model.text(ids) for ids in tokens.tolist()] and len(found) == 2
    assert names["answers"] == model.generate(["one text", "another"])


def test_texts_are_those_of_the_vocabulary(tmp_path):
    path = tmp_path / "spiece.model"
    words = [f"{a}{b} {b}{a}{c}" for a in "abcde" for b in "fghij" for c in "klmno"]
    train_sentencepiece(words, path, vocab_size=40)
    ids = SpecialIds(padding=150, also_end=(30, 20))
    model = replace(encoder("v", vocab_size=160), ids=ids)
    for vocabulary in (SentencePiece(str(path)), Bytes()):
        name = type(vocabulary).__name__
        _, directory = exported(tmp_path / name, model, vocabulary)
        loaded = Model(directory)
        for text in ("af fak", "cj jcm <extra_id_0> é", ""):
            row = [*vocabulary.encode(text)[:11], 1]
            padded = loaded.tokens([text], 12)[0].tolist()
            assert padded == row + [ids.padding] * (len(padded) - len(row))
            assert loaded.text(row) == vocabulary.decode(row)
        odd = [5, 31, 159, 0, 8]
        for special in (ids.padding, *ids.ends):
            assert loaded.text([*odd, special, 7]) == vocabulary.decode(odd)
    assert loaded.tokens(["abc", "abcdefgh"], 12).shape == (2, 12)
    assert loaded.tokens(["abc", "abcde"], 12).shape == (2, 8)


def test_a_model_of_texts_alone_continues_them(tmp_path):
    """An exported language model without inputs continues texts.

    The texts equal those of `generate`. The program `score` returns the scores of these texts.
    """
    model = replace(zoo_model("rv", Size(16, 1, 32, 2, 8), max_length=24), vocab_size=VOCAB)
    recipe = tiny.experiment(model, data={"inputs_length": 0, "targets_length": 24})
    tiny.save(tmp_path / "run", recipe)
    export_run(tmp_path / "run", tmp_path / "out", to="stablehlo")
    fields, text = read_card(tmp_path / "out")
    assert fields["library_name"] == "synthesizer_jax" and "python load.py" in text
    run = load(tmp_path / "run")
    loaded = Model(tmp_path / "out")
    assert loaded.info["limits"] == {"inputs_length": 12, "targets_length": 12, "beams": 1}
    texts = ["", "a", "a word", "ab" * 6]
    found = loaded.generate(texts)
    decoding = Decoding(max_length=12)
    predictor = Predictor(*run, inputs_length=0, row_length=24, decoding=decoding, batch_size=4)
    assert found == predictor.predict([predictor.encode(text) for text in texts]).texts
    assert found[:3] == generate(run, texts[:3], inputs_length=0, max_length=12)
    assert len(set(found)) > 1
    inputs = loaded.tokens(texts)
    tokens, scores = loaded.programs["generate"](loaded.parameters, inputs)
    close(loaded.programs["score"](loaded.parameters, inputs, tokens), scores)
    with pytest.raises(
        ValueError, match=r"has 13 tokens, but the programs read at most 12\. .* larger --inp"
    ):
        loaded.generate(["a" * 13])


class ReadsLengths(sj.Alignment):
    """An alignment that must know the sequence lengths when it is traced."""

    @nn.compact
    def __call__(self, queries, keys, context):
        shape = context.num_heads, int(context.query_span.length), int(context.key_span.length)
        return (static(jnp.asarray(np.arange(np.prod(shape)).reshape(shape) % 3, jnp.float32)),)


def test_lengths_are_fixed_if_a_layer_needs_to_know_them(tmp_path):
    block = sj.Block(sj.Attention(2, 4, alignment=ReadsLengths()), sj.FeedForward(16))
    model = sj.Encoder(vocab_size=VOCAB, d_model=8, encoder=sj.Stack((sj.Run(block, 1),)))
    variables, directory = exported(tmp_path / "fixed", model)
    loaded = Model(directory)
    assert loaded.info["lengths"] == "fixed"
    assert loaded.tokens(["abc", "d"], 12).shape == (2, 12)
    agrees(loaded, model, variables, SHAPES[1:])


def test_mistakes_give_one_sentence(tmp_path, monkeypatch):
    model = encoder_decoder("rv")
    shapes = jax.eval_shape(lambda: variables_of(model))
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    for variables, vocabulary, limits, message in (
        (shapes, Bytes(), Limits(18, 5), r"inputs of 18 .* --inputs-length .* max_length=17"),
        (shapes, model, LIMITS, r"of the kind EncoderDecoder cannot be exported\. Use bytes or"),
        (half, Bytes(), LIMITS, r"is bfloat16, but only models whose parameters are float32"),
    ):
        with pytest.raises(ValueError, match=message):
            write_directory(tmp_path, model, variables, vocabulary, limits=limits)
    with pytest.raises(ValueError, match="inputs_length is 0, but it must be 1 to"):
        Limits(0, 5)
    with pytest.raises(TypeError, match="type EncoderDecoder cannot continue a text"):
        export_programs(model, traverse_util.flatten_dict(shapes, sep="/"), LIMITS, continues=True)
    with pytest.raises(ValueError, match="A Dense has no programs"):
        export_programs(nn.Dense(3), {}, LIMITS)
    _, directory = exported(tmp_path / "encoder", encoder())
    for texts, sentence in (([], "Give one or more"), (["a"], "This model only encodes")):
        monkeypatch.setattr(sys, "argv", ["load.py", *texts])
        with pytest.raises(SystemExit, match=sentence):
            runpy.run_path(str(directory / LOADER.name), run_name="__main__")
    for file in ("parameters.safetensors", "encode.stablehlo"):
        content = (directory / file).read_bytes()
        (directory / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(ValueError, match=rf"{file} is damaged\. Copy it again"):
            Model(directory)
        (directory / file).write_bytes(content)


def test_a_run_is_exported_whole_or_not_at_all(tmp_path):
    config = TINY | FAMILIES["ByT5"]
    convert_checkpoint(
        make_folder(tmp_path / "a", config, make_tensors(config)), tmp_path / "run", encoder="rv"
    )
    with pytest.raises(ValueError, match="--inputs-length"):
        export_run(tmp_path / "run", tmp_path / "long", to="stablehlo", inputs_length=4096)
    assert not [p for p in tmp_path.iterdir() if "long" in p.name]
    options = "--to stablehlo --inputs-length 16 --max-length 3"
    exported = invoke(f"export {options}", tmp_path / "run", tmp_path / "out")
    assert exported.stderr.splitlines() == [
        f"reading {tmp_path / 'run'}",
        "exporting encode, score, generate for all lengths",
        "writing parameters.safetensors",
    ]
    model, variables, _ = load(tmp_path / "run")
    loaded = Model(tmp_path / "out")
    inputs = random_tokens(2, 9)
    assert loaded.info["limits"] == {"inputs_length": 16, "targets_length": 3, "beams": 1}
    expected = decode(variables, inputs, model=model, max_length=3).tokens
    tokens, _ = loaded.programs["generate"](loaded.parameters, inputs)
    np.testing.assert_array_equal(tokens, expected)
