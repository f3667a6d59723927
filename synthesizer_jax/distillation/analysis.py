"""The static part of the attention of a run's model, on the data of the run."""

from __future__ import annotations

import pathlib

import jax

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import place_variables
from synthesizer_jax.data import synthetic, tasks, translation  # noqa: F401 - its tasks
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.distillation.static_attention import (
    StaticAttention,
    measure_static_attention,
)
from synthesizer_jax.models import EncoderDecoder, unroll, unroll_variables
from synthesizer_jax.registry import replace
from synthesizer_jax.sharding import batch_sharding, use_mesh
from synthesizer_jax.training.run_directory import load_experiment, open_vocabulary


def analyze_run(
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None,
    fitted: int,
    held_out: int,
    step: int | None = None,
) -> StaticAttention:
    """Measures the static attention of a run's model, see `measure_static_attention`.

    Args:
      directory: the run's.
      data_dir: directory of the data sets.
      fitted: number of batches of the training data that forms are fitted to.
      held_out: number of the batches after these, on which they are measured.
      step: step of the checkpoint; None: the newest.

    Raises:
      FileNotFoundError: there is no run, checkpoint or data.
      ValueError: the model is not an encoder-decoder with attention.
    """
    experiment = load_experiment(directory)
    model = experiment.model
    if not isinstance(model, EncoderDecoder):
        raise ValueError(
            f"{directory} contains a {type(model).__name__}; only EncoderDecoder models can be analyzed"
        )
    places = tasks.default_data_dir() if data_dir is None else data_dir
    if experiment.data.mixture == synthetic.MIXTURE:
        synthetic.prepare(places)
    mesh, layout = place_variables(model, experiment.example, experiment.mesh)
    _, variables = restore_variables(directory / "checkpoints", step=step, layout=layout)
    data = replace(experiment.data, pack=False)
    tasks.register(
        data.mixture, open_vocabulary(experiment, directory), data_dir=places, split=data.split
    )
    stream = Stream(data)
    batches = [jax.device_put(next(stream), batch_sharding(mesh)) for _ in range(fitted + held_out)]
    with use_mesh(mesh):
        return measure_static_attention(
            unroll(model),
            unroll_variables(model, variables),
            fit_to=batches[:fitted],
            held_out=batches[fitted:],
        )
