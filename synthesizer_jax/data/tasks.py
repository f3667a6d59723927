"""Tasks and mixtures in SeqIO's registries, for one vocabulary and one data directory."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from synthesizer_jax.data.definitions import GLUE, SENTINEL, SUPER_GLUE, TaskDefinition
from synthesizer_jax.data.mixtures import MIXTURES, Rates
from synthesizer_jax.data.stored import check, prepared, stored_splits
from synthesizer_jax.data.vocabularies import Vocabulary
from synthesizer_jax.files import storage_path
from synthesizer_jax.suggestions import suggestion

TASKS: dict[str, TaskDefinition] = {d.name: d for d in (*GLUE, *SUPER_GLUE, *SENTINEL)}
"""Every known task; `add` adds more."""

_log = logging.getLogger(__name__)
_registered: dict[str, Any] = {}


def add(definitions: Iterable[TaskDefinition], mixtures: Mapping[str, Rates] = {}) -> None:
    """Makes tasks and mixtures of your own known; `register` puts them into SeqIO."""
    TASKS.update({d.name: d for d in definitions})
    MIXTURES.update(mixtures)


def definition(name: str) -> TaskDefinition:
    """A task's definition.

    Raises:
      ValueError: there is no such task, with a suggestion.
    """
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}{suggestion(name, TASKS)}")
    return TASKS[name]


def members(name: str) -> Rates:
    """Rates of a mixture's tasks, or of a single task.

    Raises:
      ValueError: there is neither a mixture nor a task of that name.
    """
    if name in MIXTURES:
        return MIXTURES[name]
    if name in TASKS:
        return {name: 1.0}
    known = [*MIXTURES, *TASKS]
    raise ValueError(
        f"there is no mixture or task {name!r}{suggestion(name, known)}; mixtures: "
        f"{', '.join(MIXTURES)}"
    )


def default_data_dir() -> pathlib.Path:
    """Where data sets lie unless another directory is given: TFDS's own place."""
    given = os.environ.get("SYNTHESIZER_DATA_DIR") or os.environ.get("TFDS_DATA_DIR")
    return storage_path(given or "~/tensorflow_datasets").expanduser()


def splits(name: str, data_dir: pathlib.Path) -> dict[str, int]:
    """Number of stored rows of the splits that a task has on this machine; empty: none."""
    task = definition(name)
    versions = prepared(task.dataset, data_dir)
    if not versions:
        return {}
    stored = stored_splits(list(versions.values())[-1])
    return {split: stored[split] for split in task.splits if split in stored}


def available(name: str, data_dir: pathlib.Path, split: str | None = None) -> dict[str, float]:
    """The members of a mixture whose data is on this machine, with their rates.

    Args:
      name: a mixture or task.
      data_dir: where data sets lie.
      split: only members that have this split.
    """
    found = {}
    for task, rate in members(name).items():
        here = splits(task, data_dir)
        if here and (split is None or split in here):
            found[task] = rate
    return found


def register(
    name: str, vocabulary: Vocabulary, *, data_dir: pathlib.Path, split: str = "train"
) -> dict[str, float]:
    """Puts a mixture and its tasks into SeqIO's registries, without those whose data is missing.

    Called again with another vocabulary or directory it replaces them. Nothing is downloaded.

    Args:
      name: a mixture or task.
      vocabulary: as it is built in `vocabularies`.
      data_dir: where data sets lie.
      split: the split that must not be empty.

    Returns:
      The rates of the tasks that take part.

    Raises:
      ValueError: no such mixture.
      FileNotFoundError: none of its tasks has that split on this machine.
    """
    import seqio

    parts = available(name, data_dir)
    drawn = [task for task, rate in parts.items() if rate and split in splits(task, data_dir)]
    if not drawn:
        raise FileNotFoundError(
            f"no task of {name!r} has data for the split {split!r} in {data_dir}; import the "
            "original files with 'synthesizer-jax data import glue --from DIR --data-dir "
            f"{data_dir}' (also super_glue), or name another --data-dir"
        )
    for task in parts:
        register_task(definition(task), vocabulary, data_dir)
    if name in MIXTURES:
        absent = [t for t, rate in members(name).items() if rate and t not in drawn]
        if absent:
            _log.warning("%s goes without %s: no data in %s", name, ", ".join(absent), data_dir)
        # A task that lacks the split cannot be drawn from; others keep their rates.
        rates = {task: rate if task in drawn else 0.0 for task, rate in parts.items()}
        if name in seqio.MixtureRegistry.names():
            seqio.MixtureRegistry.remove(name)
        seqio.MixtureRegistry.add(name, list(rates.items()))
        return rates
    return parts


def register_task(task: TaskDefinition, vocabulary: Vocabulary, data_dir: pathlib.Path) -> None:
    """Puts one task whose data is prepared into SeqIO's registry.

    Raises:
      ValueError: TFDS must not open the data set (see `stored.check`).
    """
    import seqio
    import tensorflow_datasets as tfds

    key = (task, vocabulary, data_dir)
    if _registered.get(task.name) == key and task.name in seqio.TaskRegistry.names():
        return
    if task.name in seqio.TaskRegistry.names():
        seqio.TaskRegistry.remove(task.name)
    # Examples are kept by `pipeline`, not by TFDS; one reader a task keeps the threads few.
    seqio.set_tfds_read_config_override(
        tfds.ReadConfig(
            try_autocache=False,
            interleave_cycle_length=1,
            num_parallel_calls_for_interleave_files=1,
            num_parallel_calls_for_decode=1,
        )
    )
    version, directory = list(prepared(task.dataset, data_dir).items())[-1]
    check(directory)
    here = splits(task.name, data_dir)
    steps: list[Any] = [task.preprocess]
    if task.rename:
        from synthesizer_jax.data import preprocessors

        steps.insert(0, functools.partial(preprocessors.renamed, names=dict(task.rename)))
    pieces = vocabulary.to_seqio()
    steps += [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
    if task.sentinel:
        from synthesizer_jax.data import preprocessors

        first = vocabulary.vocab_size - 1
        steps.append(functools.partial(preprocessors.append_sentinel, sentinel=first))
    seqio.TaskRegistry.add(
        task.name,
        source=seqio.TfdsDataSource(
            f"{task.dataset}:{version}",
            tfds_data_dir=str(data_dir),
            splits=list(here),
        ),
        preprocessors=[*steps, seqio.preprocessors.append_eos_after_trim],
        postprocess_fn=functools.partial(_postprocess, task),
        output_features={
            "inputs": seqio.Feature(pieces, add_eos=True, required=False),
            "targets": seqio.Feature(pieces, add_eos=True),
        },
        metric_fns=list(task.metrics),
    )
    _registered[task.name] = key


def _postprocess(
    task: TaskDefinition, answer: str, example: Any = None, is_target: bool = False, **_: Any
) -> Any:
    return task.postprocess(answer, example=example, is_target=is_target)
