"""Conversion of archives and of files that a user names to TFDS data sets, without a network."""

from synthesizer_jax.preparation.importers.corpora import import_corpus, import_dataset, report_lines
from synthesizer_jax.preparation.importers.layouts import CORPORA, DATASETS

__all__ = ["CORPORA", "DATASETS", "import_corpus", "import_dataset", "report_lines"]
