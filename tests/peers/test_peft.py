"""Tests that adapters that we read, write or train have the same effect in PEFT and here.

`make test-peers` runs these tests.
"""

import copy
import itertools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from synthesizer_jax.models import LoRA
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.peft_config import IGNORED, OPTIONS, PeftConfig
from synthesizer_jax.pretrained.huggingface.peft_export import write_adapters
from synthesizer_jax.primitives.parameters import apply_method
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.initial_parameters import read_base, restore_trained
from synthesizer_jax.training.run_directory import load_experiment
from tests.peers.test_transformers import (
    TOLERANCE,
    compare_logits,
    deviation,
    load_reference,
    make_model,
)
from tests.pretrained import gemma, gemma2
from tests.pretrained.folders import FAMILIES, TINY
from tests.pretrained.test_peft import KINDS, MODULES, adapt

peft = pytest.importorskip("peft")


GEMMAS = {
    "T5Gemma, tied": gemma.CONFIGS["balanced"] | {"model_type": "t5gemma"},
    "T5Gemma": gemma.CONFIGS["unbalanced"] | {"model_type": "t5gemma"},
    "T5Gemma 2": gemma2.CONFIG,
}
"""The configurations of the T5Gemmas by family."""

ALL_FAMILIES = ["T5 1.0", "T5 1.1, FLAN-T5", *GEMMAS]


def make_base(folder, family):
    """Writes the folder of a base model with a tokenizer."""
    if family == "T5Gemma 2" and transformers.__version__.startswith("4."):
        pytest.skip("transformers 4 has no T5Gemma 2")
    if family in GEMMAS:
        make_model(copy.deepcopy(GEMMAS[family])).save_pretrained(folder)
        gemma.write_tokenizer(folder, gemma=True)
        return
    config = TINY | FAMILIES[family]
    model = make_model(config)
    if not config["tie_word_embeddings"]:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().flip(0))
    model.save_pretrained(folder)
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained(folder)


def compare(reference, model, variables, family):
    """Compares the logits of a model with those of a transformers model with adapters.

    With soft caps, both differ by up to 7e-6 of the largest logit from the logits in float64.
    """
    tolerance = 2e-5 if family in ("T5Gemma, tied", "T5Gemma") else TOLERANCE
    assert deviation(reference, model, variables) <= tolerance


def change(adapted):
    """Gives random values to the adapters of a model of PEFT.

    Copies of a parameter that are trained completely get the same values.
    """
    for name, p in adapted.named_parameters():
        if "lora_" in name or "trainable_tokens_delta" in name:
            torch.nn.init.normal_(p, 0.0, 0.1)
        elif "modules_to_save" in name:
            rng = np.random.default_rng(p.numel())
            p.data += torch.tensor(0.1 * rng.standard_normal(p.shape), dtype=p.dtype)


@pytest.fixture(params=["T5 1.0", "T5 1.1, FLAN-T5", "umT5"])
def base(tmp_path, monkeypatch, request):
    """The folder of a base model with a tokenizer.

    PEFT uses the relative path of the folder as the name of the base model.
    """
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path / "base", request.param)
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["q", "v"], {}),
        (
            ["k", "o", "wi", "wi_0", "wo", "encoder.block.1.layer.0.SelfAttention.q"],
            {"use_rslora": True},
        ),
        ("all-linear", {}),
        (["q"], {"modules_to_save": ["layer_norm", "DenseReluDense.wo"]}),
        (["v", "lm_head"], {}),
    ],
)
def test_what_peft_saves_is_read(base, targets, options):
    model = load(base).model
    if model.tied and "lm_head" in targets:
        pytest.skip("it has no output projection of its own")
    lora = peft.LoraConfig(
        r=3, lora_alpha=7, target_modules=targets, task_type="SEQ_2_SEQ_LM", **options
    )
    adapted = peft.get_peft_model(transformers.AutoModelForSeq2SeqLM.from_pretrained("base"), lora)
    adapted.base_model.model.config = load_reference(base, model).config
    change(adapted)
    adapted.save_pretrained("adapters")
    convert_checkpoint(base.parent / "adapters", base.parent / "run")
    for place in ("adapters", "run"):
        compare_logits(adapted.base_model.model.eval(), model, load(place).variables)


ATTENTION = ["q", "v", "q_proj", "v_proj"]
OUTPUT = "the output projection"
UPDATED_TOKENS = "tokens of an output projection with an update"
READ = {
    "patterns": {
        "target_modules": r".*\.(q|wo|q_proj|down_proj)",
        "rank_pattern": {"q": 2, r"decoder.*wo": 5, r".*\.1\..*_proj": 4},
        "alpha_pattern": {r"block\.0.*q": 1, "down_proj": 10},
        "use_rslora": True,
    },
    "layers": {
        "target_modules": ["wo", "k", *ATTENTION],
        "exclude_modules": ["k"],
        "layers_to_transform": [1],
        "bias": "all",
    },
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", *ATTENTION]},
    "embeddings and output": {"target_modules": ["embed_tokens", OUTPUT, *ATTENTION]},
    "dora of embeddings": {
        "target_modules": ["embed_tokens", "relative_attention_bias", OUTPUT, "wo"],
        "use_dora": True,
    },
    "whole embeddings": {
        "target_modules": ATTENTION,
        "modules_to_save": ["embed_tokens", OUTPUT],
    },
    "tokens": {"target_modules": ATTENTION, "trainable_token_indices": [9, 4]},
    "tokens by module": {
        "target_modules": ATTENTION,
        "trainable_token_indices": {"embed_tokens": [9, 4]},
    },
    UPDATED_TOKENS: {
        "target_modules": [*ATTENTION, OUTPUT],
        "trainable_token_indices": [9, 4],
    },
    "orthogonal": {"target_modules": ATTENTION, "init_lora_weights": "orthogonal", "r": 4},
}
"""Options of PEFT's adapters, by the kinds of adapters."""


def share(adapted):
    """Gives the decoder's embedding and the output projection the adapters of the encoder.

    PEFT trains separate adapters for these modules, but they are one parameter of a T5Gemma 2.
    """
    parameters = dict(adapted.named_parameters())
    model = "base_model.model.model"
    for name, p in parameters.items():
        if name.startswith(f"{model}.decoder.embed_tokens."):
            p.data = parameters[name.replace("decoder", "encoder.text_model")].data.clone()
    # The factors of the output projection are those of the embedding in the opposite order.
    for ours, theirs in ("AB", "BA"):
        name = f"{model}.encoder.text_model.embed_tokens.lora_embedding_{theirs}.default"
        output = f"base_model.model.lm_head.out_proj.lora_{ours}.default.weight"
        if {name, output} <= parameters.keys():
            parameters[output].data = parameters[name].data.T.clone()


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("kind", READ)
def test_all_kinds_of_adapters_of_peft_are_read(tmp_path, monkeypatch, family, kind):
    if kind == UPDATED_TOKENS and family == "T5 1.1, FLAN-T5":
        pytest.skip("PEFT refuses these options if the output projection is not tied")
    monkeypatch.chdir(tmp_path)
    make_base(tmp_path / "base", family)
    options = {"r": 3, "lora_alpha": 7, "task_type": "SEQ_2_SEQ_LM"} | READ[kind]
    if isinstance(options["target_modules"], list):
        output = "lm_head.out_proj" if family in GEMMAS else "lm_head"
        for option in {"target_modules", "modules_to_save"} & options.keys():
            options[option] = [output if x == OUTPUT else x for x in options[option]]
    config = peft.LoraConfig(**options)
    reference = load_reference(tmp_path / "base", load(tmp_path / "base").model)
    adapted = peft.get_peft_model(reference, config)
    change(adapted)
    if family == "T5Gemma 2":
        share(adapted)
    adapted.save_pretrained("adapters")
    if family == "T5Gemma 2" and kind in ("embeddings", "dora of embeddings", UPDATED_TOKENS):
        # Only the embeddings or only the output projection have updates, or their magnitudes belong
        # to different axes.
        with pytest.raises(ValueError, match="one parameter of a T5Gemma 2, so their adapters"):
            load(tmp_path / "adapters")
        return
    # Compare with the adapters that PEFT itself reads.
    loaded = load(tmp_path / "adapters")
    again = load_reference(tmp_path / "base", load(tmp_path / "base").model)
    read = peft.PeftModel.from_pretrained(again, "adapters").base_model.model.eval()
    compare(read, loaded.model, loaded.variables, family)


def test_modules_and_patterns_are_matched_as_in_peft():
    """Compares all combinations of some options for the modules of a T5."""
    tuners = pytest.importorskip("peft.tuners.tuners_utils")
    lists = [("q", "o"), ("SelfAttention.q", "embed_tokens"), r".*\.(wo|q)", "q", ("lm_head", "wo")]
    excluded = [(), ("o", "DenseReluDense.wo"), "encoder.*"]
    layers = [(None, ()), ((0,), ()), ((1,), ("block",)), ((0, 2), ("layer", "block")), ((), ())]
    whole = [(), ("lm_head",), ("DenseReluDense", "q")]
    for targets, exclude, (indices, names), saved in itertools.product(
        lists, excluded, layers, whole
    ):
        config = PeftConfig(
            1.0, None, False, False, {}, {}, targets, exclude, indices, names, saved
        )
        theirs = types.SimpleNamespace(
            target_modules=targets if isinstance(targets, str) else set(targets),
            target_parameters=None,
            exclude_modules=exclude,
            layers_to_transform=None if indices is None else list(indices),
            layers_pattern=list(names),
            modules_to_save=saved,
        )
        expected = {
            name
            for name in MODULES
            if (found := tuners.check_target_module_exists(theirs, name))
            and not isinstance(found, tuners._ExcludedModule)
        }
        assert config.select(MODULES, outputs=()) == expected, theirs

    patterns = {"SelfAttention": 2, "q": 3, r"block\.0.*": 4, "lm_head": 5, "^wo": 6, ".*tokens": 7}
    config = PeftConfig(1.0, 8, rank_pattern=patterns)
    for name in MODULES:
        key = peft.utils.other.get_pattern_key(patterns, name)
        assert config.rank_of(name) == patterns.get(key, 8)


def test_every_option_is_known():
    """We read PEFT's default options.

    If PEFT adds an option that we do not know, this test fails.
    """
    written = peft.LoraConfig().to_dict()
    assert sorted(written.keys() - OPTIONS.keys() - IGNORED) == []
    for name, allowed in OPTIONS.items():
        assert written[name] in (None, *allowed), name


@pytest.mark.parametrize(
    ("targets", "rules"),
    [
        (LoRA().targets, ()),
        (".*", ()),
        (
            "decoder/layers_1/.*",
            (
                InitRule("embedding", "resize", fill="fresh"),
                InitRule("encoder/(final_norm/scale|layers_0/mlp/wo/kernel)", "fresh"),
            ),
        ),
    ],
)
def test_peft_reads_what_is_exported(base, tmp_path, targets, rules):
    convert_checkpoint(base, tmp_path / "run")
    adapt(tmp_path / "run", tmp_path / "lora", LoRA(3, 7.0, targets), rules)
    export_run(tmp_path / "lora", tmp_path / "adapters", to="peft")
    model, variables, _ = load(tmp_path / "lora")
    adapted = peft.PeftModel.from_pretrained(load_reference(base, model), tmp_path / "adapters")
    compare_logits(adapted.base_model.model.eval(), model, variables)


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "dora in 8 bits"])
def test_peft_reads_all_kinds_of_adapters(tmp_path, family, kind):
    make_base(tmp_path / "base", family)
    convert_checkpoint(tmp_path / "base", tmp_path / "run")
    adapt(tmp_path / "run", tmp_path / "lora", KINDS[kind])
    export_run(tmp_path / "lora", tmp_path / "adapters", to="peft")
    model, variables, _ = load(tmp_path / "lora")
    reference = load_reference(tmp_path / "base", model)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        adapted = peft.PeftModel.from_pretrained(reference, tmp_path / "adapters")
    compare(adapted.base_model.model.eval(), model, variables, family)


STEPS = 3
RATE = 0.05


def batches(model):
    """Returns random inputs, the decoder's inputs and targets of every step."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        inputs, targets = (rng.integers(3, model.vocab_size, (2, n)) for n in (7, 5))
        # Some of the tokens are those that are trained.
        inputs[:, 2], targets[0, 1], targets[1, 0] = 9, 4, 9
        start = np.full((2, 1), model.ids.start)
        found.append((inputs, np.concatenate([start, targets[:, :-1]], axis=1), targets))
    return found


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("T5 1.1, FLAN-T5", "rules"),
        ("T5 1.1, FLAN-T5", "dora"),
        ("T5 1.0", "tokens"),
        ("T5Gemma", "rules"),
        ("T5Gemma", "dora"),
        ("T5Gemma", "embeddings"),
        ("T5Gemma", "dora of embeddings"),
        ("T5Gemma", "tokens"),
        ("T5Gemma 2", "rules"),
        ("T5Gemma 2", "dora"),
        ("T5Gemma 2", "tokens"),
    ],
)
def test_steps_of_gradient_descent_are_those_of_peft(tmp_path, family, kind):
    """The steps begin at the same adapters, which differ from their initial values.

    Low-rank updates of an embedding that several modules share are left out, because PEFT trains
    separate updates for these modules.
    """
    make_base(tmp_path / "base", family)
    convert_checkpoint(tmp_path / "base", tmp_path / "run")
    adapt(tmp_path / "run", tmp_path / "lora", KINDS[kind])
    export_run(tmp_path / "lora", tmp_path / "start", to="peft")
    experiment = load_experiment(tmp_path / "lora")
    model, trainable = experiment.model, experiment.trainable

    reference = load_reference(tmp_path / "base", model)
    adapted = peft.PeftModel.from_pretrained(reference, tmp_path / "start", is_trainable=True)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, RATE)
    adapted.eval()  # without dropout
    for inputs, shifted, targets in batches(model):
        optimizer.zero_grad()
        tokens = torch.as_tensor(inputs)
        logits = adapted(input_ids=tokens, decoder_input_ids=torch.as_tensor(shifted)).logits
        torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.as_tensor(targets).flatten()
        ).backward()
        optimizer.step()
    adapted.save_pretrained(tmp_path / "theirs")

    _, variables = restore_trained(tmp_path / "lora", trainable)
    base = read_base(experiment, None)

    @jax.jit
    def step(variables, inputs, shifted, targets):
        """Returns the variables after a step of gradient descent."""

        def loss(variables):
            merged = trainable.merge(variables, base)
            logits = apply_method(model.__call__, merged, inputs, shifted)
            log_p = jax.nn.log_softmax(logits)
            return -jnp.take_along_axis(log_p, targets[..., None], axis=-1).mean()

        return jax.tree.map(lambda x, g: x - RATE * g, variables, jax.grad(loss)(variables))

    for batch in batches(model):
        variables = step(variables, *(jnp.asarray(x, jnp.int32) for x in batch))
    (tmp_path / "ours").mkdir()
    write_adapters(tmp_path / "ours", trainable, variables, lambda: base)

    start, ours, theirs = (
        load_file(tmp_path / name / "adapter_model.safetensors")
        for name in ("start", "ours", "theirs")
    )
    # PEFT also saves the base of the output projection.
    assert ours.keys() == {name for name in theirs if not name.endswith("base_layer.weight")}
    for name, x in start.items():
        change = theirs[name] - x
        assert np.abs(change).max() > 0, name
        np.testing.assert_allclose(
            ours[name] - x, change, rtol=0, atol=2e-3 * np.abs(change).max(), err_msg=name
        )
