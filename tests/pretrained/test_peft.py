"""Tests adapters in folders of PEFT, and the tensors that they change.

The tests in tests/peers compare adapters with PEFT itself.
"""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from synthesizer_jax.base.registry import replace
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.models import LoRA
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.folder import open_folder
from synthesizer_jax.pretrained.huggingface.peft import with_adapters
from synthesizer_jax.pretrained.opening import open_pretrained
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.run_directory import find_base, load_experiment
from synthesizer_jax.training.trainer import Trainer
from tests.pretrained import gemma
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
    """Returns PEFT's low-rank factors A and B for `MATRICES`."""
    rng = np.random.default_rng(1)
    found = {}
    for name in MATRICES:
        outputs, inputs = tensors[f"{name}.weight"].shape
        for leaf, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            found[f"base_model.model.{name}.lora_{leaf}.weight"] = rng.normal(size=shape).astype(
                "f"
            )
    return found


def write(folder, base, tensors, **config):
    folder.mkdir(parents=True)
    fields = {
        "peft_type": "LORA",
        "base_model_name_or_path": base and str(base),
        "lora_alpha": ALPHA,
    }
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def adapt(source, directory, lora, init_rules=()):
    """Saves a run that trains adapters of another run.

    All trained parameters differ from their initial values.
    """
    recipe = load_experiment(source).starting_from(str(source))
    training = replace(recipe.training, adapters=lora, optimizer=AdamW())
    recipe = find_base(replace(recipe, training=training, init_rules=init_rules))
    state = Trainer(recipe, jax.devices()[:1]).init()
    rng = np.random.default_rng(0)
    moved = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, "f"), state.params)
    save(directory, recipe, dataclasses.replace(state, params=moved))


def parameters(tensors, seed=2):
    """Returns fully trained tensors, by the names of PEFT and by the names of the base model.

    The tensor ``lm_head`` also has a low-rank update, which PEFT adds to the saved tensor.
    """
    names = {
        "encoder.final_layer_norm.weight": ["encoder.final_layer_norm.weight"],
        f"{MLP}.wo.weight": [f"{MLP}.wo.weight"],
        "shared.weight": ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
        "lm_head.weight": ["lm_head.base_layer.weight"],
    }
    rng = np.random.default_rng(seed)
    saved = {}
    changed = {}
    for name, theirs in names.items():
        changed[name] = rng.normal(size=tensors[name].shape).astype("f")
        saved |= {f"base_model.model.{module}": changed[name] for module in theirs}
    return saved, changed


@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / RANK**0.5)])
def test_updates_are_added_to_the_base(tmp_path, base, rslora, scale):
    """Low-rank updates are added to the base model.

    The updates are also added to fully trained tensors, which replace tensors of the base model.
    """
    tensors = make_tensors(TINY | UNTIED)
    updates = adapters(tensors)
    saved, changed = parameters(tensors) if rslora else ({}, {})
    tensors |= changed
    for name in MATRICES:
        a, b = (updates[f"base_model.model.{name}.lora_{leaf}.weight"] for leaf in "AB")
        tensors[f"{name}.weight"] = (tensors[f"{name}.weight"] + scale * b @ a).astype(np.float32)
    merged = make_folder(tmp_path / "merged", TINY | UNTIED, tensors)
    modules = ["final_layer_norm", f"{MLP}.wo", "embed_tokens"] if rslora else None
    metadata = {
        "peft_version": "0.99",
        "lora_dropout": 0.3,
        "eva_config": None,
        "of_another_version": None,
    }
    config = metadata | {"use_rslora": rslora, "modules_to_save": modules}
    folder = write(tmp_path / "adapters", base, updates | saved, **config)
    for encoder_only in (False, True):
        found, expected = (load(x, encoder_only=encoder_only).variables for x in (folder, merged))
        close(found, expected, atol=1e-5)


def test_tensors_and_options_that_do_not_fit_are_named(tmp_path, base):
    updates = adapters(make_tensors(TINY | UNTIED))
    name = f"base_model.model.{MATRICES[0]}.lora_A.weight"
    norm, embedding, shared = (
        f"base_model.model.{module}.weight"
        for module in ("encoder.final_layer_norm", "encoder.embed_tokens", "shared")
    )
    table = np.ones((TINY["vocab_size"], TINY["d_model"]), "f")
    cases = [
        (
            None,
            updates,
            {},
            "base_model_name_or_path in .* is None, but it must be the folder of the model",
        ),
        (
            base,
            updates,
            {"use_dora": True},
            "use_dora is True, which is not supported.* Merge the adapters",
        ),
        (
            base,
            updates | {name: updates[name][:, 1:].copy()},
            {},
            r"do not fit .*q\.weight, which has the shape \(18, 20\)",
        ),
        (
            base,
            updates | {"other": updates[name]},
            {},
            "other is neither an update of a matrix of the base nor",
        ),
        (base, {}, {}, "it contains no LoRA"),
        (
            base,
            updates | {name: updates[name].astype(int)},
            {},
            r"do not fit .*q\.weight, which has the shape \(18, 20\)",
        ),
        (
            base,
            {norm: np.ones(19, "f")},
            {},
            r"norm\.weight has the shape \(19,\), but .* base is \(20,\)",
        ),
        (base, {norm: np.ones(20, int)}, {}, "norm.weight is I64, which is not a floating-point"),
        (
            base,
            {embedding: table},
            {},
            r"embed_tokens\.weight are one parameter of the model, so all",
        ),
        (
            base,
            {shared: table},
            {"modules_to_save": ["shared"]},
            "modules_to_save contains shared, but transformers does not compute with it",
        ),
    ]
    for i, (folder, tensors, config, message) in enumerate(cases):
        broken = write(tmp_path / str(i), folder, tensors, **config)
        with pytest.raises(ValueError, match=message), open_pretrained(broken):
            pass


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("peft_type", None),
        ("alora_invocation_tokens", [5, 6]),
        ("arrow_config", {"top_k": 2}),
        ("kasa_config", {}),
        ("trainable_token_indices", [3]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa"),
        ("of_another_version", 3),
    ],
)
def test_an_option_that_is_not_implemented_is_refused_by_its_name(tmp_path, base, name, value):
    folder = write(tmp_path / "other", base, adapters(make_tensors(TINY | UNTIED)), **{name: value})
    with pytest.raises(
        ValueError, match=rf"{name} is .* Merge the adapters into the model with PEFT"
    ):
        with_adapters(folder, open_folder(base))


def test_a_folder_without_a_base_or_tensors_says_what_to_do(tmp_path, base):
    updates = adapters(make_tensors(TINY | UNTIED))
    write(tmp_path / "outer" / "named", base, updates)
    with pytest.raises(
        FileNotFoundError, match=r"outer contains no config\.json\. Give .*outer/named, which"
    ):
        load(tmp_path / "outer")
    write(tmp_path / "own", tmp_path / "own", updates)
    write(tmp_path / "circle", tmp_path / "own", updates)
    for name in ("own", "circle"):
        with pytest.raises(
            ValueError, match=r"leads back to .*own, which contains adapters\. Write the folder"
        ):
            load(tmp_path / name)
    torch = write(tmp_path / "torch", base, updates)
    (torch / "adapter_model.safetensors").rename(torch / "adapter_model.bin")
    with pytest.raises(
        FileNotFoundError, match=r"is a pickle, and no .*save_pretrained\(FOLDER, safe_ser"
    ):
        load(torch)


def test_adapters_of_a_t5gemma_are_read_for_its_encoder(tmp_path):
    tensors = gemma.make_tensors(gemma.CONFIGS["balanced"])
    base = gemma.make_folder(tmp_path / "base", gemma.CONFIGS["balanced"], tensors)
    updates = {}
    rng = np.random.default_rng(3)
    for name in ("encoder.layers.1.mlp.up_proj", "decoder.layers.0.cross_attn.q_proj"):
        outputs, inputs = tensors[f"model.{name}.weight"].shape
        a, b = rng.normal(size=(RANK, inputs)), rng.normal(size=(outputs, RANK))
        updates |= {f"base_model.model.model.{name}.lora_A.weight": a.astype("f")}
        updates |= {f"base_model.model.model.{name}.lora_B.weight": b.astype("f")}
        tensors[f"model.{name}.weight"] += (ALPHA / RANK * b @ a).astype("f")
    merged = gemma.make_folder(tmp_path / "merged", gemma.CONFIGS["balanced"], tensors)
    folder = write(tmp_path / "adapters", base, updates)
    for encoder_only in (False, True):
        found, expected = (load(x, encoder_only=encoder_only).variables for x in (folder, merged))
        close(found, expected, atol=1e-5)


WHOLE = (
    InitRule("embedding", "resize", fill="fresh"),
    InitRule(
        "logits_kernel|encoder/final_norm/scale|encoder/layers_0/attention/align/query/kernel",
        "fresh",
    ),
)


@pytest.mark.parametrize(
    ("targets", "rules", "modules", "saved"),
    [
        (LoRA().targets, (), ["q", "v"], None),
        (
            r"(de|en)coder/layers_[01]/(self_)?attention/align/query/kernel",
            WHOLE,
            [
                f"{stack}.block.{i}.layer.0.SelfAttention.q"
                for stack, i in (("decoder", 0), ("decoder", 1), ("encoder", 1))
            ],
            [
                "decoder.embed_tokens",
                "encoder.block.0.layer.0.SelfAttention.q",
                "encoder.embed_tokens",
                "encoder.final_layer_norm",
                "lm_head",
            ],
        ),
        ("decoder/layers_1/mlp/.*", (), [f"{MLP}.{n}" for n in ("wi_0", "wi_1", "wo")], None),
    ],
)
def test_a_run_is_exported_and_read_again(tmp_path, base, targets, rules, modules, saved):
    run, lora, folder = tmp_path / "run", tmp_path / "lora", tmp_path / "peft"
    convert_checkpoint(base, run, vocabulary=Bytes(125))
    adapt(run, lora, LoRA(RANK, ALPHA, targets), rules)
    export_run(lora, folder, to="peft")
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, modules)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * (len(modules) if len(modules) > 2 else 12) + len(saved or ())
    assert config["modules_to_save"] == saved
    (folder / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(run)})
    )
    convert_checkpoint(folder, tmp_path / "again")
    expected = load(lora).variables
    for place in (folder, tmp_path / "again"):
        close(load(place).variables, expected, atol=1e-6)
    with pytest.raises(
        ValueError,
        match=r"run has no training\.adapters, .* Export the model with --to huggingface",
    ):
        export_run(run, tmp_path / "none", to="peft")
