"""Original distribution files of benchmarks become TFDS data sets, without network."""

from synthesizer_jax.data.importers.benchmark import import_benchmark
from synthesizer_jax.data.importers.report import ImportReport, SplitReport

__all__ = ["ImportReport", "SplitReport", "import_benchmark"]
