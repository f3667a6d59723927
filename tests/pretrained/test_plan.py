"""Tests that large checkpoints are planned and sharded from their headers alone."""

import json
import struct

import jax
import numpy as np
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.checkpoints.placement import layout_over
from synthesizer_jax.costs.chips import parse_topology
from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.convert import experiment_of
from synthesizer_jax.pretrained.huggingface.config import write_config
from synthesizer_jax.pretrained.huggingface.names import torch_name
from synthesizer_jax.pretrained.opening import open_pretrained
from synthesizer_jax.pretrained.tensors import correspondences
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.plan import make_plan

XXL = Architecture(32128, 4096, 64, 64, 10240, 2, 2, ("gelu", "linear"), tied=False, scaled=False)
"""T5 1.1 XXL with two layers in each stack."""


@pytest.fixture(scope="module")
def xxl(tmp_path_factory):
    """A folder with a file that has a correct header but no tensors.

    The place of the tensors is a hole, which takes no space on the disk.
    """
    folder = tmp_path_factory.mktemp("xxl")
    (folder / "config.json").write_text(json.dumps(write_config(XXL, "float32")))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    header = {}
    end = 0
    for c in correspondences(XXL.build(), torch_name):
        begin = end
        shape = c.layout.shape(c.shape)
        end = begin + 4 * int(np.prod(shape))
        header[c.name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)
    return folder


def test_large_parameters_are_laid_over_256_devices_unread(xxl, tmp_path, monkeypatch):
    def no_tensors(*_):
        """Fails the test, because no tensor may be read."""
        pytest.fail("a tensor was read")

    monkeypatch.setattr("synthesizer_jax.pretrained.huggingface.folder._are_equal", no_tensors)
    monkeypatch.setattr("synthesizer_jax.pretrained.tensors.read_parameter", no_tensors)
    topology = parse_topology("v5p:4x8x8", 1)
    alone = tmp_path / "config.json"
    alone.write_bytes((xxl / "config.json").read_bytes())
    assert experiment_of(tmp_path) == experiment_of(xxl), "no tensor has to be there"
    experiment = replace(experiment_of(xxl), mesh=MeshShape(fsdp=64, tensor=4))
    assert make_plan(experiment, topology).fits
    mesh = jax.sharding.AbstractMesh((1, 64, 4, 1), ("data", "fsdp", "tensor", "sequence"))
    with open_pretrained(xxl, compare=False) as pretrained:
        layout = layout_over(pretrained.model, pretrained.model.example(1, 1), mesh)["params"]
        total = sum(x.size for x in jax.tree.leaves(pretrained.params))

        def kept(x, to):
            """Returns the number of an array's elements on one device."""
            return int(np.prod(to.sharding.shard_shape(x.shape)))

        parts = jax.tree.map(kept, pretrained.params, layout)
    assert total > 1e9
    assert sum(jax.tree.leaves(parts)) < 1.02 * total / 256  # few parameters are replicated
