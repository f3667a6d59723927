"""Conversion of original distribution files to TFDS data sets, without a network."""

from synthesizer_jax.preparation.importers.corpora import SplitReport, import_corpus, report_lines
from synthesizer_jax.preparation.importers.layouts import CORPORA

__all__ = ["CORPORA", "SplitReport", "import_corpus", "report_lines"]
