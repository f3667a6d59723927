"""Opening of a training stream: from caches where there are any, and else with SeqIO."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from synthesizer_jax.data import tasks
from synthesizer_jax.data.cache import Caches, open_caches
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.members import Examples
from synthesizer_jax.data.pipeline import Member, Stream
from synthesizer_jax.data.vocabularies import Vocabulary

if TYPE_CHECKING:
    import seqio


def open_stream(
    config: DataConfig,
    vocabulary: Vocabulary,
    *,
    data_dir: pathlib.Path,
    shards: Sequence[int] | None = None,
    saved: Sequence[int] | None = None,
    before_seqio: Callable[[], None] = lambda: None,
) -> Stream:
    """Returns the stream of a mixture; if all its tasks are cached, SeqIO is not imported.

    Args:
      config: what to read.
      vocabulary: as a configuration in `vocabularies` builds it.
      data_dir: the directory of the data sets and caches.
      shards: see `Stream`.
      saved: see `Stream`.
      before_seqio: called before SeqIO is imported, if it has to be.

    Raises:
      FileNotFoundError: no task has the split, or `config.cached` is True and a task has no cache.
      ValueError: see `cache.open_caches` and `Stream`.
    """
    rates = tasks.sampled_members(config.mixture, data_dir, config.split)
    names = sorted(rates)  # SeqIO's order, on which the order of examples depends
    objectives = {name: config.objective_of(tasks.find_task(name)) for name in names}
    cached: Mapping[str, Examples] = {}
    if config.cached is not False:
        cached = open_caches(
            names,
            Caches(data_dir, vocabulary),
            split=config.split,
            lengths=config.lengths,
            required=bool(config.cached),
            documents={name for name, objective in objectives.items() if objective is not None},
        )
    if len(cached) < len(names):
        before_seqio()

    def source(name: str) -> Examples | seqio.Task:
        if name in cached:
            return cached[name]
        return tasks.find_task(name).to_seqio(vocabulary, data_dir)

    return Stream(
        config,
        {name: Member(rates[name], source(name), objectives[name]) for name in names},
        vocabulary=vocabulary,
        shards=shards,
        saved=saved,
    )
