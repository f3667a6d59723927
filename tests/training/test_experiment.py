"""Tests experiments as JSON, overrides of settings, and changes that a run refuses."""

import json

import jax
import pytest

from synthesizer_jax.base.registry import from_json, register, replace, to_json
from synthesizer_jax.cli.recipes import load_recipe, override, settings
from synthesizer_jax.data.objectives import OBJECTIVES
from synthesizer_jax.data.vocabularies import Bytes, SentencePiece
from synthesizer_jax.evaluation.evaluator import check_masked_tasks
from synthesizer_jax.models import ZOO, resolve_dtype
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant, OptimizerRule, optax_optimizer
from synthesizer_jax.primitives.parameters import abstract_variables
from synthesizer_jax.runs.saved import load_model
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import (
    MOST_CHANGES,
    check_same_run,
    find_dtype,
    find_vocabulary,
    load_experiment,
    save_experiment,
    start_from_run,
)
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import encoder, experiment, save


def test_json_round_trip(tmp_path):
    rules = (InitRule("embedding", "resize", fill="fresh"), InitRule(r"(.*)/b", source=r"\1/a"))
    frozen = (OptimizerRule("a", 0.5), OptimizerRule("b", frozen=True))
    optimizer = optax_optimizer("sgd", Constant(0.1), momentum=0.9, nesterov=True)
    for recipe in (
        experiment(init_from="runs/a", init_rules=rules, init_optimizer=True),
        experiment(rules=frozen, optimizer=optimizer, data={"buckets": ((4, 4), (4, 8))}),
        CLASSIFIER,
    ):
        assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
        save_experiment(recipe, tmp_path)
        assert load_experiment(tmp_path) == recipe
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.json"]


@pytest.mark.parametrize(
    ("assignments", "read"),
    [
        (["training.steps=200"], lambda e: e.training.steps == 200),
        (["training.loss_normalizer=none"], lambda e: e.training.loss_normalizer is None),
        (["data.pack=true"], lambda e: e.data.pack is True),
        (["data.mixture='mine'"], lambda e: e.data.mixture == "mine"),
        (["mesh.tensor=2"], lambda e: e.mesh == MeshShape(tensor=2)),
        (["model.encoder.runs.0.repeats=5"], lambda e: e.model.encoder.num_layers == 5),
        (
            ['training.optimizer={"type": "Adafactor"}'],
            lambda e: e.training.optimizer == Adafactor(),
        ),
        (["model=t5_1_1_tiny"], lambda e: e.model == ZOO["t5_1_1_tiny"]().copy(dtype="auto")),
        (["data.buckets=((4, 2),(6, 4))"], lambda e: e.data.buckets == ((4, 2), (6, 4))),
        # Settings that depend on each other may be given in any order.
        (["data.buckets=((16, 4),)", "data.inputs_length=32"], lambda e: bool(e.data.buckets)),
        (["data.shards=3", "data.batch_size=3"], lambda e: e.data.shards == e.data.batch_size == 3),
        (["vocabulary=Bytes"], lambda e: e.vocabulary == Bytes()),
        (["model=t5_1_1_tiny", "model.d_model=16"], lambda e: e.model.d_model == 16),
        (["model.d_model=16", "model=t5_1_1_tiny"], lambda e: e.model.d_model == 32),
    ],
)
def test_overrides_are_typed(assignments, read):
    assert read(override(experiment(), *assignments))


PLAIN, CLASSIFIER, MASKED = (experiment(m) for m in (None, encoder(), encoder(masked_lm=True)))
WRONG = [
    (PLAIN, "training.step=1", "Training has no field 'step', did you mean 'steps'"),
    (
        PLAIN,
        "learning_rate=1",
        r"Experiment has no field 'learning_rate'\. Use training\.optimizer\.l",
    ),
    (
        PLAIN,
        "training.learning_rate.value=1",
        r"'learning_rate'\. Use training\.optimizer\.learning_r",
    ),
    (PLAIN, "num_heads=2", "Use model.encoder.runs.0.block.self_mixer.num_heads or model.decod"),
    (PLAIN, "training.steps=many", "training.steps=many: expected int"),
    (PLAIN, "training.steps=" + "1" * 5000, "training.steps=1{57}…: expected int"),
    (PLAIN, "training.steps=" + "(" * 9000, r"training.steps=\({57}…: exp"),
    (PLAIN, "training.steps=" + "[" * 100_000, r"training.steps=\[{57}…: expected int"),
    (PLAIN, "training.steps", "Write path.to.field=value"),
    (PLAIN, "model.encoder.runs.7.repeats=1", "'7' is not an index below 1"),
    (PLAIN, "training.steps.more=1", "inside a plain value"),
    (PLAIN, 'training.optimizer={"type": "Sgd"}', "unknown type 'Sgd'"),
    (PLAIN, "model=t5_1_1_tin", "There is no model 't5_1_1_tin', did you mean 't5_1_1_tiny'"),
    (PLAIN, 'model={"type": "Bytes"}', "model=Bytes: expected TextToText or Encoder"),
    (PLAIN, "training.steps=0", "training.steps is 0, but it must be 1 to 2,147,483,647"),
    (PLAIN, "training.seed=10000000000000000000000", "training.seed is 1000000"),
    (PLAIN, "training.z_loss=Infinity", "training.z_loss=Infinity: expected float"),
    (PLAIN, "training.ema=1", r"training\.ema is 1\.0, but it must be at least 0 and below 1"),
    (PLAIN, "training.loss_normalizer=foo", "is 'foo', but it must be above 0 or 'tokens_w"),
    (
        PLAIN,
        'training.optimizer={"type": "Constant"}',
        r"optimizer=Constant: expected Optimizer\. Choose one of Adafactor, A",
    ),
    (
        PLAIN,
        "training.optimizer=adamw",
        r"expected Optimizer, did you mean 'AdamW'\? Choose one of Adafactor",
    ),
    (
        PLAIN,
        "training.optimizer.learning_rate=cosine",
        r"Choose one of Constant, Cosine, .*, Noam, OptaxSchedule\.$",
    ),
    (PLAIN, "training.lora.rank=4", r"Training has no field 'lora'\. Use training\.adapters=LoRA"),
    (PLAIN, "training.lora_alpha=4", r"no field 'lora_alpha'\. Use training\.adapters\.alpha"),
    (
        PLAIN,
        "training.adapters.rank=4",
        r"training\.adapters is none\. First set training\.adapters to the name of a class\.",
    ),
    (PLAIN, "fp16=true", r"Experiment has no field 'fp16'\. Use model\.dtype=bfloat16"),
    (
        PLAIN,
        "evaluation.method=x",
        "evaluation.method is 'x', but it must be one of 'greedy', 'beam', 'rank'",
    ),
    (PLAIN, "evaluation.patience=2", r"evaluation\.every is 0, .*\. Set evaluation\.every"),
    (PLAIN, "data.inputs_length=0", "data.inputs_length is 0, but the encoder of an EncoderDecod"),
    (PLAIN, "init_from=''", "init_from is '', but it must be not empty"),
    (PLAIN, "mesh.tensor=0", "mesh.tensor is 0, but it must be -1 or 1 to"),
    (PLAIN, "model.dtype=float17", "it must be one of 'auto', 'float32', 'bfloat16'"),
    (PLAIN, "model.encoder.runs.0.repeats=257", r"runs.0.repeats is 257, but it must be 1 to 256"),
    (CLASSIFIER, "model.outputs=4", "model.outputs is 4, but data.classes has 3 label words"),
    (
        CLASSIFIER,
        "model.outputs=none",
        "model.outputs is None and model.masked_lm is False. Set one",
    ),
    (CLASSIFIER, "evaluation.method=greedy", "an Encoder does not decode. Set evaluation.meth"),
    (
        CLASSIFIER,
        "model=t5_tiny",
        "type EncoderDecoder, which learns label words as text. Set data.c",
    ),
    (MASKED, "data.pack=true", "an Encoder reads one text per row. Set data.pack=false"),
    (
        MASKED,
        "data.targets_length=4",
        r"Set it to data\.inputs_length \(8\), and do the same in data\.buckets",
    ),
]


@pytest.mark.parametrize(("recipe", "assignment", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_overrides_give_one_sentence(recipe, assignment, message):
    with pytest.raises(ValueError, match=message) as error:
        override(recipe, assignment)
    assert "\n" not in str(error.value)


def test_a_classifier_is_given_other_classes_and_a_published_body():
    changed = override(CLASSIFIER, "data.classes=('bad', 'good')", "model.outputs=2")
    assert changed.model.outputs == len(changed.data.classes) == 2
    assert override(MASKED, "model=bert_large").model.masked_lm


def test_a_masked_model_is_given_no_other_objective():
    """A masked language model has no other objective than its own.

    A task's own objective has priority over `data.objective`.
    """
    masked = replace(MASKED.data, objective=OBJECTIVES["masked_lm"])
    check_masked_tasks(MASKED.model, replace(masked, mixture="lm1b_v100_full_lm"))
    check_masked_tasks(CLASSIFIER.model, replace(MASKED.data, mixture="glue_rte_v002"))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", True, "training.steps is True, but int is expected"),
        ("z_loss", float("nan"), "training.z_loss is nan, but float is expected"),
        ("z_loss", 10**30, "training.z_loss is 10{30}, but float is expected"),
        ("optimizer", AdamW, "training.optimizer is <class .*, but Optimizer is expected"),
        (
            "optimizer",
            AdamW(b1=1.0),
            r"training.optimizer.b1 is 1.0, but it must be at least 0 and below 1",
        ),
    ],
)
def test_wrong_values_from_python_are_refused_when_the_experiment_is_made(field, value, message):
    recipe = experiment()
    with pytest.raises(ValueError, match=message):
        replace(recipe, training=replace(recipe.training, **{field: value}))


@pytest.mark.parametrize("name", ["quickstart", "papers.translation:multi30k:hc_sa"])
def test_every_plain_setting_can_be_typed_as_it_is_shown_and_every_number_has_a_range(name):
    recipe = load_recipe(name)
    free = {"data.buckets", "mesh.extra"}  # these fields have special rules
    rows = [row for row in settings(recipe) if row.leaf]
    shown = {row.path: row for row in rows}
    assert {"training.steps", "model.encoder.runs.0.repeats", "data.pack"} <= shown.keys()
    for row in rows:
        if "int" in row.type.partition(":")[0].replace("'", " ").split(" "):
            assert ": " in row.type or row.path in free, row.path
    assert override(recipe, *(f"{row.path}={row.value}" for row in rows)) == recipe
    assert shown["training.steps"].default is None
    assert shown["evaluation.max_examples"].type == "int or none: 1 to 2,147,483,647"


def test_auto_is_the_dtype_of_the_platform_and_is_kept_when_a_run_continues(tmp_path, monkeypatch):
    given = override(experiment(encoder()), "model.dtype=auto")
    assert resolve_dtype(given.model, "gpu").dtype == "bfloat16"
    with pytest.raises(
        ValueError, match=r"Encoder: dtype is 'auto', .* Use models\.resolve_dtype\(model\)"
    ):
        abstract_variables(given.model, *given.example)
    on_cpu = find_dtype(given, tmp_path)
    assert on_cpu.model.dtype == "float32"
    trainer = Trainer(given, jax.devices()[:1])
    assert trainer.experiment == on_cpu
    save(tmp_path / "converted", given, trainer.init())  # this experiment was never trained
    save(tmp_path / "trained", on_cpu, trainer.init())
    save_experiment(on_cpu, tmp_path / "refused")  # as after a start that saved no checkpoint
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert find_dtype(given, tmp_path / "refused").model.dtype == "bfloat16"
    assert find_dtype(given, tmp_path / "trained") == on_cpu
    chosen = override(given, "model.dtype=bfloat16")
    assert find_dtype(chosen, tmp_path / "trained") == chosen
    for place, dtype in (("converted", "bfloat16"), ("trained", "float32")):
        assert load_experiment(tmp_path / place).model.dtype == dtype
        assert load_model(tmp_path / place).model.dtype == dtype
    started = [start_from_run(tmp_path / place).model.dtype for place in ("converted", "trained")]
    assert started == ["auto", "float32"]


class Unregistered(Constant): ...


def test_a_file_that_is_no_vocabulary_is_refused_before_it_is_copied(tmp_path):
    (tmp_path / "secret").write_bytes(b"root:x:0:0:root:/root:/bin/bash\n")
    recipe = replace(experiment(), vocabulary=SentencePiece(str(tmp_path / "secret")))
    with pytest.raises(ValueError, match=r"secret is damaged, or it is not a SentencePiece model"):
        find_vocabulary(recipe, tmp_path)
    recipe = replace(
        recipe, vocabulary=None, data=replace(recipe.data, mixture="synthetic_quickstat")
    )
    with pytest.raises(ValueError, match="did you mean 'synthetic_quickstart'"):
        find_vocabulary(recipe, tmp_path)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"init_optimizer": True}, r"init_from is not set\. Set it, or remove these settings"),
        (
            {"optimizer": AdamW(Unregistered(0.1))},
            "Unregistered is not registered. Decorate the class",
        ),
        (
            {"init_from": "t5x/checkpoint_0"},
            r"checkpoint_0 is not a run, because .* contains no experiment\.json",
        ),
    ],
)
def test_an_impossible_start_gives_one_sentence_at_once(tmp_path, monkeypatch, told, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t5x" / "checkpoint_0").mkdir(parents=True)
    with pytest.raises(ValueError, match=message):
        run(experiment(**told), tmp_path / "run", data_dir=tmp_path, visible=False)
    assert not (tmp_path / "run").exists()


def test_saved_json_of_unknown_classes_gives_one_sentence():
    with pytest.raises(ValueError, match=r"unknown type 'Randon'.*'Random'.*--import PACKAGE"):
        from_json({"type": "Randon", "max_length": 3})
    with pytest.raises(ValueError, match="Random has no field 'max_len', did you mean"):
        from_json({"type": "Random", "max_len": 3})
    with pytest.raises(ValueError, match="has already registered a class of the same name"):

        @register
        class AdamW: ...


def test_a_directory_continues_only_its_own_run(tmp_path):
    recipe = experiment()
    check_same_run(recipe, tmp_path)
    save_experiment(recipe, tmp_path)
    check_same_run(experiment(seed=7), tmp_path)  # the run has no checkpoint yet
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    check_same_run(experiment(steps=99, save_every=1, keep_best=3), tmp_path)
    check_same_run(experiment(writers=("wandb",), profile=(1, 2)), tmp_path)
    check_same_run(replace(recipe, mesh=MeshShape(tensor=2)), tmp_path)
    for other, path in (
        (experiment(optimizer=AdamW(b1=0.5)), r"training\.optimizer"),
        (replace(recipe, model=replace(recipe.model, tied=True)), r"model\.tied"),
        (replace(recipe, data=replace(recipe.data, seed=4)), r"data\.seed was 0 and is now 4"),
    ):
        with pytest.raises(ValueError, match=f"holds another run: {path}"):
            check_same_run(other, tmp_path)


def test_all_changed_settings_of_a_run_are_listed_together(tmp_path):
    recipe = experiment()
    save_experiment(recipe, tmp_path)
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    changed = experiment(seed=7, data={"seed": 4})
    with pytest.raises(
        ValueError,
        match=r": data\.seed was 0 and is now 4, training\.seed was 0 and is now 7\. Use a new "
        "--workdir, or the old settings to continue the run",
    ):
        check_same_run(changed, tmp_path)
    with pytest.raises(ValueError, match=r", and \d+ other settings have changed\. Use") as error:
        check_same_run(experiment(encoder()), tmp_path)
    assert str(error.value).count(" and is now ") == MOST_CHANGES
