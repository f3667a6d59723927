"""Computes parameters, floating-point operations and cache sizes of a model from its shapes."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import TypeVar

import jax
from jax.extend import core as jex_core

from synthesizer_jax.base.registry import replace
from synthesizer_jax.base.typing import PyTree
from synthesizer_jax.models.stack import Stack
from synthesizer_jax.models.token_model import DecodingCache, TextToText, TokenModel, stacks_of
from synthesizer_jax.primitives.parameters import Variables, abstract_variables, apply_method

Model = TypeVar("Model", bound=TokenModel)


@dataclasses.dataclass(frozen=True)
class Summary:
    """The costs of a model.

    Attributes:
      parameters: the number of trainable parameters.
      constants: the number of values that are saved but not trained, such as Fixed Random tables.
      tables_per_layer: the number of parameters in tables over query and key positions, for the
        layer that has most of them. It grows with max_length².
      positions: the number of parameters in relative-bias tables and learned positions.
      flops_per_token: floating-point operations of a forward pass (two per multiply-add), divided
        by the number of tokens in inputs and targets together. The sequences have the lengths that
        were given to `summarize`.
      cache_bytes_per_token: bytes of the decoder's cache per position and example.
    """

    parameters: int
    constants: int
    tables_per_layer: int
    positions: int
    flops_per_token: int
    cache_bytes_per_token: int


def summarize(model: TokenModel, *, inputs_length: int = 512, targets_length: int = 114) -> Summary:
    """Returns the costs of an unbound model without allocating arrays.

    Args:
      model: the model.
      inputs_length: the number of input tokens for which operations are counted.
      targets_length: the number of target tokens for which operations are counted.
    """
    model = _scan_runs(model)
    example = model.example(inputs_length, targets_length)
    shapes, axes = abstract_variables(model, *example)
    lengths = {"inputs_length": inputs_length, "targets_length": targets_length}
    total = sum(tokens.shape[1] for tokens in example)
    return Summary(
        parameters=num_elements(shapes["params"]),
        constants=num_elements(shapes.get("constants", {})),
        tables_per_layer=tables_per_layer(shapes, axes),
        positions=_num_position_parameters(shapes["params"], axes["params"]),
        flops_per_token=round(forward_flops(model, **lengths) / total),
        cache_bytes_per_token=cache_bytes(model, example[0], targets_length),
    )


@functools.lru_cache(maxsize=32)
def forward_flops(model: TokenModel, *, inputs_length: int, targets_length: int) -> int:
    """Returns the floating-point operations of the forward pass of one example.

    Only matrix products are counted. A multiply-add counts as two operations.

    Args:
      model: the model.
      inputs_length: the number of input tokens, including padding.
      targets_length: the number of target tokens, including padding. An `Encoder` has no targets.
    """
    model = _scan_runs(model)
    example = model.example(inputs_length, targets_length)
    shapes, _ = abstract_variables(model, *example)
    return flops(jax.make_jaxpr(model.apply)(shapes, *example).jaxpr)


def _scan_runs(model: TokenModel) -> TokenModel:
    """Returns the model with scanned layers, so that JAX traces each run of blocks only once."""
    plain = {n: s for n, s in stacks_of(model).items() if type(s) is Stack}
    return replace(model, **{name: replace(s, scan=True) for name, s in plain.items()})


def num_elements(tree: PyTree) -> int:
    """Returns the number of elements of a pytree of arrays or `jax.ShapeDtypeStruct`."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(tree))


def tables_per_layer(shapes: PyTree, axes: PyTree) -> int:
    """Returns the number of elements of ``[query_length, key_length]`` tables in the largest layer.

    Args:
      shapes: the variables of a model, as arrays or `jax.ShapeDtypeStruct`.
      axes: the names of the logical axes of each variable.
    """
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


def _num_position_parameters(params: PyTree, axes: PyTree) -> int:
    """Returns the number of parameters of relative biases and of learned positions."""
    leaves = jax.tree.leaves(params)
    names = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    special = {"relpos_buckets", "length"}
    return sum(
        math.prod(leaf.shape) for leaf, n in zip(leaves, names, strict=True) if special & set(n)
    )


def flops(jaxpr: jex_core.Jaxpr | jex_core.ClosedJaxpr) -> int:
    """Returns the floating-point operations of all matrix products in a jaxpr.

    The body of a scan counts as often as it runs.
    """
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(_shape(eqn.invars[0])[i] for i in contract)
            total += 2 * inner * math.prod(_shape(eqn.outvars[0]))
            continue
        if eqn.primitive.name == "pallas_call":  # its jaxpr computes only one program of the grid
            total += eqn.params["cost_estimate"].flops
            continue
        repeats = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        branches = [flops(sub) for sub in _sub_jaxprs(eqn.params)]
        # A condition is a check with a fallback, or a choice by platform. Only one branch runs, and
        # it is the one with the fewest operations.
        total += min(branches) if eqn.primitive.name == "cond" else repeats * sum(branches)
    return total


def _shape(value: jex_core.Var | jex_core.Literal) -> tuple[int, ...]:
    """Returns the shape of a value in a jaxpr."""
    assert isinstance(value.aval, jax.core.ShapedArray)
    return value.aval.shape


def _sub_jaxprs(params: Mapping[str, object]) -> list[jex_core.Jaxpr | jex_core.ClosedJaxpr]:
    """Returns the jaxprs in the parameters of an equation, such as the body of a loop."""
    values = [v for p in params.values() for v in (p if isinstance(p, tuple | list) else [p])]
    kinds = (jex_core.ClosedJaxpr, jex_core.Jaxpr)  # one class since jax 0.11
    return [v for v in values if isinstance(v, kinds)]


def cache_bytes(model: TokenModel, tokens: jax.ShapeDtypeStruct, length: int) -> int:
    """Returns the bytes of all self-attention caches of the decoder, per position and example.

    Args:
      model: the model. A model without a decoder has 0 bytes.
      tokens: the shape and dtype of the input tokens, ``[batch, n]``.
      length: the number of positions of the decoder.
    """
    if not isinstance(model, TextToText):
        return 0
    total = 0
    for index, run in enumerate(stacks_of(model)["decoder"].runs):
        alone = _one_layer(model, index)
        shapes, _ = abstract_variables(alone, *alone.example(tokens.shape[1], length))

        def init(
            variables: Variables, tokens: jax.Array, alone: TextToText = alone
        ) -> DecodingCache:
            """Returns the empty cache of the model with one decoder layer."""
            return apply_method(alone.init_cache, variables, tokens, max_length=length)

        # All layers of a run have equal caches, so that the cache of one layer is enough.
        (layer,) = jax.eval_shape(init, shapes, tokens).layers
        arrays = [x for x in jax.tree.leaves(layer.self_attention) if x.ndim > 1]
        positions = length + (0 if layer.in_decoder else tokens.shape[1])
        total += run.repeats * sum(x.size * x.dtype.itemsize for x in arrays) // positions
    return total


def _one_layer(model: Model, index: int) -> Model:
    """Returns the model with only one layer in the decoder and one in the encoder.

    The decoder's layer is from its run `index`, and the encoder's layer is from its first run.
    """
    shortened = {}
    for name, stack in stacks_of(model).items():
        run = stack.runs[index if name == "decoder" else 0]
        shortened[name] = replace(stack, runs=(replace(run, repeats=1),), scan=False)
    return replace(model, **shortened)
