"""How attention is spread over a mesh."""

from __future__ import annotations

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh axes that divide the examples and the heads.

    Attributes:
      mesh: the mesh.
      batch: names of the axes that divide the batch.
      heads: names of the axes that divide the heads.
    """

    mesh: jax.sharding.Mesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
