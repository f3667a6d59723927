"""From an experiment to a finished run in a directory: data, loop, evaluation."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from synthesizer_jax.data import embedded, tasks, translation  # noqa: F401 - its tasks
from synthesizer_jax.data.pipeline import Stream
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.evaluation import write_results
from synthesizer_jax.files import absolute, join, storage_path, write_aside
from synthesizer_jax.models import stack_layers, stacks, unroll_variables
from synthesizer_jax.registry import replace, to_json
from synthesizer_jax.sharding import hosts, spread
from synthesizer_jax.training import code
from synthesizer_jax.training.checkpoints import finished_steps, restore_variables
from synthesizer_jax.training.evaluator import Evaluator, log_values
from synthesizer_jax.training.experiment import (
    EXPERIMENT_FILE,
    Experiment,
    load_experiment,
    save_experiment,
)
from synthesizer_jax.training.lock import locked
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.progress import summary
from synthesizer_jax.training.state import TrainState
from synthesizer_jax.training.survival import StopSignal
from synthesizer_jax.training.trainer import Trainer

VOCABULARY_FILE = "vocabulary.model"
VOCABULARY_SUM = "vocabulary.sha256"
"""Holds the checksum of the former, as ``sha256sum --check`` reads it."""

MAY_CHANGE = ("steps", "log_every", "save_every", "keep_latest", "keep_best", "watchdog_seconds")
"""Fields of `Training` that a continued run may change."""


def run(
    experiment: Experiment,
    directory: pathlib.Path,
    *,
    data_dir: pathlib.Path | None = None,
    trainer: Trainer | None = None,
    initial: Callable[[TrainState], TrainState] | None = None,
    devices: list[jax.Device] | None = None,
    visible: bool = True,
    own: code.Code = code.NOTHING,
) -> TrainState:
    """Trains, or continues, a run; everything it needs later lies in its directory.

    Args:
      experiment: what to do.
      directory: the run's; an unfinished run in it is continued.
      data_dir: where data sets lie; None is `tasks.default_data_dir()`.
      trainer: what makes the steps; None: one that trains the experiment's model on its targets.
      initial: changes a fresh state; None: puts `init_from`'s parameters into it, if any.
      devices: None uses all devices.
      visible: show a progress bar.
      own: code that later commands need before they can load the run, recorded in its directory.

    Returns:
      The final state.

    Raises:
      Preempted: after SIGTERM or SIGINT, with everything saved.
      ValueError: the directory holds another run, or something does not fit. Nothing was written.
      InUseError: another process trains in the directory.
    """
    directory = storage_path(str(directory))  # also what `pathlib` makes of gs://…
    places = tasks.default_data_dir() if data_dir is None else storage_path(str(data_dir))
    with contextlib.ExitStack() as stack:
        if hosts.first():
            stack.enter_context(locked(directory))
        stop = stack.enter_context(StopSignal())
        if visible and hosts.first():
            print(f"{directory}: reading {experiment.data.mixture}", flush=True)
        with stop.region():
            if initial is None and experiment.init_from is not None:
                checkpoint_of(storage_path(experiment.init_from))
            with hosts.one_after_the_first("directory"):
                experiment = with_vocabulary(experiment, directory, places)
                check_same_run(experiment, directory)
                vocabulary, data = open_vocabulary(experiment, directory), experiment.data
                tasks.register(data.mixture, vocabulary, data_dir=places, split=data.split)
                evaluator = Evaluator(experiment, vocabulary, data_dir=places)
            trainer = Trainer(experiment, devices) if trainer is None else trainer
            stream = Stream(experiment.data, shards=trainer.shards, saved=trainer.saved_shards)
        mesh = trainer.mesh

        def evaluate(state: TrainState) -> dict[str, float]:
            found = evaluator.measure(state.variables, mesh=mesh)
            if hosts.first():
                write_results(directory, int(state.step), *found)
            return log_values(*found)

        def save_settings() -> None:
            if hosts.first():
                code.record(directory, own)
                save_run(experiment, directory)
            code.trust(own)

        start = initial
        if start is None and experiment.init_from is not None:
            start = parameters_from(storage_path(experiment.init_from), experiment)
        state = train(
            experiment,
            stream,
            directory,
            stop=stop,
            evaluate=evaluate,
            initial=start,
            trainer=trainer,
            ready=save_settings,
            visible=visible,
        )
    if visible and hosts.first():
        saved = finished_steps(directory / "checkpoints")
        print(summary(directory, steps=int(state.step), saved=saved, data_dir=data_dir), flush=True)
    return state


def with_vocabulary(
    experiment: Experiment, directory: pathlib.Path, data_dir: pathlib.Path
) -> Experiment:
    """Prepares the embedded mixture if it is asked for, and says where the vocabulary lies.

    Raises:
      ValueError: there is no vocabulary.
    """
    vocabulary: Any = experiment.vocabulary
    if experiment.data.mixture == embedded.MIXTURE:
        own = embedded.prepare(data_dir).vocabulary
        vocabulary = own if vocabulary is None else vocabulary
    if vocabulary is None:
        raise ValueError(
            f"the mixture {experiment.data.mixture!r} has no vocabulary of its own; give one, such "
            "as vocabulary=SentencePiece('spiece.model') or Bytes() in the recipe"
        )
    vocabulary.build()
    if isinstance(vocabulary, SentencePiece):
        path = absolute(storage_path(vocabulary.path).expanduser())
        vocabulary = replace(vocabulary, path=str(path))
    return replace(experiment, vocabulary=vocabulary)


def as_saved(experiment: Experiment) -> Experiment:
    """The experiment as its directory says it, with the vocabulary beside it."""
    vocabulary: Any = experiment.vocabulary
    if isinstance(vocabulary, SentencePiece):
        vocabulary = replace(vocabulary, path=VOCABULARY_FILE)
    return replace(experiment, vocabulary=vocabulary)


def save_run(experiment: Experiment, directory: pathlib.Path) -> None:
    """Writes the experiment and its vocabulary into the run's directory."""
    vocabulary = experiment.vocabulary
    if isinstance(vocabulary, SentencePiece):
        copy = directory / VOCABULARY_FILE
        given = storage_path(vocabulary.path)
        if not same_file(given, copy):
            write_aside(copy, given.read_bytes())
        write_aside(directory / VOCABULARY_SUM, checksum(copy))
    save_experiment(as_saved(experiment), directory)


def checksum(path: pathlib.Path) -> str:
    """The line of ``sha256sum`` for a file."""
    return f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"


def same_file(one: pathlib.Path, other: pathlib.Path) -> bool:
    """Whether two paths lead to files of equal contents."""
    return other.is_file() and one.read_bytes() == other.read_bytes()


def open_vocabulary(experiment: Experiment, directory: pathlib.Path) -> Any:
    """The built vocabulary of a run.

    Raises:
      ValueError: the vocabulary is not what was saved with the run, or the model's embedding has fewer
        rows than it has ids.
    """
    config: Any = experiment.vocabulary
    if isinstance(config, SentencePiece):
        path = join(directory, config.path)
        check_saved_vocabulary(path, directory)
        config = replace(config, path=str(path))
    vocabulary = config.build()
    if vocabulary.vocab_size > experiment.model.vocab_size:
        raise ValueError(
            f"the vocabulary has {vocabulary.vocab_size} ids but model.vocab_size="
            f"{experiment.model.vocab_size}; set model.vocab_size to at least that"
        )
    return vocabulary


def check_saved_vocabulary(path: pathlib.Path, directory: pathlib.Path) -> None:
    """Raises a `ValueError` where a run's own vocabulary is not what was saved with the run.

    Runs of earlier versions have no checksum, and are not checked.
    """
    saved = directory / VOCABULARY_SUM
    if path != directory / VOCABULARY_FILE or not (path.is_file() and saved.is_file()):
        return
    if saved.read_bytes() != checksum(path).encode():
        raise ValueError(
            f"{path} is not what was saved with the run, says {saved.name}; put the run's own in its place"
        )


def open_data(
    experiment: Experiment, directory: pathlib.Path, data_dir: pathlib.Path, **options: Any
) -> tuple[Any, Evaluator]:
    """The run's vocabulary, and what it is evaluated on.

    Args:
      experiment: with its vocabulary in `directory`.
      directory: the run's.
      data_dir: where data sets lie.
      **options: of `Evaluator`.
    """
    if experiment.data.mixture == embedded.MIXTURE:
        embedded.prepare(data_dir)
    vocabulary = open_vocabulary(experiment, directory)
    return vocabulary, Evaluator(experiment, vocabulary, data_dir=data_dir, **options)


def check_same_run(experiment: Experiment, directory: pathlib.Path) -> None:
    """Raises a `ValueError` when a directory holds a run that this one cannot continue.

    A run that has saved nothing yet is none: a corrected experiment may begin in its place.
    """
    if not (directory / EXPERIMENT_FILE).is_file() or not finished_steps(directory / "checkpoints"):
        return
    vocabulary = experiment.vocabulary
    if isinstance(vocabulary, SentencePiece):
        copy = directory / VOCABULARY_FILE
        if copy.is_file() and not same_file(storage_path(vocabulary.path), copy):
            raise ValueError(
                f"{directory} holds another run: its {VOCABULARY_FILE} is not {vocabulary.path}; use a new "
                "--workdir, or the old vocabulary to continue"
            )
    experiment = as_saved(experiment)
    saved, mine = fixed_part(load_experiment(directory)), fixed_part(experiment)
    different = [
        path for path in sorted(saved.keys() | mine.keys()) if saved.get(path) != mine.get(path)
    ]
    if different:
        path = different[0]
        raise ValueError(
            f"{directory} holds another run: {path} was {saved.get(path)} and is {mine.get(path)}; "
            "use a new --workdir, or the old setting to continue"
        )


def fixed_part(experiment: Experiment) -> dict[str, Any]:
    """What must stay the same for a run to continue, ``{path: value}``."""
    data = to_json(experiment)
    for name in MAY_CHANGE:
        del data["training"][name]
    return dict(leaves({name: data[name] for name in ("model", "data", "training", "vocabulary")}))


def leaves(data: Any, path: str = "") -> list[tuple[str, Any]]:
    """Paths and values of nested JSON."""
    if not isinstance(data, dict | list):
        return [(path, data)]
    items = data.items() if isinstance(data, dict) else enumerate(data)
    return [leaf for k, v in items for leaf in leaves(v, f"{path}.{k}" if path else str(k))]


def parameters_from(
    source: pathlib.Path, experiment: Experiment
) -> Callable[[TrainState], TrainState]:
    """Puts a checkpoint's parameters into a fresh state; the optimiser starts anew.

    Args:
      source: ``RUN`` or ``RUN/checkpoints/STEP``.
      experiment: the run that starts; its model is the checkpoint's, scanned or not.

    Raises:
      ValueError: the checkpoint is of another model.
    """
    directory, step = checkpoint_of(source)
    theirs = load_experiment(directory)
    _, variables = restore_variables(directory / "checkpoints", step=step)
    variables = unroll_variables(theirs.model, variables)
    for name, stack in stacks(experiment.model).items():
        if stack.scan:
            for collection in variables.values():
                if name in collection:
                    collection[name] = stack_layers(stack, collection[name])

    def put(state: TrainState) -> TrainState:
        check_same_shapes(variables["params"], state.params, source)
        params = jax.tree.map(
            lambda new, old: spread(new, old.sharding), variables["params"], state.params
        )
        constants = variables.get("constants", state.constants)
        return replace_parameters(state, params, constants)

    return put


def checkpoint_of(source: pathlib.Path) -> tuple[pathlib.Path, int | None]:
    """The run's directory and the step (None: the newest) of ``RUN`` or ``RUN/checkpoints/STEP``.

    Raises:
      ValueError: there is no run of this package.
    """
    of_step = source.parent.name == "checkpoints" and source.name.isdecimal()
    directory = source.parent.parent if of_step else source
    if not (directory / EXPERIMENT_FILE).is_file():
        raise ValueError(
            f"init_from is {str(source)!r}, but {directory} holds no {EXPERIMENT_FILE}; give the directory "
            "of a training run of this package, or RUN/checkpoints/STEP"
        )
    return directory, int(source.name) if of_step else None


def replace_parameters(state: TrainState, params: Any, constants: Any) -> TrainState:
    """A fresh state with other parameters."""
    return TrainState(
        step=state.step, params=params, constants=constants, opt_state=state.opt_state
    )


def check_same_shapes(theirs: Any, mine: Any, source: pathlib.Path) -> None:
    """Raises a `ValueError` that names the first parameter that is missing or has another shape."""
    shapes = [
        {
            jax.tree_util.keystr(p, simple=True, separator="/"): x.shape
            for p, x in jax.tree.leaves_with_path(t)
        }
        for t in (theirs, mine)
    ]
    different = [
        n
        for n in sorted(shapes[0].keys() | shapes[1].keys())
        if shapes[0].get(n) != shapes[1].get(n)
    ]
    if different:
        name = different[0]
        raise ValueError(
            f"{source} is a checkpoint of another model: {name} is {shapes[0].get(name, 'absent')} "
            f"there and {shapes[1].get(name, 'absent')} here; start from the same model"
        )
