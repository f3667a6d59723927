"""Conversion of benchmarks' original distribution files to TFDS data sets, without a network."""

from synthesizer_jax.data.importers.benchmark import import_benchmark
from synthesizer_jax.data.importers.report import ImportReport, SplitReport

__all__ = ["ImportReport", "SplitReport", "import_benchmark"]
