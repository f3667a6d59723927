"""Loads the model and vocabulary of a run, without the settings of its training."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

from synthesizer_jax.base.files import absolute, describing, join
from synthesizer_jax.base.registry import format_value, from_json, replace
from synthesizer_jax.data.tokenizer_json import AnyVocabulary
from synthesizer_jax.data.vocabularies import FileVocabulary, Vocabulary
from synthesizer_jax.models.token_model import TokenModel, resolve_dtype
from synthesizer_jax.runs import code

EXPERIMENT_FILE = "experiment.json"
REMEDY = "Put a good copy in its place."


class SavedModel(NamedTuple):
    """The model and vocabulary of a run.

    Attributes:
      model: the unbound model.
      vocabulary: the vocabulary, with the absolute path of its file.
    """

    model: TokenModel
    vocabulary: AnyVocabulary


def load_model(directory: pathlib.Path) -> SavedModel:
    """Reads the model and vocabulary of a run directory; see `read_experiment` for errors.

    If the recorded model dtype is ``auto``, it is replaced by the default dtype of this process's
    devices.
    """
    record = read_experiment(directory)
    with describing(directory / EXPERIMENT_FILE, REMEDY):
        # Build only the objects in the fields `model` and `vocabulary`, so that the modules for
        # training are not imported.
        model = from_json(record["model"], "model")
        vocabulary = from_json(record["vocabulary"], "vocabulary")
        for value, kind in ((model, TokenModel), (vocabulary, Vocabulary)):
            if not isinstance(value, kind):
                raise ValueError(f"it contains {format_value(value)} instead of a {kind.__name__}")
    absolute_vocabulary = with_absolute_path(vocabulary, directory)
    assert absolute_vocabulary is not None
    return SavedModel(resolve_dtype(model), absolute_vocabulary)


_GIVE_RUN = (
    "Give the directory of a training run of this package, or RUN/checkpoints/STEP. If it is a "
    "published model, make a run from it with 'synthesizer-jax convert'."
)
"""Tells users in error messages what to give instead of a directory that is not a run."""


def read_experiment(directory: pathlib.Path, *, as_data: bool = False) -> Any:
    """Returns a run's experiment as JSON data.

    Args:
      directory: the run directory.
      as_data: whether the caller only reads the data and does not build objects from it. If
        `as_data` is true, users' code does not have to be imported.

    Raises:
      FileNotFoundError: the directory does not contain a run.
      ValueError: the file is damaged, or the run needs users' code that was not imported
        (`code.require_code`).
    """
    path = directory / EXPERIMENT_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{directory} contains no {EXPERIMENT_FILE}. {_GIVE_RUN}")
    if not as_data:
        code.require_code(directory)
    with describing(path, REMEDY):
        return json.loads(path.read_text(encoding="utf-8"))


def has_adapters(directory: pathlib.Path) -> bool:
    """Returns whether a run's checkpoints hold only adapters for a model in another checkpoint."""
    return bool(read_experiment(directory, as_data=True)["training"].get("adapters"))


def find_checkpoint(source: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Returns the run directory and the step of ``RUN`` or ``RUN/checkpoints/STEP``.

    If the path is ``RUN``, the step is None, which means the newest checkpoint.

    Raises:
      ValueError: the directory does not contain a run of this package.
    """
    directory = run_of(source)
    if not is_run(source):
        raise ValueError(
            f"{source} is not a run, because {directory} contains no {EXPERIMENT_FILE}. {_GIVE_RUN}"
        )
    return directory, find_step(source)


def is_run(source: pathlib.Path) -> bool:
    """Returns whether a path is a run (``RUN``) or a checkpoint (``RUN/checkpoints/STEP``)."""
    return (run_of(source) / EXPERIMENT_FILE).is_file()


def run_of(source: pathlib.Path) -> pathlib.Path:
    """Returns the run directory of ``RUN`` or ``RUN/checkpoints/STEP``. No path needs to exist."""
    if source.parent.name == "checkpoints" and source.name.isdecimal():
        return source.parent.parent
    return source


def find_step(source: pathlib.Path) -> int | None:
    """Returns the step in ``RUN/checkpoints/STEP``, or None for ``RUN``. No path needs to exist."""
    if run_of(source) == source:
        return None
    return int(source.name)


def with_absolute_path(
    vocabulary: AnyVocabulary | None, directory: pathlib.Path
) -> AnyVocabulary | None:
    """Returns a vocabulary with an absolute path. Relative paths start at `directory`.

    Vocabularies without a path are returned unchanged.
    """
    if not isinstance(vocabulary, FileVocabulary):
        return vocabulary
    return replace(vocabulary, path=str(absolute(join(directory, vocabulary.path))))


def open_vocabulary(
    vocabulary: AnyVocabulary | None, directory: pathlib.Path, *, model: TokenModel
) -> Vocabulary:
    """Builds the vocabulary of a run and checks that it fits the model.

    Args:
      vocabulary: the vocabulary in the run's experiment.
      directory: the directory that contains the vocabulary's file if the path of the file is
        relative.
      model: the model of the run.

    Raises:
      ValueError: the model's embedding has fewer rows than the vocabulary has ids, or the model's
        special ids (`ids`) do not fit the vocabulary.
    """
    config = with_absolute_path(vocabulary, directory)
    assert config is not None
    built = config.build()
    if built.vocab_size > model.vocab_size:
        raise ValueError(
            f"The vocabulary has {built.vocab_size} ids, but model.vocab_size is only "
            f"{model.vocab_size}. Set model.vocab_size to {built.vocab_size} or more."
        )
    built.check_ids(model.ids)
    return built
