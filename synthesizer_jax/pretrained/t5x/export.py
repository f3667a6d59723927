"""Checkpoints of T5X, written from models here."""

from __future__ import annotations

import pathlib

import numpy as np
from flax import serialization, traverse_util

from synthesizer_jax.models import Encoder
from synthesizer_jax.models.token_model import TokenModel
from synthesizer_jax.parameters import Variables
from synthesizer_jax.pretrained.architecture import Architecture, with_output_of_t5
from synthesizer_jax.pretrained.t5x.checkpoint import CHECKPOINT, unsaid
from synthesizer_jax.pretrained.t5x.names import Names
from synthesizer_jax.pretrained.tensors import named_tensors

SCANNED = "{stack}"
"""What T5X calls the scanned layers of a stack: by the name of the stack."""


def write_checkpoint(
    directory: pathlib.Path,
    model: TokenModel,
    variables: Variables,
    *,
    step: int = 0,
    scanned: bool = False,
) -> None:
    """Writes the parameters as T5X's msgpack file, ``checkpoint``, without an optimizer's state.

    Args:
      directory: an empty directory; T5X expects the name ``checkpoint_STEP``.
      model: the model, with looped layers.
      variables: its variables.
      step: the step.
      scanned: stack the layers of each stack on axis 1, as T5X's scalable T5 does.

    Raises:
      ValueError: T5X has no such model; the message names what it lacks.
    """
    if isinstance(model, Encoder):
        raise ValueError("T5X has no encoder alone; export an EncoderDecoder")
    model, params = with_output_of_t5(model, variables["params"])
    architecture = Architecture.of(model)
    if differing := unsaid(architecture):
        raise ValueError(
            f"T5X's files do not say {' and '.join(differing)}, so they would be read as another model; "
            "export to huggingface"
        )
    names = Names(
        scanned=SCANNED if scanned else None,
        layer_bias="relpos_bias" if architecture.bias_per_layer else None,
    )
    arrays = named_tensors(params, names.find(model))
    target = traverse_util.unflatten_dict({n: np.ascontiguousarray(x) for n, x in arrays}, sep="/")
    state = {"step": np.asarray(step, np.int32), "param_states": {}}
    data = serialization.msgpack_serialize(
        {"version": 3, "optimizer": {"target": target, "state": state}}
    )
    (directory / CHECKPOINT).write_bytes(data)
