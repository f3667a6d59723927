"""Tests that T5X's checkpoints are read, both generated ones and a real one."""

import gzip
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore
from flax import serialization

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.opening import open_pretrained, read_params
from tests.pretrained.folders import FAMILIES, TINY, deviation, make_folder, make_tensors, rounded

PUBLISHED = {"relative_attention_max_distance": 128}
BLOCK = r"\1/layers_\2"
NAMES = (
    (r"shared", "token_embedder/embedding"),
    (r"lm_head", "decoder/logits_dense"),
    (r"(\w+)\.final_layer_norm", r"\1/\1_norm/scale"),
    (r"(\w+)\.block\.0\..*relative_attention_bias", r"\1/relpos_bias/rel_embedding"),
    (r"(encoder)\.block\.(\d+)\.layer\.0\.SelfAttention", f"{BLOCK}/attention"),
    (r"(decoder)\.block\.(\d+)\.layer\.0\.SelfAttention", f"{BLOCK}/self_attention"),
    (r"(\w+)\.block\.(\d+)\.layer\.1\.EncDecAttention", f"{BLOCK}/encoder_decoder_attention"),
    (r"(\w+)\.block\.(\d+)\.layer\.\d\.DenseReluDense", f"{BLOCK}/mlp"),
    (r"(encoder)\.block\.(\d+)\.layer\.0\.layer_norm", f"{BLOCK}/pre_attention_layer_norm/scale"),
    (
        r"(decoder)\.block\.(\d+)\.layer\.0\.layer_norm",
        f"{BLOCK}/pre_self_attention_layer_norm/scale",
    ),
    (
        r"(decoder)\.block\.(\d+)\.layer\.1\.layer_norm",
        f"{BLOCK}/pre_cross_attention_layer_norm/scale",
    ),
    (r"(\w+)\.block\.(\d+)\.layer\.\d\.layer_norm", f"{BLOCK}/pre_mlp_layer_norm/scale"),
)
PARTS = {"q": "query", "k": "key", "v": "value", "o": "out"}


def t5x_path(name):
    """Returns the path in T5X's parameters for a tensor of transformers."""
    for pattern, new in NAMES:
        if found := re.match(pattern, name):
            path = found.expand(new)
            rest = name[found.end() :].strip(".")
            path += f"/{PARTS.get(rest, rest)}" if rest else ""
            return path if path.endswith(("scale", "embedding")) else f"{path}/kernel"
    raise AssertionError(name)


def as_t5x(tensors):
    """Converts the tensors of a transformers T5 to T5X's tree, with transposed matrices."""
    tree = {}
    for name, x in tensors.items():
        *keys, last = t5x_path(name.removesuffix(".weight")).split("/")
        branch = tree
        for key in keys:
            branch = branch.setdefault(key, {})
        branch[last] = x if name == "shared.weight" else np.ascontiguousarray(x.T)
    return {"version": 3, "optimizer": {"target": tree, "state": {"step": 1000}}}


def read(path):
    """Returns the model, the variables and the vocabulary of a checkpoint."""
    with open_pretrained(path) as pretrained:
        variables = {"params": read_params(pretrained)}
    return pretrained.model, variables, pretrained.vocabulary


def test_a_t5x_checkpoint_is_read_and_exported_unchanged(real_data, tmp_path):
    source = real_data / "checkpoints" / "t5x_test_t5_tiny.checkpoint_0.gz"
    if not source.is_file():
        pytest.skip("the checkpoint of T5X is not on this machine")
    convert_checkpoint(source, tmp_path / "run", vocabulary=Bytes())
    params = load(tmp_path / "run").variables["params"]
    tree = serialization.msgpack_restore(gzip.decompress(source.read_bytes()))
    target = tree["optimizer"]["target"]
    theirs, ours = jax.tree.leaves(target), jax.tree.leaves(params)
    assert len(theirs) == len(ours) == 52

    def values(arrays):
        """Returns the contents of arrays, sorted."""
        return sorted(np.sort(np.ravel(x)).tobytes() for x in arrays)

    assert values(ours) == values(theirs)
    export_run(tmp_path / "run", tmp_path / "checkpoint_0", to="t5x")
    data = (tmp_path / "checkpoint_0" / "checkpoint").read_bytes()
    back = serialization.msgpack_restore(data)["optimizer"]["target"]
    jax.tree.map(np.testing.assert_array_equal, back, target)


def made(family="T5 1.1, FLAN-T5"):
    """Returns a configuration, tensors for transformers, and the same parameters as T5X's tree."""
    config = TINY | FAMILIES[family] | PUBLISHED
    tensors = make_tensors(config)
    return config, tensors, as_t5x(tensors)["optimizer"]["target"]


def has_its_logits(path, config, tensors):
    model, variables, vocabulary = read(path)
    assert vocabulary is None
    return deviation(model, variables, config, tensors) < 1e-5


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1, FLAN-T5", "efficient"])
def test_a_generated_checkpoint_has_the_same_logits(tmp_path, family):
    config, tensors, target = made(family)
    data = serialization.msgpack_serialize({"optimizer": {"target": target}})
    zipped = gzip.compress(data) if family == "efficient" else data
    (tmp_path / "checkpoint_1000").write_bytes(zipped)
    assert has_its_logits(tmp_path / "checkpoint_1000", config, tensors)


def scan(stack, name, *, own_bias=None):
    """Stacks the parameters of all layers along axis 1, as T5X's scalable T5 does."""
    layers = [stack[f"layers_{i}"] for i in range(len([k for k in stack if "layers_" in k]))]
    stacked = jax.tree.map(lambda *x: np.stack(x, axis=1), *layers)
    rest = {k: v for k, v in stack.items() if not k.startswith("layers_")}
    if own_bias:
        table = rest.pop("relpos_bias")["rel_embedding"]
        stacked[own_bias] = {"rel_embedding": np.stack([table] * len(layers), axis=1)}
    return rest | {name: stacked}


def split_heads(config, layers):
    """Adds an axis for heads to attention kernels, whose layers are stacked along axis 1."""
    heads, width, d = config["num_heads"], config["d_kv"], config["d_model"]

    def split(path, x):
        kind = path[-2].key
        if kind in ("query", "key", "value"):
            return x.reshape(d, layers, heads, width)
        if kind == "out":
            return np.moveaxis(np.moveaxis(x, 1, 0).reshape(layers, heads, width, d), 0, 1)
        return x

    return split


@pytest.mark.parametrize("own_bias", [None, "relative_posemb"])
def test_scanned_layers_with_an_axis_of_heads(tmp_path, own_bias):
    config, tensors, target = made()
    for stack in ("encoder", "decoder"):
        scanned = scan(target[stack], "layers" if own_bias else stack, own_bias=own_bias)
        target[stack] = jax.tree.map_with_path(split_heads(config, 2), scanned)
    data = serialization.msgpack_serialize({"target": target, "state": {"step": 3}})
    (tmp_path / "checkpoint").write_bytes(data)
    assert has_its_logits(tmp_path, config, tensors)


@pytest.mark.parametrize("family", ["T5 1.0", "umT5"])
def test_scanned_export_has_layers_on_axis_1_and_is_read_again(tmp_path, family):
    config = TINY | FAMILIES[family] | PUBLISHED
    convert_checkpoint(make_folder(tmp_path / "a", config, make_tensors(config)), tmp_path / "run")
    params = load(tmp_path / "run").variables["params"]
    for to in ("t5x", "t5x-scanned"):
        export_run(tmp_path / "run", tmp_path / to, to=to)
        _, variables, _ = read(tmp_path / to)
        jax.tree.map(np.testing.assert_array_equal, variables["params"], params)
    looped, scanned = (
        serialization.msgpack_restore((tmp_path / to / "checkpoint").read_bytes())
        for to in ("t5x", "t5x-scanned")
    )
    decoder = scanned["optimizer"]["target"]["decoder"]["decoder"]["mlp"]["wo"]["kernel"]
    kernel = looped["optimizer"]["target"]["decoder"]["layers_1"]["mlp"]["wo"]["kernel"]
    np.testing.assert_array_equal(decoder[:, 1], kernel)


@pytest.mark.parametrize("output", ["tied and unscaled", "scaled projection"])
def test_an_output_unknown_to_t5x_is_exported_as_a_known_one(tmp_path, output):
    config = TINY | PUBLISHED | {"scale_decoder_outputs": output == "scaled projection"}
    tensors = make_tensors(config | {"tie_word_embeddings": output == "tied and unscaled"})
    convert_checkpoint(make_folder(tmp_path / "source", config, tensors), tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "checkpoint_0", to="t5x")
    kernel = tensors.get("lm_head.weight", tensors["shared.weight"])
    tensors["lm_head.weight"] = kernel * (20**-0.5 if "lm_head.weight" in tensors else 1.0)
    config["tie_word_embeddings"] = False
    assert has_its_logits(tmp_path / "checkpoint_0", config, tensors)


def test_settings_that_the_file_cannot_express_are_not_exported(tmp_path):
    """Models with settings that a T5X checkpoint cannot express are not exported.

    Such a checkpoint would be read as a T5 with GELU, or with a different relative bias.
    """
    cases = (
        (
            FAMILIES["UL2"] | PUBLISHED,
            r"activations \('silu', 'linear'\), but T5X's files do not record",
        ),
        ({}, "max_distance 16, but T5X's files do not record"),
        ({"layer_norm_epsilon": 1e-5} | PUBLISHED, "epsilon 1e-05, but T5X's files do not record"),
    )
    for i, (changes, message) in enumerate(cases):
        config = TINY | changes
        folder = make_folder(tmp_path / str(i), config, make_tensors(config))
        convert_checkpoint(folder, folder / "run")
        with pytest.raises(ValueError, match=message):
            export_run(folder / "run", folder / "checkpoint_0", to="t5x")
        assert not (folder / "checkpoint_0").exists()


def write_zarr(directory, name, x):
    """Writes an array in TensorStore's zarr format.

    Version 2 of T5X's checkpoints stores bfloat16 as 16-bit integers.
    """
    place = {"driver": "file", "path": f"{directory}/target.{name.replace('/', '.')}/"}
    spec = {"driver": "zarr", "kvstore": place}
    kind = np.uint16 if x.dtype == ml_dtypes.bfloat16 else x.dtype
    store = tensorstore.open(spec, create=True, dtype=kind, shape=x.shape).result()
    store.write(x.view(kind)).result()


def test_arrays_of_tensorstore_are_read_and_paths_not_followed(tmp_path):
    config, tensors, target = made()
    leaves = {"/".join(key.key for key in path): x for path, x in jax.tree.leaves_with_path(target)}
    directory = tmp_path / "checkpoint_5"
    directory.mkdir()
    for name, x in leaves.items():
        write_zarr(directory, name, x)
    outside = {"driver": "zarr", "kvstore": {"driver": "file", "path": "/etc/passwd"}}
    placeholders = jax.tree.map(lambda _: outside, target)
    data = serialization.msgpack_serialize({"optimizer": {"target": placeholders}})
    (directory / "checkpoint").write_bytes(data)
    assert has_its_logits(directory, config, tensors)
    for name, x in leaves.items():
        shutil.rmtree(directory / f"target.{name.replace('/', '.')}")
        write_zarr(directory, name, x.astype(ml_dtypes.bfloat16))
    assert has_its_logits(directory, config, rounded(tensors))


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=repr)
def test_a_directory_of_orbax_is_read(tmp_path, options):
    """A checkpoint directory of Orbax is read.

    Only its arrays matter, not its metadata. The name of the directory does not matter, either,
    even if it looks like the name of a run.
    """
    config, tensors, target = made()
    directory = tmp_path / "checkpoints" / "1000000"
    tree = {"target": target, "state": {"step": np.asarray(7)}}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options)) as checkpointer:
        checkpointer.save(directory, tree)
    (directory / "_METADATA").write_text("{}")
    assert has_its_logits(directory, config, tensors)


def test_a_vocabulary_is_needed_and_has_to_fit(tmp_path):
    data = serialization.msgpack_serialize(as_t5x(make_tensors(TINY | {"vocab_size": 128})))
    (tmp_path / "checkpoint_1").write_bytes(data)
    with pytest.raises(FileNotFoundError, match="--vocabulary"):
        convert_checkpoint(tmp_path / "checkpoint_1", tmp_path / "run")
    with pytest.raises(ValueError, match=r"359 ids, but the embedding of .* has only 128 rows"):
        convert_checkpoint(tmp_path / "checkpoint_1", tmp_path / "run", vocabulary=Bytes())


@pytest.mark.parametrize("content", [b"a text", serialization.msgpack_serialize({"a": 1})[:-1]])
def test_a_file_that_is_not_msgpack_is_described(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=r"file cannot be read: it is not a complete msgpack file"):
        convert_checkpoint(tmp_path / "file", tmp_path / "run")
