"""Registration of tasks and mixtures with SeqIO, for one vocabulary and one data directory."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from synthesizer_jax.data.catalog import DEFINITIONS
from synthesizer_jax.data.definitions import TaskDefinition
from synthesizer_jax.data.mixtures import MIXTURES, ExamplesRate, FixedRates, Rates
from synthesizer_jax.data.postprocessors import Example
from synthesizer_jax.data.stored import check_dataset, prepared_versions, stored_splits
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.evaluation.metrics import Value
from synthesizer_jax.files import storage_path
from synthesizer_jax.messages import did_you_mean

if TYPE_CHECKING:
    import tensorflow as tf

TASKS: dict[str, TaskDefinition] = {d.name: d for d in DEFINITIONS}
"""All known tasks; `add` adds others."""

_log = logging.getLogger(__name__)
_registered: dict[str, tuple[TaskDefinition, Vocabulary, pathlib.Path]] = {}


def add(definitions: Iterable[TaskDefinition], mixtures: Mapping[str, Rates] = {}) -> None:
    """Adds task definitions and mixtures; `register` registers them with SeqIO."""
    TASKS.update({d.name: d for d in definitions})
    MIXTURES.update(mixtures)


def task_definition(name: str) -> TaskDefinition:
    """Returns a task's definition.

    Raises:
      ValueError: there is no such task; the message suggests a similar name.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}{did_you_mean(name, TASKS)}")
    return TASKS[name]


def mixture_rates(name: str, data_dir: pathlib.Path | None = None) -> FixedRates:
    """Returns the rates of a mixture's tasks, or of a single task, as numbers.

    Members without a definition are left out, such as an unsupervised task of a mixture that is used
    without it.

    Args:
      name: a mixture or task.
      data_dir: the directory of the data sets, of whose training splits `ExamplesRate` takes the sizes;
        a task without one has rate 0. By default `default_data_dir`.

    Raises:
      ValueError: there is neither a mixture nor a task of that name.
    """
    if name in MIXTURES:
        directory = default_data_dir() if data_dir is None else data_dir
        return {
            task: rate(prepared_splits(task, directory).get("train", 0))
            if isinstance(rate, ExamplesRate)
            else rate
            for task, rate in MIXTURES[name].items()
            if task in TASKS
        }
    if name in TASKS:
        return {name: 1.0}
    known = [*MIXTURES, *TASKS]
    raise ValueError(
        f"there is no mixture or task {name!r}{did_you_mean(name, known)}; mixtures: "
        f"{', '.join(MIXTURES)}"
    )


def default_data_dir() -> pathlib.Path:
    """Returns the data directory of the environment, by default TFDS's.

    ``SYNTHESIZER_DATA_DIR`` takes precedence over ``TFDS_DATA_DIR``.
    """
    configured = os.environ.get("SYNTHESIZER_DATA_DIR") or os.environ.get("TFDS_DATA_DIR")
    return storage_path(configured or "~/tensorflow_datasets").expanduser()


def prepared_splits(name: str, data_dir: pathlib.Path) -> dict[str, int]:
    """Returns the number of stored rows of each of a task's splits that are on this machine."""
    task = task_definition(name)
    versions = prepared_versions(task.dataset, data_dir)
    if not versions:
        return {}
    stored = stored_splits(list(versions.values())[-1])
    return {split: stored[split] for split in task.splits if split in stored}


def available_members(
    name: str, data_dir: pathlib.Path, split: str | None = None
) -> dict[str, float]:
    """Returns the rates of those members of a mixture whose data is on this machine.

    Args:
      name: a mixture or task.
      data_dir: the directory of the data sets.
      split: only return members that have this split.
    """
    rates = {}
    for task, rate in mixture_rates(name, data_dir).items():
        splits = prepared_splits(task, data_dir)
        if splits and (split is None or split in splits):
            rates[task] = rate
    return rates


def register(
    name: str, vocabulary: Vocabulary, *, data_dir: pathlib.Path, split: str = "train"
) -> dict[str, float]:
    """Registers a mixture and its tasks with SeqIO, without tasks whose data is missing.

    A call with another vocabulary or directory replaces earlier registrations. Nothing is
    downloaded.

    Args:
      name: a mixture or task.
      vocabulary: as a configuration in `vocabularies` builds it.
      data_dir: the directory of the data sets.
      split: the split to train on; at least one task must have it.

    Returns:
      The rates of the registered tasks.

    Raises:
      ValueError: there is no such mixture.
      FileNotFoundError: none of its tasks has that split on this machine.
    """
    import seqio

    members = available_members(name, data_dir)
    sampled = [
        task for task, rate in members.items() if rate and split in prepared_splits(task, data_dir)
    ]
    if not sampled:
        raise FileNotFoundError(
            f"no task of {name!r} has data for the split {split!r} in {data_dir}; import the "
            "original files with 'synthesizer-jax data import glue --from DIR --data-dir "
            f"{data_dir}' (also super_glue), or name another --data-dir"
        )
    for task in members:
        register_task(task_definition(task), vocabulary, data_dir)
    if name in MIXTURES:
        missing = [
            task
            for task, rate in MIXTURES[name].items()
            if rate
            and task not in sampled
            and (task not in TASKS or split in task_definition(task).splits)
        ]
        if missing:
            _log.warning("%s goes without %s: no data in %s", name, ", ".join(missing), data_dir)
        # A task without the split cannot be sampled from; the others keep their rates.
        rates = {task: rate if task in sampled else 0.0 for task, rate in members.items()}
        if name in seqio.MixtureRegistry.names():
            seqio.MixtureRegistry.remove(name)
        seqio.MixtureRegistry.add(name, list(rates.items()))
        return rates
    return members


def register_task(task: TaskDefinition, vocabulary: Vocabulary, data_dir: pathlib.Path) -> None:
    """Registers one task, whose data must be prepared, with SeqIO.

    Raises:
      ValueError: TFDS must not open the data set (see `stored.check_dataset`).
    """
    import seqio
    import tensorflow_datasets as tfds

    key = (task, vocabulary, data_dir)
    if _registered.get(task.name) == key and task.name in seqio.TaskRegistry.names():
        return
    if task.name in seqio.TaskRegistry.names():
        seqio.TaskRegistry.remove(task.name)
    # `pipeline` caches the examples, not TFDS; one reader per task limits the number of threads.
    seqio.set_tfds_read_config_override(
        tfds.ReadConfig(
            try_autocache=False,
            interleave_cycle_length=1,
            num_parallel_calls_for_interleave_files=1,
            num_parallel_calls_for_decode=1,
        )
    )
    version, directory = list(prepared_versions(task.dataset, data_dir).items())[-1]
    check_dataset(directory)
    splits = prepared_splits(task.name, data_dir)
    seqio_vocabulary = vocabulary.to_seqio()
    seqio.TaskRegistry.add(
        task.name,
        source=seqio.TfdsDataSource(
            f"{task.dataset}:{version}",
            tfds_data_dir=str(data_dir),
            splits=list(splits),
        ),
        preprocessors=seqio_preprocessors(task, vocabulary),
        postprocess_fn=functools.partial(_postprocess, task),
        output_features={
            "inputs": seqio.Feature(seqio_vocabulary, add_eos=True, required=False),
            "targets": seqio.Feature(seqio_vocabulary, add_eos=True),
        },
        metric_fns=list(task.metrics),
    )
    _registered[task.name] = key


def seqio_preprocessors(
    task: TaskDefinition, vocabulary: Vocabulary
) -> list[Callable[..., tf.data.Dataset]]:
    """Returns the SeqIO preprocessors that turn a task's stored rows into token ids."""
    import seqio

    preprocessing: list[Callable[..., tf.data.Dataset]] = [task.format.preprocess]
    if task.rename:
        from synthesizer_jax.data import preprocessors

        preprocessing.insert(
            0, functools.partial(preprocessors.rename_features, names=dict(task.rename))
        )
    preprocessing += [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
    preprocessing += task.format.token_preprocessors
    if task.sentinel:
        from synthesizer_jax.data import preprocessors

        sentinel_id = vocabulary.vocab_size - 1
        preprocessing.append(functools.partial(preprocessors.append_sentinel, sentinel=sentinel_id))
    return [*preprocessing, seqio.preprocessors.append_eos_after_trim]


def _postprocess(
    task: TaskDefinition,
    answer: str,
    *,
    example: Example | None = None,
    is_target: bool = False,
    **_: object,
) -> Value:
    return task.postprocess(answer, example=example, is_target=is_target)
