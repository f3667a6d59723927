"""Tests that folders of transformers are read completely or not at all."""

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load_file

from synthesizer_jax.alignments import Mixture
from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.distillation.transplant import with_variants
from synthesizer_jax.inference import Decoding
from synthesizer_jax.models import ZOO, UniversalStack, alignment
from synthesizer_jax.pretrained import encode, generate, generate_with_scores, load
from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface import export as exporting
from synthesizer_jax.pretrained.opening import open_pretrained, read_params
from tests.cli.commands import call, invoke
from tests.pretrained import folders
from tests.pretrained.folders import FAMILIES, TINY, deviation, make_folder, make_tensors
from tests.training.tiny import experiment, save


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_transformers(tmp_path, family):
    config = TINY | FAMILIES[family]
    tensors = make_tensors(config)
    model, variables, _ = load(make_folder(tmp_path / "whole", config, tensors))
    assert deviation(model, variables, config, tensors) < 1e-5
    folder = make_folder(tmp_path / "cut", config, tensors, shards=3, dtype=ml_dtypes.bfloat16)
    expected = folders.rounded(tensors)
    assert deviation(model, load(folder).variables, config, expected) < 1e-5


def test_copies_of_the_embedding_and_unused_tensors_are_left_out(tmp_path):
    tensors = make_tensors(TINY)
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    more = tensors | dict.fromkeys(copies, tensors["shared.weight"])
    unused = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more[unused] = np.zeros((8, 3), np.float32)
    model, variables, _ = load(make_folder(tmp_path, TINY, more))
    assert deviation(model, variables, TINY, tensors) < 1e-5


def test_all_tensors_that_do_not_fit_are_listed_at_once(tmp_path):
    tensors = make_tensors(TINY)
    del tensors["encoder.final_layer_norm.weight"]
    tensors["decoder.block.1.layer.0.SelfAttention.q.weight"] = np.zeros((3, 4), np.float32)
    tensors["encoder.block.0.layer.0.layer_norm.weight"] = np.zeros(20, np.int32)
    tensors["adapter.weight"] = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="nothing was read") as error:
        load(make_folder(tmp_path, TINY, tensors))
    for part in (
        "encoder.final_layer_norm.weight is missing",
        "decoder.block.1.layer.0.SelfAttention.q.weight has the shape (3, 4) instead of (18, 20)",
        "encoder.block.0.layer.0.layer_norm.weight is I32, which is not a floating-point dtype",
        "adapter.weight is not part of the model",
    ):
        assert part in str(error.value)


CONFIG, GENERATION = "config.json", "generation_config.json"


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        # The kind of model is checked before its ids and its sizes.
        (
            CONFIG,
            {"model_type": "llama", "d_model": None},
            "is 'llama', which is a language model.*Give the",
        ),
        (
            CONFIG,
            {"model_type": "x", "d_model": None},
            "model_type in .* is 'x', which is another.*Give the folder of a",
        ),
        (
            CONFIG,
            {"architectures": ["T5ForSequenceClassification"]},
            "a T5ForSeq.* is not supported.*Give the",
        ),
        (CONFIG, {"d_model": None}, "d_model is None, but int is expected"),
        (CONFIG, {"num_layers": 1000}, "num_layers is 1000, but it must be 1 to 256"),
        (
            CONFIG,
            {"feed_forward_proj": "x" * 10**6},
            "feed_forward_proj is 'x{56}…, but it must be one of",
        ),
        (
            CONFIG,
            {"tie_word_embeddings": "yes"},
            "tie_word_embeddings is 'yes', but bool or none is expected",
        ),
        (
            CONFIG,
            {"eos_token_id": True},
            "eos_token_id is True, but models of this package have only one such id",
        ),
        (CONFIG, {"eos_token_id": 2}, "has the EOS id 1, but model.ids.end is 2"),
        (
            CONFIG,
            {"pad_token_id": 384},
            r"special ids SpecialIds\(padding=384.* only rows for the ids 0 to 383",
        ),
        (
            CONFIG,
            {"forced_bos_token_id": 250},
            "forced_bos_token_id is 250, .* cannot force a token",
        ),
        (CONFIG, {"num_layers": 3}, "encoder.block.2.layer.0.SelfAttention.q.weight is missing"),
        (
            CONFIG,
            {"vocab_size": 400},
            r"shared.weight has the shape \(384, 20\) instead of \(400, 20\)",
        ),
        (CONFIG, {"model_type": "umt5"}, "encoder.block.1.*relative_attention_bias"),
        (GENERATION, {"pad_token_id": 2}, r"pad_token_id is 2, but it is 0 in config\.json"),
        (
            GENERATION,
            {"pad_token_id": [0, 2]},
            r"generation_config.json .*pad_token_id is \[0, 2\]",
        ),
        (GENERATION, {"eos_token_id": [1], "forced_eos_token_id": None}, None),
    ],
)
def test_a_configuration_that_does_not_fit_is_an_error(tmp_path, file, fields, message):
    folder = make_folder(tmp_path, TINY, make_tensors(TINY))
    (folder / file).write_text(json.dumps(fields if file == GENERATION else TINY | fields))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        load(folder)


def test_an_explicit_vocabulary_and_a_whole_file_have_priority(tmp_path):
    folder = make_folder(tmp_path / "source", TINY, make_tensors(TINY))
    # transformers ignores this index, because the folder contains a single file with all tensors.
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="or give one with --vocabulary"):
        convert_checkpoint(folder, tmp_path / "run")
    convert_checkpoint(folder, tmp_path / "run", vocabulary=Bytes(125))


def test_three_lines_generate_and_encode(tmp_path):
    config = TINY | FAMILIES["ByT5"]
    loaded = load(make_folder(tmp_path, config, make_tensors(config)))
    assert len(generate(loaded, ["what?", "why?"], max_length=5)) == 2
    decoding = Decoding(max_length=5, temperature=1.0, samples=2)
    (texts,) = generate_with_scores(loaded, ["what?"], decoding=decoding)
    assert [generated.score < 0 for generated in texts] == [True, True]
    assert generate(loaded, ["what?"], decoding=decoding) == [texts[0].text]
    assert encode(loaded, ["what?", "why not?"]).shape == (2, 20)
    with pytest.raises(TypeError, match=r"single string instead .*\. Pass \[text\]"):
        encode(loaded, "what?")


def test_a_model_unknown_to_other_libraries_is_refused_with_an_alternative():
    with pytest.raises(ValueError, match=r"A LanguageModel is not a T5\. .* --to stablehlo"):
        Architecture.of(ZOO["lm_base"]())


@pytest.mark.parametrize("family", ["ByT5", "umT5"])
def test_a_folder_or_a_run_becomes_a_synthesizer_that_computes_the_same(tmp_path, family):
    config = TINY | FAMILIES[family]
    folder = make_folder(tmp_path / "source", config, make_tensors(config))
    convert_checkpoint(folder, tmp_path / "run")
    with pytest.raises(FileExistsError, match="Choose a new directory"):
        convert_checkpoint(folder, tmp_path / "run")
    variants = {"encoder": "rv", "decoder": "fdv", "max_length": 16}
    for source in (folder, tmp_path / "run"):
        directory = tmp_path / f"synthesizer_{source.name}"
        convert_checkpoint(source, directory, **variants)
        model, variables, vocabulary = load(directory)
        assert isinstance(model.encoder.runs[0].block.self_mixer.alignment, Mixture)
        assert deviation(model, variables, config, make_tensors(config)) < 1e-5
        assert vocabulary.encode("a") == [100] and vocabulary.vocab_size == 384
    with pytest.raises(ValueError, match="Random does not contain"):
        convert_checkpoint(folder, tmp_path / "random", encoder="r")
    for_others = (
        r"which no published T5 has\. .* export it with --to stablehlo, which supports every model"
    )
    with pytest.raises(ValueError, match=rf"alignment.* {for_others}"):
        export_run(directory, tmp_path / "exported")
    assert not (tmp_path / "random").exists() and not (tmp_path / "exported").exists()


def test_convert_and_export_show_their_progress(tmp_path):
    config = TINY | {"relative_attention_max_distance": 128}  # the distance that T5X assumes
    tensors = make_tensors(config)
    folder = make_folder(tmp_path / "source", config, tensors)
    run = tmp_path / "run"
    converted = invoke("convert", folder, run)
    assert converted.stdout.startswith(f"{run} holds ")
    # The checkpoint also contains the step.
    assert converted.stderr.splitlines() == [
        f"opening {folder}",
        f"writing a checkpoint of {len(tensors) + 1} arrays",
    ]
    arrays = f"converting {len(tensors)} arrays"
    for to, file in (("huggingface", "model.safetensors"), ("t5x", "checkpoint")):
        exported = invoke("export", run, tmp_path / to, "--to", to)
        assert exported.stdout.startswith(f"{tmp_path / to} holds the model of {run}\n")
        assert exported.stderr.splitlines() == [f"reading {run}", arrays, f"writing {file}"]


def test_the_command_line_converts_generates_plans_and_exports(tmp_path):
    config = TINY | FAMILIES["T5 1.1, FLAN-T5"]
    tensors = make_tensors(config)
    folder = make_folder(tmp_path / "source", config, tensors, shards=2)
    run = tmp_path / "run"
    shown = call("convert", folder, run)
    assert f"holds {sum(x.size for x in tensors.values()):,} parameters" in shown
    assert json.loads((run / "experiment.json").read_text())["model"]["dtype"] == "auto"
    call("generate", "--workdir", run, "--max-length", 4, "what?")
    where = "--topology", "v5e:2x2", "--set", "data.batch_size=64"
    planned = call("plan", folder, *where)
    assert planned == call("plan", run, *where) and "16 rows per device" in planned
    call("export", run, tmp_path / "back", "--dtype", "bfloat16")
    file = tmp_path / "back" / "model.safetensors"
    assert file.stat().st_mode == (tmp_path / "back" / CONFIG).stat().st_mode
    back = load_file(file)
    assert back.keys() == tensors.keys()
    embedding = load(tmp_path / "back").variables["params"]["embedding"]
    np.testing.assert_array_equal(embedding, back["shared.weight"])
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name], x.astype(ml_dtypes.bfloat16))


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("File too large")

    monkeypatch.setattr(exporting, "save_file", full)
    with open_pretrained(make_folder(tmp_path, TINY, make_tensors(TINY))) as pretrained:
        params = read_params(pretrained)
    with pytest.raises(OSError, match=r"model.safetensors cannot be written .File too large"):
        exporting.write_folder(tmp_path, pretrained.model, {"params": params}, None)


def test_an_encoder_alone_is_not_converted(tmp_path):
    tensors = {n: x for n, x in make_tensors(TINY).items() if not n.startswith("decoder")}
    folder = make_folder(tmp_path, TINY | {"architectures": ["T5EncoderModel"]}, tensors)
    with pytest.raises(ValueError, match="contains only an encoder"):
        convert_checkpoint(folder, tmp_path / "run")


def test_constants_and_shared_layers_are_not_converted(tmp_path):
    """Models with fixed tables or shared layers are not exported.

    A fixed table would be lost, and a Universal Transformer has no separate layers.
    """
    recipe = experiment()
    fixed = alignment("fix", head_dim=4, max_length=8)
    model = student_model(recipe.model, (Replacement(fixed, place="decoder"),))
    save(tmp_path, replace(recipe, model=model))
    with pytest.raises(ValueError, match="has tables that are not trained"):
        convert_checkpoint(tmp_path, tmp_path / "run", encoder="rv")
    universal = UniversalStack(recipe.model.encoder.runs)
    with pytest.raises(ValueError, match="The encoder is a UniversalStack"):
        with_variants(model.copy(encoder=universal), encoder="rv", decoder=None, max_length=8)


def test_adapters_without_their_configuration_name_the_missing_file(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"no adapter_config\.json, .* Copy or download"):
        load(tmp_path)


def test_wrong_arguments_give_one_sentence(tmp_path):
    folder = make_folder(tmp_path / "folder", TINY, make_tensors(TINY))
    loaded = load(folder)
    with pytest.raises(TypeError, match=r"path is None, but it must be the path of a model"):
        load(None)
    with pytest.raises(TypeError, match=r"path is '', but it must be the path of a model"):
        load("")
    for function in (generate, encode):
        with pytest.raises(TypeError, match=r"must be a loaded model\. Pass the result of"):
            function(str(folder), ["a"])
        with pytest.raises(TypeError, match=r"texts\[1\] is 3, but every text must be a string"):
            function(loaded, ["a", 3])
        for texts in (None, iter(["a"])):
            with pytest.raises(TypeError, match=r"texts is .*, but it must be a sequence"):
                function(loaded, texts)
        with pytest.raises(TypeError, match=r"inputs_length is '8', but it must be an integer"):
            function(loaded, ["a"], inputs_length="8")
    with pytest.raises(TypeError, match=r"decoding is 4, but it must be a Decoding"):
        generate(loaded, ["a"], decoding=4)
    with pytest.raises(ValueError, match=r"inputs_length is 0, but the model is an EncoderDecoder"):
        generate(loaded, ["a"], inputs_length=0)


def test_a_folder_of_runs_or_a_published_model_is_told_from_a_run(tmp_path):
    folder = make_folder(tmp_path / "folder", TINY, make_tensors(TINY))
    (tmp_path / "runs" / "t5").mkdir(parents=True)
    (tmp_path / "runs" / "t5" / "experiment.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"Give a run, such as .*runs/t5\."):
        load(tmp_path / "runs")
    with pytest.raises(ValueError, match=rf"'synthesizer-jax convert {folder} RUN' makes a run"):
        call("generate", folder, "a text")
    # Such a text is too long for the name of a file.
    with pytest.raises(ValueError, match=r"generate needs a run"):
        call("generate", "word " * 100)
