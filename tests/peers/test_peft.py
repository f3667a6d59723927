"""Adapters in PEFT's T5 and in ours compute the same, read and written: `make test-peers`."""

import pytest
import torch
import transformers

from synthesizer_jax.pretrained import load
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.training.adapters import LoRA
from tests.peers.test_transformers import compare_logits, load_reference, make_model
from tests.pretrained.folders import FAMILIES, TINY
from tests.pretrained.test_peft import adapt

peft = pytest.importorskip("peft")


@pytest.fixture(params=["T5 1.0", "T5 1.1, FLAN-T5", "umT5"])
def base(tmp_path, monkeypatch, request):
    """The folder of a model with a tokenizer, named by a relative path, as PEFT names it."""
    monkeypatch.chdir(tmp_path)
    make_model(TINY | FAMILIES[request.param]).save_pretrained("base")
    transformers.ByT5Tokenizer(extra_ids=125).save_pretrained("base")
    return tmp_path / "base"


@pytest.mark.parametrize(
    ("targets", "options"),
    [
        (["q", "v"], {}),
        (["k", "o", "wi", "wi_0", "wo", "encoder.block.1.layer.0.SelfAttention.q"], {"use_rslora": True}),
        ("all-linear", {}),
    ],
)
def test_what_peft_saves_is_read(base, targets, options):
    model = load(base).model
    lora = peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets, task_type="SEQ_2_SEQ_LM", **options)
    adapted = peft.get_peft_model(transformers.AutoModelForSeq2SeqLM.from_pretrained("base"), lora)
    adapted.base_model.model.config = load_reference(base, model).config
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, 0.0, 0.1)
    adapted.save_pretrained("adapters")
    convert_checkpoint(base.parent / "adapters", base.parent / "run")
    for place in ("adapters", "run"):
        compare_logits(adapted.base_model.model.eval(), model, load(place).variables)


@pytest.mark.parametrize("targets", [LoRA().targets, ".*", "decoder/layers_1/.*"])
def test_peft_reads_what_is_exported(base, tmp_path, targets):
    convert_checkpoint(base, tmp_path / "run")
    adapt(tmp_path / "run", tmp_path / "lora", LoRA(3, 7.0, targets))
    export_run(tmp_path / "lora", tmp_path / "adapters", to="peft")
    model, variables, _ = load(tmp_path / "lora")
    adapted = peft.PeftModel.from_pretrained(load_reference(base, model), tmp_path / "adapters")
    compare_logits(adapted.base_model.model.eval(), model, variables)
