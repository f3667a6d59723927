"""Writes the model card of an exported run, which is its page on the Hugging Face hub.

All facts on the page come from the run, from the card of the published model from which the run
started, or from the user. A fact that is not known is left out. The page contains no paths of the
machine on which the run was trained.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from synthesizer_jax.evaluation.scoring import RESULTS_FILE, evaluation_folder
from synthesizer_jax.models import Encoder
from synthesizer_jax.pretrained.card_facts import OURS, PEFT, TRANSFORMERS, Details, Facts
from synthesizer_jax.pretrained.card_page import sections
from synthesizer_jax.pretrained.huggingface.card import write_card
from synthesizer_jax.pretrained.huggingface.config import CONFIG, read_json
from synthesizer_jax.pretrained.huggingface.tokenizer import TOKENIZER, TOKENIZER_CONFIG
from synthesizer_jax.tasks import hub_names, task_registry
from synthesizer_jax.training.source import Source


def write_model_card(folder: pathlib.Path, run: pathlib.Path, facts: Facts) -> None:
    """Writes the model card of a run into the folder of its export.

    Args:
      folder: the folder, whose other files are complete.
      run: the directory of the run. The card contains the results of its evaluation of the step.
      facts: all facts that are not in the files of `folder` and `run`.
    """
    results = evaluation_folder(run, facts.step) / RESULTS_FILE
    path = folder / CONFIG
    config = read_json(path) if path.is_file() else {}
    facts = dataclasses.replace(
        facts,
        results=read_json(results) if results.is_file() else None,
        config=config,
        tokenizer=_tokenizer_class(folder, config),
    )
    write_card(folder, _fields(facts), "\n\n".join(sections(facts)))


def _tokenizer_class(folder: pathlib.Path, config: Mapping[str, Any]) -> str:
    """Returns the class of transformers that loads the tokenizer of a folder.

    In version 5 of transformers, `AutoTokenizer` does not load the SentencePiece models and the
    bytes of a umT5. It loads all other tokenizers.

    Args:
      folder: the folder.
      config: the content of the folder's ``config.json``, which may be empty.
    """
    if config.get("model_type") != "umt5" or (folder / TOKENIZER).is_file():
        return "AutoTokenizer"
    return str(read_json(folder / TOKENIZER_CONFIG)["tokenizer_class"])


def _fields(facts: Facts) -> dict[str, Any]:
    """Returns the fields of the card, by the hub's names. Unknown fields are `None` or empty."""
    source, details, tasks = facts.source, facts.details, facts.tasks
    base = facts.base
    languages = details.languages or source.languages
    if not languages:
        languages = tuple(dict.fromkeys(code for t in tasks for code in hub_names.languages_of(t)))
    relation = None
    if base is not None and facts.step:
        relation = "adapter" if facts.library == PEFT else "finetune"
    index = _model_index(facts)
    metrics = dict.fromkeys(
        metric["type"]
        for result in (index[0]["results"] if index else [])
        for metric in result["metrics"]
        if any(metric["type"] == known.name for known in hub_names.METRICS.values())
    )
    data = dict.fromkeys(found.name for t in tasks if (found := hub_names.data_of(t)) is not None)
    return {
        "language": list(languages),
        **_license(source, details),
        "library_name": facts.library,
        "pipeline_tag": _pipeline(facts),
        "base_model": base,
        "base_model_relation": relation,
        "tags": _tags(facts),
        "datasets": list(data),
        "metrics": list(metrics),
        "model-index": index,
    }


def _license(source: Source, details: Details) -> dict[str, str | None]:
    """Returns the fields of the license. A license is never guessed."""
    if details.license is not None:
        return {"license": details.license}
    return {
        "license": source.license,
        "license_name": source.license_name,
        "license_link": source.license_link,
    }


def _pipeline(facts: Facts) -> str:
    """Returns the hub's name for what the model does, which decides how the hub sorts the model.

    A T5 generates its answers as text, even if it was trained on classification.
    """
    model = facts.experiment.model
    if isinstance(model, Encoder):
        return hub_names.TEXT_CLASSIFICATION if model.outputs else "fill-mask"
    kinds = {hub_names.kind_of_task(task) for task in facts.tasks}
    for kind in (hub_names.TRANSLATION, hub_names.SUMMARIZATION):
        if kinds == {kind}:
            return kind
    return hub_names.TEXT_GENERATION


def _tags(facts: Facts) -> list[str]:
    """Returns the tags of the card, with which the hub's users find models."""
    tags = [OURS, "jax"]
    if facts.library == TRANSFORMERS:
        tags.insert(0, str(facts.config["model_type"]))
    elif facts.library == PEFT:
        tags.insert(0, "lora")
    else:
        tags.append("stablehlo")
    return tags


def _model_index(facts: Facts) -> list[dict[str, Any]]:
    """Returns the scores of the evaluation in the form of the hub's ``model-index``."""
    results = []
    for result in facts.evaluated:
        metrics = []
        for name, value in result["metrics"].items():
            if value is None:  # the score is not a finite number
                continue
            known = hub_names.METRICS.get(name, hub_names.HubMetric(name, 1.0))
            metrics.append(
                {"type": known.name, "value": round(known.scale * value, 4), "name": name}
            )
        if not metrics:
            continue
        kind, data = hub_names.TEXT_GENERATION, None
        if result["task"] in task_registry.task_names():
            task = task_registry.find_task(result["task"])
            kind, data = hub_names.kind_of_task(task), hub_names.data_of(task)
        dataset = {"name": result["task"], "type": data.name if data else result["task"]}
        if data is not None and data.config is not None:
            dataset["config"] = data.config
        dataset["split"] = result["split"]
        results.append({"task": {"type": kind}, "dataset": dataset, "metrics": metrics})
    return [{"name": facts.title, "results": results}] if results else []
