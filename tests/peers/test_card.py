"""Tests that the library of the hub understands our model cards, and that their code runs."""

import re

import numpy as np
import pytest
from huggingface_hub import EvalResult, ModelCard

from synthesizer_jax.evaluation.scoring import TaskResult, evaluation_folder, write_results
from synthesizer_jax.models import LoRA
from synthesizer_jax.pretrained.card_facts import Details
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.training.source import Source
from tests.pretrained.test_card import convert, fine_tune


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_the_hub_reads_every_field_and_the_code_runs(tmp_path, monkeypatch, capsys, library):
    monkeypatch.chdir(tmp_path)
    # The base and the result have the names of models on the hub, and lie at these relative paths.
    base = Source("google/tiny", "0fc9", True, "other", "my-license", "https://a.b/c", ("en",))
    run = convert(tmp_path, base)
    (tmp_path / "google").mkdir()
    export_run(run, tmp_path / "google" / "tiny")
    adapters = LoRA(2) if library == "peft" else None
    fine_tune(run, tmp_path / "lora", adapters=adapters)
    result = TaskResult("glue_cola_v002", "validation", 1, 1, {"accuracy": 50.0}, (), np.zeros(1))
    write_results(evaluation_folder(tmp_path / "lora", 1000), 1000, [result], overall={})
    to = "peft" if adapters else "huggingface"
    export_run(tmp_path / "lora", tmp_path / "me" / "cola", to=to, details=Details("me/cola"))

    card = ModelCard.load(tmp_path / "me" / "cola" / "README.md")
    data = card.data.to_dict()
    assert data.pop("model-index")
    assert data == {
        "language": ["en"],
        "license": "other",
        "license_name": "my-license",
        "license_link": "https://a.b/c",
        "library_name": library,
        "pipeline_tag": "text-generation",
        "base_model": "google/tiny",
        "base_model_relation": "adapter" if adapters else "finetune",
        "tags": ["lora" if adapters else "t5", "synthesizer_jax", "jax"],
        "datasets": ["nyu-mll/glue"],
        "metrics": ["accuracy"],
    }
    assert card.data.model_name == "cola"
    assert card.data.eval_results == [
        EvalResult(
            task_type="text-classification",
            dataset_type="nyu-mll/glue",
            dataset_name="glue_cola_v002",
            dataset_config="cola",
            dataset_split="validation",
            metric_type="accuracy",
            metric_name="accuracy",
            metric_value=0.5,
        )
    ]

    blocks = re.findall(r"```python\n(.*?)```", card.text, flags=re.S)
    assert len(blocks) == 2
    printed = []
    for block in blocks:
        exec(block, {})
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
