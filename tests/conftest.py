"""Defines the fixtures that all tests share."""

import atexit
import gc
import itertools
import os
import pathlib
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell makes background programs ignore Ctrl-C. The programs that tests start would inherit
    # this, so restore the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["HF_HUB_OFFLINE"] = "1"  # tests must not download models
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "PYTEST_XDIST_WORKER" not in os.environ:
    # All pytest workers and their child processes share one cache of compiled programs, because
    # they train the same tiny models. The user's cache is not used. If TESTS_CACHE names a
    # directory, the cache is kept there for later runs.
    CACHE = os.environ.get("TESTS_CACHE")
    if CACHE is None:
        CACHE = tempfile.mkdtemp(prefix="synthesizer_jax_compiled_")
        atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import filelock
import jax
import pytest

from tests.environment import OPTIMIZED

FLAGS = ["--xla_force_host_platform_device_count=8"]
if not OPTIMIZED:
    FLAGS.append("--xla_backend_optimization_level=0")
if not OPTIMIZED and jax.__version_info__ < (0, 11):
    # Without MLIR for fusions and without multithreading, compiling takes half the time. Later
    # versions of XLA do not know the first flag and would abort the process.
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))  # XLA reads it at the first compilation

gc.set_threshold(50_000)
"""Tracing makes many objects that live on: Python's 700 cost a twelfth of the time."""

MAPPINGS = pathlib.Path("/proc/self/maps")
MOST_MAPPINGS = 40_000
"""A limit for the memory mappings of a process.

Linux allows 65,530 by default. Every compiled program needs some of them, and XLA crashes if there
are none left.
"""
TESTS = itertools.count(1)

ROOT = pathlib.Path(__file__).resolve().parent.parent


def snippets(page: str) -> list[str]:
    """Returns all blocks of Python code on a page of the documentation."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)


def run_page(page: str) -> dict[str, Any]:
    """Runs the Python code of a page in order, and returns the names that it defines."""
    # `register` uses `__name__` to distinguish two classes with the same name.
    names = {"__name__": pathlib.Path(page).stem}
    for block in snippets(page):
        exec(block, names)
    return names


@pytest.fixture(autouse=True)
def room_for_programs() -> Iterator[None]:
    """Clears JAX's caches before a process holds too many compiled programs."""
    yield
    if next(TESTS) % 10 or not MAPPINGS.exists():
        return
    if MAPPINGS.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()


@pytest.fixture(scope="session")
def synthetic_data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A tenth of the synthetic data sets, prepared once for all test processes.

    Tests must not change these data sets.
    """
    from synthesizer_jax.data.prepared import PreparedTasks
    from synthesizer_jax.preparation import synthetic
    from synthesizer_jax.tasks.synthetic import MIXTURES, vocabulary

    place = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = place.parent
    path = place / "synthetic"
    with filelock.FileLock(place / "synthetic.lock"):
        if not list(path.glob("prepared/*/mixtures/*.json")):  # the last file that is written
            from synthesizer_jax.preparation.prepare import prepare

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(synthetic, "SIZES", {k: n // 10 for k, n in synthetic.SIZES.items()})
                synthetic.write(path)
            prepared = PreparedTasks(path, vocabulary(path).build())
            for mixture in MIXTURES:
                prepare(mixture, prepared)
    return path


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """The folder with the original files of GLUE and SuperGLUE. Tests are skipped without it."""
    folder = pathlib.Path(os.environ.get("SYNTHESIZER_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "glue").is_dir():
        pytest.skip("the original GLUE and SuperGLUE files are not on this machine")
    return folder
