"""Which importer makes a data set, and of what size it was published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from synthesizer_jax.tasks.importers.corpus_layouts import CORPORA
from synthesizer_jax.tasks.importers.layouts import TASKS


class KnownDataset(NamedTuple):
    """A data set that an importer makes.

    Attributes:
      importer: the name that ``synthesizer-jax data import`` takes.
      sizes: the published numbers of rows by split, where they are known; a split may have several.
    """

    importer: str
    sizes: Mapping[str, tuple[int, ...]]


def find_importer(dataset: str) -> KnownDataset | None:
    """Returns what is known of a TFDS data set such as ``glue/cola``; None: no importer makes it."""
    for name, benchmark in TASKS.items():
        for task in benchmark:
            if task.config == dataset:
                return KnownDataset(name, {split.name: split.sizes for split in task.splits})
    for name, corpus in CORPORA.items():
        for layout in corpus:
            if layout.dataset == dataset:
                sizes = {s.name: (s.rows,) for s in layout.splits if s.rows is not None}
                return KnownDataset(name, sizes)
    return None
