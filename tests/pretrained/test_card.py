"""Tests the model cards of exported folders: their fields, their scores and where facts come from.

tests/peers/test_card.py compares the cards with what the hub's own library reads.
"""

import dataclasses
import json
import re
import sys

import jax
import numpy as np
import pytest
import yaml

from synthesizer_jax.base.registry import replace
from synthesizer_jax.evaluation.scoring import TaskResult, evaluation_folder, write_results
from synthesizer_jax.models import LoRA
from synthesizer_jax.optimizers import AdamW
from synthesizer_jax.pretrained import card_page
from synthesizer_jax.pretrained.card_facts import Details
from synthesizer_jax.pretrained.convert import convert_checkpoint
from synthesizer_jax.pretrained.export import export_run
from synthesizer_jax.pretrained.huggingface.card import read_card, read_source_of
from synthesizer_jax.tasks import hub_names
from synthesizer_jax.tasks.definitions import DEFINITIONS
from synthesizer_jax.training.checkpoint_average import average_checkpoints
from synthesizer_jax.training.run_directory import find_base, load_experiment
from synthesizer_jax.training.source import Source, find_source, read_source, write_source
from synthesizer_jax.training.trainer import Trainer
from tests.cli.commands import call
from tests.pretrained.folders import FAMILIES, TINY, make_folder, make_tensors
from tests.training import tiny
from tests.training.tiny import save

COMMIT = "0fc9ddf78a1e988dac52e2dac162b0ede4fd74ab"
FLAN = Source("google/flan-t5-small", COMMIT, True, "apache-2.0", languages=("en", "de"))


def convert(place, source=None):
    """Returns a converted run, which comes from the published model `source` if it is given."""
    convert_checkpoint(make_folder(place / "folder", TINY, make_tensors(TINY)), place / "run")
    if source is not None:
        write_source(source, place / "run")
    return place / "run"


def fine_tune(start, directory, *, mixture="glue_cola_v002", step=1000, adapters=None):
    """Saves a run that was trained from another run, with the checkpoint of one step."""
    recipe = load_experiment(start).starting_from(str(start))
    data = replace(recipe.data, mixture=mixture)
    training = replace(recipe.training, adapters=adapters, optimizer=AdamW())
    recipe = find_base(replace(recipe, data=data, training=training))
    source = find_source(recipe, directory)
    state = Trainer(recipe, jax.devices()[:1]).init()
    save(directory, recipe, dataclasses.replace(state, step=np.int32(step)))
    write_source(source, directory)
    return directory


def evaluate(run, step, **metrics):
    """Writes the results of an evaluation of CoLA and of a user's task."""
    results = [
        TaskResult(task, "validation", 9, 8, scores, ("",) * 9, np.zeros(9))
        for task, scores in (("glue_cola_v002", metrics), ("films", {"stars": 3.5}))
    ]
    write_results(evaluation_folder(run, step), step, results, overall={"score": 1.0})


def test_a_fine_tuned_model_names_its_base_data_and_scores(tmp_path):
    run = fine_tune(convert(tmp_path, FLAN), tmp_path / "cola")
    evaluate(run, 1000, matthews_corrcoef=51.234567, accuracy=float("nan"))
    export_run(run, tmp_path / "cola-t5")
    fields, text = read_card(tmp_path / "cola-t5")
    index = fields.pop("model-index")
    assert fields == {
        "language": ["en", "de"],
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "google/flan-t5-small",
        "base_model_relation": "finetune",
        "tags": ["t5", "synthesizer_jax", "jax"],
        "datasets": ["nyu-mll/glue"],
        "metrics": ["matthews_correlation"],
    }
    cola, films = index[0]["results"]
    assert index[0]["name"] == "cola-t5"
    assert cola == {
        "task": {"type": "text-classification"},
        "dataset": {
            "name": "glue_cola_v002",
            "type": "nyu-mll/glue",
            "config": "cola",
            "split": "validation",
        },
        "metrics": [
            {"type": "matthews_correlation", "value": "0.5123", "name": "matthews_corrcoef"}
        ],
    }
    assert films["dataset"] == {"name": "films", "type": "films", "split": "validation"}
    assert films["metrics"] == [{"type": "stars", "value": "3.5", "name": "stars"}]
    assert "| `glue_cola_v002` | validation | 8 | matthews_corrcoef | 51.23 |" in text
    assert "1,000 steps" in text and "cola sentence: …" in text
    assert str(tmp_path) not in text + str(fields)


def test_facts_come_from_the_card_of_the_converted_folder(tmp_path):
    folder = make_folder(tmp_path / "folder", TINY, make_tensors(TINY))
    own = "---\nlicense: gemma\nlicense_link: LICENSE\nlanguage: [no, English]\n---\n# T5\n"
    (folder / "README.md").write_text(own)
    convert_checkpoint(folder, tmp_path / "run")
    assert read_source(tmp_path / "run") == Source(license="gemma", languages=("no",))
    export_run(tmp_path / "run", tmp_path / "out")
    fields, text = read_card(tmp_path / "out")
    assert (fields["license"], fields["language"]) == ("gemma", ["no"])
    assert not fields.keys() & {"base_model", "datasets", "metrics", "model-index", "license_link"}
    assert "converted and not trained" in text and "## Training" not in text
    # In YAML, `no` without quotes would be a boolean.
    header = (tmp_path / "out" / "README.md").read_text().split("---\n")[1]
    assert yaml.safe_load(header)["language"] == ["no"]


@pytest.mark.parametrize(
    ("origin", "model", "unchanged"),
    [
        (f"google/flan-t5-small@{COMMIT}", "google/flan-t5-small", True),
        (f"a/pipeline@{COMMIT}/text_encoder", "a/pipeline", True),
        (f"a/lora@{COMMIT}, adapters of google/flan-t5-small@{COMMIT}", "a/lora", False),
        (f"/home/lora, adapters of google/flan-t5-small@{COMMIT}", "google/flan-t5-small", False),
        ("/home/me/flan-t5-small", None, False),
    ],
)
def test_the_name_on_the_hub_is_read_from_the_origin(tmp_path, origin, model, unchanged):
    (tmp_path / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE\n---\n")
    link = model and f"https://huggingface.co/{model}/blob/main/LICENSE"
    commit = model and COMMIT
    expected = Source(model, commit, unchanged, "other", license_link=link)
    assert read_source_of(tmp_path, origin) == expected


@pytest.mark.parametrize("text", ["", "# No fields", "---\nlicense: [\n---\n", "---\n- a\n---\n"])
def test_a_card_without_fields_is_no_obstacle(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    assert read_source_of(tmp_path, "/home/me/t5") == Source()


def test_adapters_name_only_the_very_base_with_which_they_were_trained(tmp_path):
    start = convert(tmp_path, FLAN)
    fine_tune(start, tmp_path / "lora", adapters=LoRA(4))
    export_run(tmp_path / "lora", tmp_path / "adapters", to="peft")
    fields, text = read_card(tmp_path / "adapters")
    assert (fields["library_name"], fields["base_model_relation"]) == ("peft", "adapter")
    assert fields["base_model"] == "google/flan-t5-small"
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "google/flan-t5-small"
    assert "These are LoRA adapters for [google/flan-t5-small]" in text and "rank 4" in text

    # The base of these adapters is a fine-tuned model, which the hub does not have.
    fine_tune(start, tmp_path / "cola")
    fine_tune(tmp_path / "cola", tmp_path / "lora2", adapters=LoRA(4))
    shown = call("export", tmp_path / "lora2", tmp_path / "adapters2", "--to", "peft")
    assert "adapter_config.json names no base model" in shown.replace("\n", "")
    fields, text = read_card(tmp_path / "adapters2")
    assert "base_model" not in fields and fields["license"] == "apache-2.0"
    assert 'base = "BASE"' in text
    config = json.loads((tmp_path / "adapters2" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] is None


def test_the_source_goes_from_run_to_run(tmp_path):
    start = convert(tmp_path, FLAN)
    trained = fine_tune(start, tmp_path / "trained", step=3)
    later = dataclasses.replace(FLAN, unchanged=False)
    assert read_source(trained) == FLAN
    recipe = load_experiment(trained)
    assert find_source(recipe.starting_from(str(trained)), tmp_path / "new") == later
    assert find_source(recipe.starting_from(None), tmp_path / "new") == Source()
    # A run that continues does not need the run from which it started.
    assert find_source(replace(recipe, init_from="gone"), trained) == FLAN
    convert_checkpoint(trained, tmp_path / "converted")
    assert read_source(tmp_path / "converted") == later
    state = Trainer(recipe, jax.devices()[:1]).init()
    save(trained, recipe, dataclasses.replace(state, step=np.int32(4)))
    average_checkpoints(trained, tmp_path / "mean")
    assert read_source(tmp_path / "mean") == later


def test_options_take_precedence_and_a_missing_license_is_reported(tmp_path):
    run = fine_tune(convert(tmp_path), tmp_path / "run2", mixture="wmt16_enro_v003")
    shown = call("export", run, tmp_path / "plain")
    assert "plain/README.md names no license" in shown.replace("\n", "")
    fields, _ = read_card(tmp_path / "plain")
    assert (fields["language"], fields["pipeline_tag"]) == (["ro", "en"], "translation")
    assert "license" not in fields
    command = "export --license mit --base-model t5-small --name me/t5-enro --language"
    shown = call(command, "ro, en,de", run, tmp_path / "named")
    assert "license" not in shown
    fields, text = read_card(tmp_path / "named")
    assert (fields["license"], fields["language"]) == ("mit", ["ro", "en", "de"])
    assert fields["base_model"] == "google-t5/t5-small"
    assert text.startswith("\n# t5-enro\n") and 'name = "me/t5-enro"\n' in text


@pytest.mark.parametrize(
    ("details", "message"),
    [
        ({"license": "Apache 2.0"}, "--license is 'Apache 2.0', but .* such as apache-2.0"),
        ({"languages": ("English",)}, "--language contains 'English', .* such as en"),
        ({"base_model": "runs/t5/x"}, "--base-model is 'runs/t5/x', but it must be the OWNER/NAME"),
        ({"name": "t5"}, "--name is 't5', but it must be the OWNER/NAME"),
    ],
)
def test_wrong_details_are_refused(details, message):
    with pytest.raises(ValueError, match=message):
        Details(**details)


def test_details_are_refused_for_formats_without_a_card(tmp_path):
    with pytest.raises(ValueError, match=r"T5X does not have\. Leave them out"):
        export_run(tmp_path, tmp_path / "out", to="t5x", details=Details(license="mit"))


def test_a_card_that_exists_is_not_lost(tmp_path):
    run = convert(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("my own page")
    with pytest.raises(FileExistsError, match="out already exists"):
        export_run(run, out)
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "my own page"


def test_the_code_fits_the_model(tmp_path):
    """AutoTokenizer does not know umT5, and transformers' cache expects stacks of equal depth."""
    config = TINY | FAMILIES["umT5"] | {"num_layers": 1}
    folder = make_folder(tmp_path / "folder", config, make_tensors(config))
    convert_checkpoint(folder, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out")
    fields, text = read_card(tmp_path / "out")
    assert fields["tags"][0] == "umt5" and "This is a umT5, which was converted" in text
    assert "transformers.ByT5Tokenizer.from_pretrained(name)" in text
    assert "use_cache=False" in text


def test_the_code_for_an_exported_encoder_runs(tmp_path, monkeypatch, capsys):
    model = replace(tiny.encoder(), vocab_size=384)
    save(tmp_path / "run", tiny.experiment(model))
    export_run(tmp_path / "run", tmp_path / "out", to="stablehlo", inputs_length=8)
    fields, text = read_card(tmp_path / "out")
    assert fields["pipeline_tag"] == "text-classification"
    assert "package tokenizers if the folder contains tokenizer.json" in text
    monkeypatch.chdir(tmp_path / "out")
    monkeypatch.syspath_prepend(tmp_path / "out")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    exec(code.replace(card_page._EXAMPLE, "text"), {})
    del sys.modules["load"]
    assert capsys.readouterr().out.startswith("[[")


def test_the_names_of_tasks_on_the_hub():
    by_name = {task.name: task for task in DEFINITIONS}
    found = {
        name: (
            hub_names.data_of(by_name[name]),
            hub_names.languages_of(by_name[name]),
            hub_names.kind_of_task(by_name[name]),
            hub_names.input_form(by_name[name]),
        )
        for name in ("super_glue_axb_v102", "squad_v010_allanswers", "cnn_dailymail_v002")
    }
    assert found == {
        "super_glue_axb_v102": (
            ("aps/super_glue", "axb"),
            ("en",),
            "text-classification",
            "rte hypothesis: … premise: …",
        ),
        "squad_v010_allanswers": (("rajpurkar/squad", None), ("en",), "question-answering", None),
        "cnn_dailymail_v002": (
            ("abisee/cnn_dailymail", None),
            ("en",),
            "summarization",
            "summarize: …",
        ),
    }
    german = hub_names.input_form(by_name["wmt_t2t_ende_v003"])
    assert german == "translate English to German: …"
