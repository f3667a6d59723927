"""Compares the time and the temporary memory of attention sub-layers, forward and backward.

    python benchmarks/attention.py --batch 8 --length 512 --json attention.json

All sub-layers run in one process and take turns. The table shows the median of each measurement
over all rounds, and the FLOP rate that this machine reaches in a matrix product. A sub-layer
includes its projections. The reference is the fastest of three implementations of dot-product
attention: einsum, `jax.nn.dot_product_attention` and Flax's attention layer. The speed of a variant
is the reference's time divided by the variant's time. The table also shows the FLOPs of each
variant's matrix products in the forward pass, divided by the FLOPs of the reference. `--bias` adds
T5's relative bias to all sub-layers that support it.

    python benchmarks/attention.py --functions --length 2048

With `--functions`, the script compares the function `dot_product_attention` with
`jax.nn.dot_product_attention` instead. Both functions run without a bias, with a learned bias ``[1,
heads, length, length]``, and with T5's bias. For `jax.nn`, T5's bias is first looked up in the bias
table and then passed as an array. The backward pass computes all gradients, including the gradient
of the bias or of the bias table.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import report

from synthesizer_jax import (
    Attention,
    Dense,
    DotProduct,
    FactorizedDense,
    FactorizedRandom,
    Gaussian,
    LightweightConvolution,
    Mask,
    Mixture,
    Random,
    RelativeBias,
    Span,
    dot_product_attention,
    relative_bias,
)
from synthesizer_jax.alignments import AttentionContext
from synthesizer_jax.attention.relative_table import relative_buckets
from synthesizer_jax.costs.summary import flops


@dataclasses.dataclass(frozen=True)
class Case:
    """A function to measure.

    Attributes:
      name: the name in the table.
      apply: the function ``(params, x, lengths) → y``. x and y are ``[batch, length, d_model]``.
        With `--functions`, x and y are the query and the output ``[batch, length, heads,
        head_dim]``.
      params: the parameters.
      reference: whether this case may become the reference, with which all cases are compared.
    """

    name: str
    apply: Callable[..., jax.Array]
    params: Any
    reference: bool = False


def einsum_attention(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Computes dot-product attention with einsums, in the form that textbooks show."""
    q, k, v = (jnp.einsum("bnd,dhe->bnhe", x, params[n]) for n in "qkv")
    logits = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
    if "bias" in params:
        logits += params["bias"]
    allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, logits, -1e9))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), params["o"])


def with_projections(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Adds projections to an attention function, and returns the resulting sub-layer.

    The sub-layer computes in the dtype of its input.
    """

    def apply(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Projects x, applies the function, and projects the result of the function."""
        q, k, v = (jnp.einsum("bnd,dhe->bnhe", x, params[n].astype(x.dtype)) for n in "qkv")
        y = function(params | {"key": k, "value": v}, q, lengths)
        return jnp.einsum("bqhe,hed->bqd", y, params["o"].astype(x.dtype))

    return apply


def random_broadcast(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Computes Random attention as public implementations do, by broadcasting over the batch."""
    v = jnp.einsum("bnd,dhe->bnhe", x, params["v"])
    allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, params["table"], -1e9))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), params["o"])


class WithBias(nn.Module):
    """An attention layer together with the relative bias that a stack would pass to it."""

    attention: Attention

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: Mask) -> jax.Array:
        """Returns ``[batch, length, d_model]`` for an input of the same shape."""
        span = Span(0, x.shape[1])
        context = AttentionContext(
            self.attention.num_heads, self.attention.head_dim, query_span=span, key_span=span
        )
        bias = RelativeBias(name="relpos_bias")(x, x, context)
        return self.attention.copy(name="layer", parent=self)(x, mask=mask, bias=bias)


def reference_cases(args: argparse.Namespace, x: jax.Array, key: jax.Array) -> list[Case]:
    """Returns the cases that may become the reference, and the case ``Random, broadcast``."""
    width, heads, head_dim, length = args.d_model, args.heads, args.head_dim, args.length
    keys = jax.random.split(key, 6)
    params = {
        name: jax.random.normal(k, (width, heads, head_dim)) * width**-0.5
        for name, k in zip("qkv", keys[:3], strict=True)
    }
    params["o"] = jax.random.normal(keys[3], (heads, head_dim, width)) * (heads * head_dim) ** -0.5
    table = jax.random.normal(keys[4], (1, heads, length, length))
    with_bias = params | ({"bias": table} if args.bias else {})
    cases = [
        Case("einsum", einsum_attention, with_bias, reference=True),
        Case("jax.nn xla", with_projections(jax_attention), with_bias, reference=True),
        Case(
            "Random, broadcast",
            random_broadcast,
            {"v": params["v"], "o": params["o"], "table": table},
        ),
    ]
    if not args.bias:
        module = nn.MultiHeadDotProductAttention(
            heads, qkv_features=heads * head_dim, use_bias=False
        )

        def flax_attention(p: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
            """Applies Flax's attention with a padding mask."""
            allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
            return module.apply(p, x, mask=allowed)

        cases.append(Case("flax", flax_attention, module.init(key, x), reference=True))
    return cases


VARIANTS: dict[str, Callable[[int], Any]] = {
    "DotProduct": lambda n: DotProduct(),
    "Random": lambda n: Random(max_length=n),
    "FactorizedRandom": lambda n: FactorizedRandom(max_length=n),
    "Dense": lambda n: Dense(max_length=n),
    "FactorizedDense": lambda n: FactorizedDense(max_length=n),
    "Random+DotProduct": lambda n: Mixture((Random(max_length=n), DotProduct())),
    "Dense+DotProduct": lambda n: Mixture((Dense(max_length=n), DotProduct())),
    "Gaussian": lambda n: Gaussian(offsets=(-1, 1)),
    "LightweightConvolution": lambda n: LightweightConvolution(),
}
"""Functions that make a mixer or an `Attention`'s alignment for a number of positions."""


def make_layer(args: argparse.Namespace, name: str, implementation: str) -> nn.Module:
    """Returns the attention sub-layer of a variant."""
    layer_or_alignment = VARIANTS[name](args.length)
    if isinstance(layer_or_alignment, LightweightConvolution):
        return layer_or_alignment
    return Attention(
        args.heads, args.head_dim, alignment=layer_or_alignment, implementation=implementation
    )


def variant_cases(args: argparse.Namespace, x: jax.Array, key: jax.Array) -> list[Case]:
    """Returns the layers of this package, one for each variant and implementation."""
    cases = []
    for name in args.variants:
        for implementation in args.implementations:
            layer = make_layer(args, name, implementation)
            if args.bias and getattr(layer, "bias_heads", None):
                layer = WithBias(layer)

            def apply(
                p: Any, x: jax.Array, lengths: jax.Array, layer: nn.Module = layer
            ) -> jax.Array:
                """Applies the layer with a padding mask."""
                return layer.apply(p, x, mask=Mask(key_lengths=lengths))

            suffix = "" if implementation == "auto" else f" ({implementation})"
            params = jax.jit(lambda k, x, layer=layer: layer.init(k, x, mask=Mask()))(key, x)
            cases.append(Case(name + suffix, apply, params))
    return cases


def bias_array(params: Any, query: jax.Array) -> jax.Array | None:
    """Returns the bias as an array ``[1, heads, length, length]``, or None without a bias.

    T5's bias is looked up in its table, in the query's dtype.
    """
    if "table" not in params:
        return params.get("bias")
    positions = np.arange(query.shape[1])
    distance = positions - positions[:, None]
    buckets = relative_buckets(distance, num_buckets=32, max_distance=128, bidirectional=True)
    table = params["table"].astype(query.dtype)
    if jax.default_backend() != "gpu":
        return table[:, buckets][None]
    # Multiply the table by one-hot vectors, as T5X does. If the table were indexed instead, the
    # gradient would take 0.4 s on an H200.
    one_hot = jax.nn.one_hot(buckets, 32, dtype=table.dtype)
    return jnp.einsum("hn,qkn->hqk", table, one_hot)[None]


def jax_attention(
    params: Any, query: jax.Array, lengths: jax.Array, implementation: str = "xla"
) -> jax.Array:
    """Calls `jax.nn.dot_product_attention`, with T5's bias as an array."""
    return jax.nn.dot_product_attention(
        query,
        params["key"],
        params["value"],
        bias_array(params, query),
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )


def our_attention(params: Any, query: jax.Array, lengths: jax.Array) -> jax.Array:
    """Calls this package's `dot_product_attention`."""
    if "table" in params:
        bias = relative_bias(params["table"])
    else:
        bias = params.get("bias")
    return dot_product_attention(
        query, params["key"], params["value"], bias, key_value_seq_lengths=lengths
    )


def function_cases(args: argparse.Namespace, query: jax.Array, key: jax.Array) -> list[Case]:
    """Returns a case of `jax.nn`'s function and a case of our function for every kind of bias.

    For each kind of bias, the case of `jax.nn` comes first and is the reference.
    """
    keys = jax.random.split(key, 4)
    tokens = {
        name: jax.random.normal(k, query.shape, query.dtype)
        for name, k in zip(("key", "value"), keys[:2], strict=True)
    }
    biases = {
        "no bias": {},
        "learned bias": {"bias": jax.random.normal(keys[2], (1, args.heads, *(args.length,) * 2))},
        "T5's bias": {"table": jax.random.normal(keys[3], (args.heads, 32))},
    }
    sides = {"jax.nn": jax_attention, "ours": our_attention}
    return [
        Case(f"{side}, {bias_name}", function, tokens | bias, reference=side == "jax.nn")
        for bias_name, bias in biases.items()
        for side, function in sides.items()
    ]


def compile_case(case: Case, x: jax.Array, lengths: jax.Array, *, backward: bool) -> Any:
    """Compiles a case. If `backward` is true, the gradients are computed, too.

    The gradients are with respect to the parameters and the input.
    """

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Returns the mean square of the outputs."""
        return (case.apply(params, x, lengths).astype(jnp.float32) ** 2).mean()

    function = jax.grad(loss, (0, 1)) if backward else case.apply
    return jax.jit(function).lower(case.params, x, lengths).compile()


def measure(cases: list[Case], x: jax.Array, lengths: jax.Array, rounds: int) -> list[dict]:
    """Measures all cases in several rounds, and returns a row with the medians for each case."""
    programs = {
        (case.name, backward): compile_case(case, x, lengths, backward=backward)
        for case in cases
        for backward in (False, True)
    }
    params = {case.name: case.params for case in cases}
    times: dict[tuple[str, bool], list[float]] = {k: [] for k in programs}
    for _ in range(rounds + 1):
        for (name, backward), program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(params[name], x, lengths))
            times[name, backward].append(time.perf_counter() - start)
    rows = []
    for case in cases:
        memory = programs[case.name, True].memory_analysis()
        jaxpr = jax.make_jaxpr(case.apply)(case.params, x, lengths)
        rows.append(
            {
                "name": case.name,
                "reference": case.reference,
                "flops": flops(jaxpr.jaxpr),
                "forward_ms": 1e3 * statistics.median(times[case.name, False][1:]),
                "both_ms": 1e3 * statistics.median(times[case.name, True][1:]),
                "temporaries_mb": memory.temp_size_in_bytes / 1e6,
            }
        )
    return rows


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(
        __doc__, batch=8, length=512, heads=8, head_dim=64, d_model=512, rounds=9, padding=0
    )
    parser.add_argument("--dtype", default="float32", help="dtype of the inputs")
    parser.add_argument(
        "--functions", action="store_true", help="compare functions without projections"
    )
    parser.add_argument("--bias", action="store_true", help="add T5's relative bias")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=list(VARIANTS),
        help="sub-layers to measure, by default all",
    )
    parser.add_argument(
        "--implementations", nargs="+", default=["auto"], help="routes of `attend` to measure"
    )
    return parser.parse_args()


def main() -> None:
    """Runs the comparison and writes the table."""
    args = parse_arguments()
    key = jax.random.key(0)
    trailing_dims = (args.heads, args.head_dim) if args.functions else (args.d_model,)
    x = jax.random.normal(key, (args.batch, args.length, *trailing_dims), args.dtype)
    lengths = jnp.full(args.batch, args.length - args.padding, jnp.int32).at[0].set(args.length)
    if args.functions:
        cases = function_cases(args, x, key)
    else:
        cases = [*reference_cases(args, x, key), *variant_cases(args, x, key)]
    facts = report.machine()
    rows = measure(cases, x, lengths, args.rounds)
    reference = min((r for r in rows if r["reference"]), key=lambda r: r["both_ms"])
    for row in rows:
        if args.functions and row["reference"]:
            reference = row
        row["speed"] = reference["both_ms"] / row["both_ms"]
        row["memory"] = row["temporaries_mb"] / reference["temporaries_mb"]
        row["work"] = row["flops"] / reference["flops"]
    columns = {
        "name": "",
        "forward_ms": "forward, ms|.1f",
        "both_ms": "forward + backward, ms|.1f",
        "speed": "speed|.2f",
        "work": "FLOPs|.2f",
        "temporaries_mb": "temporaries, MB|.1f",
        "memory": "memory|.2f",
    }
    if args.functions:
        del columns["work"]
    heads = f"{args.heads} heads of {args.head_dim}"
    bias, with_bias = "", ""
    if args.bias:
        bias, with_bias = ", T5's relative bias", " with T5's relative bias"
    if args.functions:
        description = (
            f"`dot_product_attention` in {args.dtype}. The batch has {args.batch} rows of "
            f"{args.length} tokens, with {heads}. *Speed* (of forward and backward pass together) "
            "and *memory* are relative to `jax.nn.dot_product_attention` with the same bias."
        )
    else:
        description = (
            f"Attention sub-layers in {args.dtype}{with_bias}. The batch has {args.batch} rows of "
            f"{args.length} tokens, d_model is {args.d_model}, and there are {heads}. *Speed* (of "
            "forward and backward pass together), *FLOPs* and *memory* are relative to "
            f"{reference['name']}."
        )
    shape = f"{args.batch}x{args.length}x{args.heads}x{args.head_dim}"
    report.write(
        f"{'functions' if args.functions else 'attention'} {shape} {args.dtype}{bias}",
        f"{description}\n\n{report.table(rows, columns)}",
        result={"rows": rows},
        options=args,
        facts=facts,
    )


if __name__ == "__main__":
    main()
