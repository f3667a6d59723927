"""Tests attention on TPU meshes that do not divide its sizes. `make test-tpu` runs these tests."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import synthesizer_jax as sj
from synthesizer_jax.costs import chips
from synthesizer_jax.training import plan
from tests.sharding.meshes import EVERY, check_lowers

pytest.importorskip("libtpu", reason="libtpu is not installed; make test-tpu does that")
pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("layer", sorted({case.layer for case in EVERY}))
def test_every_mesh_lowers(layer: str) -> None:
    for case in EVERY:
        if case.layer == layer:
            check_lowers(case, "tpu")


def test_a_replicated_kernel_compiles() -> None:
    """A kernel that is replicated over a mesh axis compiles.

    One axis of the mesh shards the examples, and the other axis shards nothing.
    """
    devices = plan.devices_of(chips.parse_topology("v5e:2x2"))
    mesh = jax.make_mesh((2, 2), ("data", "expert"), (AxisType.Explicit,) * 2, devices=devices)
    layer = sj.Attention(2, 64, sj.DotProduct())
    x = jax.ShapeDtypeStruct(
        (4, 256, 128), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec("data"))
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    variables = jax.eval_shape(layer.init, jax.random.key(0), jnp.zeros(x.shape, x.dtype))
    variables = jax.tree.map(lambda s: s.update(sharding=replicated), variables)

    def loss(variables, x):
        return jnp.sum(layer.apply(variables, x).astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(loss)).lower(variables, x).compile().as_text()
    assert text.count('"tpu_custom_call"') == 2
    assert "all-gather" not in text
