"""Attention sub-layers side by side: time and temporary memory, forward and backward.

    python benchmarks/attention.py --batch 8 --length 512 --json attention.json

The compared functions run alternately in one process; medians over rounds are printed, with the
machine's own matrix-product rate beside them. A sub-layer includes its projections. The reference is
the fastest of einsum, `jax.nn.dot_product_attention` and Flax's own attention; a variant's speed is
reference time / its time, its FLOPs those of its matrix products, forward, over the reference's.
`--bias` adds T5's relative bias to all that can have it.
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
)
from synthesizer_jax.models.summary import flops


@dataclasses.dataclass(frozen=True)
class Case:
    """One compared function.

    Attributes:
      name: what the table calls it.
      apply: ``(params, x, lengths) → y``, ``[batch, length, d_model]``.
      params: its parameters.
      reference: whether it may be the reference.
    """

    name: str
    apply: Callable[..., jax.Array]
    params: Any
    reference: bool = False


def einsum_attention(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Dot-product attention as text books write it."""
    q, k, v = (jnp.einsum("bnd,dhe->bnhe", x, params[n]) for n in "qkv")
    logits = jnp.einsum("bqhe,bkhe->bhqk", q, k) * q.shape[-1] ** -0.5
    if "bias" in params:
        logits += params["bias"]
    allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, logits, -1e9))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), params["o"])


def xla_attention(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """The same through `jax.nn.dot_product_attention(implementation="xla")`."""
    q, k, v = (jnp.einsum("bnd,dhe->bnhe", x, params[n]) for n in "qkv")
    y = jax.nn.dot_product_attention(
        q, k, v, params.get("bias"), key_value_seq_lengths=lengths, implementation="xla"
    )
    return jnp.einsum("bqhe,hed->bqd", y, params["o"])


def random_broadcast(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
    """Random attention as public code writes it: logits broadcast over the batch."""
    v = jnp.einsum("bnd,dhe->bnhe", x, params["v"])
    allowed = (jnp.arange(x.shape[1]) < lengths[:, None])[:, None, None]
    weights = jax.nn.softmax(jnp.where(allowed, params["table"], -1e9))
    return jnp.einsum("bqhe,hed->bqd", jnp.einsum("bhqk,bkhe->bqhe", weights, v), params["o"])


class WithBias(nn.Module):
    """Our layer with a relative bias beside it, as a stack has it."""

    attention: Attention

    @nn.compact
    def __call__(self, x: jax.Array, *, mask: Mask) -> jax.Array:
        """``[batch, length, d_model]`` in and out."""
        span = Span(0, x.shape[1])
        bias = RelativeBias(name="relpos_bias")(
            num_heads=self.attention.num_heads, query_span=span, key_span=span
        )
        return self.attention.copy(name="layer", parent=self)(x, mask=mask, bias=bias)


def peers(args: argparse.Namespace, x: jax.Array, key: jax.Array) -> list[Case]:
    """The reference functions."""
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
        Case("jax.nn xla", xla_attention, with_bias, reference=True),
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


def layer_of(args: argparse.Namespace, name: str, implementation: str) -> nn.Module:
    """The sub-layer of a variant."""
    kind = VARIANTS[name](args.length)
    if isinstance(kind, LightweightConvolution):
        return kind
    return Attention(args.heads, args.head_dim, alignment=kind, implementation=implementation)


def ours(args: argparse.Namespace, x: jax.Array, key: jax.Array) -> list[Case]:
    """Our layers, one per variant and implementation."""
    cases = []
    for name in args.variants:
        for implementation in args.implementations:
            layer = layer_of(args, name, implementation)
            if args.bias and getattr(layer, "bias_heads", None):
                layer = WithBias(layer)

            def apply(
                p: Any, x: jax.Array, lengths: jax.Array, layer: nn.Module = layer
            ) -> jax.Array:
                mask = Mask(causal=args.causal, key_lengths=lengths)
                return layer.apply(p, x, mask=mask)

            suffix = "" if implementation == "auto" else f" ({implementation})"
            params = jax.jit(lambda k, x, layer=layer: layer.init(k, x, mask=Mask()))(key, x)
            cases.append(Case(name + suffix, apply, params))
    return cases


def compiled(case: Case, x: jax.Array, lengths: jax.Array, *, backward: bool) -> Any:
    """The compiled function of a case; the backward pass differentiates parameters and input."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (case.apply(params, x, lengths).astype(jnp.float32) ** 2).mean()

    f = jax.grad(loss, (0, 1)) if backward else (lambda p, x: case.apply(p, x, lengths))
    return jax.jit(f).lower(case.params, x).compile()


def measure(cases: list[Case], x: jax.Array, lengths: jax.Array, rounds: int) -> list[dict]:
    """Medians over rounds, all cases in turn within each round."""
    programs = {
        (case.name, backward): compiled(case, x, lengths, backward=backward)
        for case in cases
        for backward in (False, True)
    }
    times: dict[tuple[str, bool], list[float]] = {k: [] for k in programs}
    for _ in range(rounds + 1):
        for (name, backward), program in programs.items():
            params = next(c.params for c in cases if c.name == name)
            start = time.perf_counter()
            jax.block_until_ready(program(params, x))
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


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(
        __doc__, batch=8, length=512, heads=8, head_dim=64, d_model=512, rounds=9, padding=0, seed=0
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--causal", action="store_true", help="ours only")
    parser.add_argument("--bias", action="store_true", help="T5's relative bias")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--implementations", nargs="+", default=["auto"])
    return parser.parse_args()


def main() -> None:
    """Runs the comparison and prints it."""
    args = parse()
    key = jax.random.key(args.seed)
    x = jax.random.normal(key, (args.batch, args.length, args.d_model), args.dtype)
    lengths = jnp.full(args.batch, args.length - args.padding, jnp.int32).at[0].set(args.length)
    cases = [*peers(args, x, key), *ours(args, x, key)]
    facts = report.machine()
    rows = measure(cases, x, lengths, args.rounds)
    best = min((r for r in rows if r["reference"]), key=lambda r: r["both_ms"])
    for row in rows:
        row["speed"] = best["both_ms"] / row["both_ms"]
        row["memory"] = row["temporaries_mb"] / best["temporaries_mb"]
        row["work"] = row["flops"] / best["flops"]
    bias = ", T5's relative bias" if args.bias else ""
    causal = ", ours causal" if args.causal else ""
    text = (
        f"Sub-layer, batch {args.batch}, length {args.length}, d {args.d_model}, {args.heads} heads "
        f"of {args.head_dim}, {args.dtype}{bias}{causal}. Speed (forward + backward), memory and FLOPs "
        f"against {best['name']}.\n\n"
        + report.table(
            rows,
            {
                "name": "",
                "forward_ms": "forward, ms|.1f",
                "both_ms": "+ backward, ms|.1f",
                "speed": "speed|.2f",
                "work": "FLOPs|.2f",
                "temporaries_mb": "temporaries, MB|.1f",
                "memory": "memory|.2f",
            },
        )
    )
    shape = f"{args.batch}x{args.length}x{args.heads}x{args.head_dim}"
    name = f"attention {shape} {args.dtype}{bias}{causal}"
    report.write(name, text, result={"rows": rows}, options=args, facts=facts)


if __name__ == "__main__":
    main()
