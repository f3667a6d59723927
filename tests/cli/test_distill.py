"""Translation from parallel text, and a student that replaces its teacher's attention, by commands."""

import json

import numpy as np
import pytest

from synthesizer_jax.checkpoints.manager import restore_variables
from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.distillation.distill import FINE_TUNED, Distillation, distill
from synthesizer_jax.registry import replace
from synthesizer_jax.tasks.importers import CORPORA, corpora, import_corpus
from synthesizer_jax.tasks.metrics import bleu
from tests.cli.commands import call
from tests.data.small import multi30k

pytestmark = pytest.mark.slow

WORDS = [("a", "ein"), ("man", "Mann"), ("woman", "Frau"), ("rides", "fährt"), ("sees", "sieht")]
SIZES = {"train": 60, "validation": 12, "test": 10}


def lines(count, language):
    side = 0 if language == "en" else 1
    picked = [[WORDS[(i * k + k) % len(WORDS)][side] for k in (1, 2, 3)] for i in range(count)]
    return "".join(" ".join(words) + ".\n" for words in picked)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny corpus in the layout of Multi30k, imported, with a vocabulary and a teacher."""
    place = tmp_path_factory.mktemp("translation")
    (place / "text").mkdir()
    for split in CORPORA["multi30k"][0].splits:
        for name in split.parts[0]:
            text = lines(SIZES[split.name], name.rpartition(".")[2])
            (place / "text" / name).write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpora, "CORPORA", {"multi30k": multi30k(SIZES)})
        said = import_corpus("multi30k", place / "text", place / "data")
    assert [s.status for s in said] == ["complete"] * 3 + ["missing"] * 6
    call(
        *("data", "vocabulary", "multi30k_en_de", "--output", place / "spm.model"),
        *("--data-dir", place / "data", "--size", 36),
    )
    small = ("--set", "data.batch_size=8", "--set", "evaluation.batch_size=8")
    call(
        *("train", "translate:vanilla", "--workdir", place / "teacher", "--quiet"),
        *("--data-dir", place / "data", "--set", f"vocabulary.path={place / 'spm.model'}"),
        *("--set", "training.steps=2", *small),
    )
    return place


def test_a_distilled_run_is_an_ordinary_one(place):
    distil = (
        *("distill", "replace_attention:alr", "--teacher", place / "teacher"),
        *("--workdir", place / "student", "--data-dir", place / "data", "--quiet"),
        *("--set", "training.steps=3", "--set", "training.log_every=1"),
    )
    call(*distil)
    call(*distil)  # finished: nothing more happens
    logged = [json.loads(x) for x in (place / "student" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in logged if r["kind"] == "train"] == [1, 2, 3]
    assert all(r["unexplained"] > 0 for r in logged if r["kind"] == "train")
    experiment = json.loads((place / "student" / "experiment.json").read_text())
    blocks = [run["block"] for run in experiment["model"]["encoder"]["runs"]]
    assert {b["self_mixer"]["type"] for b in blocks} == {"SentenceFeedForward"}
    assert (place / "student" / "distillation.json").is_file()
    shown = call(
        *("eval", "--workdir", place / "student", "--data-dir", place / "data"),
        *("--split", "test", "--method", "beam"),
    )
    assert "multi30k_en_de" in shown and "bleu" in shown
    call("generate", "--workdir", place / "student", "translate English to German: a man.")


def test_fine_tuning_starts_from_the_student_and_trains_all_of_it(place):
    recipe = load_recipe("replace_attention:random", (), kind=Distillation)
    training = replace(recipe.training, steps=2)
    recipe = replace(recipe, training=training, fine_tune=training)
    where = place / "tuned"
    distill(recipe, place / "teacher", where, data_dir=place / "data", visible=False)

    def embedding(run):
        step, variables = restore_variables(run / "checkpoints")
        assert step == 2
        return variables["params"]["embedding"]

    taught, student, tuned = map(embedding, (place / "teacher", where, where / FINE_TUNED))
    np.testing.assert_array_equal(student, taught)
    # Two steps at the schedule's peak rate move no weight far, and do move it.
    assert 0 < np.abs(tuned - student).max() < 4 * 1e-3


def test_a_corpus_that_is_not_whole_is_refused(place, tmp_path):
    with pytest.raises(
        ValueError, match=r"60 of 29,000 published rows in .*train\.en.*nothing was"
    ):
        import_corpus("multi30k", place / "text", tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())
    with pytest.raises(ValueError, match=r"lacks train\.en"):
        import_corpus("multi30k", tmp_path, tmp_path / "data")


def test_a_recipe_of_the_wrong_kind(place):
    with pytest.raises(ValueError, match="it has: none that return a Distillation"):
        call("distill", "quickstart", "--teacher", place / "teacher", "--workdir", place / "x")


def test_bleu_is_sacrebleus():
    """Papineni et al. 2002 by hand: precisions 5/6, 3/5, 2/4, 1/3 and no brevity penalty."""
    found = bleu(["the cat sat on the mat"], ["the cat sat on a mat"])["bleu"]
    assert found == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_a_synthesizer_is_fitted_distilled_and_fine_tuned(place):
    call(
        *("distill", "synthesize:random", "--teacher", place / "teacher", "--quiet"),
        *("--workdir", place / "random", "--data-dir", place / "data"),
        *("--set", "replace.0.by.max_length=32", "--set", "fit_batches=2"),
        *("--set", "training.steps=1", "--set", "fine_tune.steps=1"),
    )
    heads = json.loads((place / "random" / "fit.json").read_text())
    assert list(heads) == ["encoder/layers_0", "encoder/layers_1"]
    assert all(len(kl) == 4 and 0 <= min(kl) < max(kl) < 3 for kl in heads.values())
    _, fitted = restore_variables(place / "random" / "checkpoints")
    table = fitted["params"]["encoder"]["layers_0"]["attention"]["align"]["table"]
    assert table.shape == (4, 32, 32) and np.ptp(table, axis=-1).min() > 0.5  # initialized: 0.1
    call("generate", "--workdir", place / "random" / FINE_TUNED, "translate English to German: a.")


def test_a_run_becomes_a_mixture_and_answers_the_same(place):
    """Also through the command line, whose answers depend on every parameter."""
    call("convert", place / "teacher", place / "mixture", "--encoder", "rv", "--max-length", 32)
    question = "translate English to German: a man rides."
    answers = [
        call("generate", "--workdir", place / name, question) for name in ("teacher", "mixture")
    ]
    assert answers[0] == answers[1]


def test_what_no_t5_has_is_not_exported(place):
    with pytest.raises(ValueError, match=r"encoder\.bias is None, which no published T5 has"):
        call("export", place / "teacher", place / "exported")
    assert not (place / "exported").exists()
