"""Fixtures shared by all tests."""

import os
import pathlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")  # the user's is not for tests
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 "
    "--xla_backend_optimization_level=0",  # the tests compile much and compute little
)

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_data() -> pathlib.Path:
    """The folder of original GLUE and SuperGLUE files, where a machine has it."""
    folder = pathlib.Path(os.environ.get("SYNTHESIZER_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not (folder / "glue").is_dir():
        pytest.skip("the original GLUE and SuperGLUE files are not on this machine")
    return folder
