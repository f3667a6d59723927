"""Ahead-of-time compilation of the training step for TPUs; libtpu compiles on any machine."""

from __future__ import annotations

import os
import re

import jax
from jax.experimental import topologies

from synthesizer_jax.costs.chips import Topology
from synthesizer_jax.training.experiment import Experiment
from synthesizer_jax.training.trainer import Trainer


class TooLargeError(ValueError):
    """A step does not fit into a device's memory, according to the compiler."""


def compile_step(experiment: Experiment, topology: Topology) -> jax.stages.Compiled:
    """Compiles the training step for a topology without its devices.

    Raises:
      TooLargeError: the step does not fit into memory.
      ValueError: libtpu is not installed, or does not support the topology or the mesh on it.
    """
    lowered = Trainer(experiment, devices=devices_of(topology)).trace().lower()
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(r"RESOURCE_EXHAUSTED: ([^\n]*)", str(error))
        # A kernel that exhausts on-chip memory, which is not HBM, is another kind of error.
        if refused is None or "hbm" not in refused[1].lower():
            raise
        raise TooLargeError(f"the compiler rejects the step: {refused[1]}") from error


def devices_of(topology: Topology) -> list[jax.Device]:
    """Returns the devices of a topology, for compilation only.

    Raises:
      ValueError: libtpu is not installed or does not support the topology.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server without a TPU
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    options: dict[str, int | str] = {}
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    if topology.chip.config is not None:
        options["chip_config_name"] = topology.chip.config
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology.name, **options)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{topology.name} cannot be compiled for ({' '.join(str(error).split())[:200]}); "
            "pip install 'jax[tpu]', and choose a topology that exists"
        ) from error
    return list(found.devices)
