"""Random initial parameters, compiled once for all that are alike.

XLA takes a third of a second for every draw of random bits in a program, and a model has hundreds of
parameters. Those of one shape and distribution differ only in their keys. They are made by one program, to
which a key is an argument; the keys themselves are computed outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.extend import core as jex_core

from synthesizer_jax.base.typing import PyTree

_Tree = TypeVar("_Tree")


def init_arrays(init: Callable[[jax.Array], _Tree], key: jax.Array, shardings: PyTree) -> _Tree:
    """Returns ``jax.jit(init, out_shardings=shardings)(key)``, computed one array at a time."""
    closed, shapes = jax.make_jaxpr(init, return_shape=True)(key)
    jaxpr = closed.jaxpr
    known = dict(zip([*jaxpr.invars, *jaxpr.constvars], [key, *closed.consts], strict=True))
    producers: dict[jex_core.Var, jex_core.JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        producers |= dict.fromkeys(eqn.outvars, eqn)
        if all(map(_is_key, eqn.outvars)):
            part = _Part(eqn.outvars, producers, known)
            if part.equations == [eqn]:
                known |= zip(eqn.outvars, part(*part.arguments(known)), strict=True)
    treedef: Any = jax.tree.structure(shapes)
    places = [None] * treedef.num_leaves if shardings is None else treedef.flatten_up_to(shardings)
    arrays: list[Any] = [None] * len(places)
    programs: dict[Any, Callable[..., list[jax.Array]]] = {}
    rest = []
    for i, (var, sharding) in enumerate(zip(jaxpr.outvars, places, strict=True)):
        part = _Part([var], producers, known)
        if not part.inputs or any(len(eqn.outvars) > 1 for eqn in part.equations):
            rest.append(i)  # no random bits, or a loop that makes several arrays
            continue
        name = part.signature(), sharding
        if name not in programs:
            programs[name] = jax.jit(part, out_shardings=[sharding])
        (arrays[i],) = programs[name](*part.arguments(known))
    part = _Part([jaxpr.outvars[i] for i in rest], producers, known)
    others = jax.jit(part, out_shardings=[places[i] for i in rest])(*part.arguments(known))
    for i, array in zip(rest, others, strict=True):
        arrays[i] = array
    result: _Tree = jax.tree.unflatten(treedef, arrays)
    return result


class _Part:
    """The part of a program that computes some of its values from `inputs`, which are known."""

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
        return [known[var] for var in self.inputs]

    def __call__(self, *args: jax.Array) -> list[jax.Array]:
        env = dict(zip(self.inputs, args, strict=True))
        read = lambda value: value.val if isinstance(value, jex_core.Literal) else env[value]
        for eqn in self.equations:
            params = eqn.primitive.get_bind_params(eqn.params)
            results = eqn.primitive.bind(*map(read, eqn.invars), **params)
            results = results if eqn.primitive.multiple_results else [results]
            env |= zip(eqn.outvars, results, strict=True)
        return [read(value) for value in self.outputs]

    def signature(self) -> Hashable:
        """Returns what is equal for parts that are equal but for the names of variables."""
        variables = [*self.inputs, *(var for eqn in self.equations for var in eqn.outvars)]
        numbers = {var: i for i, var in enumerate(variables)}

        def name(value: jex_core.Var | jex_core.Literal) -> Hashable:
            if isinstance(value, jex_core.Literal):
                return np.asarray(value.val).tobytes(), value.aval
            return numbers[value], value.aval

        # Functions in the parameters are the same objects where JAX has traced them once.
        lines = [(e.primitive, *e.params.items(), *map(name, e.invars)) for e in self.equations]
        return *lines, *map(name, self.outputs)


def _is_key(var: jex_core.Var) -> bool:
    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
