"""Draws random initial parameters with one compiled program per kind of parameter.

XLA needs a third of a second to compile every draw of random bits in a program, and a model has
hundreds of parameters. Parameters of the same shape and distribution differ only in their random
keys. One compiled program, which takes the key as an argument, therefore makes all parameters of
one shape and distribution. The keys themselves are computed separately, before any of these
programs runs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core as jex_core

from synthesizer_jax.base.typing import PyTree

_Tree = TypeVar("_Tree")


def init_arrays(
    init: Callable[..., _Tree], key: jax.Array, *arguments: PyTree, shardings: PyTree
) -> _Tree:
    """Returns ``jax.jit(init, out_shardings=shardings)(key, *arguments)``, one array at a time.

    Args:
      init: a traceable function from a random key, and possibly more arguments, to a pytree of
        arrays.
      key: the random key.
      *arguments: more arguments of `init`, which are pytrees of arrays.
      shardings: a pytree of shardings like the result. If `shardings` is None, one device holds all
        arrays.
    """
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(key, *arguments)
    jaxpr = closed.jaxpr
    # `known` holds the values of arguments, constants and keys, which are already computed.
    values = [key, *jax.tree.leaves(arguments), *closed.consts]
    known = dict(zip([*jaxpr.invars, *jaxpr.constvars], values, strict=True))
    # `producers` holds the equation that computes each variable.
    producers: dict[jex_core.Var, jex_core.JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        producers |= dict.fromkeys(eqn.outvars, eqn)
        # Keys are computed here, one equation at a time, so that later parts take them as
        # arguments.
        if all(map(_is_key, eqn.outvars)):
            part = _Part(eqn.outvars, producers, known)
            if part.equations == [eqn]:
                known |= zip(eqn.outvars, part(*part.arguments(known)), strict=True)

    treedef: Any = jax.tree.structure(shapes)
    sharding_of_leaf: list[Any] = [None] * treedef.num_leaves
    if shardings is not None:
        sharding_of_leaf = treedef.flatten_up_to(shardings)
    arrays: list[Any] = [None] * treedef.num_leaves
    programs: dict[Any, Callable[..., list[jax.Array]]] = {}
    rest = []
    for i, (var, sharding) in enumerate(zip(jaxpr.outvars, sharding_of_leaf, strict=True)):
        part = _Part([var], producers, known)
        if not part.inputs or any(len(eqn.outvars) > 1 for eqn in part.equations):
            # Arrays without random bits, and arrays of loops with several results, are made last.
            rest.append(i)
            continue
        # Arrays with equal signatures share one compiled program.
        name = part.signature(), sharding
        if name not in programs:
            programs[name] = jax.jit(part, out_shardings=[sharding])
        (arrays[i],) = programs[name](*part.arguments(known))

    part = _Part([jaxpr.outvars[i] for i in rest], producers, known)
    program = jax.jit(part, out_shardings=[sharding_of_leaf[i] for i in rest])
    others = program(*part.arguments(known))
    for i, array in zip(rest, others, strict=True):
        arrays[i] = array
    result: _Tree = jax.tree.unflatten(treedef, arrays)
    return result


class _Part:
    """A part of a jaxpr, which computes some variables from variables that are known.

    Attributes:
      outputs: the variables that the part computes.
      inputs: the known variables that the part needs. The inputs are the keys of a dictionary,
        because a dictionary keeps the order of its keys.
      equations: the equations of the part, in an order in which they can be computed.
    """

    def __init__(
        self,
        outputs: Sequence[jex_core.Var | jex_core.Literal],
        producers: dict[jex_core.Var, jex_core.JaxprEqn],
        known: Iterable[jex_core.Var],
    ):
        self.outputs = outputs
        self.inputs: dict[jex_core.Var, None] = {}
        equations: dict[int, jex_core.JaxprEqn] = {}

        def visit(value: jex_core.Var | jex_core.Literal) -> None:
            """Adds the equations that compute `value`. Operands come first."""
            if isinstance(value, jex_core.Literal):
                return
            if value in known:
                self.inputs[value] = None
            elif id(eqn := producers[value]) not in equations:
                for operand in eqn.invars:
                    visit(operand)
                equations[id(eqn)] = eqn

        for value in outputs:
            visit(value)
        self.equations = list(equations.values())

    def arguments(self, known: dict[jex_core.Var, Any]) -> list[Any]:
        """Returns the values of the part's inputs."""
        return [known[var] for var in self.inputs]

    def __call__(self, *args: jax.Array) -> list[jax.Array]:
        """Computes the outputs from values of the inputs, equation by equation."""
        env = dict(zip(self.inputs, args, strict=True))

        def read(value: jex_core.Var | jex_core.Literal) -> Any:
            """Returns the value of an input of an equation."""
            if isinstance(value, jex_core.Literal):
                return value.val
            return env[value]

        for eqn in self.equations:
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*map(read, eqn.invars), **params)
            results = results if eqn.primitive.multiple_results else [results]
            env |= zip(eqn.outvars, results, strict=True)
        return [read(value) for value in self.outputs]

    def signature(self) -> Hashable:
        """Returns a value that is equal for parts that differ only in their variables' names."""
        variables = [*self.inputs, *(var for eqn in self.equations for var in eqn.outvars)]
        numbers = {var: i for i, var in enumerate(variables)}

        def name(value: jex_core.Var | jex_core.Literal) -> Hashable:
            """Returns a hashable name of a variable or literal, with its shape and dtype.

            The name of a variable is its number, and the name of a literal is its value.
            """
            if isinstance(value, jex_core.Literal):
                return np.asarray(value.val).tobytes(), value.aval
            return numbers[value], value.aval

        # The parameters of an equation may contain traced functions. JAX traces equal functions
        # only once, so equal functions are represented by the same object and compare as equal.
        lines = [(e.primitive, *e.params.items(), *map(name, e.invars)) for e in self.equations]
        return *lines, *map(name, self.outputs)


def _is_key(var: jex_core.Var) -> bool:
    """Returns whether a variable is a random key or an array of keys."""
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
