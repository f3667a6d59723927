"""Terms and masks that the attention tests share.

All sizes differ, so that no test can pass if two axes are swapped.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from synthesizer_jax.attention import Mask, Term, Terms, attend, low_rank, outer, relative, static
from tests.attention import oracle
from tests.environment import FAST_COMPILE

BATCH, QUERIES, KEYS, HEADS, WIDTH = 3, 7, 11, 2, 5
"""The sizes of cross-attention. Self-attention has KEYS queries and KEYS keys."""

EVERY_TERM = ("static", "relative", "factorized", "dot_product", "dense", "outer")
PARAMETERS = ("static", "relative", "factorized")
ROUTES = {"static": PARAMETERS, "fused": EVERY_TERM, "reference": EVERY_TERM}
"""The kinds of terms that each route takes."""


def normal(name: str, *shape: int, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """Returns random numbers that depend only on the arguments `name` and `shape`."""
    seed = int.from_bytes(name.encode()[:4].ljust(4), "big") % 2**31
    return jnp.asarray(np.random.default_rng(seed + sum(shape)).standard_normal(shape), dtype)


def make_term(name: str, b: int, q: int, k: int, h: int) -> Term:
    n = functools.partial(normal, name)
    match name:
        case "static":
            return static(2 * n(h, q, k))
        # Give the bias more distances than needed, both before and after the query.
        case "relative":
            return relative(n(h, q + k + 10), first=-q - 8)
        case "factorized":
            return low_rank(n(1, q, h, 3), n(1, k, h, 3), token_keys=False, token_queries=False)
        case "dot_product":
            return low_rank(n(b, q, h, 13), n(b, k, h, 13) / 2, token_keys=True)
        case "dense":
            return low_rank(n(b, q, h, 6), n(1, k, h, 6) / 2, token_keys=False)
        # The window of the outer term is longer than the sequence of keys.
        case "outer":
            return outer(n(b, q, h, 4), n(b, q, h, -(-k // 4) + 1))
    raise KeyError(name)


def make_terms(names: tuple[str, ...], b: int, q: int, k: int, h: int = HEADS) -> Terms:
    return tuple(make_term(name, b, q, k, h) for name in names)


def problem(
    names: tuple[str, ...], q: int = KEYS, k: int = KEYS, b: int = BATCH
) -> tuple[Terms, jax.Array, jax.Array]:
    """Returns random terms, random values, and a random cotangent of the output."""
    values, g = normal("values", b, k, HEADS, WIDTH), normal("cotangent", b, q, HEADS, WIDTH)
    return make_terms(names, b, q, k), values, g


def holes(*shape: int) -> jax.Array:
    """Returns random booleans, of which about two thirds are true."""
    return jnp.asarray(np.random.default_rng(sum(shape)).random(shape) < 0.66)


def cross_masks() -> dict[str, Mask]:
    """Returns masks for QUERIES queries and KEYS keys. Some queries may not attend to any key."""
    b, q, k = BATCH, QUERIES, KEYS
    key_lengths, query_lengths = jnp.array([11, 4, 0]), jnp.array([7, 3, 2])
    prefix = jnp.array([0, 3, 11])
    return {
        "none": Mask(),
        "padding": Mask(key_lengths=key_lengths, query_lengths=query_lengths),
        "real queries": Mask(key_lengths=key_lengths),
        "holes": Mask(key_valid=holes(b, k), query_valid=holes(b, q)),
        "window and offset": Mask(causal=True, window=3, query_offset=2),
        "window on both sides": Mask(window=(2, 2), query_offset=1, key_lengths=key_lengths),
        "offset beyond the keys": Mask(causal=True, window=2, query_offset=8),
        "prefix": Mask(causal=True, prefix_lengths=prefix),
        "prefix and padding": Mask(
            causal=True, window=4, prefix_lengths=prefix, key_lengths=key_lengths
        ),
    }


def self_masks() -> dict[str, Mask]:
    """Returns masks for KEYS queries and KEYS keys."""
    b, n = BATCH, KEYS
    lengths = jnp.array([11, 4, 0])
    return {
        "causal": Mask(causal=True).for_self_attention(),
        "causal and padding": Mask(causal=True, key_lengths=lengths).for_self_attention(),
        "causal and holes": Mask(causal=True, key_valid=holes(b, n)).for_self_attention(),
        "causal window and padding": Mask(
            causal=True, window=3, key_lengths=lengths
        ).for_self_attention(),
    }


def packed_masks() -> dict[str, Mask]:
    """Returns masks of packed rows for KEYS queries and KEYS keys.

    The last row has only padding.
    """
    segments = jnp.array(
        [[1, 1, 1, 2, 3, 3, 3, 3, 0, 0, 0], [1, 2, 2, 2, 2, 3, 3, 0, 0, 0, 0], [0] * 11]
    )
    other = jnp.array(
        [[1, 1, 2, 2, 2, 3, 0, 0, 0, 0, 0], [2, 2, 3, 3, 3, 0, 0, 0, 0, 0, 0], [0] * 11]
    )
    sizes = {"segments": 3, "segment_length": 5}
    return {
        "packed": Mask(key_segments=segments, **sizes).for_self_attention(),
        "packed causal": Mask(causal=True, key_segments=segments, **sizes).for_self_attention(),
        "packed cross": Mask(query_segments=segments, key_segments=other, **sizes),
        "packed cross causal": Mask.packed(other, segments, causal=True, **sizes),
        "packed cross window": Mask.packed(other, segments, window=(2, 1), **sizes),
        "packed holes": Mask(
            key_segments=segments, key_valid=holes(BATCH, KEYS), **sizes
        ).for_self_attention(),
    }


STATIC_OPTIONS = ("implementation", "dropout_rate", "soft_cap", "partition")


@functools.partial(jax.jit, static_argnames=STATIC_OPTIONS, compiler_options=FAST_COMPILE)
def run(terms, values, mask, g, implementation="auto", sinks=None, **options):
    """Returns the output and the cotangents of terms and values, and of sinks if there are any."""
    options |= {"mask": mask, "q_length": g.shape[1], "implementation": implementation}
    own = () if sinks is None else (sinks,)

    def call(terms, values, sinks=None):
        """Calls `attend` with the given options, and with the sinks if there are any."""
        return attend(terms, values, sinks=sinks, **options)

    out, back = jax.vjp(call, terms, values, *own)
    return out, *back(g)


def check(
    terms: Terms, values: jax.Array, mask: Mask, g: jax.Array, route: str, bound: float
) -> None:
    """Compares the output and all gradients of a route of `attend` with the NumPy oracle."""
    compare(run(terms, values, mask, g, route), oracle.attention(terms, values, mask, g), bound)


def compare(found, answer: oracle.Answer, bound: float, error=oracle.error) -> None:
    out, dterms, dvalues = found
    assert error(out, answer.out) < bound
    assert error(dvalues, answer.values) < bound
    for term, expected in zip(oracle.gradients_of(dterms), answer.terms, strict=True):
        for name, array in expected.items():
            assert error(term[name], array) < bound, name
