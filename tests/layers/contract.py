"""Defines the checks that all alignments and mixers must pass.

To test a new variant with all checks, add an entry to `tests.layers.cases` and a formula to
`oracles`. The checks share the results of three compiled programs for each case.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from synthesizer_jax import Attention, Mask
from synthesizer_jax.mixers import Mixer
from synthesizer_jax.mixers.attention import AttentionBase
from synthesizer_jax.primitives.parameters import apply_method
from tests.environment import FAST_COMPILE
from tests.layers import oracles

BATCH, LENGTH, D, HEADS, WIDTH, ROOM = 2, 11, 10, 4, 3, 12
LENGTHS = (LENGTH, 6)


def packed_row(*texts: range) -> tuple[list[int], list[int]]:
    """Returns the tokens of a packed row and their segments.

    Tokens are given as indices into the flattened batch. The row is longer than any table of the
    layers.
    """
    index = [i for text in texts for i in text]
    segments = [number for number, text in enumerate(texts, 1) for _ in text]
    padding = [0] * (ROOM + 1 - len(index))
    return index + padding, segments + padding


PACKED = {
    "full": (packed_row(range(11, 17), range(11, 17)), packed_row(range(11))),
    "causal": (packed_row(range(5), range(11, 17)), packed_row(range(11, 14), range(9))),
}
PACKED_QUERIES = packed_row(range(11, 13), range(11, 17)), packed_row(range(8))
# Prompts of five and three tokens, given as indices into the flattened batch. In the first two
# rows, the padding is at the end. In the other rows, it is in front.
PROMPTS = np.array([[0, 1, 2, 3, 4], [11, 12, 13, 0, 0], [0, 1, 2, 3, 4], [0, 0, 11, 12, 13]])
REAL = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], bool)
NEXT = np.array([[5, 6], [14, 15], [5, 6], [14, 15]])


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, its formula, and whether it accepts packed rows.

    Whether a layer accepts packed rows cannot be read from its attributes.
    """

    layer: Mixer
    oracle: Callable[..., np.ndarray]
    packs: bool = True

    @property
    def modes(self) -> tuple[str, ...]:
        """The masks that the layer supports: ``full``, ``causal`` or both."""
        supported = {
            "full": self.layer.supports_bidirectional,
            "causal": self.layer.supports_causal,
        }
        return tuple(mode for mode, is_supported in supported.items() if is_supported)

    @classmethod
    def of(cls, alignment: Any, packs: bool = True, **fields: Any) -> Case:
        """Returns the case for an alignment in an `Attention` layer."""
        layer = Attention(HEADS, WIDTH, alignment=alignment, **fields)
        return cls(layer, oracles.attention, packs)


class Subject:
    """A case with random parameters and tokens, and with the results of compiled programs."""

    def __init__(self, case: Case):
        self.case = case
        self.layer = case.layer
        self.mode = case.modes[-1]
        self.decodes = "causal" in case.modes
        # The parameters of self-attention and of cross-attention are the same.
        self.crosses = isinstance(case.layer, AttentionBase) and case.layer.has_cross_attention
        self.packs = case.packs and case.layer.supports_packing
        self.x = np.random.default_rng(0).normal(size=(BATCH, LENGTH, D))
        options = {"dtype": np.float64, "mask": mask(self.mode), **self.memory(jnp.float32)}
        self.variables = general(self.layer.init, jnp.asarray(self.x, jnp.float32), **options)

    def memory(self, dtype: Any, examples: Any = (0, 1)) -> dict[str, Any]:
        """Returns the arguments of a layer that also reads a memory, for the given examples."""
        if not self.layer.reads_memory:
            return {}
        index = np.asarray(examples)
        lengths = jnp.asarray(np.array(oracles.MEMORY_LENGTHS)[index])
        return {
            "kv": jnp.asarray(oracles.MEMORY[index], dtype),
            "memory_mask": Mask(key_lengths=lengths),
        }

    def packed_memory(self, dtype: Any, index: np.ndarray, segments: np.ndarray) -> dict[str, Any]:
        """Returns the arguments for packed rows, in which each segment reads its own memory."""
        if not self.layer.reads_memory:
            return {}
        rows, own = np.zeros((2, *index.shape), int)  # indices into the flattened memory
        room = oracles.MEMORY.shape[1]
        for row, number in np.ndindex(len(index), segments.max()):
            tokens = index[row][segments[row] == number + 1]
            if tokens.size:
                example = tokens[0] // LENGTH
                count = oracles.MEMORY_LENGTHS[example]
                start = (own[row] > 0).sum()
                rows[row, start : start + count] = example * room + np.arange(count)
                own[row, start : start + count] = number + 1
        packed = Mask.packed(
            jnp.asarray(own), jnp.asarray(segments), segments=2, segment_length=LENGTH
        )
        return {"kv": jnp.asarray(flat(oracles.MEMORY)[rows], dtype), "memory_mask": packed}

    def run(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Compiles a function that computes in float64, without rank promotion."""
        compiled = jax.jit(function, compiler_options=FAST_COMPILE)

        def call(*arguments: Any) -> Any:
            with jax.enable_x64(True), jax.numpy_rank_promotion("raise"):
                return jax.tree.map(np.asarray, compiled(*arguments))

        return call

    @functools.cached_property
    def program(self) -> Callable[..., Any]:
        return self.run(self._forward)

    @functools.cached_property
    def forward(self) -> dict[str, np.ndarray]:
        return self.program(self.variables, self.x)

    def _forward(self, variables: Any, x: jax.Array) -> dict[str, jax.Array]:
        """Returns the layer's outputs for the same tokens, for every way of calling the layer."""
        apply = functools.partial(self.layer.apply, variables)
        memory = self.memory(x.dtype)
        extend = self._extend_with(variables, memory)
        out = {mode: apply(x, mask=mask(mode), **memory) for mode in self.case.modes}
        for mode in self.case.modes if self.packs else ():
            index, segments = np.swapaxes(PACKED[mode], 0, 1)
            packed = Mask.packed(
                jnp.asarray(segments), causal=mode == "causal", segments=2, segment_length=LENGTH
            )
            own = self.packed_memory(x.dtype, index, segments)
            out[f"packed {mode}"] = apply(flat(x)[index], mask=packed, **own)
        if not self.packs:
            longer = jnp.pad(x, ((0, 0), (0, ROOM - LENGTH), (0, 0)), constant_values=9.0)
            out["longer"] = apply(longer, mask=mask(self.mode))
        if self.decodes:
            cache = self._init_cache(variables, x, memory)
            prompt = x[:, :4].at[:, 3].set(jnp.nan)  # three tokens and padding
            first, cache = extend(prompt, cache, mask=Mask(key_lengths=jnp.array([3, 3])))
            first, out["padding of a prompt"] = first[:, :3], first[:, 3]
            # Let the cache hold the same number of tokens for all examples.
            cache = self.layer.with_length(cache, np.int32(3))

            def step(cache, new):
                """Decodes one token."""
                return extend(new[:, None], cache)[::-1]

            _, rest = jax.lax.scan(step, cache, x[:, 3:].swapaxes(0, 1))
            out["steps"] = jnp.concatenate([first, rest[:, :, 0].swapaxes(0, 1)], axis=1)
        if self.crosses and self.packs:
            (queries, own), (index, segments) = (
                np.swapaxes(rows, 0, 1) for rows in (PACKED_QUERIES, PACKED["full"])
            )
            packed = Mask.packed(
                jnp.asarray(segments), jnp.asarray(own), segments=2, segment_length=LENGTH
            )
            out["packed cross"] = apply(flat(x)[queries], flat(x)[index], mask=packed)
        if self.crosses:  # seven queries attend to the tokens themselves
            seen = Mask(key_lengths=jnp.asarray(LENGTHS))
            out["cross"] = apply(x[:, :7], x, mask=seen)
            cache = apply_method(self.layer.init_cache, variables, x, x, max_length=7, mask=seen)
            first, cache = extend(x[:, :4], cache, mask=seen)
            last, _ = extend(x[:, 4:7], cache, mask=seen)
            out["cross steps"] = jnp.concatenate([first, last], axis=1)
        return out

    def _init_cache(self, variables: Any, x: jax.Array, memory: dict[str, Any]) -> Any:
        """Returns an empty cache, or a cache that holds the memory."""
        options = {"max_length": ROOM, "mask": memory.get("memory_mask")}
        return apply_method(self.layer.init_cache, variables, x, memory.get("kv"), **options)

    def _extend_with(self, variables: Any, memory: dict[str, Any]) -> Callable[..., Any]:
        """Returns the method `extend` with variables, and with the mask of the memory if any."""
        memory_mask = memory.get("memory_mask")
        return functools.partial(
            apply_method, self.layer.extend, variables, memory_mask=memory_mask
        )

    def loss(self, variables: Any, x: jax.Array) -> jax.Array:
        y = self.layer.apply(variables, x, mask=mask(self.mode), **self.memory(x.dtype))
        weights = np.random.default_rng(7).normal(size=self.x.shape)
        weights = weights * seen_pairs(self.mode).any(2)[..., None]
        return jnp.sum(y * jnp.asarray(weights, y.dtype))

    @functools.cached_property
    def gradients(self) -> tuple[Any, Any]:
        """Returns the loss, its gradients for parameters and tokens, and finite differences."""
        rest = {k: v for k, v in self.variables.items() if k != "params"}

        def loss(params, x):
            """Returns the loss as a function of the parameters and the tokens."""
            return self.loss({"params": params, **rest}, x)

        leaves, tree = jax.tree.flatten((self.variables.get("params", {}), self.x))

        def both(*at: jax.Array) -> Any:
            def of(*at):
                """Returns the loss as a function of a flat list of arrays."""
                return loss(*tree.unflatten(at))

            directions = [jnp.asarray(d) for d in directions_of(leaves)]

            def moved(steps):
                """Returns the loss after each array has been moved along its direction."""
                return of(*(a + h * d for a, h, d in zip(at, steps, directions, strict=True)))

            size = len(leaves)
            steps = 1e-5 * np.concatenate([np.eye(size), -np.eye(size)])
            losses = jax.lax.map(moved, jnp.asarray(steps))
            return jax.value_and_grad(of, range(size))(*at), (losses[:size] - losses[size:]) / 2e-5

        return self.run(both)(*leaves)

    @functools.cached_property
    def others(self) -> dict[str, Any]:
        """Returns results for ragged prompts and for bfloat16.

        Only layers with distinct structures are tested with these inputs.
        """
        return self.run(self._others)(self.variables, self.x)

    def _others(self, variables: Any, x: jax.Array) -> dict[str, Any]:
        narrow = jax.tree.map(lambda p: p.astype(jnp.float32), variables)
        half = x.astype(jnp.bfloat16)
        own = self.memory(half.dtype)
        out = {"bfloat16": self.layer.apply(narrow, half, mask=mask(self.mode), **own)}
        if self.decodes:
            memory = self.memory(x.dtype, (0, 1, 0, 1))
            extend = self._extend_with(variables, memory)
            prompts = jnp.where(jnp.asarray(REAL)[..., None], flat(x)[PROMPTS], jnp.nan)
            real = Mask(key_valid=jnp.asarray(REAL))
            cache = self._init_cache(variables, prompts, memory)
            out["prompts"], cache = extend(prompts, cache, mask=real)

            def step(cache, new):
                """Decodes one token."""
                return extend(new[:, None], cache)[::-1]

            _, out["next"] = jax.lax.scan(step, cache, flat(x)[NEXT.T])
        return out


def mask(mode: str, lengths: tuple[int, ...] = LENGTHS) -> Mask:
    return Mask(causal=mode == "causal", key_lengths=jnp.array(lengths))


def general(init: Any, *arguments: Any, dtype: Any = np.float32, **options: Any) -> Any:
    """Returns random variables, without zeros and ones that could hide a mistake."""
    rng = np.random.default_rng(1)
    init = functools.partial(init, jax.random.key(0), **options)
    shapes = jax.eval_shape(init, *arguments)
    return jax.tree.map(lambda p: (0.4 * rng.normal(size=p.shape)).astype(dtype), shapes)


def directions_of(leaves: list[np.ndarray]) -> list[np.ndarray]:
    return [np.random.default_rng(i).normal(size=x.shape) for i, x in enumerate(leaves)]


def flat(x: Any) -> Any:
    """Returns the array as ``[batch · length, d]``."""
    return x.reshape(-1, x.shape[-1])


def seen_pairs(mode: str) -> np.ndarray:
    """Returns which keys each query may see, bool ``[b, q, k]``."""
    real = np.arange(LENGTH) < np.array(LENGTHS)[:, None]
    seen = real[:, :, None] & real[:, None, :]
    return seen & np.tri(LENGTH, dtype=bool) if mode == "causal" else seen


def close(found: Any, expected: Any, bound: float, length: int = LENGTH) -> None:
    """Compares the outputs of real tokens among the first `length` positions."""
    for one, other, n in zip(found, expected, LENGTHS, strict=True):
        one, other = (np.asarray(y, np.float64)[: min(n, length)] for y in (one, other))
        np.testing.assert_allclose(one, other, rtol=0, atol=bound * np.abs(other).max())


def equals_the_oracle(s: Subject) -> None:
    """Outputs equal the oracle's outputs.

    This includes padding queries, which see no keys.
    """
    params, constants = (s.variables.get(name, {}) for name in ("params", "constants"))
    for mode in s.case.modes:
        assert s.forward[mode].dtype == np.float64
        expected = s.case.oracle(s.layer, params, constants, s.x, seen_pairs(mode))
        np.testing.assert_allclose(
            s.forward[mode], expected, rtol=0, atol=1e-8 * np.abs(expected).max()
        )


def gradients_are_finite_differences(s: Subject) -> None:
    """Gradients equal finite differences along random directions of parameters and tokens."""
    (_, gradients), slopes = s.gradients
    for gradient, slope, along in zip(gradients, slopes, directions_of(gradients), strict=True):
        assert np.any(gradient != 0)
        np.testing.assert_allclose(np.vdot(gradient, along), slope, rtol=2e-5, atol=1e-7)


def nothing_leaks(s: Subject) -> None:
    """Masked tokens, later tokens and other examples do not change a single bit of the output."""

    def run(rows: int, start: int, change: Callable[[np.ndarray], Any]) -> dict[str, np.ndarray]:
        changed = s.x.copy()
        changed[rows:, start:] = change(changed[rows:, start:])
        return s.program(s.variables, changed)

    equal = np.testing.assert_array_equal
    padding, other = run(1, LENGTHS[1], lambda x: np.nan), run(1, 0, lambda x: -2 * x)
    for mode in s.case.modes:
        found, expected = padding[mode], s.forward[mode]
        for i, n in enumerate(LENGTHS):
            equal(found[i, :n], expected[i, :n], "a padded token has influence")
        equal(other[mode][0], expected[0], "another example has influence")
    if s.decodes:
        later = run(0, 5, lambda x: x + 100)["causal"]
        equal(later[:, :5], s.forward["causal"][:, :5], "a later token has influence")


def steps_are_the_full_pass(s: Subject) -> None:
    """Decoding steps give the same outputs as a full pass.

    The steps follow a prompt whose padding contains NaN. The outputs of the padding also equal the
    outputs of a full pass.
    """
    if s.decodes:
        close(s.forward["steps"], s.forward["causal"], 1e-9)
        padding = s.forward["causal"][1, LENGTHS[1]]
        np.testing.assert_allclose(
            s.forward["padding of a prompt"], [padding] * BATCH, rtol=0, atol=1e-12
        )


def cross_attention_is_self_attention_to_the_same_tokens(s: Subject) -> None:
    """Cross-attention to the layer's own tokens equals self-attention, in one pass and in steps."""
    if s.crosses:
        close(s.forward["cross"], s.forward["full"][:, :7], 1e-9, length=7)
        close(s.forward["cross steps"], s.forward["full"][:, :7], 1e-9, length=7)


def packed_is_separate(s: Subject) -> None:
    """Examples in packed rows give the same outputs as examples in separate rows.

    More padding does not change the outputs, either.
    """
    if not s.packs:
        return close(s.forward["longer"], s.forward[s.mode], 1e-9)
    for mode in s.case.modes:
        index, segments = np.swapaxes(PACKED[mode], 0, 1)
        found, expected = s.forward[f"packed {mode}"], flat(s.forward[mode])[index]
        np.testing.assert_allclose(found[segments > 0], expected[segments > 0], rtol=0, atol=1e-9)
    if s.crosses:  # query and key segments begin at different positions
        index, own = np.swapaxes(PACKED_QUERIES, 0, 1)
        found, expected = s.forward["packed cross"], flat(s.forward["full"])[index]
        np.testing.assert_allclose(found[own > 0], expected[own > 0], rtol=0, atol=1e-9)


def sharded_is_single(s: Subject) -> None:
    """A layer on four devices gives the same outputs as on one device.

    Two devices shard the examples, and two shard the heads, with automatic and with explicit axes.
    """

    def by_heads(path: Any, p: Any) -> P:
        """Shards output projections and tables by heads, as users of a layer would."""
        names = [key.key for key in path]
        divided = names[-2:] == ["out", "kernel"] or names[-1] == "table"
        return P("model") if divided and p.shape[0] == HEADS else P()

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("replicas", "model"), (kind,) * 2, devices=jax.devices()[:4])
        rules = [("batch", "replicas"), ("heads", "model")]
        with jax.set_mesh(mesh), nn.logical_axis_rules(rules), jax.enable_x64(True):
            places = jax.tree.map_with_path(by_heads, s.variables)
            spread = jax.device_put((s.variables, s.x), (places, P("replicas")))
            value, (variables, x) = s.run(jax.value_and_grad(s.loss, (0, 1)))(*spread)
        found = value, (*jax.tree.leaves(variables.get("params", {})), x)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(s.gradients[0]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-7, atol=1e-9)


def ragged_prompts_decode_as_each_alone(s: Subject) -> None:
    """Prompts of different lengths in a batch decode as each prompt does alone.

    Padding is on either side and may have any content. The positions of steps are not given.
    """
    if s.decodes:
        whole = flat(s.forward["causal"])
        steps = s.others["next"][:, :, 0].swapaxes(0, 1)
        prompts = s.others["prompts"]
        np.testing.assert_allclose(prompts[REAL], whole[PROMPTS][REAL], rtol=0, atol=1e-9)
        padding = s.forward["causal"][1, LENGTHS[1]]
        np.testing.assert_allclose(prompts[~REAL], [padding] * (~REAL).sum(), rtol=0, atol=1e-12)
        np.testing.assert_allclose(steps, whole[NEXT], rtol=0, atol=1e-9)


def bfloat16_is_near(s: Subject) -> None:
    assert s.others["bfloat16"].dtype == jnp.bfloat16
    close(s.others["bfloat16"], s.forward[s.mode], 0.05)


def eager_is_compiled_and_nothing_infinite(s: Subject) -> None:
    """Eager execution gives the same outputs as a compiled program.

    No operation returns NaN or infinity, although one example has no tokens.
    """
    variables, x = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), (s.variables, s.x))
    empty = mask(s.mode, (LENGTH, 0))
    with jax.debug_nans(True), jax.debug_infs(True):
        own = s.memory(x.dtype)
        y, back = jax.vjp(lambda v, x: s.layer.apply(v, x, mask=empty, **own), variables, x)
        back(y)
    np.testing.assert_allclose(y[0], s.forward[s.mode][0], rtol=0, atol=1e-4)


def ranks_and_dtypes_are_not_promoted(s: Subject) -> None:
    """Layers work if JAX forbids to promote ranks and dtypes.

    This includes gradients and decoding steps.
    """
    variables = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), s.variables)

    def all_ways(x: jax.Array) -> Any:
        def loss(v, x):
            """Returns the loss in float32."""
            return s.loss(v, x).astype(jnp.float32)

        out = s._forward(variables, x)
        return out, jax.grad(loss, argnums=(0, 1))(variables, x), s._others(variables, x)

    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(all_ways, jax.ShapeDtypeStruct(s.x.shape, jnp.bfloat16))


CONTRACT = (
    *(equals_the_oracle, gradients_are_finite_differences, nothing_leaks, steps_are_the_full_pass),
    *(cross_attention_is_self_attention_to_the_same_tokens, packed_is_separate),
)
"""The checks of all cases."""

FURTHER = (
    *(sharded_is_single, ragged_prompts_decode_as_each_alone, bfloat16_is_near),
    ranks_and_dtypes_are_not_promoted,
)
"""The checks of distinct structures. Their results do not depend on options of an alignment."""
