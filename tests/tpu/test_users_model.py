"""Compiles a user's model with its own logical axis names for TPUs.

`make test-tpu` runs this test.
"""

import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from synthesizer_jax.costs import chips
from synthesizer_jax.training import plan
from tests.sharding.test_ambient import ALIGNMENTS, check_hlo, lower_step

pytest.importorskip("libtpu", reason="libtpu is not installed; make test-tpu does that")
pytestmark = pytest.mark.tpu


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=["explicit", "auto"])
@pytest.mark.parametrize("name", ALIGNMENTS)
def test_a_users_model_gathers_kernels_only(name, kind):
    devices = np.asarray(plan.devices_of(chips.parse_topology("v5e:2x4"))).reshape(2, 2, 2)
    mesh = Mesh(devices, ("replica", "shard", "model"), axis_types=(kind,) * 3)
    lowered = lower_step(name, mesh, lowering_platforms=("tpu",))
    check_hlo(lowered.compile().as_text(), num_batch_shards=4)
