"""Functions with hand-written gradients, and functions with an implementation for each platform.

`with_gradient` works like `jax.custom_vjp`, but its forward and backward pass are opaque to JAX.
JAX traces the forward and backward pass of a plain `jax.custom_vjp`, which has two bad effects.
First, partial evaluation moves the computation of masks out of the loop over the examples, and then
stores the masks of all examples. Second, a `jax.checkpoint` policy may save the logits of every
tile.

`platform_dependent` works like `jax.lax.platform_dependent`, but its functions are opaque to JAX.
An implementation is traced only when a program is lowered for its platform. Kernels for other
platforms therefore cost no tracing time, and their modules are not even imported.

`with_gradient` and `platform_dependent` use the JAX primitive `_opaque_p`. In a jaxpr, an equation
with this primitive contains all implementations of a function.
"""

from __future__ import annotations

import functools
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
    reads_inputs: bool = True,
    reads_output: bool = True,
    name: str | None = None,
) -> Callable[[PyTree], _Output]:
    """Returns a function with a hand-written gradient.

    Any derivative of the function other than a first-order gradient raises a `TypeError`.

    Args:
      forward: a function that maps the inputs to the output and the residuals. The residuals are
        arrays that the backward pass needs in addition to the inputs and the output.
      backward: a function that maps ``(inputs, out, residuals, dout)`` to the cotangents. The
        cotangents are a pytree like the inputs, with None for integers and booleans.
      reads_inputs: whether the backward pass reads the inputs. If `reads_inputs` is false, the
        inputs are not saved, and `backward` gets None as `inputs`.
      reads_output: whether the backward pass reads the output. If `reads_output` is false, the
        output is not saved, and `backward` gets None as `out`.
      name: the checkpoint name of the output and the residuals for `jax.checkpoint` policies, or
        None for no name.
    """
    forward = _keep_precision(forward)
    backward = _keep_precision(backward)

    @jax.custom_vjp
    def call(inputs: PyTree) -> _Output:
        """Returns the output. JAX calls this function if no derivative is taken."""
        return _opaque(forward, inputs)[0]

    def forward_pass(inputs: PyTree) -> tuple[_Output, PyTree]:
        """Returns the output, and the arrays that are saved for the backward pass."""
        out, residuals = _opaque(forward, inputs)
        if name is not None:
            out, residuals = checkpoint_name((out, residuals), name)
        saved_inputs = inputs if reads_inputs else None
        saved_out = out if reads_output else None
        return out, (saved_inputs, saved_out, residuals)

    def backward_pass(saved: PyTree, dout: PyTree) -> tuple[PyTree]:
        """Returns the cotangents of the inputs."""
        return (_opaque(backward, *saved, dout),)

    call.defvjp(forward_pass, backward_pass)
    return lambda inputs: call(jax.tree.map(_reverse_only, inputs))


def _opaque(function: Callable[..., PyTree], *args: PyTree) -> Any:
    """Calls a function that is opaque to JAX and has a single implementation for all platforms."""
    return platform_dependent(*args, default=function)


def platform_dependent(
    *args: PyTree,
    default: Callable[..., PyTree],
    kernels: Mapping[str, Callable[[], Callable[..., PyTree] | None]] | None = None,
    **implementations: Callable[..., PyTree],
) -> Any:
    """Calls the kernel or the implementation for the program's platform, or else the default.

    All functions must return the same shapes and dtypes as the default. The functions must not
    close over arrays, because they are traced only when the program is lowered. Tracing uses the
    mesh and the precision of matrix products that are set when `platform_dependent` is called. The
    functions are opaque to JAX, so JAX cannot differentiate them.

    Args:
      *args: the arguments, pytrees of arrays.
      default: the function for all other platforms.
      kernels: maps the name of a platform to a function without arguments. The function returns the
        kernel for the platform, or None if the platform has no kernel that can take the arguments.
        A kernel takes precedence over an implementation for the same platform. The compiler cannot
        divide a kernel over devices; see `on_every_device`. Platforms have the names that JAX's
        lowering uses; see `lowering_platform`.
      **implementations: maps the name of a platform to a function that the compiler can divide over
        devices.

    Raises:
      ValueError: if a program with a kernel is lowered for several TPUs and no mesh was set. The
        error is raised at lowering time.
    """
    leaves, treedef = jax.tree.flatten(args)

    def flat(function: Callable[..., PyTree]) -> Callable[..., list[jax.Array]]:
        """Returns the function with lists of arrays instead of pytrees, as primitives require."""
        run = _keep_precision(function)
        return lambda *leaves: jax.tree.leaves(run(*jax.tree.unflatten(treedef, leaves)))

    # The default is traced immediately, because it defines the shapes that all implementations must
    # return.
    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*args)
    has_mesh = not jax.sharding.get_abstract_mesh().empty

    # Kernels are listed before implementations, because the first available function for a platform
    # is used.
    others = []
    for platform, find in (kernels or {}).items():
        kernel = _LazyKernel(functools.cache(find))
        function = flat(on_every_device(kernel.__call__))
        others.append(_Implementation(platform, function, kernel, lacks_mesh=not has_mesh))
    for platform, implementation in implementations.items():
        others.append(_Implementation(platform, flat(implementation)))
    results = _opaque_p.bind(*leaves, jaxpr=jaxpr, others=tuple(others))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def lowering_platform(backend: str) -> str:
    """Returns the name that JAX's lowering uses for a backend.

    JAX has two names for NVIDIA's GPUs. `jax.default_backend` and `explain` call NVIDIA's GPUs
    ``gpu``. JAX's lowering calls them ``cuda``, and calls AMD's GPUs ``rocm``. All other backends
    have a single name. Implementations and kernels are chosen when a program is lowered, so the
    tables that list them use the names of JAX's lowering.
    """
    return "cuda" if backend == "gpu" else backend


class _LazyKernel(NamedTuple):
    """A kernel that is looked up, and perhaps imported, when it is first needed.

    Attributes:
      find: a function that returns the kernel, or None if no kernel can take the arguments.
    """

    find: Callable[[], Callable[..., PyTree] | None]

    def is_available(self) -> bool:
        """Returns whether a kernel can take the arguments."""
        return self.find() is not None

    def __call__(self, *args: PyTree) -> PyTree:
        """Calls the kernel, which must be available."""
        kernel = self.find()
        assert kernel is not None
        return kernel(*args)


def _keep_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that always runs with the current precision of matrix products.

    The returned function may be traced later, when `jax.default_matmul_precision` has a different
    value.
    """
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def run(*args: PyTree) -> Any:
        with jax.default_matmul_precision(precision):
            return function(*args)

    return run


def _raise_first_order(*_: object, **__: object) -> NoReturn:
    """Raises the error for derivatives that are not implemented."""
    raise TypeError(FIRST_ORDER)


class _Implementation(NamedTuple):
    """A function of arrays for one platform.

    Attributes:
      platform: the name of the platform, as in JAX's lowering rules.
      function: a function that maps arrays to a list of arrays.
      kernel: the kernel that the function calls, or None if the function calls no kernel.
      lacks_mesh: whether the function is a kernel that was created while no mesh was set. Such a
        kernel cannot be divided over several devices.
    """

    platform: str
    function: Callable[..., list[jax.Array]]
    kernel: _LazyKernel | None = None
    lacks_mesh: bool = False


_Implementations: TypeAlias = tuple[_Implementation, ...]
_opaque_p = Primitive("opaque")
"""Evaluates the function for the platform of the program, or else the jaxpr of the default."""
_opaque_p.multiple_results = True


@_opaque_p.def_impl
def _opaque_impl(*args: jax.Array, **params: Any) -> list[jax.Array]:
    """Evaluates the primitive on the default backend, if it is called outside of `jax.jit`."""
    return _evaluate_on(lowering_platform(jax.default_backend()))(*args, **params)


@_opaque_p.def_abstract_eval
def _opaque_abstract_eval(
    *args: ShapedArray, jaxpr: ClosedJaxpr, others: _Implementations
) -> list[ShapedArray]:
    """Returns the shapes and dtypes of the results, which the jaxpr of the default defines."""
    del args, others
    return list(jaxpr.out_avals)


def _opaque_batch(
    args: Sequence[jax.Array],
    axes: Sequence[int | None],
    *,
    jaxpr: ClosedJaxpr,
    others: _Implementations,
) -> tuple[list[jax.Array], list[int]]:
    """Implements `jax.vmap` for the primitive, by mapping the default and all implementations."""
    mapped = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(jaxpr), tuple(axes)))(*args)
    others = tuple(
        other._replace(function=jax.vmap(other.function, tuple(axes))) for other in others
    )
    results = _opaque_p.bind(*args, jaxpr=mapped, others=others)
    return results, [0] * len(results)


def _find_implementation(platform: str, others: _Implementations) -> _Implementation | None:
    """Returns the first available implementation for a platform, or None to use the default."""
    for other in others:
        if other.platform == platform and (other.kernel is None or other.kernel.is_available()):
            return other
    return None


def _evaluate_on(platform: str) -> Callable[..., list[jax.Array]]:
    """Returns a function that evaluates the primitive for a platform."""

    def evaluate(*args: jax.Array, jaxpr: ClosedJaxpr, others: _Implementations) -> list[jax.Array]:
        implementation = _find_implementation(platform, others)
        function = jaxpr_as_fun(jaxpr) if implementation is None else implementation.function
        return function(*args)

    return evaluate


def _lower_on(platform: str) -> Callable[..., Sequence[Any]]:
    """Returns the rule with which JAX lowers the primitive for a platform."""
    lower = mlir.lower_fun(_evaluate_on(platform), multiple_results=True)

    def rule(ctx: mlir.LoweringRuleContext, *args: Any, **params: Any) -> Sequence[Any]:
        implementation = _find_implementation(platform, params["others"])
        if implementation is not None and implementation.lacks_mesh:
            _check_one_device(ctx, platform)
        return lower(ctx, *args, **params)

    return rule


def _check_one_device(ctx: mlir.LoweringRuleContext, platform: str) -> None:
    """Raises an error or warns if a kernel that needs a mesh is lowered for several devices.

    On TPUs, the compiler cannot lower a kernel for several devices without a mesh. On other
    platforms, the compiler gathers the arguments of the kernel on every device, which is correct
    but slow.

    Raises:
      ValueError: if the platform is ``tpu``.
    """
    # The attribute `num_devices` is missing inside of `jax.pmap`, and if all mesh axes are manual.
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
"""The identity function for tangents, which can be transposed but not evaluated.

Reverse mode only transposes this primitive. Forward mode and Hessians would have to evaluate the
primitive, so they raise the error `FIRST_ORDER`.
"""
_tangent_p.def_impl(_raise_first_order)
_tangent_p.def_abstract_eval(lambda aval: aval)
ad.deflinear(_tangent_p, lambda cotangent: [cotangent])
batching.defvectorized(_tangent_p)
mlir.register_lowering(_tangent_p, _raise_first_order)


def _reverse_only(x: jax.Array) -> jax.Array:
    """Returns the array unchanged.

    All derivatives of this function except reverse mode raise an error.
    """
    return _identity(x) if jnp.issubdtype(jnp.result_type(x), jnp.inexact) else x


@jax.custom_jvp
def _identity(x: jax.Array) -> jax.Array:
    """Returns the array unchanged. `_identity_jvp` applies `_tangent_p` to the tangent."""
    return x


@_identity.defjvp
def _identity_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return primals[0], _tangent_p.bind(tangents[0])
