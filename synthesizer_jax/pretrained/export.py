"""Exports the model of a run to the file formats of other libraries."""

from __future__ import annotations

import json
import pathlib

import jax

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import JSON, replace, to_json
from synthesizer_jax.evaluation.scoring import RESULTS_FILE, evaluation_folder
from synthesizer_jax.models import unroll, unroll_variables
from synthesizer_jax.models.adapters import Adapted
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.huggingface.config import read_json
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.huggingface.peft import write_adapters
from synthesizer_jax.pretrained.huggingface.t5gemma import is_t5gemma
from synthesizer_jax.pretrained.t5x import write_checkpoint
from synthesizer_jax.runs.saved import find_checkpoint, open_vocabulary
from synthesizer_jax.serving.programs import Limits, write_directory
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import restore_run, restore_trained
from synthesizer_jax.training.run_directory import load_experiment
from synthesizer_jax.version import __version__

FORMATS = HUGGING_FACE, PEFT, T5X, SCANNED_T5X, STABLEHLO = (
    "huggingface",
    "peft",
    "t5x",
    "t5x-scanned",
    "stablehlo",
)
"""The names of the formats that `export_run` can write."""


def export_run(
    run: pathlib.Path,
    directory: pathlib.Path,
    *,
    to: str = HUGGING_FACE,
    dtype: str = "float32",
    inputs_length: int | None = None,
    max_length: int | None = None,
    beams: int = 1,
    phase: Phase = silent_phase,
) -> None:
    """Writes the model of a run in a format of another library.

    The directory is created only when all of its files are complete.

    The lengths `inputs_length` and `max_length` are limits of StableHLO programs. By default, they
    are the run's ``inputs_length`` and ``targets_length``. If the model was trained on texts
    without inputs, `inputs_length` limits the beginning of a text, and `max_length` limits its
    continuation. If only one of the two lengths is given, the other length is the rest of the run's
    ``targets_length``. If neither length is given, both are half of ``targets_length``.

    Args:
      run: ``RUN`` or ``RUN/checkpoints/STEP``.
      directory: the new directory.
      to: a name of `FORMATS`. ``huggingface`` writes a folder of transformers. ``peft`` writes a
        folder of PEFT that contains only the run's adapters. ``t5x`` and ``t5x-scanned`` write a
        checkpoint of T5X with looped or scanned layers. ``stablehlo`` writes StableHLO programs;
        see `serving.programs`.
      dtype: the dtype of the tensors for transformers, ``float32`` or ``bfloat16``. Tensors for T5X
        are always float32.
      inputs_length: the largest number of input tokens of the StableHLO programs; see the
        description of the lengths above.
      max_length: the largest number of target tokens of the StableHLO programs; see the description
        of the lengths above.
      beams: the number of beams with which the StableHLO programs decode. With 1 beam, decoding is
        greedy.
      phase: a function that reports progress.

    Raises:
      ValueError: if the format does not exist, does not support the model, or does not support a
        given option.
    """
    if to not in FORMATS:
        raise ValueError(f"--to is {to!r}, but it must be one of {', '.join(FORMATS)}.")
    if to != STABLEHLO and (inputs_length or max_length or beams > 1):
        raise ValueError(
            f"--inputs-length, --max-length and --beams are only for --to {STABLEHLO}. Leave them "
            "out."
        )
    if to != HUGGING_FACE and dtype != "float32":
        raise ValueError(f"--dtype is only for --to {HUGGING_FACE}. Leave it out.")
    source, chosen = find_checkpoint(run)
    experiment = load_experiment(source)
    vocabulary = open_vocabulary(experiment.vocabulary, source, model=experiment.model)
    if to == PEFT:
        _export_adapters(experiment, source, directory, step=chosen, phase=phase)
        return
    with new_directory(directory) as staging:
        advance = phase(f"reading {run}", 1)
        step, saved = restore_run(source, step=chosen)
        advance(1)
        model: TokenModel = unroll(experiment.model)
        variables = unroll_variables(experiment.model, saved)
        if to == HUGGING_FACE:
            results = evaluation_folder(source, step) / RESULTS_FILE
            metrics = read_json(results) if results.is_file() else None
            card = model_card(experiment, step, metrics)
            write_folder(staging, model, variables, vocabulary, dtype=dtype, card=card, phase=phase)
        elif to == STABLEHLO:
            limits = _limits(experiment, inputs_length, max_length, beams)
            continues = not experiment.data.inputs_length
            write_directory(
                staging,
                model,
                variables,
                vocabulary,
                limits=limits,
                continues=continues,
                phase=phase,
            )
        else:
            scanned = to == SCANNED_T5X
            write_checkpoint(staging, model, variables, step=step, scanned=scanned, phase=phase)


def _limits(
    experiment: Experiment, inputs_length: int | None, max_length: int | None, beams: int
) -> Limits:
    """Returns the limits of a run's StableHLO programs; see `export_run` for the arguments."""
    data = experiment.data
    if data.inputs_length:
        return Limits(inputs_length or data.inputs_length, max_length or data.targets_length, beams)
    # The model was trained on texts without inputs, so the beginning of a text and its continuation
    # share the positions of a training row.
    row = data.targets_length
    max_length = max_length or max(1, row - (inputs_length or row // 2))
    return Limits(inputs_length or max(1, row - max_length), max_length, beams)


def _export_adapters(
    experiment: Experiment,
    source: pathlib.Path,
    directory: pathlib.Path,
    *,
    step: int | None,
    phase: Phase,
) -> None:
    """Writes the run's adapters as a folder of PEFT; see `write_adapters`."""
    model = experiment.model
    adapted = replace(experiment, model=unroll(model)).trainable
    if not isinstance(adapted, Adapted):
        raise ValueError(
            f"{source} has no training.adapters, so there is nothing to export for PEFT. Export "
            f"the model with --to {HUGGING_FACE}."
        )
    with new_directory(directory) as staging:
        advance = phase(f"exporting the adapters of {source}", 1)
        _, trained = restore_trained(source, experiment.trainable, step=step)
        write_adapters(staging, adapted, unroll_variables(model, trained))
        advance(1)


def model_card(experiment: Experiment, step: int, metrics: JSON) -> str:
    """Returns the text of a model card.

    The card contains the recipe, a description of the data, the results if `metrics` are given, and
    the versions of the libraries.
    """
    kind = "A T5Gemma" if is_t5gemma(experiment.model) else "A T5"
    sections = [
        "---\nlibrary_name: transformers\ntags: [t5, synthesizer_jax]\n---",
        f"# {kind} after {step:,} steps of training" if step else f"# {kind}, converted",
        f"Written by synthesizer_jax {__version__} with jax {jax.__version__}.",
    ]
    if step:
        data = experiment.data
        sections.append(
            f"Trained on the mixture {_fenced(data.mixture)}, with {data.batch_size} examples of "
            f"up to {data.inputs_length} and {data.targets_length} tokens a step."
        )
    if metrics:
        sections += ["## Results", _fenced(metrics)]
    if step:
        recipe = _fenced(to_json(replace(experiment, init_from=None)))
        sections += ["<details><summary>Recipe</summary>", recipe, "</details>"]
    return "\n\n".join(sections) + "\n"


def _fenced(data: JSON) -> str:
    """Returns JSON as Markdown code.

    Backticks in the JSON are escaped, because a backtick could end the code block.
    """
    text = json.dumps(data, indent=1).replace("`", "\\u0060")
    return f"```json\n{text}\n```" if "\n" in text else f"`{text}`"
