"""Tests the path from imported files to mixtures, streams and evaluation sets with scores."""

import json

import pytest

from synthesizer_jax.data.config import DataConfig
from synthesizer_jax.data.prepared import PreparedTasks
from synthesizer_jax.evaluation import evaluation_sets
from synthesizer_jax.preparation.importers.corpora import import_archive
from synthesizer_jax.preparation.prepare import prepare
from synthesizer_jax.tasks import task_registry
from synthesizer_jax.tasks.mixtures import MIXTURES, ExamplesRate
from synthesizer_jax.tasks.splits import open_stream
from tests.tasks.loading import BYTES, load, quiet

LENGTHS = {"inputs": 64, "targets": 8}
SUPER_GLUE, BOOLQ = "super_glue_v102_proportional", "super_glue_boolq_v102"


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A data directory with 40 + 20 rows of BoolQ, imported and prepared."""
    source, target = (tmp_path_factory.mktemp(n) for n in ("original", "prepared"))
    (source / "BoolQ").mkdir()
    for name, rows in (("train", 40), ("val", 20)):
        lines = [
            {
                "question": f"is {i} even",
                "passage": f"{i} is a number.",
                "idx": i,
                "label": i % 2 == 0,
            }
            for i in range(rows)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (source / f"BoolQ/{name}.jsonl").write_text(text)
    import_archive("super_glue", source, target)
    prepare(SUPER_GLUE, PreparedTasks(target, BYTES), log=quiet)
    return target


def test_only_existing_data_takes_part_in_a_mixture(data_dir, caplog):
    assert task_registry.find_task(BOOLQ).stored_splits(data_dir) == {"train": 40, "validation": 20}
    assert task_registry.mixture_rates(SUPER_GLUE, data_dir) == {BOOLQ: 9427.0}
    assert task_registry.mixture_rates("en_mix", data_dir) == {BOOLQ: 40.0}
    stream = open_stream(DataConfig(SUPER_GLUE, 64, 8, batch_size=8), BYTES, data_dir=data_dir)
    assert "is used without" in caplog.text and "super_glue_copa_v102" in caplog.text
    texts = set()
    for batch in (next(stream) for _ in range(10)):
        for source, goal in zip(
            batch["encoder_input_tokens"], batch["decoder_target_tokens"], strict=True
        ):
            question, answer = (BYTES.decode(x[x != 0].tolist()) for x in (source, goal))
            number = int(question.split()[2])
            assert question.startswith(f"boolq passage: {number} is a number. question: is")
            assert answer == str(number % 2 == 0)
            texts.add(question)
    assert len(texts) == 40  # two epochs have seen all rows


def test_missing_data_gives_one_sentence_with_the_remedy(data_dir):
    prepared = PreparedTasks(data_dir, BYTES)
    with pytest.raises(
        FileNotFoundError, match=r"Import glue/cola with .synthesizer-jax data import"
    ):
        prepare("glue_v002_proportional", prepared, log=quiet)
    with pytest.raises(
        FileNotFoundError, match=r"the split test in .*that have data are train, validation"
    ):
        load(BOOLQ, "test", data_dir)
    with pytest.raises(
        FileNotFoundError, match=r"'test' .* is not prepared in .*\. Run 'synthesizer"
    ):
        evaluation_sets.load_evaluation_set(BOOLQ, "test", prepared, lengths=LENGTHS)


def test_a_mixture_names_tasks_and_gives_them_rates(monkeypatch):
    monkeypatch.setattr(task_registry, "MIXTURES", {})
    task_registry.add([], {"mine": {"glue_colla_v002": 1.0}})
    with pytest.raises(
        ValueError, match=r"no task 'glue_colla_v002', did you mean 'glue_cola_v002'"
    ):
        task_registry.member_names("mine")
    for rate in (-1.0, 0.0):
        with pytest.raises(
            ValueError, match=r"The rates of the mixture 'mine' are .* No rate may be below 0"
        ):
            task_registry.add([], {"mine": {"glue_cola_v002": rate}})


def test_evaluated_twins_stand_for_the_trained_task():
    joint = MIXTURES["glue_super_glue_proportional"]
    assert {name for rates in MIXTURES.values() for name in rates} <= set(task_registry.TASKS)
    weight = evaluation_sets.loss_weight
    assert weight(joint, "glue_mnli_matched_v002") == 392_702 / 2
    assert weight(joint, "super_glue_wsc_v102_simple_eval") == 259
    assert weight(joint, "glue_ax_v002") == 0
    assert weight(joint, "super_glue_rte_v102") == 1245
    assert ExamplesRate(ceiling=36, temperature=2, scale=2)(40) == 6
