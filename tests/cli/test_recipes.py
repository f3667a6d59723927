"""Tests recipes on the command line: lists, wrong names, errors, and missing packages."""

import os

import pytest
from typer.testing import CliRunner

from synthesizer_jax.cli.main import _extra_of, app
from synthesizer_jax.cli.plan import known_costs
from synthesizer_jax.cli.recipes import complete_recipe, load_recipe
from synthesizer_jax.models import ZOO
from tests.cli.commands import run_all
from tests.conftest import ROOT, snippets
from tests.environment import python
from tools.zoo_costs import costs

IMPORT = "from tests.training.tiny import experiment\n"
WITHOUT_JAX = {
    "--help": (0, "recipes"),
    "--version": (0, "."),
    "train --help": (0, "--import"),
    "recipes": (0, "quickstart:random_vanilla"),
    "models": (0, "t5_1_1_tiny"),
}


def test_commands_that_need_no_jax_do_not_import_it(tmp_path):
    for module in ("jax", "tensorflow", "seqio"):
        (tmp_path / f"{module}.py").write_text("raise AssertionError('it is imported')\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    said = run_all(tmp_path, list(WITHOUT_JAX), PYTHONPATH=path)
    for (command, (code, part)), (found, text) in zip(WITHOUT_JAX.items(), said, strict=True):
        assert (code, part in text) == (found, True), f"{command}: {text}"


def test_the_page_on_recipes_writes_one_that_loads(tmp_path):
    (block,) = snippets("docs/recipes.md")
    (tmp_path / "mine.py").write_text(block)
    settings = ["training.optimizer.learning_rate=3e-4", "model.encoder.runs.0.repeats=4"]
    recipe = load_recipe(str(tmp_path / "mine.py"), settings)
    assert recipe.model.encoder.num_layers == 4
    load_recipe(str(tmp_path / "mine.py"), ['training.optimizer={"type": "AdamW", "b2": 0.98}'])


@pytest.mark.parametrize(
    ("function", "source"),
    [
        ("default", "def default():\n    return experiment()\n"),
        ("mine", "def mine(steps=3):\n    return experiment(steps=steps)\n"),
        ("made", "made = lambda: experiment()\n"),
    ],
)
def test_a_recipe_needs_no_annotation(tmp_path, function, source):
    (tmp_path / "mine.py").write_text(IMPORT + source)
    assert load_recipe(f"{tmp_path / 'mine.py'}:{function}").data.mixture == "copy"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def default(:\n", r"mine\.py, line 2: SyntaxError: "),
        ("x = 1\ny = x / 0\n", r"mine\.py, line 3: ZeroDivisionError: division by zero"),
        ("import no_such_module\n", r"mine\.py, line 2: ModuleNotFoundError: No module named 'no_"),
        ("def default():\n    return 1 / 0\n", r"mine\.py, line 3: ZeroDivisionError: division"),
        ("raise SystemExit(0)\n", r"mine\.py, line 2: SystemExit: 0"),
        (
            "def default():\n    return experiment(steps=-3)\n",
            r"mine\.py, line 3: ValueError: training\.steps is -3, but it must be 1 to",
        ),
        ("def default(size):\n    return 3\n", r"mine\.py: missing a required argument: 'size'$"),
        ("def default():\n    return 3\n", r"mine\.py returns 3, expected Experiment"),
        (
            "def small():\n    pass\n",
            r"mine\.py has no recipe 'default'\. Its recipes are small\.$",
        ),
        ("default = 3\n", r"mine\.py has no recipes"),
    ],
)
def test_a_broken_recipe_gives_one_sentence_with_its_file(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(IMPORT + source)
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(str(tmp_path / "mine.py"))
    assert "\n" not in str(error.value)


def test_a_module_of_ones_own_package_is_a_recipe(tmp_path, monkeypatch):
    (tmp_path / "own_recipes").mkdir()
    (tmp_path / "own_recipes/__init__.py").write_text("")
    (tmp_path / "own_recipes/small.py").write_text(
        IMPORT + "def default():\n    return experiment()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("synthesizer_jax.runs.code._imported", set())
    assert load_recipe("own_recipes.small").data.mixture == "copy"
    with pytest.raises(ValueError, match=r"There is no package 'own_recipes\.large'"):
        load_recipe("own_recipes.large")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("train fine", "finetune"), ("recipes mi", "mine.py"), ("models t5_1_1_ti", "t5_1_1_tiny")],
)
def test_shells_are_offered_recipes_and_models(tmp_path, monkeypatch, typed, offered):
    assert "quickstart:dot_product" in complete_recipe("quickstart:d")
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    words = {"COMP_WORDS": f"synthesizer-jax {typed}", "COMP_CWORD": "2"}
    environment = {"_SYNTHESIZER_JAX_COMPLETE": "complete_bash", **words}
    completed = CliRunner().invoke(app, env=environment, prog_name="synthesizer-jax")
    assert completed.output.split() == [offered]


STALE = "synthesizer_jax/costs/zoo.json is out of date: run python -m tools.zoo_costs and commit it"


@pytest.mark.parametrize(
    "name", ["synthesizer_rv_small", "mesh_random_base", "linformer_base", "alr_s"]
)
def test_the_costs_that_come_with_the_package_are_those_of_the_zoo(name):
    assert list(known_costs()) == list(ZOO), STALE
    assert costs(name) == known_costs()[name], STALE


def test_without_the_data_extra_one_sentence_says_what_to_install(tmp_path, tmp_path_factory):
    """If optional packages are missing, the error says in one sentence what to install.

    The error may also come from the process that prepares the data.
    """
    absent = tmp_path_factory.mktemp("absent")
    error = "raise ModuleNotFoundError('not here', name='tensorflow')\n"
    (absent / "tensorflow.py").write_text(error)
    commands = [
        "train quickstart --workdir w --data-dir d",
        "data import glue --from . --data-dir d",
    ]
    said = run_all(tmp_path, commands, PYTHONPATH=f"{absent}{os.pathsep}{ROOT}")
    (code, prepared), other = said
    remedy = "tensorflow is not installed. Run: pip install 'synthesizer_jax[data]'"
    assert code == 2 and prepared.count(remedy) == 1
    assert f"could not be prepared: {remedy}. The command" in prepared
    assert other == (2, f"loading TensorFlow\nerror: {remedy}\n")
    assert not [*tmp_path.rglob("experiment.json"), *tmp_path.rglob("dataset_info.json")]
    extras = {"sklearn": "train", "tensorflow_text": "data", "tensorboardX": "train", "re": None}
    assert {module: _extra_of(f"{module}.part") for module in extras} == extras


def test_tensorflow_is_loaded_silently():
    program = (
        "import jax\nfrom synthesizer_jax.cli.data import _open_directory\n"
        "import pathlib\n_open_directory(pathlib.Path('nowhere'), None)\n"
        "import tensorflow as tf\nrows = tf.data.Dataset.range(4).batch(4)\n"
        "print(sum(next(rows.map(lambda x: tf.transpose([x])).as_numpy_iterator()))[0])\n"
    )
    own = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = python("-c", program, env={**own, "PYTHONPATH": str(ROOT)})
    assert (done.stdout, done.stderr) == ("6\n", "")
