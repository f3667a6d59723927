"""From original files to registered tasks, streams and scored evaluation sets, without network."""

import json

import numpy as np
import pytest

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.vocabularies import (
    Bytes,
    SentencePiece,
    train_sentencepiece,
)
from synthesizer_jax.evaluation import evaluation_sets
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.importers import import_benchmark
from synthesizer_jax.tasks.mixtures import C4, MIXTURES, UNSUPERVISED_RATE, ExamplesRate
from synthesizer_jax.tasks.streams import open_stream

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


def test_only_what_is_prepared_takes_part(data_dir, caplog):
    assert task_registry.prepared_splits("super_glue_boolq_v102", data_dir) == {
        "train": 40,
        "validation": 20,
    }
    assert task_registry.available_members(SUPER_GLUE, data_dir) == {"super_glue_boolq_v102": 9427.0}
    rates = task_registry.sampled_members(SUPER_GLUE, data_dir, "train")
    assert rates == {"super_glue_boolq_v102": 9427.0}
    assert "goes without" in caplog.text
    assert "super_glue_copa_v102" in caplog.text
    pairs = evaluation_sets.evaluation_tasks(SUPER_GLUE, data_dir)
    assert pairs == [("super_glue_boolq_v102", "validation")]


def test_missing_data_is_one_sentence_with_the_remedy(data_dir, tmp_path, vocabulary):
    with pytest.raises(FileNotFoundError, match="synthesizer-jax data import glue --from DIR"):
        task_registry.sampled_members("glue_v002_proportional", data_dir, "train")
    with pytest.raises(FileNotFoundError, match=r"no split 'test' .*found: train, validation"):
        evaluation_sets.load_evaluation_set(
            "super_glue_boolq_v102", "test", vocabulary, data_dir=data_dir, lengths=LENGTHS
        )


def test_training_batches_hold_the_tasks_examples(data_dir, vocabulary):
    config = DataConfig(SUPER_GLUE, 64, 8, batch_size=8, shards=2)
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
    examples = evaluation_sets.load_evaluation_set(
        "super_glue_boolq_v102",
        "validation",
        vocabulary,
        data_dir=data_dir,
        lengths=LENGTHS,
        max_examples=8,
    )
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
    totals = {name: sum(task_registry.mixture_rates(name).values()) for name in fixed}
    assert totals["glue_v002_proportional"] == 949_101
    assert totals["super_glue_v102_proportional"] == 185_673
    assert totals["super_glue_v102_proportional_sentinel"] == 185_673
    assert totals["wsc_dpr_simple_proportional"] == 1_581
    assert totals["glue_super_glue_proportional"] == 949_101 + 185_673 - 2_490
    members = {name for rates in MIXTURES.values() for name in rates}
    assert members <= set(task_registry.TASKS)


def test_rates_by_examples_are_those_of_the_prepared_data(data_dir, caplog, monkeypatch):
    rates = task_registry.sampled_members("en_mix", data_dir, "train")
    assert rates == {"super_glue_boolq_v102": 40.0}
    assert "goes without" in caplog.text and C4 in caplog.text
    assert "mnli_matched" not in caplog.text  # it is only evaluated
    monkeypatch.setenv("SYNTHESIZER_DATA_DIR", str(data_dir))
    mixed = task_registry.mixture_rates("en_mix")
    assert mixed["super_glue_boolq_v102"] == 40 and mixed["glue_cola_v002"] == 0
    assert mixed[C4] == UNSUPERVISED_RATE
    assert ExamplesRate(ceiling=36, temperature=2, scale=2)(40) == 6
    with pytest.raises(ValueError, match=r"ExamplesRate\.temperature is 0; it must be positive"):
        ExamplesRate(temperature=0)


@pytest.mark.slow
def test_whole_multirc_questions(real_data, tmp_path, vocabulary):
    (tmp_path / "super").mkdir()
    (tmp_path / "super" / "MultiRC").symlink_to(real_data / "super_glue" / "MultiRC")
    import_benchmark("super_glue", tmp_path / "super", tmp_path / "data")
    examples = evaluation_sets.load_evaluation_set(
        "super_glue_multirc_v102",
        "validation",
        vocabulary,
        data_dir=tmp_path / "data",
        lengths=LENGTHS,
        max_examples=10,
    )
    groups = [(int(e["idx/paragraph"]), int(e["idx/question"])) for e in examples.examples]
    everything = evaluation_sets.load_evaluation_set(
        "super_glue_multirc_v102",
        "validation",
        vocabulary,
        data_dir=tmp_path / "data",
        lengths=LENGTHS,
    )
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
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, 2)
    assert vocabulary.decode(vocabulary.encode("the a dog")) == "the a dog"
    good = path.read_bytes()
    with pytest.raises(ValueError, match="vocab_size=4000 cannot be trained"):
        train_sentencepiece(texts, path, vocab_size=4000)
    assert path.read_bytes() == good
    assert [p.name for p in path.parent.iterdir()] == ["mine.model"]
    with pytest.raises(FileNotFoundError, match=r"no SentencePiece model nothing\.model"):
        SentencePiece("nothing.model").build()
