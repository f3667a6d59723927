"""Checkpoints of Mesh-TensorFlow's T5 come in, written here by TensorFlow under its names."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.loading import open_pretrained, read_params
from tests.pretrained.folders import FAMILIES, TINY, logits, make_tensors

tf = pytest.importorskip("tensorflow")

CONFIG = TINY | {"relative_attention_max_distance": 128}
INPUTS = np.array([[7, 300, 12, 5, 9, 44, 8, 21, 3, 1]])
TARGETS = np.array([[0, 15, 220, 3, 18, 2]])


def mesh_name(name, norm):
    """Mesh-TensorFlow's name of a tensor of transformers."""
    name = name.removesuffix(".weight")
    if name in ("shared", "lm_head"):
        return {"shared": "shared/embedding", "lm_head": "decoder/logits/kernel"}[name]
    pattern = r"block\.(\d+)\.layer\.(\d+)\."
    name = re.sub(pattern, lambda m: f"block_{int(m[1]):03}/layer_{int(m[2]):03}/", name)
    name = name.replace(".", "/").replace("layer_norm", norm).replace(f"final_{norm}", norm)
    if norm == "layer_norm":
        name = re.sub(r"^(\w+)/layer_norm$", r"\1/final_layer_norm", name)
    if name.endswith("_norm"):
        return f"{name}/scale"
    return f"{name}/kernel" if "DenseReluDense" in name else name


def write_checkpoint(directory, tensors, *, norm="layer_norm", extra=()):
    """Writes the files of ``model.ckpt-7`` with the step and moments that training leaves there."""
    directory.mkdir()
    arrays = {
        mesh_name(name, norm): x if name == "shared.weight" else x.T for name, x in tensors.items()
    }
    arrays |= {"global_step": np.asarray(7), **dict(extra)}
    arrays |= {"shared/embedding_slot_vr": np.ones(3, np.float32)}
    prefix = str(directory / "model.ckpt-7")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=list(arrays),
        shape_and_slices=[""] * len(arrays),
        tensors=[tf.constant(x) for x in arrays.values()],
    )
    (directory / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-7"\n')
    return directory


@pytest.mark.parametrize(
    ("family", "norm"),
    [("T5 1.0", "layer_norm"), ("T5 1.1, FLAN-T5", "rms_norm"), ("efficient", "layer_norm")],
)
def test_a_checkpoint_has_its_logits(tmp_path, family, norm):
    config = CONFIG | FAMILIES[family]
    tensors = make_tensors(config)
    directory = write_checkpoint(tmp_path / "mesh", tensors, norm=norm)
    for source in (directory, directory / "model.ckpt-7", directory / "model.ckpt-7.index"):
        with open_pretrained(source) as pretrained:
            variables = {"params": read_params(pretrained)}
        found = pretrained.model.apply(variables, jnp.asarray(INPUTS), jnp.asarray(TARGETS))[0]
        expected = logits(config, tensors, INPUTS[0], TARGETS[0])
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_what_is_unknown_or_damaged_is_one_sentence(tmp_path):
    tensors = make_tensors(CONFIG)
    unknown = write_checkpoint(
        tmp_path / "unknown", tensors, extra=[("encoder/adapter", np.ones(2, np.float32))]
    )
    with pytest.raises(ValueError, match="encoder/adapter is not part of the model"):
        convert_checkpoint(unknown, tmp_path / "run", vocabulary=Bytes())
    damaged = write_checkpoint(tmp_path / "damaged", tensors)
    (data,) = damaged.glob("*.data-*")
    data.write_bytes(data.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.ckpt-7 cannot be read"):
        convert_checkpoint(damaged, tmp_path / "run", vocabulary=Bytes())
    (damaged / "model.ckpt-7.index").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"model\.ckpt-7 cannot be read"):
        convert_checkpoint(damaged, tmp_path / "run", vocabulary=Bytes())
    (damaged / "model.ckpt-9.index").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"holds several checkpoints .*; name one"):
        convert_checkpoint(damaged, tmp_path / "run", vocabulary=Bytes())
    assert not (tmp_path / "run").exists()
