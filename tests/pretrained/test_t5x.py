"""T5X's msgpack files come in, made ones and a real one."""

import gzip
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.t5x import read_file
from tests.pretrained.folders import FAMILIES, TINY, logits, make_tensors

PUBLISHED = {"relative_attention_max_distance": 128}
INPUTS = np.array([[7, 300, 12, 5, 9, 44, 8, 21, 3, 1]])
TARGETS = np.array([[0, 15, 220, 3, 18, 2]])
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
    """T5X's path of a tensor of transformers."""
    for pattern, new in NAMES:
        if found := re.match(pattern, name):
            path, rest = found.expand(new), name[found.end() :].strip(".")
            path += f"/{PARTS.get(rest, rest)}" if rest else ""
            return path if path.endswith(("scale", "embedding")) else f"{path}/kernel"
    raise AssertionError(name)


def as_t5x(tensors):
    """T5X's tree with the parameters of a transformers' T5, whose matrices are transposed."""
    tree = {}
    for name, x in tensors.items():
        *keys, last = t5x_path(name.removesuffix(".weight")).split("/")
        branch = tree
        for key in keys:
            branch = branch.setdefault(key, {})
        branch[last] = x if name == "shared.weight" else np.ascontiguousarray(x.T)
    return {"version": 3, "optimizer": {"target": tree, "state": {"step": 1000}}}


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1, FLAN-T5", "ByT5", "efficient"])
def test_a_made_checkpoint_has_its_logits(tmp_path, family):
    config = TINY | FAMILIES[family] | PUBLISHED
    tensors = make_tensors(config)
    data = serialization.msgpack_serialize(as_t5x(tensors))
    (tmp_path / "checkpoint_1000").write_bytes(data)
    (tmp_path / "checkpoint_1000.gz").write_bytes(gzip.compress(data))
    model, variables, vocabulary = read_file(tmp_path / "checkpoint_1000")
    found = model.apply(variables, jnp.asarray(INPUTS), jnp.asarray(TARGETS))[0]
    expected = logits(config, tensors, INPUTS[0], TARGETS[0])
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert vocabulary is None
    again = read_file(tmp_path / "checkpoint_1000.gz").variables
    jax.tree.map(np.testing.assert_array_equal, again, variables)


def test_a_checkpoint_of_t5x_comes_in_whole(real_data, tmp_path):
    source = real_data / "checkpoints" / "t5x_test_t5_tiny.checkpoint_0.gz"
    if not source.is_file():
        pytest.skip("the checkpoint of T5X is not on this machine")
    convert_checkpoint(source, tmp_path / "run", vocabulary=Bytes())
    params = load(tmp_path / "run").variables["params"]
    tree = serialization.msgpack_restore(gzip.decompress(source.read_bytes()))
    target = tree["optimizer"]["target"]
    theirs, ours = jax.tree.leaves(target), jax.tree.leaves(params)
    assert len(theirs) == len(ours) == 52
    values = lambda arrays: sorted(np.sort(np.ravel(x)).tobytes() for x in arrays)
    assert values(ours) == values(theirs)
    query = target["decoder"]["layers_1"]["self_attention"]["query"]["kernel"]
    found = params["decoder"]["layers_1"]["self_attention"]["align"]["query"]["kernel"]
    np.testing.assert_array_equal(found.reshape(query.shape), query)


def without(*keys):
    """Removes an entry of the parameters."""

    def damage(data):
        tree = serialization.msgpack_restore(data)
        branch = tree["optimizer"]["target"]
        for key in keys[:-1]:
            branch = branch[key]
        del branch[keys[-1]]
        return serialization.msgpack_serialize(tree)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-50], "not a msgpack checkpoint"),
        (lambda data: b"\x1f\x8b" + data, "not a msgpack checkpoint"),
        (lambda data: b"no checkpoint at all", "not a msgpack checkpoint|no parameters"),
        (lambda data: serialization.msgpack_serialize({"a": 1}), "no parameters under"),
        (without("decoder", "relpos_bias"), "decoder/relpos_bias/rel_embedding is missing"),
        (without("token_embedder"), "has no array token_embedder/embedding of 2 axes"),
    ],
)
def test_damage_is_one_sentence(tmp_path, damage, message):
    data = serialization.msgpack_serialize(as_t5x(make_tensors(TINY)))
    (tmp_path / "checkpoint_1").write_bytes(damage(data))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(tmp_path / "checkpoint_1", tmp_path / "run", vocabulary=Bytes())
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_is_needed_and_has_to_fit(tmp_path):
    data = serialization.msgpack_serialize(as_t5x(make_tensors(TINY | {"vocab_size": 128})))
    (tmp_path / "checkpoint_1").write_bytes(data)
    with pytest.raises(FileNotFoundError, match="--vocabulary"):
        convert_checkpoint(tmp_path / "checkpoint_1", tmp_path / "run")
    with pytest.raises(ValueError, match=r"359 ids, but the embedding of .* has 128 rows"):
        convert_checkpoint(tmp_path / "checkpoint_1", tmp_path / "run", vocabulary=Bytes())
