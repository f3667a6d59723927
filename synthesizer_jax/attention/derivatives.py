"""Functions with a hand-written gradient of first order, and with an implementation for each platform.

`with_gradient` is `jax.custom_vjp` with passes that JAX neither differentiates nor looks into. Otherwise
partial evaluation would hoist the masks of a loop out of it and keep them for all examples, and a
`jax.checkpoint` policy would save the logits of every block.

`platform_dependent` is that of `jax.lax` for such passes. It traces an implementation only when a program
is lowered for its platform: the kernels of other platforms cost a program nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from synthesizer_jax.base.typing import PyTree

_Output = TypeVar("_Output")

FIRST_ORDER = (
    "attention: the fast implementations have gradients of first order only; for forward mode, Hessians "
    'and gradients of gradients use implementation="reference"'
)


def with_gradient(
    forward: Callable[[PyTree], tuple[_Output, PyTree]],
    backward: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
    *,
    reads_output: bool = True,
    name: str | None = None,
) -> Callable[[PyTree], _Output]:
    """Returns a function with a hand-written gradient; other derivatives of it raise a `TypeError`.

    `forward` maps inputs to the output and residuals: what the backward pass needs besides the inputs and
    the output. `backward` maps ``(inputs, out, residuals, dout)`` to cotangents, a tree like the inputs
    with None for integers and booleans; unless `reads_output`, it gets None for the output, which is not
    saved. `name` is the checkpoint name of output and residuals, for `jax.checkpoint` policies.
    """
    forward, backward = _keep_precision(forward), _keep_precision(backward)

    @jax.custom_vjp
    def call(inputs: PyTree) -> _Output:
        return platform_dependent(inputs, default=forward)[0]

    def forward_pass(inputs: PyTree) -> tuple[_Output, PyTree]:
        out, residuals = platform_dependent(inputs, default=forward)
        if name is not None:
            out, residuals = checkpoint_name((out, residuals), name)
        return out, (inputs, out if reads_output else None, residuals)

    def backward_pass(saved: PyTree, dout: PyTree) -> tuple[PyTree]:
        return (platform_dependent(*saved, dout, default=backward),)

    call.defvjp(forward_pass, backward_pass)
    return lambda inputs: call(jax.tree.map(_reverse_only, inputs))


def platform_dependent(
    *args: PyTree, default: Callable[..., PyTree], **implementations: Callable[..., PyTree]
) -> Any:
    """Calls the implementation for the platform of the program, by name, or the default.

    Each returns what the default returns. It closes over no arrays, since it is traced when the program is
    lowered; the caller's precision of products holds there too. JAX looks into none of them, and there are
    no derivatives.
    """
    leaves, treedef = jax.tree.flatten(args)

    def flat(function: Callable[..., PyTree]) -> Callable[..., list[jax.Array]]:
        run = _keep_precision(function)
        return lambda *leaves: jax.tree.leaves(run(*jax.tree.unflatten(treedef, leaves)))

    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*args)
    others = tuple((name, flat(function)) for name, function in implementations.items())
    results = _opaque_p.bind(*leaves, jaxpr=jaxpr, others=others)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _keep_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that is traced, whenever that is, with the precision of products of its caller."""
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def run(*args: PyTree) -> Any:
        with jax.default_matmul_precision(precision):
            return function(*args)

    return run


def _raise_first_order(*_: object, **__: object) -> NoReturn:
    raise TypeError(FIRST_ORDER)


_Implementations: TypeAlias = tuple[tuple[str, Callable[..., list[jax.Array]]], ...]
_opaque_p = Primitive("opaque")
"""Evaluates a jaxpr, or another function for the platform that the program is lowered for."""
_opaque_p.multiple_results = True


@_opaque_p.def_impl
def _opaque_impl(*args: jax.Array, **params: Any) -> list[jax.Array]:
    platform = jax.default_backend()
    return _evaluate_on("cuda" if platform == "gpu" else platform)(*args, **params)


@_opaque_p.def_abstract_eval
def _opaque_abstract_eval(
    *args: ShapedArray, jaxpr: ClosedJaxpr, others: _Implementations
) -> list[ShapedArray]:
    del args, others
    return list(jaxpr.out_avals)


def _opaque_batch(
    args: Sequence[jax.Array], axes: Sequence[int | None], *, jaxpr: ClosedJaxpr, others: _Implementations
) -> tuple[list[jax.Array], list[int]]:
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)))(*args)
    others = tuple((name, jax.vmap(function, tuple(axes))) for name, function in others)
    results = _opaque_p.bind(*args, jaxpr=mapped, others=others)
    return results, [0] * len(results)


def _evaluate_on(platform: str) -> Callable[..., list[jax.Array]]:
    def evaluate(*args: jax.Array, jaxpr: ClosedJaxpr, others: _Implementations) -> list[jax.Array]:
        function = dict(others).get(platform) or jaxpr_as_fun(jaxpr)
        return function(*args)

    return evaluate


ad.primitive_jvps[_opaque_p] = _raise_first_order
batching.primitive_batchers[_opaque_p] = _opaque_batch
mlir.register_lowering(_opaque_p, mlir.lower_fun(_evaluate_on("default"), multiple_results=True))
for _name in ("cuda", "rocm", "tpu"):
    _lowering = mlir.lower_fun(_evaluate_on(_name), multiple_results=True)
    mlir.register_lowering(_opaque_p, _lowering, platform=_name)


_tangent_p = Primitive("reverse_only")
"""The identity of tangents that are transposed, as in reverse mode, and never computed."""
_tangent_p.def_impl(_raise_first_order)
_tangent_p.def_abstract_eval(lambda aval: aval)
ad.deflinear(_tangent_p, lambda cotangent: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _raise_first_order)


def _reverse_only(x: jax.Array) -> jax.Array:
    """Returns the array, whose tangents can only be transposed."""
    return _identity(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


@jax.custom_jvp
def _identity(x: jax.Array) -> jax.Array:
    return x


@_identity.defjvp
def _identity_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return primals[0], _tangent_p.bind(tangents[0])
