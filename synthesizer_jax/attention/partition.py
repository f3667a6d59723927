"""How attention is divided over the mesh that surrounds it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.terms import (
    LowRank,
    Outer,
    Relative,
    Static,
    Term,
    Terms,
    diagonals,
)

Route = Callable[[Terms, jax.Array, Mask, int], jax.Array]
Axes = tuple[str, ...] | None


def axes_of_type(kind: AxisType) -> tuple[str, ...]:
    """The axes of a kind of the mesh that `jax.set_mesh` or `jax.shard_map` has set."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == kind)


def axes_along(x: Any, axis: int) -> tuple[str, ...]:
    """The explicit mesh axes along which an array is divided in one of its dimensions."""
    entry = jax.typeof(x).sharding.spec[axis]
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def in_auto_mode(function: Callable[..., Any], spec: Any) -> Callable[..., Any]:
    """The function with all explicit mesh axes left to the compiler inside.

    Args:
      function: of trees of arrays.
      spec: ``result -> PartitionSpec``, or a tree of them, how its result is laid out.
    """
    mesh = jax.sharding.get_abstract_mesh()
    explicit = axes_of_type(AxisType.Explicit)
    auto = mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))

    def call(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(auto):
            out = function(*jax.tree.map(_without_types, args))
        return jax.sharding.reshard(out, spec(out))

    return call


def _without_types(x: Any) -> Any:
    """An array in an automatic mesh, laid out as its type says it was in an explicit one."""
    if not isinstance(x, jax.Array):
        return x
    laid_out = jax.typeof(x).sharding.spec
    x = jax.sharding.reshard(x, PartitionSpec())
    if all(entry is None for entry in laid_out) or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return x
    return jax.lax.with_sharding_constraint(x, laid_out)


@dataclasses.dataclass(frozen=True)
class Partition:
    """The axes of the surrounding mesh that divide the examples and the heads.

    The compiler cannot divide a loop over heads and examples and would gather everything around it,
    so a route runs once per device, on that device's examples and heads. The cotangents of what
    examples share are summed over the batch axes.

    Queries may be divided too, where every key may be seen (encoders): keys and values are gathered, and
    a device makes the rows of the logits that belong to its queries.

    Attributes:
      batch: names of the axes that divide the batch.
      heads: names of the axes that divide the heads.
      sequence: names of the axes that divide the length of what the batch's rows hold.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    def fitting(self, *, batch: int, heads: int) -> Partition:
        """The partition without the axes that do not divide numbers of examples and heads."""
        return Partition(
            self.batch if batch % self._size(self.batch) == 0 else (),
            self.heads if heads % self._size(self.heads) == 0 else (),
            self.sequence,
        )

    def spread(self, route: Route, q_length: int) -> Callable[..., jax.Array]:
        """The route on every device's own examples, heads and queries.

        Args:
          route: called with its number of queries last.
          q_length: number of all queries.

        Raises:
          ValueError: when called, if an axis of the values does not divide by its mesh axes.
        """

        def run(terms: Terms, values: jax.Array, mask: Mask) -> jax.Array:
            self._check("batch", self.batch, values.shape[0])
            self._check("heads", self.heads, values.shape[2])
            offset, divided = mask.query_offset, self._divides_queries(terms, mask, q_length)
            count = q_length // self._size(self.sequence) if divided else q_length

            def inside(terms: Terms, values: jax.Array, mask: Mask) -> jax.Array:
                if isinstance(offset, int):  # stays known while tracing
                    mask = dataclasses.replace(mask, query_offset=offset)
                if divided:
                    first = jax.lax.axis_index(self.sequence) * count
                    lengths = (q_length, values.shape[1])
                    terms, mask = own_queries(terms, mask, first, count, lengths)
                return route(terms, values, mask, count)

            queries = self.sequence if divided else None
            # Kernels want all axes; those of length 1 divide nothing.
            mesh = jax.sharding.get_abstract_mesh()
            single = {n for n in axes_of_type(AxisType.Auto) if mesh.shape[n] == 1}
            spread = jax.shard_map(
                inside,
                in_specs=(
                    tuple(self._term_spec(term, queries) for term in terms),
                    self._spec(values),
                    self._mask_spec(mask, queries),
                ),
                out_specs=self._spec(values, queries),
                axis_names=self.names | single,
            )
            return jax.jit(spread, inline=True)(terms, values, mask)

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
        if not self.batch or any(x.shape[0] % self.batch_devices for x in arrays):
            return function(shared, *arrays)
        rows = PartitionSpec(self.batch)
        spread = jax.shard_map(
            function,
            in_specs=(PartitionSpec(), *(rows,) * len(arrays)),
            out_specs=rows,
            axis_names=set(self.batch),
            check_vma=False,
        )
        # Outside of a compiled function JAX divides over all axes of the mesh or none.
        return jax.jit(spread, inline=True)(shared, *arrays)

    @property
    def names(self) -> set[str]:
        """All axes."""
        return {*self.batch, *self.heads, *self.sequence}

    @property
    def batch_devices(self) -> int:
        """How many parts the batch is cut into."""
        return self._size(self.batch)

    def constrain(self, x: jax.Array) -> jax.Array:
        """The same activations ``[b, n, ...]``, they and their cotangents kept on their devices.

        Left to itself the compiler lays a cotangent out like the parameter that it meets, and moves it.
        """
        if x.shape[0] % self.batch_devices:
            return x
        length = None if x.shape[1] % self._size(self.sequence) else self.sequence
        return jax.lax.with_sharding_constraint(x, PartitionSpec(self.batch, length))

    def _size(self, axes: tuple[str, ...]) -> int:
        mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"Partition: the mesh has no axis {unknown[0]!r}, it has {mesh.axis_names}; set the mesh "
                "with jax.set_mesh(mesh), and name its axes"
            )
        return math.prod(mesh.shape[axis] for axis in axes)

    def _divides_queries(self, terms: Terms, mask: Mask, q_length: int) -> bool:
        """Whether `sequence` divides the queries: each sees all keys, and the number divides."""
        ways = self._size(self.sequence)
        patterns = (mask.prefix_lengths, mask.query_segments, mask.allowed, mask.window, mask.ahead)
        everything = not mask.causal and all(pattern is None for pattern in patterns)
        logits = all(isinstance(t, LowRank | Outer | Static | Relative) for t in terms)
        return ways > 1 and q_length % ways == 0 and everything and logits

    def _term_spec(self, term: Term, queries: Axes) -> Any:
        if isinstance(term, LowRank):
            own: Any = {"queries": self._spec(term.queries, queries), "keys": self._spec(term.keys)}
            return dataclasses.replace(term, **own)
        if isinstance(term, Static):
            logits: Any = PartitionSpec(self.heads, queries)
            return dataclasses.replace(term, logits=logits)
        if isinstance(term, Outer):
            return jax.tree.map(lambda x: self._spec(x, queries), term)
        return jax.tree.map(self._spec, term)

    def _spec(self, x: jax.Array, length: Axes = None) -> PartitionSpec:
        """Of arrays ``[b or 1, n, h, r]``, ``[h, ...]`` and ``[q]``."""
        if x.ndim == 1:
            return PartitionSpec()
        if x.ndim < 4:
            return PartitionSpec(self.heads)
        return PartitionSpec(self.batch if x.shape[0] > 1 else None, length, self.heads)

    def _mask_spec(self, mask: Mask, queries: Axes) -> Mask:
        allowed = None
        if mask.allowed is not None:
            batch, heads = (n > 1 for n in mask.allowed.shape[:2])
            allowed = PartitionSpec(self.batch if batch else None, self.heads if heads else None)
        valid = None if mask.query_valid is None else PartitionSpec(self.batch, queries)
        rest = dataclasses.replace(mask, allowed=None, query_valid=None)
        # The offset has no axes.
        rest = jax.tree.map(
            lambda x: PartitionSpec(self.batch) if jnp.ndim(x) else PartitionSpec(), rest
        )
        return dataclasses.replace(rest, allowed=allowed, query_valid=valid)

    def _check(self, name: str, axes: tuple[str, ...], size: int) -> None:
        devices = self._size(axes)
        if size % devices:
            fits = [n for n in (size // devices * devices, -(-size // devices) * devices) if n]
            raise ValueError(
                f"attend: {name}={size} does not divide by the {devices} devices of mesh axes "
                f"{axes}; the nearest that do: {' and '.join(map(str, fits))}"
            )


def own_queries(
    terms: Terms, mask: Mask, first: jax.Array, count: int, lengths: tuple[int, int]
) -> tuple[Terms, Mask]:
    """Terms and mask of some of the queries.

    Args:
      terms: what of them has an axis of queries, ``[b, q, h, r]`` or ``[h, q, k]``, is cut already; the
        columns of a `Relative` are not.
      mask: of all queries.
      first: the first of them, an int32 scalar.
      count: how many they are.
      lengths: numbers of all queries and of all keys.

    Raises:
      ValueError: a `Relative` does not reach from the last query to the first key, or the reverse.
    """
    q_length, k_length = lengths

    def cut(term: Relative) -> Relative:
        columns = diagonals(term, q_length, k_length, mask.query_offset)
        start, size = q_length - count - first, count + k_length - 1
        return Relative(jax.lax.dynamic_slice_in_dim(columns, start, size, axis=1), 1 - count)

    own = tuple(cut(term) if isinstance(term, Relative) else term for term in terms)
    real = mask.query_lengths
    if real is not None:
        real = jnp.clip(real - first, 0, count)
    return own, dataclasses.replace(mask, query_lengths=real, query_offset=0, self_attention=False)
