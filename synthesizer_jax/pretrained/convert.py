"""Conversion of another library's checkpoint to a run's directory."""

from __future__ import annotations

import os
import pathlib
import shutil

import jax.numpy as jnp

from synthesizer_jax.checkpoints.manager import Checkpoints
from synthesizer_jax.data.pipeline import DataConfig
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.files import absolute, in_bucket
from synthesizer_jax.models import EncoderDecoder
from synthesizer_jax.optimizers import Adafactor, Constant
from synthesizer_jax.pretrained.loading import read_pretrained
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.run_directory import save_run
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.typing import PyTree


def convert_checkpoint(
    source: pathlib.Path,
    directory: pathlib.Path,
    *,
    vocabulary: Bytes | SentencePiece | None = None,
) -> PyTree:
    """Writes a run's directory with the parameters of another library's checkpoint, at step 0.

    The experiment is T5's fine-tuning on GLUE; `eval` and `generate` take the directory, and other runs
    take its parameters by ``init_from``. The directory appears when it is complete.

    Args:
      source: a folder of Hugging Face transformers, or a msgpack file of T5X.
      directory: the new directory.
      vocabulary: in the place of the checkpoint's; files of T5X have none.

    Returns:
      The parameters.

    Raises:
      FileExistsError: the directory exists and is not empty.
      FileNotFoundError: a file of the source is missing, or it has no vocabulary.
      ValueError: the source cannot be converted.
    """
    directory = absolute(directory)
    if in_bucket(directory):
        raise ValueError(
            f"{directory} is in a bucket; convert to a directory, and copy it with 'gcloud storage cp'"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise FileExistsError(f"{directory} exists; give a new directory")
    pretrained = read_pretrained(source)
    experiment = _experiment(pretrained.model, vocabulary or pretrained.vocabulary, source)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = directory.with_name(f".{directory.name}.{os.getpid()}")
    staging.mkdir()
    try:
        save_run(experiment, staging)
        params = pretrained.variables["params"]
        state = TrainState(jnp.zeros((), jnp.int32), params, constants={}, opt_state={})
        checkpoints = Checkpoints(staging / "checkpoints", asynchronous=False)
        checkpoints.save(state, None)
        checkpoints.close()
        staging.rename(directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return params


def _experiment(
    model: EncoderDecoder, vocabulary: Bytes | SentencePiece | None, source: pathlib.Path
) -> Experiment:
    """Returns the experiment of a converted run: T5's fine-tuning settings."""
    if vocabulary is None:
        raise FileNotFoundError(
            f"{source} has no vocabulary that is known here; name one with --vocabulary, such as T5's "
            "spiece.model, or 'bytes' for a ByT5"
        )
    size = vocabulary.build().vocab_size
    if size > model.vocab_size:
        raise ValueError(
            f"the vocabulary has {size} ids, but the embedding of {source} has {model.vocab_size} rows; "
            "name the model's own with --vocabulary"
        )
    return Experiment(
        model=model,
        vocabulary=vocabulary,
        data=DataConfig("glue_v002_proportional", 512, 84, batch_size=128),
        training=Training(steps=20_000, optimizer=Adafactor(Constant(1e-3))),
        evaluation=Evaluation(every=1000, method="greedy"),
    )
