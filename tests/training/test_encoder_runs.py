"""Whole runs of encoders: data, training, restarts, evaluation, files, report."""

import functools
import json

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from synthesizer_jax.checkpoints.manager import finished_steps
from synthesizer_jax.cli.main import app
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.initializers import Normal
from synthesizer_jax.models import Encoder, Size, alignment, t5
from synthesizer_jax.optimizers import AdamW, Cosine
from synthesizer_jax.runs.metrics import METRICS_FILE, read_metrics
from synthesizer_jax.runtime.preemption import StopSignal
from synthesizer_jax.tasks import synthetic
from synthesizer_jax.training.experiment import Evaluation, Experiment, InitRule, Training
from synthesizer_jax.training.initial_parameters import initialize_from_checkpoint
from synthesizer_jax.training.loop import train
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import save_experiment
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny_encoder import MaskedStream, encoder, experiment

pytestmark = pytest.mark.slow

WORDS = ("positive", "negative")
STEPS = 400


def recipe(directory, steps=STEPS) -> Experiment:
    """Classifies the sentences of the synthetic SST-2; the task has its label words in another order."""
    size = Size(32, 1, 64, 2, 16)
    kind = alignment("frv", head_dim=size.head_dim, max_length=32)
    return Experiment(
        model=Encoder(
            vocab_size=synthetic.VOCAB_SIZE,
            d_model=size.d_model,
            encoder=t5(size, encoder=kind).encoder,
            outputs=2,
            embedding_init=Normal(0.3),
        ),
        data=DataConfig("synthetic_sst2", 32, 1, batch_size=32, shards=4, classes=WORDS),
        training=Training(
            steps=steps,
            optimizer=AdamW(Cosine(4e-3, total_steps=STEPS, warmup_steps=30)),
            log_every=1,
            save_every=STEPS,
        ),
        evaluation=Evaluation(max_examples=150),
        vocabulary=synthetic.vocabulary(directory),
    )


def call(*arguments):
    result = CliRunner().invoke(app, list(map(str, arguments)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def losses(directory):
    records = read_metrics(directory / METRICS_FILE)
    return {r["step"]: r["loss"] for r in records if r["kind"] == "train"}


def test_a_classifier_learns_a_task_from_text_to_report(synthetic_data, tmp_path):
    train_it = functools.partial(
        run, data_dir=synthetic_data, visible=False, devices=jax.devices()[:1]
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    state = train_it(recipe(synthetic_data), whole)
    train_it(recipe(synthetic_data, STEPS // 2), parts)
    again = train_it(recipe(synthetic_data), parts)
    assert losses(parts) == losses(whole)
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)

    evaluated = [r for r in read_metrics(whole / METRICS_FILE) if r["kind"] == "eval"][-1]
    assert evaluated["score"] == evaluated["synthetic_sst2/accuracy"] > 80
    assert evaluated["loss"] == evaluated["label_loss"] < 0.7 * evaluated["label_prior_entropy"]

    data = ("--workdir", whole, "--data-dir", synthetic_data)
    assert "synthetic_sst2" in call("eval", *data, "--save-predictions")
    saved = whole / "evaluation" / str(STEPS) / "synthetic_sst2.jsonl"
    lines = [json.loads(line) for line in saved.read_text().splitlines()]
    right = np.mean([line["prediction"] == line["target"] for line in lines])
    assert 100 * right == pytest.approx(evaluated["score"])

    page = tmp_path / "report.html"
    call("report", whole, parts, "--output", page)
    assert "sst2" in page.read_text(encoding="utf-8")


def test_a_classifier_starts_from_a_masked_language_model(tmp_path):
    masked = experiment(encoder(masked_lm=True))
    trainer = Trainer(masked, jax.devices()[:1])
    with StopSignal() as stop:
        source = train(trainer, MaskedStream(), tmp_path / "masked", stop=stop, visible=False)
    assert finished_steps(tmp_path / "masked" / "checkpoints")
    save_experiment(masked, tmp_path / "masked")
    rules = (InitRule("output_dense/.*", "fresh"),)
    classifier = experiment(init_from=str(tmp_path / "masked"), init_rules=rules)
    state = initialize_from_checkpoint(
        Trainer(classifier, jax.devices()[:1]).init(),
        experiment=classifier,
        report=lambda _: None,
    )
    for name in ("embedding", "encoder"):
        jax.tree.map(np.testing.assert_array_equal, state.params[name], source.params[name])
    assert set(state.params) == {"embedding", "encoder", "output_dense"}
