"""Reads and writes the files that define a run: its experiment and its vocabulary."""

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
from synthesizer_jax.data.vocabularies import FileVocabulary
from synthesizer_jax.runs.saved import (
    EXPERIMENT_FILE,
    REMEDY,
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
"""Fields of `Training` that change how a run is observed, but not what it computes."""

MAY_CHANGE = ("steps", "log_every", "save_every", "keep_latest", "keep_best", *WATCHING)
"""Fields of `Training` that may differ when a run is continued."""

MOST_CHANGES = 10
"""The largest number of changed settings that an error message lists.

If a run has another kind of model, hundreds of settings may have changed.
"""


def save_experiment(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes ``experiment.json``, which suffices to rebuild the model."""
    text = json.dumps(to_json(experiment), indent=1)
    write_atomic(directory / EXPERIMENT_FILE, text + "\n")


def load_experiment(directory: pathlib.Path) -> Experiment:
    """Reads the experiment of a run, with the dtype of its model resolved; see `read_recorded`.

    Training records the resolved dtype. A run that was never trained, such as a converted
    checkpoint, may have recorded ``auto``, which is then resolved for the devices of this process.
    """
    return read_recorded(directory).resolved()


def read_recorded(directory: pathlib.Path) -> Experiment:
    """Reads the experiment of a run as it is recorded. The model's dtype may be ``auto``.

    Raises:
      FileNotFoundError: the directory does not contain a run.
      ValueError: the file is damaged, it was written by another version or with unknown classes, or
        the run needs user code that was not imported (`code.require_code`).
    """
    record = read_experiment(directory)
    with describing(directory / EXPERIMENT_FILE, REMEDY):
        experiment = from_json(record)
        if not isinstance(experiment, Experiment):
            raise ValueError(
                f"it contains {format_value(experiment)}, but it must contain an Experiment"
            )
        return experiment


def save_run(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes the experiment and copies of its vocabulary's files into the run directory."""
    vocabulary = experiment.vocabulary
    if isinstance(vocabulary, FileVocabulary):
        files = vocabulary.files()
        for name in vocabulary.saved_names:
            copy = directory / name
            if name not in files:
                # Remove a file of an earlier vocabulary, because it would be read too.
                copy.unlink(missing_ok=True)
            elif not copy.is_file() or copy.read_bytes() != files[name]:
                write_atomic(copy, files[name])
    save_experiment(_with_saved_path(experiment), directory)


def _with_saved_path(experiment: Experiment) -> Experiment:
    """Returns the experiment with the path of its vocabulary's copy in the run directory."""
    vocabulary = experiment.vocabulary
    if not isinstance(vocabulary, FileVocabulary):
        return experiment
    return replace(experiment, vocabulary=replace(vocabulary, path=vocabulary.saved_names[0]))


def with_vocabulary_path(experiment: Experiment, directory: pathlib.Path) -> Experiment:
    """Returns a run's experiment with the absolute path of the vocabulary in its run directory."""
    return replace(experiment, vocabulary=with_absolute_path(experiment.vocabulary, directory))


def start_from_run(directory: pathlib.Path) -> Experiment:
    """Returns the experiment of a run, changed so that it starts from the parameters of that run.

    See `read_recorded` for errors.
    """
    experiment = with_vocabulary_path(read_recorded(directory), directory)
    return experiment.starting_from(str(directory))


def find_vocabulary(experiment: Experiment, data_dir: pathlib.Path) -> Experiment:
    """Returns the experiment with its vocabulary, whose path is made absolute.

    If the experiment has no vocabulary, it must use a synthetic mixture. Preparing a synthetic
    mixture writes a vocabulary into `data_dir`.

    Raises:
      ValueError: there is no vocabulary.
    """
    vocabulary = experiment.vocabulary
    if vocabulary is not None:
        vocabulary.build()
    elif experiment.data.mixture in synthetic.MIXTURES:
        vocabulary = synthetic.vocabulary(data_dir)
    else:
        # If there is no mixture of this name, the next line raises an error about the mixture
        # itself.
        task_registry.member_names(experiment.data.mixture)
        raise ValueError(
            f"The mixture {experiment.data.mixture!r} has no vocabulary of its own. Give one in "
            "the recipe, such as vocabulary=SentencePiece('spiece.model') or vocabulary=Bytes()."
        )
    if isinstance(vocabulary, FileVocabulary):
        vocabulary = replace(vocabulary, path=str(vocabulary.file))
    return replace(experiment, vocabulary=vocabulary)


def has_begun(directory: pathlib.Path) -> bool:
    """Returns whether a directory holds a run with a checkpoint, which training would continue."""
    return (directory / EXPERIMENT_FILE).is_file() and bool(
        finished_steps(directory / "checkpoints")
    )


def find_dtype(experiment: Experiment, directory: pathlib.Path) -> Experiment:
    """Returns the experiment with the model dtype ``auto`` replaced.

    If the directory holds a run that continues, ``auto`` means the dtype with which the run began,
    even on another platform. Otherwise, ``auto`` means the default dtype of this process's devices.
    """
    if experiment.model.dtype != AUTO or not has_begun(directory):
        return experiment.resolved()
    dtype = load_experiment(directory).model.dtype
    return replace(experiment, model=replace(experiment.model, dtype=dtype))


def find_base(experiment: Experiment, directory: pathlib.Path | None = None) -> Experiment:
    """Returns the experiment with the path and checksum of the checkpoint that its adapters modify.

    An experiment without adapters is returned unchanged.

    Args:
      experiment: an experiment whose `init_from` is ``RUN`` or ``RUN/checkpoints/STEP``. ``RUN``
        means the newest checkpoint of the run.
      directory: the run directory of the adapters. If the directory holds a run that continues,
        ``RUN`` means the checkpoint with which this run began, even if the base has been trained
        further.

    Raises:
      ValueError: the checkpoint does not exist, or the adapters were trained with another
        checkpoint.
    """
    adapters = experiment.training.adapters
    if adapters is None or experiment.init_from is None:
        return experiment
    source = storage_path(experiment.init_from)
    base, step = source, None
    if is_run(source):
        base, step = find_checkpoint(source)
    steps = finished_steps(base / "checkpoints")

    checksum = adapters.base_checksum
    if step is None and directory is not None and has_begun(directory):
        began = load_experiment(directory)
        if began.training.adapters is not None and began.init_from is not None:
            step = find_step(storage_path(began.init_from))
            checksum = began.training.adapters.base_checksum
    if step is None:
        step = max(steps, default=None)
    if step not in steps:
        missing = source
        if step is not None and run_of(source) == source:
            missing = source / "checkpoints" / str(step)
        raise ValueError(
            f"The base of the adapters is {missing}, but this is not a checkpoint of a run. Put "
            "the base back, or set init_from to its new path. In a run that is trained already, "
            "change init_from in its experiment.json."
        )
    checkpoint = base / "checkpoints" / str(step)
    found = checksum_of(checkpoint)
    if checksum not in (None, found):
        raise ValueError(
            f"{checkpoint} is not the base with which the adapters were trained, because its "
            f"checksum is {found} instead of {checksum}. Put the right base there, or set "
            "init_from to its path."
        )
    adapters = replace(adapters, base_checksum=found)
    training = replace(experiment.training, adapters=adapters)
    return replace(experiment, init_from=str(absolute(checkpoint)), training=training)


def check_same_run(experiment: Experiment, directory: pathlib.Path) -> None:
    """Checks that an experiment can be saved, and that it can continue the run in a directory.

    If the run in the directory has no checkpoint yet, any experiment may replace it. You can
    therefore correct an experiment and start again in the same directory.

    Raises:
      ValueError: the experiment cannot be saved, or the directory holds another run.
    """
    # Converting the experiment to JSON raises an error if the experiment cannot be saved.
    given = _fixed_settings(_with_saved_path(experiment))
    steps = finished_steps(directory / "checkpoints")
    if not (directory / EXPERIMENT_FILE).is_file() or not steps:
        return
    contents = None
    # A damaged checkpoint is ignored here, because it is set aside when the run is restored.
    with contextlib.suppress(ValueError):
        contents = read_contents(directory / "checkpoints" / str(steps[-1]))
    if contents is not None and not contents.position:
        raise ValueError(
            f"{directory} contains only parameters, as convert and average write them, so there is "
            "no training to continue. Start from the parameters in a new directory: "
            f"synthesizer-jax train {directory} --workdir NEW"
        )
    vocabulary = experiment.vocabulary
    # The vocabulary of a synthetic mixture may not exist before the data is prepared.
    if isinstance(vocabulary, FileVocabulary) and vocabulary.file.is_file():
        name = vocabulary.saved_names[0]
        copy = replace(vocabulary, path=str(directory / name))
        if copy.file.is_file() and copy.files() != vocabulary.files():
            raise ValueError(
                f"{directory} holds another run: its {name} is not {vocabulary.path}. Use a new "
                "--workdir, or the old vocabulary to continue the run."
            )
    saved = _fixed_settings(load_experiment(directory))
    changes = [
        f"{path} was {saved.get(path)} and is now {given.get(path)}"
        for path in sorted(saved.keys() | given.keys())
        if saved.get(path) != given.get(path)
    ]
    if changes:
        shown = ", ".join(changes[:MOST_CHANGES])
        if len(changes) > MOST_CHANGES:
            shown += f", and {len(changes) - MOST_CHANGES} other settings have changed"
        settings = "setting" if len(changes) == 1 else "settings"
        raise ValueError(
            f"{directory} holds another run: {shown}. Use a new --workdir, or the old {settings} "
            "to continue the run."
        )


def _fixed_settings(experiment: Experiment) -> dict[str, object]:
    """Returns the settings that must stay the same when a run continues, as ``{path: value}``."""
    data = to_json(experiment)
    for name in MAY_CHANGE:
        del data["training"][name]
    fixed = {name: data[name] for name in ("model", "data", "training", "vocabulary")}
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): value
        for path, value in jax.tree.leaves_with_path(fixed, is_leaf=lambda x: x is None)
    }
