"""Recipes: JSON, overrides, and what a run refuses to continue."""

import json

import pytest

from synthesizer_jax.cli.recipes import load_recipe, packaged
from synthesizer_jax.registry import from_json, register, replace, to_json
from synthesizer_jax.sharding import MeshShape
from synthesizer_jax.training.experiment import load_experiment, override, save_experiment
from synthesizer_jax.training.optimizers import Adafactor, AdamW
from synthesizer_jax.training.run import check_same_run, check_same_shapes
from tests.training.tiny import experiment


def test_json_round_trip(tmp_path):
    recipe = experiment()
    assert from_json(json.loads(json.dumps(to_json(recipe)))) == recipe
    save_experiment(recipe, tmp_path)
    assert load_experiment(tmp_path) == recipe
    assert [p.name for p in tmp_path.iterdir()] == ["experiment.json"]


def test_every_packaged_recipe_loads_and_round_trips():
    names = {
        "finetune": ("default", "synthesizer_rv_small", "base"),
        "cotrain_glue_super_glue": ("default", "t5_small", "d_base", "dv_small", "rv_laptop"),
    }
    assert set(names) <= set(packaged())
    for file, functions in names.items():
        for function in functions:
            recipe = load_recipe(f"{file}:{function}")
            assert from_json(to_json(recipe)) == recipe


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
    ],
)  # fmt: skip
def test_overrides_are_typed(assignment, read):
    assert read(override(experiment(), assignment))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.step=1", "Training has no field 'step', did you mean 'steps'"),
        ("training.steps=many", "training.steps=many: expected int"),
        ("training.steps=1.5", "expected int"),
        ("training.steps", "write path.to.field=value"),
        ("model.encoder.runs.7.repeats=1", "'7' is not an index below 1"),
        ("training.steps.more=1", "inside a plain value"),
        ('training.optimizer={"type": "Sgd"}', "unknown type 'Sgd'"),
        ("data.batch_size=10", "does not divide by shards"),
    ],
)
def test_wrong_overrides_are_one_sentence(assignment, message):
    with pytest.raises(ValueError, match=message) as error:
        override(replace(experiment(), data=replace(experiment().data, shards=4)), assignment)
    assert "\n" not in str(error.value)


def test_unknown_recipes_come_with_what_there_is(tmp_path):
    with pytest.raises(ValueError, match=r"no recipe 'finetun', did you mean 'finetune'"):
        load_recipe("finetun")
    with pytest.raises(ValueError, match="has no recipe 'bas', did you mean 'base'"):
        load_recipe("finetune:bas")
    with pytest.raises(ValueError, match="there is no recipe file"):
        load_recipe(str(tmp_path / "mine.py"))
    file = tmp_path / "mine.py"
    file.write_text(
        "from synthesizer_jax.training.experiment import Experiment\n"
        "from tests.training.tiny import experiment\n"
        "def default() -> Experiment:\n    return experiment()\n"
    )
    assert load_recipe(str(file), ["training.steps=3"]).training.steps == 3


def test_saved_json_of_unknown_classes_is_one_sentence():
    with pytest.raises(ValueError, match=r"unknown type 'Randon'.*'Random'.*--import my_package"):
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
    check_same_run(experiment(steps=99, save_every=1, keep_best=3), tmp_path)
    check_same_run(replace(recipe, mesh=MeshShape(tensor=2)), tmp_path)
    for other, path in (
        (experiment(optimizer=AdamW(b1=0.5)), r"training\.optimizer"),
        (replace(recipe, model=replace(recipe.model, tied=True)), r"model\.tied"),
        (replace(recipe, data=replace(recipe.data, seed=4)), r"data\.seed was 0 and is 4"),
    ):
        with pytest.raises(ValueError, match=f"holds another run: {path}"):
            check_same_run(other, tmp_path)


def test_a_checkpoint_of_another_model_is_named(tmp_path):
    import numpy as np

    mine, theirs = {"a": np.zeros(3), "b": np.zeros(2)}, {"a": np.zeros(4)}
    with pytest.raises(ValueError, match=r"another model: a is \(4,\) there and \(3,\) here"):
        check_same_shapes(theirs, mine, tmp_path)
    with pytest.raises(ValueError, match=r"b is absent there"):
        check_same_shapes({"a": np.zeros(3)}, mine, tmp_path)
