"""Adapters in folders of PEFT: what is added to which tensor; tests/peers holds it against PEFT."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.opening import open_pretrained
from synthesizer_jax.training.adapters import LoRA
from synthesizer_jax.training.run_directory import find_base, load_experiment
from synthesizer_jax.training.trainer import Trainer
from tests.pretrained.folders import TINY, UNTIED, make_folder, make_tensors
from tests.training.tiny import close, save

MLP = "decoder.block.1.layer.2.DenseReluDense"
MATRICES = (
    "encoder.block.1.layer.0.SelfAttention.q",
    "decoder.block.0.layer.1.EncDecAttention.o",
    f"{MLP}.wi_0",
    "lm_head",
)
RANK, ALPHA = 3, 7.0


@pytest.fixture
def base(tmp_path):
    return make_folder(tmp_path / "base", TINY | UNTIED, make_tensors(TINY | UNTIED))


def adapters(tensors):
    """PEFT's A and B of `MATRICES`."""
    rng, found = np.random.default_rng(1), {}
    for name in MATRICES:
        outputs, inputs = tensors[f"{name}.weight"].shape
        for leaf, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            found[f"base_model.model.{name}.lora_{leaf}.weight"] = rng.normal(size=shape).astype("f")
    return found


def write(folder, base, tensors, **config):
    folder.mkdir()
    fields = {"peft_type": "LORA", "base_model_name_or_path": base and str(base), "lora_alpha": ALPHA}
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapt(source, directory, lora):
    """Saves a run of adapters of a run, all of whose parameters have moved."""
    recipe = load_experiment(source).starting_from(str(source))
    recipe = find_base(replace(recipe, training=replace(recipe.training, adapters=lora, optimizer=AdamW())))
    state, rng = Trainer(recipe, jax.devices()[:1]).init(), np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, "f"), state.params)
    save(directory, recipe, dataclasses.replace(state, params=moved))


@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_updates_are_added_to_the_base(tmp_path, base, rslora, scale):
    tensors = make_tensors(TINY | UNTIED)
    updates = adapters(tensors)
    for name in MATRICES:
        a, b = (updates[f"base_model.model.{name}.lora_{leaf}.weight"] for leaf in "AB")
        tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] + scale * b @ a).astype(np.float32)
    merged = make_folder(tmp_path / "merged", TINY | UNTIED, tensors)
    folder = write(tmp_path / "adapters", base, updates, use_rslora=rslora)
    for encoder_only in (False, True):
        found, expected = (load(x, encoder_only=encoder_only).variables for x in (folder, merged))
        close(found, expected, atol=1e-5)


def test_what_does_not_fit_is_named(tmp_path, base):
    updates = adapters(make_tensors(TINY | UNTIED))
    name = f"base_model.model.{MATRICES[0]}.lora_A.weight"
    for i, (folder, tensors, config, message) in enumerate((
        (None, updates, {}, "base_model_name_or_path is None in .*; name the folder of the model there"),
        (base, updates, {"use_dora": True}, "use_dora is True, which is not read.*; merge the adapters"),
        (base, updates | {name: updates[name][:, 1:].copy()}, {}, r"q\.weight is \(18, 20\), for which"),
        (base, updates | {"other": updates[name]}, {}, "other is no update of a matrix there"),
        (base, {}, {}, "it holds no LoRA"),
    )):  # fmt: skip
        broken = write(tmp_path / str(i), folder, tensors, **config)
        with pytest.raises(ValueError, match=message), open_pretrained(broken):
            pass


@pytest.mark.parametrize(
    ("targets", "modules"),
    [
        (LoRA().targets, ["q", "v"]),
        ("decoder/layers_1/mlp/.*", [f"{MLP}.{n}" for n in ("wi_0", "wi_1", "wo")]),
    ],
)
def test_a_run_is_exported_and_read_again(tmp_path, base, targets, modules):
    run, lora, folder = tmp_path / "run", tmp_path / "lora", tmp_path / "peft"
    convert_checkpoint(base, run, vocabulary=Bytes(125))
    adapt(run, lora, LoRA(RANK, ALPHA, targets))
    export_run(lora, folder, to="peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, modules)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * (len(modules) if len(modules) > 2 else 12)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(run)}))
    convert_checkpoint(folder, tmp_path / "again")
    expected = load(lora).variables
    for place in (folder, tmp_path / "again"):
        close(load(place).variables, expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"run has no training\.adapters; export it to huggingface"):
        export_run(run, tmp_path / "none", to="peft")
