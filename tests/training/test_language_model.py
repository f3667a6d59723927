"""Language models that are trained on texts alone, through the loop."""

import json
import pathlib

import numpy as np
import pytest

from synthesizer_jax.costs.utilization import step_flops
from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.evaluator import Evaluator
from synthesizer_jax.models import Encoder, EncoderDecoder, Size, alignment, t5
from synthesizer_jax.models.zoo import language_model
from synthesizer_jax.optimizers import AdamW, Constant
from synthesizer_jax.registry import from_json, replace, to_json
from synthesizer_jax.training.experiment import Evaluation, Experiment, Training
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_data import open_data
from tests.data import small

SIZE = Size(16, 1, 32, 2, 8)


def experiment(variant: str = "rv", **changes) -> Experiment:
    model = language_model(variant, SIZE)
    data = DataConfig(
        "small_texts",
        inputs_length=0,
        targets_length=32,
        batch_size=8,
        shards=2,
        **{k: changes.pop(k) for k in tuple(changes) if k in DataConfig.__dataclass_fields__},
    )
    training = Training(steps=6, optimizer=AdamW(learning_rate=Constant(0.01)), log_every=1)
    return Experiment(
        model=replace(model, vocab_size=Bytes().build().vocab_size),
        data=data,
        training=replace(training, save_every=3),
        vocabulary=Bytes(),
        evaluation=Evaluation(batch_size=4, **changes),
    )


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tfds")
    small.write(folder)
    return folder


def log(directory: pathlib.Path, kind: str = "train") -> list[dict]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("pack", [False, True])
def test_a_language_model_is_trained_on_targets_alone(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, pack: bool
) -> None:
    wanted = experiment(pack=pack)
    assert from_json(to_json(wanted)) == wanted
    state = run(wanted, tmp_path / "run", data_dir=data_dir, visible=False)
    losses = [record["loss"] for record in log(tmp_path / "run")]
    assert int(state.step) == 6 and len(losses) == 6
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_flops_of_a_row_of_targets() -> None:
    """As many as with the same number of tokens on two sides."""
    model = experiment("v").model
    one = step_flops(model, batch_size=8, inputs=0, targets=32)
    assert one is not None
    assert one == step_flops(model, batch_size=4, inputs=0, targets=32) * 2 > 0


def test_an_encoder_needs_inputs() -> None:
    model = t5(SIZE, vocab_size=32)
    assert isinstance(model, EncoderDecoder)
    with pytest.raises(ValueError, match=r"data\.inputs_length is 0.*train a LanguageModel"):
        replace(experiment(), model=model)


@pytest.mark.slow
def test_texts_are_evaluated_by_their_loss(data_dir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Results, log, files of predictions, and the score by which checkpoints are kept."""
    from synthesizer_jax.evaluation.files import write_predictions

    wanted = experiment(every=2, loss_batches=1)
    directory = tmp_path / "run"
    state = run(wanted, directory, data_dir=data_dir, visible=False)
    records = log(directory, "eval")
    assert [record["step"] for record in records] == [2, 4, 6]
    for record in records:
        assert record["score"] == -record["loss"]
        loss = record["small_letters/loss"]
        assert record["small_letters/perplexity"] == pytest.approx(np.exp(loss))
    assert records[-1]["loss"] < records[0]["loss"]
    written = json.loads((directory / "evaluation" / "6" / "results.json").read_text())
    names = {"perplexity", "word_perplexity", "bits_per_byte"}
    assert all(set(task["metrics"]) == names for task in written["tasks"])

    evaluator = open_data(wanted, directory, data_dir)
    results, _ = evaluator.measure(state.variables)
    path = write_predictions(tmp_path, results[0], examples=evaluator.sets[0])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 5
    assert lines[1].keys() == {"idx", "input", "target", "score"}
    assert {line["target"].split()[1] for line in lines} == set("01234")
    assert sum(line["score"] for line in lines) == pytest.approx(-5 * results[0].loss.nats)


@pytest.mark.slow
def test_a_masked_language_model_is_evaluated_where_tokens_are_masked(
    data_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    wanted = experiment(objective=OBJECTIVES["masked_lm"])
    encoder = t5(SIZE, encoder=alignment("v", head_dim=SIZE.head_dim)).encoder
    model = Encoder(vocab_size=359, d_model=16, encoder=encoder, masked_lm=True)
    wanted = replace(wanted, model=model, data=replace(wanted.data, inputs_length=32))
    state = run(wanted, tmp_path / "run", data_dir=data_dir, visible=False)
    (record,) = log(tmp_path / "run", "eval")

    evaluator = open_data(wanted, tmp_path / "run", data_dir)
    results, _ = evaluator.measure(state.variables)
    for examples, result in zip(evaluator.sets, results, strict=True):
        nats, count = 0.0, 0
        for inputs, targets in zip(examples.inputs, examples.targets, strict=True):
            logits = model.apply(state.variables, inputs[None]).token_logits[0]
            log_z = np.logaddexp.reduce(np.asarray(logits, np.float64), axis=-1)
            for i in np.flatnonzero(targets):
                nats += log_z[i] - float(logits[i, targets[i]])
            count += np.count_nonzero(targets)
        assert 0 < count < 0.2 * sum(map(len, examples.inputs))
        assert result.text_metrics["perplexity"] == pytest.approx(np.exp(nats / count), rel=1e-4)
        assert record[f"{result.task}/loss"] == pytest.approx(nats / count, rel=1e-4)
    assert record["score"] == -record["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["span_3_15_u_u", "full_lm"])
def test_an_objective_pre_trains_and_is_evaluated(
    data_dir: pathlib.Path, tmp_path: pathlib.Path, objective: str
) -> None:
    """By the loss of what it makes of the held-out texts, or of the texts where that is the same."""
    wanted = experiment(objective=OBJECTIVES[objective], pack=objective == "full_lm")
    if objective != "full_lm":
        model = t5(SIZE, encoder=alignment("rv", head_dim=8, max_length=32), vocab_size=359)
        wanted = replace(wanted, model=model, data=replace(wanted.data, inputs_length=32))
    state = run(wanted, tmp_path / "run", data_dir=data_dir, visible=False)
    losses = [record["loss"] for record in log(tmp_path / "run")]
    assert losses[-1] < losses[0]
    (record,) = log(tmp_path / "run", "eval")
    assert record["score"] == -record["loss"]
    assert ("small_letters/bits_per_byte" in record) == (objective == "full_lm")
    evaluator = open_data(wanted, tmp_path / "run", data_dir)
    again, _ = evaluator.measure(state.variables)
    assert again[0].text_metrics["perplexity"] == pytest.approx(record["small_letters/perplexity"])
    texts_of_split = [row.decode() for row in original_texts(evaluator)]
    if objective == "full_lm":
        assert sorted(texts_of_split) == sorted(small.text("letters", i) for i in range(5))
    else:
        inputs = b"".join(
            bytes(i - 3 for i in row if 1 < i < 259) for row in evaluator.sets[0].inputs
        )
        whole = sum(len(small.text("letters", i)) for i in range(5))
        assert 0.8 * whole < len(inputs) < 0.9 * whole


def original_texts(evaluator: Evaluator) -> list[bytes]:
    return [
        row["targets_pretokenized"].encode()
        if isinstance(row["targets_pretokenized"], str)
        else row["targets_pretokenized"]
        for row in evaluator.sets[0].examples
    ]
