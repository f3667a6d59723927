"""Compiles attention sub-layers for TPUs without a TPU, and computes rooflines.

    pip install 'jax[tpu]'
    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python benchmarks/tpu_roofline.py --lengths 512 2048

libtpu can compile forward and backward passes for real TPU topologies on any machine. The table
shows the FLOPs, the bytes and the temporary memory that the compiler reports. The table also shows
the FLOPs computed from the shapes of all matrix products, and the roofline, ``max(FLOPs / peak,
bytes / bandwidth)``. The operands and results of a Pallas kernel are counted once. The script fails
if the compiler's FLOPs differ from the computed FLOPs by more than 10%.
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
from synthesizer_jax.attention.fused_tpu_geometry import choose_tile_rows
from synthesizer_jax.costs import chips
from synthesizer_jax.costs.summary import flops
from synthesizer_jax.training.plan import devices_of

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
"""The name of a small topology for every kind of chip."""

ROWS: dict[str, tuple[str, bool]] = {
    "dot product, einsum": ("einsum", False),
    "dot product + bias, einsum": ("einsum", True),
    "Random, logits broadcast": ("broadcast", False),
    "Random": ("random", False),
    "Factorized Random": ("factorized", False),
    "dot product, fused": ("fused", False),
    "dot product + bias, fused": ("fused", True),
}
"""The implementations to compile, and whether they have T5's bias."""


def main() -> None:
    """Compiles all rows and writes the table."""
    args = parse_arguments()
    rows = []
    for chip in args.chips:
        for length in args.lengths:
            chip_rows = [measure_sublayer(args, name, chip, length) for name in ROWS]
            without_bias, with_bias, *_ = chip_rows  # the einsum implementation
            for row in chip_rows:
                base = with_bias if "+ bias" in row["name"] else without_bias
                row["share"] = row["gigabytes"] / base["gigabytes"]
            rows += chip_rows
    section = (
        f"Forward and backward pass of attention sub-layers in bfloat16. The batch has "
        f"{args.batch} rows, d_model is {args.d_model}, and there are {args.heads} heads of "
        f"{args.head_dim}. *GFLOP* and *GB* are the compiler's counts, and *counted* is the number "
        "of GFLOP that follows from the shapes. *share* is the number of bytes relative to the "
        "einsum with the same bias.\n\n"
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
    report.write("tpu_roofline", section, result={"rows": rows}, options=args, facts=facts)
    for row in rows:
        if abs(row["gigaflops"] / row["counted"] - 1) > 0.1:
            raise SystemExit(
                f"{row['name']} on {row['chip']}: the compiler reports {row['gigaflops']:.0f} "
                f"GFLOP, but the shapes give {row['counted']:.0f}."
            )


def measure_sublayer(args: argparse.Namespace, name: str, chip: str, length: int) -> dict[str, Any]:
    """Compiles a sub-layer and returns its row."""
    topology = chips.parse_topology(TOPOLOGIES[chip])
    peak, bandwidth = topology.chip.flops, topology.chip.bandwidth
    mesh = Mesh(devices_of(topology)[:1], ("data",))
    replicated = NamedSharding(mesh, PartitionSpec())
    implementation, bias = ROWS[name]
    x = jax.ShapeDtypeStruct((args.batch, length, args.d_model), jnp.bfloat16)
    lengths = jax.ShapeDtypeStruct((args.batch,), jnp.int32)
    apply, params = make_sublayer(args, implementation, bias, x)

    def loss(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Returns the mean square of the outputs."""
        return (apply(params, x, lengths).astype(jnp.float32) ** 2).mean()

    gradient = jax.grad(loss, (0, 1))
    with jax.set_mesh(mesh):  # kernels choose their implementation by the chip of the mesh
        step = jax.jit(gradient, in_shardings=replicated, out_shardings=replicated)
        compiled = step.lower(params, x, lengths).compile()
    costs = compiled.cost_analysis()
    memory = compiled.memory_analysis()
    # The backward pass has twice as many matrix products as the forward pass. The fused backward
    # pass also computes the logits again. It consists of one or two kernels. If there are two
    # kernels, both compute the logits and the gradients of the weights.
    counted = 3 * flops(jax.make_jaxpr(apply)(params, x, lengths).jaxpr)
    if implementation == "fused":
        recomputations = 1 if choose_tile_rows(length, length) == length else 3
        counted += recomputations * 2 * args.batch * args.heads * args.head_dim * length**2
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


def make_sublayer(
    args: argparse.Namespace, implementation: str, bias: bool, x: jax.ShapeDtypeStruct
) -> tuple[Callable[..., jax.Array], Any]:
    """Returns a function ``(params, x, lengths) → y`` and its abstract parameters."""
    d, h, e, n = args.d_model, args.heads, args.head_dim, x.shape[1]
    kernel = jax.ShapeDtypeStruct((d, h, e), jnp.bfloat16)
    output_kernel = jax.ShapeDtypeStruct((h, e, d), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((1, h, n, n), jnp.bfloat16)
    if implementation == "broadcast":
        return attention.random_broadcast, {"v": kernel, "o": output_kernel, "table": table}
    if implementation == "einsum":
        params = {"q": kernel, "k": kernel, "v": kernel, "o": output_kernel}
        if bias:
            params["bias"] = table
        return attention.einsum_attention, params
    alignment = {
        "random": Random(max_length=n),
        "factorized": FactorizedRandom(max_length=n),
        "fused": DotProduct(),
    }[implementation]
    layer: Any = Attention(h, e, alignment=alignment)
    if bias:
        layer = attention.WithBias(layer)

    def apply(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Applies the layer with a padding mask."""
        return layer.apply(params, x, mask=Mask(key_lengths=lengths))

    params = jax.eval_shape(lambda k, x: layer.init(k, x, mask=Mask()), jax.random.key(0), x)
    return apply, params


def parse_arguments() -> argparse.Namespace:
    """Parses the command line."""
    parser = report.arguments(__doc__, batch=16, heads=12, head_dim=64, d_model=768)
    parser.add_argument(
        "--chips",
        nargs="+",
        choices=TOPOLOGIES,
        default=list(TOPOLOGIES),
        help="kinds of chips to compile for, by default all",
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[512, 2048], help="numbers of tokens per row"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
