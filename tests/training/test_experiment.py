"""Recipes: JSON, overrides, and what a run refuses to continue."""

import json

import pytest

from synthesizer_jax.cli.recipes import load_recipe
from synthesizer_jax.cli.settings import override, settings
from synthesizer_jax.data.vocabularies import SentencePiece
from synthesizer_jax.models import ZOO
from synthesizer_jax.optimizers import Adafactor, AdamW, Constant
from synthesizer_jax.registry import from_json, register, replace, to_json
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.experiment import InitRule
from synthesizer_jax.training.run import run
from synthesizer_jax.training.run_directory import (
    check_same_run,
    load_experiment,
    resolve_vocabulary,
    save_experiment,
)
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import experiment


def test_json_round_trip(tmp_path):
    recipe = experiment()
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    save_experiment(recipe, tmp_path)
    assert load_experiment(tmp_path) == recipe
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.json"]


@pytest.mark.parametrize(
    ("assignment", "read"),
    [
        ("training.steps=200", lambda e: e.training.steps == 200),
        ("training.label_smoothing=1", lambda e: e.training.label_smoothing == 1.0),
        ("training.loss_normalizer=none", lambda e: e.training.loss_normalizer is None),
        ("data.pack=true", lambda e: e.data.pack is True),
        ("data.mixture=glue_v002_proportional", lambda e: "glue" in e.data.mixture),
        ("mesh.tensor=2", lambda e: e.mesh == MeshShape(tensor=2)),
        ("model.encoder.runs.0.repeats=5", lambda e: e.model.encoder.num_layers == 5),
        ("training.optimizer.learning_rate.value=0.5", lambda e: e.training.optimizer
            .learning_rate.value == 0.5),
        ('training.optimizer={"type": "Adafactor"}', lambda e: e.training.optimizer
            == Adafactor()),
        ("init_from=runs/a", lambda e: e.init_from == "runs/a"),
        ("model=t5_1_1_tiny", lambda e: e.model == ZOO["t5_1_1_tiny"]()),
        ("model=lm_base", lambda e: e.model == ZOO["lm_base"]()),
        ("data.buckets=((4, 2),(6, 4))", lambda e: e.data.buckets == ((4, 2), (6, 4))),
        ("data.buckets=[(4, 2)]", lambda e: e.data.buckets == ((4, 2),)),
        ("evaluation.max_examples=None", lambda e: e.evaluation.max_examples is None),
        ("data.mixture='mine'", lambda e: e.data.mixture == "mine"),
    ],
)  # fmt: skip
def test_overrides_are_typed(assignment, read):
    assert read(override(experiment(), assignment))


@pytest.mark.parametrize(
    ("assignments", "read"),
    [
        (
            ["data.inputs_length=32", "data.buckets=((16, 4),)"],
            lambda e: e.data.shapes[0] == (16, 4),
        ),
        (["data.buckets=((16, 4),)", "data.inputs_length=32"], lambda e: bool(e.data.buckets)),
        (["data.shards=3", "data.batch_size=3"], lambda e: e.data.shards == e.data.batch_size == 3),
        (["model=t5_1_1_tiny", "model.d_model=16"], lambda e: e.model.d_model == 16),
        (["model.d_model=16", "model=t5_1_1_tiny"], lambda e: e.model.d_model == 32),
        (["training.steps=2", "training.steps=3"], lambda e: e.training.steps == 3),
    ],
)
def test_fields_that_are_valid_only_together_are_set_together(assignments, read):
    assert read(override(experiment(), *assignments))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.step=1", "Training has no field 'step', did you mean 'steps'"),
        ("training.steps=many", "training.steps=many: expected int"),
        ("training.steps=1.5", "expected int"),
        pytest.param(
            "training.steps=" + "1" * 5000, "training.steps=1{57}…: expected int", id="digits"
        ),
        pytest.param("training.steps=" + "(" * 9000, r"training.steps=\({57}…: exp", id="tuples"),
        pytest.param(
            "training.steps=" + "[" * 100_000, r"training.steps=\[{57}…: expected int", id="deep"
        ),
        ("training.steps", "write path.to.field=value"),
        ("model.encoder.runs.7.repeats=1", "'7' is not an index below 1"),
        ("training.steps.more=1", "inside a plain value"),
        ('training.optimizer={"type": "Sgd"}', "unknown type 'Sgd'"),
        ("data.batch_size=10", r"is not divisible by data.shards=4.*; or set data.shards too"),
        ("model=t5_1_1_tin", "there is no model 't5_1_1_tin', did you mean 't5_1_1_tiny'"),
        ('model={"type": "Bytes"}', "model=Bytes: expected EncoderDecoder or LanguageModel or Enc"),
        ("training.optimizer.b3=1", "AdamW has no field 'b3', did you mean 'b2'"),
    ],
)
def test_wrong_overrides_are_one_sentence(assignment, message):
    with pytest.raises(ValueError, match=message) as error:
        override(replace(experiment(), data=replace(experiment().data, shards=4)), assignment)
    assert "\n" not in str(error.value)


WRONG = [
    ("training.steps=0", "training.steps is 0; allowed: 1 to 2,147,483,647"),
    ("training.keep_best=NaN", "training.keep_best=NaN: expected int"),
    ("training.save_every=[1, 2]", "expected int"),
    ("training.seed=10000000000000000000000", "training.seed is 1000000"),
    ("training.z_loss=Infinity", "training.z_loss=Infinity: expected float"),
    ("training.z_loss=-1", "training.z_loss is -1.0; allowed: 0 or more"),
    ("training.label_smoothing=1.5", "training.label_smoothing is 1.5; allowed: 0 to 1"),
    (
        "training.loss_normalizer=foo",
        "training.loss_normalizer is 'foo'; allowed: above 0 or 'tokens_w",
    ),
    ("training.loss_normalizer=0", "training.loss_normalizer is 0.0; allowed: above 0 or"),
    ("training.optimizer.b2=1", "training.optimizer.b2 is 1.0; allowed: 0 to below 1"),
    ('training.optimizer={"type": "Constant"}', "training.optimizer=Constant: expected Optimizer"),
    ('training.optimizer.learning_rate={"type": "AdamW"}', "AdamW: expected Schedule"),
    ("evaluation.method=x", "evaluation.method is 'x'; allowed: 'greedy', 'beam', 'rank'"),
    ("evaluation.max_examples=0", "evaluation.max_examples is 0"),
    ("evaluation.logits_dtype=int8", "logits_dtype is 'int8'; allowed: 'float32', 'bfloat16'"),
    ("data.inputs_length=0", "data.inputs_length is 0, and the encoder of an EncoderDecoder"),
    ("data.shards=0", "data.shards is 0; allowed: 1 to 1,024"),
    ("mesh.tensor=0", "mesh.tensor is 0; allowed: -1 or 1 to"),
    ("model.dtype=float17", "dtype='float17'; it must be 'float32' or 'bfloat16'"),
    ("model.encoder.runs.0.repeats=257", r"model.encoder.runs.0.repeats is 257; allowed: 1 to 256"),
    (
        'model.encoder.runs.0.block.feed_forward.activations=["tanh"]',
        "is .*'tanh'.*; allowed: one or more of 'relu', 'g",
    ),
    ("model.encoder.runs.0.block.feed_forward.activations=gelu", "expected tuple"),
    ("model.encoder.runs.0.block.self_mixer.name=other", "Attention has no field 'name'"),
]


@pytest.mark.parametrize(("assignment", "message"), WRONG)
def test_values_out_of_their_range_are_refused_at_once(assignment, message):
    with pytest.raises(ValueError, match=message) as error:
        override(experiment(), assignment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("recipe", ["quickstart", "translate:hc_sa", "finetune"])
def test_every_number_has_a_range(recipe):
    free = {"data.buckets", "mesh.extra"}  # checked by rules of their own
    for row in settings(load_recipe(recipe)):
        if row.leaf and "int" in row.type.partition(":")[0].replace("'", " ").split(" "):
            assert ": " in row.type or row.path in free, row.path


def test_a_model_of_absurd_size_is_refused_before_it_is_built():
    mixer = "model.decoder.runs.0.block.self_mixer"
    large = override(experiment(), f"{mixer}.num_heads=1048576", f"{mixer}.head_dim=1048576")
    with pytest.raises(
        ValueError, match=r"the model has [\d,]{18,} parameters; allowed: 1,099,511"
    ):
        Trainer(large)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "a", "training.steps is 'a', expected int"),
        ("steps", True, "training.steps is True, expected int"),
        ("z_loss", float("nan"), "training.z_loss is nan, expected float"),
        ("optimizer", Constant(), "training.optimizer is a Constant, expected Optimizer"),
        ("optimizer", AdamW, "training.optimizer is <class .*, expected Optimizer"),
        ("optimizer", AdamW(b1=1.0), r"training.optimizer.b1 is 1.0; allowed: 0 to below 1"),
    ],
)
def test_wrong_values_from_python_are_refused_when_the_experiment_is_made(field, value, message):
    recipe = experiment()
    with pytest.raises(ValueError, match=message):
        replace(recipe, training=replace(recipe.training, **{field: value}))


def test_a_split_that_a_mixtures_tasks_do_not_have_is_refused():
    recipe = load_recipe("finetune")
    with pytest.raises(
        ValueError, match=r"data\.split is 'tain', did you mean 'train'.* have .*test"
    ):
        override(recipe, "data.split=tain")


def test_every_plain_setting_can_be_typed_as_it_is_shown():
    for recipe in (load_recipe("quickstart"), load_recipe("translate:hc_sa"), experiment()):
        rows = list(settings(recipe))
        assert {"training.steps", "model.encoder.runs.0.repeats", "data.pack"} <= {
            r.path for r in rows
        }
        for row in rows:
            if row.leaf:
                assert override(recipe, f"{row.path}={row.value}") == recipe
    shown = {row.path: row for row in settings(load_recipe("quickstart"))}
    assert shown["training.log_every"].value == "25" and shown["training.log_every"].default == "10"
    assert shown["training.steps"].default is None
    assert shown["training.optimizer.b2"].type == "float: 0 to below 1"
    assert shown["evaluation.max_examples"].type == "int or none: 1 to 2,147,483,647"


def damaged(change):
    """An experiment's JSON with something changed."""
    data = to_json(experiment())
    change(data)
    return json.dumps(data)


DAMAGES = {
    "": r"cannot be read: .* line 1",
    json.dumps(to_json(experiment()))[:900]: r"cannot be read: .* line 1",
    "[]": r"it holds \(\), expected an Experiment",
    '{"type": []}': r"unknown type \[\] in the saved",
    '{"type": "AdamW"}': r"it holds a AdamW, expected an Experiment",
    '{"type": "Experiment"}': r"model is missing",
    "[" * 100_000: r"cannot be read: maximum recursion depth",
    '{"a":' * 500 + "1" + "}" * 500: r"is nested deeper than 64 levels",
    damaged(lambda d: d["training"].update(steps=-3)): r"training\.steps is -3; allowed: 1 to",
    damaged(
        lambda d: d["training"].update(save_every=[1, 2])
    ): r"save_every is \(1, 2\), expected int",
    damaged(lambda d: d["training"].pop("optimizer")): r"training\.optimizer is missing",
    damaged(lambda d: d.update(data={})): r"data is {}, expected DataConfig",
    damaged(lambda d: d["data"].update({"x" * 10**6: 1})): r"DataConfig has no field 'x{56}…",
    damaged(
        lambda d: d["data"].update(objective={"x" * 10**6: {"type": 1}})
    ): r"data.objec.*x…: un",
    damaged(lambda d: d["data"].update(seed="SEED")).replace(
        '"SEED"', "1" * 5000
    ): r"json cannot be read: .*digits",
    damaged(
        lambda d: d["model"].update(encoder={"type": "os.system"})
    ): r"model\.encoder: unknown type",
    damaged(
        lambda d: d["model"]["encoder"].update(runs=[])
    ): r"model\.encoder\.runs is \(\); allowed: one or more",
    damaged(
        lambda d: d["model"].update(parent="x")
    ): r"model: EncoderDecoder has no field 'parent'",
}


@pytest.mark.parametrize(("text", "message"), DAMAGES.items(), ids=range(len(DAMAGES)))
def test_a_damaged_file_is_one_sentence_that_names_it(tmp_path, text, message):
    (tmp_path / "experiment.json").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_experiment(tmp_path)
    assert str(tmp_path / "experiment.json") in str(error.value)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_file_that_is_no_text_names_itself(tmp_path):
    (tmp_path / "experiment.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"experiment\.json cannot be read: 'utf-8'"):
        load_experiment(tmp_path)


@pytest.mark.parametrize("path", ["/etc/passwd", "../other/vocabulary.model", "~/spiece.model"])
def test_a_vocabulary_outside_of_the_run_is_refused_when_the_run_is_opened(tmp_path, path):
    save_experiment(replace(experiment(), vocabulary=SentencePiece(path)), tmp_path)
    with pytest.raises(
        ValueError,
        match=rf"experiment\.json cannot be read: vocabulary\.path is '{path}', which lies",
    ):
        load_experiment(tmp_path)


@pytest.mark.parametrize("content", [b"root:x:0:0:root:/root:/bin/bash\n", b"", b"\x0a\x00"])
def test_what_is_no_vocabulary_is_refused_before_it_is_copied(tmp_path, content):
    (tmp_path / "secret").write_bytes(content)
    recipe = replace(experiment(), vocabulary=SentencePiece(str(tmp_path / "secret")))
    with pytest.raises(ValueError, match=r"secret is damaged or no SentencePiece model"):
        resolve_vocabulary(recipe, tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "told", [{"init_share": 0.5}, {"init_rules": (InitRule("a"),)}, {"init_optimizer": True}]
)
def test_how_to_start_without_a_start_is_an_error(tmp_path, told):
    with pytest.raises(ValueError, match="set init_from, or leave them out"):
        run(replace(experiment(), **told), tmp_path / "run", data_dir=tmp_path, visible=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("place", ["t5x/checkpoint_0", "t5x/checkpoints/checkpoint_0", "nowhere"])
def test_init_from_something_else_is_one_sentence_at_once(tmp_path, place):
    (tmp_path / "t5x" / "checkpoint_0").mkdir(parents=True)
    recipe = replace(experiment(), init_from=str(tmp_path / place))
    with pytest.raises(ValueError, match=rf"{place} is no run: .* holds no experiment\.json"):
        run(recipe, tmp_path / "run", data_dir=tmp_path, visible=False)
    assert not (tmp_path / "run").exists()


def test_unknown_recipes_come_with_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'finetun', did you mean 'finetune'"):
        load_recipe("finetun")
    with pytest.raises(ValueError, match="has no recipe 'bas', did you mean 'base'"):
        load_recipe("finetune:bas")
    with pytest.raises(ValueError, match="there is no file"):
        load_recipe(str(tmp_path / "mine.py"))
    file = tmp_path / "mine.py"
    file.write_text(
        "from synthesizer_jax.training.experiment import Experiment\n"
        "from tests.training.tiny import experiment\n"
        "def default() -> Experiment:\n    return experiment()\n"
    )
    assert load_recipe(str(file), ["training.steps=3"]).training.steps == 3


def test_saved_json_of_unknown_classes_is_one_sentence():
    with pytest.raises(ValueError, match=r"unknown type 'Randon'.*'Random'.*--import PACKAGE"):
        from_json({"type": "Randon", "max_length": 3})
    with pytest.raises(ValueError, match="Random has no field 'max_len', did you mean"):
        from_json({"type": "Random", "max_len": 3})
    with pytest.raises(ValueError, match="has registered that name"):

        @register
        class AdamW:
            pass


def test_a_directory_continues_only_its_own_run(tmp_path):
    recipe = experiment()
    check_same_run(recipe, tmp_path)
    save_experiment(recipe, tmp_path)
    check_same_run(experiment(seed=7), tmp_path)  # nothing was saved: the directory is free
    (tmp_path / "checkpoints" / "4").mkdir(parents=True)
    check_same_run(experiment(steps=99, save_every=1, keep_best=3), tmp_path)
    check_same_run(replace(recipe, mesh=MeshShape(tensor=2)), tmp_path)
    for other, path in (
        (experiment(optimizer=AdamW(b1=0.5)), r"training\.optimizer"),
        (replace(recipe, model=replace(recipe.model, tied=True)), r"model\.tied"),
        (replace(recipe, data=replace(recipe.data, seed=4)), r"data\.seed was 0 and is 4"),
    ):
        with pytest.raises(ValueError, match=f"holds another run: {path}"):
            check_same_run(other, tmp_path)
