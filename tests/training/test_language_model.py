"""Tests whole runs of language models: training, evaluation of the loss, and files."""

import json

import jax
import numpy as np
import pytest

from synthesizer_jax.base.registry import replace
from synthesizer_jax.costs.utilization import step_flops
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.scoring import write_predictions
from synthesizer_jax.models import Encoder, Size, alignment, t5
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.training.run import open_evaluator, run
from tests.data import small
from tests.training.tiny import experiment, logged

SIZE = Size(16, 1, 32, 2, 8)
LENGTH = 32
VOCAB = Bytes().build().vocab_size
KIND = alignment("rv", head_dim=8, max_length=LENGTH)
MODELS = {
    "language model": language_model("rv", SIZE).copy(vocab_size=VOCAB),
    "masked": Encoder(
        vocab_size=VOCAB, d_model=16, encoder=t5(SIZE, encoder=KIND).encoder, masked_lm=True
    ),
    "spans": t5(SIZE, encoder=KIND, vocab_size=VOCAB),
}


def recipe(name, *, objective=None, pack=False, **changes):
    inputs = 0 if name == "language model" else LENGTH
    data = {"inputs_length": inputs, "targets_length": LENGTH, "pack": pack}
    data["objective"] = None if objective is None else OBJECTIVES[objective]
    made = experiment(MODELS[name], data=data, steps=6, save_every=3, **changes)
    return replace(made, data=replace(made.data, mixture="small_texts", shards=2))


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    return folder


def trained(wanted, data_dir, directory):
    """Trains a model, and returns the results of the last evaluation, and the evaluator.

    The function checks that a new evaluator gives the same results.
    """
    state = run(wanted, directory, data_dir=data_dir, visible=False)
    losses = list(logged(directory).values())
    assert len(losses) == 6 and np.isfinite(losses).all() and losses[-1] < losses[0]
    evaluator = open_evaluator(wanted, directory, data_dir)
    results, _ = evaluator.measure(state.variables)
    perplexity = logged(directory, "small_letters/perplexity", "eval")[6]
    assert results[0].text_metrics["perplexity"] == pytest.approx(perplexity)
    return state, results, evaluator


def test_texts_are_evaluated_by_their_loss(data_dir, tmp_path):
    """Models of texts are evaluated by their loss.

    The test checks the results, the log, the files of predictions, and the score of checkpoints.
    """
    directory = tmp_path / "run"
    wanted = recipe("language model", every=2, pack=True, evaluation={"loss_batches": 1})
    _, results, evaluator = trained(wanted, data_dir, directory)
    losses, scores = (logged(directory, name, "eval") for name in ("loss", "score"))
    assert list(losses) == [2, 4, 6] and losses[6] < losses[2]
    assert scores == {step: -loss for step, loss in losses.items()}
    own = logged(directory, "small_letters/loss", "eval")
    perplexity = logged(directory, "small_letters/perplexity", "eval")
    assert perplexity == pytest.approx({step: np.exp(loss) for step, loss in own.items()})
    written = json.loads((directory / "evaluation" / "6" / "results.json").read_text())
    names = {"perplexity", "word_perplexity", "bits_per_byte"}
    assert all(set(task["metrics"]) == names for task in written["tasks"])
    path = write_predictions(tmp_path, results[0], examples=evaluator.sets[0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[1].keys() == {"idx", "input", "target", "score"}
    assert {line["target"].split()[1] for line in lines} == set("01234")
    assert sum(line["score"] for line in lines) == pytest.approx(-5 * results[0].loss.nats)


def test_a_masked_language_model_is_evaluated_where_tokens_are_masked(data_dir, tmp_path):
    wanted = recipe("masked", objective="masked_lm")
    state, results, evaluator = trained(wanted, data_dir, tmp_path)
    apply = jax.jit(wanted.model.apply)
    for examples, result in zip(evaluator.sets, results, strict=True):
        nats, count = 0.0, 0
        for inputs, targets in zip(examples.inputs, examples.targets, strict=True):
            padded = np.pad(inputs, (0, LENGTH - len(inputs)))[None]
            logits = apply(state.variables, padded).token_logits[0]
            log_z = np.logaddexp.reduce(np.asarray(logits, np.float64), axis=-1)
            for i in np.flatnonzero(targets):
                nats += log_z[i] - float(logits[i, targets[i]])
            count += np.count_nonzero(targets)
        assert 0 < count < 0.2 * sum(map(len, examples.inputs))
        assert result.text_metrics["perplexity"] == pytest.approx(np.exp(nats / count), rel=1e-4)


def test_an_objective_pre_trains_and_is_evaluated(data_dir, tmp_path):
    """A model is pre-trained with an objective and evaluated by the loss.

    The objective also makes the evaluation examples from the held-out texts.
    """
    _, results, evaluator = trained(recipe("spans", objective="span_3_15_u_u"), data_dir, tmp_path)
    assert "bits_per_byte" not in results[0].text_metrics
    inputs = sum(1 < i < 259 for row in evaluator.sets[0].inputs for i in row)
    whole = sum(len(small.text("letters", i)) for i in range(5))
    assert 0.8 * whole < inputs < 0.9 * whole


def test_flops_of_a_row_of_targets():
    """A row of only targets has as many FLOPs as a row whose tokens are inputs and targets."""
    model = MODELS["language model"]
    one = step_flops(model, batch_size=8, inputs=0, targets=32)
    assert one == step_flops(model, batch_size=4, inputs=0, targets=32) * 2 > 0
