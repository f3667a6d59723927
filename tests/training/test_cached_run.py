"""A run whose data is cached: without TensorFlow until it is evaluated.

As a program it trains, and tells at the first evaluation what has been imported.
"""

import os
import pathlib
import subprocess
import sys

import pytest

from synthesizer_jax.registry import replace
from synthesizer_jax.training import run as training_run
from tests.data import counted
from tests.training import tiny

MODULES = ("tensorflow", "tensorflow_datasets", "seqio")


def train(data_dir: pathlib.Path, directory: pathlib.Path) -> None:
    def tell(*_: object) -> None:
        print("imported:", *(name for name in MODULES if name in sys.modules), flush=True)
        os._exit(0)

    counted.add()
    training_run._make_evaluator = tell
    experiment = tiny.experiment(steps=2)
    lengths = {"inputs_length": 8, "targets_length": 8}
    data = replace(counted.CONFIG, pack=True, batch_size=8, max_segments=2, **lengths)
    model = experiment.model.copy(vocab_size=counted.VOCABULARY.vocab_size)
    training_run.run(
        replace(experiment, data=data, model=model), directory, data_dir=data_dir, visible=False
    )


@pytest.mark.slow
def test_training_from_a_cache_needs_no_tensorflow(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("grain")
    from synthesizer_jax.data.cache import Caches

    from synthesizer_jax.data import cache_writing
    from tests.data import small

    counted.add()
    small.write(tmp_path / "data")
    caches = Caches(tmp_path / "data", counted.VOCABULARY)
    for expected in (" tensorflow tensorflow_datasets seqio", ""):
        done = subprocess.run(
            [sys.executable, "-m", __name__, str(caches.data_dir), str(tmp_path / "run")],
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == f"imported:{expected}", done.stderr
        cache_writing.write_caches(counted.MIXTURE, caches, split="train")


if __name__ == "__main__":
    train(*map(pathlib.Path, sys.argv[1:]))
