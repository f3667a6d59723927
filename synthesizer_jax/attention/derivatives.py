"""Functions with a hand-written gradient that can be differentiated again, and in forward mode.

`jax.custom_vjp` rules out forward mode, and derivatives of higher order would differentiate its backward
pass, which loops with dynamic updates and Pallas kernels do not support. Here a function's tangent is a
linear map of its own, a JAX primitive that computes itself and its transpose in either of two ways: the
fast one, which reverse mode runs, and one made of a plain form of the function, which every other
derivative comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

Arrays = Sequence[Any]
LeafFunction = Callable[[Arrays, Arrays], list[Any]]


def with_gradient(
    forward: Callable[[Any], tuple[Any, Any]],
    backward: Callable[[Any, Any, Any, Any], Any],
    plain: Callable[[Any], Any],
    *,
    primal: Callable[[Any], Any] | None = None,
    reads_output: bool = True,
    name: str | None = None,
) -> Callable[[Any], Any]:
    """A function whose first reverse-mode derivative is hand-written, and all others follow.

    Args:
      forward: ``inputs -> (out, kept)``; `kept` is what the backward pass saves besides inputs and
        output.
      backward: ``(inputs, out, kept, g) -> cotangents``, a tree like the inputs; the cotangents of
        integers and booleans are not read.
      plain: ``inputs -> out``, the same function as differentiable JAX code. Its derivatives of order
        two and up, and in forward mode, are taken by JAX.
      primal: ``inputs -> out``, run where no derivative is asked for. None: `forward`.
      reads_output: False: `backward` is given None for the output, which is then not saved.
      name: what `jax.checkpoint` policies call the output and `kept`.

    Returns:
      ``inputs -> out``.
    """

    def call(inputs: Any) -> Any:
        leaves, tree = _flatten(inputs)
        saving, shapes = jax.make_jaxpr(forward, return_shape=True)(inputs)
        program = saving if primal is None else jax.make_jaxpr(primal)(inputs)
        (_, out_tree), (_, kept_tree) = map(_flatten, shapes)

        def backward_leaves(leaves: Arrays, out: Arrays, kept: Arrays, g: Arrays) -> list[Any]:
            known = out_tree.unflatten(out) if reads_output else None
            results = known, kept_tree.unflatten(kept), out_tree.unflatten(g)
            return tree.flatten_up_to(backward(tree.unflatten(leaves), *results))

        def plain_leaves(leaves: Arrays) -> list[Any]:
            return jax.tree.leaves(plain(tree.unflatten(leaves)))

        count = out_tree.num_leaves
        function = Function(
            program, saving, backward_leaves, plain_leaves, count, reads_output, name
        )
        found = differentiable.bind(*leaves, function=function)
        return out_tree.unflatten(found[: function.outputs])

    return call


@dataclasses.dataclass(frozen=True, eq=False)
class Function:
    """What `with_gradient` was given, on the leaves of trees.

    Attributes:
      program: inputs to outputs, and what else it returns.
      saving: inputs to outputs and what is kept; run where a derivative is asked for.
      backward: inputs, outputs, what is kept and the outputs' cotangents to the inputs' cotangents.
      plain: inputs to outputs.
      outputs: the number of outputs.
      reads_output: whether `backward` reads the outputs; otherwise it is given none.
      name: what `jax.checkpoint` policies call what the program returns.
    """

    program: ClosedJaxpr
    saving: ClosedJaxpr
    backward: Callable[[Arrays, Arrays, Arrays, Arrays], list[Any]]
    plain: Callable[[Arrays], list[Any]]
    outputs: int
    reads_output: bool
    name: str | None

    def batched(self, leaves: Arrays, axes: Arrays) -> Function:
        """The function under `jax.vmap`, its results mapped along their first axes.

        Args:
          leaves: the inputs.
          axes: the mapped axis of every input, or None.
        """
        axes = list(axes)

        def mapped(program: ClosedJaxpr) -> ClosedJaxpr:
            run = jaxpr_as_fun(program)
            return jax.make_jaxpr(jax.vmap(lambda leaves: run(*leaves), (axes,)))(list(leaves))

        def backward(leaves: Arrays, *results: Arrays) -> list[Any]:
            mapped = jax.vmap(self._inexact_cotangents, (axes, 0, 0, 0))(leaves, *results)
            return [_unmapped(d, axis) for d, axis in zip(mapped, axes, strict=True)]

        saving = mapped(self.saving)
        return dataclasses.replace(
            self,
            program=saving if self.program is self.saving else mapped(self.program),
            saving=saving,
            backward=backward,
            plain=lambda leaves: jax.vmap(self.plain, (axes,))(list(leaves)),
        )

    def _inexact_cotangents(self, leaves: Arrays, *results: Arrays) -> list[Any]:
        found = self.backward(leaves, *results)
        return [d if _is_inexact(x) else None for d, x in zip(found, leaves, strict=True)]


def _unmapped(cotangent: Any, axis: int | None) -> Any:
    """The cotangent of an input mapped along `axis`, from one mapped along its first axis."""
    if cotangent is None:
        return None
    return cotangent.sum(axis=0) if axis is None else jnp.moveaxis(cotangent, 0, axis)


differentiable = Primitive("differentiable")
"""Applies a `Function` to its inputs."""
differentiable.multiple_results = True


@differentiable.def_impl
def _run(*leaves: Any, function: Function) -> list[Any]:
    return jaxpr_as_fun(function.program)(*leaves)


@differentiable.def_abstract_eval
def _shapes(*leaves: Any, function: Function) -> list[Any]:
    del leaves
    return list(function.program.out_avals)


def _run_jvp(
    leaves: Arrays, tangents: Arrays, *, function: Function
) -> tuple[list[Any], list[Any]]:
    found = differentiable.bind(
        *leaves, function=dataclasses.replace(function, program=function.saving)
    )
    if function.name is not None:
        found = [checkpoint_name(x, function.name) for x in found]
    dout = _tangent(function, leaves, found, tangents)
    found = found[: len(function.program.out_avals)]
    return found, [*dout, *(_zero(x) for x in found[function.outputs :])]


def _run_batched(
    leaves: Arrays, axes: Arrays, *, function: Function
) -> tuple[list[Any], list[int]]:
    found = differentiable.bind(*leaves, function=function.batched(leaves, axes))
    return found, [0] * len(found)


ad.primitive_jvps[differentiable] = _run_jvp
batching.primitive_batchers[differentiable] = _run_batched
mlir.register_lowering(differentiable, mlir.lower_fun(_run, multiple_results=True))


@dataclasses.dataclass(frozen=True, eq=False)
class LinearMap:
    """A linear function of some arrays, given others, and its transpose.

    Every function takes the leaves of the residuals and those of the argument, and returns leaves.

    Attributes:
      function: the map as it is computed.
      transpose: the transposed map.
      plain: the map as JAX code that can be differentiated in the residuals.
      plain_transpose: likewise for the transposed map.
      primals: the number of leading residuals that `plain` depends on; the others are made of these.
    """

    function: LeafFunction
    transpose: LeafFunction
    plain: LeafFunction
    plain_transpose: LeafFunction
    primals: int

    def transposed(self) -> LinearMap:
        """The transposed map."""
        return LinearMap(
            self.transpose, self.function, self.plain_transpose, self.plain, self.primals
        )

    def batched(self, axes: Arrays) -> LinearMap:
        """The map under `jax.vmap`, its argument and result mapped along their first axes.

        Args:
          axes: the mapped axis of every residual, or None.
        """

        def mapped(function: LeafFunction) -> LeafFunction:
            return lambda residuals, x: jax.vmap(function, (list(axes), 0))(list(residuals), x)

        return LinearMap(
            mapped(self.function),
            mapped(self.transpose),
            mapped(self.plain),
            mapped(self.plain_transpose),
            self.primals,
        )


def _tangent(function: Function, leaves: Arrays, found: Arrays, tangents: Arrays) -> list[Any]:
    """The tangents of a `Function`'s outputs, a `LinearMap` of the inexact inputs' tangents."""
    inexact = [_is_inexact(x) for x in leaves]
    primals = len(leaves)
    saved = found if function.reads_output else found[function.outputs :]
    outs = function.outputs if function.reads_output else 0

    def only_inexact(leaves: Arrays) -> list[Any]:
        return [x for x, wanted in zip(leaves, inexact, strict=True) if wanted]

    def of_inexact(residuals: Arrays) -> Callable[[list[Any]], list[Any]]:
        """`Function.plain` as a function of the inexact inputs."""

        def plain(values: list[Any]) -> list[Any]:
            rest = iter(values)
            pairs = zip(residuals[:primals], inexact, strict=True)
            return function.plain([next(rest) if wanted else x for x, wanted in pairs])

        return plain

    def push(residuals: Arrays, x: Arrays) -> list[Any]:
        at = only_inexact(residuals[:primals])
        return jax.jvp(of_inexact(residuals), (at,), (list(x),))[1]

    def pull_plain(residuals: Arrays, g: Arrays) -> list[Any]:
        at = only_inexact(residuals[:primals])
        return jax.vjp(of_inexact(residuals), at)[1](list(g))[0]

    def pull(residuals: Arrays, g: Arrays) -> list[Any]:
        results = residuals[primals : primals + outs], residuals[primals + outs :]
        return only_inexact(function.backward(residuals[:primals], *results, g))

    return linear_map.bind(
        *leaves,
        *saved,
        *map(ad.instantiate_zeros, only_inexact(tangents)),
        linear=LinearMap(push, pull, push, pull_plain, primals),
        residuals=primals + len(saved),
        results=tuple(jax.typeof(x) for x in found[: function.outputs]),
    )


linear_map = Primitive("linear_map")
"""Applies a `LinearMap`: residuals, then the argument's leaves."""
linear_map.multiple_results = True


@linear_map.def_impl
def _apply(*args: Any, linear: LinearMap, residuals: int, results: Any) -> list[Any]:
    del results
    return linear.function(list(args[:residuals]), list(args[residuals:]))


@linear_map.def_abstract_eval
def _abstract(*args: Any, linear: LinearMap, residuals: int, results: Any) -> list[Any]:
    del args, linear, residuals
    return list(results)


mlir.register_lowering(linear_map, mlir.lower_fun(_apply, multiple_results=True))


def _jvp(
    primals: Arrays, tangents: Arrays, *, linear: LinearMap, residuals: int, results: Any
) -> tuple[list[Any], list[Any]]:
    options = {"linear": linear, "residuals": residuals, "results": results}
    given, x = list(primals[:residuals]), list(primals[residuals:])
    dgiven, dx = tangents[: linear.primals], tangents[residuals:]
    out = linear_map.bind(*given, *x, **options)
    parts = []
    if not all(isinstance(t, ad.Zero) for t in dx):
        parts.append(linear_map.bind(*given, *map(ad.instantiate_zeros, dx), **options))
    moving = [i for i, t in enumerate(dgiven) if not isinstance(t, ad.Zero)]
    if moving:

        def of_moving(values: list[Any]) -> list[Any]:
            mixed = list(given)
            for i, value in zip(moving, values, strict=True):
                mixed[i] = value
            return linear.plain(mixed, x)

        at, direction = [given[i] for i in moving], [dgiven[i] for i in moving]
        parts.append(jax.jvp(of_moving, (at,), (direction,))[1])
    if not parts:
        return out, [_zero(y) for y in out]
    return out, [sum(terms[1:], terms[0]) for terms in zip(*parts, strict=True)]


def _transpose(
    cotangents: Arrays, *args: Any, linear: LinearMap, residuals: int, results: Any
) -> list[Any]:
    g = [
        jax.lax.full(y.shape, 0, y.dtype) if isinstance(ct, ad.Zero) else ct
        for ct, y in zip(cotangents, results, strict=True)
    ]
    x = args[residuals:]
    back = linear_map.bind(
        *args[:residuals],
        *g,
        linear=linear.transposed(),
        residuals=residuals,
        results=tuple(t.aval if ad.is_undefined_primal(t) else jax.typeof(t) for t in x),
    )
    wanted = [d if ad.is_undefined_primal(t) else None for d, t in zip(back, x, strict=True)]
    return [None] * residuals + wanted


def _batch(
    args: Arrays, axes: Arrays, *, linear: LinearMap, residuals: int, results: Any
) -> tuple[list[Any], list[int]]:
    (size,) = {x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None}
    x = [
        jnp.broadcast_to(t, (size, *jnp.shape(t))) if axis is None else jnp.moveaxis(t, axis, 0)
        for t, axis in zip(args[residuals:], axes[residuals:], strict=True)
    ]
    mapped = linear.batched(axes[:residuals])
    del results
    result = linear_map.bind(
        *args[:residuals],
        *x,
        linear=mapped,
        residuals=residuals,
        results=tuple(_abstract_results(mapped.function, args[:residuals], x)),
    )
    return result, [0] * len(result)


ad.primitive_jvps[linear_map] = _jvp
ad.primitive_transposes[linear_map] = _transpose
batching.primitive_batchers[linear_map] = _batch


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    leaves, structure = jax.tree.flatten(tree)
    return leaves, structure


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def _abstract_results(function: Callable[..., Any], *arguments: Arrays) -> list[Any]:
    """The types of what a function of leaves returns."""
    return list(jax.make_jaxpr(function)(*map(list, arguments)).out_avals)


def _zero(x: Any) -> ad.Zero:
    return ad.Zero(jax.typeof(x).to_tangent_aval())
