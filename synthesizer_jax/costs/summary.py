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
      tables_per_layer: the number of parameters in tables over query and key positions, in the
        layer that has the most such parameters. This number grows with max_length².
      positions: the number of parameters in relative-bias tables and learned positions.
      flops_per_token: floating-point operations of a forward pass, divided by the number of tokens
        in inputs and targets together. A multiply-add counts as two operations. The sequences have
        the lengths that were given to `summarize`.
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
    scanned = {
        name: replace(stack, scan=True)
        for name, stack in stacks_of(model).items()
        if type(stack) is Stack  # a subclass, such as `UniversalStack`, has no runs to scan
    }
    return replace(model, **scanned)


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
            # An array of a scanned stack contains the tables of several layers.
            layers = leaf.shape[names.index("layers")] if "layers" in names else 1
            # The path contains the collection, the stack, the layer and the mixer, in this order.
            layer = "/".join(str(key.key) for key in path[1:4])
            tables[layer] = tables.get(layer, 0) + math.prod(leaf.shape) // layers
    return max(tables.values(), default=0)


def _num_position_parameters(params: PyTree, axes: PyTree) -> int:
    """Returns the number of parameters of relative biases and of learned positions."""
    leaves = jax.tree.leaves(params)
    axes_of_leaves = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, tuple))
    position_axes = {"relpos_buckets", "length"}
    return sum(
        math.prod(leaf.shape)
        for leaf, names in zip(leaves, axes_of_leaves, strict=True)
        if position_axes & set(names)
    )


def flops(jaxpr: jex_core.Jaxpr | jex_core.ClosedJaxpr) -> int:
    """Returns the floating-point operations of all matrix products in a jaxpr.

    The operations in the body of a scan are multiplied by the number of iterations.
    """
    total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            # Every element of the result is a sum over the contracted axes.
            (contract, _), _ = eqn.params["dimension_numbers"]
            inner = math.prod(_shape(eqn.invars[0])[i] for i in contract)
            total += 2 * inner * math.prod(_shape(eqn.outvars[0]))
            continue
        if name == "pallas_call":
            # The jaxpr of a kernel computes only one program of the grid, so the kernel's own
            # estimate is used.
            total += eqn.params["cost_estimate"].flops
            continue

        inside = [flops(sub) for sub in _sub_jaxprs(eqn.params)]
        if name == "cond":
            # This package uses `jax.lax.cond` for checks with a fallback and for choices by
            # platform. Only one branch of a `cond` runs. The branch with the fewest operations is
            # counted.
            total += min(inside)
        elif name == "scan":
            total += eqn.params["length"] * sum(inside)
        else:
            total += sum(inside)
    return total


def _shape(value: jex_core.Var | jex_core.Literal) -> tuple[int, ...]:
    """Returns the shape of a value in a jaxpr."""
    assert isinstance(value.aval, jax.core.ShapedArray)
    return value.aval.shape


def _sub_jaxprs(params: Mapping[str, object]) -> list[jex_core.Jaxpr | jex_core.ClosedJaxpr]:
    """Returns the jaxprs in the parameters of an equation, such as the body of a loop."""
    kinds = (jex_core.ClosedJaxpr, jex_core.Jaxpr)  # the two classes are the same since JAX 0.11
    found = []
    for value in params.values():
        # The branches of a `jax.lax.cond` are a tuple of jaxprs.
        parts = value if isinstance(value, tuple | list) else [value]
        found += [part for part in parts if isinstance(part, kinds)]
    return found


def cache_bytes(model: TokenModel, tokens: jax.ShapeDtypeStruct, length: int) -> int:
    """Returns the bytes of all self-attention caches of the decoder, per position and example.

    Args:
      model: the model. The result is 0 for a model without a decoder.
      tokens: the shape and dtype of the input tokens, ``[batch, n]``.
      length: the number of positions of the decoder.
    """
    if not isinstance(model, TextToText):
        return 0
    total = 0
    for index, run in enumerate(stacks_of(model)["decoder"].runs):
        # All layers of a run have equal caches, so the cache of one layer is enough.
        alone = _one_layer(model, index)
        shapes, _ = abstract_variables(alone, *alone.example(tokens.shape[1], length))

        def init(
            variables: Variables, tokens: jax.Array, alone: TextToText = alone
        ) -> DecodingCache:
            """Returns the empty cache of the model with one decoder layer."""
            return apply_method(alone.init_cache, variables, tokens, max_length=length)

        (layer,) = jax.eval_shape(init, shapes, tokens).layers
        # Arrays with fewer than two axes are counters, which do not grow with the length.
        arrays = [x for x in jax.tree.leaves(layer.self_attention) if x.ndim > 1]
        # A language model reads its inputs and targets in one stack, so its cache has room for
        # inputs and targets.
        positions = length if layer.in_decoder else length + tokens.shape[1]
        total += run.repeats * sum(x.size * x.dtype.itemsize for x in arrays) // positions
    return total


def _one_layer(model: Model, index: int) -> Model:
    """Returns the model with only one layer in each of its stacks.

    The layer of the decoder is from the decoder's run `index`, and the layer of the encoder is from
    the encoder's first run.
    """
    shortened = {}
    for name, stack in stacks_of(model).items():
        run = stack.runs[index if name == "decoder" else 0]
        shortened[name] = replace(stack, runs=(replace(run, repeats=1),), scan=False)
    return replace(model, **shortened)
