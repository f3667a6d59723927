"""Folders of transformers come in, whole or not at all."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization, traverse_util
from safetensors.numpy import load_file

from synthesizer_jax.alignments import Mixture
from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.distillation.replacement import Replacement, student_model
from synthesizer_jax.distillation.transplant import with_variants
from synthesizer_jax.models import UniversalStack, alignment
from synthesizer_jax.pretrained import encode, generate, load
from synthesizer_jax.pretrained.convert import Variants, convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface import export as exporting
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape, make_mesh
from synthesizer_jax.training.run_directory import save_run
from synthesizer_jax.training.trainer import Trainer
from tests.cli.commands import call
from tests.pretrained import folders
from tests.pretrained.folders import FAMILIES, TINY, logits, make_folder, make_tensors
from tests.training.tiny import experiment

INPUTS = np.array([[7, 300, 12, 5, 9, 44, 8, 21, 3, 1]])
TARGETS = np.array([[0, 15, 220, 3, 18, 2]])


def deviation(model, variables, config, tensors):
    found = model.apply(variables, jnp.asarray(INPUTS), jnp.asarray(TARGETS))[0]
    expected = logits(config, tensors, INPUTS[0], TARGETS[0])
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_its_logits(tmp_path, family):
    config = TINY | FAMILIES[family]
    tensors = make_tensors(config)
    model, variables, _ = load(make_folder(tmp_path, config, tensors))
    assert deviation(model, variables, config, tensors) < 1e-5


def test_shards_and_bfloat16(tmp_path):
    config = TINY | FAMILIES["T5 1.1, FLAN-T5"]
    tensors = make_tensors(config)
    folder = make_folder(tmp_path, config, tensors, shards=3, dtype=ml_dtypes.bfloat16)
    model, variables, _ = load(folder)
    assert deviation(model, variables, config, folders.rounded(tensors)) < 1e-5


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
        "decoder.block.1.layer.0.SelfAttention.q.weight is (3, 4), not (18, 20)",
        "encoder.block.0.layer.0.layer_norm.weight is I32, not a floating-point number",
        "adapter.weight is not part of the model",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "t5gemma"}, "model_type is 't5gemma'"),
        ({"d_model": None}, "d_model is None; expected a positive integer"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"num_heads": 2**40}, "num_heads"),
        ({"num_layers": 1000}, "num_layers is 1000; expected a positive integer up to 256"),
        ({"d_kv": 2**31 - 1}, "d_kv is 2147483647; expected a positive integer up to 1,048,576"),
        ({"feed_forward_proj": "x" * 10**6}, "feed_forward_proj is 'x{56}…; supported"),
        ({"feed_forward_proj": "gated-gelo"}, "did you mean 'gated-gelu'"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"decoder_start_token_id": 5}, "models here have 0"),
        ({"eos_token_id": 2}, "eos_token_id is 2, but models here have 1"),
        ({"forced_bos_token_id": 250}, "forced_bos_token_id is 250, but models here have null"),
        ({"num_layers": 3}, "encoder.block.2.layer.0.SelfAttention.q.weight is missing"),
        ({"vocab_size": 400}, r"shared.weight is \(384, 20\), not \(400, 20\)"),
        ({"tie_word_embeddings": False}, "lm_head.weight is missing"),
        ({"model_type": "umt5"}, "encoder.block.1.layer.0.SelfAttention.relative_attention_bias"),
    ],
)
def test_a_config_that_does_not_fit_is_an_error(tmp_path, fields, message):
    folder = make_folder(tmp_path, TINY, make_tensors(TINY))
    (folder / "config.json").write_text(json.dumps(TINY | fields))
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ({"eos_token_id": [1], "forced_eos_token_id": None}, None),
        ({"eos_token_id": [1, 2]}, r"generation_config.json .*eos_token_id is \[1, 2\]"),
        ({"eos_token_id": None}, "eos_token_id is None, but models here have 1"),
        ({"forced_eos_token_id": 1}, "forced_eos_token_id is 1, but models here have null"),
        ({"decoder_start_token_id": 7}, "decoder_start_token_id is 7"),
        ({"pad_token_id": 1}, "pad_token_id is 1, but models here have 0"),
    ],
)
def test_ids_of_generation_are_those_of_t5_or_refused(tmp_path, ids, message):
    folder = make_folder(tmp_path / "source", TINY, make_tensors(TINY))
    (folder / "generation_config.json").write_text(json.dumps(ids))
    refused = pytest.raises(ValueError, match=message) if message else contextlib.nullcontext()
    with refused:
        convert_checkpoint(folder, tmp_path / "run")
    assert (tmp_path / "run").exists() == (message is None)


def test_an_output_projection_of_its_own_contradicts_a_tied_model(tmp_path):
    tensors = make_tensors(TINY)
    tensors["lm_head.weight"] = 2 * tensors["shared.weight"]
    with pytest.raises(ValueError, match="correct tie_word_embeddings"):
        load(make_folder(tmp_path, TINY, tensors))


def truncate(folder):
    path = folder / "model-00002-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def lie_about_the_header(folder):
    path = folder / "model-00001-of-00003.safetensors"
    path.write_bytes((2**31).to_bytes(8, "little") + path.read_bytes()[8:])


def rewrite_index(folder, change):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def climb_out(folder):
    (folder.parent / "outside.safetensors").write_bytes(b"")
    rewrite_index(folder, lambda m: m.update({"shared.weight": "../outside.safetensors"}))


def forget_a_tensor(folder):
    rewrite_index(folder, lambda m: m.pop("shared.weight"))


def remove_a_shard(folder):
    (folder / "model-00003-of-00003.safetensors").unlink()


def leave_a_pickle(folder):
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch executed'\ntR.")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "cannot be read"),
        (lie_about_the_header, "header too large"),
        (climb_out, "not a file of the folder"),
        (forget_a_tensor, "disagree about 1 tensors, such as 'shared.weight'"),
        (remove_a_shard, "is missing"),
        (leave_a_pickle, "needs PyTorch|nothing in it was executed"),
    ],
)
def test_damage_is_one_sentence_and_leaves_nothing(tmp_path, damage, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_folder(tmp_path / "source", TINY, make_tensors(TINY), shards=3)
    damage(folder)
    before = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        convert_checkpoint(folder, tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_a_converted_run_is_loaded_and_generates(tmp_path):
    config = TINY | FAMILIES["ByT5"]
    tensors = make_tensors(config)
    folder = make_folder(tmp_path / "source", config, tensors)
    convert_checkpoint(folder, tmp_path / "run")
    with pytest.raises(FileExistsError, match="give a new directory"):
        convert_checkpoint(folder, tmp_path / "run")
    model, variables, vocabulary = load(tmp_path / "run")
    assert deviation(model, variables, config, tensors) < 1e-5
    assert vocabulary.encode("a") == [100] and vocabulary.vocab_size == 384


PROGRAM = """
import json, sys
import synthesizer_jax
loaded = synthesizer_jax.load(sys.argv[1])
print(json.dumps(synthesizer_jax.generate(loaded, ["what?", "why?"], max_length=5)))
decoding = synthesizer_jax.Decoding(max_length=5, temperature=1.0, samples=2)
(texts,) = synthesizer_jax.generate_with_scores(loaded, ["what?"], decoding=decoding)
assert [generated.score < 0 for generated in texts] == [True, True]
assert synthesizer_jax.generate(loaded, ["what?"], decoding=decoding) == [texts[0].text]
print(synthesizer_jax.encode(loaded, ["what?", "why not?"]).shape)
assert "tensorflow" not in sys.modules and "seqio" not in sys.modules
"""


@pytest.mark.slow
def test_those_who_may_read_the_folder_may_read_its_tensors(tmp_path, monkeypatch):
    make_folder(tmp_path / "a", TINY, make_tensors(TINY))
    convert_checkpoint(tmp_path / "a", tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "b")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "b").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]

    monkeypatch.setattr(exporting, "LARGEST_SHARD", 10_000)
    export_run(tmp_path / "run", tmp_path / "c")
    assert len(list((tmp_path / "c").glob("model-*.safetensors"))) > 1
    whole, divided = (load(str(tmp_path / name)).variables for name in "bc")
    jax.tree.map(np.testing.assert_array_equal, whole, divided)


def test_a_folder_may_be_the_working_directory(tmp_path, monkeypatch):
    make_folder(tmp_path / "a", TINY, make_tensors(TINY))
    monkeypatch.chdir(tmp_path / "a")
    assert load(".").model.vocab_size == TINY["vocab_size"]


def test_three_lines_generate_and_encode_without_tensorflow(tmp_path):
    config = TINY | FAMILIES["ByT5"]
    folder = make_folder(tmp_path, config, make_tensors(config))
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    root = pathlib.Path(__file__).resolve().parents[2]
    found = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert found.returncode == 0, found.stderr
    answers, shape = found.stdout.splitlines()
    assert len(json.loads(answers)) == 2 and shape == "(2, 20)"


@pytest.mark.parametrize("family", ["T5 1.0", "umT5"])
def test_a_folder_or_a_run_becomes_a_synthesizer_that_computes_the_same(tmp_path, family):
    config = TINY | FAMILIES[family]
    folder = make_folder(tmp_path / "source", config, make_tensors(config))
    convert_checkpoint(folder, tmp_path / "run")
    variants = Variants(encoder="rv", decoder="fdv", max_length=16)
    for source in (folder, tmp_path / "run"):
        directory = tmp_path / f"synthesizer_{source.name}"
        convert_checkpoint(source, directory, variants=variants)
        model, variables, _ = load(directory)
        assert isinstance(model.encoder.runs[0].block.self_mixer.alignment, Mixture)
        assert deviation(model, variables, config, make_tensors(config)) < 1e-5
    with pytest.raises(ValueError, match="Random does not contain"):
        convert_checkpoint(folder, tmp_path / "random", variants=Variants(encoder="r"))
    assert not (tmp_path / "random").exists()
    with pytest.raises(ValueError, match=r"alignment.* which no published T5 has"):
        export_run(directory, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.slow
def test_the_command_line_converts_generates_and_exports(tmp_path):
    config = TINY | FAMILIES["T5 1.1, FLAN-T5"]
    tensors = make_tensors(config)
    folder = make_folder(tmp_path / "source", config, tensors, shards=2)
    shown = call("convert", folder, tmp_path / "run")
    assert f"holds {sum(x.size for x in tensors.values()):,} parameters" in shown
    call("generate", "--workdir", tmp_path / "run", "--max-length", 4, "what?")
    call("export", tmp_path / "run", tmp_path / "back", "--dtype", "bfloat16")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(back[name], x.astype(ml_dtypes.bfloat16))
    card = (tmp_path / "back" / "README.md").read_text()
    assert "library_name: transformers" in card and "# A T5, converted" in card
    assert "Trained on" not in card  # at step 0


@pytest.mark.slow
def test_a_full_disk_is_one_line_with_the_path(tmp_path):
    folder = make_folder(tmp_path / "source", TINY, make_tensors(TINY))
    convert_checkpoint(folder, tmp_path / "run")
    for command in (["convert", folder], ["export", tmp_path / "run"]):
        for kilobytes in (3, 20):  # the first file is too large, and only an array is
            limited = f'ulimit -f {kilobytes}; "$@"'
            program = ["bash", "-c", limited, "-", sys.executable, "-m", "synthesizer_jax"]
            ended = subprocess.run(
                [*program, *map(str, command), str(tmp_path / "new")],
                capture_output=True,
                text=True,
                check=False,
                env=os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "false"},
            )
            assert len(ended.stderr.splitlines()) == 1, ended.stderr
            line = ended.stderr
            assert ended.returncode == 2 and line.startswith("error: "), line
            assert "File too large" in line and str(tmp_path) in line
            assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "source"]


def test_a_flax_folder_is_read(tmp_path):
    config = TINY | FAMILIES["T5 1.1, FLAN-T5"]
    tensors, flat = make_tensors(config), {}
    for name, x in tensors.items():
        *keys, _ = name.split(".")
        table = keys[-1] in ("shared", "relative_attention_bias")
        last = "weight" if x.ndim == 1 else "embedding" if table else "kernel"
        flat[(*keys, last)] = np.ascontiguousarray(x.T) if last == "kernel" else x
    folder = make_folder(tmp_path, config, {})
    (folder / "model.safetensors").unlink()
    data = serialization.msgpack_serialize(traverse_util.unflatten_dict(flat))
    (folder / "flax_model.msgpack").write_bytes(data)
    model, variables, _ = load(folder)
    assert deviation(model, variables, config, tensors) < 1e-5


def test_an_encoder_alone_is_loaded_over_a_mesh(tmp_path):
    tensors = {n: x for n, x in make_tensors(TINY).items() if not n.startswith("decoder")}
    folder = make_folder(tmp_path, TINY | {"architectures": ["T5EncoderModel"]}, tensors)
    texts = ["one text", "another", "a third one that is longer"]
    alone = load(folder)
    sharded = load(folder, mesh=make_mesh(MeshShape(fsdp=4), jax.devices()[:4]))
    assert "fsdp" in str(sharded.variables["params"]["embedding"].sharding.spec)
    np.testing.assert_allclose(encode(sharded, texts), encode(alone, texts), atol=1e-5)
    with pytest.raises(TypeError, match="Encoder generates no text"):
        generate(alone, texts)
    with pytest.raises(ValueError, match="holds an encoder alone"):
        convert_checkpoint(folder, tmp_path / "run")


def test_constants_and_shared_layers_are_not_converted(tmp_path):
    """A table that is not trained would be left out, and a Universal Transformer has no layers."""
    recipe = experiment()
    fixed = alignment("fix", head_dim=4, max_length=8)
    model = student_model(recipe.model, (Replacement(fixed, place="decoder"),))
    state = Trainer(replace(recipe, model=model)).init()
    save_run(replace(recipe, model=model), tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(state, None)
    checkpoints.close()
    with pytest.raises(ValueError, match="has tables that are not trained"):
        convert_checkpoint(tmp_path, tmp_path / "run", variants=Variants(encoder="rv"))
    universal = UniversalStack(recipe.model.encoder.runs)
    with pytest.raises(ValueError, match="the encoder is a UniversalStack"):
        with_variants(model.copy(encoder=universal), encoder="rv", decoder=None, max_length=8)
