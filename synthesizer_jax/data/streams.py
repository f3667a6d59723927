"""Opening of a training stream: from caches where there are any, and else with SeqIO."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence

from synthesizer_jax.data import tasks
from synthesizer_jax.data.cache import Caches, open_caches
from synthesizer_jax.data.classes import Classes
from synthesizer_jax.data.pipeline import DataConfig, Stream
from synthesizer_jax.data.vocabularies import Vocabulary


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
      ValueError: see `cache.open_caches`, `Classes` and `Stream`.
    """
    members = tasks.sampled_members(config.mixture, data_dir, config.split)
    # In SeqIO's order, on which the order of examples depends.
    rates = {name: float(members[name]) for name in sorted(members)}
    objectives = {name: config.objective_of(tasks.find_task(name)) for name in rates}
    used = {name: objective for name, objective in objectives.items() if objective is not None}
    cached = {}
    if config.cached is not False:
        cached = open_caches(
            rates,
            Caches(data_dir, vocabulary),
            split=config.split,
            lengths=config.lengths,
            required=bool(config.cached),
            documents=used,
        )
    live = [name for name in rates if name not in cached]
    if live:
        before_seqio()
    opened = {name: tasks.find_task(name).to_seqio(vocabulary, data_dir) for name in live}
    return Stream(
        config,
        rates=rates,
        cached=cached,
        live=opened,
        objectives=used,
        vocab_size=vocabulary.vocab_size,
        shards=shards,
        saved=saved,
        classes=Classes(config.classes, vocabulary) if config.classes else None,
    )
