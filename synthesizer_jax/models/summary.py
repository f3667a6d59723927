"""What a model costs, read from shapes alone: parameters, FLOPs, cache."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from synthesizer_jax.attention.derivatives import Function
from synthesizer_jax.models.encoder import Encoder
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import TokenModel, stacks
from synthesizer_jax.parameters import abstract_variables
from synthesizer_jax.registry import replace


@dataclasses.dataclass(frozen=True)
class Summary:
    """Costs of a model.

    Attributes:
      parameters: trainable parameters.
      constants: numbers that are saved but not trained (Fixed Random tables).
      tables_per_layer: parameters of one layer's tables over query and key positions, which grow
        with max_length².
      positions: parameters of relative-bias tables and of learned positions.
      flops_per_token: forward floating-point operations (two per multiply-add) of a full pass per
        token of input and target, at the lengths given to `summarize`.
      cache_bytes_per_token: bytes that decoding keeps per decoder position and example.
    """

    parameters: int
    constants: int
    tables_per_layer: int
    positions: int
    flops_per_token: int
    cache_bytes_per_token: int


def summarize(model: TokenModel, *, inputs_length: int = 512, targets_length: int = 114) -> Summary:
    """Counts everything under `jax.eval_shape`, allocating nothing.

    Args:
      model: an unbound model.
      inputs_length: encoder tokens of the example that FLOPs are counted for.
      targets_length: decoder tokens of that example.
    """
    model = rolled(model)
    example = model.example(inputs_length, targets_length)
    total = sum(tokens.shape[1] for tokens in example)
    shapes, axes = abstract_variables(model, *example)
    return Summary(
        parameters=count(shapes["params"]),
        constants=count(shapes.get("constants", {})),
        tables_per_layer=tables_per_layer(shapes, axes),
        positions=positions(shapes["params"], axes["params"]),
        flops_per_token=round(_forward_flops(model, shapes, example) / total),
        cache_bytes_per_token=cache_bytes(model, example[0], targets_length),
    )


def forward_flops(model: TokenModel, *, inputs_length: int, targets_length: int) -> int:
    """Floating-point operations of one example's forward pass, two per multiply-add of its products.

    Args:
      model: an unbound model.
      inputs_length: encoder tokens, padding included.
      targets_length: decoder tokens.
    """
    model = rolled(model)
    example = model.example(inputs_length, targets_length)
    shapes, _ = abstract_variables(model, *example)
    return _forward_flops(model, shapes, example)


def _forward_flops(model: TokenModel, shapes: Any, example: tuple[Any, ...]) -> int:
    return flops(jax.make_jaxpr(model.apply)(shapes, *example).jaxpr)


def rolled(model: TokenModel) -> TokenModel:
    """The same model with every run scanned: it is traced once, however deep."""
    plain = {n: s for n, s in stacks(model).items() if type(s) is Stack}
    return replace(model, **{name: replace(s, scan=True) for name, s in plain.items()})


def count(tree: Any) -> int:
    """Number of elements of a tree of arrays or shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def tables_per_layer(shapes: Any, axes: Any) -> int:
    """The largest layer's number of elements in ``[query_length, key_length]`` tables."""
    tables: dict[str, int] = {}
    for path, leaf in jax.tree.leaves_with_path(shapes):
        names = axes
        for key in path:
            names = names[key.key]
        if {"query_length", "key_length"} <= set(names):
            layers = leaf.shape[names.index("layers")] if "layers" in names else 1
            layer = "/".join(str(key.key) for key in path[1:4])
            tables[layer] = tables.get(layer, 0) + math.prod(leaf.shape) // layers
    return max(tables.values(), default=0)


def positions(params: Any, axes: Any) -> int:
    """Parameters of relative-bias tables and learned positions."""
    leaves = jax.tree.leaves(params)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    special = {"relpos_buckets", "length"}
    return sum(
        math.prod(leaf.shape) for leaf, n in zip(leaves, names, strict=True) if special & set(n)
    )


def flops(jaxpr: Any) -> int:
    """Floating-point operations of all matrix products in a jaxpr, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
            total += 2 * inner * math.prod(eqn.outvars[0].aval.shape)
            continue
        if eqn.primitive.name == "pallas_call":  # its body is that of one program
            total += eqn.params["cost_estimate"].flops
            continue
        repeats = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        branches = [flops(sub) for sub in _sub_jaxprs(eqn.params)]
        if eqn.primitive.name == "cond":
            total += min(branches)  # a guard's fallback and another device's way are not the cost
        else:
            total += repeats * sum(branches)
    return total


def _sub_jaxprs(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    values = [v.program if isinstance(v, Function) else v for v in values]
    kinds = (jex_core.ClosedJaxpr, jex_core.Jaxpr)  # one class since jax 0.11
    return [getattr(v, "jaxpr", v) for v in values if isinstance(v, kinds)]


def cache_bytes(model: TokenModel, tokens: jax.ShapeDtypeStruct, length: int) -> int:
    """Bytes of the decoder's self-attention caches per position and example; 0 without a decoder."""
    if isinstance(model, Encoder):
        return 0
    total = 0
    for index, run in enumerate(stacks(model)["decoder"].runs):
        alone: Any = one_layer(model, index)
        room = alone.room(tokens.shape[1], length)
        shapes, _ = abstract_variables(alone, *alone.example(tokens.shape[1], length))
        start = functools.partial(alone.apply, max_length=room, method="start")
        first = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        _, ((own, _),) = jax.eval_shape(start, shapes, tokens, first)
        layer = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(own) if x.ndim > 1)
        total += run.repeats * layer // room
    return total


def one_layer(model: TokenModel, index: int) -> TokenModel:
    """The model with one layer of its decoder's run `index`, and one of its encoder."""
    found = stacks(model)
    cut = {}
    for name, stack in found.items():
        run = stack.runs[index if name == "decoder" else 0]
        cut[name] = replace(stack, runs=(replace(run, repeats=1),), scan=False)
    return replace(model, **cut)
