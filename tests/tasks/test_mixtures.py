"""From original files to registered tasks, streams and scored evaluation sets, without network."""

import json

import numpy as np
import pytest

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.data.vocabularies import (
    Bytes,
    SentencePiece,
    train_sentencepiece,
)
from synthesizer_jax.evaluation import evaluation_sets
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.importers import import_benchmark
from synthesizer_jax.tasks.mixtures import C4, MIXTURES, UNSUPERVISED_RATE, ExamplesRate
from synthesizer_jax.tasks.prepare import prepare
from synthesizer_jax.tasks.streams import open_stream
from tests.tasks.loading import load, quiet

LENGTHS = {"inputs": 64, "targets": 8}
SUPER_GLUE = "super_glue_v102_proportional"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """BoolQ with 40 + 20 made rows, imported from files that are known as samples."""
    source, target = (tmp_path_factory.mktemp(n) for n in ("original", "prepared"))
    folder = source / "BoolQ"
    folder.mkdir()
    for name, rows in (("fewglue32_train", 40), ("fewglue32_dev32", 20)):
        lines = [
            {"question": f"is {i} even", "passage": f"{i} is a number.", "idx": i,
             "label": i % 2 == 0}
            for i in range(rows)
        ]  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)
    import_benchmark("super_glue", source, target)
    return target


@pytest.fixture(scope="module")
def vocabulary():
    return Bytes().build()


def test_only_what_is_there_takes_part(data_dir, vocabulary, caplog):
    boolq = task_registry.find_task("super_glue_boolq_v102")
    assert boolq.stored_splits(data_dir) == {"train": 40, "validation": 20}
    assert task_registry.mixture_rates(SUPER_GLUE, data_dir) == {"super_glue_boolq_v102": 9427.0}
    prepared = PreparedTasks(data_dir, vocabulary)
    prepare(SUPER_GLUE, prepared, log=quiet)
    open_stream(DataConfig(SUPER_GLUE, 64, 8, batch_size=8), vocabulary, data_dir=data_dir)
    assert "goes without" in caplog.text and "super_glue_copa_v102" in caplog.text
    pairs = evaluation_sets.evaluation_tasks(SUPER_GLUE, prepared)
    assert pairs == [("super_glue_boolq_v102", "validation")]


def test_missing_data_is_one_sentence_with_the_remedy(data_dir, vocabulary):
    prepared = PreparedTasks(data_dir, vocabulary)
    with pytest.raises(FileNotFoundError, match="synthesizer-jax data import glue --from DIR"):
        prepare("glue_v002_proportional", prepared, log=quiet)
    with pytest.raises(
        FileNotFoundError, match=r"for the split test in .*it has train, validation"
    ):
        load("super_glue_boolq_v102", "test", data_dir, vocabulary=vocabulary)
    with pytest.raises(
        FileNotFoundError, match=r"'test' is not prepared in .*; run 'synthesizer-jax"
    ):
        evaluation_sets.load_evaluation_set(
            "super_glue_boolq_v102", "test", prepared, lengths=LENGTHS
        )


def test_training_batches_hold_the_tasks_examples(data_dir, vocabulary):
    config = DataConfig(SUPER_GLUE, 64, 8, batch_size=8, shards=2)
    prepare(SUPER_GLUE, PreparedTasks(data_dir, vocabulary), log=quiet)
    stream = open_stream(config, vocabulary, data_dir=data_dir)
    texts = set()
    for _ in range(10):
        batch = next(stream)
        assert batch["encoder_input_tokens"].shape == (8, 64)
        assert batch["decoder_loss_weights"].dtype == np.float32
        for source, target in zip(
            batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True
        ):
            question, answer = (vocabulary.decode(x[x != 0].tolist()) for x in (source, target))
            number = int(question.split()[2])
            assert question.startswith(
                f"boolq passage: {number} is a number. question: is {number}"
            )
            assert answer == str(number % 2 == 0)
            texts.add(question)
    assert len(texts) == 40  # two epochs saw every row


def test_evaluation_sets_are_in_order_and_scored(data_dir, vocabulary):
    name, options = "super_glue_boolq_v102", {"vocabulary": vocabulary, "max_examples": 8}
    examples = load(name, "validation", data_dir, lengths=LENGTHS, **options)
    assert examples.target_words == ["True", "False"] * 4
    assert examples.label_words == ("False", "True")
    assert examples.score(["True"] * 8) == {"accuracy": 50.0}
    assert examples.score(examples.target_words) == {"accuracy": 100.0}
    assert examples.score(["true"] * 8) == {"accuracy": 0.0}
    assert all(ids[-1] == 1 for ids in examples.inputs)
    with pytest.raises(ValueError, match="3 predictions for 8 examples"):
        examples.score(["True"] * 3)
    entropy = evaluation_sets.label_prior_entropy([(examples, 2.0), (examples, 1.0)])
    assert entropy == {"per_task": pytest.approx(np.log(2)), "joint": pytest.approx(np.log(2))}


def test_evaluation_only_twins_stand_for_the_trained_task():
    weight, joint = evaluation_sets.loss_weight, MIXTURES["glue_super_glue_proportional"]
    assert weight(joint, "glue_mnli_matched_v002") == 392_702 / 2
    assert weight(joint, "super_glue_wsc_v102_simple_eval") == 259
    assert weight(joint, "glue_ax_v002") == 0
    assert weight(joint, "super_glue_rte_v102") == 1245


def test_rates_are_t5s():
    fixed = [name for name in MIXTURES if "proportional" in name and "leave" not in name]
    rates = {name: list(MIXTURES[name].values()) for name in fixed}
    totals = {
        n: sum(r) for n, r in rates.items() if not any(isinstance(x, ExamplesRate) for x in r)
    }
    assert totals["glue_v002_proportional"] == 949_101
    assert totals["super_glue_v102_proportional"] == 185_673
    assert totals["super_glue_v102_proportional_sentinel"] == 185_673
    assert totals["wsc_dpr_simple_proportional"] == 1_581
    assert totals["glue_super_glue_proportional"] == 949_101 + 185_673 - 2_490
    members = {name for rates in MIXTURES.values() for name in rates}
    assert members <= set(task_registry.TASKS)


def test_rates_by_examples_are_those_of_the_data_that_is_there(data_dir):
    assert task_registry.mixture_rates("en_mix", data_dir) == {"super_glue_boolq_v102": 40.0}
    assert MIXTURES["en_mix"][C4] == UNSUPERVISED_RATE
    assert ExamplesRate(ceiling=36, temperature=2, scale=2)(40) == 6
    with pytest.raises(ValueError, match=r"ExamplesRate\.temperature is 0; it must be positive"):
        ExamplesRate(temperature=0)


@pytest.mark.slow
def test_whole_multirc_questions(real_data, tmp_path):
    (tmp_path / "super").mkdir()
    (tmp_path / "super" / "MultiRC").symlink_to(real_data / "super_glue" / "MultiRC")
    import_benchmark("super_glue", tmp_path / "super", tmp_path / "data")
    name, data = "super_glue_multirc_v102", tmp_path / "data"
    examples = load(name, "validation", data, lengths=LENGTHS, max_examples=10)
    groups = [(int(e["idx/paragraph"]), int(e["idx/question"])) for e in examples.examples]
    everything = load(name, "validation", data, lengths=LENGTHS)
    whole = [(int(e["idx/paragraph"]), int(e["idx/question"])) for e in everything.examples]
    assert len(whole) == 4848
    assert 10 <= len(groups) < 30
    assert all(groups.count(g) == whole.count(g) for g in groups)
    assert everything.score(everything.target_words) == {"f1": 100.0, "exact_match": 100.0}


def test_sentencepiece_is_trained_aside_and_has_t5s_ids(tmp_path):
    path = tmp_path / "sub" / "mine.model"
    texts = [f"the {a} {b} sees a {c}" for a in "abc" for b in ("dog", "cat") for c in "xyz"]
    train_sentencepiece(texts, path, vocab_size=18)
    vocabulary = SentencePiece(str(path), extra_ids=4).build()
    assert vocabulary.vocab_size == 22
    assert vocabulary.unk_id == 2
    assert vocabulary.decode(vocabulary.encode("the a dog")) == "the a dog"
    good = path.read_bytes()
    with pytest.raises(ValueError, match="vocab_size=4000 cannot be trained"):
        train_sentencepiece(texts, path, vocab_size=4000)
    assert path.read_bytes() == good
    assert [p.name for p in path.parent.iterdir()] == ["mine.model"]
    with pytest.raises(FileNotFoundError, match=r"no SentencePiece model nothing\.model"):
        SentencePiece("nothing.model").build()
