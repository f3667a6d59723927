"""Meshes, and the one table that maps logical axes to them."""

from synthesizer_jax.sharding.mesh import MESH_AXES, MeshShape, make_mesh, on_whole_axes
from synthesizer_jax.sharding.rows import Rows, spread, whole
from synthesizer_jax.sharding.rules import (
    BATCH_AXES,
    RULES,
    batch_sharding,
    check_batch,
    on_mesh,
    replicated,
    shardings,
    spec,
)

__all__ = [
    "BATCH_AXES",
    "MESH_AXES",
    "RULES",
    "MeshShape",
    "Rows",
    "batch_sharding",
    "check_batch",
    "make_mesh",
    "on_mesh",
    "on_whole_axes",
    "replicated",
    "shardings",
    "spec",
    "spread",
    "whole",
]
