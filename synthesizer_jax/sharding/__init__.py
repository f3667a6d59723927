"""Device meshes, and the rules that map logical axes to mesh axes."""

from synthesizer_jax.sharding.batch_shards import BatchShards, gather_to_host, replicate_to_devices
from synthesizer_jax.sharding.mesh import MeshShape, make_mesh
from synthesizer_jax.sharding.rules import (
    BATCH_AXES,
    MESH_AXES,
    RULES,
    batch_sharding,
    check_batch,
    partition_spec,
    register_mesh_axis,
    replicated,
    shardings,
    use_mesh,
)

__all__ = [
    "BATCH_AXES",
    "MESH_AXES",
    "RULES",
    "BatchShards",
    "MeshShape",
    "batch_sharding",
    "check_batch",
    "gather_to_host",
    "make_mesh",
    "partition_spec",
    "register_mesh_axis",
    "replicate_to_devices",
    "replicated",
    "shardings",
    "use_mesh",
]
