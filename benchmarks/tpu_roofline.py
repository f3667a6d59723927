"""Attention sub-layers as TPU compilers see them, without a TPU.

    pip install 'jax[tpu]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python benchmarks/tpu_roofline.py --lengths 512 2048

libtpu compiles forward and backward for real topologies on any machine. Shown are the compiler's FLOPs
and bytes and its temporaries, the FLOPs counted from the shapes of all matrix products beside them, and
the time that the busier of arithmetic and memory would take, ``max(FLOPs / peak, bytes / bandwidth)``.
Operands and results of a Pallas kernel count once. The script fails where the compiler's FLOPs and the
counted ones differ by more than a tenth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import attention
import jax
import jax.numpy as jnp
import report
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from synthesizer_jax import Attention, DotProduct, FactorizedRandom, Mask, Random
from synthesizer_jax.attention.tiles_tpu import block_size
from synthesizer_jax.models.summary import flops
from synthesizer_jax.sharding import chips
from synthesizer_jax.training.ahead import devices_of

PLACES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""A small topology of every chip."""

ROWS: dict[str, tuple[str, bool]] = {
    "dot product, einsum": ("einsum", False),
    "dot product + bias, einsum": ("einsum", True),
    "Random, logits broadcast": ("broadcast", False),
    "Random": ("random", False),
    "Factorized Random": ("factorized", False),
    "dot product, fused": ("fused", False),
    "dot product + bias, fused": ("fused", True),
}
"""What is compiled, and whether with T5's bias."""


def main() -> None:
    """Compiles everything and prints the table."""
    args = parse()
    rows = []
    for chip in args.chips:
        for length in args.lengths:
            found = [measured(args, name, chip, length) for name in ROWS]
            for row in found:
                row["share"] = (
                    row["gigabytes"] / found[1 if "+ bias" in row["name"] else 0]["gigabytes"]
                )
            rows += found
    text = (
        f"Sub-layer, forward + backward, batch {args.batch}, {args.heads} heads of {args.head_dim}, "
        f"d {args.d_model}, bfloat16. *share*: of the einsum's bytes.\n\n"
        + report.table(
            rows,
            {
                "chip": "chip",
                "length": "length|d",
                "name": "",
                "gigaflops": "GFLOP|.0f",
                "counted": "counted|.0f",
                "gigabytes": "GB|.2f",
                "share": "share|.2f",
                "temporaries_mb": "temporaries, MB|.0f",
                "milliseconds": "roofline, ms|.2f",
            },
        )
    )
    facts = {"jax": jax.__version__, "compiled by": "libtpu on a CPU"}
    report.write("tpu_roofline", text, result={"rows": rows}, options=args, facts=facts)
    for row in rows:
        if abs(row["gigaflops"] / row["counted"] - 1) > 0.1:
            raise SystemExit(f"{row['name']} on {row['chip']}: FLOPs are not as counted")


def measured(args: argparse.Namespace, name: str, chip: str, length: int) -> dict[str, Any]:
    """One compiled sub-layer."""
    topology = chips.topology(PLACES[chip])
    peak, bandwidth = topology.chip.flops, topology.chip.bandwidth
    mesh = Mesh(devices_of(topology)[:1], ("data",))
    place = NamedSharding(mesh, PartitionSpec())
    kind, bias = ROWS[name]
    x = jax.ShapeDtypeStruct((args.batch, length, args.d_model), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((args.batch,), jnp.int32)
    apply, params = sublayer(args, kind, bias, x)

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return (apply(params, x, lengths).astype(jnp.float32) ** 2).mean()

    gradient = jax.grad(loss, (0, 1))
    with jax.set_mesh(mesh):  # by which kernels know the chip
        step = jax.jit(gradient, in_shardings=place, out_shardings=place)
        compiled = step.lower(params, x, lengths).compile()
    costs, memory = compiled.cost_analysis(), compiled.memory_analysis()
    # A backward pass has twice the products of the forward one, and the fused one makes logits again: in
    # its one kernel, or in each of two, and then the cotangents of the weights twice too.
    counted = 3 * flops(jax.make_jaxpr(apply)(params, x, lengths).jaxpr)
    if kind == "fused":
        again = 1 if block_size(length, length) == length else 3
        counted += again * 2 * args.batch * args.heads * args.head_dim * length**2
    return {
        "chip": chip,
        "length": length,
        "name": name,
        "gigaflops": costs["flops"] / 1e9,
        "counted": counted / 1e9,
        "gigabytes": costs["bytes accessed"] / 1e9,
        "temporaries_mb": memory.temp_size_in_bytes / 1e6,
        "milliseconds": 1e3 * max(counted / peak, costs["bytes accessed"] / bandwidth),
    }


def sublayer(
    args: argparse.Namespace, kind: str, bias: bool, x: jax.ShapeDtypeStruct
) -> tuple[Callable[..., jax.Array], Any]:
    """A function ``(params, x, lengths) → y`` and its abstract parameters."""
    d, h, e, n = args.d_model, args.heads, args.head_dim, x.shape[1]
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    if kind in ("einsum", "broadcast"):
        params = {name: shape(d, h, e) for name in ("qkv" if kind == "einsum" else "v")}
        params |= {"o": shape(h, e, d)}
        if kind == "broadcast":
            return attention.random_broadcast, params | {"table": shape(1, h, n, n)}
        return attention.einsum_attention, params | ({"bias": shape(1, h, n, n)} if bias else {})
    alignment = {
        "random": Random(max_length=n),
        "factorized": FactorizedRandom(max_length=n),
        "fused": DotProduct(),
    }[kind]
    layer: Any = Attention(h, e, alignment=alignment)
    layer = attention.WithBias(layer) if bias else layer

    def apply(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        return layer.apply(params, x, mask=Mask(key_lengths=lengths))

    params = jax.eval_shape(lambda k, x: layer.init(k, x, mask=Mask()), jax.random.key(0), x)
    return apply, params


def parse() -> argparse.Namespace:
    """The command line."""
    parser = report.arguments(__doc__, batch=16, heads=12, head_dim=64, d_model=768)
    parser.add_argument("--chips", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048])
    return parser.parse_args()


if __name__ == "__main__":
    main()
