"""Compares time and temporary memory of attention sub-layers, forward and backward.

    python benchmarks/attention.py --batch 8 --length 512 --json attention.json

The functions run alternately in one process, and medians over rounds are reported together with the
machine's rate of matrix products. A sub-layer includes its projections. The reference is the fastest of
einsum, `jax.nn.dot_product_attention` and Flax's attention. The speed of a variant is the reference's time
over its time; its FLOPs are those of its matrix products in the forward pass over the reference's. `--bias`
adds T5's relative bias to all sub-layers that support it.

    python benchmarks/attention.py --functions --length 2048

compares the function `dot_product_attention` with `jax.nn.dot_product_attention` instead: without a bias,
with a learned bias ``[1, heads, length, length]``, and with T5's bias, which `jax.nn` receives as an
array that is looked up in the table. The backward pass computes all gradients, including that of the bias
or table.
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
from synthesizer_jax.attention.relative import relative_buckets
from synthesizer_jax.costs.summary import flops


@dataclasses.dataclass(frozen=True)
class Case:
    """A function ``(params, x, lengths) → y``, its parameters, and whether it may be the reference.

    x and y are ``[batch, length, d_model]``, or, with `--functions`, query and output
    ``[batch, length, heads, head_dim]``.
    """

    name: str
    apply: Callable[..., jax.Array]
    params: Any
    reference: bool = False


def einsum_attention(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Textbook dot-product attention."""
    q, k, v = (jnp.einsum("bnd,dhe->bnhe", x, params[n]) for n in "qkv")
    logits = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
    if "bias" in params:
        logits += params["bias"]
    allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, logits, -1e9))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), params["o"])


def with_projections(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns the sub-layer of a function such as `jax_attention`, computed in the dtype of x."""

    def apply(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bnd,dhe->bnhe", x, params[n].astype(x.dtype)) for n in "qkv")
        y = function(params | {"key": k, "value": v}, q, lengths)
        return jnp.einsum("bqhe,hed->bqd", y, params["o"].astype(x.dtype))

    return apply


def random_broadcast(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Random attention as in public implementations, with logits broadcast over the batch."""
    v = jnp.einsum("bnd,dhe->bnhe", x, params["v"])
    allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, params["table"], -1e9))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), params["o"])


class WithBias(nn.Module):
    """An attention layer with a relative bias, as in a stack."""

    attention: Attention

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: Mask) -> jax.Array:
        """``[batch, length, d_model]`` in and out."""
        span = Span(0, x.shape[1])
        context = AttentionContext(
            self.attention.num_heads, self.attention.head_dim, query_span=span, key_span=span
        )
        bias = RelativeBias(name="relpos_bias")(x, x, context)
        return self.attention.copy(name="layer", parent=self)(x, mask=mask, bias=bias)


def reference_cases(args: argparse.Namespace, x: jax.Array, key: jax.Array) -> list[Case]:
    """Returns the candidates for the reference, and an implementation of Random attention."""
    d, h, e, n = args.d_model, args.heads, args.head_dim, args.length
    keys = jax.random.split(key, 6)
    params = {
        name: jax.random.normal(k, (d, h, e)) * d**-0.5
        for name, k in zip("qkv", keys[:3], strict=True)
    }
    params["o"] = jax.random.normal(keys[3], (h, e, d)) * (h * e) ** -0.5
    table = jax.random.normal(keys[4], (1, h, n, n))
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
        module = nn.MultiHeadDotProductAttention(h, qkv_features=h * e, use_bias=False)

        def flax_attention(p: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
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
"""Alignments of an `Attention`, and a mixer, by the number of positions."""


def make_layer(args: argparse.Namespace, name: str, implementation: str) -> nn.Module:
    """Returns the sub-layer of a variant."""
    layer_or_alignment = VARIANTS[name](args.length)
    if isinstance(layer_or_alignment, LightweightConvolution):
        return layer_or_alignment
    return Attention(
        args.heads, args.head_dim, alignment=layer_or_alignment, implementation=implementation
    )


def variant_cases(args: argparse.Namespace, x: jax.Array, key: jax.Array) -> list[Case]:
    """Returns this package's layers, one per variant and implementation."""
    cases = []
    for name in args.variants:
        for implementation in args.implementations:
            layer = make_layer(args, name, implementation)
            if args.bias and getattr(layer, "bias_heads", None):
                layer = WithBias(layer)

            def apply(
                p: Any, x: jax.Array, lengths: jax.Array, layer: nn.Module = layer
            ) -> jax.Array:
                return layer.apply(p, x, mask=Mask(key_lengths=lengths))

            suffix = "" if implementation == "auto" else f" ({implementation})"
            params = jax.jit(lambda k, x, layer=layer: layer.init(k, x, mask=Mask()))(key, x)
            cases.append(Case(name + suffix, apply, params))
    return cases


def bias_array(params: Any, query: jax.Array) -> jax.Array | None:
    """The bias ``[1, heads, length, length]`` in the query's dtype; T5's is looked up in its table."""
    bias = params.get("bias")
    if "table" in params:
        distance = np.arange(query.shape[1]) - np.arange(query.shape[1])[:, None]
        buckets = relative_buckets(distance, num_buckets=32, max_distance=128, bidirectional=True)
        table = params["table"].astype(query.dtype)
        if jax.default_backend() != "gpu":
            return table[:, buckets][None]
        # The gradient of that lookup takes 0.4 s on an H200; T5X multiplies with one-hot vectors.
        return jnp.einsum("hn,qkn->hqk", table, jax.nn.one_hot(buckets, 32, dtype=table.dtype))[
            None
        ]
    return bias


def jax_attention(
    params: Any, query: jax.Array, lengths: jax.Array, implementation: str = "xla"
) -> jax.Array:
    """`jax.nn.dot_product_attention`, with T5's bias as an array."""
    return jax.nn.dot_product_attention(
        query,
        params["key"],
        params["value"],
        bias_array(params, query),
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )


def our_attention(params: Any, query: jax.Array, lengths: jax.Array) -> jax.Array:
    """This package's `dot_product_attention`."""
    bias = relative_bias(params["table"]) if "table" in params else params.get("bias")
    return dot_product_attention(
        query, params["key"], params["value"], bias, key_value_seq_lengths=lengths
    )


def function_cases(args: argparse.Namespace, query: jax.Array, key: jax.Array) -> list[Case]:
    """Returns both functions for every kind of bias; that of `jax.nn` is the reference of the next."""
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
    """Compiles a case; the backward pass computes gradients of parameters and input."""

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return (case.apply(params, x, lengths).astype(jnp.float32) ** 2).mean()

    f = jax.grad(loss, (0, 1)) if backward else case.apply
    return jax.jit(f).lower(case.params, x, lengths).compile()


def measure(cases: list[Case], x: jax.Array, lengths: jax.Array, rounds: int) -> list[dict]:
    """Measures all cases in turns; returns medians over rounds."""
    programs = {
        (case.name, backward): compile_case(case, x, lengths, backward=backward)
        for case in cases
        for backward in (False, True)
    }
    times: dict[tuple[str, bool], list[float]] = {k: [] for k in programs}
    for _ in range(rounds + 1):
        for (name, backward), program in programs.items():
            params = next(c.params for c in cases if c.name == name)
            start = time.perf_counter()
            jax.block_until_ready(program(params, x, lengths))
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
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--functions", action="store_true", help="dot_product_attention alone")
    parser.add_argument("--bias", action="store_true", help="T5's relative bias")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--implementations", nargs="+", default=["auto"])
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
    columns = {"name": "", "forward_ms": "forward, ms|.1f", "both_ms": "forward + backward, ms|.1f"}
    columns |= {"speed": "speed|.2f"} | ({} if args.functions else {"work": "FLOPs|.2f"})
    columns |= {"temporaries_mb": "temporaries, MB|.1f", "memory": "memory|.2f"}
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
