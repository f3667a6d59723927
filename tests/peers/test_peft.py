"""Tests that adapters that we read or write have the same effect in PEFT's T5 and in ours.

`make test-peers` runs these tests.
"""

import numpy as np
import pytest
import torch
import transformers

from synthesizer_jax.models import LoRA
from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.peft import IGNORED, OPTIONS
from synthesizer_jax.training.experiment import InitRule
from tests.peers.test_transformers import compare_logits, load_reference, make_model
from tests.pretrained.folders import FAMILIES, TINY
from tests.pretrained.test_peft import adapt

peft = pytest.importorskip("peft")


@pytest.fixture(params=["T5 1.0", "T5 1.1, FLAN-T5", "umT5"])
def base(tmp_path, monkeypatch, request):
    """The folder of a base model with a tokenizer.

    PEFT uses the relative path of the folder as the name of the base model.
    """
    monkeypatch.chdir(tmp_path)
    make_model(TINY | FAMILIES[request.param]).save_pretrained("base")
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained("base")
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
        (["v"], {"modules_to_save": ["embed_tokens", "lm_head"]}),
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
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, 0.0, 0.1)
        elif "modules_to_save" in name:  # copies of a parameter get the same values
            rng = np.random.default_rng(p.numel())
            p.data += torch.tensor(0.1 * rng.standard_normal(p.shape), dtype=p.dtype)
    adapted.save_pretrained("adapters")
    convert_checkpoint(base.parent / "adapters", base.parent / "run")
    for place in ("adapters", "run"):
        compare_logits(adapted.base_model.model.eval(), model, load(place).variables)


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
