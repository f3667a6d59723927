"""Export of a run's model to the files of another library."""

from __future__ import annotations

import json
import pathlib

import jax

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.registry import JSON, replace, to_json
from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.evaluation.scoring import RESULTS_FILE, evaluation_folder
from synthesizer_jax.models import unroll, unroll_variables
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.huggingface.config import read_json
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.huggingface.peft import write_adapters
from synthesizer_jax.pretrained.huggingface.t5gemma import is_t5gemma
from synthesizer_jax.pretrained.t5x import write_checkpoint
from synthesizer_jax.runs.saved import find_checkpoint, open_vocabulary
from synthesizer_jax.serving.programs import Limits, write_directory
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import restore_run
from synthesizer_jax.training.run_directory import load_experiment
from synthesizer_jax.version import __version__

FORMATS = HUGGING_FACE, PEFT, T5X, SCANNED_T5X, STABLEHLO = (
    "huggingface",
    "peft",
    "t5x",
    "t5x-scanned",
    "stablehlo",
)


def export_run(
    run: pathlib.Path,
    directory: pathlib.Path,
    *,
    to: str = HUGGING_FACE,
    dtype: str = "float32",
    inputs_length: int | None = None,
    max_length: int | None = None,
    beams: int = 1,
) -> None:
    """Writes the model of a run for another library; the directory appears when it is complete.

    Args:
      run: ``RUN`` or ``RUN/checkpoints/STEP``.
      directory: the new directory.
      to: a name of `FORMATS`: a folder of transformers, one of PEFT with the run's adapters alone, a
        checkpoint of T5X with looped or scanned layers, or StableHLO programs (`serving.programs`).
      dtype: ``float32`` or ``bfloat16``, of the tensors for transformers; T5X's are float32.
      inputs_length, max_length: largest lengths of the programs' inputs and targets; None: the run's. Those
        of a model of texts alone are of the beginning and of the rest of a text; None: what the other one
        leaves of the run's ``targets_length``, or half of it.
      beams: number of beams of the programs' decoding loop; 1 is greedy decoding.
    """
    if to not in FORMATS:
        raise ValueError(f"--to is {to!r}; use {', '.join(FORMATS)}")
    if to != STABLEHLO and (inputs_length or max_length or beams > 1):
        raise ValueError(f"--inputs-length, --max-length and --beams are for {STABLEHLO}; leave them out")
    if to != HUGGING_FACE and dtype != "float32":
        raise ValueError(f"--dtype is for {HUGGING_FACE}; leave it out")
    source, chosen = find_checkpoint(run)
    experiment = load_experiment(source)
    vocabulary = open_vocabulary(experiment.vocabulary, source, model=experiment.model)
    if to == PEFT:
        _export_adapters(experiment, source, directory, step=chosen)
        return
    with new_directory(directory) as staging:
        step, saved = restore_run(source, step=chosen)
        model: TokenModel = unroll(experiment.model)
        variables = unroll_variables(experiment.model, saved)
        if to == HUGGING_FACE:
            results = evaluation_folder(source, step) / RESULTS_FILE
            metrics = read_json(results) if results.is_file() else None
            card = model_card(experiment, step, metrics)
            write_folder(staging, model, variables, vocabulary, dtype=dtype, card=card)
        elif to == STABLEHLO:
            limits = _limits(experiment, inputs_length, max_length, beams)
            continues = not experiment.data.inputs_length
            write_directory(staging, model, variables, vocabulary, limits=limits, continues=continues)
        else:
            write_checkpoint(staging, model, variables, step=step, scanned=to == SCANNED_T5X)


def _limits(
    experiment: Experiment, inputs_length: int | None, max_length: int | None, beams: int
) -> Limits:
    """Returns the limits of a run's programs; for the arguments see `export_run`."""
    data = experiment.data
    if data.inputs_length:
        return Limits(inputs_length or data.inputs_length, max_length or data.targets_length, beams)
    row = data.targets_length
    max_length = max_length or max(1, row - (inputs_length or row // 2))
    return Limits(inputs_length or max(1, row - max_length), max_length, beams)


def _export_adapters(
    experiment: Experiment, source: pathlib.Path, directory: pathlib.Path, *, step: int | None
) -> None:
    """Writes a folder of PEFT; see `write_adapters`."""
    lora, model = experiment.training.adapters, experiment.model
    if lora is None:
        raise ValueError(f"{source} has no training.adapters; export it to {HUGGING_FACE}")
    with new_directory(directory) as staging:
        _, adapters = restore_variables(source / "checkpoints", step=step)
        write_adapters(staging, unroll(model), unroll_variables(model, adapters), lora)


def model_card(experiment: Experiment, step: int, metrics: JSON) -> str:
    """Returns the text of a model card: the recipe, its data, results (or None) and versions."""
    kind = "A T5Gemma" if is_t5gemma(experiment.model) else "A T5"
    sections = [
        "---\nlibrary_name: transformers\ntags: [t5, synthesizer_jax]\n---",
        f"# {kind} after {step:,} steps of training" if step else f"# {kind}, converted",
        f"Written by synthesizer_jax {__version__} with jax {jax.__version__}.",
    ]
    if step:
        data = experiment.data
        sections.append(
            f"Trained on the mixture {_fenced(data.mixture)}, with {data.batch_size} examples of up to "
            f"{data.inputs_length} and {data.targets_length} tokens a step."
        )
    if metrics:
        sections += ["## Results", _fenced(metrics)]
    if step:
        recipe = _fenced(to_json(replace(experiment, init_from=None)))
        sections += ["<details><summary>Recipe</summary>", recipe, "</details>"]
    return "\n\n".join(sections) + "\n"


def _fenced(data: JSON) -> str:
    """Returns JSON as code in Markdown; it contains no backtick that could end the code."""
    text = json.dumps(data, indent=1).replace("`", "\\u0060")
    return f"```json\n{text}\n```" if "\n" in text else f"`{text}`"
