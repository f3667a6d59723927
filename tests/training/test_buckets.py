"""A step for every shape of a batch, with the same result as with more padding."""

import dataclasses
import itertools
import types

import numpy as np
import pytest

from synthesizer_jax.models import Size, alignment, t5
from synthesizer_jax.registry import from_json, replace, to_json
from synthesizer_jax.runs import metrics
from synthesizer_jax.runtime.preemption import StopSignal
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.trainer import Trainer
from tests.training import tiny

MODEL = t5(
    Size(8, 2, 16, 2, 4), encoder=alignment("rv", head_dim=4, max_length=8), vocab_size=tiny.VOCAB
)


def shorter(batch: dict[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    return {name: np.ascontiguousarray(value[:, :length]) for name, value in batch.items()}


def test_a_bucket_is_compiled_once_and_changes_nothing() -> None:
    experiment = tiny.experiment()
    data = replace(experiment.data, buckets=((5, 5),))
    experiment = replace(experiment, data=data, model=MODEL)
    trainer = Trainer(experiment)
    trainer.compile()
    batch = next(tiny.CopyStream())
    for name in batch:
        batch[name][:, 5:] = 0
    losses = []
    for length in (8, 5, 5, 8):
        given = trainer.shard_batch(shorter(batch, length))
        _, values = trainer.step(trainer.init(), given)
        losses.append(float(values["loss"]))
    assert trainer.num_compiled == 2
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)
    assert trainer.measure_utilization() == {}


def test_experiments_with_buckets_are_json() -> None:
    experiment = tiny.experiment()
    experiment = replace(experiment, data=replace(experiment.data, buckets=((4, 4), (4, 8))))
    assert from_json(to_json(experiment)) == experiment
    assert dataclasses.asdict(experiment.data)["buckets"] == ((4, 4), (4, 8))


def test_padding_is_counted_by_the_shape_of_every_batch() -> None:
    throughput = metrics.Throughput()
    throughput.add(30, capacity=40)
    throughput.add(30, capacity=60)
    assert throughput.read()["padding"] == pytest.approx(0.4)
    throughput.add(30, capacity=100)
    assert throughput.read()["padding"] == pytest.approx(0.7)


def test_the_speed_that_is_logged_is_without_compilation(tmp_path, monkeypatch) -> None:
    """By a clock that a compilation alone moves on by a thousand seconds."""
    clock = itertools.count()
    monkeypatch.setattr(
        metrics, "time", types.SimpleNamespace(perf_counter=lambda: next(clock), time=lambda: 0)
    )
    compile_step = Trainer._program

    def compiled(trainer: Trainer, lengths: tuple[int, int]) -> object:
        if lengths not in trainer._compiled:
            list(itertools.islice(clock, 1000))
        return compile_step(trainer, lengths)

    class Growing(tiny.CopyStream):
        def __next__(self) -> dict[str, np.ndarray]:
            length = 8 if self.taken % 2 else 5
            return shorter(super().__next__(), length)

    monkeypatch.setattr(Trainer, "_program", compiled)
    experiment = tiny.experiment(steps=4)
    data = replace(experiment.data, buckets=((5, 5),))
    with StopSignal() as stop:
        trainer = Trainer(replace(experiment, data=data, model=MODEL))
        train(trainer, Growing(), tmp_path, stop=stop, visible=False)
    speeds = [r["steps_per_second"] for r in metrics.read_metrics(tmp_path / metrics.METRICS_FILE)]
    assert len(speeds) == 4 and min(speeds) > 0.1
