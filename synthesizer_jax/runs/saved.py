"""What a run's directory says of its model: enough to use it, without what it was trained by."""

from __future__ import annotations

import json
import pathlib
from typing import Any, NamedTuple

from synthesizer_jax.base.files import absolute, describing, join
from synthesizer_jax.base.registry import format_value, from_json, replace
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece, Vocabulary
from synthesizer_jax.models.token_model import TokenModel, resolve_dtype
from synthesizer_jax.runs import code

EXPERIMENT_FILE = "experiment.json"
VOCABULARY_FILE = "vocabulary.model"
REMEDY = "put a good copy in its place"


class SavedModel(NamedTuple):
    """A run's model, and its vocabulary with the absolute path of its file."""

    model: TokenModel
    vocabulary: Bytes | SentencePiece


def load_model(directory: pathlib.Path) -> SavedModel:
    """Reads the model and the vocabulary of a run's directory; see `read_experiment` for errors.

    The model's dtype is resolved for this process's devices, if no training has recorded it.
    """
    record = read_experiment(directory)
    with describing(directory / EXPERIMENT_FILE, REMEDY):
        model, vocabulary = (from_json(record[name], name) for name in SavedModel._fields)
        for value, kind in ((model, TokenModel), (vocabulary, Vocabulary)):
            if not isinstance(value, kind):
                raise ValueError(f"it holds {format_value(value)}, expected a {kind.__name__}")
    absolute_vocabulary = with_absolute_path(vocabulary, directory)
    assert absolute_vocabulary is not None
    return SavedModel(resolve_dtype(model), absolute_vocabulary)


def read_experiment(directory: pathlib.Path, *, as_data: bool = False) -> Any:
    """Returns the JSON data of a run's experiment, which need not be rebuilt if it is read `as_data`.

    Raises:
      FileNotFoundError: the directory holds no run.
      ValueError: the file is damaged, or the run needs user code that was not imported
        (`code.require_code`).
    """
    path = directory / EXPERIMENT_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{directory} holds no {EXPERIMENT_FILE}; give the directory of a training run of this package"
        )
    if not as_data:
        code.require_code(directory)
    with describing(path, REMEDY):
        return json.loads(path.read_text(encoding="utf-8"))


def has_adapters(directory: pathlib.Path) -> bool:
    """Whether the checkpoints of a run hold adapters, which belong to a base."""
    return bool(read_experiment(directory, as_data=True)["training"].get("adapters"))


def find_checkpoint(source: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """Returns the run's directory and the step (None: the newest) of ``RUN`` or ``RUN/checkpoints/STEP``.

    Raises:
      ValueError: there is no run of this package.
    """
    directory = run_of(source)
    if not is_run(source):
        raise ValueError(
            f"{source} is no run: {directory} holds no {EXPERIMENT_FILE}; give the directory of a training "
            "run of this package, or RUN/checkpoints/STEP; 'synthesizer-jax convert' makes one of another "
            "library's checkpoint"
        )
    return directory, find_step(source)


def is_run(source: pathlib.Path) -> bool:
    """Whether a path is ``RUN`` or ``RUN/checkpoints/STEP``."""
    return (run_of(source) / EXPERIMENT_FILE).is_file()


def run_of(source: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a run from ``RUN`` or ``RUN/checkpoints/STEP``, whether it exists or not."""
    of_step = source.parent.name == "checkpoints" and source.name.isdecimal()
    return source.parent.parent if of_step else source


def find_step(source: pathlib.Path) -> int | None:
    """Returns the step of ``RUN/checkpoints/STEP``, None of ``RUN``, whether it exists or not."""
    return None if run_of(source) == source else int(source.name)


def with_absolute_path(
    vocabulary: Bytes | SentencePiece | None, directory: pathlib.Path
) -> Bytes | SentencePiece | None:
    """Returns a vocabulary whose path, if it has one, is absolute; a relative one is in the directory."""
    if not isinstance(vocabulary, SentencePiece):
        return vocabulary
    return replace(vocabulary, path=str(absolute(join(directory, vocabulary.path))))


def open_vocabulary(
    vocabulary: Bytes | SentencePiece | None, directory: pathlib.Path, *, model: TokenModel
) -> Vocabulary:
    """Returns the vocabulary of a run.

    Args:
      vocabulary: that of its experiment.
      directory: the run's, to which a relative path belongs.
      model: the run's.

    Raises:
      ValueError: the model's embedding has fewer rows than the vocabulary has ids, or its `ids`
        are not those of the vocabulary.
    """
    config = with_absolute_path(vocabulary, directory)
    assert config is not None
    built = config.build()
    if built.vocab_size > model.vocab_size:
        raise ValueError(
            f"the vocabulary has {built.vocab_size} ids but model.vocab_size={model.vocab_size}; set "
            "model.vocab_size to at least that"
        )
    built.check_ids(model.ids)
    return built
