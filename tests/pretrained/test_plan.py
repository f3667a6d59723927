"""Large checkpoints are planned and laid over meshes by their headers alone."""

import json
import struct

import jax
import numpy as np
import pytest

from synthesizer_jax.checkpoints.placement import layout_over
from synthesizer_jax.cli import main as program
from synthesizer_jax.costs.chips import parse_topology
from synthesizer_jax.pretrained.architecture import Architecture
from synthesizer_jax.pretrained.convert import convert_checkpoint, experiment_of
from synthesizer_jax.pretrained.huggingface.config import write_config
from synthesizer_jax.pretrained.huggingface.names import torch_name
from synthesizer_jax.pretrained.loading import open_pretrained
from synthesizer_jax.pretrained.tensors import correspondences
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.plan import make_plan
from tests.pretrained.folders import TINY, make_folder, make_tensors

XXL = Architecture(
    vocab_size=32128,
    d_model=4096,
    num_heads=64,
    head_dim=64,
    d_ff=10240,
    num_layers=24,
    num_decoder_layers=24,
    activations=("gelu", "linear"),
    tied=False,
    scaled=False,
)
"""T5 1.1 XXL, 11 billion parameters."""


@pytest.fixture(scope="module")
def xxl(tmp_path_factory):
    """A folder whose shards have true headers, and holes of the tensors' sizes in their place."""
    folder = tmp_path_factory.mktemp("xxl")
    (folder / "config.json").write_text(json.dumps(write_config(XXL, "float32")))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    weight_map = {}
    wanted = correspondences(XXL.build(), torch_name)
    for i in range(0, len(wanted), 60):
        header, end, file = {}, 0, f"model-{i // 60}.safetensors"
        for c in wanted[i : i + 60]:
            begin, end = end, end + 4 * int(np.prod(c.their_shape))
            header[c.name] = {"dtype": "F32", "shape": c.their_shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + end)
        weight_map |= dict.fromkeys(header, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.slow
def test_eleven_billion_parameters_are_laid_over_256_devices_unread(xxl, monkeypatch):
    no_tensors = lambda *_: pytest.fail("a tensor was read")
    monkeypatch.setattr("synthesizer_jax.pretrained.huggingface.folder._are_equal", no_tensors)
    monkeypatch.setattr("synthesizer_jax.pretrained.tensors._read", no_tensors)
    topology = parse_topology("v5p:4x8x8", 1)
    experiment = replace(experiment_of(xxl), mesh=MeshShape(fsdp=64, tensor=4))
    assert make_plan(experiment, topology).fits
    mesh = jax.sharding.AbstractMesh((1, 64, 4, 1), ("data", "fsdp", "tensor", "sequence"))
    with open_pretrained(xxl, compare=False) as pretrained:
        layout = layout_over(pretrained.model, pretrained.model.example(1, 1), mesh)["params"]
        total = sum(x.size for x in jax.tree.leaves(pretrained.params))
        kept = jax.tree.map(
            lambda x, to: int(np.prod(to.sharding.shard_shape(x.shape))), pretrained.params, layout
        )
    assert total > 11e9
    assert sum(jax.tree.leaves(kept)) < 1.02 * total / 256  # only norms and biases are replicated


def test_a_copy_of_the_embedding_is_not_taken_for_a_projection(tmp_path):
    tensors = make_tensors(TINY)
    tensors["lm_head.weight"] = tensors["shared.weight"]
    experiment = experiment_of(make_folder(tmp_path, TINY, tensors))
    assert experiment.model.tied
    assert experiment.data.pack and experiment.evaluation.method == "rank"


@pytest.mark.slow
def test_plan_takes_a_folder_and_the_run_it_becomes(tmp_path, capsys, monkeypatch):
    folder = make_folder(tmp_path / "folder", TINY, make_tensors(TINY))
    convert_checkpoint(folder, tmp_path / "run")
    shown = []
    for path in (folder, tmp_path / "run"):
        arguments = ["synthesizer-jax", "plan", str(path), "--topology", "v5e:2x2"]
        monkeypatch.setattr("sys.argv", [*arguments, "--set", "data.batch_size=64"])
        with pytest.raises(SystemExit) as end:
            program.run()
        assert not end.value.code
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "16 rows per device" in shown[0]
