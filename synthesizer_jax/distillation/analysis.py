"""The static part of the attention of a run's model, on the data of the run."""

from __future__ import annotations

import pathlib

import jax
from jax.sharding import Mesh

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.distillation.static_attention import (
    StaticAttention,
    measure_static_attention,
)
from synthesizer_jax.messages import Phase, silent_phase
from synthesizer_jax.models import EncoderDecoder, unroll, unroll_variables
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import batch_sharding, use_mesh
from synthesizer_jax.tasks import imported, task_registry
from synthesizer_jax.tasks.streams import open_stream
from synthesizer_jax.training.initial_parameters import find_checkpoint
from synthesizer_jax.training.run_data import prepare_data
from synthesizer_jax.training.run_directory import (
    load_experiment,
    open_vocabulary,
    with_vocabulary_path,
)
from synthesizer_jax.training.step import Batch


def analyze_run(
    run: pathlib.Path,
    *,
    data_dir: pathlib.Path | None,
    examples: tuple[int, int],
    batch_size: int,
    tolerance: float,
    phase: Phase = silent_phase,
) -> StaticAttention:
    """Measures the static attention of a run's model, see `measure_static_attention`.

    Args:
      run: ``RUN`` or ``RUN/checkpoints/STEP``.
      data_dir: directory of the data sets.
      examples: how many examples of the training data forms are fitted to, and how many of the
        evaluation's split they are measured on; rounded up to whole batches.
      batch_size: number of examples of a batch.
      tolerance: the share by which the loss may rise.
      phase: is told what is done.

    Raises:
      FileNotFoundError: there is no checkpoint or no data.
      ValueError: there is no run, or its model is not an encoder-decoder with attention.
    """
    directory, step = find_checkpoint(run)
    experiment = load_experiment(directory)
    model = experiment.model
    if not isinstance(model, EncoderDecoder):
        raise ValueError(
            f"{run} contains a {type(model).__name__}; give the run of an EncoderDecoder"
        )
    places = task_registry.default_data_dir() if data_dir is None else data_dir
    imported.add_imported(places)
    vocabulary = open_vocabulary(experiment, directory)
    mesh, layout = place_variables(model, experiment.example, experiment.mesh)
    _, variables = restore_variables(directory / "checkpoints", step=step, layout=layout)
    data = replace(experiment.data, pack=False, batch_size=batch_size, shards=1)
    splits = (data.split, experiment.evaluation.split)
    experiment = with_vocabulary_path(experiment, directory)
    prepare_data(experiment, vocabulary, places, training_splits=splits, evaluation_splits=())
    phase(f"reading examples of {data.mixture}", 1)
    fit_to, held_out = (
        _read(replace(data, split=split), count, mesh, vocabulary=vocabulary, data_dir=places)
        for split, count in zip(splits, examples, strict=True)
    )
    with use_mesh(mesh):
        return measure_static_attention(
            unroll(model),
            unroll_variables(model, variables),
            fit_to=fit_to,
            held_out=held_out,
            tolerance=tolerance,
            phase=phase,
        )


def _read(
    data: DataConfig,
    examples: int,
    mesh: Mesh,
    *,
    vocabulary: Vocabulary,
    data_dir: pathlib.Path,
) -> list[Batch]:
    """Returns so many examples of a split in batches over a mesh."""
    stream = open_stream(replace(data, buckets=()), vocabulary, data_dir=data_dir)
    count = -(-examples // data.batch_size)
    return [jax.device_put(next(stream), batch_sharding(mesh)) for _ in range(count)]
