"""A worker of `gpu.py` that checks and times attention on one device.

The worker measures the numerical error of every route of `attend`, and the times of the attention
of this package, `jax.nn` and Flax. All programs are compiled on several threads before the first
one is timed.
"""

import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import attention
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import racing

from synthesizer_jax import (
    Attention,
    DotProduct,
    Gaussian,
    Mask,
    Mixture,
    Random,
    TalkingHeads,
    attend,
    explain,
    relative_bias,
)
from synthesizer_jax.attention import add, banded, low_rank, static

options = racing.options()
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Describes a call of `attend`. Every check draws new random arrays for the call.

    Attributes:
      kinds: the terms of the logits: ``dot``, ``bias``, ``static`` or ``taps``.
      mask: ``lengths``, ``none``, ``causal``, ``packed`` or ``packed causal``.
      queries: the number of queries.
      keys: the number of keys.
      width: the width of a head.
      batch: the number of examples.
    """

    kinds: tuple[str, ...] = ("dot", "bias")
    mask: str = "lengths"
    queries: int = 512
    keys: int = 512
    width: int = 64
    batch: int = 4


STATIC = ("static",)
PROBLEMS = {
    "T5, lengths": Problem(),
    "T5, no mask": Problem(mask="none"),
    "T5, causal": Problem(mask="causal"),
    "T5, packed": Problem(mask="packed"),
    "T5, packed causal": Problem(mask="packed causal"),
    "T5, 2048": Problem(queries=2048, keys=2048, batch=2),
    "T5, 2048 causal": Problem(mask="causal", queries=2048, keys=2048, batch=2),
    "T5, width 128": Problem(width=128),
    "T5, 500": Problem(queries=500, keys=500),
    "cross 114 × 512": Problem(("dot",), queries=114),
    "Random, lengths": Problem(STATIC),
    "Random, causal": Problem(STATIC, mask="causal"),
    "Random, packed": Problem(STATIC, mask="packed"),
    "Random, 2048": Problem(STATIC, queries=2048, keys=2048, batch=2),
    "Random, 500": Problem(STATIC, queries=500, keys=500),
    "Random + T5, lengths": Problem(("dot", "bias", "static")),
    "Random + T5, packed": Problem(("dot", "bias", "static"), mask="packed"),
    "taps, lengths": Problem(("taps",)),
    "taps, causal": Problem(("taps",), mask="causal"),
}
BOUNDS = {"float32": 3e-3, "bfloat16": 2e-2}
"""The largest allowed relative error ‖x − r‖ / ‖r‖, by dtype.

The GPU computes matrix products of float32 arrays in TF32.
"""


def shrink(length: int) -> int:
    """Returns the length, or a shorter length with `--tiny`."""
    return max(12, length // 16) if options["tiny"] else length


def draw(problem: Problem, seed: int) -> tuple[dict[str, np.ndarray], Mask, np.ndarray]:
    """Returns random arrays to differentiate, the mask, and a random cotangent of the output."""
    rng = np.random.default_rng(seed)
    b, h, e = problem.batch, options["heads"], problem.width
    q, k = shrink(problem.queries), shrink(problem.keys)

    def normal(*shape: int) -> np.ndarray:
        """Returns normally distributed random numbers in float32."""
        return rng.standard_normal(shape).astype(np.float32)

    arrays = {"value": normal(b, k, h, e)}
    if "dot" in problem.kinds:
        arrays |= {"query": normal(b, q, h, e) * e**-0.5, "key": normal(b, k, h, e)}
    if "bias" in problem.kinds:
        arrays["bias"] = normal(h, 32)
    if "static" in problem.kinds:
        arrays["static"] = normal(h, q, k)
    if "taps" in problem.kinds:
        arrays["taps"] = normal(1, 1, h, 7)
    return arrays, make_mask(problem, b, q, k, rng), normal(b, q, h, e)


def make_mask(problem: Problem, b: int, q: int, k: int, rng: np.random.Generator) -> Mask:
    """Returns the mask of a problem."""
    causal = "causal" in problem.mask
    if problem.mask == "none":
        return Mask()
    if "packed" in problem.mask:
        sizes = [int(k * share) for share in (0.4, 0.25, 0.2)]  # the remaining tokens are padding
        rows = [np.repeat([1, 2, 3], rng.permutation(sizes)) for _ in range(b)]
        segments = np.pad(rows, ((0, 0), (0, k - sum(sizes)))).astype(np.int32)
        packed = {"segments": 3, "segment_length": max(sizes)}
        return Mask.packed(jnp.asarray(segments), causal=causal, **packed)
    lengths = jnp.asarray(np.concatenate([[k], rng.integers(1, k, b - 1)]), jnp.int32)
    if q != k:
        return Mask(key_lengths=lengths)
    return Mask.padded(lengths, causal=causal)


def call(arrays: dict[str, jax.Array], mask: Mask, implementation: str) -> jax.Array:
    """Returns the output of `attend` for the arrays of a problem."""
    k = arrays["value"].shape[1]
    q = arrays["query"].shape[1] if "query" in arrays else k
    terms = []
    if "query" in arrays:
        terms.append(low_rank(arrays["query"], arrays["key"], token_keys=True))
    if "bias" in arrays:
        terms.append(relative_bias(arrays["bias"]).term(q, k))
    if "static" in arrays:
        terms.append(static(arrays["static"]))
    if "taps" in arrays:
        terms.append(banded(arrays["taps"], first=-3))
    terms = add(*terms) if "taps" not in arrays else tuple(terms)
    return attend(terms, arrays["value"], mask=mask, q_length=q, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation")
def differentiate(
    arrays: dict[str, jax.Array], mask: Mask, cotangent: jax.Array, *, implementation: str
) -> dict[str, jax.Array]:
    """Returns the output of `attend` and its gradients with respect to all arrays."""
    out, back = jax.vjp(lambda a: call(a, mask, implementation), arrays)
    return {"output": out, **back(cotangent)[0]}


def check(name: str) -> list[Row]:
    """Returns a row for every route and dtype of a problem."""
    problem = PROBLEMS[name]
    arrays, mask, cotangent = draw(problem, seed=int.from_bytes(os.urandom(4)))
    routes = {"taps": ["banded"], "static": ["static", "fused"]}.get(problem.kinds[0], ["fused"])
    chosen = explain(functools.partial(call, implementation="auto"), arrays, mask)[0]
    rows = []
    for dtype, bound in BOUNDS.items():
        tokens = [a for a in ("query", "key", "value") if a in arrays]
        inputs = arrays | {a: jnp.asarray(arrays[a], dtype) for a in tokens}
        exact = inputs | {a: inputs[a].astype(jnp.float32) for a in tokens}
        out_gradient = jnp.asarray(cotangent, dtype)
        with jax.default_matmul_precision("highest"):
            answer = differentiate(
                exact, mask, out_gradient.astype(jnp.float32), implementation="reference"
            )
        default = chosen.route if chosen.route in routes else "auto"
        for route in dict.fromkeys([default, *routes]):
            row: Row = {"name": f"{name}, {dtype}, {route}"}
            rows.append(row)
            if route in ("auto", chosen.route):
                row["default"] = chosen.kernel
            try:
                found = differentiate(inputs, mask, out_gradient, implementation=route)
                errors = {a: relative_error(found[a], answer[a]) for a in answer}
            except Exception as error:  # a failure becomes a row of the table
                row |= {"error": last_line(error), "verdict": "FAIL"}
                continue
            worst = max(errors, key=lambda a: (np.isnan(errors[a]), errors[a]))
            row |= {
                "worst": worst,
                "difference": errors[worst],
                "errors": errors,
                "verdict": "PASS" if errors[worst] < bound else "FAIL",
                "bound": bound,
            }
    return rows


def relative_error(x: jax.Array, reference: jax.Array) -> float:
    """Returns ‖x − r‖ / ‖r‖, computed in float64."""
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def last_line(error: BaseException) -> str:
    """Returns the type of an error and the beginning of its message."""
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]


class FlaxWithBias(nn.Module):
    """Flax's attention layer with an ``attention_fn`` that adds T5's bias."""

    @nn.compact
    def __call__(self, x: jax.Array, lengths: jax.Array) -> jax.Array:
        """Returns ``[batch, length, d_model]`` for an input of the same shape."""
        h, n = options["heads"], x.shape[1]
        table = self.param("table", nn.initializers.normal(1.0), (h, 32))
        add_bias = functools.partial(
            nn.dot_product_attention, bias=attention.bias_array({"table": table}, x)
        )
        layer = nn.MultiHeadDotProductAttention(
            h,
            qkv_features=h * options["head_dim"],
            use_bias=False,
            dtype=x.dtype,
            attention_fn=add_bias,
        )
        return layer(x, mask=(jnp.arange(n) < lengths[:, None])[:, None, None])


OURS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, int] | None]] = {
    "DotProduct + bias": (lambda n: attention.WithBias(layer(DotProduct())), (2, 4)),
    "Random": (lambda n: layer(Random(max_length=n)), (1, 2)),
    "Random + DotProduct + bias": (
        lambda n: attention.WithBias(layer(Mixture((Random(max_length=n), DotProduct())))),
        (2, 4),
    ),
    "TalkingHeads + bias": (lambda n: attention.WithBias(layer(DotProduct(), TalkingHeads)), None),
    "Gaussian": (lambda n: layer(Gaussian(offsets=(-1, 1))), None),
}
"""Functions that make our sub-layers for a length, and pairs that determine their FLOPs.

A pair has the number of matrix products over all pairs of positions and the number of projections.
If the pair is None, the table shows no rate.
"""


def layer(alignment: Any, kind: Any = Attention) -> nn.Module:
    """Returns an attention layer with an alignment."""
    return kind(options["heads"], options["head_dim"], alignment=alignment)


def make_case(
    spec: Row, x: jax.Array, lengths: jax.Array
) -> tuple[attention.Case, dict[str, float]]:
    """Returns a case that can be timed, and the FLOPs of the case."""
    h, e, d = options["heads"], options["head_dim"], options["d_model"]
    name = spec["name"]
    keys = iter(jax.random.split(jax.random.key(1), 8))
    table = {"table": jax.random.normal(next(keys), (h, 32))} if name.endswith("+ bias") else {}
    work = functools.partial(racing.attention_flops, options | spec)
    if name in OURS:
        make, numbers = OURS[name]
        module = make(spec["length"])

        def apply(params: Any, x: jax.Array, lengths: jax.Array) -> jax.Array:
            """Applies the layer with a padding mask."""
            return module.apply(params, x, mask=Mask(key_lengths=lengths))

        params = jax.jit(lambda k, x: module.init(k, x, mask=Mask()))(next(keys), x)
        flops = work(products=numbers[0], projections=numbers[1]) if numbers else {}
        return attention.Case(name, apply, params), flops
    if name.startswith("Flax"):
        module = FlaxWithBias()
        params = jax.jit(module.init)(next(keys), x, lengths)
        return attention.Case(name, module.apply, params), work(products=2, projections=4)
    function: Any = attention.our_attention
    if name.startswith("jax.nn"):
        function = functools.partial(attention.jax_attention, implementation=name.split()[1])
    if options["part"] == "functions":
        tokens = {a: jax.random.normal(next(keys), x.shape, x.dtype) for a in ("key", "value")}
        return attention.Case(name, function, tokens | table), work(products=2, projections=0)
    params = {a: jax.random.normal(next(keys), (d, h, e)) * d**-0.5 for a in "qkv"}
    params["o"] = jax.random.normal(next(keys), (h, e, d)) * (h * e) ** -0.5
    sub_layer = attention.with_projections(function)
    return attention.Case(name, sub_layer, params | table), work(products=2, projections=4)


def rates() -> Row:
    """Measures the FLOP rate of a large bfloat16 matrix product, and the bandwidth of a copy."""
    side = 256 if options["tiny"] else 8192
    x, y = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    big = jax.random.normal(jax.random.key(2), (4 * side, side))
    product, copy = jax.jit(jnp.matmul), jax.jit(jnp.negative)
    product_seconds = racing.time_calls(lambda: product(x, y), jax.block_until_ready)
    copy_seconds = racing.time_calls(lambda: copy(big), jax.block_until_ready)
    return {
        "product_tflops": 2e-12 * side**3 / product_seconds,
        "copy_gbytes": 2e-9 * big.nbytes / copy_seconds,
        "device": jax.devices()[0].device_kind,
        "versions": f"jax {jax.__version__}, flax {__import__('flax').__version__}",
    }


def prepare(spec: Row) -> tuple[dict[str, Callable[[], Any]], dict[str, float], Row]:
    """Compiles a case.

    Returns:
      The programs as functions without arguments, the FLOPs of the programs, and facts about the
      compilation.
    """
    batch, length = spec["batch"], spec["length"]
    heads = (options["heads"], options["head_dim"])
    trailing = heads if options["part"] == "functions" else (options["d_model"],)
    x = jax.random.normal(jax.random.key(0), (batch, length, *trailing), jnp.bfloat16)
    lengths = length - jnp.arange(batch, dtype=jnp.int32) % 2 * (length // 8)
    case, flops = make_case(spec, x, lengths)
    began = time.perf_counter()
    programs = {
        direction: attention.compile_case(case, x, lengths, backward=direction == "both")
        for direction in ("forward", "both")
    }
    facts = {
        "compile_seconds": time.perf_counter() - began,
        "temporaries_mb": programs["both"].memory_analysis().temp_size_in_bytes / 1e6,
    }
    calls = {k: functools.partial(p, case.params, x, lengths) for k, p in programs.items()}
    return calls, flops, facts


def timed_rows(specs: list[Row]) -> Iterator[Row]:
    """Measures all cases twice. Yields a row for every case, and then a second row for every case.

    The second row of a case contains the means of both measurements.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        prepared = [pool.submit(prepare, spec) for spec in specs]
    first: list[Row] = []
    for i, future in enumerate(prepared * 2):
        try:
            calls, flops, facts = future.result()
            row = facts | racing.timed_row(calls, jax.block_until_ready, flops)
        except Exception as error:  # a failure becomes a row of the table
            row = {"error": last_line(error)}
        first.append(row)
        if i < len(specs):
            yield row
        else:
            yield racing.merge_rows(first[i - len(specs)], row)


if options["part"] == "rates":
    racing.answer({}, iter([rates()]))
elif options["part"] == "correctness":
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        checks = [pool.submit(check, case["name"]) for case in options["cases"]]
        racing.answer({}, ({"rows": c.result()} for c in checks))
else:
    racing.answer({}, timed_rows(options["cases"]))
