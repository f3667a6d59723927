"""Compares models of transformers with our conversions. `make test-peers` runs these tests."""

import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, train_sentencepiece
from synthesizer_jax.inference import Decoding, decode, decode_sequences, encode_tokens
from synthesizer_jax.models import Encoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained import Loaded, encode, generate, load
from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.opening import open_pretrained, read_params
from synthesizer_jax.primitives.parameters import Variables, apply_method
from tests.inference.beam_search import t5x_beams
from tests.pretrained.folders import FAMILIES, TINY, UNTIED, make_folder, make_tensors
from tests.pretrained.test_round_trip import OUTPUT, make_configs, projection

CLASSES = {
    "t5": "T5",
    "mt5": "MT5",
    "umt5": "UMT5",
    "t5gemma": "T5Gemma",
    "t5gemma2": "T5Gemma2",
    "t5gemma2_encoder": "T5Gemma2",
}
LENGTH = 12
TOLERANCE = 1e-5
"""The largest accepted deviation, relative to the largest logit."""
DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


def check_logits(folder: pathlib.Path, model: TokenModel, variables: Variables) -> None:
    """Compares a model's logits or states with those of the transformers model in a folder."""
    compare_logits(load_reference(folder, model), model, variables)


def compare_logits(reference, model: TokenModel, variables: Variables) -> None:
    """Compares a model's logits, or an encoder's states, with those of a transformers model.

    The inputs are two random examples.
    """
    assert deviation(reference, model, variables) <= TOLERANCE


def deviation(reference, model: TokenModel, variables: Variables) -> float:
    """Returns the largest deviation, divided by the largest logit or state."""
    rng = np.random.default_rng(0)
    ids = model.ids
    inputs = rng.integers(3, model.vocab_size, (2, 12))
    inputs[1, 7:] = ids.padding
    targets = rng.integers(3, model.vocab_size, (2, 9))
    targets[:, 0] = ids.start
    tokens = jnp.asarray(inputs, jnp.int32)
    real = inputs != ids.padding
    if isinstance(model, Encoder):
        ours = encode_tokens(variables, tokens, model=model)
    else:
        ours = apply_method(model.__call__, variables, tokens, jnp.asarray(targets, jnp.int32))
    theirs = _reference_outputs(reference, inputs, targets, real)
    real = real if isinstance(model, Encoder) else np.ones(targets.shape, bool)
    return np.abs(np.asarray(ours, np.float32) - theirs)[real].max() / np.abs(theirs[real]).max()


def load_reference(folder: pathlib.Path, model: TokenModel):
    family = json.loads((folder / "config.json").read_text()).get("model_type", "t5")
    kind = "ForConditionalGeneration"
    if isinstance(model, Encoder):
        kind = "Encoder" if family.startswith("t5gemma2") else "EncoderModel"
    cls = getattr(transformers, f"{CLASSES[family]}{kind}")
    # In version 4 of transformers, the default attention ignores the soft cap.
    options = {"attn_implementation": "eager"} if family == "t5gemma" else {}
    reference = cls.from_pretrained(str(folder), local_files_only=True, **options).float().eval()
    if family == "umt5" and not model.tied:
        # Version 5 would scale the outputs as if the embedding were tied to the output projection.
        reference.config.tie_word_embeddings = False
    return reference


def _reference_outputs(reference, inputs, targets, real) -> np.ndarray:
    arguments = {"input_ids": torch.as_tensor(inputs), "attention_mask": torch.as_tensor(real)}
    with torch.no_grad():
        if type(reference).__name__.endswith(("EncoderModel", "Encoder")):
            return reference(**arguments).last_hidden_state.numpy()
        return reference(decoder_input_ids=torch.as_tensor(targets), **arguments).logits.numpy()


def make_model(config, seed=0):
    """Returns a transformers model with random weights."""
    torch.manual_seed(seed)
    name = CLASSES[config["model_type"]]
    fields = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
    made = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(made)
    # The norms of a T5Gemma 2 multiply by one plus the parameter. With larger factors of queries
    # and keys, rounding errors would grow.
    mean = 0.0 if config["model_type"] == "t5gemma2" else 1.0
    for p in model.parameters():
        torch.nn.init.normal_(
            p, mean if p.ndim == 1 else 0.0, 0.3 if p.ndim == 1 else p.shape[-1] ** -0.5
        )
    return model.eval()


def read(folder):
    """Returns the model and the variables of a folder without a tokenizer."""
    with open_pretrained(folder) as pretrained:
        return pretrained.model, {"params": read_params(pretrained)}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_is_read(tmp_path, family):
    config = TINY | FAMILIES[family] | {"vocab_size": 48}
    reference = make_model(config)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model, variables = read(tmp_path)
    check_logits(tmp_path, model, variables)


@pytest.mark.parametrize("family", ["t5", "mt5", "umt5"])
def test_outputs_are_projected_as_the_round_trip_says(tmp_path, family):
    """Outputs are projected according to the rule in tests/pretrained/test_round_trip.py.

    The test covers all configurations for the installed version of transformers.
    """
    version = int(transformers.__version__.split(".")[0])
    compared = 0
    for i, (written_by, config, tensors) in enumerate(make_configs(family)):
        expected = projection(version, config, tensors)
        if written_by != version or expected is None:
            continue
        if family == "umt5" and version == 5 and OUTPUT in tensors:
            continue  # its outputs are scaled, unlike in any trained umT5
        folder = make_folder(tmp_path / str(i), config, tensors)
        cls = getattr(transformers, f"{CLASSES[family]}ForConditionalGeneration")
        ids = torch.as_tensor([[5, 7, 9]])
        with torch.no_grad():
            found = cls.from_pretrained(folder)(
                ids, decoder_input_ids=ids, output_hidden_states=True
            )
        logits = found.decoder_hidden_states[-1].numpy() @ expected.T
        np.testing.assert_allclose(found.logits.numpy(), logits, atol=1e-5)
        compared += 1
    assert compared > 2


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1, FLAN-T5"])
def test_torch_files_are_read(tmp_path, family):
    make_folder(
        tmp_path / "a", TINY | FAMILIES[family], tensors := make_tensors(TINY | FAMILIES[family])
    )
    (tmp_path / "a" / "model.safetensors").unlink()
    state = {name: torch.as_tensor(x) for name, x in tensors.items()}
    torch.save(state, tmp_path / "a" / "pytorch_model.bin")
    model, variables = read(tmp_path / "a")
    check_logits(tmp_path / "a", model, variables)


class Executed:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def test_code_in_a_torch_file_is_not_executed(tmp_path):
    folder = make_folder(tmp_path / "a", TINY, tensors := make_tensors(TINY))
    (folder / "model.safetensors").unlink()
    state = {name: torch.as_tensor(x) for name, x in tensors.items()}
    torch.save(state | {"x": Executed(tmp_path / "executed")}, folder / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"loading them could run code.*as model\.safetensors with"
    ) as error:
        read(folder)
    assert str(error.value).isprintable()
    assert not (tmp_path / "executed").exists()


def test_tensors_inside_of_another_object_are_named(tmp_path):
    folder = make_folder(tmp_path / "a", TINY, tensors := make_tensors(TINY))
    (folder / "model.safetensors").unlink()
    state = {name: torch.as_tensor(x) for name, x in tensors.items()}
    for saved, message in (
        ({"state_dict": state}, "'state_dict' is a dict instead of a tensor"),
        ([*state.values()], "'it' is a list instead of a tensor"),
    ):
        torch.save(saved, folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=message):
            read(folder)


def test_a_variant_that_transformers_saves_is_read(tmp_path):
    config = transformers.T5Config(**{k: TINY[k] for k in TINY if k != "architectures"})
    encoder = transformers.T5EncoderModel(config).half()
    encoder.save_pretrained(tmp_path, variant="fp16", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.fp16.json").is_file()
    with open_pretrained(tmp_path, variant="fp16") as pretrained:
        params = read_params(pretrained)
    np.testing.assert_array_equal(params["embedding"], encoder.shared.weight.detach().numpy())


def test_an_encoder_alone_has_the_same_states(tmp_path):
    made = transformers.T5Config(**{k: TINY[k] for k in TINY if k != "architectures"})
    encoder = transformers.T5EncoderModel(made).eval()
    encoder.save_pretrained(tmp_path / "a")
    model, variables = read(tmp_path / "a")
    check_logits(tmp_path / "a", model, variables)
    (tmp_path / "b").mkdir()
    write_folder(tmp_path / "b", model, variables, None)
    check_logits(tmp_path / "b", model, variables)


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1, FLAN-T5", "umT5"])
@pytest.mark.parametrize("masked", [False, True])
def test_text_encoders_have_the_same_states(tmp_path, family, masked):
    """Text encoders have the same states as in transformers, including those of padding.

    The encoder is in a folder of its own, or in the folder of a diffusers pipeline.
    """
    config = TINY | FAMILIES[family]
    make_model(config).save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    cls = getattr(transformers, f"{CLASSES[config['model_type']]}EncoderModel")
    reference = cls.from_pretrained(tmp_path / "whole").eval()
    reference.save_pretrained(tmp_path / "text_encoder_2", max_shard_size="20KB")
    tokenizer = transformers.ByT5Tokenizer(extra_ids=125)
    for name in ("whole", "tokenizer_2"):
        tokenizer.save_pretrained(tmp_path / name)
    texts = ["a cat", "a longer prompt of a dog, which is cut"]
    length = 24
    options = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
    rows = tokenizer(texts, max_length=length, **options)
    with torch.no_grad():
        found = reference(rows.input_ids, attention_mask=rows.attention_mask if masked else None)
    theirs = found.last_hidden_state.numpy()
    for name in ("whole", "text_encoder_2"):
        loaded = load(tmp_path / name, encoder_only=True)
        ours = encode(loaded, texts, pad_to=length, attend_to_padding=not masked)
        assert np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()
        cut = encode(loaded, texts, inputs_length=length, pool=False)
        real = rows.attention_mask.numpy() > 0
        if masked:
            assert (
                np.abs(np.concatenate(cut) - theirs[real]).max() <= TOLERANCE * np.abs(theirs).max()
            )


def next_log_p(reference, inputs):
    """Returns a function that computes log-probabilities of continuations with transformers."""

    def log_p(prefixes):
        rows = torch.as_tensor([(0, *prefix) for prefix in prefixes])
        encoder = torch.as_tensor(inputs)[None].expand(len(rows), -1)
        with torch.no_grad():
            found = reference(
                input_ids=encoder, attention_mask=encoder != 0, decoder_input_ids=rows
            )
        return found.logits[:, -1].double().log_softmax(-1).numpy()

    return log_p


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1, FLAN-T5", "mT5", "umT5", "efficient"])
def test_decoded_ids_are_the_same(tmp_path, family):
    """Decoded ids are the same as with transformers.

    Greedy decoding is compared with `generate`. Beam search is compared with T5X's rule, applied to
    the logits of transformers.
    """
    reference = make_model(TINY | FAMILIES[family] | {"vocab_size": 12})
    with torch.no_grad():
        reference.lm_head.weight[1] *= 3.0  # makes sequences end
    reference.save_pretrained(tmp_path)
    model, variables = read(tmp_path)
    inputs = np.random.default_rng(1).integers(2, 12, (16, 9))
    inputs[3:6, 5:] = 0
    for penalty, ngram in ((None, None), (1.3, 2)):
        with torch.no_grad():
            generated = reference.generate(
                torch.as_tensor(inputs),
                attention_mask=torch.as_tensor(inputs != 0),
                max_new_tokens=LENGTH,
                use_cache=False,  # transformers' cache fails for stacks of different depths
                do_sample=False,
                repetition_penalty=penalty,
                no_repeat_ngram_size=ngram,
            ).numpy()[:, 1:]
        decoding = Decoding(
            max_length=LENGTH, repetition_penalty=penalty, no_repeat_ngram_size=ngram
        )
        found = decode_sequences(variables, jnp.asarray(inputs), model=model, decoding=decoding)
        ours = np.asarray(found.tokens[:, 0])
        assert (ours == 1).any(axis=1).sum() > 2
        np.testing.assert_array_equal(ours[:, : generated.shape[1]], generated)
    found = decode(
        variables, jnp.asarray(inputs), model=model, max_length=LENGTH, beams=3, alpha=0.6
    )
    for row, tokens, score in zip(inputs, *map(np.asarray, found), strict=True):
        best, expected = t5x_beams(next_log_p(reference, row), LENGTH, 3, 0.6)[0]
        assert tuple(tokens[: len(best)]) == best and not tokens[len(best) :].any()
        np.testing.assert_allclose(score, expected, atol=1e-4)


ODD = [
    *("", " ", "  a  b  ", "\n", "a\nb", "a\r\nb", "\ta\tb", "a\\tb", "...", "don't"),
    *("``quoted''", "(c) a-b", "5 < 6 > 4", "A.B.C", "1,000.50", "a--b", "#$%^&*"),
    *("a" * 300, "{x}[y]", "[CLS]", "<extra_id_0>. Hello"),
    *("a <extra_id_0> b <extra_id_99>", "a<extra_id_0>b", "<extra_id_0"),
    *("<extra_id_0><extra_id_1>", "<extra_id_0> <extra_id_1>.", "x <extra_id_100> y"),
    *("<s>", "  <extra_id_5>  x", "<extra_id_0>\n", "\n<extra_id_0>", "<EXTRA_ID_0>"),
    *("<extra_id_00>", "<extra_id_0>a <extra_id_1>, <extra_id_2>", "extra_id_0>", "<mask>"),
    *("http://a.b/c?d=e", "translate English to German: The house.", "½ ﬁ ①  two"),
    *("１２３ ａｂｃ", "e\u0301", "ﬃ", "ß", "İ", "ſ", "x²", "Ⅷ", "㎏", "㍻", "ﷺ", "\u0958"),
    *("ẛ\u0323", "한국어", "\u1112\u1161\u11ab", "힣", "\u115f", "x\u3164y"),
    *("日本語 テスト", "ｶﾞ", "か\u3099", "～", "~", "مرحبا", "שלום", "हिन\u094dदी", "ไทย"),
    *("Ünïcödé", "…", "—", "“x”", "¿?", "€", "�", "naïve 中文", "😀", "a😀😀b"),
    *("👩\u200d👩\u200d👧\u200d👦", "🇩🇪", "1️⃣", "👨\u200d💻", "\u200b", "a\u200bb"),
    *("\ufeffa", "a\xadb", "\xa0a\xa0", "\u3000x", "x\u2028y", "\u2009x\u2009"),
    *("\u202eabc", "\x00a", "\x07bell", "\x1f", "\x7f", "a\x1cb", "▁", "▁a", "a▁b"),
    *("a ▁ b", "▁▁", "▁▁x"),
]
NOT_FAST = ["</s>", "a </s> b", "<pad>", "<unk> x", "a\u0300\u0301", "①\u0301", "x\x85y"]
"""Texts that the library ``tokenizers`` reads differently from SentencePiece.

They are described in docs/finetune.md.
"""


@pytest.mark.parametrize("kind", ["bytes", "trained", "T5"])
@pytest.mark.parametrize("fast", [True, False])
def test_an_exported_tokenizer_gives_the_same_ids(tmp_path, request, kind, fast):
    config = Bytes(125)
    if kind == "trained":
        config = SentencePiece(str(tmp_path / "trained.model"))
        texts = (DOCS / "training.md").read_text(encoding="utf-8").splitlines()
        train_sentencepiece(texts, tmp_path / "trained.model", vocab_size=600)
    if kind == "T5":
        spiece = request.getfixturevalue("real_data") / "sentencepiece" / "t5_spiece.model"
        config = SentencePiece(str(spiece))
    vocabulary = config.build()
    folder = tmp_path / "folder"
    folder.mkdir()
    model = Architecture(384, 20, 3, 6, 28, 1, 1, ("relu",), tied=True, scaled=True).build()
    write_folder(
        folder, model, model.init(jax.random.key(0), *(jnp.ones((1, 1), int),) * 2), vocabulary
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, use_fast=fast)
    assert len(ODD) >= 100 and len(tokenizer) == vocabulary.vocab_size
    for text in ODD if tokenizer.is_fast else ODD + NOT_FAST:
        assert tokenizer(text).input_ids == [*vocabulary.encode(text), 1], text


@pytest.mark.parametrize("family", [*FAMILIES, "unscaled"])
def test_after_training_predictions_are_equal(tmp_path, family):
    """After training, transformers makes the same predictions from the exported folder.

    The original folder is written by the installed version of transformers.
    """
    config = TINY | FAMILIES.get(family, UNTIED)
    reference = make_model(config)
    if family != "unscaled" and not config["tie_word_embeddings"]:
        reference.lm_head.weight = torch.nn.Parameter(0.2 * reference.lm_head.weight.flip(0))
    reference.save_pretrained(tmp_path / "source")
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "run")
    model, variables, vocabulary = load(tmp_path / "run")
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, "f"), variables)
    (tmp_path / "back").mkdir()
    write_folder(tmp_path / "back", model, trained, vocabulary)
    # In version 5 of transformers, AutoTokenizer has no class for umT5.
    automatic = transformers.AutoTokenizer if family != "umT5" else transformers.ByT5Tokenizer
    tokenizer = automatic.from_pretrained(tmp_path / "back")
    exported = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back").eval()
    texts = ["cola sentence: The dog sleep.", "<extra_id_0>. Hello", "größer </s>"]
    ours = generate(Loaded(model, trained, vocabulary), texts, max_length=LENGTH)
    for text, answer in zip(texts, ours, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        ids = exported.generate(**inputs, max_new_tokens=LENGTH, use_cache=False)[0, 1:].tolist()
        assert vocabulary.decode(itertools.takewhile(lambda i: i > 1, ids)) == answer
