"""Models, variables and vocabularies from directories, ready to use."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.prediction import Predictor
from synthesizer_jax.files import storage_path
from synthesizer_jax.models import EncoderDecoder, TextToText, unroll, unroll_variables
from synthesizer_jax.parameters import Variables, apply_method
from synthesizer_jax.pretrained import huggingface, t5x
from synthesizer_jax.pretrained.architecture import Pretrained
from synthesizer_jax.training.initial_parameters import find_checkpoint
from synthesizer_jax.training.run_directory import EXPERIMENT_FILE, load_experiment, open_vocabulary


class Loaded(NamedTuple):
    """A model that is ready to use.

    Attributes:
      model: the unbound model, with looped layers.
      variables: its variables.
      vocabulary: maps text to ids and back.
    """

    model: TextToText
    variables: Variables
    vocabulary: Vocabulary


def read_pretrained(source: pathlib.Path) -> Pretrained:
    """Reads a checkpoint of another library.

    Args:
      source: a folder of Hugging Face transformers, or a msgpack file of T5X.

    Raises:
      FileNotFoundError: there is nothing, or a file is missing.
      ValueError: it cannot be read.
    """
    if source.is_dir():
        return huggingface.read_folder(source)
    if not source.is_file():
        raise FileNotFoundError(f"there is no {source}; give a folder or a checkpoint file")
    return t5x.read_file(source)


def load(path: str | pathlib.Path) -> Loaded:
    """Loads a model with its variables and vocabulary; loads no TensorFlow.

    Args:
      path: the directory of a run, ``RUN/checkpoints/STEP``, or a folder of Hugging Face transformers
        with a T5 and its ``spiece.model``.

    Raises:
      FileNotFoundError: there is no model, or it has no vocabulary.
      ValueError: its files cannot be read.
    """
    source = storage_path(str(path)).expanduser()
    is_step = source.parent.name == "checkpoints" and source.name.isdecimal()
    if is_step or (source / EXPERIMENT_FILE).is_file():
        directory, step = find_checkpoint(source)
        experiment = load_experiment(directory)
        vocabulary = open_vocabulary(experiment, directory)
        _, variables = restore_variables(directory / "checkpoints", step=step)
        model = experiment.model
        return Loaded(unroll(model), unroll_variables(model, variables), vocabulary)
    pretrained = read_pretrained(source)
    if pretrained.vocabulary is None:
        raise FileNotFoundError(
            f"{source} has no vocabulary that is known here; put the model's spiece.model there, or name "
            "one with 'synthesizer-jax convert --vocabulary'"
        )
    return Loaded(pretrained.model, pretrained.variables, pretrained.vocabulary.build())


def generate(
    loaded: Loaded,
    texts: Sequence[str],
    *,
    max_length: int = 64,
    inputs_length: int = 512,
    method: str = "greedy",
) -> list[str]:
    """Generates one text for each input.

    Args:
      loaded: from `load`.
      texts: the inputs.
      max_length: maximum number of tokens to generate.
      inputs_length: inputs are truncated to this many tokens.
      method: ``greedy``, or ``beam`` (4 beams, T5's length penalty).
    """
    predictor = Predictor(
        *loaded,
        inputs_length=inputs_length,
        targets_length=max_length,
        batch_size=min(16, max(len(texts), 1)),
        method=method,
    )
    return predictor.predict([predictor.encode(text) for text in texts])


def encode(
    loaded: Loaded, texts: Sequence[str], *, inputs_length: int = 512, pool: bool = True
) -> np.ndarray | list[np.ndarray]:
    """Encodes texts with the encoder of an encoder-decoder.

    Args:
      loaded: from `load`.
      texts: the inputs.
      inputs_length: inputs are truncated to this many tokens.
      pool: True returns the mean over the tokens of each text, EOS included.

    Returns:
      ``[n, d_model]`` float32; with ``pool=False`` a list of ``[length, d_model]``.

    Raises:
      TypeError: the model has no encoder.
    """
    model, variables, vocabulary = loaded
    if not isinstance(model, EncoderDecoder):
        raise TypeError(f"encode: a {type(model).__name__} has no encoder; give an EncoderDecoder")
    rows = [[*vocabulary.encode(text)[: inputs_length - 1], vocabulary.eos_id] for text in texts]
    width = max(map(len, rows), default=1)
    tokens = np.zeros((len(rows), width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    hidden = np.asarray(apply_method(model.encode, variables, jnp.asarray(tokens)), np.float32)
    states = [hidden[i, : len(row)] for i, row in enumerate(rows)]
    return np.stack([state.mean(axis=0) for state in states]) if pool else states
