"""Opens a training stream from prepared tasks."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import Objective
from synthesizer_jax.data.pipeline import Member, Stream
from synthesizer_jax.data.prepared import HIDDEN, PreparedTasks
from synthesizer_jax.data.vocabularies import Vocabulary, index_by_tokens
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.mixtures import MIXTURES
from synthesizer_jax.tasks.task import Task

_log = logging.getLogger(__name__)


def task_objective(config: DataConfig, task: Task) -> Objective | None:
    """Returns the objective by which a task's texts are trained; None: they are targets."""
    if task.objective is not None or task.has_inputs:
        return task.objective
    return config.objective


def open_stream(
    config: DataConfig,
    vocabulary: Vocabulary,
    *,
    data_dir: pathlib.Path,
    shards: Sequence[int] | None = None,
    saved: Sequence[int] | None = None,
) -> Stream:
    """Returns the stream of a mixture whose tasks are prepared; those that are not are left out.

    Args:
      config: what to read.
      vocabulary: whose tokens they are.
      data_dir: the directory of the data sets.
      shards: see `Stream`.
      saved: see `Stream`.

    Raises:
      FileNotFoundError: no task has the split.
      ValueError: label words are the same to the vocabulary, or targets are hidden; see also
        `PreparedExamples` and `Stream`.
    """
    prepared = PreparedTasks(data_dir, vocabulary)
    rates = prepared.rates(config.mixture) or {}
    sampled = [n for n, rate in rates.items() if rate and prepared.find(n, config.split)]
    if not sampled:
        raise FileNotFoundError(
            f"no task of {config.mixture!r} is prepared for the split {config.split!r} in "
            f"{prepared.root}; {prepared.remedy(config.mixture)}"
        )
    tasks = {n: task_registry.TASKS.get(n) for n, r in MIXTURES.get(config.mixture, {}).items() if r}
    missing = [n for n, t in tasks.items() if t and n not in sampled and config.split in t.splits]
    if missing:
        names = ", ".join(missing)
        _log.warning("%s goes without %s: no data in %s", config.mixture, names, data_dir)
    members = {}
    for name in sorted(sampled):  # SeqIO's order, on which the order of examples depends
        task = task_registry.find_task(name)
        words, length = task.label_words or (), config.lengths["targets"]
        index_by_tokens(words, vocabulary, owner=f"the task {name!r}", length=length)
        objective = task_objective(config, task)
        examples = prepared.open(name, config.split, config.lengths, documents=objective is not None)
        hidden = examples.info.targets.get(HIDDEN, 0)
        if hidden and (words or hidden == len(examples)):
            raise ValueError(
                f"{examples.name} has {hidden:,} targets that {HIDDEN}; choose a data.split whose answers "
                "are known, or leave such rows out"
            )
        members[name] = Member(rates[name], examples, objective)
    return Stream(config, members, vocabulary=vocabulary, shards=shards, saved=saved)
