"""Tests attention on GPU meshes that do not divide its sizes. `make test-gpu` runs these tests."""

import pytest

from tests.sharding.meshes import EVERY, check_lowers

pytest.importorskip(
    "jax_cuda13_plugin", reason="JAX has no plugin for CUDA; make test-gpu installs it"
)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("layer", sorted({case.layer for case in EVERY}))
def test_every_mesh_lowers(layer: str) -> None:
    for case in EVERY:
        if case.layer == layer:
            check_lowers(case, "cuda")
