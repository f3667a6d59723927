"""A user's own model, sharded by names of its own, compiled for a TPU slice; run by `make test-tpu`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from synthesizer_jax.sharding import chips
from synthesizer_jax.training import ahead
from tests.sharding.test_ambient import (
    ALIGNMENTS,
    LONG,
    RULES,
    B,
    D,
    check_text,
    linen_step,
    nnx_step,
    placed,
)

pytest.importorskip("libtpu", reason="libtpu is not installed; make test-tpu does that")
pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("make", [linen_step, nnx_step])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_users_model_gathers_kernels_only(name, make, kind):
    devices = np.asarray(ahead.devices_of(chips.topology("v5e:2x4"))).reshape(2, 2, 2)
    mesh = Mesh(devices, ("replica", "shard", "model"), axis_types=(kind,) * 3)
    x = jax.ShapeDtypeStruct((B, LONG, D), jnp.float32)
    step, shapes, specs = make(name, x)
    with nn.logical_axis_rules(RULES), jax.set_mesh(mesh):
        arguments = placed(shapes, specs, mesh), placed(x, P(("replica", "shard")), mesh)
        lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("tpu",))
        text = lowered.compile().as_text()
    check_text(text, parts=4)
