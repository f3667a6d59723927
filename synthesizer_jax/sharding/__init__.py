"""Functions for device meshes, and the rules that map logical axes of arrays to mesh axes."""

from synthesizer_jax.sharding.mesh import (
    MeshShape,
    gather_to_host,
    make_mesh,
    read_to_devices,
    replicate_to_devices,
)
from synthesizer_jax.sharding.rules import (
    BATCH_AXES,
    MESH_AXES,
    RULES,
    batch_sharding,
    batch_shards,
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
    "MeshShape",
    "batch_sharding",
    "batch_shards",
    "check_batch",
    "gather_to_host",
    "make_mesh",
    "partition_spec",
    "read_to_devices",
    "register_mesh_axis",
    "replicate_to_devices",
    "replicated",
    "shardings",
    "use_mesh",
]
