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
from synthesizer_jax.models import LoRA, LoRARule
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.folder import open_folder
from synthesizer_jax.pretrained.huggingface.peft import with_adapters
from synthesizer_jax.pretrained.huggingface.peft_config import PeftConfig
from synthesizer_jax.pretrained.opening import open_pretrained
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.run_directory import find_base, start_from_run
from synthesizer_jax.training.trainer import Trainer
from tests.pretrained import gemma, gemma2
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


def name_base(folder, base):
    """Writes the folder of the base model into a folder of PEFT, and returns the configuration."""
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}
    path.write_text(json.dumps(config))
    return config


def adapt(source, directory, lora, init_rules=()):
    """Saves a run that trains adapters of another run.

    All trained parameters differ from their initial values.
    """
    recipe = start_from_run(source)
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
    norm, shared = (
        f"base_model.model.{module}.weight" for module in ("encoder.final_layer_norm", "shared")
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
            {"lora_bias": True},
            "lora_bias is True, which is not supported.* Merge the",
        ),
        (
            base,
            updates,
            {"use_dora": True},
            "use_dora is True, but .*lora_magnitude_vector is missing",
        ),
        (base, updates, {"r": 4}, "q.lora_B.weight have the rank 3, but the configuration says 4"),
        (base, updates, {"target_modules": ["q", "o", "wi_0", "lm_head"]}, r"selects .*\.k?q, but"),
        (
            base,
            updates,
            {"target_modules": r".*1\.layer.*(q|wi_0)|lm_head"},
            r"A\.weight exists, but target_modules does not select decoder.block.0.*Attention\.o",
        ),
        (base, {}, {"target_modules": ["query"]}, "target_modules selects no module of the base"),
        (base, updates, {"target_modules": "("}, r"contains '\(', which is not a valid regular"),
        (
            base,
            updates,
            {"alpha_pattern": {"q": "x"}},
            "alpha_pattern is .* must map patterns to pos",
        ),
        (
            base,
            updates,
            {"layers_pattern": 3},
            "layers_pattern is 3, but it must be a string or a list",
        ),
        (
            base,
            updates | {"base_model.model.shared.token_adapter.trainable_tokens_delta": table[:1]},
            {"trainable_token_indices": [3, 5]},
            r"trainable_tokens_delta has the shape \(1, 20\) instead of \(2, 20\)",
        ),
        (
            base,
            updates | {"base_model.model.shared.token_adapter.trainable_tokens_delta": table[:1]},
            {"trainable_token_indices": [384]},
            "indices contains 384, but shared.weight has only the tokens 0 to 383 .resize the",
        ),
        (
            base,
            updates | {"base_model.model.shared.token_adapter.trainable_tokens_delta": table[:2]},
            {"trainable_token_indices": [5, -1]},
            "indices contains -1, but shared.weight has only the tokens 0 to 383",
        ),
        (  # PEFT does not tie modules with different tokens
            base,
            updates
            | {
                f"base_model.model.{module}.token_adapter.trainable_tokens_delta": table[:1]
                for module in ("shared", "lm_head")
            },
            {"trainable_token_indices": {"shared": [3], "lm_head": [5]}},
            r"shared\.token_adapter\.trainable_tokens_delta is neither an update of a matrix",
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
            r"norm\.weight has the shape \(19,\), but in the base its shape is \(20,\)",
        ),
        (base, {norm: np.ones(20, int)}, {}, "norm.weight is I64, which is not a floating-point"),
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


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("f")


def low_rank(tensors, name, seed):
    """Returns the tensors of a low-rank update with a magnitude, and the updated tensor.

    Embeddings have other names and the transposed shapes.
    """
    w = tensors[f"{name}.weight"].astype(np.float64)
    is_embedding = name.endswith("embed_tokens")
    inputs, outputs = w.shape if is_embedding else w.shape[::-1]
    a, b, m = normal(seed, RANK, inputs), normal(seed + 1, outputs, RANK), normal(seed + 2, outputs)
    delta = b.astype(np.float64) @ a
    updated = w + ALPHA / RANK * (delta.T if is_embedding else delta)
    axis = 0 if is_embedding else 1
    scaled = updated * np.expand_dims(m / np.linalg.norm(updated, axis=axis), axis)
    names = ("lora_embedding_A", "lora_embedding_B")
    if not is_embedding:
        names = ("lora_A.weight", "lora_B.weight")
    found = dict(zip((*names, "lora_magnitude_vector"), (a, b, m), strict=True))
    return {f"base_model.model.{name}.{leaf}": x for leaf, x in found.items()}, updated, scaled


@pytest.mark.parametrize("dora", [False, True])
def test_magnitudes_and_embeddings_are_read(tmp_path, base, dora):
    """The embeddings of both stacks have the same update, so they stay one parameter."""
    tensors = make_tensors(TINY | UNTIED)
    tensors |= {
        f"{s}.embed_tokens.weight": tensors["shared.weight"] for s in ("encoder", "decoder")
    }
    names = [*MATRICES, "encoder.embed_tokens", "decoder.embed_tokens"]
    updates = {}
    for i, name in enumerate(names):
        found, plain, scaled = low_rank(tensors, name, min(3 * i, 3 * len(MATRICES)))
        updates |= {k: x for k, x in found.items() if dora or not k.endswith("vector")}
        tensors[f"{name}.weight"] = (scaled if dora else plain).astype("f")
    tensors["shared.weight"] = tensors["encoder.embed_tokens.weight"]
    merged = make_folder(tmp_path / "merged", TINY | UNTIED, tensors)
    config = {"use_dora": dora, "r": RANK, "target_modules": names}
    folder = write(tmp_path / "adapters", base, updates, **config)
    for encoder_only in (False, True):
        found, expected = (load(x, encoder_only=encoder_only).variables for x in (folder, merged))
        close(found, expected, atol=2e-5)


def test_modules_that_share_an_embedding_may_differ(tmp_path):
    """The model then has an embedding for each stack, and an output projection."""
    tensors = make_tensors(TINY)
    base = make_folder(tmp_path / "base", TINY, tensors)
    table = tensors["shared.weight"]
    rows = normal(1, 2, TINY["d_model"])
    updates, updated, _ = low_rank({"embed_tokens.weight": table}, "embed_tokens", 2)
    updates = {
        k.replace("embed_tokens", "encoder.embed_tokens"): x
        for k, x in updates.items()
        if not k.endswith("vector")
    }
    updates["base_model.model.decoder.embed_tokens.token_adapter.trainable_tokens_delta"] = rows
    config = {"target_modules": r"encoder\.embed_tokens"}
    config["trainable_token_indices"] = {"decoder.embed_tokens": [7, 4]}
    loaded = load(write(tmp_path / "adapters", base, updates, **config))
    model = loaded.model
    assert (model.tied, model.encoder_d_model) == (False, TINY["d_model"])
    assert model.logits_scale == TINY["d_model"] ** -0.5
    params = loaded.variables["params"]
    of_decoder = table.copy()
    of_decoder[[7, 4]] = rows
    np.testing.assert_array_equal(params["embedding"], of_decoder)
    np.testing.assert_array_equal(params["logits_kernel"], table.T)
    np.testing.assert_allclose(params["encoder_embedding"], updated, atol=1e-5)


def test_unequal_adapters_of_the_embedding_of_a_t5gemma_2_are_refused(tmp_path):
    base = gemma2.make_folder(tmp_path / "base", tensors := gemma2.make_tensors())
    rows = tensors["model.encoder.embed_tokens.weight"][:1]
    name = "base_model.model.model.decoder.embed_tokens.token_adapter.trainable_tokens_delta"
    options = {"trainable_token_indices": {"decoder.embed_tokens": [9]}}
    folder = write(tmp_path / "adapters", base, {name: rows}, **options)
    with pytest.raises(ValueError, match="one parameter of a T5Gemma 2, so their adapters must be"):
        load(folder)


@pytest.mark.parametrize("config", [TINY, TINY | UNTIED], ids=["tied", "untied"])
def test_tokens_of_the_shared_embedding_are_rows_of_all_modules(tmp_path, config):
    """As in PEFT, this includes an output projection that the model does not tie."""
    config = config | {"num_heads": 2}
    tensors = make_tensors(config)
    base = make_folder(tmp_path / "base", config, tensors)
    rows = normal(1, 2, TINY["d_model"])
    name = "base_model.model.shared.token_adapter.trainable_tokens_delta"
    folder = write(tmp_path / "adapters", base, {name: rows}, trainable_token_indices=[7, 4])
    for name in {"shared.weight", "lm_head.weight"} & tensors.keys():
        tensors[name] = tensors[name].copy()
        tensors[name][[7, 4]] = rows
    merged = make_folder(tmp_path / "merged", config, tensors)
    close(load(folder).variables, load(merged).variables, atol=0)
    # With a mesh, every device reads only its part of an embedding.
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices()[:4])
    close(load(folder, mesh=mesh).variables, load(merged).variables, atol=0)


Q, WO = "encoder.block.1.layer.0.SelfAttention.q", "decoder.block.0.layer.2.DenseReluDense.wo"
MODULES = [Q, WO, "decoder.block.1.layer.0.SelfAttention.o", "lm_head", "encoder.embed_tokens"]


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        ({"targets": ("q", "wo")}, {Q, WO}),
        ({"targets": ("DenseReluDense.wo", "o", "elfAttention.q")}, {WO, MODULES[2]}),
        ({"targets": r".*\.(q|o)"}, {Q, MODULES[2]}),
        ({"targets": "q"}, set()),
        ({"targets": "all-linear"}, {Q, WO, MODULES[2]}),
        ({"targets": "All-Linear", "excluded": ("o",)}, {Q, WO}),
        ({"targets": ("q", "o", "wo"), "excluded": "encoder.*"}, {WO, MODULES[2]}),
        ({"targets": ("q", "o", "wo"), "layers": (1,)}, {Q, MODULES[2]}),
        ({"targets": ("q", "wo"), "layers": (0,), "layer_lists": ("block",)}, {WO}),
        ({"targets": ("q", "wo"), "layers": (0,), "layer_lists": ("layer",)}, {Q}),
        ({"targets": ("q", "wo"), "layers": ()}, {Q, WO}),
        ({"targets": ("q", "lm_head"), "whole": ("lm_head",)}, {Q}),
        ({"targets": ("q", "wo"), "whole": ("decoder",)}, {Q}),
        ({"targets": ("embed_tokens",)}, {"encoder.embed_tokens"}),
    ],
)
def test_modules_are_selected_by_the_rules_of_peft(options, selected):
    """tests/peers compares the rules with PEFT itself."""
    config = PeftConfig(alpha=1.0, **options)
    assert config.select(MODULES, outputs=MODULES[-2:]) == selected


def test_the_first_pattern_that_matches_the_end_of_a_name_applies(tmp_path, base):
    fields = {"lora_alpha": 8, "r": 4, "use_rslora": True, "alpha_pattern": {r"block\.\d+.*q": 2}}
    fields["rank_pattern"] = {"SelfAttention": 5, "q": 16, "SelfAttention.(q|o)": 9}
    config = PeftConfig.read(write(tmp_path / "a", base, {}, **fields) / "adapter_config.json")
    assert [config.rank_of(name) for name in MODULES[:3]] == [16, 4, 9]
    assert [config.scale_of(name, 16) for name in MODULES[:2]] == [0.5, 2.0]


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


KINDS = {
    "rules": LoRA(
        RANK,
        ALPHA,
        ".*/(query|wo)/kernel",
        rules=(
            LoRARule(".*/query/.*", 2),
            LoRARule("decoder/layers_1/mlp/.*", alpha=3.0),
        ),
        rank_stabilized=True,
        whole=".*/final_norm/scale",
    ),
    "dora": LoRA(RANK, ALPHA, ".*/kernel|logits_kernel", dora=True),
    "embeddings": LoRA(RANK, ALPHA, embeddings=".*embedding"),
    "dora of embeddings": LoRA(RANK, ALPHA, embeddings=".*embedding", dora=True),
    "whole embeddings": LoRA(RANK, ALPHA, whole=".*embedding"),
    "dora in 8 bits": LoRA(RANK, ALPHA, embeddings="embedding", dora=True, base="int8"),
    "tokens": LoRA(RANK, ALPHA, tokens=(9, 4)),
    "one token": LoRA(RANK, ALPHA, tokens=(9,)),
}
"""The kinds of adapters, by name."""


def make_base(folder, family):
    """Writes the folder of a base model.

    The family is ``tied``, ``untied``, ``gemma``, ``gemma, tied`` or ``gemma 2``.
    """
    if family == "gemma 2":
        return gemma2.make_folder(folder, gemma2.make_tensors())
    if family.startswith("gemma"):
        config = gemma.CONFIGS["balanced" if family == "gemma, tied" else "unbalanced"]
        return gemma.make_folder(folder, config, gemma.make_tensors(config))
    config = TINY | (UNTIED if family == "untied" else {})
    return make_folder(folder, config, make_tensors(config))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("untied", "rules"),
        ("untied", "dora"),
        ("tied", "embeddings"),
        ("tied", "dora of embeddings"),
        ("tied", "dora in 8 bits"),
        ("tied", "tokens"),
        ("untied", "tokens"),
        ("untied", "one token"),
        ("gemma, tied", "dora of embeddings"),
        ("gemma, tied", "tokens"),
        ("gemma", "rules"),
        ("gemma 2", "embeddings"),
        ("gemma 2", "whole embeddings"),
        ("gemma 2", "tokens"),
    ],
)
def test_all_kinds_of_adapters_are_exported_and_read_again(tmp_path, family, kind):
    base = make_base(tmp_path / "base", family)
    convert_checkpoint(base, tmp_path / "run", vocabulary=Bytes(125))
    adapt(tmp_path / "run", tmp_path / "lora", KINDS[kind])
    folder = tmp_path / "peft"
    export_run(tmp_path / "lora", folder, to="peft")
    config = name_base(folder, base)
    found, expected = load(folder), load(tmp_path / "lora")
    params = expected.variables["params"]
    if kind == "dora in 8 bits":
        # The run rounds its base, but PEFT adds the adapters to the base in float32.
        saved = found.variables["params"]
        np.testing.assert_allclose(saved["logits_kernel"], saved["embedding"].T, atol=1e-5)
        return
    if kind == "dora of embeddings":
        # Low-rank updates with magnitudes differ between an embedding and an output projection, so
        # the output projection is saved as a complete tensor.
        output = "lm_head" if family == "tied" else "lm_head.out_proj"
        assert config["modules_to_save"] == [output]
        params = params | {"logits_kernel": params["embedding"].T}
    else:
        assert found.model == expected.model
    close(found.variables["params"], params, atol=1e-5)
    if kind == "rules" and family == "untied":
        assert config["target_modules"] == ["q", "wo"]
        assert config["rank_pattern"] == {"q": 2}
        assert config["alpha_pattern"] == {r"decoder\.block\.1\.layer\.2\.DenseReluDense\.wo": 3.0}
        assert config["modules_to_save"] == ["decoder.final_layer_norm", "encoder.final_layer_norm"]


def test_the_input_vector_of_a_t5gemma_2_is_exported_with_its_module(tmp_path):
    """PEFT loads a module of ``modules_to_save`` only if the folder has all of its parameters."""
    base = make_base(tmp_path / "base", "gemma 2")
    convert_checkpoint(base, tmp_path / "run", vocabulary=Bytes(125))
    adapt(tmp_path / "run", tmp_path / "lora", LoRA(RANK, ALPHA, whole="separate_embedding"))
    export_run(tmp_path / "lora", tmp_path / "peft", to="peft")
    export_run(tmp_path / "lora", tmp_path / "whole")
    name_base(tmp_path / "peft", base)
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for module in ("encoder.text_model", "decoder"):
        name = f"base_model.model.model.{module}.embed_tokens"
        assert {f"{name}.weight", f"{name}.eoi_embedding"} <= tensors.keys()
    for encoder_only in (False, True):
        found, expected = (
            load(tmp_path / name, encoder_only=encoder_only).variables for name in ("peft", "whole")
        )
        close(found, expected, atol=1e-5)

    lora = LoRA(RANK, ALPHA, whole="separate_embedding", tokens=(9,))
    adapt(tmp_path / "run", tmp_path / "tokens", lora)
    with pytest.raises(ValueError, match="train an update of embedding, but another parameter of"):
        export_run(tmp_path / "tokens", tmp_path / "none", to="peft")


def test_a_run_that_peft_cannot_represent_is_refused(tmp_path, base):
    convert_checkpoint(base, tmp_path / "run", vocabulary=Bytes(125))
    adapt(tmp_path / "run", tmp_path / "lora", LoRA(targets=None, tokens=(9,)))
    with pytest.raises(ValueError, match=r"no low-rank updates, but PEFT needs at least one\. Ex"):
        export_run(tmp_path / "lora", tmp_path / "peft", to="peft")
    assert not (tmp_path / "peft").exists()


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
    config = name_base(folder, run)
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, modules)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert len(tensors) == 2 * (len(modules) if len(modules) > 2 else 12) + len(saved or ())
    assert config["modules_to_save"] == saved
    convert_checkpoint(folder, tmp_path / "again")
    expected = load(lora).variables
    for place in (folder, tmp_path / "again"):
        close(load(place).variables, expected, atol=1e-6)
    with pytest.raises(
        ValueError,
        match=r"run has no training\.adapters, .* Export the model with --to huggingface",
    ):
        export_run(run, tmp_path / "none", to="peft")


@pytest.mark.parametrize("config", [TINY, TINY | UNTIED], ids=["tied", "untied"])
def test_updates_are_added_to_the_rows_of_trained_tokens(tmp_path, config):
    """As in PEFT, the rows of trained tokens belong to the module to which the update is added."""
    tensors = make_tensors(config)
    base = make_folder(tmp_path / "base", config, tensors)
    rows = normal(1, 2, TINY["d_model"])
    projection = tensors["shared.weight" if config is TINY else "lm_head.weight"].copy()
    projection[[7, 4]] = rows
    updates, updated, _ = low_rank({"lm_head.weight": projection}, "lm_head", 2)
    updates = {name: x for name, x in updates.items() if not name.endswith("vector")}
    updates["base_model.model.shared.token_adapter.trainable_tokens_delta"] = rows
    folder = write(tmp_path / "adapters", base, updates, trainable_token_indices=[7, 4])
    params = load(folder).variables["params"]
    np.testing.assert_allclose(params["logits_kernel"], updated.T, atol=1e-5)
    np.testing.assert_array_equal(params["embedding"][np.array([7, 4])], rows)
