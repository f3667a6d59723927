"""A user's model with logical axis names of its own, compiled for a TPU slice; run by `make test-tpu`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from synthesizer_jax.costs import chips
from synthesizer_jax.training import aot
from tests.sharding.test_ambient import (
    ALIGNMENTS,
    LONG,
    RULES,
    B,
    D,
    check_hlo,
    linen_step,
    nnx_step,
    with_shardings,
)

pytest.importorskip("libtpu", reason="libtpu is not installed; make test-tpu does that")
pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("make_step", [linen_step, nnx_step])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_users_model_gathers_kernels_only(name, make_step, kind):
    devices = np.asarray(aot.devices_of(chips.parse_topology("v5e:2x4"))).reshape(2, 2, 2)
    mesh = Mesh(devices, ("replica", "shard", "model"), axis_types=(kind,) * 3)
    x = jax.ShapeDtypeStruct((B, LONG, D), jnp.float32)
    step, shapes, specs = make_step(name, x)
    with nn.logical_axis_rules(RULES), jax.set_mesh(mesh):
        arguments = (
            with_shardings(shapes, specs, mesh),
            with_shardings(x, P(("replica", "shard")), mesh),
        )
        lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("tpu",))
        hlo = lowered.compile().as_text()
    check_hlo(hlo, num_batch_shards=4)
