"""Functions with a hand-written gradient of first order, and with an implementation for each platform.

`with_gradient` is `jax.custom_vjp` with passes that JAX neither differentiates nor looks into. Otherwise
partial evaluation would hoist the masks of a loop out of it and keep them for all examples, and a
`jax.checkpoint` policy would save the logits of every block.

`platform_dependent` is that of `jax.lax` for such passes. It traces an implementation only when a program
is lowered for its platform: the kernels of other platforms cost a program nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from synthesizer_jax.attention.explanations import warn_once
from synthesizer_jax.attention.mesh_axes import on_every_device
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
    *args: PyTree,
    default: Callable[..., PyTree],
    kernels: Mapping[str, Callable[..., PyTree]] | None = None,
    **implementations: Callable[..., PyTree],
) -> Any:
    """Calls the kernel or the implementation for the platform of the program, or else the default.

    Each returns what the default returns. It closes over no arrays, since it is traced when the program is
    lowered; the caller's precision of products and mesh hold there too. JAX looks into none of them, and
    there are no derivatives.

    Args:
      *args: the arguments, pytrees of arrays.
      default: is called on all other platforms.
      kernels: functions by platform that the compiler cannot divide over devices; see `on_every_device`.
      **implementations: functions by platform that the compiler can divide.

    Raises:
      ValueError: when a program for several TPUs is lowered, if it has a kernel but no mesh is set.
    """
    leaves, treedef = jax.tree.flatten(args)

    def flat(function: Callable[..., PyTree]) -> Callable[..., list[jax.Array]]:
        run = _keep_precision(function)
        return lambda *leaves: jax.tree.leaves(run(*jax.tree.unflatten(treedef, leaves)))

    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*args)
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    others = {name: _Implementation(flat(function)) for name, function in implementations.items()}
    for name, kernel in (kernels or {}).items():
        others[name] = _Implementation(flat(on_every_device(kernel)), needs_mesh=not has_mesh)
    results = _opaque_p.bind(*leaves, jaxpr=jaxpr, others=tuple(others.items()))
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


class _Implementation(NamedTuple):
    """A function of arrays for one platform.

    `needs_mesh`: it is a kernel that was traced without a mesh, so it cannot run on several devices.
    """

    function: Callable[..., list[jax.Array]]
    needs_mesh: bool = False


_Implementations: TypeAlias = tuple[tuple[str, _Implementation], ...]
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
    others = tuple(
        (name, other._replace(function=jax.vmap(other.function, tuple(axes)))) for name, other in others
    )
    results = _opaque_p.bind(*args, jaxpr=mapped, others=others)
    return results, [0] * len(results)


def _evaluate_on(platform: str) -> Callable[..., list[jax.Array]]:
    def evaluate(*args: jax.Array, jaxpr: ClosedJaxpr, others: _Implementations) -> list[jax.Array]:
        implementation = dict(others).get(platform)
        function = jaxpr_as_fun(jaxpr) if implementation is None else implementation.function
        return function(*args)

    return evaluate


def _lower_on(platform: str) -> Callable[..., Sequence[Any]]:
    """Returns JAX's rule that lowers the primitive for a platform."""
    lower = mlir.lower_fun(_evaluate_on(platform), multiple_results=True)

    def rule(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Sequence[Any]:
        implementation = dict(params["others"]).get(platform)
        if implementation is not None and implementation.needs_mesh:
            _check_one_device(ctx, platform)
        return lower(ctx, *args, **params)

    return rule


def _check_one_device(ctx: mlir.LoweringRuleContext, platform: str) -> None:
    """Refuses a program for several devices on TPUs; elsewhere the compiler gathers the arguments."""
    # The attribute is missing inside of `jax.pmap` and where all mesh axes are manual.
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if num_devices == 1:
        return

    problem = (
        f"attention: a kernel runs in a program for {num_devices} devices, but no mesh is set, so it "
        "cannot be divided"
    )
    remedy = (
        "call the function under jax.set_mesh(mesh), with logical axis rules for 'batch' and 'heads' if "
        "the mesh has automatic axes"
    )
    if platform == "tpu":
        raise ValueError(f"{problem}; {remedy}")
    warn_once(f"{problem}: every device computes the whole batch; {remedy}")


ad.primitive_jvps[_opaque_p] = _raise_first_order
batching.primitive_batchers[_opaque_p] = _opaque_batch
mlir.register_lowering(_opaque_p, _lower_on("default"))
for _name in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_opaque_p, _lower_on(_name), platform=_name)


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
