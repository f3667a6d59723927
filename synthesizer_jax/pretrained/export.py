"""Exports the model of a run to the file formats of other libraries."""

from __future__ import annotations

import pathlib

from synthesizer_jax.base.files import new_directory
from synthesizer_jax.base.messages import Phase, silent_phase
from synthesizer_jax.base.registry import replace
from synthesizer_jax.models import unroll, unroll_variables
from synthesizer_jax.models.adapters import Adapted
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.pretrained.card_facts import (
    NO_DETAILS,
    OURS,
    TRANSFORMERS,
    Details,
    Facts,
)
from synthesizer_jax.pretrained.huggingface.export import write_folder
from synthesizer_jax.pretrained.huggingface.peft_export import write_adapters
from synthesizer_jax.pretrained.model_card import write_model_card
from synthesizer_jax.pretrained.t5x import write_checkpoint
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.saved import find_checkpoint, open_vocabulary
from synthesizer_jax.serving.programs import Limits, write_directory
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.initial_parameters import read_base, restore_run, restore_trained
from synthesizer_jax.training.run_directory import load_experiment
from synthesizer_jax.training.source import read_source

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
    details: Details = NO_DETAILS,
    phase: Phase = silent_phase,
) -> None:
    """Writes the model of a run in a format of another library.

    The directory is created only when all of its files are complete.

    Folders of transformers and PEFT and directories of StableHLO programs contain a model card,
    ``README.md``, which is the page of the model on the Hugging Face hub; see `model_card`.

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
      details: facts for the model card that the run does not record.
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
    if details != NO_DETAILS and to in (T5X, SCANNED_T5X):
        raise ValueError(
            "--name, --license, --language and --base-model are for the model card, which a "
            "checkpoint of T5X does not have. Leave them out."
        )
    source, chosen = find_checkpoint(run)
    experiment = load_experiment(source)
    vocabulary = open_vocabulary(experiment.vocabulary, source, model=experiment.model)
    if to == PEFT:
        _export_adapters(experiment, source, directory, step=chosen, details=details, phase=phase)
        return
    with new_directory(directory) as staging:
        advance = phase(f"reading {run}", 1)
        step, saved = restore_run(source, step=chosen)
        advance(1)
        model: TokenModel = unroll(experiment.model)
        variables = unroll_variables(experiment.model, saved)
        if to == HUGGING_FACE:
            write_folder(staging, model, variables, vocabulary, dtype=dtype, phase=phase)
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
        if to in (HUGGING_FACE, STABLEHLO):
            library = TRANSFORMERS if to == HUGGING_FACE else OURS
            name = directory.resolve().name
            facts = Facts(experiment, step, read_source(source), details, name, library)
            write_model_card(staging, source, facts)


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
    details: Details,
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
        step, trained = restore_trained(source, experiment.trainable, step=step)
        published = read_source(source)
        facts = Facts(experiment, step, published, details, directory.resolve().name, PEFT)
        write_adapters(
            staging,
            adapted,
            unroll_variables(model, trained),
            lambda: unroll_variables(model, _read_float_base(experiment)),
            base=facts.base,
        )
        write_model_card(staging, source, facts)
        advance(1)


def _read_float_base(experiment: Experiment) -> Variables:
    """Returns the base of a run's adapters in float32, as PEFT uses it.

    The run itself may hold the base in 8 bits.
    """
    adapters = replace(experiment.training.adapters, base=None)
    training = replace(experiment.training, adapters=adapters)
    return read_base(replace(experiment, training=training), None)
