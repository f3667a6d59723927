"""Tests tasks and mixtures that a user's package has added to SeqIO's registries."""

import dataclasses
import functools

import flax
import numpy as np
import pytest
import seqio
import tensorflow as tf

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import Bytes
from synthesizer_jax.evaluation.evaluation_sets import evaluation_tasks
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.seqio_tasks import _outputs_for, seqio_vocabulary
from synthesizer_jax.tasks.splits import SplitRequest, is_current, open_stream
from synthesizer_jax.tasks.task import Answers
from tests.tasks.loading import load, quiet

LENGTHS = {"inputs": 16, "targets": 8}
COUNTS = {"train": 12, "validation": 5}


def numbers(split, shuffle_files, seed=None):
    del shuffle_files, seed
    return tf.data.Dataset.range(COUNTS[split])


def double(dataset):
    """Makes rows whose target is twice the number in the input."""
    return dataset.map(
        lambda n: {
            "inputs": tf.strings.join(["twice ", tf.strings.as_string(n)]),
            "targets": tf.strings.as_string(2 * n),
            "number": n,
        }
    )


def to_integer(answer, example=None, is_target=False):
    del is_target
    assert 0 <= int(example["number"]) < 12
    return int(answer) if answer.isdecimal() else -1


def closeness(targets, predictions):
    return {"distance": float(np.abs(np.subtract(targets, predictions)).mean())}


def confidence(targets, scores):
    del targets
    return {"log_probability": seqio.metrics.Scalar(float(np.mean(scores)))}


def both(targets, predictions, aux_values):
    del targets, predictions
    return {
        "mean_score": float(np.mean(aux_values["scores"])),
        "shown": seqio.metrics.Text("not a number"),
    }


@flax.struct.dataclass
class MeanLength(seqio.metrics.Metric):
    """A `Metric` object over token ids."""

    model_output_type: seqio.metrics.ModelOutputType = seqio.metrics.ModelOutputType.PREDICTION
    total: float = 0.0
    count: int = 0

    @classmethod
    def from_model_output(cls, inputs, model_output, features, target_field_name="targets"):
        assert features[target_field_name].vocabulary.vocab_size == Bytes().build().vocab_size
        return cls(total=float((np.asarray(model_output) > 0).sum()), count=len(inputs))

    def compute(self):
        return {"length": self.total / self.count}


@pytest.fixture(scope="module")
def registered():
    """Two tasks, a task without data, and a nested mixture, which use a SeqIO vocabulary."""
    feature = seqio.Feature(seqio.PassThroughVocabulary(99), add_eos=True)
    steps = [double, seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder()]
    steps.append(seqio.preprocessors.append_eos_after_trim)
    source = seqio.FunctionDataSource(numbers, splits=list(COUNTS), num_input_examples=COUNTS)
    add = functools.partial(seqio.TaskRegistry.add, output_features=dict.fromkeys(LENGTHS, feature))
    add(
        "outside_double",
        source=source,
        preprocessors=steps,
        postprocess_fn=to_integer,
        metric_fns=[closeness, confidence, both],
        metric_objs=[MeanLength()],
    )
    add("outside_plain", source=source, preprocessors=steps)
    add("outside_missing", source=seqio.TfdsDataSource("absent/data:1.0.0"), preprocessors=steps)
    seqio.MixtureRegistry.add("outside_part", [("outside_plain", 1.0), ("outside_missing", 9.0)])
    own_rate = ("outside_double", seqio.mixing_rate_num_examples)
    seqio.MixtureRegistry.add("outside_all", [own_rate, ("outside_part", 4)])
    seqio.MixtureRegistry.add(
        "outside_negative", [("outside_double", 2.0), ("outside_plain", -1.0)]
    )
    yield
    for name in ("outside_double", "outside_plain", "outside_missing"):
        seqio.TaskRegistry.remove(name)
    for name in ("outside_part", "outside_all", "outside_negative"):
        seqio.MixtureRegistry.remove(name)


pytestmark = pytest.mark.usefixtures("registered")


def test_a_mixture_of_mixtures_has_its_rates_and_the_runs_vocabulary(tmp_path, monkeypatch):
    vocabulary = Bytes().build()
    names = task_registry.member_names("outside_all")
    assert names == ["outside_double", "outside_missing", "outside_plain"]
    # The inner mixture has the rate 4. The task without data gets no share of it.
    rates = {"outside_double": 12.0, "outside_plain": 4.0}
    assert task_registry.mixture_rates("outside_all", tmp_path) == rates
    for name in rates:
        task = task_registry.find_task(name).to_seqio(vocabulary, tmp_path)
        assert task.output_features["targets"].vocabulary == seqio_vocabulary(vocabulary)
        original = seqio.TaskRegistry.get(name)
        assert original.output_features["targets"].vocabulary.vocab_size == 99
    config = DataConfig("outside_all", 16, 8, batch_size=4, shards=2)
    prepared = PreparedTasks(tmp_path, vocabulary)
    prepare("outside_all", prepared, log=quiet)
    assert evaluation_tasks("outside_all", prepared) == [(n, "validation") for n in rates]
    batch = next(open_stream(config, vocabulary, data_dir=tmp_path))
    for inputs, targets in zip(
        batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True
    ):
        number = int(vocabulary.decode(inputs).removeprefix("twice "))
        assert vocabulary.decode(targets) == str(2 * number)
    request = SplitRequest("outside_double", "train", rows=False)
    assert is_current(request, prepared, lengths=None)
    source = seqio.TaskRegistry.get("outside_double").source
    # Change the number of examples that the source declares.
    monkeypatch.setattr(source, "num_input_examples", lambda split: 13)
    assert not is_current(request, prepared, lengths=None)


def test_missing_tasks_and_data_give_one_sentence(tmp_path):
    data = PreparedTasks(tmp_path, Bytes().build())
    splits = {"training_splits": ("test",), "evaluation_splits": (), "log": quiet}
    assert task_registry.mixture_rates("outside_part", tmp_path) == {"outside_plain": 1.0}
    with pytest.raises(
        FileNotFoundError,
        match=r"No task of 'outside_missing' has data .* Add the split to its sou",
    ):
        prepare("outside_missing", data, log=quiet)
    with pytest.raises(
        FileNotFoundError, match=r"of 'outside_plain' .*that have data are train, valid"
    ):
        prepare("outside_plain", data, **splits)
    negative = (
        "'outside_negative' gives the task 'outside_plain' the rate -1, .* must be finite and at "
        "least 0"
    )
    with pytest.raises(ValueError, match=negative):
        prepare("outside_negative", data, log=quiet)
    # Save rates that only an earlier version would have saved.
    data.save_rates("outside_negative", {"outside_plain": -1.0})
    with pytest.raises(ValueError, match=negative):
        data.rates("outside_negative")
    with pytest.raises(
        ValueError, match=r"no mixture or task 'outside_al', did you mean .*your own package"
    ):
        task_registry.member_names("outside_al")
    with pytest.raises(ValueError, match=r"There is no task 'outside_dou'"):
        task_registry.find_task("outside_dou")


def test_metrics_are_computed_by_their_own_rules(tmp_path):
    vocabulary = Bytes().build()
    examples = load("outside_double", "validation", tmp_path, lengths=LENGTHS)
    assert examples.task.scores_targets and examples.task.label_words is None
    assert examples.target_words == ["0", "2", "4", "6", "8"]
    texts = ["0", "3", "4", "no", "8"]
    tokens = [np.array(vocabulary.encode(text)) for text in texts]
    scores = -np.arange(1.0, 6.0)
    target_scores = np.array([-0.5] * 4 + [-3.0])
    answers = Answers(texts, tokens, scores=scores, target_scores=target_scores)
    assert examples.score(answers) == {
        "distance": pytest.approx((0 + 1 + 0 + 7 + 0) / 5),
        "log_probability": pytest.approx(-1.0),
        "mean_score": pytest.approx(-3.0),
        "length": pytest.approx(6 / 5),
    }
    shown = {"input": "twice 3", "target": "6", "prediction": "no"}
    assert examples.record(3, "no") == {"idx": 3, **shown, "label": -1, "target_label": 6}
    plain = load("outside_plain", "validation", tmp_path, lengths=LENGTHS)
    assert plain.score(texts) == {}


def worded(targets, predictions):
    del targets, predictions
    return {"quality": "good"}


def only_digits(text, **_):
    return int(text)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"postprocess_fn": only_digits, "metric_fns": [closeness]},
            "ValueError: invalid literal for int",
        ),
        (
            {"metric_fns": [worded]},
            "TypeError: The value 'quality' is 'good', which is not a number",
        ),
    ],
)
def test_errors_of_users_functions_name_task_and_function(tmp_path, functions, message):
    examples = load("outside_double", "validation", tmp_path, lengths=LENGTHS)
    original = seqio.TaskRegistry.get("outside_double")
    parts = {"source": original.source, "preprocessors": original.preprocessors}
    seqio.TaskRegistry.add(
        "outside_wrong", output_features=original.output_features, **parts, **functions
    )
    try:
        wrong = dataclasses.replace(examples, task=task_registry.find_task("outside_wrong"))
        named = "A metric or the postprocess_fn of the task 'outside_wrong' raised "
        with pytest.raises(ValueError, match=named + message):
            wrong.score(["no"] * 5)
        if "postprocess_fn" in functions:
            with pytest.raises(
                ValueError, match="The postprocess_fn of the task 'outside_wrong' raised"
            ):
                wrong.record(0, "no")
    finally:
        seqio.TaskRegistry.remove("outside_wrong")


def test_tokens_for_metrics_are_padded_with_what_is_no_text():
    """Tokens for metrics are padded with an id that stands for no text.

    SeqIO pads with 0. If 0 is the id of unknown text, EOS marks the end of the text that metrics
    decode.
    """

    class UnknownFirst(Bytes):
        def is_text(self, id):
            return id != 1

    answers = Answers(["ab", ""], [np.array([100, 101]), np.array([], int)])
    kind = seqio.metrics.ModelOutputType.PREDICTION
    for vocabulary, padding in ((Bytes(), 0), (UnknownFirst(), 1)):
        found = _outputs_for(kind, answers, "numbers", vocabulary)
        np.testing.assert_array_equal(found, [[100, 101], [padding] * 2])


def test_a_mixture_of_rates_that_are_all_0_is_refused(tmp_path):
    seqio.MixtureRegistry.add("outside_nothing", [("outside_plain", 0.0)])
    try:
        prepare("outside_nothing", PreparedTasks(tmp_path, Bytes().build()), log=quiet)
        config = DataConfig("outside_nothing", 16, 8, batch_size=4, shards=2)
        with pytest.raises(
            ValueError, match=r"'outside_nothing' has the rate 0 .*: outside_plain\. Give"
        ):
            open_stream(config, Bytes().build(), data_dir=tmp_path)
    finally:
        seqio.MixtureRegistry.remove("outside_nothing")


def test_features_that_are_no_tokens_are_refused(tmp_path):
    source = seqio.FunctionDataSource(numbers, splits=["train"])
    options = {"preprocessors": [], "output_features": {"targets": seqio.ContinuousFeature(rank=3)}}
    seqio.TaskRegistry.add("outside_images", source=source, **options)
    with pytest.raises(
        ValueError, match="'targets' of the task 'outside_images' is not a sequence"
    ):
        task_registry.find_task("outside_images").to_seqio(Bytes().build(), tmp_path)
    seqio.TaskRegistry.remove("outside_images")
