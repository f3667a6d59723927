"""Conversion of original distribution files to TFDS data sets, without a network."""

from synthesizer_jax.tasks.importers.corpora import ImportReport, SplitReport, import_corpus
from synthesizer_jax.tasks.importers.layouts import CORPORA

__all__ = ["CORPORA", "ImportReport", "SplitReport", "import_corpus"]
