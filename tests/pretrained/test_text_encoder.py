"""Tests T5 as a text encoder: fixed lengths, folders of diffusers, and encoder-only loading."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from synthesizer_jax.attention import Mask
from synthesizer_jax.pretrained import encode, generate, load
from synthesizer_jax.pretrained.huggingface import folder as opening
from synthesizer_jax.pretrained.huggingface.weights import open_weights
from synthesizer_jax.sharding import MeshShape, make_mesh
from tests.conftest import snippets
from tests.pretrained.folders import FAMILIES, TINY, UNTIED, logits, make_folder, make_tensors

TEXTS = ["a cat", "a longer prompt of a dog"]


@pytest.mark.parametrize("family", ["T5 1.1, FLAN-T5", "umT5"])
@pytest.mark.parametrize("attend_to_padding", [True, False])
def test_padded_texts_have_the_states_of_transformers(tmp_path, family, attend_to_padding):
    """Padded texts have the same states as in transformers, with and without attention mask.

    The states of padding are compared, too.

    Long texts are truncated.
    """
    config = TINY | FAMILIES[family]
    loaded = load(make_folder(tmp_path, config, tensors := make_tensors(config)))
    options = {"pad_to": 16, "attend_to_padding": attend_to_padding}
    found = encode(loaded, TEXTS, **options)
    assert found.shape == (2, 16, 20)
    for text, states, pooled in zip(
        TEXTS, found, encode(loaded, TEXTS, pool=True, **options), strict=True
    ):
        ids = np.array([*loaded.vocabulary.encode(text)[:15], 1])
        real = len(ids)
        rows = np.pad(ids, (0, 16 - len(ids)))
        expected = logits(config, tensors, rows, None, real=None if attend_to_padding else real)
        assert np.abs(states - expected).max() < 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(pooled, states[:real].mean(0), atol=1e-6)
        if not attend_to_padding:
            (cut,) = encode(loaded, [text], inputs_length=16, pool=False)
            np.testing.assert_allclose(cut, states[:real], atol=1e-5)
    with pytest.raises(ValueError, match="Add pad_to, for example pad_to=512"):
        encode(loaded, TEXTS, attend_to_padding=True)


@pytest.mark.parametrize("kind", ["bool", "int64", "one token of padding"])
def test_an_attention_mask_gives_the_states_of_transformers(tmp_path, kind):
    """With an attention mask, the states are the same as in transformers.

    The mask comes from a tokenizer, or also includes the first padding token.
    """
    config = TINY | UNTIED
    loaded = load(make_folder(tmp_path, config, tensors := make_tensors(config)), encoder_only=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(2, 300, (3, 8))
    lengths = np.array([8, 5, 2])
    if kind == "one token of padding":
        mask = Mask(key_lengths=jnp.asarray(lengths + 1), query_valid=jnp.asarray(ids >= 0))
        lengths = np.minimum(lengths + 1, 8)
    else:
        mask = (np.arange(8) < lengths[:, None]).astype(kind)
    found = jax.jit(loaded.model.apply)(loaded.variables, ids, mask=mask)
    for row, real, states, pooled in zip(ids, lengths, found.hidden, found.pooled, strict=True):
        expected = logits(config, tensors, row, None, real=real)
        assert np.abs(states - expected).max() < 1e-5 * np.abs(expected).max()
        np.testing.assert_allclose(pooled, states[:real].mean(0), atol=1e-5)


@pytest.mark.parametrize("family", ["T5 1.0", "umT5"])
def test_only_the_encoders_tensors_are_read(tmp_path, family, monkeypatch):
    """If only the encoder is loaded, only its tensors are read from a folder with both stacks.

    Encoders are also loaded on a mesh and in bfloat16. Files that contain no encoder tensors may be
    missing.
    """
    config = TINY | FAMILIES[family]
    tensors = make_tensors(config)
    folder = make_folder(tmp_path, config, tensors, shards=len(tensors))
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    encoder = {name for name in tensors if name.startswith(("encoder.", "shared."))}
    (folder / files["decoder.final_layer_norm.weight"]).unlink()
    read = dict.fromkeys(encoder, 0)

    def spied(*args, **options):
        for name, tensor in open_weights(*args, **options).items():

            def stored(index, name=name, tensor=tensor):
                """Reads a part of a tensor, and counts its numbers."""
                x = tensor.read(index)
                read[name] += x.size
                return x

            yield name, tensor._replace(read=stored)

    monkeypatch.setattr(
        opening, "open_weights", lambda *args, **options: dict(spied(*args, **options))
    )
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=1), jax.devices()[:4])
    loaded = load(folder, encoder_only=True, dtype="bfloat16", mesh=mesh)
    # The devices of this process hold every number, and some of them hold the same numbers.
    assert read == {name: tensors[name].size for name in encoder}
    leaves = jax.tree.leaves(loaded.variables)
    assert {x.dtype.name for x in leaves} == {loaded.model.dtype} == {"bfloat16"}
    assert sum(x.size for x in leaves) == sum(tensors[name].size for name in encoder)
    assert "fsdp" in str(loaded.variables["params"]["embedding"].sharding.spec)
    ids = np.array([*loaded.vocabulary.encode(TEXTS[0]), 1])
    expected = logits(config, tensors, ids, None)
    (found,) = encode(loaded, TEXTS[:1], pool=False)
    assert np.abs(found - expected).max() < 0.05 * np.abs(expected).max()
    with pytest.raises(FileNotFoundError, match="is missing"):
        load(folder)
    with pytest.raises(ValueError, match="dtype is 'float16', but it must be one of"):
        load(folder, dtype="float16")


def test_dtypes_are_names_or_numpys(tmp_path):
    folder = make_folder(tmp_path, TINY, make_tensors(TINY))
    for dtype in ("bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")):
        loaded = load(folder, encoder_only=True, dtype=dtype)
        assert loaded.variables["params"]["embedding"].dtype == loaded.model.dtype == "bfloat16"
    assert load(folder, encoder_only=True, dtype="auto").model.dtype == "float32"  # on CPUs
    for dtype, found in ((jnp.float16, "'float16'"), ("bf16", "'bf16'"), (16, "16")):
        with pytest.raises(
            ValueError,
            match=f"dtype is {found}, but it must be one of 'auto'|dtype is {found}, but str",
        ):
            load(folder, dtype=dtype)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_variant_is_another_set_of_files(tmp_path, shards):
    tensors = make_tensors(TINY)
    half = {name: x.astype(np.float16) for name, x in tensors.items()}
    folder = make_folder(tmp_path, TINY, half, shards=shards, dtype=np.float16, variant="fp16")
    with pytest.raises(
        FileNotFoundError, match=r"no model\.safetensors or .*\. You can give variant='fp16'\.$"
    ):
        load(folder)
    with pytest.raises(
        FileNotFoundError,
        match=r"no model\.bf16\.safetensors or .*\. You can give variant='fp16'\.$",
    ):
        load(folder, variant="bf16")
    make_folder(folder, TINY, make_tensors(TINY, seed=1))
    embedding = load(folder, variant="fp16").variables["params"]["embedding"]
    np.testing.assert_array_equal(embedding, half["shared.weight"])
    with pytest.raises(FileNotFoundError, match=r"leave the variant out or give variant='fp16'\.$"):
        load(folder, variant="bf16")
    with pytest.raises(
        ValueError, match=r"variant='fp16' is only for models that transformers has saved, but"
    ):
        (folder / "file").write_bytes(b"")
        load(folder / "file", variant="fp16")


@pytest.mark.parametrize("encoder_only", [False, True])
def test_single_files_are_named(tmp_path, encoder_only):
    """Single weight files, without configuration and tokenizer, are refused with a clear error.

    A folder that contains all three is read.
    """
    tensors = {n: x for n, x in make_tensors(TINY).items() if not n.startswith("decoder")}
    folder = make_folder(tmp_path / "folder", TINY, tensors)
    single = tmp_path / "t5xxl_fp16.safetensors"
    single.write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "t5.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "t5.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    for path, message in (
        (
            single,
            r"Put it, with the name model\.safetensors, into a folder that has the config\.json",
        ),
        (tmp_path / "t5.bin", r"Put it, with the name pytorch_model\.bin, into a folder"),
        (
            tmp_path / "t5.gguf",
            r"is a GGUF file, which cannot be read\. Give the folder of the original",
        ),
        (
            folder / "model.safetensors",
            rf"contains only tensors\. Give its folder, which is {folder}\.$",
        ),
        (folder / "config.json", rf"is a JSON file\. Give its folder, which is {folder}\.$"),
    ):
        with pytest.raises(ValueError, match=message):
            load(path, encoder_only=encoder_only)
    single.replace(folder / "model.safetensors")
    load(folder, encoder_only=True)


def test_no_texts_make_no_rows(tmp_path):
    loaded = load(make_folder(tmp_path, TINY, make_tensors(TINY)))
    for options, shape in (
        ({}, (0, 20)),
        ({"pad_to": 8}, (0, 8, 20)),
        ({"pad_to": 8, "pool": True, "attend_to_padding": True}, (0, 20)),
    ):
        found = encode(loaded, [], **options)
        assert (found.shape, found.dtype) == (shape, np.float32)
    assert encode(loaded, [], pool=False) == []


def test_impossible_texts_and_lengths_give_one_sentence(tmp_path):
    loaded = load(make_folder(tmp_path, TINY, make_tensors(TINY)))
    for options in ({"pad_to": 0}, {"pad_to": -1}, {"inputs_length": 0}):
        ((name, value),) = options.items()
        with pytest.raises(
            ValueError, match=f"{name} is {value}, but it must be at least 1, because"
        ):
            encode(loaded, ["a"], **options)
    with pytest.raises(ValueError, match="inputs_length is -1, but it must be at least 1"):
        generate(loaded, ["a"], inputs_length=-1)
    for text in ("a \ud83d b", "\udc80"):
        with pytest.raises(
            ValueError,
            match=r"has a lone surrogate, '\\u[\w]*' at index \d, which is not a character",
        ):
            encode(loaded, [text])


@pytest.mark.parametrize(
    ("axes", "kinds"),
    [
        (("data", "fsdp"), (AxisType.Auto, AxisType.Auto)),
        (("tensor", "context"), (AxisType.Explicit, AxisType.Explicit)),
        (("dp",), (AxisType.Auto,)),
    ],
)
def test_meshes_of_other_programs_give_the_same_states(tmp_path, axes, kinds):
    """The states are the same on meshes that another program has made.

    These meshes may lack the axes over which we shard, and have other axes.
    """
    config = TINY | UNTIED | {"num_heads": 4}
    folder = make_folder(tmp_path, config, make_tensors(config))
    mesh = jax.make_mesh((2,) * len(axes), axes, kinds, devices=jax.devices()[: 2 ** len(axes)])
    sharded = load(folder, encoder_only=True, mesh=mesh)
    used = {axis for x in jax.tree.leaves(sharded.variables) for axis in x.sharding.spec if axis}
    assert used == set(axes) & {"fsdp", "tensor"}
    options = {"pad_to": 16, "attend_to_padding": True}
    expected = encode(load(folder, encoder_only=True), TEXTS, **options)
    np.testing.assert_allclose(encode(sharded, TEXTS, **options), expected, atol=1e-5)


@pytest.mark.parametrize("encoder_only", [False, True])
def test_two_embeddings_are_refused(tmp_path, encoder_only):
    tensors = make_tensors(TINY)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]
    folder = make_folder(tmp_path, TINY, tensors)
    load(folder, encoder_only=encoder_only)
    make_folder(
        folder, TINY, tensors | {"encoder.embed_tokens.weight": tensors["shared.weight"] * 1.01}
    )
    with pytest.raises(
        ValueError, match=r"encoder\.embed_tokens\.weight is not equal to shared\.weight"
    ):
        load(folder, encoder_only=encoder_only)


@pytest.mark.parametrize(
    "mesh", ["fsdp", MeshShape(fsdp=8), jax.sharding.AbstractMesh((2,), ("fsdp",))]
)
def test_a_mesh_must_consist_of_devices(tmp_path, mesh):
    with pytest.raises(
        TypeError, match=r"must be a jax\.sharding\.Mesh\. Make one with sharding\.make_mesh"
    ):
        load(tmp_path, mesh=mesh)


@pytest.mark.parametrize(("number", "kind"), [("", "UMT5"), ("_2", "T5")])
def test_a_pipelines_tokenizer_is_beside_its_text_encoder(tmp_path, number, kind):
    config = TINY | {"model_type": kind.lower(), "architectures": [f"{kind}EncoderModel"]}
    tensors = {n: x for n, x in make_tensors(config).items() if not n.startswith("decoder")}
    folder = make_folder(tmp_path / f"text_encoder{number}", config, tensors, shards=2)
    tokenizer = tmp_path / f"tokenizer{number}"
    tokenizer.mkdir()
    (folder / "tokenizer_config.json").rename(tokenizer / "tokenizer_config.json")
    assert load(f"{folder}/").vocabulary.vocab_size == 384
    with pytest.raises(FileNotFoundError, match="no vocabulary that is known here"):
        load(folder.rename(tmp_path / "text_encoder_3"))


def test_the_pages_snippets_run_in_order(tmp_path, monkeypatch):
    """The page's code gives the same states as transformers, in bfloat16 on eight devices.

    It uses Linen, `encode` and NNX.
    """
    config = TINY | UNTIED | {"d_model": 32, "architectures": ["T5EncoderModel"]}
    tensors = {n: x for n, x in make_tensors(config).items() if not n.startswith("decoder")}
    make_folder(tmp_path / "FLUX.1-dev" / "text_encoder_2", config, tensors, shards=2)
    monkeypatch.chdir(tmp_path)
    page = {}
    states = []
    for block in snippets("docs/text_encoder.md"):
        exec(block, page)
        states.append(np.asarray(page["states"], np.float32))
    assert len(states) == 3 and len(page["states"].sharding.device_set) == 8
    expected = logits(config, tensors, np.asarray(page["ids"][0]), None)
    for found in states:
        assert np.abs(found[0] - expected).max() < 0.05 * np.abs(expected).max()
