"""Tests imports, the code in README and docs, and the lists that the command line prints."""

import ast
import importlib
import json
import pathlib
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import synthesizer_jax as sj
from synthesizer_jax.checkpoints.streamed import Unread, save_streamed
from synthesizer_jax.cli.main import app
from synthesizer_jax.tasks.mixtures import MIXTURES
from synthesizer_jax.training.run_directory import save_run
from tests.conftest import ROOT, run_page
from tests.environment import python
from tests.evaluation import runs
from tests.pretrained import folders, test_peft
from tools.public_names import imported_names, names_without_entry, public_names
from tools.tables import TABLES, renewed


def test_importing_the_package_loads_neither_jax_nor_tensorflow_and_no_network():
    program = (
        "import socket, sys\n"
        "socket.socket.connect = None\n"
        "import synthesizer_jax\n"
        "tensorflow = {'tensorflow', 'seqio', 'tensorflow_datasets'}\n"
        "heavy = tensorflow | {'jax', 'flax', 'orbax', 'torch', 'tokenizers', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    assert python("-c", program).stdout.strip() == "[]"


@pytest.mark.parametrize("package", public_names())
def test_all_lists_what_a_package_exports(package):
    names = public_names()[package]
    module = importlib.import_module(package)
    assert len(set(names)) == len(names)
    assert [name for name in names if not hasattr(module, name)] == []
    assert {name for _, imported in imported_names(package) for name in imported} <= set(names)
    defined = ast.parse(pathlib.Path(module.__file__).read_text(encoding="utf-8")).body
    functions = {node.name for node in defined if isinstance(node, ast.FunctionDef)}
    assert {name for name in functions if not name.startswith("_")} <= set(names)


def test_every_package_that_imports_names_lists_them():
    packages = {
        ".".join(path.relative_to(ROOT).parent.parts)
        for path in ROOT.glob("synthesizer_jax/**/__init__.py")
    }
    assert {package for package in packages if list(imported_names(package))} <= set(public_names())


def test_the_root_imports_every_public_name_from_where_it_is_declared():
    """The package imports every public name from the module that declares it.

    Type checkers see the same imports as those that the first use of a name makes.
    """
    declared = {
        name: module for module, names in imported_names("synthesizer_jax") for name in names
    }
    assert set(declared) == set(sj.__all__)
    for name, module in declared.items():
        assert getattr(sj, name) is getattr(importlib.import_module(module), name)


def test_no_public_name_is_also_the_name_of_a_module():
    """`synthesizer_jax.attention.static` is a function, so no module may be called `static.py`.

    Otherwise ``import synthesizer_jax.attention.static`` and ``from synthesizer_jax.attention
    import static`` would bring two different things.
    """
    for package, names in public_names().items():
        folder = ROOT / package.replace(".", "/")
        modules = {path.stem for path in folder.glob("*.py")}
        packages = {path.parent.name for path in folder.glob("*/__init__.py")}
        assert not (modules | packages) & set(names), package


def test_a_public_name_without_an_entry_in_the_reference_is_found(tmp_path):
    (tmp_path / "reference").mkdir()
    every = [f"{package}.{name}" for package, names in public_names().items() for name in names]
    entries = [f'<h2 id="{name}">' for name in every if not name.endswith((".Random", ".attend"))]
    (tmp_path / "reference" / "page.html").write_text("\n".join(entries), encoding="utf-8")
    assert names_without_entry(tmp_path) == [
        "synthesizer_jax.Random",
        "synthesizer_jax.attend",
        "synthesizer_jax.alignments.Random",
        "synthesizer_jax.attention.attend",
    ]


def test_a_computed_list_of_names_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tools.public_names.ROOT", tmp_path)
    path = tmp_path / "synthesizer_jax" / "__init__.py"
    path.parent.mkdir()
    path.write_text('TABLE = {"Random": 1}\n__all__ = [*TABLE]\n', encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"line 2: __all__ is computed\. Write a literal list of names"
    ):
        public_names()


LOADED = """
import sys
import synthesizer_jax as sj
loaded = sj.load(sys.argv[1])
sj.generate(loaded, ["a"], max_length=2)
print(*sys.modules)
"""


def rooms_of(modules):
    """Returns the top-level subpackages of synthesizer_jax to which the given modules belong."""
    names = [name.split(".") for name in modules]
    return {name[1] for name in names if name[0] == "synthesizer_jax" and len(name) > 1}


def test_a_loaded_run_brings_nothing_that_it_was_trained_with(tmp_path):
    experiment = runs.experiment()
    x = jnp.zeros((1, 1), jnp.int32)
    params = jax.jit(experiment.model.init)(jax.random.key(0), x, x)["params"]
    state = {"step": np.int32(1), "params": params, "constants": {}, "opt_state": {}}
    save_streamed(tmp_path / "checkpoints", 1, jax.tree.map(Unread.of, state))
    save_run(experiment, tmp_path)
    modules = python("-c", LOADED, tmp_path).stdout.split()
    absent = {"cli", "distillation", "optimizers", "preparation", "reports", "tasks", "training"}
    assert not absent & rooms_of(modules)


def test_a_folder_of_transformers_is_loaded_without_optimizers(tmp_path):
    """Loading a transformers folder does not import optimizers.

    The test includes a folder with adapters, whose configuration describes a training run.
    """
    config = folders.TINY | folders.UNTIED
    tensors = folders.make_tensors(config)
    base = folders.make_folder(tmp_path / "base", config, tensors)
    adapters = test_peft.write(tmp_path / "adapters", base, test_peft.adapters(tensors))
    modules = set(python("-c", LOADED, adapters).stdout.split())
    absent = {"cli", "distillation", "optimizers", "preparation", "reports", "training"}
    assert not absent & rooms_of(modules)
    assert not {"optax", "tokenizers"} & modules


TRAINED = """
import sys
from synthesizer_jax.training import run
from synthesizer_jax.training.trainer import Trainer
from tests.training.tiny import CopyStream, experiment
trainer = Trainer(experiment())
state, _ = trainer.step(trainer.init(), trainer.shard_batch(next(CopyStream())))
trainer.averaged_variables(state)
print(*sys.modules)
"""


def test_a_run_without_adapters_does_not_import_them():
    modules = python("-c", TRAINED).stdout.split()
    assert "synthesizer_jax.models.trainable" in modules
    assert "synthesizer_jax.models.adapters" not in modules


FIRST_USES = """
import gc, importlib, pkgutil, sys
import flax.linen as nn
import jax, jax.numpy as jnp
import synthesizer_jax as sj

def use_everything():
    for name in sj.__all__:
        getattr(sj, name)
    for module in pkgutil.walk_packages(sj.__path__, "synthesizer_jax."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)

def children(parent):
    modules = (o for o in gc.get_objects() if issubclass(type(o), nn.Module))
    return sorted(type(module).__name__ for module in modules if module.parent is parent)

class Compact(nn.Module):
    @nn.compact
    def __call__(self, x):
        use_everything()
        print(children(self))
        return x

class Setup(nn.Module):
    def setup(self):
        use_everything()
        print(children(self))

    def __call__(self, x):
        return x

class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.RMSNorm()(sj.MultiHeadAttention(num_heads=2, alignment=sj.Random(max_length=8))(x))
        return nn.Dense(4)(x)

model, x = globals()[sys.argv[1]](), jnp.ones((1, 8, 4))
variables = model.init(jax.random.key(0), x)
model.apply(variables, x)
"""


@pytest.mark.parametrize("method", ["Compact", "Setup", "Block"])
def test_no_first_use_makes_modules_that_become_children_of_the_callers(method):
    """The first use of a name inside a Flax module imports lazily, but adds no children to it."""
    assert set(python("-c", FIRST_USES, method).stdout.splitlines()) <= {"[]"}


def test_a_wheel_holds_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    paths = [*ROOT.glob("synthesizer_jax/**/__init__.py"), *ROOT.glob("configs/**/__init__.py")]
    names = (".".join(path.relative_to(ROOT).parent.parts) for path in paths)
    assert sorted(name.replace("configs", "synthesizer_jax.recipes") for name in names) == listed


def test_the_readmes_examples_run_as_written():
    namespace = run_page("README.md")
    assert namespace["y"].shape == (2, 128, 512)
    assert float(abs(namespace["y"] - namespace["y_ref"]).max()) < 1e-5


@pytest.mark.parametrize("page", ["composability", "layers"])
def test_a_pages_snippets_run_in_order(page):
    assert len(run_page(f"docs/{page}.md")) > 3


@pytest.mark.parametrize("name", TABLES)
def test_a_generated_table_is_current(name):
    path, text = renewed(name)
    assert path.read_text(encoding="utf-8") == text, "run: python -m tools.tables"


def test_the_gpu_tables_are_what_their_script_writes(tmp_path):
    source = ROOT / "docs" / "performance.md"
    page = tmp_path / "performance.md"
    page.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    python(ROOT / "benchmarks/gpu.py", "--results", ROOT / "docs/gpu.json", "--page", page)
    assert page.read_text(encoding="utf-8") == source.read_text(encoding="utf-8")


def test_the_page_of_tasks_names_every_mixture():
    page = (ROOT / "docs/tasks.md").read_text(encoding="utf-8")
    # Skip the mixtures that other tests have registered, which contain other tasks.
    own = {n: rates for n, rates in MIXTURES.items() if all(task in page for task in rates)}
    assert len(own) >= 15 and [name for name in own if f"`{name}`" not in page] == []


def test_models_lists_names_and_counts():
    result = CliRunner().invoke(app, ["models", "mesh_random_*", "--json"])
    rows = json.loads(result.stdout)
    assert list(rows) == [
        "mesh_random_base",
        "mesh_random_plus_base",
        "mesh_random_plus_alpha_base",
    ]
    assert rows["mesh_random_base"]["parameters"] == 254_360_576
    assert rows["mesh_random_base"]["tables_per_layer"] == 8 * 512 * 512
    output = CliRunner().invoke(app, ["models", "mesh_random_base"])
    assert "254,360,576" in output.stdout


def test_every_option_has_a_help_text():
    commands = [typer.main.get_command(app)]
    for command in commands:
        commands += getattr(command, "commands", {}).values()
        assert command.help
        assert [option.name for option in command.params if not option.help] == [], command.name
    assert len(commands) > 20
