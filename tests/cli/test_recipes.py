"""Recipes on the command line: listed, shown, named wrongly, broken; and how quickly that is said."""

import json
import os
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli import options
from synthesizer_jax.cli.main import app
from synthesizer_jax.cli.plan import _complete_model, _known_costs
from synthesizer_jax.cli.recipes import complete_recipe, load_recipe, packaged_recipes
from synthesizer_jax.costs.zoo import costs
from synthesizer_jax.distillation.distill import Distillation
from synthesizer_jax.models import ZOO
from tests.cli.commands import call, run_all
from tests.conftest import ROOT

IMPORTS = (
    "from synthesizer_jax.training.experiment import Experiment\n"
    "from tests.training.tiny import experiment\n"
)


WITHOUT_JAX = {
    "--help": (0, "recipes"),
    "--version": (0, "."),
    "train --help": (0, "--import"),
    "recipes": (0, "quickstart:random_vanilla"),
    "models": (0, "t5_1_1_tiny"),
    "train nope --workdir w": (2, "there is no recipe 'nope'"),
    "train nope.py --workdir w": (2, "there is no recipe file nope.py"),
    "train quickstart:ramdom --workdir w": (2, "no recipe 'ramdom', did you mean"),
    "distill nope --teacher t --workdir w": (2, "there is no recipe 'nope'"),
    "plan nope --topology v5e:4x4": (2, "there is no recipe 'nope'"),
}


def test_what_needs_no_jax_is_said_without_it(tmp_path):
    for module in ("jax", "tensorflow", "seqio"):
        (tmp_path / f"{module}.py").write_text("raise AssertionError('it is imported')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    said = run_all(tmp_path, list(WITHOUT_JAX), PYTHONPATH=path)
    for (command, (code, part)), (found, text) in zip(WITHOUT_JAX.items(), said, strict=True):
        assert (code, part in text) == (found, True), f"{command}: {text}"


def test_recipes_lists_what_comes_with_the_package():
    shown = call("recipes")
    rows = {row["recipe"]: row for row in json.loads(call("recipes", "--json"))}
    assert {name.partition(":")[0] for name in rows} == set(packaged_recipes())
    assert rows["translate:random"]["summary"] == "Random Synthesizer (R)."
    assert rows["replace_attention:alr"]["returns"] == "Distillation"
    assert all(name in shown for name in rows)


def test_the_page_on_recipes_writes_one_that_loads(tmp_path):
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/recipes.md").read_text(), flags=re.S
    )
    (tmp_path / "mine.py").write_text(block)
    settings = ["training.optimizer.learning_rate.value=3e-4", "model.encoder.runs.0.repeats=4"]
    recipe = load_recipe(str(tmp_path / "mine.py"), settings)
    assert recipe.model.encoder.num_layers == 4
    load_recipe(str(tmp_path / "mine.py"), ['training.optimizer={"type": "AdamW", "b2": 0.98}'])


def test_recipes_shows_every_field_of_one():
    shown = call("recipes", "finetune:base", "--set", "training.steps=7")
    assert re.search(r"^training\.steps=7 +int: 1 to 2,147,483,647$", shown, flags=re.M)
    assert re.search(r"^training\.keep_best=1 .*default 1$", shown, flags=re.M)
    assert re.search(r"^model\.dtype=bfloat16 .*'float32', 'bfloat16'", shown, flags=re.M)
    found = json.loads(call("recipes", "replace_attention:alr", "--json"))
    assert found["returns"] == "Distillation"
    rows = {row["path"]: row for row in found["settings"]}
    assert rows["replace.0.scope"]["value"] == "mixer"
    assert rows["replace.0.scope"]["type"] == "'mixer' or 'sublayer' or 'layer'"


def test_a_model_is_set_by_its_name():
    rows = json.loads(call("recipes", "quickstart", "--set", "model=t5_1_1_tiny", "--json"))
    values = {row["path"]: row["value"] for row in rows["settings"]}
    assert values["model.d_model"] == "32" and values["model.vocab_size"] == "32128"


@pytest.mark.parametrize(
    ("function", "source"),
    [
        ("default", "def default():\n    return experiment()\n"),
        ("mine", "def mine(steps=3):\n    return experiment(steps=steps)\n"),
        ("made", "made = lambda: experiment()\n"),
        ("string", "def string() -> 'Experiment':\n    return experiment()\n"),
        ("alias", "Mine = Experiment\ndef alias() -> 'Mine':\n    return experiment()\n"),
    ],
)
def test_a_recipe_needs_no_annotation(tmp_path, function, source):
    (tmp_path / "mine.py").write_text(IMPORTS + source)
    assert load_recipe(f"{tmp_path / 'mine.py'}:{function}").data.mixture == "copy"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def default(:\n", r"mine\.py, line 3: SyntaxError: "),
        ("x = 1\ny = x / 0\n", r"mine\.py, line 4: ZeroDivisionError: division by zero"),
        ("import no_such_module\n", r"mine\.py, line 3: ModuleNotFoundError: No module named 'no_"),
        ("def default():\n    return 1 / 0\n", r"mine\.py, line 4: ZeroDivisionError: division"),
        ("raise SystemExit(0)\n", r"mine\.py, line 3: SystemExit: 0"),
        ("def default():\n    exit(3)\n", r"mine\.py, line 4: SystemExit: 3"),
        (
            "def default():\n    return experiment(steps=-3)\n",
            r"mine\.py, line 4: ValueError: training\.steps is -3; allowed: 1 to",
        ),
        (
            "def default(size):\n    return 3\n",
            r"line 3: .* 'default' takes an argument, size; give",
        ),
        ("def default():\n    return 3\n", r"mine\.py, line 3: .* returns 3, expected Experiment"),
        ("def default():\n    pass\n", r"mine\.py, line 3: .* returns None, expected Experiment"),
        (
            "def small():\n    pass\ndef _hidden():\n    pass\ndef sized(n):\n    pass\n",
            r"mine\.py has no recipe 'default'; it has: small$",
        ),
        ("", r"mine\.py has no recipe 'default'; it has: none that return a Experiment"),
        ("default = 3\n", r"mine\.py has no recipe 'default'"),
    ],
)
def test_a_broken_recipe_is_one_sentence_with_file_and_line(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(IMPORTS + source)
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


def test_a_recipe_of_the_other_kind_says_what_there_is(tmp_path):
    with pytest.raises(
        ValueError, match="replace_attention has no recipe 'alr'; it has: none that"
    ):
        load_recipe("replace_attention:alr")
    assert isinstance(load_recipe("replace_attention:alr", kind=Distillation), Distillation)


def test_the_traceback_of_a_recipe_can_be_seen(tmp_path):
    (tmp_path / "mine.py").write_text("def default():\n    return 1 / 0\n")
    command = "train mine.py --workdir w"
    ((_, said),) = run_all(tmp_path, [command], SYNTHESIZER_JAX_TRACEBACK="1")
    assert 'File "mine.py", line 2, in default' in said


def test_a_module_of_ones_own_package_is_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "own_recipes").mkdir()
    (tmp_path / "own_recipes/__init__.py").write_text("")
    (tmp_path / "own_recipes/small.py").write_text(
        IMPORTS + "def default():\n    return experiment()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert load_recipe("own_recipes.small").data.mixture == "copy"
    with pytest.raises(ValueError, match=r"there is no package 'own_recipes\.large'"):
        load_recipe("own_recipes.large")


def test_shells_are_offered_recipes_and_models(tmp_path, monkeypatch):
    assert complete_recipe("fi") == ["finetune"]
    assert "quickstart:dot_product" in complete_recipe("quickstart:d")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert complete_recipe("mi") == ["mine.py"]
    assert _complete_model("t5_1_1_ti") == ["t5_1_1_tiny"]
    offered = CliRunner().invoke(
        app,
        env={
            "_SYNTHESIZER_JAX_COMPLETE": "complete_bash",
            "COMP_WORDS": "synthesizer-jax train fine",
            "COMP_CWORD": "2",
        },
        prog_name="synthesizer-jax",
    )
    assert offered.output.split() == ["finetune"]


STALE = (
    "synthesizer_jax/costs/zoo.json is out of date: run python -m tools.zoo_costs "
    "(a minute or two) and commit it"
)


def test_the_costs_that_come_with_the_package_are_those_of_the_zoo():
    assert list(_known_costs()) == list(ZOO), STALE


@pytest.mark.parametrize(
    "name",
    ["t5_tiny", "synthesizer_rv_small", "mesh_random_base", "lm_base", "linformer_base", "alr_s"],
)
def test_costs_counted_again(name):
    assert costs(name) == _known_costs()[name], STALE


def test_costs_at_other_lengths_are_counted():
    at = ("--inputs-length", "64", "--targets-length", "16", "--json")
    (row,) = json.loads(call("models", "t5_tiny", *at)).values()
    assert row["flops_lengths"] == [64, 16]
    assert row["parameters"] == _known_costs()["t5_tiny"]["parameters"]
    assert row["flops_per_token"] < _known_costs()["t5_tiny"]["flops_per_token"]


def test_without_the_data_extra_one_sentence_says_what_to_install(tmp_path, tmp_path_factory):
    """Also where the process that prepares the data ends with that sentence."""
    absent = tmp_path_factory.mktemp("absent")
    error = "raise ModuleNotFoundError('not here', name='tensorflow')\n"
    (absent / "tensorflow.py").write_text(error)
    commands = [
        "train quickstart --workdir w --data-dir d",
        "data import glue --from . --data-dir d",
        "data vocabulary synthetic_co_training --output v --data-dir d",
    ]
    said = run_all(tmp_path, commands, PYTHONPATH=f"{absent}{os.pathsep}{ROOT}")
    codes, texts = zip(*said, strict=True)
    assert codes == (2, 2, 2)
    remedy = "error: tensorflow is not installed; run pip install 'synthesizer_jax[data]'\n"
    prepared, *others = texts
    assert remedy in prepared and "could not be prepared, as said above" in prepared
    assert others == [remedy, remedy]
    assert not [*tmp_path.rglob("experiment.json"), *tmp_path.rglob("dataset_info.json")]


@pytest.mark.slow
def test_tensorflow_is_loaded_without_a_word():
    program = (
        "import sys\nfrom synthesizer_jax.cli.options import load_data_libraries\n"
        "load_data_libraries()\nimport tensorflow as tf, seqio\n"
        "print(sum(tf.data.Dataset.range(4).as_numpy_iterator()))\n"
    )
    own = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**own, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("6\n", "")


def test_every_extra_is_one_that_the_package_declares():
    declared = (ROOT / "pyproject.toml").read_text()
    for extra, modules in options.EXTRAS.items():
        (listed,) = re.findall(rf"^{extra} = \[(.*?)\]$", declared, flags=re.M | re.S)
        named = {"sklearn": "scikit-learn"}
        for module in modules:
            assert named.get(module, module.replace("_", "-")) in listed.replace("_", "-")
