"""Opens the model and the variables of a run of this package."""

from __future__ import annotations

import pathlib

from jax.sharding import Mesh

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.checkpoints.placement import layout_over
from synthesizer_jax.models import unroll, unroll_variables
from synthesizer_jax.primitives.parameters import Variables
from synthesizer_jax.runs.saved import SavedModel, find_checkpoint, has_adapters, load_model


def open_run(source: pathlib.Path, mesh: Mesh | None = None) -> tuple[SavedModel, Variables]:
    """Returns the model and vocabulary of a run, and the variables of a checkpoint.

    The layers of the returned model are looped.

    Args:
      source: ``RUN``, which means the newest checkpoint, or ``RUN/checkpoints/STEP``.
      mesh: the mesh over which the variables are sharded. `None` uses one device.
    """
    directory, step = find_checkpoint(source)
    saved = load_model(directory)
    model = saved.model
    layout = None if mesh is None else layout_over(model, model.example(1, 1), mesh)
    # Only if the run has adapters, import the modules for training, which add the adapters to the
    # base model.
    if has_adapters(directory):
        from synthesizer_jax.training.initial_parameters import restore_run

        _, variables = restore_run(directory, step=step, layout=layout)
    else:
        _, variables = restore_variables(directory / "checkpoints", step=step, layout=layout)
    return saved._replace(model=unroll(model)), unroll_variables(model, variables)
