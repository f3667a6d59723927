"""How attention is spread over a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import Terms

Route = Callable[[Terms, jax.Array, Mask], jax.Array]


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh axes that divide the examples and the heads.

    The compiler cannot divide a loop over heads and examples and would gather everything around it,
    so a route runs once per device, on that device's examples and heads. The cotangents of what
    examples share are summed over the batch axes.

    Attributes:
      mesh: the mesh.
      batch: names of the axes that divide the batch.
      heads: names of the axes that divide the heads.
    """

    mesh: jax.sharding.Mesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()

    def spread(self, route: Route) -> Route:
        """The route on every device's own examples and heads.

        Raises:
          ValueError: when called, if an axis of the values does not divide by its mesh axes.
        """

        def run(terms: Terms, values: jax.Array, mask: Mask) -> jax.Array:
            self._check("batch", self.batch, values.shape[0])
            self._check("heads", self.heads, values.shape[2])
            inputs, offset = (terms, values), mask.query_offset

            def inside(terms: Terms, values: jax.Array, mask: Mask) -> jax.Array:
                if isinstance(offset, int):  # stays known while tracing
                    mask = dataclasses.replace(mask, query_offset=offset)
                return route(terms, values, mask)

            spread = jax.shard_map(
                inside,
                mesh=self.mesh,
                in_specs=(*jax.tree.map(self._spec, inputs), self._mask_spec(mask)),
                out_specs=self._spec(values),
                axis_names={*self.batch, *self.heads},
                check_vma=False,
            )
            return spread(terms, values, mask)

        return run

    def rows(self, function: Callable[..., Any], shared: Any, *arrays: jax.Array) -> Any:
        """A function ``(shared, *arrays) → arrays`` of rows, on every device's own rows.

        Where the compiler would move rows between devices, to look them up in a table or to walk
        through them in chunks, nothing moves but what they share, and its cotangent once.

        Args:
          function: keeps the rows' order; what it makes has an entry, or several, for each device.
          shared: arrays that all rows need, gathered from where the batch axes keep them.
          *arrays: ``[b, ...]``; the devices divide b, or the function is applied as it is.
        """
        if any(x.shape[0] % self.ways for x in arrays):
            return function(shared, *arrays)
        rows = PartitionSpec(self.batch)
        spread = jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=(PartitionSpec(), *(rows,) * len(arrays)),
            out_specs=rows,
            axis_names=set(self.batch),
            check_vma=False,
        )
        return spread(shared, *arrays)

    @property
    def ways(self) -> int:
        """How many parts the batch is cut into."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch)

    def constrain(self, x: jax.Array) -> jax.Array:
        """The same activations ``[b, ...]``, whose rows, and their cotangents', stay on their devices.

        Left to itself the compiler lays a cotangent out like the parameter that it meets, and moves it.
        """
        if x.shape[0] % self.ways:
            return x
        sharding = NamedSharding(self.mesh, PartitionSpec(self.batch))
        return jax.lax.with_sharding_constraint(x, sharding)

    def _spec(self, x: jax.Array) -> PartitionSpec:
        """Of arrays ``[b or 1, n, h, r]``, ``[h, ...]`` and ``[q]``."""
        if x.ndim == 1:
            return PartitionSpec()
        if x.ndim < 4:
            return PartitionSpec(self.heads)
        return PartitionSpec(self.batch if x.shape[0] > 1 else None, None, self.heads)

    def _mask_spec(self, mask: Mask) -> Mask:
        allowed = None
        if mask.allowed is not None:
            batch, heads = (n > 1 for n in mask.allowed.shape[:2])
            allowed = PartitionSpec(self.batch if batch else None, self.heads if heads else None)
        rest = dataclasses.replace(mask, allowed=None, query_offset=None)
        rest = jax.tree.map(lambda _: PartitionSpec(self.batch), rest)
        return dataclasses.replace(rest, allowed=allowed, query_offset=PartitionSpec())

    def _check(self, name: str, axes: tuple[str, ...], size: int) -> None:
        devices = math.prod(self.mesh.shape[axis] for axis in axes)
        if size % devices:
            fits = [n for n in (size // devices * devices, -(-size // devices) * devices) if n]
            raise ValueError(
                f"attend: {name}={size} does not divide by the {devices} devices of mesh axes "
                f"{axes}; the nearest that do: {' and '.join(map(str, fits))}"
            )
