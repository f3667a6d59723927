"""Hand-written gradients of first order, and functions with an implementation for each platform.

`with_gradient` is `jax.custom_vjp` for passes that JAX neither differentiates nor looks into. JAX
looks into the passes of a plain `jax.custom_vjp`, with two bad effects. Partial evaluation hoists
the masks of a loop out of the loop, and keeps them for all examples. A `jax.checkpoint` policy may
save the logits of every tile.

`platform_dependent` is `jax.lax.platform_dependent` for such passes. It traces an implementation
only when a program is lowered for its platform, so the kernels of other platforms cost a program
nothing.

Both use a JAX primitive, `_opaque_p`, whose equation in a program holds the implementations.
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
    "attention: this implementation has only gradients of first order, in reverse mode. For "
    "forward mode, Hessians and gradients of gradients, use "
    'implementation="reference".'
)


def with_gradient(
    forward: Callable[[PyTree], tuple[_Output, PyTree]],
    backward: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree],
    *,
    reads_output: bool = True,
    name: str | None = None,
) -> Callable[[PyTree], _Output]:
    """Returns a function with a hand-written gradient. Other derivatives of it raise a `TypeError`.

    Args:
      forward: maps the inputs to the output and the residuals. Residuals are what the backward pass
        needs besides the inputs and the output.
      backward: maps ``(inputs, out, residuals, dout)`` to the cotangents, a pytree like the inputs
        in which the cotangents of integers and booleans are None.
      reads_output: whether the backward pass reads the output. If it does not, the output is not
        saved, and `backward` gets None for it.
      name: the checkpoint name of output and residuals, for policies of `jax.checkpoint`. None if
        they have no name.
    """
    forward = _keep_precision(forward)
    backward = _keep_precision(backward)

    @jax.custom_vjp
    def call(inputs: PyTree) -> _Output:
        """Returns the output. It is what runs if there is no derivative."""
        return platform_dependent(inputs, default=forward)[0]

    def forward_pass(inputs: PyTree) -> tuple[_Output, PyTree]:
        """Returns the output, and the arrays that are saved for the backward pass."""
        out, residuals = platform_dependent(inputs, default=forward)
        if name is not None:
            out, residuals = checkpoint_name((out, residuals), name)
        return out, (inputs, out if reads_output else None, residuals)

    def backward_pass(saved: PyTree, dout: PyTree) -> tuple[PyTree]:
        """Returns the cotangents of the inputs."""
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

    All of them must return the same shapes and dtypes as the default. They must not close over
    arrays, because they are traced when the program is lowered. They are then traced with the
    precision of matrix products and the mesh that are set now. JAX does not look into them, and
    they have no derivatives.

    Args:
      *args: the arguments, pytrees of arrays.
      default: the function for all other platforms.
      kernels: functions by platform that the compiler cannot divide over devices; see
        `on_every_device`.
      **implementations: functions by platform that the compiler can divide over devices.

    Raises:
      ValueError: when a program for several TPUs is lowered that has a kernel, if no mesh was set.
    """
    leaves, treedef = jax.tree.flatten(args)

    def flat(function: Callable[..., PyTree]) -> Callable[..., list[jax.Array]]:
        """Returns the function with lists of arrays instead of pytrees, as primitives need it."""
        run = _keep_precision(function)
        return lambda *leaves: jax.tree.leaves(run(*jax.tree.unflatten(treedef, leaves)))

    # The default is traced now: it defines the shapes of the results.
    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*args)
    has_mesh = not jax.sharding.get_abstract_mesh().empty
    others = {name: _Implementation(flat(function)) for name, function in implementations.items()}
    for name, kernel in (kernels or {}).items():
        others[name] = _Implementation(flat(on_every_device(kernel)), needs_mesh=not has_mesh)
    results = _opaque_p.bind(*leaves, jaxpr=jaxpr, others=tuple(others.items()))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _keep_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that always runs with the precision of matrix products that is set now.

    It may be traced later, when `jax.default_matmul_precision` is no longer set.
    """
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def run(*args: PyTree) -> Any:
        with jax.default_matmul_precision(precision):
            return function(*args)

    return run


def _raise_first_order(*_: object, **__: object) -> NoReturn:
    """Raises the error for derivatives that do not exist."""
    raise TypeError(FIRST_ORDER)


class _Implementation(NamedTuple):
    """A function of arrays for one platform.

    Attributes:
      function: maps arrays to a list of arrays.
      needs_mesh: whether the function is a kernel that was made while no mesh was set. It cannot
        run on several devices then.
    """

    function: Callable[..., list[jax.Array]]
    needs_mesh: bool = False


_Implementations: TypeAlias = tuple[tuple[str, _Implementation], ...]
_opaque_p = Primitive("opaque")
"""Evaluates a jaxpr, or another function if there is one for the platform of the program."""
_opaque_p.multiple_results = True


@_opaque_p.def_impl
def _opaque_impl(*args: jax.Array, **params: Any) -> list[jax.Array]:
    """Evaluates the primitive outside of compiled functions, on the default backend."""
    platform = jax.default_backend()
    return _evaluate_on("cuda" if platform == "gpu" else platform)(*args, **params)


@_opaque_p.def_abstract_eval
def _opaque_abstract_eval(
    *args: ShapedArray, jaxpr: ClosedJaxpr, others: _Implementations
) -> list[ShapedArray]:
    """Returns the shapes and dtypes of the results, from the jaxpr of the default."""
    del args, others
    return list(jaxpr.out_avals)


def _opaque_batch(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    others: _Implementations,
) -> tuple[list[jax.Array], list[int]]:
    """Returns the primitive with all of its functions mapped, which is its rule for `jax.vmap`."""
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)))(*args)
    others = tuple(
        (name, other._replace(function=jax.vmap(other.function, tuple(axes))))
        for name, other in others
    )
    results = _opaque_p.bind(*args, jaxpr=mapped, others=others)
    return results, [0] * len(results)


def _evaluate_on(platform: str) -> Callable[..., list[jax.Array]]:
    """Returns a function that evaluates the primitive for a platform."""

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
    """Raises an error or warns if a kernel that needs a mesh is lowered for several devices.

    On TPUs the compiler cannot do that. On other platforms it gathers the arguments on every
    device, which is right but slow.

    Raises:
      ValueError: if the platform is ``tpu``.
    """
    # The attribute is missing inside of `jax.pmap` and where all mesh axes are manual.
    num_devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if num_devices == 1:
        return

    problem = (
        f"attention: a kernel is part of a program for {num_devices} devices, but no mesh is set, "
        "so the work of the kernel cannot be divided."
    )
    remedy = (
        "Call the function under jax.set_mesh(mesh). If the mesh has automatic axes, also set "
        "logical axis rules for 'batch' and 'heads'."
    )
    if platform == "tpu":
        raise ValueError(f"{problem} {remedy}")
    warn_once(f"{problem} Every device computes the whole batch. {remedy}")


ad.primitive_jvps[_opaque_p] = _raise_first_order
batching.primitive_batchers[_opaque_p] = _opaque_batch
mlir.register_lowering(_opaque_p, _lower_on("default"))
for _name in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_opaque_p, _lower_on(_name), platform=_name)


_tangent_p = Primitive("reverse_only")
"""The identity of tangents in reverse mode.

JAX transposes it, and never computes it. Forward mode would compute it, and so would Hessians. This
is how they get their error message.
"""
_tangent_p.def_impl(_raise_first_order)
_tangent_p.def_abstract_eval(lambda aval: aval)
ad.deflinear(_tangent_p, lambda cotangent: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _raise_first_order)


def _reverse_only(x: jax.Array) -> jax.Array:
    """Returns an array that has derivatives in reverse mode only."""
    return _identity(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


@jax.custom_jvp
def _identity(x: jax.Array) -> jax.Array:
    """Returns the array. Its tangent is the result of `_tangent_p`."""
    return x


@_identity.defjvp
def _identity_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return primals[0], _tangent_p.bind(tangents[0])
