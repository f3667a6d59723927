"""Conversion of original distribution files to TFDS data sets, without a network."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from synthesizer_jax.tasks.importers import layouts
from synthesizer_jax.tasks.importers.benchmark import import_benchmark
from synthesizer_jax.tasks.importers.corpora import import_corpus
from synthesizer_jax.tasks.importers.corpus_layouts import CORPORA
from synthesizer_jax.tasks.importers.report import ImportReport, SplitReport

Importer: TypeAlias = Callable[..., ImportReport]
"""A function of the name, the directory of the files, the data directory and ``renew``, to a report."""

IMPORTERS: Mapping[str, Importer] = MappingProxyType(
    {
        **dict.fromkeys(layouts.TASKS, import_benchmark),
        **dict.fromkeys(CORPORA, import_corpus),
    }
)
"""The function that imports a benchmark or corpus, by its name."""

__all__ = [
    "IMPORTERS",
    "ImportReport",
    "Importer",
    "SplitReport",
    "import_benchmark",
    "import_corpus",
]
