"""The files of a run's directory that say what the run is: its experiment and its vocabulary."""

from __future__ import annotations

import contextlib
import json
import pathlib

import jax

from synthesizer_jax.base.files import absolute, describing, storage_path, write_atomic
from synthesizer_jax.base.registry import format_value, from_json, replace, to_json
from synthesizer_jax.base.typing import AUTO
from synthesizer_jax.checkpoints.contents import checksum_of, read_contents
from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.runs.saved import (
    EXPERIMENT_FILE,
    REMEDY,
    VOCABULARY_FILE,
    find_checkpoint,
    find_step,
    is_run,
    read_experiment,
    run_of,
    with_absolute_path,
)
from synthesizer_jax.tasks import synthetic, task_registry
from synthesizer_jax.training.experiment import Experiment

WATCHING = ("writers", "profile")
"""Fields of `Training` that say who sees a run, not what it computes."""

MAY_CHANGE = ("steps", "log_every", "save_every", "keep_latest", "keep_best", *WATCHING)
"""Fields of `Training` that a continued run may change."""


def save_experiment(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes ``experiment.json``, which is enough to rebuild the model."""
    text = json.dumps(to_json(experiment), indent=1)
    write_atomic(directory / EXPERIMENT_FILE, text + "\n")


def load_experiment(directory: pathlib.Path) -> Experiment:
    """Reads the experiment of a run's directory, with a dtype that is resolved; see `read_recorded`.

    Training has recorded the dtype. That of a run that was never trained, such as a converted one, may be
    ``auto``, and is resolved for this process's devices.
    """
    return read_recorded(directory).resolved()


def read_recorded(directory: pathlib.Path) -> Experiment:
    """Reads the experiment of a run's directory as it is recorded; the dtype of its model may be ``auto``.

    Raises:
      FileNotFoundError: the directory holds no run.
      ValueError: the file is damaged, was written by another version or with unknown classes, or the run
        needs user code that was not imported (`code.require_code`).
    """
    record = read_experiment(directory)
    with describing(directory / EXPERIMENT_FILE, REMEDY):
        experiment = from_json(record)
        if not isinstance(experiment, Experiment):
            raise ValueError(f"it holds {format_value(experiment)}, expected an Experiment")
        return experiment


def save_run(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes the experiment and its vocabulary into the run's directory."""
    vocabulary = experiment.vocabulary
    if isinstance(vocabulary, SentencePiece):
        copy = directory / VOCABULARY_FILE
        given = storage_path(vocabulary.path)
        if not _has_same_contents(given, copy):
            write_atomic(copy, given.read_bytes())
    save_experiment(_with_path(experiment, VOCABULARY_FILE), directory)


def _with_path(experiment: Experiment, path: str) -> Experiment:
    """Returns the experiment with another path of its vocabulary, if that is a file."""
    vocabulary = experiment.vocabulary
    if not isinstance(vocabulary, SentencePiece):
        return experiment
    return replace(experiment, vocabulary=replace(vocabulary, path=path))


def with_vocabulary_path(experiment: Experiment, directory: pathlib.Path) -> Experiment:
    """Returns the experiment of a run with the absolute path of the vocabulary in the run's directory."""
    return replace(experiment, vocabulary=with_absolute_path(experiment.vocabulary, directory))


def start_from_run(directory: pathlib.Path) -> Experiment:
    """Returns the experiment of a run, starting from the parameters of that run; see `read_recorded`."""
    experiment = with_vocabulary_path(read_recorded(directory), directory)
    return experiment.starting_from(str(directory))


def find_vocabulary(experiment: Experiment, data_dir: pathlib.Path) -> Experiment:
    """Returns the experiment with the absolute path of its vocabulary.

    The synthetic mixtures bring their own vocabulary, which lies in `data_dir` when they are prepared.

    Raises:
      ValueError: there is no vocabulary.
    """
    vocabulary = experiment.vocabulary
    if vocabulary is not None:
        vocabulary.build()
    elif experiment.data.mixture in synthetic.MIXTURES:
        vocabulary = synthetic.vocabulary(data_dir)
    else:
        task_registry.member_names(experiment.data.mixture)  # there is no such mixture
        raise ValueError(
            f"the mixture {experiment.data.mixture!r} has no vocabulary of its own; give one, such "
            "as vocabulary=SentencePiece('spiece.model') or Bytes() in the recipe"
        )
    path = storage_path(getattr(vocabulary, "path", "")).expanduser()
    return _with_path(replace(experiment, vocabulary=vocabulary), str(absolute(path)))


def has_begun(directory: pathlib.Path) -> bool:
    """Whether a directory holds a run that has saved a checkpoint, so that training continues it."""
    return (directory / EXPERIMENT_FILE).is_file() and bool(finished_steps(directory / "checkpoints"))


def find_dtype(experiment: Experiment, directory: pathlib.Path) -> Experiment:
    """Returns the experiment with the dtype of its model resolved: ``auto`` keeps that of a run.

    If the directory holds a run that continues, ``auto`` is the dtype with which the run began, also on
    another platform. Otherwise it is that of this process's devices.
    """
    if experiment.model.dtype != AUTO or not has_begun(directory):
        return experiment.resolved()
    dtype = load_experiment(directory).model.dtype
    return replace(experiment, model=replace(experiment.model, dtype=dtype))


def find_base(experiment: Experiment, directory: pathlib.Path | None = None) -> Experiment:
    """Returns the experiment with the path and the checksum of the checkpoint to which its adapters belong.

    Args:
      experiment: with `init_from`, ``RUN`` or ``RUN/checkpoints/STEP``; of ``RUN`` the newest checkpoint.
      directory: the run's own directory. If a run in it continues, ``RUN`` stands for the checkpoint with
        which it began, even if the base has been trained further.

    Raises:
      ValueError: it is not there, or is another than the one with which they were trained.
    """
    lora = experiment.training.adapters
    if lora is None or experiment.init_from is None:
        return experiment
    source = storage_path(experiment.init_from)
    base, step = find_checkpoint(source) if is_run(source) else (source, None)
    steps = finished_steps(base / "checkpoints")
    checksum = lora.base_checksum
    if step is None and directory is not None and has_begun(directory):
        began = load_experiment(directory)
        if began.training.adapters is not None and began.init_from is not None:
            step = find_step(storage_path(began.init_from))
            checksum = began.training.adapters.base_checksum
    step = max(steps, default=None) if step is None else step
    if step not in steps:
        missing = source if step is None or run_of(source) != source else source / "checkpoints" / str(step)
        raise ValueError(
            f"{missing}, the base of the adapters, is no checkpoint of a run; put it back, or name its new "
            "place as init_from (of a trained run: in its experiment.json)"
        )
    checkpoint = base / "checkpoints" / str(step)
    found = checksum_of(checkpoint)
    if checksum not in (None, found):
        raise ValueError(
            f"{checkpoint} is not the base with which the adapters were trained (its checksum is {found}, "
            f"not {checksum}); put that one there, or name its place as init_from"
        )
    training = replace(experiment.training, adapters=replace(lora, base_checksum=found))
    return replace(experiment, init_from=str(absolute(checkpoint)), training=training)


def _has_same_contents(path: pathlib.Path, other: pathlib.Path) -> bool:
    return other.is_file() and path.read_bytes() == other.read_bytes()


def check_same_run(experiment: Experiment, directory: pathlib.Path) -> None:
    """Raises a `ValueError` if an experiment cannot be saved, or cannot continue the run of a directory.

    A run that has saved no checkpoint may be replaced: a corrected experiment may start in its directory.
    """
    given = _fixed_settings(_with_path(experiment, VOCABULARY_FILE))  # also tells what cannot be saved
    steps = finished_steps(directory / "checkpoints")
    if not (directory / EXPERIMENT_FILE).is_file() or not steps:
        return
    contents = None
    with contextlib.suppress(ValueError):  # a damaged one is set aside when it is restored
        contents = read_contents(directory / "checkpoints" / str(steps[-1]))
    if contents is not None and not contents.position:
        raise ValueError(
            f"{directory} holds parameters alone, as convert and average write them, no run to continue; "
            f"start from them in a new directory: synthesizer-jax train {directory} --workdir NEW"
        )
    vocabulary = experiment.vocabulary
    if isinstance(vocabulary, SentencePiece):
        source, copy = storage_path(vocabulary.path), directory / VOCABULARY_FILE
        # That of the synthetic mixtures may still have to be made.
        if copy.is_file() and source.is_file() and not _has_same_contents(source, copy):
            raise ValueError(
                f"{directory} holds another run: its {VOCABULARY_FILE} is not {vocabulary.path}; use a new "
                "--workdir, or the old vocabulary to continue"
            )
    saved = _fixed_settings(load_experiment(directory))
    for path in sorted(saved.keys() | given.keys()):
        if saved.get(path) != given.get(path):
            raise ValueError(
                f"{directory} holds another run: {path} was {saved.get(path)} and is {given.get(path)}; "
                "use a new --workdir, or the old setting to continue"
            )


def _fixed_settings(experiment: Experiment) -> dict[str, object]:
    """Returns what must stay the same for a run to continue, ``{path: value}``."""
    data = to_json(experiment)
    for name in MAY_CHANGE:
        del data["training"][name]
    fixed = {name: data[name] for name in ("model", "data", "training", "vocabulary")}
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): value
        for path, value in jax.tree.leaves_with_path(fixed, is_leaf=lambda x: x is None)
    }
