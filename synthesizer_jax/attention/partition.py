"""Partitions attention over the devices of the surrounding mesh."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.typing import ArrayLike

from synthesizer_jax.attention.masks import Mask
from synthesizer_jax.attention.mesh_axes import (
    axes_along,
    axes_of_type,
    in_auto_mode,
    mesh_of_arguments,
)
from synthesizer_jax.attention.terms import (
    Call,
    Output,
    Relative,
    Term,
    TermArray,
    cut_diagonals,
    map_arrays,
)
from synthesizer_jax.base.messages import not_divisible
from synthesizer_jax.base.typing import PyTree

Function = TypeVar("Function", bound=Callable[..., PyTree])


MeshAxes: TypeAlias = tuple[str, ...] | None
"""The names of the mesh axes that divide an axis of an array, or None if it is not divided."""


@dataclasses.dataclass(frozen=True)
class Partition:
    """The axes of the surrounding mesh that divide examples, heads and queries.

    A route runs under `jax.shard_map`, so that each device computes its own examples and heads. The
    compiler cannot partition a loop over heads and examples. Without `jax.shard_map`, the compiler
    would gather the inputs of the loop on every device. The cotangents of arrays that the examples
    share are summed over the batch axes.

    The axis of queries is also divided if every query may attend to every key, as in encoders. Keys
    and values are then gathered on every device, and each device computes the logits of its own
    queries.

    All axes of a partition belong to the current mesh. Without a mesh, a partition has no axes, and
    `attend` calls the route directly.

    Attributes:
      batch: the names of the mesh axes that divide the batch.
      heads: the names of the mesh axes that divide the heads.
      sequence: the names of the mesh axes that divide the sequence.
    """

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()

    def restricted_to(self, *, batch: int, heads: int) -> Partition:
        """Returns the partition without the mesh axes that do not divide the batch or heads evenly.

        Args:
          batch: the number of examples.
          heads: the number of heads.
        """
        divides_batch = batch % self._size(self.batch) == 0
        divides_heads = heads % self._size(self.heads) == 0
        return Partition(
            batch=self.batch if divides_batch else (),
            heads=self.heads if divides_heads else (),
            sequence=self.sequence,
        )

    def run(self, route: Callable[[Call], Output], call: Call) -> Output:
        """Runs a route under `jax.shard_map`, on the examples, heads and queries of each device.

        Args:
          route: a function of a call.
          call: the attention call, with the arrays of all devices together.

        Returns:
          The output ``[b, q, h, e]`` of all devices together. If `call.returns_log_sums` is True,
          the log sums ``[b, q, h]`` are returned as well.

        Raises:
          ValueError: if the axes do not divide the examples or the heads evenly, or if the mesh
            does not have these axes.
        """
        self._check("batch", self.batch, call.values.shape[0])
        self._check("heads", self.heads, call.values.shape[2])
        offset = call.mask.query_offset
        divides_queries = self._divides_queries(call)

        def inside(call: Call) -> Output:
            """Runs the route on the part of the call that belongs to one device."""
            if isinstance(offset, int):
                # Inside of `jax.shard_map`, the offset is traced unless it is 0. Kernels need a
                # Python number, so the original offset is restored.
                mask = dataclasses.replace(call.mask, query_offset=offset)
                call = dataclasses.replace(call, mask=mask)
            return route(self._own_queries(call) if divides_queries else call)

        queries = self.sequence if divides_queries else None
        names: dict[str | None, MeshAxes] = {"b": self.batch, "h": self.heads, "q": queries}

        def term_spec(a: TermArray) -> PartitionSpec:
            """Returns how an array of a term is divided over the mesh.

            If an axis of examples or queries has size 1, the axis is not divided, because all
            devices share its entry.
            """
            entries: list[MeshAxes] = []
            for axis, size in zip(a.axes, a.x.shape, strict=True):
                is_shared = axis in ("b", "q") and size == 1
                entries.append(None if is_shared else names.get(axis))
            return PartitionSpec(*entries)

        # Each device gets its own part of the arrays that have an axis of examples, heads or
        # queries.
        specs: PyTree = {
            "terms": map_arrays(term_spec, call.terms),
            "values": self._values_spec(call.values),
            "mask": self._mask_spec(call.mask, queries),
            "sinks": None if call.sinks is None else PartitionSpec(self.heads),
        }
        # The output and the log sums share their first axes, and therefore also their sharding.
        sharded = jax.shard_map(
            inside,
            in_specs=(dataclasses.replace(call, **specs),),
            out_specs=self._values_spec(call.values, queries),
            axis_names=self.axis_names,
        )
        out: Output = jax.jit(sharded, inline=True)(call)
        return out

    def map_rows(
        self, function: Callable[..., PyTree], shared: PyTree, *arrays: jax.Array
    ) -> PyTree:
        """Applies a function on each device to the device's own rows and to the shared arrays.

        If the compiler partitioned a lookup or a loop over chunks, it would move rows between
        devices. This method gathers only the shared arrays, and sums their cotangents over the
        devices only once.

        Args:
          function: a function that maps ``(shared, *arrays)`` to arrays. The function must keep the
            order of the rows, and its results must have the same number of entries on each device.
          shared: a pytree of arrays that all rows share.
          *arrays: arrays ``[b, ...]``. The function is called directly with all rows if the
            partition has no batch axes, for example because there is no mesh, or if the batch axes
            do not divide b evenly.

        Returns:
          The results of the function, concatenated over the devices.
        """
        if not self.batch or any(x.shape[0] % self._size(self.batch) for x in arrays):
            return function(shared, *arrays)
        rows = PartitionSpec(self.batch)
        sharded = jax.shard_map(
            function,
            in_specs=(PartitionSpec(), *(rows,) * len(arrays)),
            out_specs=rows,
            axis_names=set(self.batch),
            check_vma=False,
        )

        # Outside of `jax.jit`, `jax.shard_map` cannot make only some axes of a mesh manual.
        return jax.jit(sharded, inline=True)(shared, *arrays)

    @property
    def axis_names(self) -> set[str]:
        """The names of all axes of the partition."""
        return {*self.batch, *self.heads, *self.sequence}

    def constrain(self, x: jax.Array) -> jax.Array:
        """Constrains the sharding of activations ``[b, n, ...]`` and of their cotangents.

        A mesh must be set. `primitives.mesh.constrain` also works without a mesh.

        Without the constraint, the compiler would shard a cotangent like the parameter with which
        the cotangent is multiplied.
        """
        if x.shape[0] % self._size(self.batch):
            return x
        length = None if x.shape[1] % self._size(self.sequence) else self.sequence
        return jax.lax.with_sharding_constraint(x, PartitionSpec(self.batch, length))

    def spec(self, x: jax.Array) -> PartitionSpec:
        """Returns the sharding of an output ``[batch..., q, heads, e]``.

        The output may have any number of batch axes, including zero.
        """
        rows = [self.batch, *[None] * (x.ndim - 4)] if x.ndim > 3 else []
        return PartitionSpec(*rows, self.sequence, self.heads)

    def _size(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along the given mesh axes.

        Raises:
          ValueError: if the mesh does not have one of the axes.
        """
        mesh: AbstractMesh = jax.sharding.get_abstract_mesh()
        unknown = [axis for axis in axes if axis not in mesh.shape]
        if unknown:
            raise ValueError(
                f"Partition: the mesh has no axis {unknown[0]!r}. Its axes are {mesh.axis_names}. "
                "Set the mesh with jax.set_mesh(mesh), and use the names of its axes."
            )
        return math.prod(mesh.shape[axis] for axis in axes)

    def _divides_queries(self, call: Call) -> bool:
        """Returns whether the axis of queries is divided over the mesh.

        The queries are divided if every query may attend to all real keys, and if the number of
        queries is a multiple of the number of devices. Queries of `Banded` terms are not divided,
        because each query needs its own part of the keys.
        """
        devices = self._size(self.sequence)
        mask = call.mask
        patterns = (mask.prefix_lengths, mask.query_segments, mask.allowed)
        sees_all_keys = not mask.has_band and all(pattern is None for pattern in patterns)
        has_logits = not any(term.is_weights for term in call.terms)
        return devices > 1 and call.q_length % devices == 0 and sees_all_keys and has_logits

    def _own_queries(self, call: Call) -> Call:
        """Returns the call for a device's own queries.

        `jax.shard_map` has already divided the arrays with an axis of queries. This method
        restricts `Relative` terms and query lengths to the queries of the device.
        """
        mask = call.mask
        count = call.q_length // self._size(self.sequence)
        first = jax.lax.axis_index(self.sequence) * count  # the device's first query

        def cut(term: Term) -> Term:
            """Returns a `Relative` term for the device's own queries. Other terms are unchanged."""
            if not isinstance(term, Relative):
                return term
            q, k = call.q_length, call.k_length
            diagonals = cut_diagonals(term, q, k, query_offset=mask.query_offset).logits

            # Entry j of `diagonals` belongs to the distance j - (q - 1). On this device, the
            # smallest distance is the distance of key 0 from the last query, which has the index
            # first + count - 1. The entry for the smallest distance has index q - count - first.
            start = q - count - first
            diagonals = jax.lax.dynamic_slice_in_dim(diagonals, start, count + k - 1, axis=1)
            return Relative(diagonals, 1 - count)

        ends = mask.query_lengths
        ends = None if ends is None else jnp.clip(ends - first, 0, count)
        mask = dataclasses.replace(mask, query_lengths=ends, query_offset=0, self_attention=False)
        terms = tuple(map(cut, call.terms))
        return dataclasses.replace(call, terms=terms, mask=mask, q_length=count)

    def _values_spec(self, x: jax.Array, length: MeshAxes = None) -> PartitionSpec:
        """Returns the sharding of an array ``[b, n, h, e]``.

        Args:
          x: the array.
          length: the mesh axes that divide the axis n, or None if the axis is not divided.
        """
        return PartitionSpec(self.batch if x.shape[0] > 1 else None, length, self.heads)

    def _mask_spec(self, mask: Mask, queries: MeshAxes) -> Mask:
        """Returns the sharding of the arrays of a mask, as a mask of `PartitionSpec`."""
        allowed = None
        if mask.allowed is not None:
            batch, heads = (n > 1 for n in mask.allowed.shape[:2])
            allowed = PartitionSpec(self.batch if batch else None, self.heads if heads else None)
        valid = None if mask.query_valid is None else PartitionSpec(self.batch, queries)
        rest = dataclasses.replace(mask, allowed=None, query_valid=None)

        # Lengths and patterns of keys have an axis of examples. A traced offset has no axes.
        rest = jax.tree.map(
            lambda x: PartitionSpec(self.batch) if jnp.ndim(x) else PartitionSpec(), rest
        )
        return dataclasses.replace(rest, allowed=allowed, query_valid=valid)

    def _check(self, name: str, axes: tuple[str, ...], size: int) -> None:
        """Raises a `ValueError` if mesh axes do not divide a number of examples or heads evenly."""
        devices = self._size(axes)
        if size % devices:
            by = f"the {devices} devices of mesh axes {axes}"
            raise ValueError(f"attend: {not_divisible(name, size, by=by, divisor=devices)}")


def partition_of_query(query: ArrayLike, *_: PyTree, **__: PyTree) -> Partition:
    """Returns the explicit mesh axes that divide a query, according to the type of the query.

    The query is ``[batch..., q, heads, e]``. A query with fewer than three axes is not divided,
    because the attention function raises an error for it. Without a mesh, the partition has no
    axes.
    """
    query = jnp.asarray(query)
    if query.ndim < 3:
        return Partition()
    batch = axes_along(query, 0) if query.ndim > 3 else ()
    return Partition(batch, heads=axes_along(query, -2), sequence=axes_along(query, -3))


def partition_by_types(
    partition_of: Callable[..., Partition],
    specs: Callable[[Partition, PyTree], PyTree] = Partition.spec,
) -> Callable[[Function], Function]:
    """Makes a function with an argument `partition` work with explicit mesh axes, JAX's default.

    If the mesh has explicit axes, the function runs with automatic axes instead. The partition is
    read from the types of the arguments, unless the caller passes a partition with axes. If no mesh
    is set, the mesh is also read from the types of the arguments. If the types contain no mesh
    either, or if no axis is explicit, the function is called directly.

    Args:
      partition_of: a function that takes the same arguments, and returns the partition that the
        types of the arguments describe.
      specs: a function that maps the partition and the result to the sharding of the result.

    Returns:
      A decorator.
    """

    def decorate(function: Function) -> Function:
        """Returns the wrapped function."""

        @functools.wraps(function)
        def wrapped(*args: Any, partition: Partition | None = None, **options: Any) -> PyTree:
            """Calls the function, with automatic axes if the mesh has explicit ones."""
            with mesh_of_arguments(args, options):
                if not axes_of_type(AxisType.Explicit):
                    return function(*args, partition=partition, **options)

                if partition is None or not partition.axis_names:
                    partition = partition_of(*args, **options)

                def call(args: PyTree, options: PyTree) -> PyTree:
                    """Calls the function with pytrees, as `in_auto_mode` passes them."""
                    return function(*args, partition=partition, **options)

                return in_auto_mode(call, functools.partial(specs, partition))(args, options)

        return wrapped  # type: ignore[return-value]

    return decorate
